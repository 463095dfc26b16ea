"""Checkpoints through the training API: names, upload modes, conflicts between ranks, retention."""

from __future__ import annotations

import json
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
from msgspec import UNSET
from tests.e2e.small import fit, save, value_of
from tests.faults.programs.sandbox import Sandbox

from holdfast import train
from holdfast.checkpoint.catalog import Catalog
from holdfast.errors import NameTaken
from holdfast.storage.locate import open_store
from holdfast.train import Checkpoint, CheckpointConfig, CheckpointUploadMode


def test_checkpoint_names_upload_modes_and_reported_checkpoints(sandbox: Sandbox) -> None:
    def function() -> list[Any]:
        save(1, checkpoint_dir_name="first")
        save(2, checkpoint_upload_mode=CheckpointUploadMode.SYNC)
        newest = train.get_checkpoint()
        assert newest is not None and value_of(newest) == 2
        own = Path(train.get_context().get_storage().uri, "own")
        own.mkdir()
        (own / "value.json").write_text("3")
        mode = CheckpointUploadMode.NO_UPLOAD
        train.report({"value": 3}, checkpoint=Checkpoint.from_directory(own), checkpoint_upload_mode=mode)
        directory = Path("let-go")
        directory.mkdir()
        (directory / "value.json").write_text("4")
        mode = CheckpointUploadMode.ASYNC
        train.report({"value": 4}, checkpoint=Checkpoint.from_directory(directory), checkpoint_upload_mode=mode)
        assert not directory.exists()
        found = train.get_all_reported_checkpoints()
        return [[one.checkpoint.path.rpartition("/")[2], one.metrics["value"]] for one in found]

    result = fit(sandbox, function)
    assert [name for name, _ in result.return_value[:1]] == ["first"]
    assert [value for _, value in result.return_value] == [1, 2, 3, 4]
    assert [value_of(checkpoint) for checkpoint, _ in result.best_checkpoints] == [1, 2, 3, 4]
    assert {"first", "own"} <= {path.name for path in (sandbox.storage / "run").iterdir()}
    sandbox.check_stored()


def test_what_was_just_reported_is_read_back_on_every_rank_that_gave_it(sandbox: Sandbox) -> None:
    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        """As a script that stores with a tool of its own: to the place that the run names."""
        target = train.get_context().get_storage().build_checkpoint_path_from_name(name)
        Path(target).mkdir(exist_ok=True)
        rank = train.get_context().get_world_rank()
        Path(target, f"rank-{rank}.txt").write_text(Path(checkpoint.path, "text").read_text())
        return Checkpoint(target)

    def function() -> None:
        rank = train.get_context().get_world_rank()
        for step in range(2):
            Path("text").write_text(f"{step}")
            with tempfile.TemporaryDirectory() as directory:
                Path(directory, "text").write_text(f"step {step}, rank {rank}")
                train.report({"step": step}, Checkpoint.from_directory(directory), checkpoint_upload_fn=upload)
            newest = train.get_checkpoint()
            assert newest is not None
            with newest.as_directory() as found:
                assert Path(found, f"rank-{rank}.txt").read_text() == f"step {step}, rank {rank}"
        local = Path(f"let-go-{rank}")
        local.mkdir()
        Path(local, "text").write_text(f"step 2, rank {rank}")
        checkpoint = Checkpoint.from_directory(local)
        upload_mode = CheckpointUploadMode.ASYNC
        train.report({"step": 2}, checkpoint, checkpoint_upload_mode=upload_mode, checkpoint_upload_fn=upload)
        for step in range(3, 6):
            train.report({"step": step})
        newest = train.get_checkpoint()
        assert newest is not None and not local.exists()
        with newest.as_directory() as found:
            assert Path(found, f"rank-{rank}.txt").read_text() == f"step 2, rank {rank}"
        mode = train.CheckpointConsistencyMode.COMMITTED
        reported = train.get_all_reported_checkpoints(mode, timeout_s=60)
        assert [one.metrics for one in reported] == [{"step": 0}, {"step": 1}, {"step": 2}]
        assert {one.status for one in reported} == {train.ReportedCheckpointStatus.COMMITTED}
        storage = train.get_context().get_storage()
        path = storage.build_checkpoint_path_from_name("x")
        assert storage.extract_checkpoint_dir_name_from_path(path) == "x"
        assert Path(path).parent.parent == Path(storage.storage_fs_path)
        assert storage.storage_filesystem.type_name == "local"

    fit(sandbox, function, workers=2)
    assert len(sandbox.check_stored()) == 3


