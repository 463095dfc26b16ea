"""What a script that calls `fit()` and its launcher (`holdfast launch`) say to each other, as lines of JSON.

The launcher holds this host's session in the rendezvous, takes part in the election, and runs the agent; the script's
process is the driver if its host is elected. They talk over a socket pair that the script's process has inherited
(`LAUNCHER_VARIABLE`). `holdfast.train.launched` is the script's end, `holdfast.launch.fit` the launcher's.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import msgspec

from holdfast.errors import RunError

__all__ = [
    "LAUNCHER_VARIABLE",
    "DriverMessage",
    "FitEnded",
    "FitEntered",
    "FitFenced",
    "FitIsOver",
    "FitResult",
    "Lead",
    "LauncherConnection",
    "LauncherMessage",
    "Listening",
    "PublishedRun",
    "encode_line",
]

LAUNCHER_VARIABLE = "HOLDFAST_LAUNCHER"
"""`PID:FD`: the launcher's process, and the descriptor of the socket. Of no meaning to any but its own child."""


class PublishedRun(msgspec.Struct, frozen=True, kw_only=True):
    """Which run a `fit()` of the script is, as the first leader has it: others may have made up another name."""

    storage_path: str
    name: str
    id: str = ""
    """What its run.json says; "" if that says nothing."""
    is_directory: bool = False
    """Whether it lies in a directory, of which each host may have its own."""
    host: str = ""
    """The leader that published it."""


class FitResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a `fit()` ended, for all hosts. Everything else is read from storage by those who see it."""

    run: PublishedRun
    status: str
    interrupted_by: str = ""
    """What stopped it; "" if nothing did."""
    outcome: bytes = b""
    """What came of it, for those who do not (`train.launched`); empty if that is too much for a rendezvous."""


# ------------------------------------------------------------ from the script


class FitEntered(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The script has called `fit()` for the `number`-th time: it can lead, and waits."""

    number: int


class Listening(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The leader accepts agents."""

    join: str
    """`HOST:PORT`."""
    run: PublishedRun


class FitFenced(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Another leader has taken the run over; this script waits again."""


class FitEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The leader's `fit()` has ended; None if only this host's part has, and others shall go on."""

    result: FitResult | None


# ------------------------------------------------------------ to the script


class Lead(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """This host is elected."""

    address: str
    """At which other hosts reach this one."""
    run: PublishedRun | None
    """What another leader has begun, and is to be taken over."""
    workers: tuple[int, int] | None = None
    """The fewest and the most workers, where the command says so rather than the script."""
    last_call_s: float = 0.0


class FitIsOver(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The leader's `fit()` has ended like this."""

    result: FitResult


DriverMessage = FitEntered | Listening | FitFenced | FitEnded
LauncherMessage = Lead | FitIsOver


def encode_line(message: DriverMessage | LauncherMessage) -> bytes:
    return msgspec.json.encode(message) + b"\n"


class LauncherConnection:
    """The script's end; used from one thread at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("rb")

    @classmethod
    def inherited(cls, variables: Mapping[str, str]) -> LauncherConnection | None:
        """The connection to the launcher that started this very process; None if none did."""
        pid, _, fd = variables.get(LAUNCHER_VARIABLE, "").partition(":")
        if not pid.isdecimal() or not fd.isdecimal() or int(pid) != os.getppid():
            return None
        os.set_inheritable(int(fd), False)
        return cls(socket.socket(fileno=int(fd)))

    def send(self, message: DriverMessage) -> None:
        try:
            self._connection.sendall(encode_line(message))
        except OSError as error:
            raise _launcher_gone() from error

    def receive(self) -> LauncherMessage:
        try:
            line = self._lines.readline()
        except OSError as error:
            raise _launcher_gone() from error
        if not line:
            raise _launcher_gone()
        answer: LauncherMessage = msgspec.json.decode(line, type=LauncherMessage)
        return answer


def _launcher_gone() -> RunError:
    return RunError("`holdfast launch` has ended, and without it this host takes part in nothing: start it again.")
