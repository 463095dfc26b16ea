"""When agent and zygote may be forked from the driver, so that nothing is imported twice: which drivers are fit for it.

`fork_safety` asks the same of a zygote, a process of ours. A driver is the user's: it may have used its thread pools,
and state of it that workers of a cluster would not see must not reach workers here either. What a forked process
can put in order is in `driver_fork_reset`; what it cannot is a reason here, and the agent is started as a new process.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from holdfast.linux.process import thread_names
from holdfast.worker.environment import count_openblas_threads

__all__ = ["FORK_VARIABLE", "end_openmp_threads", "unfit_reason", "user_modules"]

FORK_VARIABLE = "HOLDFAST_FORK_DRIVER"
_MEMORY_MAX_BYTES = 1 << 30
"""Of the driver's own: every fork copies the page tables of it, and what the driver changes later is kept twice."""
_THREADS_GONE_S = 0.25
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel", "/dev/davinci", "/dev/neuron", "/dev/infiniband")
_HARMLESS_OPTIONS = ("-m", "-c", "-u", "-", "-B")
"""Of the interpreter: a worker that is started anew does not have the others (-O, -W, -X, ...)."""
_OPENMP = ("libgomp", "libiomp", "libomp")
_OMP_PAUSE_HARD = 2
_NEVER_USER_MODULES = ("holdfast", "sitecustomize", "usercustomize")
_STDLIB = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_TORCH_DEFAULTS: dict[str, Callable[[Any], bool]] = {
    "torch.set_default_dtype": lambda torch: torch.get_default_dtype() is torch.float32,
    "torch.use_deterministic_algorithms": lambda torch: not torch.are_deterministic_algorithms_enabled(),
    "torch.set_float32_matmul_precision": lambda torch: torch.get_float32_matmul_precision() == "highest",
    "torch.autograd.set_detect_anomaly": lambda torch: not torch.is_anomaly_enabled(),
    "torch.backends.cudnn.benchmark": lambda torch: not torch.backends.cudnn.benchmark,
    "torch.backends.cudnn.deterministic": lambda torch: not torch.backends.cudnn.deterministic,
}
"""Settings of the whole process that change results, each with whether it is as in a process that has just imported
torch. Those of a thread (grad mode, autocast, numpy's error state) do not reach a process forked in another thread."""


def unfit_reason(environment: Mapping[str, str]) -> str | None:
    """Why this process must not be forked to be an agent, or None. `environment` is what workers get besides."""
    return next(_reasons(environment), None)


def _reasons(environment: Mapping[str, str]) -> Iterator[str]:
    """In the order of what they cost to find."""
    if os.environ.get(FORK_VARIABLE, "1").strip().lower() in ("0", "false"):
        yield f"{FORK_VARIABLE} is {os.environ[FORK_VARIABLE]}"
    if others := sorted(t.name for t in threading.enumerate() if t is not threading.main_thread()):
        yield f"the driver has {len(others)} thread(s) besides its main one ({', '.join(others[:5])})"
    if threading.current_thread() is not threading.main_thread():
        yield "fit() is not called in the main thread"
    if hasattr(sys, "ps1") or sys.flags.interactive:
        yield "the driver is interactive"
    if sys.gettrace() is not None or sys.getprofile() is not None or _is_monitored():
        yield "a debugger, a profiler or a tracer is active in the driver"
    if options := [one for one in _interpreter_options() if one not in _HARMLESS_OPTIONS]:
        yield f"the driver was started with an option of the interpreter ({options[0]})"
    if set_here := [name for name, value in environment.items() if _is_new(name, value)]:
        yield f"workers get the variable {set_here[0]}, which modules of the driver may have read already"
    if not all(map(_is_open, (0, 1, 2))):
        yield "its standard input, output or error is closed"
    yield from _module_reasons()
    yield from _torch_reasons()
    yield from _device_reasons()
    if (size_bytes := _private_bytes()) > _MEMORY_MAX_BYTES:
        yield f"the driver holds {size_bytes / (1 << 30):.1f} GiB of memory"
    end_openmp_threads()
    if (extra := _unknown_threads()) > 0:
        yield f"the driver has {extra} thread(s) of a library that is not known to survive a fork"


def _is_new(name: str, value: str) -> bool:
    return not name.startswith(("HOLDFAST_", "TUNE_ORIG_")) and os.environ.get(name) != value


def _is_monitored() -> bool:
    monitoring: Any = getattr(sys, "monitoring", None)  # from Python 3.12 on
    return monitoring is not None and any(monitoring.get_tool(number) is not None for number in range(6))


