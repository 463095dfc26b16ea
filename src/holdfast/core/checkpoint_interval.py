"""How often a checkpoint is worth its stall: the policy behind `train.should_checkpoint()`.

Young's rule balances what checkpoints cost against what a failure loses: the best interval is the root of twice the
stall times the mean time between failures. It is never shorter than storage needs to make one durable, nor so short
that the stall takes more than `target_overhead` of the time. Stall and time to durable are measured; failures are those
that the run has seen.

Ranks agree by counting: all of them ask at the same call, which the previous answer named, and get the same answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["CheckpointInterval"]

_FIRST_STALL_S = 0.05
"""Before anything is measured."""
_FIRST_MTBF_S = 4 * 3600.0
"""A run that has not failed yet is expected to within hours: the machines it is made for do."""
_SMOOTHING = 0.3
_LONGEST_SILENCE_S = 1.0
"""Ranks ask at least this often, so that news reaches them."""


@dataclass(slots=True)
class CheckpointInterval:
    """What was measured so far, in one controller's life."""

    target_overhead: float
    stall_s: float = _FIRST_STALL_S
    durable_s: float = 0.0
    began_at: float = 0.0
    checkpoint_at: float = 0.0
    asked_at: float = 0.0
    asked_call: int = 0
    reported_at: float | None = None
    """When a checkpoint of this generation was last reported."""
    between_s: float | None = None
    """How long the last one was reported after the one before."""

    def begin(self, now: float) -> None:
        """A generation runs: counting starts anew."""
        if not self.began_at:
            self.began_at = now
        self.checkpoint_at = self.asked_at = now
        self.asked_call = 0
        self.reported_at = self.between_s = None

    def stalled(self, stall_s: float, now: float) -> None:
        """A checkpoint was reported, and kept training waiting for so long."""
        self.stall_s += _SMOOTHING * (stall_s - self.stall_s)
        self.checkpoint_at = now
        self.between_s = None if self.reported_at is None else now - self.reported_at
        self.reported_at = now

    def next_within_s(self, limit_s: float, now: float) -> float:
        """How long to wait for the next checkpoint, if one may come within the limit; 0 if not. A function that asks
        gives one at its next step; of others it is known how long the last one took to come."""
        if self.asked_call:
            return limit_s
        if self.between_s is None or self.reported_at is None:
            return 0.0
        left_s = self.reported_at + 2 * self.between_s - now
        return left_s if 0 < left_s <= limit_s else 0.0

    def stored(self, durable_s: float) -> None:
        """It took so long until a checkpoint was committed."""
        self.durable_s = durable_s if not self.durable_s else self.durable_s + _SMOOTHING * (durable_s - self.durable_s)

    def interval_s(self, failures: int, now: float) -> float:
        """The time between checkpoints that loses least."""
        mtbf_s = (_FIRST_MTBF_S + max(0.0, now - self.began_at)) / (failures + 1)
        young_s = math.sqrt(2 * self.stall_s * mtbf_s)
        return max(young_s, self.durable_s, self.stall_s / self.target_overhead)

    def asked(self, call: int, now: float) -> None:
        """All ranks are at their `call`-th call."""
        self.asked_at, self.asked_call = now, call

    def ask(self, call: int, failures: int, now: float) -> tuple[bool, int]:
        """All ranks are at their `call`-th call: is a checkpoint due, and at which call to ask again?"""
        calls = call - self.asked_call
        step_s = max((now - self.asked_at) / calls, 1e-7) if calls > 0 else 1e-7
        self.asked(call, now)
        left_s = self.checkpoint_at + self.interval_s(failures, now) - now
        if left_s <= step_s / 2:
            self.checkpoint_at = now  # asked for; the report that follows sets it again
            return True, call + 1
        if calls <= 0 or call == 1:
            return False, call + 1  # no step was measured yet
        return False, call + max(1, math.floor(min(left_s, _LONGEST_SILENCE_S) / step_s))
