"""The persister against a real store and lease; agents that answer when the test says so."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from holdfast.checkpoint.upload import reference_existing
from holdfast.control.agent_link import AgentLink
from holdfast.control.blocking_calls import BlockingCalls
from holdfast.control.lease import acquire
from holdfast.control.persister import Persister
from holdfast.core.commands import PersistCheckpoint
from holdfast.core.events import CheckpointFailed, CheckpointStored, Ticket
from holdfast.core.failure_kind import FailureKind
from holdfast.storage.posix.store import PosixStore
from holdfast.wire.messages import Upload, Uploaded, UploadFailed
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


def _command(*parts: tuple[int, str]) -> PersistCheckpoint:
    return PersistCheckpoint(
        ticket=TICKET,
        parts=parts,
        name=None,
        adopt=False,
        at_least_index=0,
        world_size=2,
        iteration=1,
        metrics={},
    )


def test_after_a_part_has_failed_nothing_waits_for_the_others_or_asks_for_them_again(tmp_path: Path) -> None:
    async def test() -> None:
        before = asyncio.all_tasks()
        store = PosixStore(tmp_path / "run")
        lease = acquire(store)
        agents = _Agents("a", "b")
        persister = Persister(store, lease, agents, 300.0, BlockingCalls())  # type: ignore[arg-type]
        persisting = asyncio.ensure_future(persister.persist(_command((0, "a"), (1, "b"))))
        orders = [await agents.sent.get() for _ in range(2)]
        assert {order.rank for order in orders} == {0, 1}
        token = orders[0].draft.token
        agents.on_upload(UploadFailed(ticket=TICKET, rank=0, token=token, kind=FailureKind.DUPLICATE_FILE, error="no"))
        outcome = await persisting
        assert isinstance(outcome, CheckpointFailed) and outcome.error == "no"
        assert asyncio.all_tasks() == before
        agents.on_upload(UploadFailed(ticket=TICKET, rank=1, token=token, kind=FailureKind.UNAVAILABLE, error="busy"))
        assert agents.sent.empty()
        lease.release()

    asyncio.run(asyncio.wait_for(test(), 60))


def test_what_was_uploaded_to_a_draft_that_was_given_up_is_not_committed_in_another(tmp_path: Path) -> None:
    """An agent that is lost with a part that is not needed makes the checkpoint be tried again, while the other agent
    still uploads to the first draft."""

    async def test() -> None:
        store = PosixStore(tmp_path / "run")
        lease = acquire(store)
        agents = _Agents("a", "b")
        persister = Persister(store, lease, agents, 300.0, BlockingCalls())  # type: ignore[arg-type]
        first = asyncio.ensure_future(persister.persist(_command((0, "a"), (1, "b"))))
        (given_up,) = [one for one in [await agents.sent.get(), await agents.sent.get()] if one.rank == 0]
        agents.links.pop("b").gone.set()
        outcome = await first
        assert isinstance(outcome, CheckpointFailed) and not outcome.fatal
        second = asyncio.ensure_future(persister.persist(_command((0, "a"))))
        order = await agents.sent.get()
        agents.on_upload(Uploaded(ticket=TICKET, rank=0, token=given_up.draft.token, files=[], uploaded_bytes=1))
        agents.on_upload(Uploaded(ticket=TICKET, rank=0, token=order.draft.token, files=[], uploaded_bytes=2))
        stored = await second
        assert isinstance(stored, CheckpointStored) and stored.uploaded_bytes == 2
        lease.release()

    asyncio.run(asyncio.wait_for(test(), 60))


def test_files_that_a_user_has_stored_stay_when_their_checkpoint_is_tried_again(tmp_path: Path) -> None:
    """One of the agents that look at them is lost, and the checkpoint needs only what the other gives."""

    async def test() -> None:
        store = PosixStore(tmp_path / "run")
        lease = acquire(store)
        agents = _Agents("a", "b")
        persister = Persister(store, lease, agents, 300.0, BlockingCalls())  # type: ignore[arg-type]
        store.put("mine/model", b"weights")

        def command(*parts: tuple[int, str]) -> PersistCheckpoint:
            return msgspec.structs.replace(_command(*parts), name="mine", adopt=True)

        first = asyncio.ensure_future(persister.persist(command((0, "a"), (1, "b"))))
        for _ in range(2):
            await agents.sent.get()
        agents.links.pop("b").gone.set()
        outcome = await first
        assert isinstance(outcome, CheckpointFailed) and not outcome.fatal
        second = asyncio.ensure_future(persister.persist(command((0, "a"))))
        token = (await agents.sent.get()).draft.token
        files = reference_existing(store, "mine")
        agents.on_upload(Uploaded(ticket=TICKET, rank=0, token=token, files=files, uploaded_bytes=0))
        stored = await second
        assert isinstance(stored, CheckpointStored) and stored.stored.size_bytes == len(b"weights")
        lease.release()

    asyncio.run(asyncio.wait_for(test(), 60))
