"""The structs by which every layer speaks of a checkpoint: a file, a draft, a snapshot, a report, a stored checkpoint.

They are at the bottom so that manifest, wire and core use the same ones.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

__all__ = [
    "CheckpointInfo",
    "Draft",
    "ExistingPart",
    "FileEntry",
    "MemoryFile",
    "Part",
    "Report",
    "RequestedValidation",
    "Snapshot",
    "StagedPart",
    "StoredCheckpoint",
    "Validation",
    "ValidationStatus",
    "ValidationTask",
    "VerifiedFile",
]


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One of the user's files: where it lies below the checkpoint's directory, and what it must hash to."""

    path: str
    size_bytes: int
    blake3: str
    rank: int = 0
    mode: int | msgspec.UnsetType = msgspec.UNSET
    """Its permission bits (0o777), where they are known: files that came from memory have none of their own."""
    directory: bool | msgspec.UnsetType = msgspec.UNSET
    """True for an empty directory of a part on its way to the manifest, which lists these apart from files."""
    hash_only: bool | msgspec.UnsetType = msgspec.UNSET
    """True for a file of a part on its way to the manifest that was not stored, since a lower rank stored its own of
    this name."""
    differing_ranks: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    """The other ranks that gave a file of this name with other bytes, which are not kept."""

    def differs_from(self, other: FileEntry) -> bool:
        """Whether the two cannot be one entry: other bytes, or one is a file and the other a directory."""
        mine = (self.size_bytes, self.blake3, self.directory is True)
        return mine != (other.size_bytes, other.blake3, other.directory is True)


class VerifiedFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of a checkpoint that was hashed and found right while it had this version (see `Store.version`)."""

    path: str
    version: str
    size_bytes: int
    blake3: str


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """A reserved, not yet committed checkpoint: the exact name that everyone uploads to."""

    name: str
    index: int
    epoch: int
    token: str
    parent: str | None = None


class StoredCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that is committed in storage: its manifest without the files (`Manifest.stored`)."""

    name: str
    index: int
    iteration: int
    generation: int
    metrics: dict[str, Any]
    size_bytes: int = 0
    token: str = ""
    """The manifest's, which tells this checkpoint from another of the same name."""

    @property
    def order(self) -> tuple[int, str]:
        """Sorts checkpoints of one run from the oldest to the newest."""
        return self.index, self.name


class CheckpointInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a manifest says of a checkpoint besides its files, and which ranks give files."""

    ranks: tuple[int, ...]
    world_size: int
    iteration: int
    metrics: dict[str, Any] = {}
    worker_states: FileEntry | msgspec.UnsetType = msgspec.UNSET
    """The file of all ranks' states, where there is one."""


class MemoryFile(msgspec.Struct, frozen=True, array_like=True):
    """One file of a snapshot, and where its bytes lie behind the buffer's seal."""

    path: str
    offset: int
    size_bytes: int


class StagedPart(msgspec.Struct, frozen=True, tag=True):
    """A part in a directory of the agent's staging area; the agent owns it."""

    directory: str


class ExistingPart(msgspec.Struct, frozen=True, tag=True):
    """A part that lies in the run's storage already, under the checkpoint's name (`CheckpointUploadMode.NO_UPLOAD`)."""

    name: str


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A part in memory that the agent owns; see `worker.snapshot_buffer`. The worker leaves it as it is until the
    checkpoint is committed or given up."""

    buffer: str
    """The buffer's path in /proc."""
    seal: int
    files: list[MemoryFile]


Part = StagedPart | ExistingPart | Snapshot
"""One rank's files of a checkpoint, as the worker hands them to its agent."""


class ValidationTask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a checkpoint is to be validated, as `report(validation=...)` says."""

    fn_kwargs: dict[str, Any] = {}
    timeout_s: float | None = None
    is_default: bool = False
    """Nothing was said but that it is to be validated: the time limit is the trainer's."""


class ValidationStatus(enum.StrEnum):
    """How the validation of a checkpoint stands; the values are those of `ReportedCheckpointStatus`."""

    PENDING = "PENDING_VALIDATION"
    VALIDATED = "VALIDATED"
    TIMEOUT = "VALIDATION_TIMEOUT"
    FAILED = "VALIDATION_FAILED"


class Validation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The validation of one checkpoint: asked for, and what came of it."""

    token: str
    """The checkpoint's."""
    task: ValidationTask
    status: ValidationStatus = ValidationStatus.PENDING
    metrics: dict[str, Any] = {}


class RequestedValidation(msgspec.Struct, frozen=True, kw_only=True):
    """A validation of a checkpoint that is not committed yet."""

    generation: int
    task: ValidationTask


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call of `train.report`. `number` counts this rank's calls in this generation from 1.

    Ranks other than 0 send metrics as None, unless the run has callbacks or they know the checkpoint to be whole: only
    rank 0's count, or those of a rank that stands in for it."""

    number: int
    at: float
    metrics: dict[str, Any] | None = None
    checkpoint: bool = False
    checkpoint_dir_name: str | None = None
    adopt: bool = False
    """The files lie in the run's storage already, under that name."""
    file_names: tuple[str, ...] = ()
    """The paths of the files that this rank gives, where there are other ranks: they may give some of the same."""
    stall_s: float = 0.0
    """How long this call kept training waiting (copying, or waiting for an earlier upload)."""
    worker_state: bytes = b""
    """What Holdfast saves of this rank, should this report be a checkpoint's, whichever ranks give files: JSON."""
    needed_ranks: tuple[int, ...] | None = None
    """The ranks whose parts are all that this checkpoint needs, where the rank that reports knows: it may then be
    committed without the others, should they die before they have reported it. None: every rank's part is needed."""
    held: bool = False
    """The call does not return until the rank is told to go on (`commands.HoldReports`)."""
    waits: bool = False
    """The call does not return until its checkpoint is committed or given up."""
    validation: ValidationTask | None = None
