"""A TCP connection on an event loop, plain or encrypted: what `channel` sends and receives bytes by.

It stands in for asyncio's streams, which make a task, three objects and several futures for each connection, and keep
256 KiB for each encrypted one: a controller may have ten thousand. Encrypted or not, the same code runs, since a
non-blocking `SSLSocket` is used as a socket is. The simulator has a `Transport` of its own.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

__all__ = ["Receiver", "SocketListener", "SocketTransport", "Transport", "dial", "listen"]

_BLOCK_BYTES = 256 * 1024
"""So much is read or written by one call at most. A write that TLS could not finish must be tried again with no less
than it had."""
_BACKLOG = 1024
"""Connections that the kernel holds until they are accepted; it may be configured for fewer."""
_ACCEPTED_AT_ONCE = 64
"""After so many connections, others get their turn."""
_ACCEPT_PAUSE_S = 1.0
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_WOULD_BLOCK = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Receiver(Protocol):
    """Who is told what happens on a connection, on its event loop. Must not raise."""

    def data_received(self, data: bytes) -> None: ...

    def all_sent(self) -> None:
        """Nothing is left of what could not be sent at once."""
        ...

    def connection_lost(self) -> None:
        """The connection is over: closed by either side, or cut. Told once, and nothing after it."""
        ...


class Transport(Protocol):
    """A connection as `channel` uses it."""

    peer_host: str
    peer: str
    """The peer's address, for people."""
    is_closed_by_peer: bool
    """The peer's kernel has closed the connection, so its machine is up and the network between works. False where this
    side closed it, or packets were lost for too long."""

    @property
    def local_host(self) -> str:
        """This side's address on the connection."""
        ...

    @property
    def backlog_bytes(self) -> int:
        """What was written and the kernel has not taken yet."""
        ...

    def start(self, receiver: Receiver) -> None:
        """Begin to read."""
        ...

    def write(self, data: bytes) -> None:
        """Send all of it, in time. Dropped when the connection is over."""
        ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def close(self) -> None:
        """End the connection when what was written is sent; nothing more is read."""
        ...

    def abort(self) -> None:
        """End the connection at once."""
        ...


class SocketTransport:
    """A `Transport` over a connected, non-blocking socket. Used from one event loop."""

    def __init__(self, connected: socket.socket, address: Any) -> None:
        """`address` is the peer's, as the socket module gives it."""
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = connected
        self._fd = connected.fileno()  # the event loop looks sockets up by their text, which costs two system calls
        self.peer_host, self.peer = str(address[0]), f"{address[0]}:{address[1]}"
        self.is_closed_by_peer = False
        self._receiver: Receiver | None = None
        self._reading = False
        self._closing = False
        self._unsent = bytearray()
        self._handshake: asyncio.Future[None] | None = None
        """Done when the socket is ready for the next step of the TLS handshake."""

    @property
    def local_host(self) -> str:
        return "" if self._socket is None else str(self._socket.getsockname()[0])

    @property
    def backlog_bytes(self) -> int:
        return len(self._unsent)

    # ------------------------------------------------------------ TLS

    async def start_tls(self, context: ssl.SSLContext, *, server_side: bool) -> None:
        """Encrypt the connection, before anything is read or written. Raises `OSError`, of which `ssl.SSLError` is
        one."""
        if self._socket is None:
            raise ConnectionAbortedError(errno.ECONNABORTED, "the connection was closed before TLS began")
        self._socket.getpeername()  # raises where the peer has gone; `wrap_socket` would leave the socket open
        try:
            encrypted = context.wrap_socket(self._socket, server_side=server_side, do_handshake_on_connect=False)
        except OSError:
            self._socket = None  # taken over by what was not made
            raise
        self._socket = encrypted
        while True:
            try:
                encrypted.do_handshake()
                return
            except ssl.SSLWantReadError:
                await self._until_ready(self._loop.add_reader, self._loop.remove_reader)
            except ssl.SSLWantWriteError:
                await self._until_ready(self._loop.add_writer, self._loop.remove_writer)

    async def _until_ready(self, add: Callable[..., object], remove: Callable[[int], object]) -> None:
        self._handshake = waiting = self._loop.create_future()
        add(self._fd, _set_result, waiting)
        try:
            await waiting
        finally:
            self._handshake = None
            if self._socket is not None:
                remove(self._fd)

    @property
    def peer_certificate(self) -> bytes:
        """In DER form."""
        assert isinstance(self._socket, ssl.SSLSocket)
        certificate = self._socket.getpeercert(binary_form=True)
        assert certificate is not None, "servers always show one"
        return certificate

    # ------------------------------------------------------------ reading

    def start(self, receiver: Receiver) -> None:
        if self._socket is None:
            self._loop.call_soon(receiver.connection_lost)
            return
        self._receiver = receiver
        self.resume_reading()

    def resume_reading(self) -> None:
        if not self._reading and not self._closing and self._socket is not None:
            self._reading = True
            self._loop.add_reader(self._fd, self._read)

    def pause_reading(self) -> None:
        if self._reading and self._socket is not None:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def _read(self) -> None:
        assert self._socket is not None and self._receiver is not None
        try:
            data = self._socket.recv(_BLOCK_BYTES)
        except _WOULD_BLOCK:
            return
        except OSError as error:
            self.is_closed_by_peer = isinstance(error, ConnectionResetError | ssl.SSLEOFError)
            self._end()
            return
        if not data:
            self.is_closed_by_peer = True
            self._end()
            return
        self._receiver.data_received(data)

    # ------------------------------------------------------------ writing

    def write(self, data: bytes) -> None:
        if self._socket is None or self._closing:
            return
        if self._unsent:
            self._unsent += data
            return
        sent = self._send(data if len(data) <= _BLOCK_BYTES else memoryview(data)[:_BLOCK_BYTES])
        if sent is not None and sent < len(data):
            self._unsent += memoryview(data)[sent:]
            self._loop.add_writer(self._fd, self._write)

    def _send(self, data: bytes | memoryview) -> int | None:
        """How much the kernel has taken; None if the connection is over."""
        assert self._socket is not None
        try:
            return self._socket.send(data)
        except _WOULD_BLOCK:
            return 0
        except OSError:
            # What has arrived may still be read; the end of the connection is read after it.
            self._discard_unsent()
            if self._closing:
                self._end()
            return None

    def _write(self) -> None:
        sent = self._send(memoryview(self._unsent)[:_BLOCK_BYTES])
        if sent is None:
            return
        del self._unsent[:sent]
        if not self._unsent:
            self._discard_unsent()
            if self._closing:
                self._end()
            elif self._receiver is not None:
                self._receiver.all_sent()

    def _discard_unsent(self) -> None:
        self._unsent = bytearray()
        self._loop.remove_writer(self._fd)

    # ------------------------------------------------------------ the end

    def close(self) -> None:
        self.pause_reading()
        self._closing = True
        if not self._unsent:
            self._end()

    def abort(self) -> None:
        self._end()

    def _end(self) -> None:
        if self._socket is None:
            return
        ended, self._socket = self._socket, None
        self._closing = True
        self._reading = False
        self._unsent = bytearray()
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        if isinstance(ended, ssl.SSLSocket) and self._receiver is not None:
            with suppress(OSError, ValueError):  # the peer's answer is not waited for
                ended.unwrap()
        ended.close()
        if self._handshake is not None and not self._handshake.done():
            self._handshake.set_exception(ConnectionAbortedError(errno.ECONNABORTED, "the connection was closed"))
        if self._receiver is not None:
            receiver, self._receiver = self._receiver, None
            receiver.connection_lost()


