"""What a worker process finds in its environment variables."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec
import pytest

from holdfast.worker.environment import set_environment, use_temp_dir
from holdfast.worker.job import Assignment


def _assignment(temp_dir: Path) -> Assignment:
    counts = ("generation", "rank", "local_rank", "node_rank", "world_size", "local_world_size", "node_count")
    numbers = (*counts, "master_port", "restart_count", "max_restarts")
    texts = (
        "error_file",
        "master_address",
        "storage",
        "experiment",
        "trial_id",
        "trial_dir",
        "work_dir",
        "staging_dir",
    )
    others = {"temp_dir": str(temp_dir), "change_directory": False, "checkpoint": None}
    return msgspec.convert(dict.fromkeys(numbers, 0) | dict.fromkeys(texts, "") | others, Assignment)


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", tempfile.tempdir)
    monkeypatch.setattr(os, "environ", {"HOLDFAST_LOCAL_CACHE_DIR": str(tmp_path / "cache")})


def test_the_cache_of_torch_compile_outlives_the_generation(tmp_path: Path) -> None:
    use_temp_dir(_assignment(tmp_path / "generation"))
    assert os.environ["TMPDIR"] == str(tmp_path / "generation")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache" / "torch_compile")


def test_directories_that_the_user_chose_stay(tmp_path: Path) -> None:
    os.environ["TMPDIR"] = "/mine"
    use_temp_dir(_assignment(tmp_path / "generation"))
    assert os.environ["TMPDIR"] == "/mine"
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_gpus_of_a_worker_are_not_those_of_workers_that_it_starts(tmp_path: Path) -> None:
    set_environment(msgspec.structs.replace(_assignment(tmp_path), gpus=("0", "1")))
    assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["HOLDFAST_OWN_GPUS"]) == ("0,1", "1")
    set_environment(_assignment(tmp_path))  # each of these takes its share of both
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1" and "HOLDFAST_OWN_GPUS" not in os.environ
