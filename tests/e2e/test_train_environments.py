"""A script in unusual environments gives the right result and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.small import make_trainer
from tests.faults.programs import processes
from tests.faults.programs.sandbox import Sandbox

from holdfast import train

_SCRIPT = """
import json, os, sys, tempfile
from pathlib import Path
from holdfast import train

def train_loop(config):
    total = 0
    for step in range(3):
        total += config["x"]
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "total.json").write_text(json.dumps(total))
            train.report({"total": total}, checkpoint=train.Checkpoint.from_directory(directory))
    print("the worker says so")
    return total

trainer = train.DataParallelTrainer(
    train_loop,
    train_loop_config={"x": 14},
    scaling_config=train.ScalingConfig(num_workers=1),
    run_config=train.RunConfig(name="run", storage_path=sys.argv[1]),
)
result = trainer.fit()
with result.checkpoint.as_directory() as directory:
    found = json.loads(Path(directory, "total.json").read_text())
Path(sys.argv[2]).write_text(f"{result.return_value} {found}")
"""


@dataclass(frozen=True)
class Odd:
    """One environment: how a shell sets it up around `"$@"`, and which variables are set or (None) not set."""

    shell: str = '"$@"'
    variables: Mapping[str, str | None] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    """Of the Python interpreter."""
    may_fail: bool = False
    """Python itself ends with an error when its standard output is gone."""


_OWN_HOME: dict[str, str | None] = {"HOLDFAST_LOCAL_CACHE_DIR": None}
_ENVIRONMENTS = {
    "no HOME": Odd(variables={"HOME": None}),
    "a HOME that is no directory": Odd(variables={**_OWN_HOME, "HOME": "/dev/null"}),
    "a HOME of many characters": Odd(variables={**_OWN_HOME, "HOME": "{root}/" + "h" * 80}),
    "a HOME with blanks and quotes, python -I -B": Odd(
        variables={**_OWN_HOME, "HOME": "{root}/it's my home"}, options=("-I", "-B")
    ),
    "a working directory that was removed": Odd('mkdir gone && cd gone && rmdir ../gone && "$@"'),
    "LC_ALL=C": Odd(variables={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    "an unknown locale, python -O": Odd(variables={"LC_ALL": "xx_YY.nonsense"}, options=("-OO",)),
    "no TERM, no TMPDIR, a strict umask": Odd('umask 077 && "$@"', {"TERM": None, "TMPDIR": None}),
    "a dumb TERM, unbuffered": Odd(variables={"TERM": "dumb", "COLUMNS": "1", "PYTHONUNBUFFERED": "1"}),
    "almost no variables": Odd('exec env -i PATH="$PATH" HOME="{root}" "$@"'),
    "closed stdin, hang-ups ignored": Odd("trap '' HUP INT; \"$@\" <&-"),
    "few open files, no core dumps, small stack": Odd('ulimit -n 96 && ulimit -c 0 && ulimit -s 1024 && "$@"'),
    "a TMPDIR that does not exist": Odd(variables={"TMPDIR": "{root}/absent"}),
    "a long TMPDIR": Odd('mkdir -p "$TMPDIR" && "$@"', {"TMPDIR": "{root}/" + "t" * 120}),
    "python -X dev": Odd(options=("-X", "dev")),
    "closed stdout": Odd('"$@" >&-'),
    "closed stdout and stderr": Odd('"$@" >&- 2>&-'),
    "a full stdout": Odd('"$@" >/dev/full', may_fail=True),
    "a broken pipe": Odd('set -o pipefail; "$@" 2>&1 | true', may_fail=True),
}


@pytest.mark.parametrize("name", _ENVIRONMENTS)
def test_a_script_finishes_in_environment(name: str, sandbox: Sandbox) -> None:
    odd, mark = _ENVIRONMENTS[name], uuid.uuid4().hex
    script, answer = sandbox.root / "script.py", sandbox.root / "answer"
    script.write_text(textwrap.dedent(_SCRIPT))
    environment = {**os.environ, "HOME": str(sandbox.root), "HOLDFAST_TEST_MARK": mark}
    for variable, value in odd.variables.items():
        environment.pop(variable, None)
        if value is not None:
            environment[variable] = value.format(root=sandbox.root)
    command = [sys.executable, *odd.options, str(script), str(sandbox.storage), str(answer)]
    done = subprocess.run(
        ["bash", "-c", odd.shell.replace("{root}", str(sandbox.root)), "bash", *command],
        env=environment,
        cwd=sandbox.root,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert answer.exists(), (done.stdout, done.stderr)
    assert answer.read_text() == "42 42"
    assert odd.may_fail or done.returncode == 0, (done.stdout, done.stderr)
    assert "Traceback" not in done.stdout + done.stderr
    assert len(sandbox.check_stored()) == 3
    processes.wait_gone(*processes.with_environment(f"HOLDFAST_TEST_MARK={mark}"))
    processes.wait_gone(*processes.with_environment(str(sandbox.root)))
    left = [path for path in sandbox.root.rglob("*") if path.is_file() and _is_left(path.relative_to(sandbox.root))]
    assert left == []


def _is_left(path: Path) -> bool:
    """Whether this is neither the script's nor the run's own file, nor the user's run secret, which stays."""
    return (
        path.name != "secret" and path.parts[0] not in ("storage", "script.py", "answer") and "work" not in path.parts
    )


def test_a_relative_path_of_the_drivers_directory_is_pointed_out(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sandbox.root)
    (sandbox.root / "data.csv").write_text("1")

    def function(config: dict[str, Any]) -> None:
        Path(os.environ["TUNE_ORIG_WORKING_DIR"], "data.csv").read_text()
        Path(config["name"]).read_text()

    for name, hinted in (("data.csv", True), ("nowhere.csv", False)):
        with pytest.raises(train.WorkerGroupError) as caught:
            make_trainer(sandbox, function, config={"name": name}, name=name).fit()
        text = str(caught.value)
        assert ("is there: workers run in a directory of the run's" in text) is hinted
        assert isinstance(caught.value.worker_failures[0], FileNotFoundError)
