"""Times in files of the store: UTC, ISO 8601."""

from __future__ import annotations

from datetime import UTC, datetime

from holdfast.runtime import current

__all__ = ["age_s", "now_text"]


def now_text() -> str:
    """The current time, to the millisecond."""
    return datetime.fromtimestamp(current().now(), UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def age_s(created_at: str) -> float:
    """Seconds since a time; 0 where it cannot be read, so that nothing counts as old by mistake."""
    try:
        then = datetime.fromisoformat(created_at)
    except ValueError:
        return 0.0
    if then.tzinfo is None:
        then = then.replace(tzinfo=UTC)
    return current().now() - then.timestamp()
