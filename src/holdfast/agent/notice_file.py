"""The notice file: its appearance says that the machine is about to be taken away.

Whatever learns of that first (a script that asks the cloud's metadata service, a batch system's prologue, a person)
writes it. It may hold when: a number of seconds, a time in ISO 8601, or JSON with such a `time`, as AWS's
`spot/instance-action` is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

__all__ = ["parse_notice", "watch_notice_file"]

_POLL_S = 0.5
_READ_BYTES = 4096
_log = logging.getLogger(__name__)


def parse_notice(text: str, now: float) -> float | None:
    """How many seconds are left, by what a notice says at `now` (seconds since 1970); None if it does not say. Raises
    `ValueError` if it says something else."""
    text = text.strip()
    if text.startswith("{"):
        try:
            text = msgspec.json.decode(text, type=_Notice).time
        except msgspec.DecodeError as error:
            raise ValueError(str(error)) from error
    if not text:
        return None
    try:
        left_s = float(text)
    except ValueError:
        at = datetime.fromisoformat(text)
        left_s = (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp() - now
    if not left_s < 1e9:
        raise ValueError(f"{text} is too far away")
    return max(0.0, left_s)


class _Notice(msgspec.Struct):
    time: str = ""


async def watch_notice_file(path: Path, now: Callable[[], float]) -> float | None:
    """Wait until the file is there; how many seconds are left, None if it does not say."""
    while not path.exists():
        await asyncio.sleep(_POLL_S)
    text = _read(path)
    if not text.strip():  # whoever writes it may have only created it yet
        await asyncio.sleep(_POLL_S)
        text = _read(path)
    try:
        return parse_notice(text, now())
    except ValueError as error:
        _log.warning(
            "The notice file %s should hold seconds, an ISO 8601 time or nothing, not %r (%s).", path, text[:80], error
        )
        return None


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_READ_BYTES).decode(errors="replace")
    except OSError as error:
        _log.warning("The notice file %s cannot be read: %s.", path, error.strerror)
        return ""
