"""What a worker is given: the job (the same for every worker of a run) and its assignment (its place in a generation).

The agent makes assignments out of `core.commands.StartWorkers`; the zygote holds the job; `bootstrap` brings both
together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from holdfast.core.checkpoint_types import Snapshot, VerifiedFile
from holdfast.streaming.messages import ServedStorage

__all__ = ["Assignment", "Framework", "Job"]


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's place in one generation, its run's configuration, and where its things are."""

    run: str = ""
    """The run's id."""
    generation: int
    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int
    node_count: int
    address: str = ""
    """At which other nodes reach this one."""
    master_address: str
    master_port: int
    restart_count: int
    max_restarts: int
    checkpoint: str | None
    storage: str
    served: ServedStorage | None = None
    """Where that is served, if this node does not see it."""
    experiment: str
    trial_id: str
    trial_dir: str
    work_dir: str
    staging_dir: str
    """Directory on the node in which the worker hands parts over to its agent."""
    temp_dir: str
    """Directory for temporary files, removed when the generation ends."""
    error_file: str
    change_directory: bool
    gpus: tuple[str, ...] | None = None
    """The ids of the GPUs that are this worker's; None: nobody said."""
    has_validation: bool = False
    """There is a function that validates checkpoints."""
    all_metrics: bool = False
    """Metrics are sent whatever the rank."""
    awaits_decisions: bool = False
    """After each report the worker waits for the decision whether the run goes on."""
    buffers: list[str] = []
    """Shared memory for this worker's snapshots, by path."""
    snapshot_limit_bytes: int = 0
    """How large these buffers may be in all."""
    snapshots: list[Snapshot] = []
    """What lies in this node's memory of the `checkpoint` to resume from."""
    config: bytes | None = None
    """cloudpickle of the run's configuration; None: the job has it, or there is none."""
    filesystem: bytes | None = None
    """cloudpickle of the filesystem that the run's storage is opened with, where one was given."""
    verified: list[VerifiedFile] = []
    """The files of that checkpoint in storage, as the agent verified them a moment ago."""


class Framework(Protocol):
    """What a framework needs around the user's function (torch: a process group)."""

    def setup(self, assignment: Assignment, master_listen_fd: int | None) -> None:
        """Runs before the user's function, in the worker. On rank 0 `master_listen_fd` is the listening socket of
        `master_port`, the framework's to use or to close."""
        ...

    def shutdown(self) -> None:
        """Runs after the user's function returned or raised, in the worker."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """The user's function; travels as one cloudpickle, opened in the zygote only. Its configuration travels with it
    only where it is large (`control.job_pickle`); otherwise with the assignment, so that runs share a zygote."""

    function: Callable[..., Any]
    config: dict[str, Any] | None
    takes_config: bool
    framework: Framework | None
    sources: Mapping[str, str] = field(default_factory=dict)
    """Source code that only the driver's process has (the cells of a notebook), by file name, for tracebacks."""
