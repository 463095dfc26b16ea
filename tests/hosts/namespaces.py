"""Hosts as network namespaces: each has an address on a network of its own, and a cable that can be pulled, cut in one
direction, or made slow.

All are connected to a bridge in a namespace of its own. They share disk and process table with this machine.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

__all__ = ["Host", "network"]


class Host:
    """One network namespace."""

    def __init__(self, namespace: str, address: str, port: str, switch: str) -> None:
        self.namespace = namespace
        self.address = address
        self._port = port
        """The bridge's end of the cable."""
        self._switch = switch

    def start(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Start a process on this host; its pid is the command's own."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, *command],
            env={**os.environ, **(environment or {})},
            text=True,
            **options,
        )

    def run(self, command: Sequence[str], timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["ip", "netns", "exec", self.namespace, *command],
            check=False,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def accepts(self, port: int) -> bool:
        """Whether somebody listens there."""
        found = self.run(["ss", "-Hltn", f"sport = :{port}"]).stdout
        return bool(found.strip())

    def cut(self) -> None:
        """Pull the cable: nothing arrives any more, and nobody is told."""
        _ip("-n", self._switch, "link", "set", self._port, "down")

    def cut_outgoing(self) -> None:
        """What this host sends is lost; it still hears the others."""
        self._drop("iifname")

    def cut_incoming(self) -> None:
        """Nothing arrives at this host; the others still hear it."""
        self._drop("oifname")

    def heal(self) -> None:
        """Undo every cut, and what slows it down."""
        for namespace, device in ((self.namespace, "eth0"), (self._switch, self._port)):
            command = ["ip", "netns", "exec", namespace, "tc", "qdisc", "delete", "dev", device, "root"]
            subprocess.run(command, check=False, capture_output=True)
        _ip("-n", self._switch, "link", "set", self._port, "up")
        _in(self._switch, "nft", f"flush chain bridge cuts {self._port}")

    def slow_down(self, bits_per_s: int) -> None:
        """Let both directions have so much, with a queue of at most 0.4 s."""
        rate = ["rate", str(bits_per_s), "burst", "16kb", "latency", "400ms"]
        _in(self.namespace, "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *rate)
        _in(self._switch, "tc", "qdisc", "replace", "dev", self._port, "root", "tbf", *rate)

    def _drop(self, direction: str) -> None:
        _in(self._switch, "nft", f"add rule bridge cuts {self._port} {direction} {self._port} drop")

    def kill_all(self) -> None:
        """As if the power failed."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def pids(self) -> list[int]:
        """All processes of this host."""
        found = subprocess.run(["ip", "netns", "pids", self.namespace], check=False, capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]


@contextmanager
def network(count: int = 2) -> Iterator[list[Host]]:
    """So many hosts on one network; processes that are left there are killed at the end."""
    prefix = f"hf{os.getpid()}"
    switch = f"{prefix}s"
    hosts = [Host(f"{prefix}h{number}", f"10.231.7.{number + 1}", f"p{number}", switch) for number in range(count)]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for number, host in enumerate(hosts):
            _ip("netns", "add", host.namespace)
            cable = ["link", "add", f"p{number}", "type", "veth", "peer", "name", "eth0", "netns", host.namespace]
            _ip("-n", switch, *cable)
            _ip("-n", switch, "link", "set", f"p{number}", "master", "bridge", "up")
            forward = "{ type filter hook forward priority 0; }"
            _in(switch, "nft", f"add table bridge cuts; add chain bridge cuts p{number} {forward}")
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.namespace, "link", "set", "eth0", "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        yield hosts
    finally:
        for host in hosts:
            host.kill_all()
            subprocess.run(["ip", "netns", "delete", host.namespace], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "delete", switch], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _in(namespace: str, *command: str) -> None:
    _ip("netns", "exec", namespace, *command)
