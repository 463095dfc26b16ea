"""What is asked of the machine's network: which interface has an address, and by which address others see it."""

from __future__ import annotations

import array
import fcntl
import socket
import struct
from contextlib import suppress
from pathlib import Path

__all__ = ["interface_of", "outward_address"]

_SIOCGIFCONF = 0x8912
_IFREQ_BYTES = 40
_ADDRESSES_MAX = 1024
_ELSEWHERE = (("192.0.2.1", socket.AF_INET), ("2001:db8::1", socket.AF_INET6))
"""Addresses for documentation, which exist nowhere: the kernel chooses a route and sends nothing."""


def interface_of(address: str) -> str | None:
    """The interface that has this address or name; None where none has."""
    for family, _, _, _, found in _resolve(address):
        if found[0].startswith("127.") or found[0] == "::1":
            return "lo"
        name = _ipv4_interface(str(found[0])) if family == socket.AF_INET else _ipv6_interface(str(found[0]))
        if name is not None:
            return name
    return None


def outward_address() -> str:
    """The address from which this machine would dial others; the host's name where it has no route."""
    for address, family in _ELSEWHERE:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    return socket.gethostname()


def _resolve(address: str) -> list[tuple[int, int, int, str, tuple[str, int]]]:
    try:
        return socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)  # type: ignore[return-value]
    except OSError:
        return []


def _ipv4_interface(address: str) -> str | None:
    buffer = array.array("B", bytes(_IFREQ_BYTES * _ADDRESSES_MAX))
    start, _ = buffer.buffer_info()
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFCONF, struct.pack("iP", len(buffer), start))
        size_bytes, _ = struct.unpack("iP", answer)
        data = buffer.tobytes()[:size_bytes]
        for at in range(0, size_bytes, _IFREQ_BYTES):
            if socket.inet_ntoa(data[at + 20 : at + 24]) == address:
                label = data[at : at + 16].partition(b"\0")[0].decode()
                return label.partition(":")[0]  # "eth0:1" is a further address of eth0
    return None


def _ipv6_interface(address: str) -> str | None:
    wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            fields = line.split()
            if fields[0] == wanted:
                return fields[-1]
    return None
