"""Where the rule is the same, our schedulers decide what Ray's decide, on the same results in the same order."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
from tests.unit.tune.simulated_experiment import Experiment

from holdfast.tune.experiment import Trial
from holdfast.tune.schedulers import ASHAScheduler, MedianStoppingRule
from holdfast.tune.schedulers.trial_scheduler import configure_scheduler

pytestmark = pytest.mark.ray


class RayTrial:
    """What Ray's schedulers look at."""

    status = "RUNNING"

    def __init__(self, trial_id: str) -> None:
        self.trial_id = trial_id


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("ASHAScheduler", {"max_t": 20, "reduction_factor": 3}),
        ("ASHAScheduler", {"max_t": 16, "grace_period": 2, "reduction_factor": 2, "stop_last_trials": False}),
        ("MedianStoppingRule", {"time_attr": "training_iteration", "grace_period": 3, "min_samples_required": 2}),
    ],
)
def test_decisions_are_rays(name: str, arguments: dict[str, Any], mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray.tune.schedulers

    for seed in range(20):
        rng = random.Random(seed)
        theirs = getattr(ray.tune.schedulers, name)(metric="score", mode=mode, **arguments)
        mine = {"ASHAScheduler": ASHAScheduler, "MedianStoppingRule": MedianStoppingRule}[name](**arguments)
        configure_scheduler(mine, "score", mode, seed=seed)
        controller = Experiment(lambda config, state: (None, {}), {})
        live = {number: (RayTrial(f"t{number}"), Trial(f"t{number}"), 0) for number in range(10)}
        for there, here, _ in live.values():
            theirs.on_trial_add(controller, there)
            mine.on_trial_add(controller, here)
        while live:
            number = rng.choice(list(live))
            there, here, iteration = live[number]
            iteration += 1  # Ray counts a trial that passes two milestones at once at both, one after the other
            result = {"score": rng.randrange(100), "training_iteration": iteration}
            decision = mine.on_trial_result(controller, here, result)
            assert decision == theirs.on_trial_result(controller, there, result)
            live[number] = (there, here, iteration)
            if decision == "STOP" or iteration > 25:
                if name != "MedianStoppingRule":  # Ray's then counts the last result twice
                    theirs.on_trial_complete(controller, there, result)
                mine.on_trial_complete(controller, here, result)
                del live[number]
