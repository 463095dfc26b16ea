"""A TCP proxy whose connections a test can cut, hold and restore."""

from __future__ import annotations

import selectors
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

__all__ = ["Proxy", "proxy_to"]


class Proxy:
    """Forwards bytes. While it is cut, connections are closed as soon as they are made."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._whole = True
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self.refused = threading.Event()
        """Set once somebody has met the cut proxy."""
        self._hold: bytes | None = None
        self._release = threading.Event()
        self.held = threading.Event()
        """Set once somebody has sent what the proxy is to hold."""

    def cut(self) -> None:
        self.refused.clear()
        with self._lock:
            self._whole = False
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self._whole = True

    def hold(self, text: bytes) -> None:
        """Keep back each connection that sends these bytes, until `release`."""
        self._hold = text

    def release(self) -> None:
        self._hold = None
        self._release.set()

    def _pass(self, data: bytes) -> bytes:
        if self._hold is not None and self._hold in data:
            self.held.set()
            self._release.wait()
        return data

    def serve(self, client: socket.socket) -> None:
        """One connection, to its end."""
        with socket.create_connection(self._target) as server:
            ends = {client, server}
            with self._lock:
                if not self._whole:
                    self.refused.set()
                    return
                self._open |= ends
            try:
                with suppress(OSError):
                    _pass_on(client, server, self._pass)
            finally:
                with self._lock:
                    self._open -= ends


def _pass_on(one: socket.socket, other: socket.socket, look: Callable[[bytes], bytes]) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(one, selectors.EVENT_READ, other)
        selector.register(other, selectors.EVENT_READ, one)
        while True:
            for key, _ in selector.select():
                source = key.fileobj
                assert isinstance(source, socket.socket)
                data = source.recv(1 << 16)
                if not data:
                    return
                key.data.sendall(look(data))


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = False
    block_on_close = True


@contextmanager
def proxy_to(endpoint: str) -> Iterator[tuple[str, Proxy]]:
    """The endpoint of a proxy to `endpoint` ("http://host:port"), and the proxy."""
    host, _, port = endpoint.removeprefix("http://").partition(":")
    proxy = Proxy((host, int(port)))

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            proxy.serve(self.request)

    with _Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, name="proxy")
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", proxy
        finally:
            server.shutdown()
            proxy.release()
            proxy.cut()
            thread.join()
