"""`holdfast.init()`, `shutdown()` and `is_initialized()`, for scripts that begin with `ray.init()`.

There is no cluster to start or to join: a run brings what it needs. Of what `init` is given only `runtime_env`, and the
address of a Ray cluster for clients (`ray://HOST:PORT`), mean something, for every run that follows; `request` and
`engine_choice` ask for them.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

from holdfast.train import checks

__all__ = [
    "CLIENT_SCHEME",
    "RuntimeInfo",
    "init",
    "init_address",
    "init_environment",
    "init_runtime_env",
    "init_working_dir",
    "is_initialized",
    "shutdown",
]

CLIENT_SCHEME = "ray://"
_initialized = False
_address = ""
_environment: dict[str, str] = {}
_runtime_env: dict[str, Any] = {}
_working_dir: tuple[str | None, tuple[str, ...]] = (None, ())


class RuntimeInfo(dict[str, Any]):
    """What `init` returns: a mapping that may be used in a `with` statement, which ends with `shutdown()`."""

    @property
    def address_info(self) -> dict[str, Any]:
        return dict(self)

    def __enter__(self) -> RuntimeInfo:
        return self

    def __exit__(self, *details: object) -> None:
        shutdown()


def init(address: str | None = None, *, runtime_env: Mapping[str, Any] | None = None, **ignored: Any) -> RuntimeInfo:
    """Accept what `ray.init()` accepts. Nothing has to be started, so this returns at once and may be left out.

    `runtime_env={"env_vars": {...}}` sets variables in the workers of every run that follows, as
    `RunConfig(worker_runtime_env)` does for one; "working_dir" is sent to agents on other machines, without what
    "excludes" names. With `address="ray://HOST:PORT"` runs have their drivers on that Ray cluster, whose head need not
    reach this machine (docs/ray.md); another one is warned of: runs use this machine.
    """
    global _initialized, _working_dir, _address
    variables = checks.runtime_environment("holdfast.init(runtime_env)", runtime_env)
    _working_dir = checks.working_directory("holdfast.init(runtime_env)", runtime_env)
    _address = address if address is not None and address.startswith(CLIENT_SCHEME) else ""
    if address not in (None, "auto", "local", _address):
        warnings.warn(
            f"holdfast.init(address={address!r}) has no effect: there is no cluster to join, runs use this machine; "
            "for a Ray cluster, set HOLDFAST_ENGINE=ray, and RAY_ADDRESS.",
            stacklevel=2,
        )
    _environment.clear()
    _environment.update(variables)
    _runtime_env.clear()
    _runtime_env.update(runtime_env or {})
    _initialized = True
    return RuntimeInfo(address=_address or "local")


def shutdown(_exiting_interpreter: bool = False) -> None:
    """Forget what `init` was given. A run ends by itself, with all that it started."""
    global _initialized, _working_dir, _address
    _initialized, _address = False, ""
    if "ray" in sys.modules:
        from holdfast.engines.ray.client import disconnect

        disconnect()
    _environment.clear()
    _runtime_env.clear()
    _working_dir = (None, ())


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` was not called since."""
    return _initialized


def init_address() -> str:
    """The Ray cluster that this process shall be a client of, `ray://HOST:PORT`; "" if none."""
    return _address


def init_working_dir() -> tuple[str | None, tuple[str, ...]]:
    """The working directory that `init` was given, and what is left out of it."""
    return _working_dir


def init_runtime_env() -> dict[str, Any]:
    """All that `init` was given, for the Ray engine."""
    return dict(_runtime_env)


def init_environment() -> dict[str, str]:
    """The variables that `init` was given for all workers."""
    return dict(_environment)
