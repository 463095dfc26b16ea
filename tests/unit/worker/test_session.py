"""The messages of `train.report` and related functions to the agent, and when they wait."""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.unit.worker.fake_agent import FakeAgent

from holdfast import train
from holdfast.checkpoint.commit import commit_directory
from holdfast.checkpoint.handle import Checkpoint
from holdfast.core.checkpoint_types import ExistingPart, Report, StagedPart
from holdfast.core.commands import AnnounceCheckpoint, HoldReports
from holdfast.core.events import Ticket, WorkerWaited
from holdfast.errors import CheckpointError, ConfigError, WireError
from holdfast.storage.locate import open_store
from holdfast.train import CheckpointUploadMode, ReportedCheckpointStatus
from holdfast.wire.messages import Collect, Collected, WorkerReport
from holdfast.worker import session as sessions


def directory(path: Path, **files: str) -> Checkpoint:
    path.mkdir(parents=True)
    for name, text in files.items():
        (path / name).write_text(text)
    return Checkpoint.from_directory(path)


def in_thread(action: Any, *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=action, args=arguments, daemon=True)
    thread.start()
    return thread


def test_metrics_are_sent_at_once_with_a_sequence_number() -> None:
    with FakeAgent() as agent:
        began = time.time()
        agent.session.report({"loss": 0.5})
        agent.session.report({"loss": 0.25, "nested": {"a": [1]}})
        first, second = agent.next().report, agent.next().report
    assert (first.number, first.metrics, first.checkpoint) == (1, {"loss": 0.5}, False)
    assert (second.number, second.metrics) == (2, {"loss": 0.25, "nested": {"a": [1]}})
    assert began <= first.at <= second.at <= time.time()


def test_other_ranks_validate_but_do_not_send_their_metrics() -> None:
    with FakeAgent(rank=1, world_size=2) as agent:
        agent.session.report({"loss": 0.5})
        assert agent.next().report.metrics is None
        with pytest.raises(TypeError, match=r"metrics\['loss'\]"):
            agent.session.report({"loss": object()})


@pytest.mark.parametrize("rank", [0, 1])
def test_a_state_is_known_to_be_whole_and_comes_with_metrics(rank: int, tmp_path: Path) -> None:
    with FakeAgent(rank=rank, world_size=2, staging_dir=str(tmp_path / "staging")) as agent:
        agent.session.report({"loss": 1}, checkpoint=Checkpoint.from_state({"step": 1}))
        report = agent.next().report
    assert (report.needed_ranks, report.metrics) == ((rank,), {"loss": 1})


def test_a_directory_is_known_to_be_whole_only_if_the_user_says_so(tmp_path: Path) -> None:
    checkpoint = directory(tmp_path / "mine", model="weights")
    with FakeAgent(rank=1, world_size=2, staging_dir=str(tmp_path / "staging")) as agent:
        agent.session.report({}, checkpoint=checkpoint)
        assert agent.next().report.needed_ranks is None
        agent.announce(1, "checkpoint_000000")
        agent.session.report({}, checkpoint=checkpoint, complete=True)
        assert agent.next().report.needed_ranks == (1,)
        with pytest.raises(ConfigError, match="complete=True"):
            agent.session.report({}, complete=True)


def test_a_refused_report_is_not_counted() -> None:
    with FakeAgent() as agent:
        with pytest.raises(TypeError):
            agent.session.report({"loss": object()})
        agent.session.report({"loss": 1})
        assert agent.next().report.number == 1


def test_a_directory_is_staged_before_report_returns(tmp_path: Path) -> None:
    with FakeAgent(staging_dir=str(tmp_path / "staging")) as agent:
        checkpoint = directory(tmp_path / "mine", **{"model.pt": "weights"})
        agent.session.report({"loss": 1.0}, checkpoint=checkpoint, checkpoint_dir_name="best")
        (tmp_path / "mine" / "model.pt").write_text("next step")
        message = agent.next()
    assert message.part.directory == str(tmp_path / "staging" / "g3-r0-n1")
    assert Path(message.part.directory, "model.pt").read_text() == "weights"
    assert isinstance(message.part, StagedPart)
    report: Report = message.report
    assert report.checkpoint and report.checkpoint_dir_name == "best" and report.stall_s > 0


