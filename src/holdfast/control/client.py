"""The control API's client: finds the driver that runs a run, by the run's lease, and asks it.

The lease says where the driver listens, never the run secret: that is taken from where it is kept on this machine
(`storage.run_secret`), so who shares the driver's user and host types nothing. `api` answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from holdfast.control.history import RUN_FILE, run_id
from holdfast.control.lease import Holder, find_holder
from holdfast.errors import ConfigError, NotFound, WireError
from holdfast.storage.run_secret import find_secret
from holdfast.storage.store import Store
from holdfast.wire import control_messages as cm
from holdfast.wire.channel import connect_client
from holdfast.wire.join_string import is_loopback_name, parse_address

__all__ = ["DriverAddress", "ask", "find_driver", "follow"]

_R = TypeVar("_R", bound=cm.ControlReply)


@dataclass(frozen=True, slots=True)
class DriverAddress:
    """A running driver, as far as the run's lease tells."""

    run: str
    """The run's id."""
    holder: Holder

    @property
    def process(self) -> str:
        identity = self.holder.epoch.holder
        return f"process {identity.pid} on {identity.host}"


def find_driver(store: Store) -> DriverAddress | None:
    """The driver that holds the run whose directory is the store's root; None if none does, as far as can be known
    without asking it. `NotFound` if there is no run."""
    try:
        run = run_id(store.get(RUN_FILE))
    except NotFound:
        raise NotFound(f"{store.uri} is no training run (it has no run.json): check the path or the name.") from None
    holder = find_holder(store)
    return None if holder is None or holder.is_alive is False else DriverAddress(run, holder)


def ask(driver: DriverAddress, request: cm.ControlRequest, kind: type[_R]) -> _R:
    """The driver's reply, which is of this kind; a refusal is raised as `WireError`."""
    found: list[cm.ControlReply] = []
    follow(driver, request, found.append)
    (reply,) = found
    if not isinstance(reply, kind):
        raise WireError(f"The driver, {driver.process}, answered with {type(reply).__name__}, not {kind.__name__}.")
    return reply


def follow(driver: DriverAddress, request: cm.ControlRequest, on_reply: Callable[[cm.ControlReply], None]) -> None:
    """Pass on every reply to one request. A refusal, and a connection that ends before the last reply, is raised as
    `WireError`."""
    asyncio.run(_follow(driver, request, on_reply))


async def _follow(
    driver: DriverAddress, request: cm.ControlRequest, on_reply: Callable[[cm.ControlReply], None]
) -> None:
    channel = await connect_client(_address(driver), _secret())
    try:
        await channel.send(request, driver.run)
        while True:
            envelope = await channel.recv()
            if envelope is None:
                raise WireError(f"The driver, {driver.process}, hung up: the run has ended, or another one has it.")
            match envelope.message:
                case cm.Refused(reason=reason):
                    raise WireError(reason)
                case cm.LogLines() as lines:
                    on_reply(lines)
                case reply:
                    on_reply(reply)
                    return
    finally:
        await channel.close()


def _address(driver: DriverAddress) -> str:
    address = driver.holder.epoch.address
    if not address:
        raise WireError(f"The driver, {driver.process}, has no control API.")
    is_here = driver.holder.is_alive is not None
    if not is_here and is_loopback_name(parse_address(address, "The driver's address")[0]):
        raise WireError(
            f"The driver, {driver.process}, can be asked on its own machine only: run this command there, or start "
            "the run with ScalingConfig(listen)."
        )
    return address


def _secret() -> str:
    secret = find_secret()
    if secret is None:
        raise ConfigError(
            "The run secret is not on this machine, or belongs to another user: set HOLDFAST_TOKEN_FILE to a file "
            "that holds it."
        )
    return secret
