"""Exponential back-off: how long to pause after the n-th failure in a row. The one formula that every retry uses.

Callers add what is theirs: randomness where several writers compete, a limit on tries, or a deadline.
"""

from __future__ import annotations

__all__ = ["backoff_s"]


def backoff_s(failures: int, base_s: float, max_s: float) -> float:
    """`base_s` after the first failure, twice as long after each further one, at most `max_s`; 0 before the first."""
    if failures <= 0:
        return 0.0
    return min(max_s, base_s * 2.0 ** min(failures - 1, 30))