def test_the_next_checkpoint_waits_for_the_last_one(tmp_path: Path) -> None:
    with FakeAgent(staging_dir=str(tmp_path / "staging")) as agent:
        checkpoint = directory(tmp_path / "mine", model="weights")
        agent.session.report({}, checkpoint=checkpoint)
        agent.next()
        second = in_thread(agent.session.report, {}, checkpoint)
        assert agent.next(WorkerWaited) == WorkerWaited(generation=3, rank=0, waiting=True)
        assert agent.heard.empty()  # Nothing is staged or reported before the first is settled.
        assert not (tmp_path / "staging" / "g3-r0-n2").exists()
        agent.announce(1, "checkpoint_000000")
        assert agent.next(WorkerWaited) == WorkerWaited(generation=3, rank=0, waiting=False)
        assert agent.next().report.number == 2
        second.join(60)
        assert not second.is_alive()


def test_metric_reports_never_wait(tmp_path: Path) -> None:
    with FakeAgent(staging_dir=str(tmp_path / "staging")) as agent:
        agent.session.report({}, checkpoint=directory(tmp_path / "mine", model="weights"))
        for _ in range(100):
            agent.session.report({"loss": 1.0})
        numbers = [agent.next().report.number for _ in range(101)]
    assert numbers == list(range(1, 102))


def test_report_does_not_wait_if_the_last_checkpoint_is_committed(tmp_path: Path) -> None:
    with FakeAgent(announce_as="checkpoint_000000", staging_dir=str(tmp_path / "staging")) as agent:
        checkpoint = directory(tmp_path / "mine", model="weights")
        agent.session.report({}, checkpoint=checkpoint)
        agent.session.report({}, checkpoint=checkpoint, checkpoint_upload_mode=CheckpointUploadMode.SYNC)
        heard = [agent.next(WorkerReport), agent.next(WorkerReport)]
    assert [message.report.number for message in heard] == [1, 2]


def test_sync_upload_returns_after_the_commit(tmp_path: Path) -> None:
    with FakeAgent(staging_dir=str(tmp_path / "staging"), storage=str(tmp_path / "run")) as agent:
        checkpoint = directory(tmp_path / "mine", model="weights")
        done = in_thread(agent.session.report, {}, checkpoint, None, CheckpointUploadMode.SYNC)
        assert agent.next(WorkerReport).report.waits
        assert done.is_alive()
        agent.announce(1, "checkpoint_000000")
        done.join(60)
        assert not done.is_alive()
        assert (tmp_path / "mine").is_dir()
        agent.session.report({})
        assert not agent.next(WorkerReport).report.waits, "no message but the reports"


def test_sync_upload_raises_when_the_checkpoint_was_given_up(tmp_path: Path) -> None:
    with (
        FakeAgent(announces=True, staging_dir=str(tmp_path / "staging")) as agent,
        pytest.raises(CheckpointError, match="report 1 was not committed"),
    ):
        checkpoint = directory(tmp_path / "mine", model="weights")
        agent.session.report({}, checkpoint=checkpoint, checkpoint_upload_mode=CheckpointUploadMode.SYNC)


