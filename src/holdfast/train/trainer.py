"""`DataParallelTrainer`: one training function on any number of workers, and `fit()` that sees it through.

It checks what the user wrote, as early as it can, and turns it into a `TrainRequest` (`request`); `holdfast.control`
runs that. `holdfast.train.torch.TorchTrainer` adds a process group and nothing else.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.engines.engine import EngineName
from holdfast.errors import ConfigError, HoldfastError, NotFound, TrainingFailedError
from holdfast.storage.uri import join
from holdfast.train.backend import BackendConfig, check_backend_config
from holdfast.train.config import RunConfig, ScalingConfig
from holdfast.train.data import DataConfig, check_datasets
from holdfast.train.engine_choice import client_address
from holdfast.train.interrupted import make_interrupted
from holdfast.train.paths import split_run_path
from holdfast.train.request import build_request, check_function
from holdfast.train.validation import ValidationConfig

if TYPE_CHECKING:
    from holdfast.checkpoint.handle import Checkpoint
    from holdfast.control.request import TrainRequest
    from holdfast.train.remote_driver import DriverOutcome
    from holdfast.train.result import Result
    from holdfast.worker.job import Framework

__all__ = ["DataParallelTrainer"]

_T = TypeVar("_T", bound="DataParallelTrainer")
_local_mode = threading.RLock()
"""Held by the thread in which a run in local mode is: it has the process's only session, directory and environment. A
run that its function starts is in the same thread."""


class DataParallelTrainer:
    """Runs `train_loop_per_worker` on every worker; it may take the configuration, or nothing.

    `datasets` are handed out by `holdfast.train.get_dataset_shard`, `metadata` by `TrainContext.get_metadata`.
    `resume_from_checkpoint` is what the run begins with while it has no checkpoint of its own.
    `validation_config` scores checkpoints that are reported with `validation=True`, while training goes on.
    The function reports with `holdfast.train.report` and resumes from `holdfast.train.get_checkpoint()`. `fit()` with
    the same `RunConfig(storage_path, name)` continues where the last one ended, whatever ended it.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        backend_config: BackendConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: DataConfig | None = None,
        validation_config: ValidationConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
    ) -> None:
        self._takes_config = check_function(train_loop_per_worker, train_loop_config)
        self.checked_datasets = check_datasets(datasets, dataset_config)
        self.datasets = dict(datasets or {})
        self.train_loop_per_worker = train_loop_per_worker
        self.train_loop_config = train_loop_config
        self.scaling_config = _given("scaling_config", scaling_config, ScalingConfig)
        self.backend_config = check_backend_config(backend_config)
        if validation_config is not None and not isinstance(validation_config, ValidationConfig):
            raise ConfigError(f"validation_config must be a ValidationConfig, not {type(validation_config).__name__}.")
        self.validation_config = validation_config
        if metadata is not None and not isinstance(metadata, Mapping):
            raise ConfigError(f"metadata must be a dict, not {type(metadata).__name__}.")
        self.metadata = metadata
        self.resume_from_checkpoint = _checkpoint(resume_from_checkpoint)
        self.run_config = _given("run_config", run_config, RunConfig)

    def fit(self) -> Result:
        """Run, or continue, until the function has returned on every worker.

        Raises `TrainingFailedError` when workers failed more often than `FailureConfig(max_failures)` allows, and
        `Interrupted` (a `KeyboardInterrupt` that ends a script with exit code 130 or 143 and no traceback) after Ctrl+C
        or SIGTERM; the same call continues the run in both cases. HOLDFAST_DEBUG=1 shows where in Holdfast an error of
        its own comes from.
        """
        try:
            return self._fit()
        except HoldfastError as error:
            if os.environ.get("HOLDFAST_DEBUG", "") not in ("", "0"):
                raise
            raise error.with_traceback(None) from None  # its sentence says what to do, our frames do not

    def _fit(self) -> Result:
        request = build_request(self, self._takes_config, self._framework(), self._preload())
        if not request.local_mode:
            return self._fit_request(request)
        if not _local_mode.acquire(blocking=False):
            raise ConfigError(
                "ScalingConfig(num_workers=0): another fit() of that kind runs in another thread, and local mode takes "
                "the directory and the environment of the whole process: call them one after the other, or use "
                "num_workers=1."
            )
        try:
            return self._fit_request(request)
        finally:
            _local_mode.release()

    def _fit_request(self, request: TrainRequest) -> Result:
        from holdfast.checkpoint.handle import Checkpoint
        from holdfast.control.run import run_training
        from holdfast.core.commands import RunStatus
        from holdfast.train.result import Result

        if request.engine is EngineName.RAY and (address := client_address()) is not None:
            return self._fit_on_cluster(address, request)
        sent: DriverOutcome | None = None
        if "HOLDFAST_LAUNCHER" in os.environ:
            from holdfast.train.launched import fit_launched

            request, outcome, sent = fit_launched(request)
        elif request.torchrun is None:
            outcome = run_training(request)
        else:
            from holdfast.train.torchrun import run_other_rank, run_rank_zero

            request.torchrun.connect()
            if request.torchrun.rank != 0:
                return run_other_rank(request, request.torchrun)
            outcome = run_rank_zero(request, request.torchrun)
        outcome.store.close()
        if outcome.status is RunStatus.INTERRUPTED:
            raise make_interrupted(outcome.interrupted_by)
        if outcome.error is not None:
            raise outcome.error
        path = join(request.storage_path, request.name)
        if sent is not None and sent.view is not None:
            return Result._of_run(Checkpoint(path, request.filesystem), sent.view, sent.reports)
        result = Result.from_path(path, request.filesystem)
        if outcome.status is RunStatus.FAILED:
            raise result.error or TrainingFailedError(f"The run {outcome.uri} failed; error.txt there says why.")
        return result

    def _fit_on_cluster(self, address: str, request: TrainRequest) -> Result:
        from holdfast.checkpoint.handle import Checkpoint
        from holdfast.train.remote_fit import fit_on_cluster, for_cluster
        from holdfast.train.result import Result

        sent = copy.copy(self)
        sent.run_config = for_cluster(self.run_config, request.storage_path)
        outcome = fit_on_cluster(address, request, sent)
        assert outcome.view is not None
        place = Checkpoint(join(request.storage_path, request.name), request.filesystem)
        return Result._of_run(place, outcome.view)

    def _outcome_as_driver(self) -> DriverOutcome:
        """`fit()` on the cluster's head, for a caller elsewhere."""
        from holdfast.train.remote_driver import trainer_outcome

        return trainer_outcome(self, build_request(self, self._takes_config, self._framework(), self._preload()))

    def _preload(self) -> tuple[str, ...]:
        """The modules that the zygote imports before it forks workers."""
        return ()

    def _framework(self) -> Framework | None:
        """What is set up around the function in each worker."""
        return None

    # ------------------------------------------------------------------ by path

    @classmethod
    def can_restore(cls, path: str | os.PathLike[str], storage_filesystem: object | None = None) -> bool:
        """Whether there is a run at `path` (`<storage_path>/<name>`) that `restore` could continue."""
        from holdfast.checkpoint.catalog import Catalog
        from holdfast.storage.locate import open_store

        store = open_store(path, storage_filesystem)
        try:
            try:
                store.size("run.json")
            except NotFound:
                return Catalog(store).newest() is not None
            return True
        except NotFound:
            return False
        finally:
            store.close()

    @classmethod
    def restore(
        cls: type[_T],
        path: str | os.PathLike[str],
        train_loop_per_worker: Callable[..., Any] | None = None,
        *,
        train_loop_config: dict[str, Any] | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        storage_filesystem: object | None = None,
        **others: Any,
    ) -> _T:
        """A trainer that continues the run at `path`; `RunConfig(storage_path, name)` are taken from the path.

        Nothing is unpickled from storage, so the function and the configurations must be given again.
        """
        if train_loop_per_worker is None:
            raise ConfigError(
                f"{cls.__name__}.restore() needs train_loop_per_worker: no code is kept in storage, so pass the "
                "function again."
            )
        run_config = _given("run_config", run_config, RunConfig)
        filesystem = storage_filesystem or run_config.storage_filesystem
        parent, name = split_run_path(path)
        if not cls.can_restore(path, filesystem):
            raise ConfigError(
                f"{cls.__name__}.restore(): there is no run at {os.fspath(path)}; ask "
                f"{cls.__name__}.can_restore() first."
            )
        resume = "must" if run_config.resume == "auto" else run_config.resume
        return cls(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            scaling_config=scaling_config,
            run_config=replace(
                run_config, name=name, storage_path=parent, storage_filesystem=filesystem, resume=resume
            ),
            **others,
        )


def _checkpoint(value: Any) -> Checkpoint | None:
    if value is None:
        return None
    from holdfast.checkpoint.handle import Checkpoint

    if not isinstance(value, Checkpoint):
        raise ConfigError(
            f"resume_from_checkpoint must be a Checkpoint, not {type(value).__name__}: write "
            "train.Checkpoint(path), or Checkpoint.from_directory(path)."
        )
    return value


def _given(field: str, value: Any, kind: type[Any]) -> Any:
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise ConfigError(f"{field} must be a {kind.__name__}, not {type(value).__name__}.")
    return value
