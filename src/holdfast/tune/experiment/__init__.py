"""What an experiment is made of: its settings, for older scripts, and its trials."""

from holdfast.tune.experiment.experiment import Experiment
from holdfast.tune.experiment.trial import Trial

__all__ = ["Experiment", "Trial"]
