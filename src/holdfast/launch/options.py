"""What `holdfast launch` was asked to do, checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.rendezvous.uri import RendezvousUri

__all__ = ["LaunchOptions", "parse_range"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """One host's part of a job."""

    rendezvous: RendezvousUri
    script: str
    """A path, a URI to fetch it from, or a module's name."""
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    kind: str | None = None
    """ "fit" or "torchrun"; None: what the script's imports say."""
    host_id: str
    """Unlike any other host's."""
    address: str
    """At which other hosts reach this one."""
    workers_per_host: int = 1
    min_hosts: int = 1
    max_hosts: int = 1
    has_bounds: bool = False
    """Whether the number of hosts was given: then it counts for `fit()`, too."""
    max_restarts: int = 0
    join_timeout_s: float = 600.0
    """How long too few hosts are waited for, where the script is a plain one."""
    token_file: Path | None = None


def parse_range(text: str, what: str = "--nnodes") -> tuple[int, int]:
    """`3` or `1:3`, as torchrun's `--nnodes`; `what` is the option or argument."""
    low, colon, high = text.partition(":")
    if not (low.isdecimal() and (high.isdecimal() or not colon)):
        raise ConfigError(f"{what} must be a number or MIN:MAX, such as 1:3, not {text!r}.")
    found = int(low), int(high) if colon else int(low)
    if not 1 <= found[0] <= found[1]:
        raise ConfigError(f"{what} {text} must be 1 or more, and MIN not above MAX.")
    return found
