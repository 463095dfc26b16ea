"""Every error that Holdfast raises on purpose.

    HoldfastError
    ├── ConfigError (ValueError)          a setting is wrong; says which and what to write instead
    │   ├── InvalidURI                    a storage path that cannot be understood
    │   └── MissingExtra (ImportError)    a feature whose package is not installed
    ├── StorageError                      the storage said no, or nothing
    │   ├── NotFound                      no such key, bucket or directory
    │   ├── AlreadyExists                 an exclusive creation lost
    │   ├── AccessDenied                  credentials or permissions, a read-only path included
    │   ├── OutOfSpace                    disk or quota full
    │   └── Unavailable                   may work later: the only class that is tried again
    ├── CheckpointError
    │   ├── NotCommitted                  there is no manifest: the checkpoint does not exist yet, or never will
    │   ├── Damaged                       a committed checkpoint whose bytes are not what its manifest says
    │   ├── DuplicateFile                 two ranks gave the same file name
    │   ├── NameTaken                     a checkpoint directory of this name is there already
    │   ├── Pinned                        a checkpoint that must not be removed before it is unpinned
    │   └── UnsupportedFormat             written by a newer major version
    ├── RunError
    │   ├── RunBusy                       another live controller holds the run
    │   ├── Fenced                        a newer controller took the run over
    │   ├── TuneError                     trials of an experiment failed, or a callback of it did
    │   └── TrainingFailedError           `fit()` could not see the run through; the same call continues it
    │       ├── WorkerGroupError          workers failed more often than the budget allows
    │       ├── ControllerError           what is no worker's failure: storage, a checkpoint's name, a callback
    │       └── PreemptionError           nodes were taken away more often than the budget allows
    └── WireError                         a peer that speaks nonsense, or may not speak
        └── Unreachable                   nobody listens there, or does not answer: may work later
            └── HungUp                    too many dial at once: may work soon

Each message is one sentence for a person: what, which field or path, and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.printable import printable

__all__ = [
    "AccessDenied",
    "AlreadyExists",
    "CheckpointError",
    "ConfigError",
    "ControllerError",
    "Damaged",
    "DuplicateFile",
    "Fenced",
    "HungUp",
    "HoldfastError",
    "InvalidURI",
    "MissingExtra",
    "NameTaken",
    "NotCommitted",
    "NotFound",
    "OutOfSpace",
    "Pinned",
    "PreemptionError",
    "RunBusy",
    "RunError",
    "StorageError",
    "TrainingFailedError",
    "TuneError",
    "Unavailable",
    "Unreachable",
    "UnsupportedFormat",
    "WireError",
    "WorkerGroupError",
]


class HoldfastError(Exception):
    """The root: catch this to catch everything that Holdfast raises on purpose."""

    def __str__(self) -> str:
        """Safe to print: the message may name what a stranger's manifest or file is called."""
        return printable(super().__str__(), lines=True)


class ConfigError(HoldfastError, ValueError):
    """A setting is wrong; the message names the field and what to write instead."""


class InvalidURI(ConfigError):
    """A storage path that cannot be understood."""


class MissingExtra(ConfigError, ImportError):
    """A feature whose package is not installed; the message holds the `pip install` that mends it."""


class StorageError(HoldfastError):
    """The storage refused, or failed in a way that trying again will not mend."""


class NotFound(StorageError):
    """No such key, bucket or directory."""


class AlreadyExists(StorageError):
    """An exclusive creation lost: the key is there already."""


class AccessDenied(StorageError):
    """The storage refuses these credentials, or the path may not be written."""


class OutOfSpace(StorageError):
    """The disk or the quota is full."""


class Unavailable(StorageError):
    """The storage did not answer, or asked for patience; the same call may work later."""


class CheckpointError(HoldfastError):
    """Something about one checkpoint."""


class NotCommitted(CheckpointError):
    """There is no manifest: to every reader the checkpoint does not exist."""


class Damaged(CheckpointError):
    """A committed checkpoint whose bytes are not what its manifest says.

    `checkpoint` is the URI or path of the checkpoint's directory, where the raiser knew it: a run falls back to an
    earlier checkpoint only if the damaged one is its own.
    """

    def __init__(self, message: str, checkpoint: str | None = None) -> None:
        super().__init__(message)
        self.checkpoint = checkpoint


class DuplicateFile(CheckpointError):
    """Two ranks gave a file of the same name to one checkpoint."""


class NameTaken(CheckpointError):
    """A checkpoint directory of this name is there already."""


class Pinned(CheckpointError):
    """A checkpoint that must not be removed before it is unpinned."""


class UnsupportedFormat(CheckpointError):
    """Written by a newer major version of the format than this reader knows."""


class RunError(HoldfastError):
    """Something about a whole run."""


class RunBusy(RunError):
    """Another live controller holds this run."""


class Fenced(RunError):
    """A newer controller took this run over; what this one writes no longer counts."""


class TuneError(RunError):
    """Trials of an experiment failed (`tune.run` raises it), or a callback of it did; the message says which."""


class TrainingFailedError(RunError):
    """`fit()` could not see the run through: catch this for whatever ended it.

    `worker_failures` maps each failed rank to its error; it is empty where no worker failed.
    """

    worker_failures: dict[int, Exception]

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.worker_failures = {}


class WorkerGroupError(TrainingFailedError):
    """Workers failed more often than `FailureConfig(max_failures)` allows.

    The text ends with the traceback of the failure that the others follow from.
    """

    def __init__(self, error_message: str, worker_failures: Mapping[int, Exception]) -> None:
        super().__init__(error_message)
        self.worker_failures = dict(worker_failures)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.args[0], self.worker_failures)


class ControllerError(TrainingFailedError):
    """Something else than a worker failed: storage, a checkpoint's name or files, a callback.

    `controller_failure` is that error, with its class of `holdfast.errors`, or the callback's own; the text ends with
    the notes of that error, such as the traceback of a callback's.
    """

    def __init__(self, controller_failure: Exception) -> None:
        message = f"Training failed: {type(controller_failure).__name__}: {controller_failure}"
        super().__init__("\n\n".join([message, *getattr(controller_failure, "__notes__", ())]))
        self.controller_failure = controller_failure

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.controller_failure,)


class PreemptionError(TrainingFailedError):
    """Nodes were taken away, and workers with them, more often than `FailureConfig(max_preemption_failures)` allows.

    `preemption_info` has the last of them.
    """

    def __init__(self, preemption_info: Any, drain_timed_out: bool = False) -> None:
        super().__init__(
            "Training failed: nodes were taken away more often than FailureConfig(max_preemption_failures) allows, at "
            f"last {preemption_info}."
        )
        self.preemption_info = preemption_info
        self.drain_timed_out = drain_timed_out

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.preemption_info, self.drain_timed_out)


class WireError(HoldfastError):
    """A peer that speaks nonsense, or may not speak."""


class Unreachable(WireError):
    """Nobody listens at the controller's address, or does not answer, or hangs up; dialling again may work."""


class HungUp(Unreachable):
    """The controller took the connection and ended it before either side had proved anything: too many dial at once."""
