"""Every message between controller, agent and worker, as msgspec structs.

Two conversations: controller <-> agent over TCP (`wire.channel`), agent <-> worker over a socket pair. What the core
decides upon, or has decided, is sent as the core's own structs: the events of `core.events` that happen on a node, and
the commands of `core.commands` that are for agents. The structs of this module are the rest, which nothing is decided
by: uploads, output, collectives, pings.
Messages carry plain data only; the exceptions are cloudpickles that an authenticated controller sends to its own
agents: `PrepareFunction.function`, which only the zygote opens, and a run's configuration, which only workers open.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from holdfast.core.checkpoint_types import CheckpointInfo, Draft, FileEntry, Part, Report
from holdfast.core.commands import (
    AnnounceCheckpoint,
    AnnouncePreemption,
    AnnounceSettled,
    HoldReports,
    StartWorkers,
    StopWorkers,
)
from holdfast.core.events import (
    AgentDraining,
    AgentJoined,
    AgentPrepared,
    DamageFound,
    RankReported,
    Ticket,
    WorkerExited,
    WorkerFinished,
    WorkersStarted,
    WorkersStopped,
    WorkerWaited,
)
from holdfast.core.failure_kind import FailureKind

__all__ = [
    "PROTOCOL",
    "Acknowledge",
    "AgentMessage",
    "ChannelOpened",
    "ChannelRefused",
    "CloseRun",
    "CodePiece",
    "Collect",
    "Collected",
    "CollectiveKind",
    "ControllerMessage",
    "FunctionPiece",
    "Imported",
    "Leave",
    "LogLine",
    "Logs",
    "Note",
    "OpenChannel",
    "Ping",
    "Pong",
    "PrepareCode",
    "PrepareFunction",
    "PrepareRun",
    "RunClosed",
    "Shutdown",
    "Stacks",
    "StorageProbe",
    "StorageServed",
    "StorageUnseen",
    "ToWorker",
    "Upload",
    "UploadFailed",
    "Uploaded",
    "WorkerMessage",
    "WorkerReport",
]

PROTOCOL = 5
"""Version of these messages; both sides of a connection must have the same."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Tagged by class name; unknown fields of a newer minor version are ignored."""


# ---------------------------------------------------------------- agent -> controller


class Uploaded(_Message, frozen=True, kw_only=True):
    """One rank's part is durable in the draft's directory."""

    ticket: Ticket
    rank: int
    token: str
    """Of the draft: a checkpoint that is tried again has another."""
    files: list[FileEntry]
    uploaded_bytes: int = 0


class UploadFailed(_Message, frozen=True, kw_only=True):
    """One rank's part could not be stored."""

    ticket: Ticket
    rank: int
    token: str
    kind: FailureKind
    error: str


class LogLine(msgspec.Struct, frozen=True, array_like=True):
    """One line. Rank -1 is the zygote, while it imports; the stream "holdfast" is the agent itself."""

    rank: int
    stream: str
    text: str


class Logs(_Message, frozen=True, kw_only=True):
    """What workers printed, in order of arrival."""

    generation: int
    lines: list[LogLine]


class Stacks(_Message, frozen=True, kw_only=True):
    """Python stacks of a rank that seemed to hang, taken before it was killed."""

    generation: int
    rank: int
    text: str


class StorageUnseen(_Message, frozen=True, kw_only=True):
    """This node does not see the run's storage path (`PrepareRun.probe`); answered by `StorageServed`."""


class RunClosed(_Message, frozen=True, kw_only=True):
    """Nothing of the run is left on this node."""


class Pong(_Message, frozen=True, kw_only=True):
    """The answer to `Ping`."""


class Leave(_Message, frozen=True, kw_only=True):
    """The agent ends, and does not come back."""


class OpenChannel(_Message, frozen=True, kw_only=True):
    """The first message of every connection of an agent; answered by `ChannelOpened` or `ChannelRefused`."""

    incarnation: str
    """Of the agent's channel: another one has other messages."""
    received: int | None = None
    """The number of the last message that the agent has of this channel; None: the channel is new."""
    comes_back: bool = False
    """Whether the agent connects again when the connection breaks. Others end with it."""


