"""Which engine a run uses: what it was given, HOLDFAST_ENGINE, or Ray's by itself in a process that belongs to Ray.

A run that a worker of another run starts, as a trial does that calls a trainer's `fit()`, has its agent beside that
worker, and ends with it: the engine of the run around it, which the variables are meant for, counts on its own agents.
"""

from __future__ import annotations

import os
import sys

from holdfast.engines.engine import EngineName
from holdfast.errors import ConfigError
from holdfast.train import checks
from holdfast.train.runtime import CLIENT_SCHEME, init_address
from holdfast.worker.session import is_installed

__all__ = ["asked_engine", "client_address"]

_SUBMITTED_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Set by Ray for the driver of a job that was submitted; the variable has this very name."""


def asked_engine(given: str | None) -> EngineName | None:
    """The engine that was asked for; None if nothing was."""
    if is_installed():
        if given not in (None, EngineName.LOCAL):
            raise ConfigError(
                f"ScalingConfig(engine={given!r}) in a worker of another run: a run that is started there has its "
                "workers on that worker's machine, so leave the engine out."
            )
        return EngineName.LOCAL
    if name := given or os.environ.get("HOLDFAST_ENGINE", "").strip():
        checks.one_of("HOLDFAST_ENGINE", name, tuple(EngineName))
        return EngineName(name)
    if init_address():
        return EngineName.RAY
    ray = sys.modules.get("ray")
    # Others may have imported a part of it, or something else of that name.
    is_connected = ray is not None and getattr(ray, "is_initialized", bool)()
    return EngineName.RAY if is_connected or _SUBMITTED_JOB in os.environ else None


def client_address() -> str | None:
    """The Ray cluster (`ray://HOST:PORT`) that this process is, or shall be, a client of; None if it is none, so that
    its runs have their drivers here. For runs on Ray's engine only."""
    if address := init_address():
        return address
    client = getattr(sys.modules.get("ray.util.client"), "ray", None)
    if client is not None and client.is_connected():
        return CLIENT_SCHEME
    address = os.environ.get("RAY_ADDRESS", "").strip()
    return address if address.startswith(CLIENT_SCHEME) else None
