"""What a new user does first: README's script with another number of workers, the example that is killed and started
again, Ctrl+C."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from tests.faults.programs.sandbox import Sandbox

ROOT = Path(__file__).parents[2]
ENTRYPOINT = ROOT / "examples" / "entrypoint.py"
_ENDLESS = """
import sys, threading
from holdfast import train

def train_loop():
    train.report({"step": 1})
    threading.Event().wait()

train.DataParallelTrainer(train_loop, run_config=train.RunConfig("run", sys.argv[1])).fit()
"""


def _python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200, check=False)


def test_the_script_of_the_readme_goes_on_with_another_number_of_workers(sandbox: Sandbox) -> None:
    (script,) = re.findall(r"<!-- file: train.py -->\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    script = script.replace('"epochs": 20', '"epochs": int(__import__("sys").argv[1])')
    script = script.replace("num_workers=2", 'num_workers=int(__import__("sys").argv[2])')
    (sandbox.root / "train.py").write_text(script)
    for epochs, workers in (("2", "2"), ("4", "1")):
        done = _python("train.py", epochs, workers, cwd=sandbox.root)
        assert done.returncode == 0, done.stderr
        assert f"'epoch': {int(epochs) - 1}" in done.stdout
    rows = (sandbox.root / "results" / "first" / "progress.csv").read_text().splitlines()
    assert len(rows) == 1 + 4, "each epoch once: it was continued, not begun again"


def _start(sandbox: Sandbox, script: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(script), *arguments],
        cwd=sandbox.root,
        env=os.environ | {"HOLDFAST_JSON": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _await(process: subprocess.Popen[str], word: str, count: int = 1) -> list[str]:
    """The output until `word` was there so many times."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        count -= word in line
        if count == 0:
            return lines
    raise AssertionError("".join(lines))


def test_the_example_goes_on_after_its_driver_was_killed(sandbox: Sandbox) -> None:
    named = ("--storage_path", str(sandbox.storage), "--run_name", "run", "--epochs")
    first = _start(sandbox, ENTRYPOINT, *named, "100000")
    _await(first, "CheckpointCommitted", 3)
    first.kill()
    first.communicate(timeout=60)
    newest = max(path.parent.name for path in sandbox.storage.glob("run/*/.manifest.json"))
    epochs = int(newest.removeprefix("checkpoint_")) + 30
    again = _start(sandbox, ENTRYPOINT, *named, str(epochs))
    said, _ = again.communicate(timeout=200)
    assert again.returncode == 0, said
    starts = re.findall(r"rank \d starts with epoch (\d+)", said)
    assert len(starts) == 2 and all(int(epoch) > 0 for epoch in starts)
    assert f"finished: {{'epoch': {epochs - 1}," in said


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_script_ends_with_the_code_of_the_signal_and_no_traceback(
    sandbox: Sandbox, number: int, code: int
) -> None:
    script = sandbox.root / "script.py"
    script.write_text(_ENDLESS)
    process = _start(sandbox, script, str(sandbox.storage))
    _await(process, "Reported")
    process.send_signal(number)
    said, _ = process.communicate(timeout=100)
    assert process.returncode == code, said
    assert "Traceback" not in said


_TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_ctrl_c_at_a_terminal_replaces_the_live_line_by_the_summary(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOLDFAST_QUIET", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    script = sandbox.root / "script.py"
    script.write_text(_ENDLESS)
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-c", _TAKE_TERMINAL, str(script), str(sandbox.storage)]
    with subprocess.Popen(
        command, cwd=sandbox.root, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        said = b""
        with os.fdopen(ours, "r+b", buffering=0) as terminal:
            while chunk := _read(terminal):
                if b"step=1 | it 1 | 1 worker" in said + chunk and b"step=1 | it 1 | 1 worker" not in said:
                    terminal.write(b"\x03")
                said += chunk
    assert process.returncode == 130, said
    text = said.decode()
    assert "Traceback" not in text
    before, _, after = text.rpartition("\r\x1b[2K")
    assert "Training was stopped after 1 iteration" in after, "nothing is drawn over the summary"
    drawn = [line.rstrip("\r") for line in before.split("\r\x1b[2K")[1:]]
    assert all(len(line.partition("\r")[0]) < 80 for line in drawn if "|" in line)


def _read(terminal: Any) -> bytes:
    try:
        return bytes(terminal.read(65_536) or b"")
    except OSError:  # Linux's end of a terminal that nobody has open
        return b""
