"""What a URI argument names: a run, a checkpoint, a copy of one, or nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from holdfast.checkpoint.commit import commit_directory, reserve
from holdfast.cli.uri_args import choose, find, find_checkpoint, find_run, split
from holdfast.errors import ConfigError, Damaged, NotCommitted, NotFound
from holdfast.storage.locate import open_store


@pytest.fixture
def run(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    (source / "weights").write_bytes(b"w" * 100)
    store = open_store(tmp_path / "run")
    commit_directory(store, source)
    commit_directory(store, source, name="best one")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("uri", "parts"),
    [
        ("/runs/a/checkpoint_000001/", ("/runs/a", "checkpoint_000001")),
        ("s3://bucket/a/checkpoint_000001", ("s3://bucket/a", "checkpoint_000001")),
        ("s3://bucket/checkpoint_000001/?region=x/y", ("s3://bucket?region=x/y", "checkpoint_000001")),
        ("file:///runs/a/best%20one", ("file:///runs/a", "best one")),
    ],
)
def test_a_uri_is_split_before_its_last_part(uri: str, parts: tuple[str, str]) -> None:
    assert split(uri) == parts


def test_a_relative_path_is_resolved_before_it_is_split(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run / "checkpoint_000000")
    assert split(".") == (str(run), "checkpoint_000000")
    assert choose(".").name == "checkpoint_000000"


def test_runs_and_checkpoints_are_distinguished(run: Path) -> None:
    assert find(str(run))[1] is None
    store, name = find(f"{run}/best one")
    assert (store.uri, name) == (str(run), "best one")
    assert find(f"file://{run}/best%20one")[1] == "best one"
    assert find_run(str(run)).uri == str(run)
    with pytest.raises(ConfigError, match="is a checkpoint: name its run"):
        find_run(f"{run}/best one")
    with pytest.raises(ConfigError, match=r"is a run: name one of its checkpoints, such as .*/best one"):
        find_checkpoint(str(run))
    with pytest.raises(NotFound):
        find_checkpoint(f"{run}/checkpoint_000009")


def test_a_run_path_stands_for_its_newest_checkpoint(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert choose(str(run)).name == "best one"
    assert capsys.readouterr().err == f"{run} is a run: taking its newest checkpoint, best one.\n"
    assert choose(f"{run}/checkpoint_000000").name == "checkpoint_000000"
    assert capsys.readouterr().err == ""


def test_a_damaged_newest_manifest_is_reported_and_skipped(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = run / "best one" / ".manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"index":1', b'"index":9'))
    assert choose(str(run)).name == "checkpoint_000000"
    assert "warning: best one is passed over" in capsys.readouterr().err
    with pytest.raises(Damaged):
        choose(str(run / "best one"))


def test_an_uncommitted_checkpoint_is_not_found(run: Path, tmp_path: Path) -> None:
    draft = reserve(open_store(run))
    with pytest.raises(NotCommitted, match="never committed"):
        choose(str(run / draft.name))
    with pytest.raises(NotFound, match="no committed checkpoint"):
        choose(str(tmp_path / "nowhere"))


def test_a_copy_under_another_name_can_be_read(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "checkpoint_000000", tmp_path / "copy")
    chosen = choose(str(tmp_path / "copy"))
    assert (chosen.name, chosen.manifest.name) == ("copy", "checkpoint_000000")
