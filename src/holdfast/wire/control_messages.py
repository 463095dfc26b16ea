"""The control API: what a control client asks of a controller, and what it is answered.

A control client is the command line, or any other program that knows the run secret. It connects
to the controller's port with the handshake of agents (`auth`, role CONTROL), and sends requests; the envelope's run
says which run each is about. Requests of one connection are answered one after the other, each with one reply, but
`ReadLogs`, which is answered by any number of `LogLines` and one `LogsEnded`.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any

import msgspec

from holdfast.core.agent_phase import AgentPhase
from holdfast.wire.messages import LogLine, StorageServed

__all__ = [
    "AgentStatus",
    "ControlReply",
    "ControlRequest",
    "Done",
    "DrainNode",
    "ExperimentStatusReply",
    "FindStorage",
    "GetJoinString",
    "GetStatus",
    "LogLines",
    "LogsEnded",
    "ReadLogs",
    "Refused",
    "RunPhase",
    "RunRequest",
    "RunStatusReply",
    "SetWorkers",
    "StopRun",
    "TrialStatus",
]


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Tagged by class name; unknown fields of a newer minor version are ignored."""


# ---------------------------------------------------------------- client -> controller


class GetStatus(_Message, frozen=True, kw_only=True):
    """Answered by `RunStatusReply`, or, of a tuning experiment, by `ExperimentStatusReply`."""


class StopRun(_Message, frozen=True, kw_only=True):
    """End the run as Ctrl+C does, and no other run of its driver; answered by `Done` before it has ended."""

    force: bool = False
    """Wait neither for workers nor for uploads, as the second Ctrl+C."""


class DrainNode(_Message, frozen=True, kw_only=True):
    """Take all runs of the driver off a node, each as soon as it can go on elsewhere; answered by `Done`, which says
    how that stands for the run, or `Refused` if there is no such node."""

    node: str
    """The name of an agent, or of a host: all its agents."""
    deadline_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] | None = None
    """The node is gone in so many seconds; None: it stays until the runs have left."""


class SetWorkers(_Message, frozen=True, kw_only=True):
    """Change the bounds of an elastic run's number of workers; answered by `Done` before the group has changed, or
    `Refused`."""

    workers_min: int
    workers_max: int


class ReadLogs(_Message, frozen=True, kw_only=True):
    """What workers have printed lately, and with `follow` what they print from now on until the run ends."""

    rank: int | None = None
    """Of this rank only."""
    follow: bool = False


class GetJoinString(_Message, frozen=True, kw_only=True):
    """What an agent on another machine needs in order to join; answered by `Done` with that string."""


class FindStorage(_Message, frozen=True, kw_only=True):
    """An agent that finishes what a driver that died had ordered, and does not see the storage, looks for who serves it
    now. Answered by `StorageServed`, or `Refused` if no run of this driver lies there. The drafts are not closed while
    the connection is open. It is about no run."""

    root: str
    """As the driver that died called it."""
    tokens: tuple[str, ...]
    """Of the drafts to which the agent uploads."""


# ---------------------------------------------------------------- controller -> client


class Done(_Message, frozen=True, kw_only=True):
    """What was asked for has been done, or begun: one sentence, or the string that was asked for."""

    text: str


class Refused(_Message, frozen=True, kw_only=True):
    """What was asked for is not done: one sentence on why, and what to do."""

    reason: str


class RunPhase(enum.StrEnum):
    """What a run does now."""

    WAITING = "waiting"
    """For agents, or for its turn."""
    STARTING = "starting"
    """Workers are being started."""
    RUNNING = "running"
    STOPPING = "stopping"


class AgentStatus(_Message, frozen=True, kw_only=True):
    """One agent of the driver."""

    agent: str
    host: str = ""
    phase: AgentPhase
    ranks: tuple[int, ...] = ()
    """The run's workers there."""
    spare: bool = False
    """The run keeps it prepared and idle, in case that another agent is lost."""
    why: str = ""
    """Why it is draining."""
    left_s: float | None = None
    """How long it is there yet, where it is draining with a deadline."""


class RunStatusReply(_Message, frozen=True, kw_only=True):
    """How a run stands. Times are seconds since 1970."""

    name: str
    uri: str
    phase: RunPhase
    host: str
    pid: int
    """The driver's process."""
    started_at: float
    """When this driver took the run on."""
    workers_min: int
    workers_max: int
    generation: int = 0
    world_size: int = 0
    """Of the generation that runs; 0 if none does."""
    iteration: int = 0
    metrics: dict[str, Any] = {}
    """Of the last report."""
    checkpoint: str = ""
    """The newest committed one; "" if there is none."""
    checkpoint_iteration: int = 0
    failures: int = 0
    max_failures: int = 0
    preemptions: int = 0
    """How often the run lost a node that was being drained, and workers with it."""
    max_preemption_failures: int = -1
    waiting_for: str = ""
    """What keeps the run from starting workers, in one phrase; "" if nothing does."""
    agents: tuple[AgentStatus, ...] = ()


class TrialStatus(_Message, frozen=True, kw_only=True):
    """One trial of an experiment."""

    trial: str
    """Its id, which is that of its run."""
    directory: str
    """The name of its directory, below the experiment's."""
    status: str
    """PENDING, RUNNING, PAUSED, TERMINATED or ERROR."""
    iteration: int = 0
    metrics: dict[str, Any] = {}
    """Of its last report."""
    config: dict[str, Any] = {}


class ExperimentStatusReply(_Message, frozen=True, kw_only=True):
    """How a tuning experiment stands."""

    name: str
    uri: str
    host: str = ""
    pid: int = 0
    """The driver's process."""
    started_at: float = 0.0
    """When this driver took the experiment on, in seconds since 1970."""
    counts: dict[str, int] = {}
    """How many trials there are of each status."""
    total_trials: int | None = None
    """How many there will be at most; None: there is no end."""
    best: TrialStatus | None = None
    live: tuple[TrialStatus, ...] = ()
    """Trials that have not ended, or the first of them: those that run before the others."""
    ended: str = ""
    """Why no trial is started any more; "" while some may be."""


class LogLines(_Message, frozen=True, kw_only=True):
    """Lines that workers printed, in order of arrival."""

    generation: int
    lines: list[LogLine]
    left_out: int = 0
    """So many lines before these are missing here: the driver keeps only the last ones, or the client reads too slowly.
    The log files in the run's directory have all."""


class LogsEnded(_Message, frozen=True, kw_only=True):
    """There is nothing more; with `follow` the run has ended."""


RunRequest = GetStatus | StopRun | DrainNode | SetWorkers | ReadLogs | GetJoinString
"""What is about a run, and so is refused where the driver does not have it."""
ControlRequest = RunRequest | FindStorage
ControlReply = Done | Refused | RunStatusReply | ExperimentStatusReply | LogLines | LogsEnded | StorageServed