def _set_result(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


async def dial(host: str, port: int) -> SocketTransport:
    """Connect to an address. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    dialed = socket.socket(family, socket.SOCK_STREAM)
    try:
        dialed.setblocking(False)
        await asyncio.get_running_loop().sock_connect(dialed, (host, port))
        _set_options(dialed)
        return SocketTransport(dialed, dialed.getpeername())
    except BaseException:
        dialed.close()
        raise


class SocketListener:
    """Accepts connections at every address of a host until it is closed."""

    def __init__(self, sockets: list[socket.socket], on_connection: Callable[[SocketTransport], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._sockets = sockets
        self._on_connection = on_connection

    @property
    def addresses(self) -> list[Any]:
        """Host and port of each, as the socket module gives them."""
        return [one.getsockname() for one in self._sockets]

    def start(self) -> None:
        for one in self._sockets:
            self._loop.add_reader(one.fileno(), self._accept, one)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _OUT_OF_RESOURCES:
                    raise
                # The connection stays in the kernel's queue, and would wake this up again and again.
                self._loop.remove_reader(listening.fileno())
                self._loop.call_later(_ACCEPT_PAUSE_S, self._accept_again, listening)
                return
            accepted.setblocking(False)
            self._on_connection(SocketTransport(accepted, address))

    def _accept_again(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            self._loop.add_reader(listening.fileno(), self._accept, listening)

    def close(self) -> None:
        sockets, self._sockets = self._sockets, []
        for one in sockets:
            self._loop.remove_reader(one.fileno())
            one.close()


async def listen(host: str, port: int, on_connection: Callable[[SocketTransport], None]) -> SocketListener:
    """Listen at every address of this host; what comes is accepted after `SocketListener.start`. Raises `OSError`."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((one[0], one[4]) for one in found):
            made = socket.create_server(address, family=family, backlog=_BACKLOG)
            sockets.append(made)
            made.setblocking(False)
            _set_options(made)
    except BaseException:
        for one in sockets:
            one.close()
        raise
    return SocketListener(sockets, on_connection)


def _set_options(made: socket.socket) -> None:
    """Connections that a listener accepts inherit these."""
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