def _interpreter_options() -> Iterator[str]:
    for argument in sys.orig_argv[1:]:
        if not argument.startswith("-"):
            return
        yield argument
        if argument in ("-m", "-c", "-"):
            return


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _private_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


# ---------------------------------------------------------------------- modules


def user_modules() -> list[str]:
    """The modules that a new process would have to import itself to see them as they were: all but `__main__`, those
    of Python, of installed packages, and ours. What the driver changed in them must not reach workers."""
    kept: dict[str, bool] = {}
    found = []
    for name, module in list(sys.modules.items()):
        package = name.partition(".")[0]
        if package not in kept:
            kept[package] = _is_installed(package, sys.modules.get(package) or module)
        if not kept[package] and package not in ("__main__", "__mp_main__"):
            found.append(name)
    return found


def _is_installed(package: str, module: ModuleType) -> bool:
    if package in _NEVER_USER_MODULES:
        return True
    if (path := _path_of(module)) is None:
        return package in sys.stdlib_module_names
    if "site-packages" in path or "dist-packages" in path:
        return True
    return path.startswith(_STDLIB)


def _path_of(module: ModuleType) -> str | None:
    """The file, or one directory of a package without one."""
    if isinstance(path := getattr(module, "__file__", None), str):
        return path
    try:
        return next(map(str, module.__path__), None)
    except (AttributeError, TypeError):
        return None


def _module_reasons() -> Iterator[str]:
    for name in user_modules():
        module = sys.modules.get(name)
        spec = getattr(module, "__spec__", None)
        if getattr(spec, "_initializing", False):
            yield f"fit() is called while the module {name} is imported"
        if str(getattr(spec, "origin", "")).endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES)):
            yield f"the extension module {name} cannot be imported twice"
    if (mpi := sys.modules.get("mpi4py.MPI")) is not None and mpi.Is_initialized():
        yield "MPI is initialised in the driver"


def _torch_reasons() -> Iterator[str]:
    if (torch := sys.modules.get("torch")) is None:
        return
    for name, is_default in _TORCH_DEFAULTS.items():
        if not is_default(torch):
            yield f"{name} is not at its default in the driver, and would be seen by workers"
    library = sys.modules.get("torch.library")
    operators = tuple(
        kind for owner in (library, sys.modules.get("torch._library.custom_ops")) for kind in _operator_types(owner)
    )
    for name in [*user_modules(), "__main__"]:
        for value in list(vars(sys.modules[name]).values()):
            # Not isinstance(): a stand-in for what is not there yet may raise when it is asked for its class.
            if operators and issubclass(type(value), operators):
                yield f"the module {name} has registered operators of torch, which cannot be done twice"


def _operator_types(owner: ModuleType | None) -> list[type]:
    found = (getattr(owner, name, None) for name in ("Library", "CustomOpDef"))
    return [kind for kind in found if isinstance(kind, type)]


# ---------------------------------------------------------------------- devices and threads


def _device_reasons() -> Iterator[str]:
    torch = sys.modules.get("torch")
    for name in ("cuda", "xpu"):
        device = getattr(torch, name, None)
        if device is not None and device.is_initialized():
            yield f"the driver has initialised {name.upper()}"
    for fd in os.listdir("/proc/self/fd"):  # noqa: PTH208  Path is slow, and there may be many
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
        except OSError:
            continue  # the one that listed them
        if target.startswith(_DEVICES):
            yield f"the driver has {target} open"


def _unknown_threads() -> int:
    """How many threads there are besides the main one and those that OpenBLAS may have. One that was joined is shown
    for a moment longer."""
    allowed, deadline = 1 + count_openblas_threads(), time.monotonic() + _THREADS_GONE_S
    while (extra := len(thread_names()) - allowed) > 0 and time.monotonic() < deadline:
        time.sleep(0.001)
    return extra


def end_openmp_threads() -> None:
    """End the idle threads of the OpenMP runtimes that are loaded (torch's operations on the CPU, MKL): they start
    others when they next have something to do. OpenBLAS does that by itself whenever its process is forked."""
    paths = set()
    with Path("/proc/self/maps").open() as maps:
        for line in maps:
            if any(name in line for name in _OPENMP):
                paths.add(line.split(maxsplit=5)[-1].strip())
    for path in sorted(paths):
        pause = getattr(ctypes.CDLL(path), "omp_pause_resource_all", None)
        if pause is not None:
            pause(_OMP_PAUSE_HARD)
