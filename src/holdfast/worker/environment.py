"""What a worker finds around it: torchrun's variables, its directory, its thread counts, its own randomness.

`bootstrap` calls these in order, before the user's function. What concerns OpenBLAS is done in the zygote, which forks
the worker: there it costs nothing.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError
from holdfast.storage.local_cache import local_cache_dir
from holdfast.storage.private_directory import make_private_directory
from holdfast.worker.job import Assignment

__all__ = [
    "NO_TERMINAL",
    "RUN_VARIABLE",
    "OpenBlas",
    "count_openblas_threads",
    "enter_work_dir",
    "find_openblas",
    "keep_compile_cache",
    "one_openblas_thread",
    "refresh_randomness",
    "refuse_breakpoints",
    "set_environment",
    "set_openblas_threads",
    "set_torch_threads",
    "use_temp_dir",
]

_OPENBLAS_SETTERS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)

RUN_VARIABLE = "HOLDFAST_RUN_ID"
"""Which run a process belongs to that a worker started: children inherit it."""
OpenBlas = tuple[Callable[[int], object], Callable[[], int]]
"""Of one OpenBLAS that is loaded, what sets its thread count, and what gives it."""
NO_TERMINAL = (
    "a worker has no terminal; set ScalingConfig(num_workers=0), which runs the function in the driver's own process."
)


def set_environment(assignment: Assignment) -> None:
    """The variables that torchrun sets, so that code written for it runs."""
    here = assignment
    variables = dict(
        RANK=str(here.rank),
        LOCAL_RANK=str(here.local_rank),
        GROUP_RANK=str(here.node_rank),
        ROLE_RANK=str(here.rank),
        ROLE_NAME="default",
        WORLD_SIZE=str(here.world_size),
        LOCAL_WORLD_SIZE=str(here.local_world_size),
        GROUP_WORLD_SIZE=str(here.node_count),
        ROLE_WORLD_SIZE=str(here.world_size),
        MASTER_ADDR=here.master_address,
        MASTER_PORT=str(here.master_port),
        TORCHELASTIC_RESTART_COUNT=str(here.restart_count),
        TORCHELASTIC_MAX_RESTARTS=str(here.max_restarts),
        TORCHELASTIC_RUN_ID=here.trial_id,
        TORCHELASTIC_ERROR_FILE=here.error_file,
        TORCHELASTIC_USE_AGENT_STORE="False",
        **{RUN_VARIABLE: here.run},
        HOLDFAST_WORKER=here.trial_id,  # the same as TORCHELASTIC_RUN_ID: these variables are not torchrun's
    )
    for name, value in variables.items():  # `update` looks up what a mapping is, which takes a forked process longer
        os.environ[name] = value
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if here.local_world_size > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if here.gpus is not None:
        os.environ.update(CUDA_VISIBLE_DEVICES=",".join(here.gpus), HOLDFAST_OWN_GPUS="1")
    else:
        os.environ.pop("HOLDFAST_OWN_GPUS", None)  # of the worker that has started this run


def use_temp_dir(assignment: Assignment) -> None:
    """Set TMPDIR to a directory that the agent removes, unless the user has set it."""
    if "TMPDIR" not in os.environ:
        keep_compile_cache()
        os.environ["TMPDIR"] = assignment.temp_dir
        tempfile.tempdir = None  # whatever the zygote had found out


def keep_compile_cache() -> None:
    """torch.compile keeps its cache among temporary files, where a restarted worker would not find it: let it lie
    elsewhere. Called in the zygote, too, so that workers find that done."""
    if "TMPDIR" not in os.environ and "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(local_cache_dir() / "torch_compile")


def enter_work_dir(assignment: Assignment) -> None:
    if assignment.change_directory:
        try:
            os.chdir(assignment.work_dir)  # the agent has made it
        except FileNotFoundError:
            os.chdir(make_private_directory(Path(assignment.work_dir)))


def refuse_breakpoints() -> None:
    """Make `breakpoint()` say how to get one, unless the user chose a debugger that needs no terminal."""
    default = sys.breakpointhook

    def hook(*arguments: Any, **options: Any) -> Any:
        if os.environ.get("PYTHONBREAKPOINT", "") in ("", "pdb.set_trace"):
            raise ConfigError(f"breakpoint() in a worker: {NO_TERMINAL}")
        return default(*arguments, **options)

    sys.breakpointhook = hook


def refresh_randomness() -> None:
    """Seed the random generators anew: workers forked from one process would draw the same numbers."""
    random.seed()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()  # a device's is seeded when a process uses it first


def count_openblas_threads() -> int:
    """How many threads the OpenBLAS libraries may have started: each one counts its caller in."""
    return sum(max(0, get_threads() - 1) for _, get_threads in find_openblas())


@contextmanager
def one_openblas_thread() -> Iterator[None]:
    """Let every OpenBLAS that is loaded use one thread, for the time of the block."""
    functions = [(setter, get_threads()) for setter, get_threads in find_openblas()]
    for setter, _ in functions:
        setter(1)
    try:
        yield
    finally:
        for setter, count in functions:
            setter(count)


def find_openblas() -> list[OpenBlas]:
    """Every OpenBLAS that is loaded."""
    paths = set()
    with Path("/proc/self/maps").open() as maps:
        for line in maps:
            if "openblas" in line:
                paths.add(line.split(maxsplit=5)[-1].strip())
    found: list[OpenBlas] = []
    for path in sorted(paths):
        library = ctypes.CDLL(path)
        for name in _OPENBLAS_SETTERS:
            if (setter := getattr(library, name, None)) is not None:
                found.append((setter, getattr(library, name.replace("_set_", "_get_"))))
                break
    return found


def set_openblas_threads(assignment: Assignment, libraries: list[OpenBlas]) -> None:
    """In the zygote, right before it forks the worker: set the thread count that the worker would have as a fresh
    process. OpenBLAS starts its threads at once, ends them before the fork, and starts them again in the worker when
    that has a use for them; set in the worker, they would each spin for some 25 ms."""
    wanted = 1 if assignment.local_world_size > 1 else _count("OPENBLAS_NUM_THREADS") or _thread_count()
    for setter, get_threads in libraries:
        if get_threads() != wanted:
            setter(wanted)


def set_torch_threads() -> None:
    """Set the thread count that a fresh process would have: the zygote imported torch with one thread."""
    torch, wanted = sys.modules.get("torch"), _thread_count()
    if torch is not None and torch.get_num_threads() != wanted:
        torch.set_num_threads(wanted)


def _thread_count() -> int:
    return _count("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))


def _count(name: str) -> int | None:
    """torchrun users write numbers; OpenMP also allows lists, one for each level."""
    first = os.environ.get(name, "").split(",")[0].strip()
    return int(first) if first.isdigit() and int(first) > 0 else None
