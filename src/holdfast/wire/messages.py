"""Every message between controller, agent and worker, as msgspec structs.

Two conversations, one vocabulary: controller <-> agent over TCP (`wire.channel`), agent <-> worker over
a socket pair.
Messages carry plain data only; the one exception is `Prepare.function`, a cloudpickle that an authenticated
controller sends to its own agents and that only the zygote opens. What a message *means* is decided in
`holdfast.core`; this module only names the fields.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.core.checkpoint_types import CheckpointInfo, Draft, FileEntry, Report, Snapshot
from holdfast.core.failure_kind import FailureKind

__all__ = [
    "PROTOCOL",
    "AgentHello",
    "AgentMessage",
    "Collect",
    "Collected",
    "ControllerMessage",
    "DamageFound",
    "Exited",
    "Finished",
    "FunctionPiece",
    "Imported",
    "LogLine",
    "Logs",
    "Ping",
    "Pong",
    "Prepare",
    "Prepared",
    "Reports",
    "Settled",
    "Shutdown",
    "Stacks",
    "Start",
    "Started",
    "Stop",
    "Stopped",
    "ToWorker",
    "Upload",
    "UploadFailed",
    "Uploaded",
    "Waiting",
    "Welcome",
    "WorkerMessage",
    "WorkerReport",
]

PROTOCOL = 1
"""Version of this vocabulary; both sides of a connection must speak the same."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Tagged by class name; unknown fields of a newer minor version are ignored."""


# ---------------------------------------------------------------- agent -> controller


class AgentHello(_Message, frozen=True, kw_only=True):
    """First words after the handshake: who this agent is and what it can hold."""

    protocol: int
    agent: str
    host: str
    address: str
    pid: int
    slots: int
    master_port: int
    """A port that the agent keeps bound and listening for the next generation's rank 0."""


class Prepared(_Message, frozen=True, kw_only=True):
    """The zygote has imported the function and is ready to fork; or workers will be spawned cold, and why."""

    cold_reason: str | None = None


class Started(_Message, frozen=True, kw_only=True):
    """All of this agent's workers of a generation are running."""

    generation: int
    pids: dict[int, int]


class DamageFound(_Message, frozen=True, kw_only=True):
    """The checkpoint that a generation was to start from is not what was committed; no worker was started here."""

    generation: int
    checkpoint: str
    why: str


class Reports(_Message, frozen=True, kw_only=True):
    """What one rank reported since the last message, in order, batched by the agent."""

    generation: int
    rank: int
    reports: list[Report]


class Waiting(_Message, frozen=True, kw_only=True):
    """A rank is inside `report`, waiting for an upload (so it is not hung)."""

    generation: int
    rank: int
    waiting: bool


class Finished(_Message, frozen=True, kw_only=True):
    """The training function returned. `value` is plain data, or None with `value_error` saying why not."""

    generation: int
    rank: int
    value: Any = None
    value_error: str | None = None


class Exited(_Message, frozen=True, kw_only=True):
    """A worker died without finishing, for whatever reason. `signal` and `code` as the kernel gave them."""

    generation: int
    rank: int
    cause: str
    """One phrase: "raised ValueError: ...", "killed by SIGKILL (out of memory)", "called sys.exit(0)"."""
    kind: FailureKind = FailureKind.OTHER
    damaged_checkpoint: str | None = None
    """With `kind` DAMAGED: the name of the run's checkpoint that could not be loaded, if it was one of the run's."""
    error_type: str | None = None
    error: str | None = None
    traceback: str | None = None
    code: int | None = None
    signal: int | None = None
    last_lines: list[str] = []


class Stopped(_Message, frozen=True, kw_only=True):
    """Nothing of this generation is alive on this agent any more; `master_port` is for the next one."""

    generation: int
    master_port: int


class Uploaded(_Message, frozen=True, kw_only=True):
    """One rank's part is durable in the draft's directory."""

    generation: int
    number: int
    rank: int
    files: list[FileEntry]
    elapsed_s: float = 0.0
    uploaded_bytes: int = 0


class UploadFailed(_Message, frozen=True, kw_only=True):
    """One rank's part could not be stored."""

    generation: int
    number: int
    rank: int
    kind: FailureKind
    error: str
    retryable: bool = False


class LogLine(msgspec.Struct, frozen=True, array_like=True):
    """One line. Rank -1 is the zygote, while it imports; the stream "holdfast" is the agent's own voice."""

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


class Pong(_Message, frozen=True, kw_only=True):
    """Still here."""


