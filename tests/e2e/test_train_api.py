"""The public training API, from the function's side and from the driver's, on real workers."""

from __future__ import annotations

import gc
import json
import os
import signal
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs
from tests.e2e.small import fit, make_trainer, save, value_of
from tests.faults.programs.sandbox import Sandbox

from holdfast import train
from holdfast.errors import ConfigError, TrainingFailedError
from holdfast.train import Checkpoint, CheckpointUploadMode, Result, RunConfig


def test_environment_variables_and_context_of_a_worker(sandbox: Sandbox) -> None:
    def function() -> dict[str, Any]:
        context = train.get_context()
        names = (
            "RANK LOCAL_RANK GROUP_RANK ROLE_RANK ROLE_NAME WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE "
            "ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS "
            "TORCHELASTIC_RUN_ID TORCHELASTIC_ERROR_FILE TORCH_NCCL_ASYNC_ERROR_HANDLING OMP_NUM_THREADS"
        )
        return {
            "world": [context.get_world_rank(), context.get_world_size()],
            "local": [context.get_local_rank(), context.get_local_world_size(), context.get_node_rank()],
            "names": [context.get_experiment_name(), context.get_trial_name(), context.get_trial_id()],
            "dir": context.get_trial_dir(),
            "storage": context.get_storage().uri,
            "cwd": str(Path.cwd()),
            "working_directory": context.get_storage().trial_working_directory,
            "variables": {name: os.environ.get(name) for name in names.split()},
        }

    found = fit(sandbox, function, workers=2).return_value
    assert found["world"] == [0, 2]
    assert found["local"] == [0, 2, 0]
    assert found["names"][0] == "run"
    assert found["dir"] == found["storage"] == str(sandbox.storage / "run")
    assert found["cwd"] == found["working_directory"]
    variables = found["variables"]
    assert all(value for value in variables.values()), variables
    assert (variables["RANK"], variables["WORLD_SIZE"], variables["LOCAL_WORLD_SIZE"]) == ("0", "2", "2")
    assert variables["MASTER_ADDR"] == "127.0.0.1"
    assert variables["TORCHELASTIC_RESTART_COUNT"] == "0"


def test_temporary_files_of_a_killed_worker_are_removed(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)

    def function() -> list[str]:
        directory = tempfile.mkdtemp()
        note = Path(os.environ["NOTE"])
        if train.get_context().get_world_rank() == 0 and not note.exists():
            note.write_text(str(Path(directory).resolve()))
            os.kill(os.getpid(), signal.SIGKILL)
        return [note.read_text(), str(Path(directory).resolve())]

    monkeypatch.setenv("NOTE", str(sandbox.root / "note"))
    first, second = fit(sandbox, function, failure_config=train.FailureConfig(max_failures=1)).return_value
    assert first != second
    assert not Path(first).exists() and not Path(second).exists()
    assert sandbox.cache in Path(first).parents