def test_ranks_that_gave_no_checkpoint_see_those_of_the_others(sandbox: Sandbox) -> None:
    """Rank 0 reports only after rank 1 has asked in vain: what rank 1 then gets, it has waited for."""

    def function() -> list[Any]:
        rank = train.get_context().get_world_rank()
        asked = Path(train.get_context().get_storage().local_working_directory, "..", "asked").resolve()
        if rank == 0:
            while not asked.exists():
                time.sleep(0.005)
            save(1)
        else:
            train.report({})
            assert train.get_all_reported_checkpoints(timeout_s=0.01) == []
            assert train.get_checkpoint() is None  # rank 0 has not reported, and this rank has given nothing
            asked.touch()
        for mode in train.CheckpointConsistencyMode:
            found = train.get_all_reported_checkpoints(mode)
            assert [one.metrics for one in found] == [{"value": 1}], (rank, found)
        if rank == 0:
            train.report({})
        else:
            save(2)  # `value_of` reads a file, whichever rank gave it
        train.collective.barrier()
        newest = train.get_checkpoint()
        assert newest is not None and value_of(newest) == 2
        return [one.metrics.get("value") for one in train.get_all_reported_checkpoints(timeout_s=600)]

    assert fit(sandbox, function, workers=2).return_value == [1, None]


def test_a_checkpoint_name_that_is_taken_ends_the_run_with_that_error(sandbox: Sandbox) -> None:
    def function() -> None:
        save(1, checkpoint_dir_name="same")
        save(2, checkpoint_dir_name="same")
        save(3)

    with pytest.raises(train.ControllerError, match=r"Training failed: NameTaken: .*same") as caught:
        fit(sandbox, function)
    assert isinstance(caught.value.controller_failure, NameTaken)


def _save_on_every_rank() -> None:
    """As Ray's quickstart does: all ranks report the same file, here with other bytes on rank 1 in the second step."""
    rank = train.get_context().get_world_rank()
    for step in range(3):
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "value.json").write_text(json.dumps(10 * step + (rank if step == 1 else 0)))
            Path(directory, f"only-{rank}.txt").write_text("mine")
            train.report({"step": step}, checkpoint=Checkpoint.from_directory(directory))


def test_of_a_file_that_every_rank_reports_the_lowest_ranks_is_kept(
    sandbox: Sandbox, caplog: pytest.LogCaptureFixture
) -> None:
    result = fit(sandbox, _save_on_every_rank, workers=3)
    assert sandbox.check_stored() == ["checkpoint_000000", "checkpoint_000001", "checkpoint_000002"]
    assert [value_of(checkpoint) for checkpoint, _ in result.best_checkpoints] == [0, 10, 20]
    manifests = Catalog(open_store(sandbox.storage / "run")).committed()
    for manifest in manifests:
        assert [file.path for file in manifest.files] == ["only-0.txt", "only-1.txt", "only-2.txt", "value.json"]
    assert [manifest.files[3].differing_ranks for manifest in manifests] == [UNSET, (1, 2), UNSET]
    (warning,) = [record.getMessage() for record in caplog.records if "different bytes" in record.getMessage()]
    assert "Ranks 0 and 1, 2 reported the file 'value.json' with different bytes: rank 0's is kept." in warning


def test_states_that_every_rank_reports_are_one_checkpoint(sandbox: Sandbox) -> None:
    def function() -> None:
        train.report({}, checkpoint=Checkpoint.from_state({"weights": numpy.arange(1000.0), "step": 3}))

    result = fit(sandbox, function, workers=2)
    assert result.checkpoint is not None
    assert result.checkpoint.load_state()["weights"].sum() == 499500
    sandbox.check_stored()


def test_what_a_worker_prints_to_a_standard_error_that_it_has_closed_gets_into_no_checkpoint(sandbox: Sandbox) -> None:
    def function() -> None:
        os.close(2)
        for step in range(6):
            state = {"weights": numpy.full(500_000, float(step))}
            mode = CheckpointUploadMode.SYNC if step < 2 else None
            train.report({"step": step}, Checkpoint.from_state(state), checkpoint_upload_mode=mode)
            if step:
                with suppress(OSError):
                    os.write(2, b"x" * 30_000)

    result = fit(sandbox, function)
    found = {metrics["step"]: checkpoint.load_state()["weights"] for checkpoint, metrics in result.best_checkpoints}
    assert len(found) == 6
    assert [step for step, weights in found.items() if (weights != step).any()] == []
    sandbox.check_stored()