@pytest.mark.parametrize(
    ("mode", "delete", "gone"),
    [
        (None, None, False),
        (None, True, True),
        (CheckpointUploadMode.ASYNC, None, True),
        (CheckpointUploadMode.ASYNC, False, False),
        (CheckpointUploadMode.SYNC, None, False),
        (CheckpointUploadMode.SYNC, True, True),
    ],
)
def test_delete_local_checkpoint_decides_about_the_directory(
    tmp_path: Path, mode: CheckpointUploadMode | None, delete: bool | None, gone: bool
) -> None:
    with FakeAgent(announce_as="checkpoint_000000", staging_dir=str(tmp_path / "staging")) as agent:
        checkpoint = directory(tmp_path / "mine", model="weights")
        agent.session.report(
            {},
            checkpoint=checkpoint,
            checkpoint_upload_mode=mode,
            delete_local_checkpoint_after_upload=delete,
        )
        assert Path(agent.next().part.directory, "model").read_text() == "weights"
    assert (tmp_path / "mine").exists() is not gone


def test_no_upload_accepts_only_a_directory_directly_in_the_run(tmp_path: Path) -> None:
    with FakeAgent(storage=str(tmp_path / "run"), announce_as="mine") as agent:
        checkpoint = directory(tmp_path / "run" / "mine", model="weights")
        mode = CheckpointUploadMode.NO_UPLOAD
        agent.session.report({}, checkpoint=checkpoint, checkpoint_upload_mode=mode)
        message = agent.next()
        assert (message.part, message.report.checkpoint) == (ExistingPart("mine"), True)
        elsewhere = directory(tmp_path / "run" / "deeper" / "mine", model="weights")
        with pytest.raises(ConfigError, match="must lie directly in the run's directory"):
            agent.session.report({}, checkpoint=elsewhere, checkpoint_upload_mode=mode)


def test_a_committed_checkpoint_may_be_reported_again(tmp_path: Path) -> None:
    store = open_store(tmp_path / "run")
    directory(tmp_path / "mine", model="weights")
    manifest = commit_directory(store, tmp_path / "mine")
    with FakeAgent(storage=str(tmp_path / "run"), staging_dir=str(tmp_path / "staging")) as agent:
        own = Checkpoint(tmp_path / "run" / manifest.name)
        agent.session.report({}, checkpoint=own, delete_local_checkpoint_after_upload=True)
        staged = Path(agent.next().part.directory)
    assert sorted(path.name for path in staged.iterdir()) == ["model"]
    assert (tmp_path / "run" / manifest.name / "model").exists()


