"""What a new user does first: README's script with another number of workers, the example that is killed and started
again, Ctrl+C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

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
