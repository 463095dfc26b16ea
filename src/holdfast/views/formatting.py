"""How durations, times, sizes, counts, ranks, metrics and places are written for people, everywhere.

Pure text; the terminal, `holdfast events` and the command line use it.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from holdfast.printable import printable
from holdfast.storage.uri import is_uri, join

__all__ = [
    "bounds_text",
    "brief_duration",
    "count_text",
    "drain_text",
    "duration_text",
    "iso_time",
    "list_text",
    "local_time",
    "losses_text",
    "metric_text",
    "metrics_text",
    "place",
    "ranks_brief",
    "ranks_text",
    "rough_duration",
    "running_time",
    "size_text",
    "trim",
    "utc_time",
]

_NAMES_MAX = 8
"""So many agents are named."""
_EPOCH = datetime(1970, 1, 1)
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")

# ------------------------------------------------------------ durations


def running_time(seconds: float) -> str:
    """Whole seconds, for clocks that run: 54s, 1min 30s, 2hr 0min 5s, 1d 3hr 0min 0s."""
    left = max(0, int(seconds))
    parts: list[str] = []
    for size, unit in ((86_400, "d"), (3_600, "hr"), (60, "min")):
        if left >= size or parts:
            parts.append(f"{left // size}{unit}")
            left %= size
    return " ".join([*parts, f"{left}s"])


def brief_duration(seconds: float) -> str:
    """Two digits, for tables: 0.12 s, 4.1 s, 54 s, then as `running_time`."""
    if seconds >= 60:
        return running_time(seconds)
    if seconds < 0.005:
        return "0 s"
    return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def duration_text(seconds: float) -> str:
    """Three digits, for sentences: 0.25 s, 22.0 s, 3 min 3 s, 2 h 5 min."""
    seconds = max(0.0, seconds)
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def drain_text(agent: str, host: str, why: str, left_s: float | None) -> str:
    """That an agent is drained, why, and how long it is there yet, where that is known."""
    until = "" if left_s is None else f", and is gone in {duration_text(left_s)}"
    return f"agent {agent} on {host} is being drained ({why}){until}"


def rough_duration(seconds: float) -> str:
    """Rounded up, for estimates: 0.4 s, 75 s, 12 min, 3 h 5 min."""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = math.ceil(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


# ------------------------------------------------------------ points in time


def local_time(at: float) -> str:
    """Seconds since 1970 as local date and time: 2026-11-15 20:06:26."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def iso_time(created_at: str) -> str:
    """A manifest's ISO 8601 time without its fractions: 2026-01-31 12:00:05Z."""
    return f"{created_at[:10]} {created_at[11:19]}Z" if len(created_at) >= 19 else created_at


def utc_time(at: float) -> str:
    """Seconds since 1970 as date and time in UTC: 2026-11-15 20:06:26."""
    return (_EPOCH + timedelta(seconds=math.floor(at))).isoformat(" ")


# ------------------------------------------------------------ sizes, counts, ranks


def size_text(size_bytes: float) -> str:
    """812 B, 1.5 GiB: powers of 1024, three digits or so."""
    power = 0
    while round(size_bytes, 1) >= 1024 and power < len(_UNITS) - 1:
        size_bytes /= 1024
        power += 1
    return f"{size_bytes:.0f} B" if power == 0 else f"{size_bytes:.1f} {_UNITS[power]}"


def count_text(number: int, noun: str, *, grouped: bool = False) -> str:
    """1 file, 2 files, 1 recovery, 2 recoveries; `grouped`: 1,234 files."""
    if number != 1:
        noun = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {noun}" if grouped else f"{number} {noun}"


def bounds_text(fewest: int, most: int) -> str:
    """2 to 6 workers, or 4 workers where both are the same."""
    return count_text(most, "worker") if fewest == most else f"{fewest} to {count_text(most, 'worker')}"


def list_text(names: Sequence[str]) -> str:
    """a; a and b; a, b and c."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def losses_text(agents: Sequence[str], whys: Sequence[str]) -> str:
    """Of several agents that were lost at once: 3 agents, a, b and c: why."""
    names = list(agents)
    if len(names) > _NAMES_MAX:
        names = [*names[:_NAMES_MAX], f"{len(names) - _NAMES_MAX} more"]
    why, times = Counter(whys).most_common(1)[0]
    text = f"{count_text(len(agents), 'agent')}, {list_text(names)}: {why}"
    return text if times == len(whys) else f"{text} (so {times} of them)"


def ranks_text(ranks: Sequence[int]) -> str:
    """rank 3, or ranks 0, 2-5 and 9."""
    names: list[str] = []
    for first, last in _spans(ranks):
        names += [f"{first}-{last}"] if last > first + 1 else [str(rank) for rank in range(first, last + 1)]
    return f"rank {names[0]}" if len(set(ranks)) == 1 else f"ranks {list_text(names)}"


def ranks_brief(ranks: Sequence[int]) -> str:
    """The same for the margin: rank 3, ranks 0-1, ranks 0,2-5,9."""
    names = [f"{first}-{last}" if last > first else str(first) for first, last in _spans(ranks)]
    return f"rank{'s' if len(set(ranks)) > 1 else ''} {','.join(names)}"


def _spans(ranks: Sequence[int]) -> list[list[int]]:
    """Runs of consecutive ranks, each by its first and last."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return spans


# ------------------------------------------------------------ metrics and other text


def metric_text(value: Any, width: int = 40) -> str:
    """A metric's value: floats in four digits."""
    return f"{value:.4g}" if isinstance(value, float) else trim(printable(str(value)), width)


def metrics_text(metrics: Mapping[str, Any]) -> str:
    """loss=0.25 epoch=3, floats in four digits."""
    return " ".join(
        f"{name}={metric_text(value) if isinstance(value, float) else value}" for name, value in metrics.items()
    )


def trim(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 3)] + "..."


def place(uri: str, name: str = "") -> str:
    """Where something lies: (local)/path for files, the URI for anything else."""
    whole = join(uri, name) if name else uri
    return whole if is_uri(whole) else f"(local){whole}"
