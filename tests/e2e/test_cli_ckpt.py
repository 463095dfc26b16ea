"""`holdfast ckpt` from end to end, on a disk and on an S3 server: what is printed, what is left, and the exit codes."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.contract.servers import Server

from holdfast.checkpoint.commit import commit_directory, reserve
from holdfast.cli.main import main
from holdfast.storage.locate import open_store
from holdfast.storage.uri import join

DIES_WHILE_UPLOADING = """
import os, sys
from pathlib import Path
from holdfast.checkpoint.commit import reserve, upload_part
from holdfast.storage.locate import open_store
store = open_store(sys.argv[1])
upload_part(store, reserve(store), Path(sys.argv[2]), rank=0, parent_files=None)
os.kill(os.getpid(), 9)
"""


class Shell:
    """`holdfast` in this process: its exit code, output, and JSON."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *arguments: str | Path, code: int = 0) -> str:
        self._capsys.readouterr()
        found = main([str(one) for one in arguments])
        self.out, self.err = self._capsys.readouterr()
        assert found == code, self.err
        assert "Traceback" not in self.err
        assert code in (0, 1) or self.err.startswith("error: ")
        return self.out

    def json(self, *arguments: str | Path, code: int = 0) -> Any:
        return json.loads(self(*arguments, "--json", code=code))


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