class Collect(_Message, frozen=True, kw_only=True):
    """A rank entered a collective (`barrier`, `broadcast_from_rank_zero`); the `sequence`-th of this generation."""

    generation: int
    rank: int
    sequence: int
    kind: str
    data: Any = None


# ---------------------------------------------------------------- controller -> agent


class Welcome(_Message, frozen=True, kw_only=True):
    """The controller takes this agent in."""

    protocol: int
    run: str
    epoch: int


class Prepare(_Message, frozen=True, kw_only=True):
    """Everything that does not change between generations."""

    function: bytes
    """cloudpickle of the job (train function, configuration, framework setup): all of it, or its first piece."""
    function_size_bytes: int | None = None
    """Of the whole function; the other pieces follow as `FunctionPiece`. None: there are none."""
    function_hash: str = ""
    """BLAKE3 of the whole function."""
    storage: str
    """URI of the run's directory."""
    filesystem: bytes | None = None
    """cloudpickle of a custom pyarrow filesystem, where one was given."""
    experiment: str
    trial_id: str
    trial_dir: str
    work_dir: str
    sys_path: list[str]
    environment: dict[str, str]
    preload: list[str] = []
    """Modules to import into the zygote besides those that the function needs."""
    change_directory: bool = True
    sync_artifacts: bool = False
    sync_artifacts_on_checkpoint: bool = True
    sync_period_s: float = 300.0
    """How often artifacts are stored between checkpoints."""
    fork: bool = True


class FunctionPiece(_Message, frozen=True, kw_only=True):
    """The next piece of the function that `Prepare` announced."""

    data: bytes


class Start(_Message, frozen=True, kw_only=True):
    """Form this agent's share of a generation."""

    generation: int
    ranks: list[int]
    world_size: int
    local_world_size: int
    node_rank: int
    node_count: int
    master_address: str
    master_port: int
    restart_count: int
    max_restarts: int
    checkpoint: str | None = None
    """Name of the committed checkpoint to resume from."""
    checkpoints: list[tuple[str, dict[str, Any]]] = []
    """All committed checkpoints with their metrics, oldest first."""
    iteration: int = 0


class Stop(_Message, frozen=True, kw_only=True):
    """Kill this generation's workers and answer `Stopped`. Parts already staged stay for their upload."""

    generation: int
    dump_stacks: bool = False


class Upload(_Message, frozen=True, kw_only=True):
    """Store the part that `rank` staged with its report `number`."""

    generation: int
    number: int
    rank: int
    draft: Draft
    parent_files: list[FileEntry] = []
    info: CheckpointInfo | None = None
    """What the agent must know to leave a part record, should this controller die before it can commit."""


class Settled(_Message, frozen=True, kw_only=True):
    """The checkpoint of report `number` is committed under `name`, or (None) was given up; staging may go."""

    generation: int
    number: int
    name: str | None


class Collected(_Message, frozen=True, kw_only=True):
    """All ranks arrived at the collective; `data` is rank 0's."""

    generation: int
    sequence: int
    data: Any = None


class Ping(_Message, frozen=True, kw_only=True):
    """Are you there? Answered by `Pong`, so that a stopped agent or a dead network is noticed."""


class Shutdown(_Message, frozen=True, kw_only=True):
    """Kill everything, remove everything, exit."""

    flush_s: float = 30.0
    """How long the agent may take to bring logs and artifacts to storage first."""


# ---------------------------------------------------------------- worker -> agent only


class Imported(_Message, frozen=True, kw_only=True):
    """Modules that this worker imported beyond its zygote's: worth having before the next fork."""

    modules: list[str]


class WorkerReport(_Message, frozen=True, kw_only=True):
    """One `report` call as the worker sends it to its agent; `staged` is the directory the agent now owns."""

    report: Report
    staged: str | None = None
    existing: str | None = None
    """NO_UPLOAD: name of a directory that lies in the run's storage already."""
    snapshot: Snapshot | None = None
    """The files lie in memory; the worker leaves them alone until the checkpoint is settled."""


WorkerMessage = WorkerReport | Waiting | Finished | Exited | Imported | Collect
ToWorker = Settled | Collected
AgentMessage = (
    AgentHello
    | Prepared
    | Started
    | DamageFound
    | Reports
    | Waiting
    | Finished
    | Exited
    | Stopped
    | Uploaded
    | UploadFailed
    | Logs
    | Stacks
    | Collect
    | Pong
)
ControllerMessage = Welcome | Prepare | FunctionPiece | Start | Stop | Upload | Settled | Collected | Ping | Shutdown