def test_get_checkpoint_returns_the_newest_commit_known_to_this_rank(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    with FakeAgent(storage=run) as agent:
        assert agent.session.get_checkpoint() is None
        agent.session.initial_checkpoint = directory(tmp_path / "first", model="")
        assert agent.session.get_checkpoint() == agent.session.initial_checkpoint
    with FakeAgent(storage=run, checkpoint="checkpoint_000004") as agent:
        assert agent.session.get_checkpoint() == Checkpoint(f"{run}/checkpoint_000004")
        agent.send(AnnounceCheckpoint(ticket=Ticket(2, 9), name="checkpoint_000009"))  # Another generation's.
        agent.announce(1, "checkpoint_000005")
        agent.announce(2, None)
        assert agent.session.get_checkpoint() == Checkpoint(f"{run}/checkpoint_000005")


def test_get_checkpoint_waits_for_what_this_rank_has_reported(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    with FakeAgent(storage=run, staging_dir=str(tmp_path / "s")) as agent:
        agent.session.report({}, checkpoint=directory(tmp_path / "mine", model="weights"))
        found: list[Any] = []
        asking = in_thread(lambda: found.append(agent.session.get_checkpoint()))
        assert agent.next(WorkerWaited).waiting
        agent.announce(1, "checkpoint_000000")
        asking.join(60)
        assert found == [Checkpoint(f"{run}/checkpoint_000000")]


def test_ranks_that_lag_are_named_and_waited_for_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = str(tmp_path / "run")
    monkeypatch.setattr(sessions, "_LAG_WAIT_S", 0.01)
    with FakeAgent(
        storage=run, staging_dir=str(tmp_path / "s"), checkpoint="checkpoint_000000", lagging=(1, 3), world_size=4
    ) as agent:
        agent.session.report({})
        assert agent.session.get_checkpoint() == Checkpoint(f"{run}/checkpoint_000000")  # gave nothing to wait for
        agent.session.report({}, checkpoint=directory(tmp_path / "mine", model="weights"))
        with pytest.warns(UserWarning, match=r"ranks 1, 3 did not call .* as often as rank 0 within 0.01 s") as told:
            assert agent.session.get_checkpoint() == Checkpoint(f"{run}/checkpoint_000000")
        assert len(told) == 1
        with pytest.warns(UserWarning, match=r"still waits: ranks 1, 3 did not call"):
            assert agent.session.get_all_reported_checkpoints(timeout_s=0.02) == []
        assert agent.session.get_all_reported_checkpoints(timeout_s=0.005) == []


def test_an_upload_function_gets_a_name_and_stores_in_the_run(tmp_path: Path) -> None:
    names: list[str] = []

    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        names.append(name)
        return directory(tmp_path / "run" / name, model=Path(checkpoint.path, "model").read_text())

    with FakeAgent(storage=str(tmp_path / "run"), staging_dir=str(tmp_path / "s")) as agent:
        mine = directory(tmp_path / "mine", model="weights")
        agent.session.report({}, mine, "own", None, None, upload)
        agent.announce(1, "own")
        agent.session.report({}, mine, checkpoint_upload_fn=upload)
        assert [agent.next().part for _ in range(2)] == [ExistingPart("own"), ExistingPart("checkpoint-g003-r000002")]
    assert names == ["own", "checkpoint-g003-r000002"]


def test_reports_keep_their_order_while_a_thread_uploads(tmp_path: Path) -> None:
    may_end = threading.Event()

    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        assert may_end.wait(60)
        return directory(tmp_path / "run" / name, model=Path(checkpoint.path, "model").read_text())

    with FakeAgent(storage=str(tmp_path / "run"), staging_dir=str(tmp_path / "s"), announce_as="x") as agent:
        mine = directory(tmp_path / "mine", model="weights")
        agent.session.report({"step": 1}, mine, None, CheckpointUploadMode.ASYNC, None, upload)
        agent.session.report({"step": 2})
        assert agent.heard.empty() and (tmp_path / "mine").exists()
        agent.session.barrier()  # others may be met meanwhile
        may_end.set()
        agent.session.report({"step": 3}, directory(tmp_path / "next", model="weights"))
        heard = [agent.next() for _ in range(3)]
        agent.session.finish()
    assert [one.report.number for one in heard] == [1, 2, 3]
    assert [one.report.metrics["step"] for one in heard] == [1, 2, 3]
    assert heard[0].part == ExistingPart("checkpoint-g003-r000001") and heard[1].part is None
    assert not (tmp_path / "mine").exists()  # let go, as ASYNC does where nothing else is said


def test_what_an_upload_function_raises_in_its_thread_is_raised_by_the_next_call(tmp_path: Path) -> None:
    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        raise ConnectionError("the tool of one's own failed")

    with FakeAgent(storage=str(tmp_path / "run"), staging_dir=str(tmp_path / "s")) as agent:
        for call in (agent.session.finish, agent.session.get_checkpoint):
            mine = directory(tmp_path / call.__name__, model="weights")
            agent.session.report({"step": 1}, mine, None, CheckpointUploadMode.ASYNC, None, upload)
            with pytest.raises(ConnectionError, match="of one's own"):
                call()
            message = agent.next()
            assert message.report.metrics == {"step": 1} and message.part is None and not message.report.checkpoint
            assert mine._open().local_root is not None
        mine = directory(tmp_path / "next", model="weights")
        agent.session.report({}, mine)  # there is nothing that it had to wait for
        assert isinstance(agent.next().part, StagedPart)


def test_an_upload_function_must_return_a_checkpoint(tmp_path: Path) -> None:
    with (
        FakeAgent(storage=str(tmp_path / "run"), staging_dir=str(tmp_path / "s")) as agent,
        pytest.raises(TypeError, match="checkpoint_upload_fn must return a Checkpoint, not str"),
    ):
        mine = directory(tmp_path / "mine", model="weights")
        agent.session.report({}, mine, checkpoint_upload_fn=lambda _, name: name)  # type: ignore[arg-type,return-value]


def test_get_all_reported_checkpoints_includes_metrics(tmp_path: Path) -> None:
    store = open_store(tmp_path / "run")
    directory(tmp_path / "mine", model="weights")
    names = [commit_directory(store, tmp_path / "mine", metrics={"step": step}).name for step in (1, 2)]
    with FakeAgent(announce_as=names[1], storage=str(tmp_path / "run"), staging_dir=str(tmp_path / "s")) as agent:
        agent.session.report({"step": 2}, checkpoint=Checkpoint(tmp_path / "mine"))
        found = agent.session.get_all_reported_checkpoints()
    assert {one.status for one in found} == {ReportedCheckpointStatus.COMMITTED}
    assert [(Path(one.checkpoint.path).name, one.metrics) for one in found] == [
        (names[0], {"step": 1}),
        (names[1], {"step": 2}),
    ]


def test_collectives_go_through_the_agent() -> None:
    with FakeAgent() as agent:
        data = {"seed": 7, "blob": b"x", "pair": (1, 2), 3: {4, 5}, "function": directory}
        assert agent.session.broadcast_from_rank_zero(data) == data
        agent.session.barrier()
        asked = [agent.next(Collect), agent.next(Collect)]
    assert [(one.sequence, one.kind) for one in asked] == [(1, "broadcast"), (2, "barrier")]


def test_ranks_ask_for_a_checkpoint_only_at_the_calls_that_were_agreed() -> None:
    with FakeAgent(rank=1, world_size=2) as agent:
        for sequence, answer in enumerate([(False, 3, False), (True, 4, False), (False, 100, False)], 1):
            agent.send(Collected(generation=3, sequence=sequence, data=list(answer)))
        told = [agent.session.should_checkpoint() for _ in range(6)]
        asked = [agent.next(Collect) for _ in range(3)]
    assert told == [False, False, True, False, False, False]
    assert [(message.kind, message.data) for message in asked] == [
        ("checkpoint_interval", 1),
        ("checkpoint_interval", 3),
        ("checkpoint_interval", 4),
    ]


def _reports_in_thread(agent: FakeAgent, *reports: dict[str, Any]) -> threading.Thread:
    def work() -> None:
        for arguments in reports:
            agent.session.report({"step": 1}, **arguments)

    return in_thread(work)


def test_a_report_with_a_checkpoint_does_not_return_while_the_rank_is_held(tmp_path: Path) -> None:
    with FakeAgent(staging_dir=str(tmp_path / "staging")) as agent:
        agent.send(HoldReports(generation=3, number=0))
        checkpoint = directory(tmp_path / "mine", model="weights")
        thread = _reports_in_thread(agent, {}, {"checkpoint": checkpoint}, {})
        assert [agent.next(WorkerReport).report.held for _ in range(2)] == [False, True]
        agent.send(HoldReports(generation=2, number=None))  # of an earlier generation
        agent.send(HoldReports(generation=3, number=2))
        thread.join(0.05)
        assert thread.is_alive()
        agent.send(HoldReports(generation=3, number=3))
        assert agent.next(WorkerReport).report.held
        agent.send(HoldReports(generation=3, number=None))
        thread.join(10)
        assert not thread.is_alive()


def test_every_rank_stays_in_its_next_report_where_should_checkpoint_was_told_so() -> None:
    with FakeAgent(rank=1, world_size=2) as agent:
        agent.send(Collected(generation=3, sequence=1, data=[True, 2, True]))
        assert agent.session.should_checkpoint()
        thread = _reports_in_thread(agent, {}, {})
        assert agent.next(WorkerReport).report.held
        agent.send(HoldReports(generation=3, number=0))  # which is what the answer was about
        thread.join(0.05)
        assert thread.is_alive()
        agent.send(HoldReports(generation=3, number=None))
        assert not agent.next(WorkerReport).report.held
        thread.join(10)


def test_a_change_that_is_withdrawn_before_the_next_report_holds_nobody() -> None:
    with FakeAgent() as agent:
        agent.send(Collected(generation=3, sequence=1, data=[True, 2, True]))
        assert agent.session.should_checkpoint()
        agent.send(HoldReports(generation=3, number=0))
        agent.send(HoldReports(generation=3, number=None))
        agent.session.report({"step": 1})
        assert not agent.next(WorkerReport).report.held


def test_other_ranks_get_rank_zeros_data() -> None:
    with FakeAgent(rank=1, world_size=2) as agent:
        agent.send(Collected(generation=3, sequence=1, data=pickle.dumps("rank 0's")))
        assert agent.session.broadcast_from_rank_zero("mine") == "rank 0's"
        assert agent.next(Collect).data is None


def test_a_forked_child_may_not_report() -> None:
    with FakeAgent() as agent:
        child = os.fork()
        if child == 0:
            try:
                agent.session.report({"loss": 1.0})
            except RuntimeError as error:
                os._exit(7 if "forked" in str(error) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert agent.heard.empty()


def test_a_dead_agent_is_an_error_not_a_hang(tmp_path: Path) -> None:
    with FakeAgent(staging_dir=str(tmp_path / "staging")) as agent:
        agent.session.report({}, checkpoint=directory(tmp_path / "mine", model="weights"))
        agent.next()
        agent.socket.shutdown(socket.SHUT_RDWR)
        with pytest.raises(WireError, match="agent of this worker is gone"):
            agent.session.report({}, checkpoint=Checkpoint(tmp_path / "mine"))


def test_the_public_functions_find_the_session() -> None:
    with FakeAgent(checkpoint=None, rank=0, world_size=4, node_rank=1, trial_dir="s3://b/run?x=1") as agent:
        sessions.install(agent.session)
        try:
            train.report({"loss": 1.0})
            assert agent.next().report.metrics == {"loss": 1.0}
            assert train.get_checkpoint() is None
            context = train.get_context()
            assert (context.get_world_size(), context.get_world_rank(), context.get_node_rank()) == (4, 0, 1)
            assert (context.get_trial_name(), context.get_experiment_name()) == ("run", "run")
            assert context.get_storage().trial_working_directory == "/nowhere/work"
            train.collective.barrier()
        finally:
            sessions.install(None)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (train.report, ({"loss": 1},)),
        (train.get_checkpoint, ()),
        (train.get_context, ()),
        (train.should_checkpoint, ()),
        (train.get_all_reported_checkpoints, ()),
        (train.collective.barrier, ()),
        (train.collective.broadcast_from_rank_zero, (1,)),
    ],
)
def test_outside_of_a_training_function_each_call_raises(call: Any, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(RuntimeError, match=rf"{call.__name__}\(\) works only inside a training function"):
        call(*arguments)


def test_bad_names_and_modes_are_refused(tmp_path: Path) -> None:
    with FakeAgent(staging_dir=str(tmp_path)) as agent:
        checkpoint = directory(tmp_path / "mine", model="")
        with pytest.raises(ConfigError, match="without slashes"):
            agent.session.report({}, checkpoint=checkpoint, checkpoint_dir_name="a/b")
        with pytest.raises(TypeError, match=r"takes a Checkpoint, not PosixPath: write Checkpoint.from_directory"):
            agent.session.report({}, checkpoint=tmp_path)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="checkpoint_upload_mode must be"):
            agent.session.report({}, checkpoint=checkpoint, checkpoint_upload_mode="sync")  # type: ignore[arg-type]


def test_upload_modes_survive_pickling() -> None:
    assert pickle.loads(pickle.dumps(CheckpointUploadMode.SYNC)) is CheckpointUploadMode.SYNC
