"""A script of `examples/frameworks` under Holdfast or Ray: `python framework.py SYSTEM SCRIPT DIRECTORY`.

For Ray, the script's `holdfast` is replaced by `ray`, as a user would who goes the other way.
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
    source = Path(SCRIPT).read_text().replace("holdfast", SYSTEM)
    source = source.replace("\ndef main():\n", _MARKED.format(system=SYSTEM, directory=DIRECTORY))
    sys.argv = [SCRIPT, "--storage_path", f"{DIRECTORY}/storage", "--run_name", "run"]
    names = sys.modules["__main__"].__dict__
    exec(compile(source, SCRIPT, "exec"), names)


main()
