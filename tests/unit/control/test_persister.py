"""The persister against a real store and lease; agents that answer when the test says so."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from holdfast.control.agent_link import AgentLink
from holdfast.control.blocking_calls import BlockingCalls
from holdfast.control.lease import acquire
from holdfast.control.persister import Persister
from holdfast.core.commands import PersistCheckpoint
from holdfast.core.events import CheckpointFailed, Ticket
from holdfast.core.failure_kind import FailureKind
from holdfast.storage.posix.store import PosixStore
from holdfast.wire.messages import Upload, UploadFailed
from holdfast.wire.resumable_channel import ResumableChannel

TICKET = Ticket(generation=1, number=1)


class _Agents:
    """What the persister uses of `RunAgents`."""

    def __init__(self, *names: str) -> None:
        self.links = {name: AgentLink(ResumableChannel(name, name)) for name in names}
        self.on_upload: Any = None
        self.sent: asyncio.Queue[Upload] = asyncio.Queue()

    def send(self, agents: list[str], message: Upload) -> None:
        self.sent.put_nowait(message)


def test_after_a_part_has_failed_nothing_waits_for_the_others_or_asks_for_them_again(tmp_path: Path) -> None:
    async def test() -> None:
        before = asyncio.all_tasks()
        store = PosixStore(tmp_path / "run")
        lease = acquire(store)
        agents = _Agents("a", "b")
        persister = Persister(store, lease, agents, 300.0, BlockingCalls())  # type: ignore[arg-type]
        command = PersistCheckpoint(
            ticket=TICKET,
            parts=((0, "a"), (1, "b")),
            name=None,
            adopt=False,
            at_least_index=0,
            world_size=2,
            iteration=1,
            metrics={},
        )
        persisting = asyncio.ensure_future(persister.persist(command))
        assert {(await agents.sent.get()).rank, (await agents.sent.get()).rank} == {0, 1}
        agents.on_upload(UploadFailed(ticket=TICKET, rank=0, kind=FailureKind.DUPLICATE_FILE, error="no"))
        outcome = await persisting
        assert isinstance(outcome, CheckpointFailed) and outcome.error == "no"
        assert asyncio.all_tasks() == before
        agents.on_upload(UploadFailed(ticket=TICKET, rank=1, kind=FailureKind.UNAVAILABLE, error="busy"))
        assert agents.sent.empty()
        lease.release()

    asyncio.run(asyncio.wait_for(test(), 60))
