"""Trying again for a while: training goes on meanwhile, so storage that fails has time to come back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from itertools import count
from typing import TypeVar

from holdfast.core.backoff import backoff_s

__all__ = ["retry_for"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_BASE_S = 0.2
_MAX_S = 10.0


async def retry_for(
    patience_s: float, action: Callable[[], Awaitable[_T]], errors: tuple[type[Exception], ...], warning: str
) -> _T:
    """What `action` returns. It is tried again after these errors, until `patience_s` would be over; the first failure
    is logged with `warning` before it, the last one raised."""
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + patience_s
    for failures in count(1):
        try:
            return await action()
        except errors as error:
            pause_s = backoff_s(failures, _BASE_S, _MAX_S)
            if loop.time() + pause_s > give_up_at:
                raise
            if failures == 1:
                _log.warning("%s: %s", warning, error)
        await asyncio.sleep(pause_s)
    raise AssertionError
