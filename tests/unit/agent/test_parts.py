"""Parts that are committed, unreported or abandoned, with real uploads into a directory."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from holdfast.agent.buffers import Buffers, SnapshotMemory
from holdfast.agent.parts import Parts
from holdfast.core.checkpoint_types import Draft, ExistingPart, Report, StagedPart
from holdfast.core.events import Ticket
from holdfast.core.failure_kind import FailureKind
from holdfast.errors import OutOfSpace, Unavailable
from holdfast.storage.posix.store import PosixStore
from holdfast.wire.messages import Upload, Uploaded, UploadFailed, WorkerReport

DRAFT = Draft(name="checkpoint_000000", index=0, epoch=1, token="t")
ORDER = Upload(ticket=Ticket(1, 1), rank=0, draft=DRAFT)


def _part(staging: Path, number: int = 1) -> WorkerReport:
    directory = staging / f"n{number}"
    directory.mkdir(parents=True)
    (directory / "model.pt").write_bytes(b"weights")
    return WorkerReport(report=Report(number=number, at=0.0, checkpoint=True), part=StagedPart(str(directory)))


def test_only_committed_abandoned_and_unreported_parts_are_removed(tmp_path: Path) -> None:
    executor = ThreadPoolExecutor(2)
    parts = Parts(executor, Buffers(1, SnapshotMemory()))
    parts.add(1, 0, _part(tmp_path, 1))
    parts.add(1, 0, _part(tmp_path, 2))
    _part(tmp_path, 3)  # its worker was killed before it could report it
    parts.remove_unreported(tmp_path)
    parts.release(Ticket(1, 1), None)
    parts.release(Ticket(9, 2), None)
    executor.shutdown()
    assert [path.name for path in tmp_path.iterdir()] == ["n2"]


def test_an_upload_can_be_repeated_until_the_commit(tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "run")

    async def test() -> None:
        with ThreadPoolExecutor(2) as executor:
            parts = Parts(executor, Buffers(1, SnapshotMemory()))
            parts.add(1, 0, _part(tmp_path / "staging"))
            first = await parts.upload(ORDER, lambda: store, 2)
            second = await parts.upload(ORDER, lambda: store, 2)
            assert isinstance(first, Uploaded) and isinstance(second, Uploaded)
            assert first.files == second.files
            parts.release(Ticket(1, 1), None)
            assert isinstance(await parts.upload(ORDER, lambda: store, 2), UploadFailed)

    asyncio.run(test())


def test_files_already_in_storage_are_hashed_but_not_uploaded(tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "run")
    store.put(f"{ORDER.draft.name}/model.pt", b"weights")

    async def test() -> None:
        with ThreadPoolExecutor(2) as executor:
            parts = Parts(executor, Buffers(1, SnapshotMemory()))
            report = Report(number=1, at=0.0, checkpoint=True)
            parts.add(1, 0, WorkerReport(report=report, part=ExistingPart(ORDER.draft.name)))
            answer = await parts.upload(ORDER, lambda: store, 2)
            assert isinstance(answer, Uploaded)
            assert [(entry.path, entry.size_bytes) for entry in answer.files] == [("model.pt", 7)]

    asyncio.run(test())


def test_upload_errors_that_may_pass_are_transient(tmp_path: Path) -> None:
    async def test() -> None:
        with ThreadPoolExecutor(2) as executor:
            parts = Parts(executor, Buffers(1, SnapshotMemory()))
            parts.add(1, 0, _part(tmp_path))
            for error, transient in ((Unavailable("busy"), True), (OutOfSpace("full"), True), (OSError("odd"), False)):

                def refuse(error: Exception = error) -> PosixStore:
                    raise error

                answer = await parts.upload(ORDER, refuse, 1)
                assert isinstance(answer, UploadFailed)
                assert (answer.kind, answer.kind.is_transient) == (FailureKind.of(error), transient)

    asyncio.run(test())
