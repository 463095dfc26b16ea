"""Calls of what users have written, in the hub's event loop: stoppers, schedulers, functions that make names.

Whatever they raise ends their experiment, and nothing else: an exception that is no `Exception` would end the event
loop, with every run of the process, and StopIteration cannot be raised from a task.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from holdfast.errors import HoldfastError, TuneError

__all__ = ["call_user_code", "describe_error", "is_signal"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def call_user_code(field: str, what: str, function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """What the function returns. `field` says where users have given it, `what` it is."""
    try:
        return function(*args, **kwargs)
    except HoldfastError:
        raise  # its sentence says it all
    except BaseException as error:
        if is_signal(error):
            raise
        raise TuneError(
            f"{field}: {what} raised {describe_error(error)} (that ends the experiment; the same call continues it "
            "once that is mended)"
        ) from error


def is_signal(error: BaseException) -> bool:
    """Whether it may be the user's Ctrl+C, which Python raises in the main thread alone."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def describe_error(error: BaseException) -> str:
    """Its class and its text, whatever its own methods raise."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  whatever a __str__ of the user's raises
        return name
    return f"{name}: {text}" if text else name
