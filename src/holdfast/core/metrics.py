"""Nested metrics under flat names: {"eval": {"loss": 1}} has the metric `eval/loss`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["find_metric", "flatten_metrics"]


def flatten_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """Nested dicts as `a/b` keys; the dict itself where nothing is nested, which is the usual case."""
    for value in metrics.values():
        if type(value) is dict:
            break
    else:
        return metrics
    flat: dict[str, Any] = {}
    for key, value in metrics.items():
        if type(value) is dict:
            flat.update((f"{key}/{inner}", item) for inner, item in flatten_metrics(value).items())
        else:
            flat[key] = value
    return flat


def find_metric(metrics: Mapping[str, Any], name: str) -> Any:
    """The value of `a/b`: of the literal key first, then of the nested one; None where there is neither."""
    if name in metrics:
        return metrics[name]
    for at in (position for position, letter in enumerate(name) if letter == "/"):
        inner = metrics.get(name[:at])
        if isinstance(inner, Mapping) and (found := find_metric(inner, name[at + 1 :])) is not None:
            return found
    return None
