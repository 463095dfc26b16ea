"""A clone's result goes with the checkpoint that it gets."""

from __future__ import annotations

from typing import Any

from tests.unit.tune.experiment_lines import ExperimentLines

from holdfast.core import records as r


def test_a_clone_with_nothing_left_to_do_is_as_far_as_its_donor() -> None:
    """Its donor had made its last report: the clone ends without one of its own."""
    lines = ExperimentLines()
    for trial, loss in (("a", 1.0), ("b", 2.0)):
        lines.create(trial, lr=loss)
        lines.start(trial)
        lines.report(trial, 1, loss=loss)
    lines.add("a", r.Reported, generation=1, iteration=2, metrics={"loss": 0.5}, checkpoint=True)
    stored: dict[str, Any] = {"index": 0, "generation": 1, "metrics": {"loss": 0.5}}
    lines.add("a", r.CheckpointCommitted, name="checkpoint_000000", iteration=2, **stored)
    reported_at = lines.at - 1
    cloned = {"donor": "a", "checkpoint": "checkpoint_000000", "config": {"lr": 0.8}}
    lines.add("e", r.TrialCloned, trial="b", iteration=1, **cloned)
    lines.finish("a")
    lines.add("b", r.RunInterrupted, why="cloned")
    lines.add("b", r.CheckpointCommitted, name="checkpoint_000000", iteration=2, **stored)
    lines.start("b", 2, "checkpoint_000000")
    lines.finish("b")
    donor, clone = lines.observer.trials
    assert clone.status == donor.status == "TERMINATED"
    assert clone.last_result["training_iteration"] == 2 and clone.last_result["loss"] == 0.5
    assert clone.last_result["timestamp"] == int(reported_at)
    assert clone.last_result["time_total_s"] == donor.last_result["time_total_s"]
    assert clone.last_result["config"] == {"lr": 0.8} and clone.last_result["trial_id"] == "b"
