"""A model of a worker that validates a checkpoint: it reads the state, takes its time, and returns a score.

Like training workers (`worker`) it speaks to its agent, which is the real one, through a `Connection`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.sim.worker import Connection

from holdfast.agent.spawner import Parent
from holdfast.checkpoint.catalog import Catalog
from holdfast.core import events as e
from holdfast.core.records import WorkerFailure
from holdfast.errors import CheckpointError, HoldfastError
from holdfast.wire.messages import ToWorker
from holdfast.worker.job import Assignment
from holdfast.worker.return_value import encode_value

if TYPE_CHECKING:
    from tests.sim.node import Node

__all__ = ["Validator"]

_WORK_S = 0.5
_RAISES = 0.1


class Validator:
    """The only worker of one validation."""

    def __init__(self, node: Node, parent: Parent, assignment: Assignment, connection: Connection) -> None:
        self.node, self.parent, self.assignment, self.connection = node, parent, assignment, connection
        self.run = node.sim.run_at(assignment.storage)
        self.generation, self.rank = assignment.generation, assignment.rank
        self.alive, self.killed = True, False
        connection.worker = self

    async def work(self) -> None:
        """Score the checkpoint, or fail."""
        try:
            score = await self._score()
        except CheckpointError as error:
            self._fail(str(error))
            return
        await asyncio.sleep(self.node.sim.delay_s(_WORK_S))
        if not self.alive:
            return
        if self.node.sim.happens(_RAISES):
            self._fail("raised ValueError: no score")
            return
        value = encode_value({"score": score})
        self.connection.arrive(e.WorkerFinished(generation=self.generation, rank=self.rank, value=value))
        self._exit(0)

    async def _score(self) -> int:
        """What the state of the checkpoint sums up to; storage that does not answer is asked again."""
        store, name = self.node.store(self.assignment.storage), self.assignment.checkpoint
        assert name is not None

        def read() -> int:
            manifest = Catalog(store).get(name)
            first = next(entry.path for entry in manifest.files if entry.path.startswith("rank"))
            return self.node.read_state(store.get(f"{name}/{first}"))[1]

        while True:
            try:
                return await asyncio.to_thread(read)
            except CheckpointError:
                raise
            except HoldfastError:
                await asyncio.sleep(0.2)

    def receive(self, message: ToWorker) -> None:
        """Nothing is told that matters here."""

    def _fail(self, cause: str) -> None:
        if self.alive:
            failure = WorkerFailure(rank=self.rank, cause=cause, error_type="ValueError", error=cause)
            self.connection.arrive(e.WorkerExited(generation=self.generation, failure=failure))
            self._exit(1 << 8)

    def _exit(self, status: int) -> None:
        self.alive = False
        self.node.after(0.002, self.node.reap_validator, self, status)
