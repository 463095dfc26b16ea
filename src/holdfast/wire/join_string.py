"""The join string: what an agent on another machine is given to find a hub, `holdfast://HOST:PORT`.

It names no secret, for it is typed on command lines and pasted into scripts. The agent takes the run secret from where
it is kept on its machine (`storage.run_secret`); both prove to each other that they have the same.
"""

from __future__ import annotations

import ipaddress

from holdfast.errors import ConfigError

__all__ = [
    "format_address",
    "is_loopback",
    "is_loopback_name",
    "make_join_string",
    "parse_address",
    "parse_join_string",
]

SCHEME = "holdfast://"


def make_join_string(host: str, port: int) -> str:
    return SCHEME + format_address(host, port)


def parse_join_string(text: str) -> str:
    """The address `HOST:PORT` of a join string; such an address is one, too."""
    address = text.strip().removeprefix(SCHEME).rstrip("/")
    host, port = parse_address(address, "The join string")
    if port == 0:
        raise ConfigError(f"The join string {text!r} names no port: copy it from `holdfast join RUN`.")
    return format_address(host, port)


def parse_address(text: str, what: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`, in which an IPv6 address is in brackets; `what` names it in the error."""
    host, _, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not bare or not port.isascii() or not port.isdigit() or int(port) > 65535 or (":" in bare) != (bare != host):
        raise ConfigError(f"{what} must be of the form HOST:PORT, such as 10.0.0.1:7077 or [::1]:7077, not {text!r}.")
    return bare, int(port)


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(address: str) -> bool:
    """Whether what is sent to this address never leaves the machine."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return found.is_loopback


def is_loopback_name(host: str) -> bool:
    """The same of an address or a name, without asking anybody about the name."""
    try:
        return is_loopback(host)
    except ValueError:
        return host == "localhost"
