"""`__main__` as the training function knows it, in a process whose `__main__` is a program of ours.

What a script defines is sent to workers by value and says of itself that it lives in `__main__`. Pickle and torch.save
look it up there, so `show_main` puts it there. Processes that the function starts by spawn or forkserver (DataLoaders,
torch.multiprocessing, pools) would have to run the script again to find it, which needs a main guard and would repeat
whatever else the script does: `send_main_by_value` lets multiprocessing send it by value, there and back.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

from holdfast.worker.job import Job

__all__ = ["send_main_by_value", "show_main"]


def show_main(job: Job) -> None:
    """Make a `__main__` of the globals that came with the training function. It has neither `__file__` nor `__spec__`:
    multiprocessing would take them for something to run in each child."""
    function = _innermost(job.function)
    if function is None or function.__globals__.get("__name__") != "__main__":
        return
    main = types.ModuleType("__main__")
    vars(main).update({key: value for key, value in function.__globals__.items() if not key.startswith("__")})
    for named in (function, job.function):
        if getattr(named, "__module__", None) == "__main__" and "." not in getattr(named, "__qualname__", "."):
            setattr(main, named.__qualname__, named)
    sys.modules["__main__"] = main


def _innermost(target: Any) -> types.FunctionType | None:
    """The function inside partials, methods, callable objects, and `resume_from_checkpoint`'s wrapper."""
    for _ in range(16):
        if isinstance(target, types.FunctionType):
            return target
        wrapped = getattr(target, "_function", None) or getattr(target, "func", None)
        target = wrapped or getattr(target, "__func__", None) or getattr(type(target), "__call__", None)  # noqa: B004
    return None


def send_main_by_value() -> None:
    """From here on multiprocessing sends functions and classes of `__main__`, and those that have no name to be found
    by, as cloudpickle does. Processes that receive one do the same."""
    from multiprocessing.reduction import ForkingPickler

    if "reducer_override" not in vars(ForkingPickler):
        ForkingPickler.reducer_override = _reduce  # type: ignore[method-assign]


def _reduce(_: Any, target: Any) -> Any:
    """The `reducer_override` of multiprocessing's pickler."""
    if not isinstance(target, types.FunctionType | type) or not _is_of_main(target):
        return NotImplemented
    import cloudpickle

    return _receive, (cloudpickle.dumps(target),)


def _is_of_main(target: Any) -> bool:
    if target.__module__ in ("__main__", "__mp_main__"):
        return True
    return "<locals>" in target.__qualname__ or "<lambda>" in target.__qualname__


@functools.lru_cache(maxsize=256)  # a function that is sent with every task is opened once
def _receive(data: bytes) -> Any:
    import cloudpickle

    send_main_by_value()
    return cloudpickle.loads(data)
