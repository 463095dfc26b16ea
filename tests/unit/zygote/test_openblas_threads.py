"""A forked worker has OpenBLAS's threads once it computes, and not before."""

from __future__ import annotations

import json
import subprocess
import sys

_PROGRAM = """
import json, os
from types import SimpleNamespace
from holdfast.linux.process import thread_names
from holdfast.worker.environment import find_openblas, set_openblas_threads
from holdfast.zygote.fork_safety import one_thread_each
with one_thread_each():
    import numpy
os.environ["OMP_NUM_THREADS"] = "3"
libraries = find_openblas()
for workers in (1, 2, 1):
    set_openblas_threads(SimpleNamespace(local_world_size=workers), libraries)
    if (pid := os.fork()) == 0:
        found = [[get() for _, get in libraries], len(thread_names())]
        numpy.ones((500, 500)) @ numpy.ones((500, 500))
        print(json.dumps([*found, len(thread_names())]), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
    assert len(thread_names()) == 1
"""


def test_a_worker_starts_the_threads_of_openblas_when_it_computes() -> None:
    """The only worker of a node has as many as it may use, one of several has one."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[[3], 1, 3], [[1], 1, 1], [[3], 1, 3]]
