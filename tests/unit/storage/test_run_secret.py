"""The run secret: made once, kept private, and the same for everybody of this user."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.storage.run_secret import find_secret, make_secret, open_secret, read_secret_file, secret_path
from holdfast.storage.state_dir import state_dir


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOLDFAST_TOKEN", "HOLDFAST_TOKEN_FILE", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOLDFAST_STATE_DIR", str(tmp_path / "state"))


def test_secrets_differ() -> None:
    assert len({make_secret() for _ in range(10)}) == 10


def test_the_secret_is_made_once_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    assert find_secret() is None
    made = open_secret()
    assert open_secret() == find_secret() == made
    assert secret_path() == tmp_path / "state" / "secret"
    assert secret_path().stat().st_mode & 0o777 == 0o600
    assert secret_path().parent.stat().st_mode & 0o777 == 0o700
    assert os.listdir(tmp_path / "state") == ["secret"]  # noqa: PTH208


def test_drivers_that_start_at_once_agree_on_the_secret() -> None:
    found: list[str] = []
    start = threading.Barrier(8)

    def open_one() -> None:
        start.wait()
        found.append(open_secret())

    threads = [threading.Thread(target=open_one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1


def test_variables_take_the_place_of_the_state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "given").touch(mode=0o600)
    (tmp_path / "given").write_text(" from a file \n")
    monkeypatch.setenv("HOLDFAST_TOKEN_FILE", str(tmp_path / "given"))
    assert open_secret() == "from a file"
    monkeypatch.setenv("HOLDFAST_TOKEN", "from the variable")
    assert open_secret() == "from the variable"
    assert not (tmp_path / "state").exists()


def test_a_given_file_that_is_missing_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_TOKEN_FILE", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="missing cannot be read: No such file"):
        open_secret()


@pytest.mark.parametrize(
    ("content", "mode", "why"), [(b"s", 0o640, "chmod 600"), (b" \n", 0o600, "is empty"), (b"\xff", 0o600, "text")]
)
def test_a_file_that_cannot_be_a_secret_is_refused(tmp_path: Path, content: bytes, mode: int, why: str) -> None:
    path = tmp_path / "bad"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=why):
        read_secret_file(path)


def test_a_state_directory_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOLDFAST_STATE_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match=r"cannot be kept in .*below.*HOLDFAST_STATE_DIR"):
        open_secret()


def test_where_the_state_directory_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_STATE_DIR", "~/mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state_dir() == tmp_path / "mine"
    monkeypatch.delenv("HOLDFAST_STATE_DIR")
    assert state_dir() == tmp_path / ".local" / "state" / "holdfast"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert state_dir() == tmp_path / "xdg" / "holdfast"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert state_dir() == tmp_path / f"holdfast-{os.getuid()}"
