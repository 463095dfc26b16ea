"""The worker group: the workers of one generation on this node, from `StartWorkers` to `WorkersStopped`.

Reports are gathered for a moment and sent together, at once when a checkpoint is among them. While the group is being
stopped only reports and failures are passed on, and nothing once `stop` has returned; the parts that its workers
reported stay (`parts`).
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import msgspec

from holdfast.agent.output import Forwarder, RankLog
from holdfast.agent.parts import Parts
from holdfast.agent.platform import Platform
from holdfast.agent.spawner import Spawner
from holdfast.agent.worker_handle import WorkerHandle
from holdfast.core.checkpoint_types import Report
from holdfast.core.events import RankReported, WorkerExited, WorkerFinished, WorkersStarted
from holdfast.core.records import WorkerFailure
from holdfast.wire.messages import (
    AgentMessage,
    BuffersReserved,
    Imported,
    Note,
    ReserveBuffers,
    Stacks,
    ToWorker,
    WorkerMessage,
    WorkerReport,
)
from holdfast.worker.job import Assignment

__all__ = ["WorkerGroup"]

_GATHER_S = 0.002


class WorkerGroup:
    """The workers of one generation on this node."""

    def __init__(
        self,
        number: int,
        node: tuple[str, str],
        platform: Platform,
        spawner: Spawner,
        parts: Parts,
        send: Callable[[AgentMessage], None],
        backlog_bytes: Callable[[], int],
        open_log: Callable[[int, Forwarder], RankLog],
    ) -> None:
        """`number` is the generation's, `node` the agent's name and its host. `open_log` gives a rank's log."""
        self.number = number
        self._agent, self._host = node
        self.stopping = False
        self._platform = platform
        self._spawner = spawner
        self._parts = parts
        self._send = send
        self._forwarder = Forwarder(number, send, backlog_bytes)
        self._workers: dict[int, WorkerHandle] = {}
        self._slots: dict[int, int] = {}
        """The slot of each rank."""
        self._open_log = open_log
        self._reports: dict[int, list[Report]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._oom_kills = platform.oom_kills()
        self._pids: dict[int, int] = {}
        """Of the workers that have started."""

    def spawn(self, assignment: Assignment, listen_fd: int | None) -> None:
        """Start one worker; `listen_fd` is the worker's from then on."""
        log = self._open_log(assignment.rank, self._forwarder)
        worker = self._platform.open_worker(assignment, log, listen_fd, self._received)
        self._workers[assignment.rank] = worker
        self._slots[assignment.rank] = assignment.local_rank
        self._spawner.spawn(assignment, worker.worker_fds)

    # ------------------------------------------------------------------ processes

    def worker_started(self, rank: int, pid: int) -> None:
        self._workers[rank].pid = self._pids[rank] = pid
        if len(self._pids) == len(self._workers) and not self.stopping:
            self._send(WorkersStarted(generation=self.number, agent=self._agent, pids=self._pids))

    def worker_died(self, rank: int, status: int, *, killed: bool) -> None:
        worker = self._workers[rank]
        is_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        out_of_memory = is_killed and self._platform.oom_kills() > self._oom_kills
        ended = worker.ended(status, out_of_memory=out_of_memory)
        self.flush()
        if killed:
            return
        if isinstance(ended, WorkerFinished):
            self._send(ended)
        elif ended is not None:
            self._send_failure(worker, ended)

    @property
    def has_workers(self) -> bool:
        """Whether any was begun."""
        return bool(self._workers)

    def workers_lost(self, why: str) -> None:
        for worker in self._workers.values():
            if worker.alive and (failure := worker.lost(why)) is not None:
                self._send_failure(worker, failure)

    def _send_failure(self, worker: WorkerHandle, failure: WorkerFailure) -> None:
        """Also while the group is being stopped: the root cause is often the last failure to be known."""
        self.flush()
        self._forwarder.flush()
        whole = msgspec.structs.replace(failure, agent=self._agent, host=self._host, last_lines=worker.last_lines)
        self._send(WorkerExited(generation=self.number, failure=whole))

    async def stop(self, dump_stacks: bool) -> None:
        """Returns when nothing of this generation is left."""
        if dump_stacks and not self.stopping:
            await self._dump_stacks()
        self.flush()
        self.stopping = True
        await self._spawner.clear(self.number)
        self.release()

    def release(self) -> None:
        """Its processes are gone: read what is left in their pipes, and close everything."""
        self.stopping = True
        for worker in self._workers.values():
            worker.drain()
        self.flush()
        self._forwarder.flush()
        for worker in self._workers.values():
            worker.close_log()

    async def _dump_stacks(self) -> None:
        alive = [worker for worker in self._workers.values() if worker.alive]
        texts = await asyncio.gather(*(worker.dump_stacks() for worker in alive))
        for worker, text in zip(alive, texts, strict=True):
            if text:
                self._send(Stacks(generation=self.number, rank=worker.rank, text=text))

    # ------------------------------------------------------------------ messages

    def broadcast(self, message: ToWorker) -> None:
        for worker in self._workers.values():
            worker.send(message)

    def pause(self) -> None:
        """Stop reading workers' messages until `resume`, because the controller lags: `report` then blocks."""
        for worker in self._workers.values():
            worker.pause()

    def resume(self) -> None:
        for worker in self._workers.values():
            worker.resume()

    def _received(self, worker: WorkerHandle, message: WorkerMessage) -> None:
        if isinstance(message, Imported):
            self._spawner.add_imports(message.modules)
        elif isinstance(message, Note):
            worker.tell(message.text)
        elif isinstance(message, ReserveBuffers):
            count = self._parts.reserve_buffers(self._slots[worker.rank], message.size_bytes, message.count)
            worker.send(BuffersReserved(count=count))
        elif isinstance(message, WorkerExited):
            self._send_failure(worker, message.failure)
        elif isinstance(message, WorkerReport):  # one that has returned is kept, whatever happened meanwhile
            self._parts.add(self.number, worker.rank, message)
            self._reports.setdefault(worker.rank, []).append(message.report)
            if message.report.checkpoint:
                self.flush()
            elif self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(_GATHER_S, self.flush)
        elif not self.stopping:
            self.flush()
            self._send(message)

    def flush(self) -> None:
        """Send the reports that were gathered."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        gathered, self._reports = self._reports, {}
        for rank, reports in gathered.items():
            self._send(RankReported(generation=self.number, rank=rank, reports=tuple(reports)))
