"""Which checkpoints may go: a pure decision from names, indices and metrics.

`removal` asks for pins and deletions, and `holdfast.checkpoint.removal` deletes; this only chooses.
The rule is users' `CheckpointConfig`: the best K by score, and the latest besides (so K + 1 at most), or
simply the latest K where no score is named. Whatever the rule says, the newest stays, and so does what is
pinned.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

from holdfast.core.checkpoint_types import StoredCheckpoint
from holdfast.core.metrics import find_metric
from holdfast.errors import ConfigError

__all__ = ["RetentionRule", "ranked", "to_delete"]


@dataclass(frozen=True, slots=True)
class RetentionRule:
    """`num_to_keep=None` keeps everything; `score_attribute=None` ranks by age."""

    num_to_keep: int | None = None
    score_attribute: str | None = None
    score_order: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        keep = self.num_to_keep
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise ConfigError(f"num_to_keep must be a whole number of 1 or more, or None to keep all; got {keep!r}.")
        if self.score_order not in ("max", "min"):
            raise ConfigError(f'checkpoint_score_order must be "max" or "min"; got {self.score_order!r}.')


def ranked(checkpoints: Iterable[StoredCheckpoint], rule: RetentionRule) -> list[StoredCheckpoint]:
    """Worst first, best last. Of equal scores the later checkpoint is the better one."""
    return sorted(checkpoints, key=lambda one: (_merit(one, rule), one.order))


def to_delete(checkpoints: Iterable[StoredCheckpoint], rule: RetentionRule, pinned: Collection[str] = ()) -> list[str]:
    """The names that the rule lets go, oldest first. Those in `pinned` stay, and do not count as kept."""
    if rule.num_to_keep is None:
        return []
    everything = sorted(checkpoints, key=lambda one: one.order)
    counted = [one for one in ranked(everything, rule) if one.name not in pinned]
    kept = {one.name for one in counted[-rule.num_to_keep :]}
    kept.update(pinned)
    kept.update(one.name for one in everything[-1:])
    return [one.name for one in everything if one.name not in kept]


def _merit(checkpoint: StoredCheckpoint, rule: RetentionRule) -> tuple[int, Any]:
    """Something that sorts better scores higher, and whatever is not a number below every number."""
    if rule.score_attribute is None:
        return 0, 0
    score = find_metric(checkpoint.metrics, rule.score_attribute)
    if isinstance(score, bool) or not isinstance(score, Real) or score != score:  # NaN alone differs from itself
        return 0, 0
    return 1, score if rule.score_order == "max" else -score
