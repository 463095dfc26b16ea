"""Whatever a run's directory contains, readers return data or raise one of our errors."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast import train
from holdfast.cli.main import main
from holdfast.errors import HoldfastError
from holdfast.train import Checkpoint, Result, RunConfig, ScalingConfig

_EXAMPLES = int(os.environ.get("HOLDFAST_TEST_EXAMPLES", "60"))
_COMMANDS = (("ckpt", "ls"), ("ckpt", "show"), ("ckpt", "verify"), ("events",))


def _save_three() -> int:
    for step in range(3):
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "data").write_text(str(step))
            train.report({"step": step, "loss": float("nan")}, Checkpoint.from_directory(directory))
    return 3


def _fit(storage: Path, workers: int = 0) -> Result:
    return train.DataParallelTrainer(
        _save_three,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name="run", storage_path=str(storage)),
    ).fit()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The storage of a run that finished, with three checkpoints."""
    storage = tmp_path_factory.mktemp("storage")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_LOCAL_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HOLDFAST_QUIET", "1")
        _fit(storage)
        assert main(["ckpt", "pin", str(storage / "run" / "checkpoint_000000")]) == 0
        yield storage


def _ours(run: Path) -> list[Path]:
    """Every file of the format, the user's own left out."""
    skipped = ("data", "result.json", "progress.csv", "params.json")
    return sorted(
        path.relative_to(run)
        for path in run.rglob("*")
        if path.is_file() and path.name not in skipped and "tfevents" not in path.name and "logs" not in path.parts
    )


@contextmanager
def _copy_of(storage: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as scratch:
        yield Path(shutil.copytree(storage, Path(scratch, "storage")))


def _read_everything(run: Path) -> None:
    for command in _COMMANDS:
        out, err = StringIO(), StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = main([*command, str(run)])
        assert code in (0, 1, 2, 3, 5), err.getvalue()
        assert "unexpected" not in err.getvalue() and "Traceback" not in err.getvalue(), err.getvalue()
    try:
        result = Result.from_path(str(run))
        if result.checkpoint is not None:
            with result.checkpoint.as_directory() as directory:
                assert Path(directory, "data").exists()
    except HoldfastError as error:
        assert str(error)


_JSON: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["../../etc/passwd", "checkpoint_000001", "\x00", "holdfast.checkpoint/1.0", "a" * 300]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def _altered(text: bytes, how: str, data: st.DataObject) -> bytes:
    if how == "bytes":
        return data.draw(st.binary(max_size=200))
    if how == "cut":
        return text[: data.draw(st.integers(0, max(0, len(text) - 1)))]
    if how == "flip":
        at, bit = data.draw(st.integers(0, max(0, len(text) - 1))), data.draw(st.integers(0, 7))
        return text[:at] + bytes([text[at] ^ 1 << bit]) + text[at + 1 :] if text else b"\0"
    if how == "deep":
        return b"[" * 100_000
    lines = text.splitlines() or [b"{}"]
    at = data.draw(st.integers(0, len(lines) - 1))
    try:
        shape = json.loads(lines[at])
    except ValueError:
        shape = {}
    if not isinstance(shape, dict) or how == "other":
        shape = data.draw(_JSON)
    else:
        key = data.draw(st.sampled_from([*sorted(shape), "new"]))
        shape[key] = data.draw(_JSON)
    lines[at] = json.dumps(shape).encode("utf-8", "surrogatepass")
    return b"\n".join(lines) + b"\n"


def _seal(text: bytes) -> bytes:
    """A manifest's checksum over any content: an attacker can compute it too."""
    try:
        shape = json.loads(text)
        assert isinstance(shape, dict)
    except (ValueError, AssertionError, RecursionError):
        return text
    shape.pop("self", None)
    body = json.dumps(shape).encode("utf-8", "surrogatepass")
    return body[:-1] + b',"self":"' + blake3(body).hexdigest().encode() + b'"}\n'


def test_a_flipped_bit_anywhere_in_run_json_loses_no_record(original: Path) -> None:
    with _copy_of(original) as storage:
        path = storage / "run" / "run.json"
        content = path.read_bytes()
        for at in range(len(content)):
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            metrics = Result.from_path(storage / "run").metrics
            assert metrics is not None and metrics["step"] == 2, content[:at]
        path.write_bytes(content)


@pytest.mark.parametrize("content", [b'{"format":"\xff","id":"\xb2","epoch":1,"token":"\xff"}', b"[" * 100_000])
def test_readers_survive_what_is_not_utf_8_and_what_is_nested_too_deep(original: Path, content: bytes) -> None:
    with _copy_of(original) as storage:
        for path in _ours(storage / "run"):
            kept = (storage / "run" / path).read_bytes()
            (storage / "run" / path).write_bytes(content)
            _read_everything(storage / "run")
            (storage / "run" / path).write_bytes(kept)


@settings(max_examples=_EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data(), how=st.sampled_from(["bytes", "cut", "flip", "field", "field", "field", "other", "deep"]))
def test_readers_survive_any_content_of_any_file(original: Path, data: st.DataObject, how: str) -> None:
    with _copy_of(original) as storage:
        run = storage / "run"
        path = run / data.draw(st.sampled_from(_ours(run)))
        altered = _altered(path.read_bytes(), how, data)
        path.chmod(0o600)
        path.write_bytes(_seal(altered) if path.name == ".manifest.json" and data.draw(st.booleans()) else altered)
        _read_everything(run)


@settings(
    max_examples=_EXAMPLES // 3, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    data=st.data(),
    name=st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=30),
    content=st.binary(max_size=50),
)
def test_readers_survive_stray_files_anywhere(original: Path, data: st.DataObject, name: str, content: bytes) -> None:
    with _copy_of(original) as storage:
        run = storage / "run"
        folders = [run, *(path for path in run.rglob("*") if path.is_dir())]
        folder = data.draw(st.sampled_from(sorted(folders)))
        likely = [
            name,
            "000009.json",
            "000001.floor.json",
            ".claim-x.json",
            "000007-000001.jsonl",
            ".tmp-1-2",
            "x.beat",
        ]
        stray = folder / data.draw(st.sampled_from(likely))
        if not stray.exists() and stray.name not in (".", ".."):
            if data.draw(st.booleans()):
                stray.mkdir()
            else:
                stray.write_bytes(content)
        _read_everything(run)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"null", b'{"epoch":"x"}', b"[" * 100_000])
def test_a_driver_survives_or_refuses_damaged_files(
    original: Path, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new driver on a run, one of whose files holds nonsense, trains, or raises one of our errors."""
    monkeypatch.setenv("HOLDFAST_LOCAL_CACHE_DIR", str(tmp_path / "cache"))
    for number, path in enumerate(_ours(original / "run")):
        storage = Path(shutil.copytree(original, tmp_path / str(number)))
        damaged = storage / "run" / path
        damaged.chmod(0o600)
        damaged.write_bytes(content)
        try:
            assert _fit(storage).return_value in (None, 3), path
        except HoldfastError as error:
            assert str(error), path