def test_a_file_name_of_two_ranks_is_refused_where_the_user_wants_that(sandbox: Sandbox) -> None:
    config = CheckpointConfig(on_conflict="error")
    with pytest.raises(train.TrainingFailedError, match=r"DuplicateFile: Ranks 0 and 1 both .*value\.json") as caught:
        fit(sandbox, _save_on_every_rank, workers=2, checkpoint_config=config)
    assert isinstance(caught.value, train.ControllerError)
    assert sandbox.check_stored() == []


def test_retention_keeps_the_best_and_the_latest_checkpoint(sandbox: Sandbox) -> None:
    def function() -> None:
        for value in (5, 1, 9, 3, 7, 2):
            save(value)

    config = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="value", checkpoint_score_order="max")
    result = fit(sandbox, function, checkpoint_config=config)
    assert [metrics["value"] for _, metrics in result.best_checkpoints] == [7, 9]
    assert result.checkpoint is not None and value_of(result.checkpoint) == 2
    assert value_of(result.get_best_checkpoint("value", "max")) == 9
    assert value_of(result.get_best_checkpoint("value", "min")) == 2
    with pytest.raises(RuntimeError, match="Invalid metric name"):
        result.get_best_checkpoint("nothing", "max")
    assert len(list((sandbox.storage / "run").glob("checkpoint_*"))) == 3


def test_nodes_without_a_part_learn_of_a_commit(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_LOCAL_NODES", "2")

    def function() -> None:
        rank = train.get_context().get_world_rank()
        for value in (1, 2):
            if rank == 0:
                save(value, checkpoint_upload_mode=CheckpointUploadMode.SYNC)
            else:
                train.report({})
            train.collective.barrier()
            newest = train.get_checkpoint()
            assert newest is not None and value_of(newest) == value, (rank, newest)
            train.collective.barrier()

    fit(sandbox, function, workers=2)


def test_rank_zero_names_the_checkpoint_even_if_it_gives_no_part(sandbox: Sandbox) -> None:
    def function() -> None:
        rank = train.get_context().get_world_rank()
        if rank == 0:
            train.report({"value": 1}, checkpoint_dir_name="of-rank-0")
            train.report({"value": 2})
        else:
            save(1, checkpoint_dir_name="of-rank-1")
            save(2, checkpoint_dir_name="second-of-rank-1")

    fit(sandbox, function, workers=2)
    assert sandbox.check_stored() == ["of-rank-0", "second-of-rank-1"]


def test_no_upload_directories_of_all_ranks_must_have_one_name(sandbox: Sandbox) -> None:
    def function() -> None:
        rank = train.get_context().get_world_rank()
        own = Path(train.get_context().get_storage().uri, f"own-{rank}")
        own.mkdir()
        (own / f"value-{rank}.json").write_text("3")
        mode = CheckpointUploadMode.NO_UPLOAD
        train.report({"value": 3}, checkpoint=Checkpoint.from_directory(own), checkpoint_upload_mode=mode)

    with pytest.raises(train.ControllerError, match=r"rank 1 lie in 'own-1'.*'own-0'"):
        fit(sandbox, function, workers=2)


@pytest.mark.parametrize("let_go", [False, True])
def test_modes_and_empty_directories_survive_a_report(sandbox: Sandbox, let_go: bool) -> None:
    def function() -> None:
        directory = Path("made")
        (directory / "empty").mkdir(parents=True)
        for name, mode in (("run.sh", 0o750), ("secret", 0o600)):
            (directory / name).write_text(name)
            (directory / name).chmod(mode)
        checkpoint = Checkpoint.from_directory(directory)
        train.report({}, checkpoint=checkpoint, delete_local_checkpoint_after_upload=let_go)

    result = fit(sandbox, function)
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as stored:
        copied = result.checkpoint.to_directory(sandbox.root / "copied")
        for root in (Path(stored), Path(copied)):
            assert [(root / name).stat().st_mode & 0o777 for name in ("run.sh", "secret")] == [0o750, 0o600]
            assert (root / "empty").is_dir()
