"""`ExperimentAnalysis`, under the path that scripts for Ray Tune import it from."""

from holdfast.tune.analysis.experiment_analysis import ExperimentAnalysis

__all__ = ["ExperimentAnalysis"]