class CollectiveKind(enum.StrEnum):
    """What ranks meet for."""

    BARRIER = "barrier"
    BROADCAST = "broadcast"
    CHECKPOINT_INTERVAL = "checkpoint_interval"
    """`should_checkpoint`: the controller answers with whether one is due, the call at which to ask again, and whether
    the rank has to stay in its next report."""
    DECISION = "decision"
    """After a report, where somebody decides by reports whether the run goes on: the controller answers with whether it
    does."""


class Collect(_Message, frozen=True, kw_only=True):
    """A rank entered a collective (`barrier`, `broadcast_from_rank_zero`); the `sequence`-th of this generation."""

    generation: int
    rank: int
    sequence: int
    kind: CollectiveKind
    data: Any = None


# ---------------------------------------------------------------- controller -> agent


class PrepareFunction(_Message, frozen=True, kw_only=True):
    """What workers run, and the process that they are forked from. Of the connection: sent once, and kept by `key` for
    every run that names it."""

    key: str
    """A hash of all of it: runs with the same one share a zygote."""
    function: bytes
    """cloudpickle of the job (train function, framework setup): all of it, or its first piece."""
    size_bytes: int | None = None
    """Of the whole function; the other pieces follow as `FunctionPiece`. None: there are none."""
    hash: str = ""
    """BLAKE3 of the whole function."""
    sys_path: list[str]
    environment: dict[str, str]
    preload: list[str] = []
    """Modules to import into the zygote besides those that the function needs."""
    code_hash: str = ""
    """Of the driver's working directory (`PrepareCode`), where the agent was sent it."""
    fork: bool = True


class PrepareCode(_Message, frozen=True, kw_only=True):
    """The driver's working directory, for agents that do not share its disk: sent once, before the functions that name
    it, and kept by hash. Its bytes follow as `CodePiece`."""

    hash: str
    """BLAKE3 of the archive (tar, gzip)."""
    size_bytes: int
    root: str
    """Where it lies on the driver's machine: paths below it are mapped."""


class CodePiece(_Message, frozen=True, kw_only=True):
    """The next piece of the archive that `PrepareCode` announced."""

    hash: str
    data: bytes


class FunctionPiece(_Message, frozen=True, kw_only=True):
    """The next piece of the function that `PrepareFunction` announced."""

    key: str
    data: bytes


class StorageProbe(_Message, frozen=True, kw_only=True):
    """How an agent finds out whether a directory of the controller's machine is the one that it sees at that path."""

    root: str
    """The directory: the run's, or one above it."""
    file: str
    """A file in it, which this controller has written."""
    text: str
    """What stands in that file, and in no other."""


class PrepareRun(_Message, frozen=True, kw_only=True):
    """Everything of a run that does not change between its generations; answered by `AgentPrepared`."""

    function_key: str
    config: bytes | None = None
    """cloudpickle of `train_loop_config`, opened by each worker; None: it is in the function, or there is none."""
    config_modules: list[str] = []
    """What opening the configuration imports: a zygote that is started for this run imports it beforehand."""
    workers: int = 1
    """How many workers of the run this agent will have at most."""
    storage: str
    """URI of the run's directory."""
    probe: StorageProbe | None = None
    """Where other machines may not see that directory."""
    snapshot_key: str = ""
    """Opens what agents that do not see it have in memory of the run's checkpoints, to each other."""
    filesystem: bytes | None = None
    """cloudpickle of a custom pyarrow filesystem, where one was given."""
    experiment: str
    trial_id: str
    trial_dir: str
    work_dir: str
    """The directory that workers run in; a relative one is below the node's own cache."""
    change_directory: bool = True
    sync_artifacts: bool = False
    sync_artifacts_on_checkpoint: bool = True
    max_restarts: int = 0
    sync_period_s: float = 300.0
    """How often artifacts are stored between checkpoints, and logs at least."""
    sync_timeout_s: float = 1800.0
    """How long that may take; what is left is for the next time."""
    output_files: tuple[str, str] | None = None
    """What rank 0 writes to stdout and to stderr is appended to these files of the run's directory."""
    awaits_decisions: bool = False
    """After each report workers wait for the decision whether the run goes on (`CollectiveKind.DECISION`)."""


class StorageServed(_Message, frozen=True, kw_only=True):
    """Where the run's directory is served for nodes that do not see it, on the controller's machine."""

    root: str
    port: int = 0
    key: str = ""
    error: str = ""
    """Why it is not."""


