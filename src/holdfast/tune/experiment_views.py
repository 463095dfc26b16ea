"""Which views an experiment has: the terminal or JSON, callbacks, a progress reporter of the user's, the mirror."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.control.request import TrainRequest
from holdfast.control.setup import offers_of
from holdfast.core import records as r
from holdfast.engines.engine import EngineName
from holdfast.runtime import current
from holdfast.storage.store import Store
from holdfast.tune.callback_view import CallbackView, ReporterCallback
from holdfast.tune.experiment_observer import ExperimentObserver, ExperimentView
from holdfast.tune.experiment_request import ExperimentRequest
from holdfast.tune.machine import ExperimentMachine, TrialState
from holdfast.tune.objective import find_objective
from holdfast.tune.progress import JsonLines, Progress
from holdfast.tune.progress_reporter import CLIReporter, is_users_own
from holdfast.tune.stopper.resolve import make_stopper
from holdfast.tune.trial_table import TrialTable
from holdfast.views.terminal.terminal import is_set

__all__ = ["ExperimentViews"]


class ExperimentViews:
    """The views of one experiment, and the observer that feeds them."""

    def __init__(
        self, request: ExperimentRequest, base: TrainRequest, machine: ExperimentMachine, store: Store, place: str
    ) -> None:
        """`base` is what all trials have in common, `machine` has what earlier drivers recorded, `store` and `place`
        are the experiment's directory."""
        tune, run = request.tune_config, request.run_config
        reporter = run.progress_reporter
        callbacks = list(run.callbacks or ())
        views: list[ExperimentView] = []
        if is_set("HOLDFAST_JSON"):
            views.append(JsonLines())
        elif reporter is not None and is_users_own(reporter):
            objective = {"metric": tune.metric, "mode": tune.mode}
            total, began = machine.total_trials, current().now()
            callbacks.append(ReporterCallback(reporter, start_time=began, total_samples=total, **objective))
        else:
            views.append(_make_progress(request, base, machine.total_trials, store.uri))
        self._callbacks = CallbackView(callbacks, _setup_arguments(request, machine), store) if callbacks else None
        if self._callbacks is not None:
            views.append(self._callbacks)
        if request.on_checkpoint is not None:
            views.append(_CheckpointView(request.on_checkpoint))
        self.observer = ExperimentObserver(machine, place, views)

    def on_error(self, tell: Callable[[BaseException], None]) -> None:
        """Whom to tell what a callback raised."""
        if self._callbacks is not None:
            self._callbacks.on_error = tell

    def check(self) -> None:
        """Raise what a callback raised, be it after the last trial."""
        if self._callbacks is not None and self._callbacks.error is not None:
            raise self._callbacks.error


class _CheckpointView(ExperimentView):
    """Tells of each checkpoint."""

    def __init__(self, on_checkpoint: Callable[[], None]) -> None:
        self._on_checkpoint = on_checkpoint

    def trial_changed(self, trial: TrialState, record: r.Record, before: str, result: dict[str, Any] | None) -> None:
        if isinstance(record, r.CheckpointCommitted):
            self._on_checkpoint()


def _setup_arguments(request: ExperimentRequest, machine: ExperimentMachine) -> dict[str, Any]:
    return {
        "stop": make_stopper(request.run_config.stop),
        "num_samples": request.tune_config.num_samples,
        "total_num_samples": machine.total_trials,
    }


def _make_progress(request: ExperimentRequest, base: TrainRequest, total_trials: int | None, uri: str) -> Progress:
    tune, reporter = request.tune_config, request.run_config.progress_reporter
    options: dict[str, Any] = {}
    if isinstance(reporter, CLIReporter):
        reporter.setup(total_samples=total_trials, metric=tune.metric, mode=tune.mode)
        table, options = reporter.make_table(), {"rows_max": reporter.rows_max}
    else:
        objective = find_objective(tune.metric, tune.mode)
        table = TrialTable(objective, total_trials=total_trials)
    return Progress(
        request.name,
        uri,
        table,
        quiet=request.run_config.is_quiet,
        total_trials=total_trials,
        resources=_resources_text(base),
        **options,
    )


def _resources_text(base: TrainRequest) -> Callable[[int], str]:
    """What so many trials take, and of what, where that is known."""
    here: dict[str, float] = {}
    if base.engine is not EngineName.JOIN:
        offers = offers_of(base)
        here = {
            "CPU": sum(offer.resources.get("CPU", 0.0) for offer in offers),
            "GPU": float(sum(len(offer.gpus) for offer in offers)),
        }

    def tell(running: int) -> str:
        taken = {name: amount * base.max_workers * running for name, amount in base.resources.items()}
        return ", ".join(
            f"{amount:g} of {here[name]:g} {name}" if name in here else f"{amount:g} {name}"
            for name, amount in taken.items()
        )

    return tell
