"""The messages between agent and zygote, over a socket pair that only they hold.

The agent's side is `agent.zygote_client`, the zygote's `zygote.zygote`. File descriptors travel beside `Fork`, in the
order of its docstring. Nothing here reaches the controller.
"""

from __future__ import annotations

import msgspec

from holdfast.worker.job import Assignment

__all__ = [
    "Cleared",
    "Died",
    "Dismiss",
    "Fork",
    "Forked",
    "FromZygote",
    "Kill",
    "AddImports",
    "ImportAhead",
    "Load",
    "ToZygote",
    "TookOver",
    "Warm",
]


class _Order(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Tagged by class name, like `wire.messages`."""


class ImportAhead(_Order, frozen=True, kw_only=True):
    """First, once: modules that `Load` will probably name, so that they are imported when it comes. Of zygotes that are
    started for a function, `Load` is the first."""

    modules: list[str]
    leftovers: list[str]
    """As in `Load`."""


class Load(_Order, frozen=True, kw_only=True):
    """Once, before all that follows: what workers will run. Without `fork`, nothing is imported and workers are fresh
    processes. Beside it travels the descriptor of the memory that holds the pickled function."""

    sys_path: list[str]
    environment: dict[str, str]
    preload: list[str]
    fork: bool
    leftovers: list[str]
    """Links, and directories with a lock: removed by the zygote, in this order, if the agent is killed and cannot do
    it."""
    agent_is_subreaper: bool = False
    """Whether a child of the zygote that outlives it becomes the agent's: only then can it take the zygote's place."""


class Fork(_Order, frozen=True, kw_only=True):
    """One worker. Beside it travel its connection, stdout, stderr, dump pipe, and listening socket if it `listens`."""

    assignment: Assignment
    listens: bool


class Kill(_Order, frozen=True, kw_only=True):
    """End every worker of a run and everything that they started; answered by `Cleared` when nothing is left."""

    run: str
    generation: int


class AddImports(_Order, frozen=True, kw_only=True):
    """Modules that workers imported by themselves: import them when there is time."""

    modules: list[str]


class Dismiss(_Order, frozen=True, kw_only=True):
    """End; the agent is alive and removes its directory itself."""


class Warm(_Order, frozen=True, kw_only=True):
    """Ready to fork; or, with a reason, not fit for it."""

    cold_reason: str | None = None


class Forked(_Order, frozen=True, kw_only=True):
    run: str
    generation: int
    rank: int
    pid: int


class Died(_Order, frozen=True, kw_only=True):
    """A worker is gone and reaped; `status` as of wait(2). `killed`: by this zygote, which was told to."""

    run: str
    generation: int
    rank: int
    status: int
    killed: bool = False


class Cleared(_Order, frozen=True, kw_only=True):
    run: str
    generation: int


class TookOver(_Order, frozen=True, kw_only=True):
    """From here on another process is the zygote: the one that has imported what workers imported by themselves."""

    pid: int


ToZygote = ImportAhead | Load | Fork | Kill | AddImports | Dismiss
FromZygote = Warm | Forked | Died | Cleared | TookOver
