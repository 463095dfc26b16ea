"""Makes a process that was forked from the driver look like one that Python has just started, but for what is imported.

The training function and its configuration still travel by value, so workers see of the driver what they see in a
cluster: installed packages stay as they are, while the user's modules are forgotten, to be imported anew. Nothing of
the driver's is ever destroyed here: a destructor or an exit handler would remove files that the driver still uses.
"""

from __future__ import annotations

import asyncio
import atexit
import faulthandler
import gc
import importlib
import linecache
import locale
import logging
import socket
import subprocess
import sys
import tempfile
import threading
import tracemalloc
import types
import warnings
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.linux.forked_process import drop_descriptors, reset_signal_handlers
from holdfast.linux.process import thread_names
from holdfast.worker.stdio import open_streams

__all__ = ["reset_forked_process"]

_kept: list[object] = []
"""The driver's objects that this process no longer refers to: alive, so that no destructor runs."""


def reset_forked_process(kept_fds: list[int], modules: Sequence[str]) -> str | None:
    """In the child, right after the fork, with all signals blocked: put everything in order, and forget these modules
    of the user's. Gives why the process is of no use, where only a forked process can tell."""
    gc.freeze()  # what the driver has is not this process's garbage, and looking at it would copy its pages
    reset_signal_handlers()
    drop_descriptors(kept_fds)
    _leave_outer_run()
    _reset_interpreter()
    streams = [sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__]
    _kept.extend(streams)
    open_streams()
    _forget_exit_handlers()
    _forget_modules(modules)
    _reset_logging(streams)
    _reset_multiprocessing()
    return _reset_torch() or _threads_reason()


def _leave_outer_run() -> None:
    """A driver may be a worker of another run, whose session is none of this process."""
    if (sessions := sys.modules.get("holdfast.worker.session")) is not None:
        _kept.append(sessions.installed())
        sessions.install(None)


def _reset_interpreter() -> None:
    faulthandler.disable()
    tracemalloc.stop()
    gc.enable()
    gc.set_debug(0)
    sys.settrace(None)
    sys.setprofile(None)
    sys.setrecursionlimit(1000)
    sys.setswitchinterval(0.005)
    threading.settrace(None)
    threading.setprofile(None)
    threading.stack_size(0)
    _kept.extend([sys.excepthook, sys.displayhook, sys.unraisablehook, sys.breakpointhook, threading.excepthook])
    sys.excepthook = sys.__excepthook__
    sys.displayhook = sys.__displayhook__
    sys.unraisablehook = sys.__unraisablehook__
    sys.breakpointhook = sys.__breakpointhook__
    threading.excepthook = threading.__excepthook__
    socket.setdefaulttimeout(None)
    tempfile.tempdir = None
    with suppress(locale.Error):
        locale.setlocale(locale.LC_ALL, "C")
        locale.setlocale(locale.LC_CTYPE, "")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        _kept.append(asyncio.get_event_loop_policy())
        asyncio.set_event_loop_policy(None)
    active: list[Any] = subprocess._active  # type: ignore[attr-defined]
    _kept.extend(active)
    active.clear()  # these are the driver's children


def _forget_exit_handlers() -> None:
    """What the driver does when it ends is not for its workers to do; what the standard library does, is."""
    atexit._clear()
    atexit.register(logging.shutdown)
    finalize: Any = weakref.finalize
    _kept.append(dict(finalize._registry))
    finalize._registry.clear()
    finalize._registered_with_atexit = False


def _forget_modules(modules: Sequence[str]) -> None:
    for name in modules:
        _kept.append(sys.modules.pop(name))
    _kept.append(sys.modules["__main__"])
    sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
    sys.argv[:] = [str(Path(__file__).with_name("zygote.py"))]
    linecache.clearcache()
    importlib.invalidate_caches()
    if (pickler := sys.modules.get("cloudpickle.cloudpickle")) is not None:
        # Or a class of the driver's script would come out of its pickle as the driver's own.
        for tracker in (pickler._DYNAMIC_CLASS_TRACKER_BY_CLASS, pickler._DYNAMIC_CLASS_TRACKER_BY_ID):
            tracker.clear()
        pickler._PICKLE_BY_VALUE_MODULES.clear()


def _reset_logging(streams: Sequence[object]) -> None:
    """No configuration of the driver's: neither of the root logger, nor of loggers of its own modules, nor files. What
    wrote to one of its standard `streams` writes to this process's."""
    logging.disable(logging.NOTSET)
    logging.captureWarnings(False)
    _reset_logger(logging.root, logging.WARNING)
    for name, logger in logging.root.manager.loggerDict.items():
        if not isinstance(logger, logging.Logger):
            continue
        package = name.partition(".")[0]
        if package not in sys.modules or package in ("__main__", "holdfast"):
            _reset_logger(logger, logging.NOTSET)
        for handler in list(logger.handlers):
            if isinstance(handler, logging.FileHandler):
                _kept.append(handler)
                logger.removeHandler(handler)
            elif isinstance(handler, logging.StreamHandler) and _borrows_stream(handler, streams):
                _kept.append(handler.stream)
                handler.stream = sys.stderr


def _borrows_stream(handler: logging.StreamHandler[Any], streams: Sequence[object]) -> bool:
    """Whether somebody else has opened what it writes to. One that opens a file of its own, if only later, closes it,
    too: torch's trace log does so in every process that it finds to be another, and would close standard error."""
    stream = handler.stream
    if stream is None or stream is sys.stderr:  # not opened yet; or looked up for each line, as by `logging.lastResort`
        return False
    return any(stream is one for one in streams) or type(handler).close is logging.Handler.close


def _reset_logger(logger: logging.Logger, level: int) -> None:
    _kept.extend([*logger.handlers, *logger.filters])
    logger.handlers.clear()
    logger.filters.clear()
    logger.setLevel(level)
    logger.propagate, logger.disabled = True, False


def _reset_multiprocessing() -> None:
    """As `multiprocessing` does in its own children, and besides: its servers are the driver's."""
    if "multiprocessing" not in sys.modules:
        return
    import multiprocessing as mp
    from multiprocessing import process, resource_tracker, util

    modules: Any = sys.modules
    mp.set_start_method(None, force=True)
    state: Any = process
    _kept.extend([state._children, state._current_process])
    state._children = set()
    main_process = next(kind for kind in process.BaseProcess.__subclasses__() if kind.__name__ == "_MainProcess")
    state._current_process = main_process()
    state._parent_process = None
    registry: Any = util
    _kept.append(dict(registry._finalizer_registry))
    registry._finalizer_registry.clear()
    registry._run_after_forkers()
    atexit.register(registry._exit_function)
    tracker: Any = resource_tracker._resource_tracker
    tracker.__init__()
    if (server := modules.get("multiprocessing.forkserver")) is not None:
        server._forkserver.__init__()


def _reset_torch() -> str | None:
    if (torch := sys.modules.get("torch")) is None:
        return None
    for name in ("cuda", "xpu"):
        is_in_bad_fork = getattr(getattr(torch, name, None), "_is_in_bad_fork", None)
        if is_in_bad_fork is not None and is_in_bad_fork():
            return f"the driver has asked {name.upper()} for its devices, which could not be used in a forked process"
    torch.set_num_threads(1)  # as in a zygote that has imported it with one thread
    return None


def _threads_reason() -> str | None:
    """Libraries may start threads when they notice a fork."""
    extra = len(thread_names()) - 1
    return f"a library of the driver starts {extra} thread(s) when it is forked" if extra else None
