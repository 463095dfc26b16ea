"""How workers of frameworks other than torch learn each other's addresses, and free ports for them.

Rank 0 serves the exchange on the socket that its agent has been listening on since before the fork, or, under torchrun,
on one of its own. A random token, which went through the controller, keeps strangers out.
"""

from __future__ import annotations

import hmac
import json
import random
import secrets
import socket
import time
from contextlib import ExitStack
from pathlib import Path

from holdfast.errors import RunError
from holdfast.worker.job import Assignment
from holdfast.worker.session import current

__all__ = ["exchange_addresses", "find_free_port", "wait_for_listener"]

_TIMEOUT_S = 300.0
_HELLO_S = 10.0
_POLL_S = 0.005
_LINE_BYTES_MAX = 4096
_PORTS_BELOW = 32768
"""Where Linux starts to choose ports for outgoing connections by itself, unless it was told otherwise."""
_PORTS_FROM = 20000


def exchange_addresses(assignment: Assignment, listen_fd: int | None, port: int) -> list[str]:
    """`host:port` of every rank, in the order of ranks; `port` is this rank's own."""
    rank = assignment.rank
    with ExitStack() as stack:
        listener = stack.enter_context(_listener(assignment, listen_fd)) if rank == 0 else None
        mine = [listener.getsockname()[1], secrets.token_hex(16)] if listener is not None else None
        server_port, token = current().broadcast_from_rank_zero(mine)
        if listener is not None:
            return _serve(stack, listener, assignment, token, port)
        connection = socket.create_connection((assignment.master_address, server_port), timeout=_TIMEOUT_S)
        stack.enter_context(connection)
        connection.sendall(json.dumps([token, rank, port]).encode() + b"\n")
        addresses: list[str] = json.loads(_read_line(connection))
        return addresses


def _serve(stack: ExitStack, listener: socket.socket, here: Assignment, token: str, port: int) -> list[str]:
    addresses: dict[int, str] = {}
    connections: list[socket.socket] = []
    listener.settimeout(_TIMEOUT_S)
    while len(connections) < here.world_size - 1:
        connection, (host, *_) = listener.accept()
        stack.enter_context(connection)
        connection.settimeout(_HELLO_S)
        try:
            theirs, rank, their_port = json.loads(_read_line(connection))
        except (OSError, ValueError, TypeError, RunError):
            continue  # a stranger
        if hmac.compare_digest(str(theirs).encode(), token.encode()):
            addresses[int(rank)] = f"{host}:{int(their_port)}"
            addresses[0] = f"{connection.getsockname()[0]}:{port}"  # the master's address may be a name
            connections.append(connection)
    answer = [addresses[rank] for rank in range(here.world_size)]
    for connection in connections:
        connection.sendall(json.dumps(answer).encode() + b"\n")
    return answer


def _listener(assignment: Assignment, listen_fd: int | None) -> socket.socket:
    if listen_fd is not None:
        return socket.socket(fileno=listen_fd)
    return socket.create_server((assignment.master_address, 0))


def _read_line(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as file:
        line = file.readline(_LINE_BYTES_MAX * 1024)
    if not line.endswith(b"\n"):
        raise RunError("A worker hung up while the workers exchanged their addresses: it has probably ended.")
    return line


def find_free_port(host: str) -> int:
    """A port that nobody uses and that the kernel gives to nobody by itself, for a library that binds it later."""
    low, high = _PORTS_FROM, _PORTS_BELOW
    try:
        first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        high = min(high, first_ephemeral)
    except (OSError, ValueError, IndexError):
        pass
    for _ in range(100 if high - low > 1000 else 0):
        port = random.SystemRandom().randrange(low, high)
        try:
            socket.create_server((host, port)).close()
        except OSError:
            continue
        return port
    with socket.create_server((host, 0)) as free:
        return int(free.getsockname()[1])


def wait_for_listener(host: str, port: int, timeout_s: float = _TIMEOUT_S) -> None:
    """Return once somebody listens there. gRPC waits a second after a connection that was refused; this does not."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), timeout=timeout_s).close()
        except ConnectionRefusedError:
            time.sleep(_POLL_S)
        else:
            return
    raise RunError(f"Rank 0 did not listen on {host}:{port} within {timeout_s:g} s: its log says why.")
