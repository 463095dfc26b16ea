"""The counting benchmark parses strace's log, and counts a real run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from bench.counts import _Bench, system_calls

_LOG = """\
101 openat(AT_FDCWD</work>, "/data/run/a", O_RDONLY|O_CLOEXEC) = 3</data/run/a>
101 openat(AT_FDCWD</work>, "/data/run/missing", O_RDONLY|O_CLOEXEC) = -1 ENOENT (No such file or directory)
101 openat(AT_FDCWD</work>, "/data/run", O_RDONLY|O_DIRECTORY|O_CLOEXEC) = 4</data/run>
101 openat(AT_FDCWD</work>, "/etc/passwd", O_RDONLY) = 3</etc/passwd>
101 linkat(AT_FDCWD</work>, "/proc/self/fd/5", 4</data/run>, "b", AT_SYMLINK_FOLLOW) = 0
102 fsync(4</data/run> <unfinished ...>
101 unlink("/data/run/b") = 0
102 <... fsync resumed>) = 0
102 +++ exited with 0 +++
"""


def test_an_strace_log_is_counted() -> None:
    assert system_calls(_LOG.splitlines(), "/data") == {
        "fsync, fdatasync": 1,
        "files made in storage": 1,
        "files read in storage": 1,
        "files removed in storage": 1,
        "system calls": 7,
    }


@pytest.mark.slow
def test_a_run_is_counted(tmp_path: Path) -> None:
    bench = _Bench(Path(__file__).parents[2], tmp_path)
    assert bench.timed("commits", 1)["CPU ms"] > 0
    requests, messages = bench.requested("commits", 1)
    assert requests["PUT"] > 0 and messages["Upload"] == 1
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    counts = bench.traced("commits", 1)
    assert min(counts["fsync, fdatasync"], counts["files made in storage"], counts["messages on the wire"]) > 0
