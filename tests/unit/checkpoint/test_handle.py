"""The public class `Checkpoint`."""

from __future__ import annotations

import math
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.faults.programs.altering import flip_byte
from tests.unit.checkpoint.far_store import FarStore, write_source

from holdfast.checkpoint.commit import commit_directory, reserve, upload_part
from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpoint.known_files import process_wide
from holdfast.checkpoint.reservation import write_tombstone
from holdfast.errors import ConfigError, Damaged, InvalidURI, NotCommitted, NotFound
from holdfast.storage.posix.store import PosixStore


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source", model="weights", layers__0="zero")


@pytest.fixture
def far(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[FarStore, Checkpoint]:
    """A committed checkpoint on storage that is not this machine's."""
    monkeypatch.setenv("HOLDFAST_LOCAL_CACHE_DIR", str(tmp_path / "cache"))
    store = FarStore(tmp_path / "run")
    return store, Checkpoint._from_store(store, commit_directory(store, source).name)


def test_local_directories_may_be_given_as_path_string_or_uri(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(source.parent)
    monkeypatch.setenv("HOME", str(source.parent))
    spellings: list[Any] = [source, str(source), f"{source}/", "source", "./source/", "~/source", source.as_uri()]
    for spelling in spellings:
        found = Checkpoint(spelling)
        assert found.path == str(source)
        assert found == Checkpoint.from_directory(source) and hash(found) == hash(Checkpoint(source))
        assert repr(found) == f"Checkpoint(filesystem=local, path={source})"
    assert Checkpoint(source) != Checkpoint(source.parent)
    assert Checkpoint(source) != str(source)


def test_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing is not a directory: make it"):
        Checkpoint.from_directory(tmp_path / "missing")
    with pytest.raises(ConfigError, match="no local directory"):
        Checkpoint.from_directory("s3://bucket/x")
    with pytest.raises(NotFound, match="missing"):
        Checkpoint(tmp_path / "missing").to_directory(tmp_path / "out")
    with pytest.raises(NotFound, match="missing"), Checkpoint(tmp_path / "missing").as_directory():
        pytest.fail("there is nothing to show")
    with pytest.raises(InvalidURI):
        Checkpoint("")


def test_remote_paths_have_no_scheme() -> None:
    uri = "s3://bucket/run/checkpoint_000001?endpoint_override=http%3A%2F%2F127.0.0.1%3A9"
    found = Checkpoint(uri)
    assert (found.path, repr(found)) == (
        "bucket/run/checkpoint_000001",
        "Checkpoint(filesystem=s3, path=bucket/run/checkpoint_000001)",
    )
    assert pickle.loads(pickle.dumps(found)) == found
    assert Checkpoint("gs://b/x/").path == "b/x"
    assert Checkpoint("abfs://box@account.dfs.core.windows.net/run/x").path == "box/run/x"
    assert "secret" not in repr(Checkpoint("s3://key:secret@bucket/x"))


def test_a_plain_directory_is_copied_as_it_is(source: Path, tmp_path: Path) -> None:
    (source / "empty").mkdir()
    found = Checkpoint(source)
    target = found.to_directory(tmp_path / "out")
    assert target == str(tmp_path / "out")
    assert sorted(path.name for path in Path(target).iterdir()) == ["empty", "layers", "model"]
    with found.as_directory() as directory:
        assert directory == str(source)
    assert found.to_directory(source) == str(source)
    temporary = found.to_directory()
    try:
        assert Path(temporary, "model").read_text() == "weights"
    finally:
        shutil.rmtree(temporary)


def test_a_local_checkpoint_is_verified_as_it_is_copied(source: Path, tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "run")
    found = Checkpoint._from_store(store, commit_directory(store, source).name)
    assert found == Checkpoint(found.path)
    found.set_metadata({"epoch": 3})
    target = Path(found.to_directory(tmp_path / "out"))
    assert sorted(path.name for path in target.iterdir()) == [".metadata.json", "layers", "model"]
    assert Checkpoint(target).get_metadata() == {"epoch": 3}
    Path(found.path, "model").unlink()
    Path(found.path, "model").write_text("WEIGHTS")
    with pytest.raises(Damaged, match="model"):
        found.to_directory(tmp_path / "other")
    with pytest.raises(Damaged):
        found.to_directory()
    with pytest.raises(Damaged, match="model") as caught, found.as_directory():
        pytest.fail("damaged files were given out")
    assert caught.value.checkpoint == found.path


def test_a_local_checkpoint_is_verified_before_it_is_read_in_place(source: Path, tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "run")
    found = Checkpoint._from_store(store, commit_directory(store, source).name)
    process_wide.clear()
    for _ in range(2):
        with found.as_directory() as directory:
            assert directory == found.path
    flip_byte(Path(found.path, "model"))
    with pytest.raises(Damaged, match=r"model holds other bytes than were committed"), found.as_directory():
        pytest.fail("altered bytes were given out")
    flip_byte(Path(found.path, "model"))
    with found.as_directory() as directory:
        assert Path(directory, "model").read_text() == "weights"
    Path(found.path, "model").unlink()
    with pytest.raises(Damaged, match="model is missing"), found.as_directory():
        pytest.fail("a file is missing")


def test_altered_state_files_are_not_loaded(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    source = Path(Checkpoint.from_state({"w": numpy.full(8, 999.0)}).to_directory(tmp_path / "state"))
    store = PosixStore(tmp_path / "run")
    found = Checkpoint._from_store(store, commit_directory(store, source).name)
    assert found.load_state()["w"][0] == 999.0
    [tensors] = Path(found.path).glob("*.safetensors")
    data = bytearray(tensors.read_bytes())
    data[-2:] = b"\xf0\x7f"  # inf
    tensors.write_bytes(data)
    with pytest.raises(Damaged, match=tensors.name):
        found.load_state()


@pytest.mark.parametrize("what", ["void", "torn", "altered"])
def test_a_directory_without_a_valid_manifest_is_refused(source: Path, tmp_path: Path, what: str) -> None:
    store = PosixStore(tmp_path / "run")
    if what == "void":
        draft = reserve(store)
        upload_part(store, draft, source, rank=0, parent_files=None)
        assert write_tombstone(store, draft.name, index=draft.index, epoch=1, token=draft.token)
        found = Checkpoint(tmp_path / "run" / draft.name)
    else:
        found = Checkpoint._from_store(store, commit_directory(store, source).name)
        manifest = Path(found.path, ".manifest.json")
        data = manifest.read_bytes()
        manifest.write_bytes(data[:40] if what == "torn" else data.replace(b"model", b"MODEL"))
    error = NotCommitted if what == "void" else Damaged
    with pytest.raises(error), found.as_directory():
        pytest.fail("it was given out")
    with pytest.raises(error):
        found.load_state()
    with pytest.raises(error):
        found.to_directory(tmp_path / "out")


def test_an_uncommitted_draft_is_refused(source: Path, tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "run")
    draft = reserve(store)
    upload_part(store, draft, source, rank=0, parent_files=None)
    found = Checkpoint(tmp_path / "run" / draft.name)
    with pytest.raises(NotCommitted):
        found.to_directory(tmp_path / "out")
    with pytest.raises(NotCommitted, match="was never committed"), found.as_directory():
        pytest.fail("a draft was given out")
    with pytest.raises(NotCommitted):
        found.load_state()


def test_a_remote_checkpoint_is_downloaded_and_verified(far: tuple[FarStore, Checkpoint], tmp_path: Path) -> None:
    store, found = far
    assert Path(found.to_directory(tmp_path / "out"), "layers", "0").read_text() == "zero"
    store.downloads.clear()
    with found.as_directory() as one, found.as_directory() as two:
        assert one == two
        assert Path(one, "model").read_text() == "weights"
    assert sorted(store.downloads) == ["layers/0", "model"]
    assert not Path(one).exists()


def test_a_remote_directory_without_a_manifest_can_be_read(far: tuple[FarStore, Checkpoint], tmp_path: Path) -> None:
    store, _ = far
    store.put("theirs/model", b"from elsewhere")
    found = Checkpoint._from_store(store, "theirs")
    with found.as_directory() as directory:
        assert Path(directory, "model").read_text() == "from elsewhere"
    assert Path(found.to_directory(tmp_path / "out"), "model").read_text() == "from elsewhere"
    with pytest.raises(NotFound, match="no files"):
        Checkpoint._from_store(store, "nothing").to_directory(tmp_path / "none")


def test_metadata_is_written_updated_and_read(far: tuple[FarStore, Checkpoint], source: Path) -> None:
    for found in (far[1], Checkpoint(source)):
        assert found.get_metadata() == {}
        found.set_metadata({"a": 1, "nested": {"list": [1, "x", None, True]}})
        found.update_metadata({"b": 2.5})
        assert found.get_metadata() == {"a": 1, "nested": {"list": [1, "x", None, True]}, "b": 2.5}
        found.set_metadata({})
        assert found.get_metadata() == {}


@pytest.mark.parametrize(
    ("bad", "where"),
    [
        ({"x": object()}, r"metadata\['x'\] is a object"),
        ({"x": [{"y": {1, 2}}]}, r"metadata\['x'\]\[0\]\['y'\] is a set"),
        ({1: "x"}, "only strings as keys"),
        ({"x": b"bytes"}, "bytes"),
        ({"x": math.nan}, "nan"),
        ({"x": "\ud800"}, "JSON"),
    ],
)
def test_metadata_that_json_cannot_hold_is_refused(source: Path, bad: Any, where: str) -> None:
    with pytest.raises(TypeError, match=where):
        Checkpoint(source).set_metadata(bad)
    assert not (source / ".metadata.json").exists()


def test_a_pickled_checkpoint_holds_only_its_path(source: Path, tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "run")
    found = Checkpoint._from_store(store, commit_directory(store, source).name)
    data = pickle.dumps(found)
    assert b"PosixStore" not in data and len(data) < 500
    assert pickle.loads(data) == found
    assert pickle.loads(data).path == found.path


def test_a_checkpoint_on_a_pyarrow_filesystem(source: Path, tmp_path: Path) -> None:
    fs = pytest.importorskip("pyarrow.fs")
    assert Checkpoint(source).filesystem.type_name == "local"
    assert Checkpoint(str(source), filesystem=fs.LocalFileSystem()) == Checkpoint(source)
    fsspec = pytest.importorskip("fsspec")
    memory = fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem("memory")))
    name = f"holdfast-handle-{os.getpid()}"
    memory.create_dir(f"{name}/ckpt")
    with memory.open_output_stream(f"{name}/ckpt/model") as stream:
        stream.write(b"weights")
    found = Checkpoint(f"{name}/ckpt/", filesystem=memory)
    assert found.path == f"{name}/ckpt"
    assert found.filesystem is memory
    assert Path(found.to_directory(tmp_path / "out"), "model").read_bytes() == b"weights"
    assert found != Checkpoint(f"{name}/ckpt")
    memory.delete_dir(name)
