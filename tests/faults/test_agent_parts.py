"""Parts of checkpoints in an agent: staged by workers, uploaded on request, removed after the commit."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

from tests.faults.agent_harness import AgentHarness, job_of, run_async, started_agent, wait_gone

from holdfast import train
from holdfast.core.checkpoint_types import Draft
from holdfast.core.commands import AnnounceCheckpoint
from holdfast.core.events import Ticket
from holdfast.core.failure_kind import FailureKind
from holdfast.wire.messages import Shutdown, Upload, Uploaded, UploadFailed

DRAFT = Draft(name="checkpoint_000000", index=0, epoch=1, token="t")


def _report_checkpoints() -> None:
    rank = os.environ["RANK"]
    for step in (1, 2):
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, f"rank_{rank}.txt").write_text(f"step {step}")
            train.report({"step": step}, checkpoint=train.Checkpoint(directory))
    Path("artifact.txt").write_text("made on the way")
    print("both reported")
    signal.pause()


def _upload(number: int, rank: int) -> Upload:
    return Upload(ticket=Ticket(1, number), rank=rank, draft=DRAFT)


def _staged(harness: AgentHarness) -> list[str]:
    return sorted(path.name for path in harness.cache.glob("agents/a1/runs/*/staging/*/*"))


def test_a_part_outlives_its_worker_and_is_removed_after_the_commit(tmp_path: Path) -> None:
    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            await harness.prepare(job_of(_report_checkpoints))
            pids = await harness.started(ranks=2)
            await harness.expect_report(2)
            os.kill(pids[0], signal.SIGKILL)
            await harness.exited()
            await harness.stop()
            assert _staged(harness) == ["g1-r0-n1", "g1-r1-n1"]
            for rank in (0, 1):
                harness.send(_upload(1, rank))
                stored = await harness.expect(Uploaded, rank=rank)
                assert [entry.path for entry in stored.files] == [f"rank_{rank}.txt"]
                assert stored.uploaded_bytes == len("step 1")
            assert (harness.storage / DRAFT.name / "rank_1.txt").read_text() == "step 1"
            harness.send(AnnounceCheckpoint(ticket=Ticket(1, 1), name=DRAFT.name))
            harness.send(Shutdown())
            await harness.agent_ended()
            assert harness.leftovers() == []

    run_async(test)


def test_a_worker_waits_for_its_first_checkpoint_before_it_hands_over_a_second(tmp_path: Path) -> None:
    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            await harness.prepare(job_of(_report_checkpoints), sync_artifacts=True)
            await harness.started()
            await harness.expect_report(1)
            assert len(harness.reports) == 1
            harness.send(AnnounceCheckpoint(ticket=Ticket(1, 1), name=None))
            await harness.expect_report(2)
            await harness.expect_line("both reported")
            harness.send(_upload(2, 0))
            await harness.expect(Uploaded, ticket=Ticket(1, 2))
            harness.send(AnnounceCheckpoint(ticket=Ticket(1, 2), name=DRAFT.name))
            await harness.stop()
            harness.send(Shutdown())
            await harness.agent_ended()
            assert (harness.storage / "artifact.txt").read_text() == "made on the way"

    run_async(test)


def test_uploading_an_unknown_part_or_to_refusing_storage_fails(tmp_path: Path) -> None:
    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            harness.storage.parent.mkdir(parents=True)
            harness.storage.write_text("a file where the run's directory should be")
            await harness.prepare(job_of(_report_checkpoints))
            pids = await harness.started()
            await harness.expect_report(1)
            harness.send(_upload(7, 0))
            missing = await harness.expect(UploadFailed, ticket=Ticket(1, 7))
            assert (missing.kind, missing.kind.is_transient) == (FailureKind.NOT_FOUND, False)
            harness.send(_upload(1, 0))
            refused = await harness.expect(UploadFailed, ticket=Ticket(1, 1))
            assert not refused.kind.is_transient
            assert str(harness.storage) in refused.error
            os.kill(pids[0], 0)
            await harness.stop()
            await wait_gone(*pids.values())

    run_async(test)