def test_endless_metric_reports_are_durable_within_a_second(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    def function() -> int:
        for number in range(1_000_000):
            train.report({"number": number})
            if number < 100:
                continue  # the first may be durable at once, together with what was recorded before
            stored = "".join(path.read_text() for path in Path(os.environ["JOURNAL"]).glob("*.jsonl"))
            if '"kind":"Reported"' in stored:
                return number
        raise AssertionError("a million reports, and none in the journal")

    monkeypatch.setenv("JOURNAL", str(sandbox.storage / "run" / "journal"))
    assert fit(sandbox, function).return_value > 0


def test_ranks_and_local_ranks_on_two_nodes(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_LOCAL_NODES", "2")

    def function() -> list[Any]:
        context = train.get_context()
        mine = [context.get_world_rank(), context.get_local_rank(), context.get_node_rank()]
        path = Path(os.environ["SEEN"], str(context.get_world_rank()))
        path.write_text(json.dumps([*mine, os.environ["GROUP_WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]]))
        train.collective.barrier()
        return [json.loads(file.read_text()) for file in sorted(Path(os.environ["SEEN"]).iterdir())]

    seen = sandbox.root / "seen"
    seen.mkdir()
    found = fit(sandbox, function, workers=4, worker_runtime_env={"env_vars": {"SEEN": str(seen)}}).return_value
    assert [one[:3] for one in found] == [[0, 0, 0], [1, 1, 0], [2, 0, 1], [3, 1, 1]]
    assert all(one[3:] == ["2", "2"] for one in found)


def test_barrier_and_broadcast_from_rank_zero(sandbox: Sandbox) -> None:
    def function() -> list[Any]:
        rank = train.get_context().get_world_rank()
        got = [train.collective.broadcast_from_rank_zero({"from": rank, "n": n}) for n in range(3)]
        train.collective.barrier()
        if rank == 1:
            assert [one["from"] for one in got] == [0, 0, 0]
        return got

    assert fit(sandbox, function, workers=2).return_value == [{"from": 0, "n": n} for n in range(3)]


def test_metrics_of_every_kind_come_back_as_they_were_reported(sandbox: Sandbox) -> None:
    def function() -> None:
        import numpy

        plain = {"f": 1.5, "i": 3, "s": "word", "none": None, "yes": True}
        train.report({**plain, "nested": {"a": {"b": 2}}, "np": numpy.float32(0.5)})
        train.report({"nan": float("nan"), "inf": float("inf")})

    result = fit(sandbox, function)
    frame = result.metrics_dataframe
    assert frame is not None
    first = frame.iloc[0]
    assert (first["f"], first["i"], first["s"], first["nested/a/b"], first["np"]) == (1.5, 3, "word", 2, 0.5)
    assert result.metrics is not None
    assert result.metrics["inf"] == float("inf") and result.metrics["nan"] != result.metrics["nan"]
    assert set(result.metrics) == {"nan", "inf"}
    assert result.checkpoint is None
    assert result.best_checkpoints == []


def test_an_unsupported_metric_type_fails_the_function(sandbox: Sandbox) -> None:
    def function() -> None:
        train.report({"bad": object()})

    with pytest.raises(TrainingFailedError) as caught:
        fit(sandbox, function)
    (error,) = caught.value.worker_failures.values()
    assert "bad" in str(error)


def test_return_values_keep_their_types(sandbox: Sandbox, capfd: pytest.CaptureFixture[str]) -> None:
    import numpy

    def function() -> Any:
        return {"shape": (2, 3), "seen": {1, 2}, "blob": b"\x00", "array": numpy.ones((2, 2)), 7: Path("/x")}

    value = fit(sandbox, function).return_value
    assert value.pop("array").tolist() == [[1, 1], [1, 1]]
    assert value == {"shape": (2, 3), "seen": {1, 2}, "blob": b"\x00", 7: Path("/x")}
    assert fit(sandbox, lambda: [threading.Lock()], name="other").return_value is None
    warnings = [line for line in capfd.readouterr().err.splitlines() if "_thread.lock, which is not kept" in line]
    assert len(warnings) == 1


class ModelError(Exception):
    """A user's own class, whose message is not its argument."""

    def __init__(self, layer: int) -> None:
        super().__init__(f"layer {layer} is odd:\n  weights\n  biases")
        self.layer = layer


def test_a_failure_carries_the_users_own_class_and_the_traceback(sandbox: Sandbox) -> None:
    def function() -> None:
        if train.get_context().get_world_rank() == 1:
            raise ModelError(3)
        train.collective.barrier()

    with pytest.raises(train.WorkerGroupError) as caught:
        fit(sandbox, function, workers=2)
    error = caught.value.worker_failures[1]
    assert type(error) is ModelError
    assert str(error) == "layer 3 is odd:\n  weights\n  biases"
    text = str(caught.value)
    assert text.startswith("Training failed: rank 1 raised ModelError: layer 3 is odd:. Fix this, then the same call")
    assert "raise ModelError(3)" in text and text.endswith("layer 3 is odd:\n  weights\n  biases")
    assert str(train.Result.from_path(sandbox.storage / "run").error) == text


def test_local_mode_runs_in_the_driver_process(sandbox: Sandbox) -> None:
    seen: list[Any] = []

    def function(config: dict[str, Any]) -> int:
        seen.append((os.getpid(), threading.current_thread() is threading.main_thread(), config["x"]))
        checkpoint = train.get_checkpoint()
        start = value_of(checkpoint) if checkpoint is not None else 0
        for value in range(start + 1, 4):
            save(value)
            if value == 2 and start == 0:
                raise RuntimeError("once")
        return start

    before = Path.cwd(), dict(os.environ)
    failure = train.FailureConfig(max_failures=1)
    result = make_trainer(sandbox, function, workers=0, config={"x": 1}, failure_config=failure).fit()
    assert seen == [(os.getpid(), True, 1)] * 2
    assert result.return_value == 2
    assert result.metrics == {"value": 3}
    assert (Path.cwd(), dict(os.environ)) == before
    seen.clear()  # what the function reaches would have changed
    assert make_trainer(sandbox, function, workers=0, config={"x": 1}).fit().return_value == 2
    assert seen == []


def test_local_mode_has_the_variables_and_the_filesystem_of_the_run(sandbox: Sandbox) -> None:
    """As workers have, so that errors show in the debugger as they do elsewhere."""
    sandbox.storage.mkdir()

    def function() -> tuple[str, int]:
        save(7)
        train.get_all_reported_checkpoints()  # waits for the commit
        checkpoint = train.get_checkpoint()
        assert checkpoint is not None
        return os.environ["OF_THE_RUN"], value_of(checkpoint)

    run_config = train.RunConfig(
        name="run",
        storage_path="runs",
        storage_filesystem=fs.SubTreeFileSystem(str(sandbox.storage), fs.LocalFileSystem()),
        worker_runtime_env={"env_vars": {"OF_THE_RUN": "set"}},
    )
    local = train.ScalingConfig(num_workers=0)
    result = train.DataParallelTrainer(function, scaling_config=local, run_config=run_config).fit()
    assert result.return_value == ("set", 7)
    assert "OF_THE_RUN" not in os.environ


def test_local_mode_stops_at_ctrl_c_wherever_the_function_is(sandbox: Sandbox) -> None:
    def function() -> None:
        if train.get_checkpoint() is None:
            save(1, checkpoint_upload_mode=CheckpointUploadMode.SYNC)
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()

    before = signal.getsignal(signal.SIGINT)  # a shell has the jobs in its background ignore it
    with pytest.raises(KeyboardInterrupt):
        fit(sandbox, function, workers=0)
    assert signal.getsignal(signal.SIGINT) is before
    assert fit(sandbox, function, workers=0).metrics == {"value": 1}


def test_only_one_thread_may_be_in_local_mode(sandbox: Sandbox) -> None:
    """Two would report to each other's run. One that the function starts itself is another matter."""
    storage, seen = sandbox.storage, [""]

    def wait_for(word: str) -> None:
        until = time.monotonic() + 60
        while seen[-1] != word:
            assert time.monotonic() < until
            time.sleep(0.01)

    def local(name: str, function: Any) -> Any:
        scaling = train.ScalingConfig(num_workers=0)
        return train.DataParallelTrainer(function, scaling_config=scaling, run_config=RunConfig(name, storage))

    def inner() -> str:
        return train.get_context().get_experiment_name()

    def outer() -> Any:
        seen.append("entered")
        wait_for("done")
        train.report({"value": 1})
        return local("inner", inner).fit().return_value

    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(local("outer", outer).fit()))
    thread.start()
    try:
        wait_for("entered")
        with pytest.raises(ConfigError, match=r"num_workers=0\): another fit\(\) of that kind runs in another thread"):
            local("other", inner).fit()
    finally:
        seen.append("done")
        thread.join(60)
    assert [(one.metrics, one.return_value) for one in results] == [({"value": 1}, "inner")]
    assert not (storage / "other").exists()
    assert local("other", inner).fit().return_value == "other"


def test_callbacks_get_what_every_rank_reported(sandbox: Sandbox) -> None:
    told: list[Any] = []

    class Listener(train.UserCallback):
        def after_run_start(self, run_context: Any) -> None:
            told.append(("start", run_context.name, run_context.train_loop_config))

        def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Checkpoint | None) -> None:
            told.append(("report", metrics, None if checkpoint is None else value_of(checkpoint)))

        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            told.append(("exception", {rank: str(error) for rank, error in worker_exceptions.items()}))

        def after_run_end(self, run_context: Any, status: str) -> None:
            told.append(("end", status))
            raise RuntimeError("a bug of the user's")

    def function(config: dict[str, Any]) -> None:
        rank = train.get_context().get_world_rank()
        if train.get_checkpoint() is None:
            train.report({"rank": rank, "loss": float("nan") if rank else 1.0})
            if rank == 1:
                save(2)
            else:
                train.report({"rank": rank})
            assert train.get_all_reported_checkpoints()
            train.collective.barrier()
            if rank == 1:
                raise ValueError("once")
            train.collective.barrier()

    failure = train.FailureConfig(max_failures=1)
    options: dict[str, Any] = {"callbacks": [Listener()], "failure_config": failure}
    make_trainer(sandbox, function, 2, config={"a": 1}, **options).fit()
    assert [kind for kind, *_ in told] == ["start", "report", "report", "exception", "end"]
    assert told[0] == ("start", "run", {"a": 1})
    _, (first, second), checkpoint = told[1]
    assert (first, second["rank"], checkpoint) == ({"rank": 0, "loss": 1.0}, 1, None)
    assert second["loss"] != second["loss"]
    assert told[2] == ("report", [{"rank": 0}, {"value": 2}], 2)
    assert told[3:] == [("exception", {1: "once"}), ("end", "finished")]


class CallbackBug(Exception):
    """A class of the user's own."""


@pytest.mark.parametrize("hook", ["after_run_start", "after_report"])
def test_an_error_in_a_callback_ends_the_run_with_a_controller_error(sandbox: Sandbox, hook: str) -> None:
    """Also the last report's, whose function has returned long before."""

    class Broken(train.UserCallback):
        def __getattribute__(self, name: str) -> Any:
            return self.break_down if name == hook else super().__getattribute__(name)

        def break_down(self, *arguments: Any) -> None:
            raise CallbackBug("the disk of the dashboard is full")

    def function() -> None:
        train.report({"plain": 1})

    trainer = make_trainer(sandbox, function, callbacks=[Broken()])
    with pytest.raises(train.ControllerError, match="CallbackBug: the disk of the dashboard is full") as caught:
        trainer.fit()
    assert isinstance(caught.value, train.TrainingFailedError)
    assert isinstance(caught.value.controller_failure, CallbackBug)
    assert f"In the callback Broken.{hook}:\nTraceback" in str(caught.value)
    assert 'raise CallbackBug("the disk of the dashboard is full")' in str(caught.value)
    kept = train.Result.from_path(sandbox.storage / "run").error
    assert isinstance(kept, train.ControllerError) and str(kept) == str(caught.value)
    assert fit(sandbox, function).metrics == {"plain": 1}


def test_what_ends_a_script_comes_out_of_fit_and_leaves_nothing_open(sandbox: Sandbox) -> None:
    """Whatever no `except Exception` would catch: the run has stopped by then, and the same call continues it."""

    class Enough(train.UserCallback):
        def after_report(self, *arguments: Any) -> None:
            raise SystemExit(3)

    def function() -> None:
        train.report({"plain": 1})

    with pytest.raises(SystemExit) as caught:
        make_trainer(sandbox, function, callbacks=[Enough()]).fit()
    assert caught.value.code == 3
    opened = set()
    for one in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            opened.add(str(one.readlink()))
    assert not {one for one in opened if one.startswith(f"{sandbox.storage}/run/")}
    assert fit(sandbox, function).metrics == {"plain": 1}


def test_a_run_is_found_by_its_path_and_continued(sandbox: Sandbox) -> None:
    def function() -> int:
        checkpoint = train.get_checkpoint()
        if checkpoint is None:
            save(1)
            raise ValueError("not yet")
        return value_of(checkpoint)

    path = sandbox.storage / "run"
    assert not train.DataParallelTrainer.can_restore(path)
    with pytest.raises(TrainingFailedError):
        fit(sandbox, function)
    failed = Result.from_path(f"{path}/")
    assert isinstance(failed.error, TrainingFailedError)
    assert train.DataParallelTrainer.can_restore(path)
    restored = train.DataParallelTrainer.restore(path, function)
    assert restored.fit().return_value == 1
    with pytest.raises(ConfigError, match="there is no run"):
        train.DataParallelTrainer.restore(sandbox.storage / "other", function)


def test_a_run_may_start_from_another_runs_checkpoint(sandbox: Sandbox) -> None:
    def function() -> int:
        checkpoint = train.get_checkpoint()
        assert checkpoint is not None
        value = value_of(checkpoint)
        save(value + 1)
        return value

    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "value.json").write_text("41")
        first = train.DataParallelTrainer(
            function,
            run_config=RunConfig(name="run", storage_path=sandbox.storage),
            resume_from_checkpoint=Checkpoint.from_directory(directory),
        ).fit()
    assert first.return_value == 41
    assert first.checkpoint is not None and value_of(first.checkpoint) == 42


def test_a_relative_storage_path_is_resolved(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox.root.joinpath("here").mkdir()
    monkeypatch.chdir(sandbox.root / "here")
    result = fit(sandbox, lambda: "done", storage_path="runs")
    assert result.path == str(sandbox.root / "here" / "runs" / "run")
    assert Result.from_path("runs/run").return_value == "done"


def test_a_function_that_cannot_be_pickled_is_refused_before_workers_start(sandbox: Sandbox) -> None:
    lock = threading.Lock()

    def function() -> bool:
        return lock.locked()

    with pytest.raises(ConfigError, match="cannot be sent to the workers"):
        fit(sandbox, function)
    assert not (sandbox.storage / "run").exists()


def test_repeated_fit_leaks_no_descriptor_and_no_thread(sandbox: Sandbox) -> None:
    def function() -> None:
        train.report({})

    counts = []
    for name in ("a", "b", "c"):
        fit(sandbox, function, workers=2, name=name)
        gc.collect()  # what earlier tests left may go at any time, and is not to be counted
        counts.append((len(list(Path("/proc/self/fd").iterdir())), threading.active_count()))
    assert all(later <= earlier for earlier, later in zip(counts[1], counts[2], strict=True)), counts
