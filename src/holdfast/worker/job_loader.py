"""Opening the job: the one place where something that came over the wire is unpickled, and the modules that go
with it.

Runs in the zygote, once for all workers, or in a cold worker, for itself. An error in here is the training
function's error, and is kept to be told by every worker; `zygote.fork_safety` says whether the process may still
be forked afterwards.
"""

from __future__ import annotations

import gc
import importlib
import linecache
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from holdfast.core.records import WorkerFailure
from holdfast.worker.failure import failure_of
from holdfast.worker.job import Job
from holdfast.worker.main_module import show_main

__all__ = [
    "ANY_RANK",
    "Loaded",
    "import_for_good",
    "import_quietly",
    "load_job",
    "set_up_imports",
    "unpickling_failure",
]


ANY_RANK = -1
"""In the failure of a job that could not be unpickled, which every rank reports as its own."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The job, or why there is none."""

    job: Job | WorkerFailure


def set_up_imports(sys_path: Sequence[str], environment: dict[str, str]) -> None:
    """Take over the controller's `sys.path` and environment; entries that only this process has come last."""
    os.environ.update(environment)
    sys.path[:] = [*sys_path, *(entry for entry in sys.path if entry not in sys_path and entry != "")]


def load_job(function_fd: int) -> Loaded:
    """Unpickle the job from the memory behind a descriptor. Whatever goes wrong is the answer, not an exception."""
    import cloudpickle

    try:
        with _mapped(function_fd) as function:
            job = cloudpickle.loads(function)
        if not isinstance(job, Job):
            raise TypeError(f"The training function arrived as {type(job).__qualname__}, not as a job.")
        for name, text in job.sources.items():
            # Without a time, as IPython enters them: `linecache` then never looks for a file.
            linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        show_main(job)
        return Loaded(job)
    except BaseException as error:  # noqa: BLE001  unpickling runs the user's code, which may raise or exit at will
        return Loaded(unpickling_failure(error, ANY_RANK))


def unpickling_failure(error: BaseException, rank: int) -> WorkerFailure:
    """The failure of a rank whose function or configuration could not be opened."""
    missing = isinstance(error, ModuleNotFoundError)
    return failure_of(error, rank, 1, ": import it in the function, or install it on the node" if missing else "")


@contextmanager
def _mapped(fd: int) -> Iterator[mmap.mmap | bytes]:
    """The memory behind a descriptor, mapped and so not copied."""
    size_bytes = os.fstat(fd).st_size
    if not size_bytes:
        yield b""
        return
    memory = mmap.mmap(fd, size_bytes, access=mmap.ACCESS_READ)
    try:
        yield memory
    finally:
        with suppress(BufferError):  # an unpickling that failed may still hold it
            memory.close()


def import_for_good(name: str) -> None:
    """Import a module that stays as long as this process, and leaves next to no garbage. The garbage collector would
    look at all that it makes again and again: of importing torch and torch._dynamo that takes a quarter of the time."""
    gc.disable()
    try:
        import_quietly(name)
    finally:
        gc.freeze()  # nor does it look at it later
        gc.enable()


def import_quietly(name: str) -> bool:
    """Import a module, if that works; False where it raises anything."""
    try:
        importlib.import_module(name)
    except BaseException:  # noqa: BLE001  someone's module: it may raise anything, SystemExit included
        return False
    return True
