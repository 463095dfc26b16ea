"""Somebody on the network who has no business with the driver: `python -m tests.hosts.stranger KIND HOST PORT`."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
import sys
from contextlib import suppress

import msgspec

from holdfast.errors import WireError
from holdfast.storage.run_secret import open_secret
from holdfast.wire import auth
from holdfast.wire.channel import connect
from holdfast.wire.frames import HEADER_BYTES, Splitter, encode
from holdfast.wire.hello import Hello
from holdfast.wire.tls import client_context, fingerprint_of


def scan(host: str, port: int) -> None:
    """What port scanners do: connect, and say nothing, or something for another kind of server."""
    for number in range(60):
        with socket.create_connection((host, port), timeout=30) as connection, suppress(OSError):
            if number % 3:
                connection.sendall([b"GET / HTTP/1.0\r\n\r\n", b"\0" * 4096][number % 2])
                connection.recv(4096)


def idle(host: str, port: int) -> None:
    """A thousand connections that stay, until this process's standard input ends."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    held = [socket.create_connection((host, port), timeout=30) for _ in range(1000)]
    print(len(held), flush=True)
    sys.stdin.read()


async def _open(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, auth.Challenge, str]:
    reader, writer = await asyncio.open_connection(host, port, ssl=client_context())
    size_bytes = int.from_bytes(await reader.readexactly(HEADER_BYTES), "big")
    challenge = msgspec.msgpack.decode(await reader.readexactly(size_bytes), type=auth.Challenge)
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    return reader, writer, challenge, fingerprint_of(certificate)


async def oversized(host: str, port: int) -> None:
    """Announce 4 GiB before and after the handshake."""
    for _ in range(5):
        reader, writer, _, _ = await _open(host, port)
        writer.write(b"\xff\xff\xff\xff" + bytes(4096))
        with suppress(ConnectionError, ssl.SSLError):
            assert await reader.read() == b""
        writer.close()


async def replay(host: str, port: int) -> None:
    """Send a proof that was good on another connection."""
    reader, writer, challenge, fingerprint = await _open(host, port)
    recorded = encode(auth.prove(challenge, open_secret(), fingerprint, Hello(agent="b")))
    for _ in range(5):
        reader, writer, _, _ = await _open(host, port)
        writer.write(recorded)
        answer = Splitter().feed(await reader.read())[0]
        assert msgspec.msgpack.decode(answer)["type"] == "Rejected"
        writer.close()


async def wrong_secret(host: str, port: int) -> None:
    for _ in range(5):
        with suppress(WireError):
            await connect(f"{host}:{port}", "wrong", Hello(agent="b"))
            raise AssertionError("it was accepted")


def main() -> None:
    kind, host, port = sys.argv[1:]
    attack = globals()[kind]
    if asyncio.iscoroutinefunction(attack):
        asyncio.run(attack(host, int(port)))
    else:
        attack(host, int(port))


if __name__ == "__main__":
    main()
