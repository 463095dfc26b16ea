"""The two small files that people open first: params.json and error.txt. `results` puts them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from holdfast.core.records import RunFailed, WorkerFailure
from holdfast.core.root_cause import root_cause

__all__ = ["error_text", "params_text"]


def params_text(params: Mapping[str, Any]) -> bytes:
    """The configuration of the training function; what JSON cannot hold is written as its `repr`."""
    return json.dumps(_jsonable(params), indent=2, ensure_ascii=False).encode(errors="replace") + b"\n"


def error_text(record: RunFailed) -> bytes:
    """Why the run failed: the root cause with its traceback first, then the other ranks."""
    parts = [f"{record.error_type}: {record.error}"]
    if record.failures:
        cause = root_cause(record.failures)
        shown: dict[str, int] = {}
        for failure in [cause, *(other for other in record.failures if other is not cause)]:
            parts.append(_failure_text(failure, shown))
    return ("\n\n".join(parts) + "\n").encode(errors="replace")


def _failure_text(failure: WorkerFailure, shown: dict[str, int]) -> str:
    """One rank's end; a traceback that another rank had too is not shown twice."""
    where = f" on {failure.host}" if failure.host else ""
    head = f"Rank {failure.rank}{where} {failure.cause}"
    details = (failure.traceback or "\n".join(failure.last_lines)).rstrip()
    if not details:
        return head
    if details in shown:
        return f"{head}\n(the same traceback as rank {shown[details]})"
    shown[details] = failure.rank
    return f"{head}\n{details}" if failure.traceback else f"{head}\nIts last output:\n{details}"


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_jsonable(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else repr(value)