@pytest.fixture(params=["disk", "s3"])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URI of a run that has nothing yet."""
    if request.param == "disk":
        yield str(tmp_path / "run")
        return
    server: Server = request.getfixturevalue("rclone")
    for key, value in server.environment.items():
        monkeypatch.setenv(key, value)
    yield server.uri(server.new_bucket(), "run")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    (directory / "deep").mkdir(parents=True)
    (directory / "weights").write_bytes(os.urandom(300_000))
    (directory / "deep" / "notes").write_text("hello")
    return directory


def test_put_ls_get_pin_rm_of_a_checkpoint(run: str, source: Path, tmp_path: Path, shell: Shell) -> None:
    first, second = join(run, "checkpoint_000000"), join(run, "checkpoint_000001")
    put = shell.json("ckpt", "put", source, run, "--metric", "loss=0.5", "--metric", "stage=warm")
    assert (put["name"], put["file_count"], put["size_bytes"], put["unchanged_bytes"]) == (
        "checkpoint_000000",
        2,
        300_005,
        0,
    )
    (source / "deep" / "notes").write_text("world")
    assert "293.0 KiB of it unchanged" in shell("ckpt", "put", source, run, "--metric", "loss=nan")

    listed = shell.json("ckpt", "ls", run)
    assert [(one["name"], one["newest"], one["pinned"], one["metrics"]) for one in listed["checkpoints"]] == [
        ("checkpoint_000000", False, False, {"loss": 0.5, "stage": "warm"}),
        ("checkpoint_000001", True, False, {"loss": {"$float": "nan"}}),
    ]
    assert [line.split()[0] for line in shell("ckpt", "ls", run).splitlines()] == [
        "NAME",
        "checkpoint_000000",
        "checkpoint_000001",
    ]
    assert shell.out.splitlines()[-1].endswith("newest")

    shown = shell.json("ckpt", "show", run)
    assert "taking its newest checkpoint, checkpoint_000001" in shell.err
    assert shown["name"] == "checkpoint_000001" and shown["parent"] == "checkpoint_000000"
    assert [(one["path"], one["size_bytes"]) for one in shown["files"]] == [("deep/notes", 5), ("weights", 300_000)]
    assert "deep/notes" in shell("ckpt", "show", first)

    assert shell("ckpt", "verify", run).splitlines()[-1].startswith("2 ok, 0 damaged (585.9 KiB hashed")
    assert shell.json("ckpt", "verify", second, "--shallow")["intact"] is True

    assert "verified" in shell("ckpt", "get", run, tmp_path / "out")
    assert (tmp_path / "out" / "weights").read_bytes() == (source / "weights").read_bytes()
    assert (tmp_path / "out" / "deep" / "notes").read_text() == "world"
    shell("ckpt", "get", first, tmp_path / "out", code=4)
    assert (tmp_path / "out" / "deep" / "notes").read_text() == "world"
    shell("ckpt", "get", first, tmp_path / "out", "--force")
    assert (tmp_path / "out" / "deep" / "notes").read_text() == "hello"

    shell("ckpt", "pin", first)
    assert shell.json("ckpt", "ls", run)["checkpoints"][0]["pinned"] is True
    shell("ckpt", "rm", first, "--force", code=4)
    assert "pinned" in shell.err
    shell("ckpt", "unpin", first)
    shell("ckpt", "rm", first, second, code=4)
    assert "newest" in shell.err
    assert len(shell.json("ckpt", "ls", run)["checkpoints"]) == 2
    assert shell("ckpt", "rm", first) == "Removed checkpoint_000000 (293.0 KiB).\n"
    assert shell.json("ckpt", "rm", second, "--force")["removed"] == [open_store(second).uri]
    assert open_store(run).list() == []
    shell("ckpt", "show", second, code=3)


def test_verify_finds_damage_and_get_refuses_it(run: str, source: Path, tmp_path: Path, shell: Shell) -> None:
    store = open_store(run)
    commit_directory(store, source)
    store.put("checkpoint_000000/deep/notes", b"HELLO")
    found = shell.json("ckpt", "verify", run, code=1)
    assert (found["intact"], found["ok"], [one["name"] for one in found["damaged"]]) == (
        False,
        [],
        ["checkpoint_000000"],
    )
    assert "deep/notes holds other bytes" in shell("ckpt", "verify", run, code=1)
    shell("ckpt", "verify", run, "--shallow")
    shell("ckpt", "get", run, tmp_path / "out", code=1)
    assert "error: " in shell.err and "deep/notes" in shell.err
    assert sorted(path.name for path in tmp_path.iterdir() if path.name not in ("run", "s3")) == ["source"]
    store.delete(["checkpoint_000000/deep/notes"])
    assert "damaged   checkpoint_000000  deep/notes is missing" in shell("ckpt", "verify", run, "--shallow", code=1)
    assert store.size("checkpoint_000000/weights") == 300_000, "verify touches nothing that is damaged"


def test_repair_removes_a_dead_writer_s_leftovers_and_nothing_else(run: str, source: Path, shell: Shell) -> None:
    store = open_store(run)
    commit_directory(store, source)
    store.put("mine/file", b"the user's own")
    subprocess.run([sys.executable, "-c", DIES_WHILE_UPLOADING, run, source], check=False, timeout=60)
    alive = reserve(store)
    report = shell.json("ckpt", "verify", run)
    assert [(one["name"], one["writer_gone"]) for one in report["leftovers"]] == [
        ("checkpoint_000001", True),
        (alive.name, False),
    ]
    assert report["removed"] == []
    assert "its writer is gone; --repair removes it" in shell("ckpt", "verify", run)
    assert shell.json("ckpt", "verify", run, "--repair")["removed"] == ["checkpoint_000001"]
    assert f"leftover  {alive.name}" in shell("ckpt", "verify", run, "--repair")
    assert {entry.key.partition("/")[0] for entry in store.list()} == {"checkpoint_000000", "mine", alive.name}
    assert shell("ckpt", "verify", run, "--repair", "--older-than", "0s").splitlines()[-2] == f"removed   {alive.name}"
    assert len(shell.json("ckpt", "ls", run)["checkpoints"]) == 1


def test_put_under_an_existing_name_is_refused(run: str, source: Path, shell: Shell) -> None:
    shell("ckpt", "put", source, run, "--name", "best one")
    shell("ckpt", "put", source, run, "--name", "best one", code=4)
    shell("ckpt", "put", source, run, "--name", "../up", code=2)
    assert shell.json("ckpt", "show", join(run, "best one"))["index"] == 0


def test_wrong_arguments_give_one_sentence_and_an_exit_code(tmp_path: Path, source: Path, shell: Shell) -> None:
    run, gone = tmp_path / "run", tmp_path / "gone"
    shell("ckpt", "ls", gone, code=3)
    shell("ckpt", "verify", gone, code=3)
    shell("ckpt", "get", gone, tmp_path / "out", code=3)
    shell("ckpt", "put", gone, run, code=2)
    shell("ckpt", "put", source, run, "--metric", "loss", code=2)
    shell("ckpt", "verify", source, "--older-than", "soon", code=2)
    shell("ckpt", "ls", "ftp://host/run", code=2)
    shell("ckpt", "put", source, run)
    shell("ckpt", "rm", run, code=2)
    assert "name one of its checkpoints" in shell.err
    shell("ckpt", "ls", run / "checkpoint_000000", code=2)
    shell("ckpt", "ls", tmp_path)
    assert "below it are: run, source" in shell.err
    nothing = shell("ckpt", "verify", tmp_path)
    assert "holds no committed checkpoint; below it are: run, source" in nothing and " ok" not in nothing
    shell("events", run, code=3)
    assert not gone.exists()


def test_ctrl_c_ends_a_put_quietly_and_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C is sent when the progress bar shows that the transfer has begun."""
    source, run = tmp_path / "source", tmp_path / "run"
    source.mkdir()
    with (source / "huge").open("wb") as file:
        file.truncate(32 * 1024**3)  # a hole: costs nothing to make
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", _SLOW_TRANSFERS]
    process = subprocess.Popen(
        [*command, "ckpt", "put", str(source), str(run)],
        env={**os.environ, "COLUMNS": "80"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    )
    try:
        os.close(theirs)
        shown = b""
        while b" left" not in shown:
            shown += os.read(ours, 4096)
        assert b"Committing" in shown and b"of 32.0 GiB" in shown  # it may end within a character
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 130
        assert out == ""
        assert b"Traceback" not in shown + _rest(ours)
        assert [path for path in run.rglob("*") if path.is_file()] == []
    finally:
        process.kill()
        process.wait()
        os.close(ours)


# As a slow storage would be: at full speed, a second's worth of writes would keep a slow disk busy for a minute, in
# which the kernel lets no write end.
_SLOW_TRANSFERS = """
import sys, time
from holdfast.cli import interrupt
from holdfast.cli.main import main

check = interrupt.check
interrupt.check = lambda: (time.sleep(0.05), check())
sys.exit(main())
"""


def _rest(terminal: int) -> bytes:
    """What is still to be read from a terminal whose other end is closed."""
    rest = b""
    try:
        while block := os.read(terminal, 4096):
            rest += block
    except OSError:
        pass  # how Linux tells the end of a terminal
    return rest
