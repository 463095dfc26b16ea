"""What an experiment is made of: its trials."""

from holdfast.tune.experiment.trial import Trial

__all__ = ["Trial"]
