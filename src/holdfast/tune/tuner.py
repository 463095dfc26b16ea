"""`Tuner`: a search over configurations of a trainable, and `fit()` that sees it through.

It checks what the user wrote and hands it to `run_experiment`. The same `(storage_path, name)` continues an experiment,
also a finished one that is given more samples.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from holdfast.engines.engine import EngineName
from holdfast.errors import ConfigError, HoldfastError, NotFound
from holdfast.storage.uri import join
from holdfast.train import config as train_config
from holdfast.train.engine_choice import asked_engine, client_address
from holdfast.train.interrupted import make_interrupted
from holdfast.train.paths import resolve_storage_path, split_run_path
from holdfast.tune.config import RunConfig, TuneConfig, check_supported
from holdfast.tune.registry import find_trainable
from holdfast.tune.search.variant_generator import Space
from holdfast.tune.syncer import make_mirror
from holdfast.tune.trainable import check_trainable, trainable_name

if TYPE_CHECKING:
    from holdfast.checkpoint.handle import Checkpoint
    from holdfast.train.remote_driver import DriverOutcome
    from holdfast.tune.experiment_request import ExperimentRequest
    from holdfast.tune.result_grid import ResultGrid
    from holdfast.tune.run_experiment import ExperimentOutcome

__all__ = ["Tuner", "default_name"]


class Tuner:
    """Tries configurations drawn from `param_space`: one trial each, on the agents of this process.

    `trainable` is a function of the configuration that calls `tune.report`, a subclass of `Trainable`, or a trainer.
    `fit()` with the same `RunConfig(storage_path, name)` goes on where the last call ended, whatever ended it, and
    tries more if `TuneConfig(num_samples)` has grown.
    """

    def __init__(
        self,
        trainable: Any = None,
        *,
        param_space: Mapping[str, Any] | None = None,
        tune_config: TuneConfig | None = None,
        run_config: train_config.RunConfig | None = None,
    ) -> None:
        if tune_config is not None and not isinstance(tune_config, TuneConfig):
            raise ConfigError(f"Tuner(tune_config) must be a TuneConfig, not {type(tune_config).__name__}.")
        if run_config is not None and not isinstance(run_config, train_config.RunConfig):
            raise ConfigError(f"Tuner(run_config) must be a RunConfig, not {type(run_config).__name__}.")
        trainable = find_trainable(trainable)
        self._trainable = check_trainable(trainable)
        self._space = dict(param_space or {}) if isinstance(param_space, Mapping | None) else param_space
        Space(self._space)  # refuses what is no space
        self._tune_config = tune_config or TuneConfig()
        check_supported(self._tune_config, run_config)
        self._run_config = run_config or RunConfig(name=default_name(trainable))
        self._errored: Literal["leave", "resume", "restart"] = "leave"
        self._resume_unfinished = True
        self._must_exist = False
        self._initial_checkpoint: Checkpoint | None = None

    def fit(self) -> ResultGrid:
        """Run the experiment to its end. Raises only what kept it from going on, and `Interrupted` after Ctrl+C or
        SIGTERM; trials that failed are in the results, unless `FailureConfig(fail_fast="raise")` asks for the first."""
        try:
            return self._fit()
        except HoldfastError as error:
            if os.environ.get("HOLDFAST_DEBUG", "") not in ("", "0"):
                raise
            raise error.with_traceback(None) from None  # its sentence says what to do, our frames do not

    def _fit(self) -> ResultGrid:
        from holdfast.core.commands import RunStatus

        request = self._request()
        run = request.run_config
        # A trainer may name its engine; the trials of a function run where everything runs.
        scaling = getattr(self._trainable.trainable, "scaling_config", None)
        if asked_engine(getattr(scaling, "engine", None)) is EngineName.RAY and (address := client_address()):
            from holdfast.tune.remote_experiment import tune_on_cluster

            outcome = tune_on_cluster(address, self, request)
        elif "HOLDFAST_LAUNCHER" in os.environ:
            from holdfast.tune.launched import tune_launched

            outcome = tune_launched(request, _run_mirrored)
        else:
            outcome = _run_mirrored(request)
        if outcome.status is RunStatus.INTERRUPTED:
            raise make_interrupted(outcome.interrupted_by)
        if outcome.failed_fast is not None and run.failure_config.fail_fast == "raise":
            raise outcome.failed_fast
        return outcome.results

    def _outcome_as_driver(self) -> DriverOutcome:
        """`fit()` on the head of a cluster, for a caller elsewhere."""
        from holdfast.tune.remote_experiment import experiment_outcome

        return experiment_outcome(self, self._request())

    def get_results(self) -> ResultGrid:
        """What the experiment's directory knows so far; nothing is run, and nothing written."""
        from holdfast.tune.run_experiment import read_results

        return read_results(self._request())

    def _request(self) -> ExperimentRequest:
        from holdfast.tune.experiment_request import ExperimentRequest

        run = self._run_config
        assert run.name is not None  # `RunConfig` makes one up
        return ExperimentRequest(
            trainable=self._trainable,
            space=self._space,
            tune_config=self._tune_config,
            run_config=run,
            storage_path=resolve_storage_path(run),
            name=run.name,
            errored=self._errored,
            resume_unfinished=self._resume_unfinished,
            must_exist=self._must_exist,
            initial_checkpoint=self._initial_checkpoint,
        )

    # ------------------------------------------------------------------ by path

    @classmethod
    def can_restore(cls, path: str | os.PathLike[str], storage_filesystem: object | None = None) -> bool:
        """Whether there is an experiment at `path` (`<storage_path>/<name>`) that `restore` could continue."""
        from holdfast.storage.locate import open_store
        from holdfast.tune.run_experiment import is_experiment

        store = open_store(path, storage_filesystem)
        try:
            return is_experiment(store)
        except NotFound:
            return False
        finally:
            store.close()

    @classmethod
    def restore(
        cls,
        path: str | os.PathLike[str],
        trainable: Any = None,
        resume_unfinished: bool = True,
        resume_errored: bool = False,
        restart_errored: bool = False,
        param_space: Mapping[str, Any] | None = None,
        storage_filesystem: object | None = None,
    ) -> Tuner:
        """The experiment at `path`, with the settings it was made with, for `fit()` to go on with.

        Unfinished trials go on from their newest checkpoints, unless `resume_unfinished` is False. Those that failed
        are left as they are, or go on (`resume_errored`), or else start anew (`restart_errored`). `trainable` may be
        left out where it can be imported again. `param_space` must be the one the experiment was made with; it is
        needed where the space has objects in it that cannot be stored.
        """
        storage_path, name = split_run_path(path)
        from holdfast.storage.locate import open_store
        from holdfast.tune.run_experiment import read_settings

        store = open_store(join(storage_path, name), storage_filesystem)
        try:
            settings = read_settings(store)
        finally:
            store.close()
        made = cls(
            settings.restored_trainable() if trainable is None else trainable,
            param_space=settings.restored_space() if param_space is None else param_space,
            tune_config=settings.restored_tune_config(),
            run_config=settings.restored_run_config(storage_path, name, storage_filesystem),
        )
        made._must_exist = True
        made._resume(resume_unfinished, resume_errored, restart_errored)
        return made

    def _resume(self, unfinished: bool, errored: bool, restart_errored: bool) -> None:
        """What becomes of trials of the experiment that is continued."""
        self._resume_unfinished = unfinished
        if errored or restart_errored:
            self._errored = "resume" if errored else "restart"


def _run_mirrored(request: ExperimentRequest) -> ExperimentOutcome:
    """With the user's syncer at work, if there is one."""
    from holdfast.tune.run_experiment import run_experiment

    run = request.run_config
    mirror = make_mirror(run.sync_config, request.storage_path, request.name, run.storage_filesystem)
    if mirror is not None and run.sync_config.sync_on_checkpoint:
        request = replace(request, on_checkpoint=mirror.sync_soon)
    with mirror or contextlib.nullcontext():
        return run_experiment(request)


def default_name(trainable: Any) -> str:
    """Of an experiment that was given none: another one at every call."""
    return f"{trainable_name(trainable)}_{time.strftime('%Y-%m-%d_%H-%M-%S')}_{secrets.token_hex(2)}"
