"""How numbers, times, places and ranks are said. Pure text; `layouts`, `box` and `progress` use it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from holdfast.printable import printable
from holdfast.storage.uri import join

__all__ = ["brief_time", "cell", "count", "long_time", "moment", "name_ranks", "place", "trim"]


def moment(at: float) -> str:
    """Local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def long_time(seconds: float) -> str:
    """Whole seconds: 54s, 1min 30s, 2hr 0min 5s, 1d 3hr 0min 0s."""
    left = max(0, int(seconds))
    parts: list[str] = []
    for size, unit in ((86_400, "d"), (3_600, "hr"), (60, "min")):
        if left >= size or parts:
            parts.append(f"{left // size}{unit}")
            left %= size
    return " ".join([*parts, f"{left}s"])


def brief_time(seconds: float) -> str:
    """As exact as it matters: 0.12 s, 4.1 s, 54 s, then as `long_time`."""
    if seconds >= 60:
        return long_time(seconds)
    if seconds < 0.005:
        return "0 s"
    return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def cell(value: Any, width: int = 40) -> str:
    """A metric's value in a table: five decimals where that says something."""
    if isinstance(value, float):
        if value == 0 or 1e-3 <= abs(value) < 1e9:
            return repr(round(value, 5))
        return f"{value:.5g}"
    return trim(printable(str(value)), width)


def trim(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 3)] + "..."


def count(number: int, thing: str) -> str:
    """1 iteration, 2 iterations, 1 recovery, 2 recoveries."""
    if number == 1:
        return f"1 {thing}"
    return f"{number} {thing[:-1]}ies" if thing.endswith("y") else f"{number} {thing}s"


def name_ranks(ranks: Sequence[int]) -> str:
    """rank 3, or ranks 0, 2-5 and 9."""
    ordered = sorted(set(ranks))
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    said = []
    for first, last in spans:
        said += [str(first)] if first == last else [str(first), str(last)] if last == first + 1 else [f"{first}-{last}"]
    if len(ordered) == 1:
        return f"rank {said[0]}"
    return "ranks " + (said[0] if len(said) == 1 else f"{', '.join(said[:-1])} and {said[-1]}")


def place(uri: str, name: str = "") -> str:
    """Where something lies: (local)/path for files, the URI for anything else."""
    whole = join(uri, name) if name else uri
    return whole if "://" in whole else f"(local){whole}"
