"""`Checkpoint` on a real S3 server: by URI, and through pyarrow's filesystem."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from tests.contract.servers import Server
from tests.unit.checkpoint.far_store import write_source

from holdfast.checkpoint.commit import commit_directory
from holdfast.checkpoint.handle import Checkpoint
from holdfast.storage.locate import open_store


def test_a_checkpoint_on_s3_by_uri_and_by_filesystem(
    moto: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = pytest.importorskip("pyarrow.fs")
    monkeypatch.setenv("HOLDFAST_LOCAL_CACHE_DIR", str(tmp_path / "cache"))
    source = write_source(tmp_path / "source", model="weights", layers__0="zero")
    for variable, value in moto.environment.items():
        monkeypatch.setenv(variable, value)
    bucket = moto.new_bucket()
    run = open_store(moto.uri(bucket, "runs/with a blank"))
    name = commit_directory(run, source).name
    found = pickle.loads(pickle.dumps(Checkpoint._from_store(run, name)))
    assert found.path == f"{bucket}/runs/with a blank/{name}"
    with found.as_directory() as directory:
        assert Path(directory, "layers", "0").read_text() == "zero"
    found.set_metadata({"epoch": 1})

    filesystem = found.filesystem
    with filesystem.open_input_stream(f"{found.path}/model") as stream:
        assert stream.read() == b"weights"
    again = Checkpoint(found.path, filesystem=filesystem)
    assert again == found
    assert again.get_metadata() == {"epoch": 1}
    assert Path(again.to_directory(tmp_path / "out"), "model").read_text() == "weights"

    brought = open_store(f"{bucket}/runs/with a blank", filesystem=filesystem)
    third = pickle.loads(pickle.dumps(Checkpoint._from_store(brought, name)))
    assert third == found
    assert isinstance(third.filesystem, fs.S3FileSystem)
    with third.as_directory() as directory:
        assert Path(directory, "model").read_text() == "weights"
