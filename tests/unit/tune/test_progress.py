"""What an experiment prints."""

from __future__ import annotations

import io

import pytest

from holdfast.core import records as r
from holdfast.tune.experiment.trial import Trial
from holdfast.tune.machine import ExperimentMachine, Policies, TrialState
from holdfast.tune.objective import Objective
from holdfast.tune.progress import ProgressLines
from holdfast.tune.schedulers.trial_scheduler import FIFOScheduler
from holdfast.tune.search.basic_variant import BasicVariantGenerator


def make_machine(*losses: float) -> ExperimentMachine:
    policies = Policies(BasicVariantGenerator(), FIFOScheduler())
    machine = ExperimentMachine("e", policies, lambda trial: (trial.trial_id, trial.trial_id))
    for number, loss in enumerate(losses):
        trial = TrialState(f"e_{number}", name=f"e_{number}", status=Trial.TERMINATED, last_result={"loss": loss})
        trial.summary.durable.iteration = number
        machine.trials[trial.trial_id] = trial
    return machine


@pytest.mark.parametrize("quiet", [False, True])
def test_a_line_for_each_trial_that_ends_and_the_best_at_the_end(monkeypatch: pytest.MonkeyPatch, quiet: bool) -> None:
    monkeypatch.delenv("HOLDFAST_QUIET", raising=False)
    stream = io.StringIO()
    lines = ProgressLines("tuning", "/place", Objective("loss", "min"), quiet=quiet, stream=stream)
    lines.began(make_machine())
    machine = make_machine(3.0, 0.0)
    for trial in machine.trials.values():
        lines.trial_ended(trial)
        lines.trial_ended(trial)
    machine.trials["e_0"].status = Trial.ERROR
    machine.apply("e", r.ExperimentEnded(at=1.0))
    lines.ended(machine, "Ctrl+C")
    last = "Experiment tuning: 1 ERROR, 1 TERMINATED (Ctrl+C); best: e_1, loss 0. Results: /place"
    trials = [
        "Experiment tuning in /place.",
        "Trial e_0 ended after 0 reports, loss 3.",
        "Trial e_1 ended after 1 report, loss 0.",
    ]
    assert stream.getvalue().splitlines() == [*([] if quiet else trials), last]
