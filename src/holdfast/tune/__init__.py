"""The public API of tuning, with the names that users of Ray Tune know."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.train.lazy_attributes import lazy_attributes

if TYPE_CHECKING:
    from holdfast.tune.analysis.experiment_analysis import ExperimentAnalysis as ExperimentAnalysis
    from holdfast.tune.callback import Callback as Callback
    from holdfast.tune.config import CheckpointConfig as CheckpointConfig
    from holdfast.tune.config import FailureConfig as FailureConfig
    from holdfast.tune.config import PlacementGroupFactory as PlacementGroupFactory
    from holdfast.tune.config import RunConfig as RunConfig
    from holdfast.tune.config import TuneConfig as TuneConfig
    from holdfast.tune.context import TuneContext as TuneContext
    from holdfast.tune.context import get_context as get_context
    from holdfast.tune.error import TuneError as TuneError
    from holdfast.tune.experiment.experiment import Experiment as Experiment
    from holdfast.tune.functions import Checkpoint as Checkpoint
    from holdfast.tune.functions import Result as Result
    from holdfast.tune.functions import get_checkpoint as get_checkpoint
    from holdfast.tune.functions import report as report
    from holdfast.tune.progress_reporter import CLIReporter as CLIReporter
    from holdfast.tune.progress_reporter import JupyterNotebookReporter as JupyterNotebookReporter
    from holdfast.tune.progress_reporter import ProgressReporter as ProgressReporter
    from holdfast.tune.registry import register_trainable as register_trainable
    from holdfast.tune.result_grid import ResultGrid as ResultGrid
    from holdfast.tune.resume_config import ResumeConfig as ResumeConfig
    from holdfast.tune.schedulers.create import create_scheduler as create_scheduler
    from holdfast.tune.search.create import create_searcher as create_searcher
    from holdfast.tune.search.sample import choice as choice
    from holdfast.tune.search.sample import lograndint as lograndint
    from holdfast.tune.search.sample import loguniform as loguniform
    from holdfast.tune.search.sample import qlograndint as qlograndint
    from holdfast.tune.search.sample import qloguniform as qloguniform
    from holdfast.tune.search.sample import qrandint as qrandint
    from holdfast.tune.search.sample import qrandn as qrandn
    from holdfast.tune.search.sample import quniform as quniform
    from holdfast.tune.search.sample import randint as randint
    from holdfast.tune.search.sample import randn as randn
    from holdfast.tune.search.sample import sample_from as sample_from
    from holdfast.tune.search.sample import uniform as uniform
    from holdfast.tune.search.variant_generator import grid_search as grid_search
    from holdfast.tune.stopper.stopper import Stopper as Stopper
    from holdfast.tune.syncer import SyncConfig as SyncConfig
    from holdfast.tune.trainable import Trainable as Trainable
    from holdfast.tune.trainable import with_parameters as with_parameters
    from holdfast.tune.trainable import with_resources as with_resources
    from holdfast.tune.tune import run as run
    from holdfast.tune.tune import run_experiments as run_experiments
    from holdfast.tune.tuner import Tuner as Tuner

__all__ = [
    "CLIReporter",
    "Callback",
    "Checkpoint",
    "CheckpointConfig",
    "Experiment",
    "ExperimentAnalysis",
    "FailureConfig",
    "JupyterNotebookReporter",
    "PlacementGroupFactory",
    "ProgressReporter",
    "Result",
    "ResultGrid",
    "ResumeConfig",
    "RunConfig",
    "Stopper",
    "SyncConfig",
    "Trainable",
    "TuneConfig",
    "TuneContext",
    "TuneError",
    "Tuner",
    "choice",
    "create_scheduler",
    "create_searcher",
    "get_checkpoint",
    "get_context",
    "grid_search",
    "lograndint",
    "loguniform",
    "qlograndint",
    "qloguniform",
    "qrandint",
    "qrandn",
    "quniform",
    "randint",
    "randn",
    "register_trainable",
    "report",
    "run",
    "run_experiments",
    "sample_from",
    "uniform",
    "with_parameters",
    "with_resources",
]

_HOMES = {
    "Checkpoint": "functions",
    "CheckpointConfig": "config",
    "FailureConfig": "config",
    "Result": "functions",
    "RunConfig": "config",
    "Trainable": "trainable",
    "TuneConfig": "config",
    "Tuner": "tuner",
    "get_checkpoint": "functions",
    "get_context": "context",
    "report": "functions",
    "with_parameters": "trainable",
    "with_resources": "trainable",
    "Callback": "callback",
    "ResultGrid": "result_grid",
    "Stopper": "stopper.stopper",
    "create_scheduler": "schedulers.create",
    "create_searcher": "search.create",
    "grid_search": "search.variant_generator",
    "CLIReporter": "progress_reporter",
    "Experiment": "experiment.experiment",
    "ExperimentAnalysis": "analysis.experiment_analysis",
    "JupyterNotebookReporter": "progress_reporter",
    "PlacementGroupFactory": "config",
    "ProgressReporter": "progress_reporter",
    "ResumeConfig": "resume_config",
    "SyncConfig": "syncer",
    "TuneContext": "context",
    "TuneError": "error",
    "register_trainable": "registry",
    "run": "tune",
    "run_experiments": "tune",
    **dict.fromkeys(
        (
            *("choice", "lograndint", "loguniform", "qlograndint", "qloguniform", "qrandint", "qrandn"),
            *("quniform", "randint", "randn", "sample_from", "uniform"),
        ),
        "search.sample",
    ),
}

__getattr__, __dir__ = lazy_attributes(__name__, _HOMES)
