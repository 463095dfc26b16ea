"""The storage server: a process on the driver's machine that reads and writes one directory for other machines. In an
agent the same server gives other agents what they may read of its memory (`agent.snapshot_server`).

    python -m holdfast.streaming.server      settings as one line of JSON on standard input, `Settings`
                                             answers with one line on standard output, `Listening`

One thread for each connection: it receives, decrypts and hashes, another writes (`storage.transfer`). A peer that knows
the directory's key may do with it what agents do to storage that they see; it can name nothing outside. What it was
writing when it broke off has no name yet, and is gone. The process ends when its standard input does: with the driver.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
import sys
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import msgspec

from holdfast.core.failure_kind import FailureKind
from holdfast.errors import HoldfastError, WireError
from holdfast.linux.process import name_process
from holdfast.printable import printable
from holdfast.streaming import messages as m
from holdfast.streaming.connection import Connection, accept
from holdfast.streaming.served_files import ServedDirectory, ServedFiles
from holdfast.wire.join_string import is_loopback
from holdfast.wire.tls import make_identity, server_context

__all__ = ["Listening", "Settings", "StorageServer"]

_CONNECTIONS_MAX = 1024
_STRANGERS_MAX = 256
_IDLE_S = 120.0
"""A connection that asks for nothing for so long is closed; clients dial again."""
_STALL_S = 60.0
"""A client that sends, or takes, none of a file for so long is given up."""
_PAUSE_S = 0.1
"""After a connection that could not be accepted: too many files are open."""
_BIND_TRIES = 20
_log = logging.getLogger(__name__)
_requests: msgspec.msgpack.Decoder[m.Request] = msgspec.msgpack.Decoder(m.Request)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    root: str = ""
    key: str
    hosts: list[str]
    """Addresses of this machine to listen at, all with the same port."""
    port: int = 0
    """0: any that is free."""
    encrypted: bool | None = None
    """None: off loopback."""


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    port: int = 0
    error: str = ""
    """Why nothing is served."""


class StorageServer:
    """Serves files, those of a directory unless others are given, from threads of its own until it is closed."""

    def __init__(self, settings: Settings, files: ServedFiles | None = None) -> None:
        """Raises `OSError` where an address cannot be listened at."""
        self._files = ServedDirectory(Path(settings.root)) if files is None else files
        self._key = settings.key
        self._listeners = _listen(settings.hosts, settings.port)
        self.port = int(self._listeners[0].getsockname()[1])
        self._encrypted = settings.encrypted
        self._tls: ssl.SSLContext | None = None
        self._fingerprint = ""
        if any(self._encrypts(one) for one in self._listeners):
            identity = make_identity()
            self._tls, self._fingerprint = server_context(identity), identity.fingerprint
        self._strangers: set[str] = set()
        """Addresses of clients that were refused, and logged."""
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        for one in self._listeners:
            threading.Thread(target=self._accept, args=(one,), name="storage-accept", daemon=True).start()

    def close(self) -> None:
        """Stop listening, and end every connection."""
        # Each is closed by the thread that uses it: under its number there may be another file a moment later.
        with self._lock:
            self._closed = True
            for one in [*self._listeners, *self._connections]:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _encrypts(self, one: socket.socket) -> bool:
        return not is_loopback(one.getsockname()[0]) if self._encrypted is None else self._encrypted

    # ------------------------------------------------------------------ connections

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connected, address = listener.accept()
                handle = connected.dup()  # for closing: TLS takes the first descriptor away
            except OSError as error:
                if self._closed:
                    listener.close()
                    return
                _log.warning("A connection could not be accepted: %s.", error)
                time.sleep(_PAUSE_S)
                continue
            with self._lock:
                is_refused = self._closed or len(self._connections) >= _CONNECTIONS_MAX
                if not is_refused:
                    self._connections.add(handle)
            if is_refused:
                handle.close()
                connected.close()
                continue
            work = (connected, handle, str(address[0]))
            threading.Thread(target=self._serve, args=work, name="storage", daemon=True).start()

    def _serve(self, connected: socket.socket, handle: socket.socket, peer: str) -> None:
        connection: Connection | None = None
        try:
            tls = self._tls if self._encrypts(connected) else None
            connection = accept(connected, self._key, tls, self._fingerprint if tls else "")
            if connection is None:
                self._warn_of_stranger(peer)
                return
            while self._serve_one(connection):
                pass
        except (OSError, WireError) as error:
            _log.debug("The connection of %s ended: %s", peer, printable(str(error)))
        finally:
            with self._lock:
                self._connections.discard(handle)
            with suppress(OSError):
                handle.shutdown(socket.SHUT_RDWR)
            handle.close()
            connected.close()
            if connection is not None:
                connection.close()

    def _warn_of_stranger(self, peer: str) -> None:
        """Once for each address."""
        with self._lock:
            if peer in self._strangers or len(self._strangers) >= _STRANGERS_MAX:
                return
            self._strangers.add(peer)
        _log.warning("A client at %s that does not know the key of this storage was refused.", peer)

    def _serve_one(self, connection: Connection) -> bool:
        """Answer one request; False at the end of the connection."""
        connection.set_timeout(_IDLE_S)
        request = connection.receive(_requests)
        if request is None:
            return False
        connection.set_timeout(_STALL_S)
        try:
            if isinstance(request, m.Read):
                self._send(connection, request)
                return True
            reply = m.Reply(value=self._files.answer(connection, request))
        except HoldfastError as error:
            if isinstance(error, WireError):
                raise
            reply = m.Reply(failure=FailureKind.of(error), error=_text(error))
        connection.send(reply)
        if reply.failure is not None and isinstance(request, m.Receive):
            connection.discard()  # of the rest of the file
            return False
        return True

    def _send(self, connection: Connection, request: m.Read) -> None:
        try:
            opened = self._files.open(request)
        except HoldfastError as error:
            connection.send(m.Reply(failure=FailureKind.of(error), error=_text(error)))
            return
        with closing(opened):
            connection.send(m.Reply(value=opened.size_bytes))
            connection.send_file(opened.fd, opened.start, opened.size_bytes)
            if not opened.is_intact():
                raise WireError("It was written to while it was sent.")


def _text(error: HoldfastError) -> str:
    return str(error).encode("utf-8", "backslashreplace").decode()


def _listen(hosts: list[str], port: int) -> list[socket.socket]:
    """Listen at all of these addresses, with one port."""
    for left in reversed(range(_BIND_TRIES)):
        made: list[socket.socket] = []
        try:
            for host in hosts:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                found = made[0].getsockname()[1] if made else port
                made.append(socket.create_server((host, found), family=family, backlog=256))
            return made
        except OSError:
            for one in made:
                one.close()
            if not left or port or len(made) == 0:
                raise
    raise AssertionError


def main() -> int:
    logging.basicConfig(level=logging.WARNING, format="holdfast storage server: %(message)s")
    name_process("hf-storage")
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=Settings)
    try:
        server = StorageServer(settings)
    except (OSError, HoldfastError) as error:
        _say(Listening(error=str(error)))
        return 1
    _say(Listening(port=server.port))
    sys.stdin.buffer.read()  # until the driver has ended, or wants this to end
    server.close()
    return 0


def _say(message: Listening) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    code = main()
    os._exit(code)  # connections may still wait for a disk
