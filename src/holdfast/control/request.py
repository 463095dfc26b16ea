"""What `fit()` asks of the controller, and what it gets back.

`holdfast.train.trainer` checks and resolves every setting and builds a `TrainRequest`;
`control.run.run_training` runs it and answers with a `TrainOutcome`. Nothing in here is read from storage: a
`Result` is built from the run's directory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from holdfast.control.fingerprint import Fingerprint
from holdfast.core.admission import PlacementStrategy
from holdfast.core.checkpoint_types import ValidationTask
from holdfast.core.commands import RunStatus
from holdfast.engines.engine import EngineName
from holdfast.engines.ray.options import RayOptions
from holdfast.errors import HoldfastError
from holdfast.storage.store import Store
from holdfast.worker.job import Job
from holdfast.worker.torchrun import Torchrun

__all__ = ["RequestWords", "RunContext", "TrainOutcome", "TrainRequest", "ValidationPlan"]


class RequestWords(NamedTuple):
    """What the user calls the parts of a request, for errors."""

    function: str = "train_loop_per_worker or train_loop_config"
    resources: str = ""
    """What asks for resources; "" is `ScalingConfig`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What a user's callback is told about its run; the configurations are the user's own objects."""

    name: str
    storage_path: str
    trainer_name: str
    train_loop_config: dict[str, Any] | None
    scaling_config: Any
    run_config: Any


class ValidationPlan(Protocol):
    """How checkpoints are validated (`train.ValidationConfig`)."""

    @property
    def job(self) -> Job:
        """Takes the `fn_kwargs` of a task as its configuration."""
        ...

    def timeout_s(self, task: ValidationTask) -> float | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """One run, with every setting validated and every default filled in."""

    job: Job
    words: RequestWords = field(default_factory=RequestWords)
    trainer_name: str
    """Class name of the trainer ("TorchTrainer"), for people."""

    storage_path: str
    """A directory (absolute) or a URI; the run's directory is `<storage_path>/<name>`."""
    filesystem: object | None
    """A `pyarrow.fs.FileSystem`; `storage_path` is then a path on it, without a scheme."""
    name: str

    min_workers: int
    max_workers: int
    last_call_s: float = 0.0
    """How long a run that has enough agents to start waits for more."""
    spares: int = 0
    """So many agents are kept prepared and idle."""
    resize_settle_s: float = 60.0
    """For how long there is room for more workers before the run grows."""
    local_mode: bool
    """`num_workers=0`: one worker, in the calling process; `min_workers` is then 1."""
    placement: PlacementStrategy = PlacementStrategy.PACK
    """Which agents workers go to; on Ray, the placement group decides that."""
    nodes: int
    """How many local agents stand in for nodes."""
    engine: EngineName = EngineName.LOCAL
    """Whose agents the run uses."""
    ray: RayOptions | None = None
    """What is asked of the Ray engine, if it is that."""
    working_dir: str | None = None
    """The directory of the user's code, for agents that do not share this disk; None: the script's, "": none."""
    excludes: tuple[str, ...] = ()
    """Patterns of what is not sent of it."""
    listen: str | None = None
    """`HOST:PORT` at which agents of other machines are accepted, too."""

    stop_on_repeated_error: bool = True
    """An error of the user's code that comes twice in the same way ends the run."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """What each worker takes of its agent: what the user asked for."""

    max_failures: int
    max_preemption_failures: int
    """-1 is unlimited."""
    progress_timeout_s: float | None

    num_to_keep: int | None
    score_attribute: str | None
    score_order: Literal["max", "min"]
    on_conflict: Literal["lowest_rank", "error"] = "lowest_rank"
    """What counts of a file name that several ranks give."""
    target_overhead: float = 0.02
    """Share of the time that checkpoints may stall training where `should_checkpoint` decides."""

    takeover: bool
    resume: Literal["auto", "never", "must", "restart"]
    sync_artifacts: bool
    sync_period_s: float
    sync_timeout_s: float = 1800.0
    sync_artifacts_on_checkpoint: bool

    output_files: tuple[str, str] | None = None
    """Files of the run's directory that rank 0's stdout and stderr are appended to as well."""

    callbacks: tuple[Any, ...]
    """Objects with the hooks of `holdfast.train.UserCallback`."""
    run_context: RunContext
    """First argument of every hook."""
    validation: ValidationPlan | None = None

    preload: tuple[str, ...]
    """Modules that the zygote imports before it forks the first worker."""
    fingerprint: Fingerprint
    """Of the function and its configuration. Kept with the run, and compared when the name is used again: a run that
    is complete is called again if something differs."""
    params: Mapping[str, Any]
    """Plain JSON, for params.json, with secrets masked."""
    verbose: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables set in every worker besides torchrun's."""
    on_listening: Callable[[str], None] | None = None
    """Called with the join string once agents are accepted."""
    torchrun: Torchrun | None = None
    """Local mode in several processes of torchrun: this one's place among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOutcome:
    """How the run ended, as far as this controller knows; everything else is read back from `store`."""

    status: RunStatus
    uri: str
    """The run's directory as a person would write it."""
    store: Store
    """The run's directory; the caller closes it."""
    error: HoldfastError | None = None
    interrupted_by: str = ""
    """"Ctrl+C", or the name of a signal."""
    return_value: Any = None
