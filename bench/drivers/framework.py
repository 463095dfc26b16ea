"""A script of `examples/frameworks` under Holdfast, Ray or torchrun: `python framework.py SYSTEM SCRIPT DIRECTORY`.

For Ray, the script's `holdfast` is replaced by `ray`, as a user would who goes the other way. torchrun starts and
restarts the processes itself: the script has the sessions and checkpoints of Holdfast's local mode there. Only rank 0
can save in that mode, so a script that saves on every rank (FSDP2) saves nothing and starts anew.
"""

from __future__ import annotations

import sys
from pathlib import Path

SYSTEM, SCRIPT, DIRECTORY = sys.argv[1:4]
_MARKED = """
from bench.drivers.marked_reports import marking
train_func = marking(train_func, {system!r}, {directory!r})


def main():
"""


def main() -> None:
    package = "ray" if SYSTEM == "ray" else "holdfast"
    source = Path(SCRIPT).read_text().replace("holdfast", package)
    source = source.replace("\ndef main():\n", _MARKED.format(system=package, directory=DIRECTORY))
    sys.argv = [SCRIPT, "--storage_path", f"{DIRECTORY}/storage", "--run_name", "run"]
    if SYSTEM == "torchrun":
        source = source.replace("max_failures=3", "max_failures=0")
        source = source.replace("checkpoint=train.Checkpoint.from_state(state)", "checkpoint=None")
        sys.argv += ["--num_workers", "0"]
    names = sys.modules["__main__"].__dict__
    exec(compile(source, SCRIPT, "exec"), names)


main()