class CloseRun(_Message, frozen=True, kw_only=True):
    """Kill the run's workers and remove what the node holds of it; the agent and its other runs go on. Answered by
    `RunClosed`."""

    flush_s: float = 30.0
    """How long the agent may take to bring the run's logs and artifacts to storage first."""


class Upload(_Message, frozen=True, kw_only=True):
    """Store the part of the ticket that `rank` gave; answered by `Uploaded` or `UploadFailed`."""

    ticket: Ticket
    rank: int
    draft: Draft
    parent_files: list[FileEntry] = []
    hash_only: tuple[str, ...] = ()
    """Files that are hashed and not stored: a lower rank stores its own of the same name."""
    info: CheckpointInfo | None = None
    """What the agent must know to leave a part record, should this controller die before it can commit."""


class Collected(_Message, frozen=True, kw_only=True):
    """All ranks arrived at the collective; `data` is rank 0's."""

    generation: int
    sequence: int
    data: Any = None


class Ping(_Message, frozen=True, kw_only=True):
    """Answered by `Pong`, so that a stopped agent or a dead network is noticed."""


class ChannelOpened(_Message, frozen=True, kw_only=True):
    """The answer to `OpenChannel`: the channel goes on over this connection."""

    received: int = 0
    """The number of the last message that the controller has of this channel."""
    silence_s: float = 30.0
    """An agent that hears nothing for so long is lost, and ends its runs."""


class ChannelRefused(_Message, frozen=True, kw_only=True):
    """The answer to `OpenChannel`: the agent is not wanted under this name, or its channel is unknown."""

    reason: str


class Shutdown(_Message, frozen=True, kw_only=True):
    """Kill everything, remove everything, exit."""

    flush_s: float = 30.0
    """How long the agent may take to bring logs and artifacts to storage first."""


# ---------------------------------------------------------------- either way between controller and agent


class Acknowledge(_Message, frozen=True, kw_only=True):
    """What was received is acknowledged by the envelope of any message; of this one where there is no other."""


# ---------------------------------------------------------------- worker -> agent only


class Imported(_Message, frozen=True, kw_only=True):
    """Modules that this worker imported beyond its zygote's: the zygote may import them before the next fork."""

    modules: list[str]


class Note(_Message, frozen=True, kw_only=True):
    """A line of Holdfast's own about this worker, for its log and the driver's terminal."""

    text: str


class WorkerReport(_Message, frozen=True, kw_only=True):
    """One `report` call as the worker sends it to its agent, which owns the part from then on."""

    report: Report
    part: Part | None = None
    """With `report.checkpoint`."""


class ReserveBuffers(_Message, frozen=True, kw_only=True):
    """The worker wants to make its snapshot buffers larger; answered by `BuffersReserved`."""

    size_bytes: int
    """Of each."""
    count: int
    """How many of them; the first one only is the next best."""


# ---------------------------------------------------------------- agent -> worker only


class BuffersReserved(_Message, frozen=True, kw_only=True):
    """How many of the worker's snapshot buffers may now have the size that it asked for, the first one first. A buffer
    beyond those must be released before another one grows."""

    count: int


WorkerMessage = WorkerReport | WorkerWaited | WorkerFinished | WorkerExited | Imported | Note | Collect | ReserveBuffers
ToWorker = AnnounceCheckpoint | AnnouncePreemption | AnnounceSettled | HoldReports | Collected | BuffersReserved
AgentMessage = (
    AgentJoined
    | AgentDraining
    | AgentPrepared
    | WorkersStarted
    | DamageFound
    | RankReported
    | WorkerWaited
    | WorkerFinished
    | WorkerExited
    | WorkersStopped
    | Uploaded
    | UploadFailed
    | Logs
    | Stacks
    | StorageUnseen
    | Collect
    | RunClosed
    | Pong
    | Leave
    | OpenChannel
    | Acknowledge
)
ControllerMessage = (
    PrepareCode
    | CodePiece
    | PrepareFunction
    | FunctionPiece
    | PrepareRun
    | StorageServed
    | CloseRun
    | StartWorkers
    | StopWorkers
    | HoldReports
    | Upload
    | AnnounceCheckpoint
    | AnnouncePreemption
    | AnnounceSettled
    | Collected
    | Ping
    | ChannelOpened
    | ChannelRefused
    | Acknowledge
    | Shutdown
)
