"""A rendezvous in etcd v3, over its HTTP/JSON gateway: what every etcd serves at its client port.

A session is a lease, a watch is a range request and a stream of changes from the revision after it. When the stream
breaks, or is silent for too long, both are made anew: so changes that were missed, a compaction, or an etcd that was
started without its data, are all the same. Requests are repeated until the patience is over; `create` recognises a key
that its own lost request has made.
"""

from __future__ import annotations

import base64
import http.client
import json
import logging
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from holdfast.core.backoff import backoff_s
from holdfast.errors import ConfigError, Unreachable, WireError
from holdfast.rendezvous.rendezvous import SessionExpiredError
from holdfast.rendezvous.uri import RendezvousUri
from holdfast.runtime import current

__all__ = ["EtcdRendezvous"]

_REQUEST_S = 3.0
_PATIENCE_S = 15.0
_RETRY_S = (0.1, 1.0)
_SILENCE_S = 10.0
"""A stream of changes without any for so long is opened anew: nothing else tells that the network is cut."""
_ROOT = "/holdfast/"
_NOT_FOUND, _PERMISSION_DENIED, _UNAUTHENTICATED = 5, 7, 16
_MAY_PASS = frozenset({1, 4, 8, 10, 13, 14, 15})
"""Codes of gRPC after which the same request may work: cancelled, deadline, exhausted, aborted, internal, unavailable,
data loss."""
_TOKEN_PROBLEMS = ("invalid auth token", "revision of auth store is old")
_log = logging.getLogger(__name__)


class _Refused(WireError):
    """etcd's answer to a request that it will not carry out."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class EtcdRendezvous:
    """The keys of one job below `/holdfast/<job>/`."""

    def __init__(self, uri: RendezvousUri, patience_s: float = _PATIENCE_S) -> None:
        self._uri = uri
        self._prefix = f"{_ROOT}{uri.job}/"
        self._patience_s = patience_s
        self._first = 0
        """The endpoint that answered last."""
        self._token = ""
        """Of the user, given by etcd for some minutes."""
        self._context = _tls_context(uri) if uri.tls else None

    # ------------------------------------------------------------------ keys

    def get(self, key: str) -> bytes | None:
        answer = self._call("kv/range", {"key": self._key(key)})
        found = answer.get("kvs", [])
        return _decode(found[0].get("value", "")) if found else None

    def list(self, prefix: str = "") -> dict[str, bytes]:
        return self._list(prefix)[0]

    def create(self, key: str, value: bytes, session: str = "") -> bool:
        absent = {"key": self._key(key), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
        order = {
            "compare": [absent],
            "success": [{"request_put": self._put_request(key, value, session)}],
            "failure": [{"request_range": {"key": self._key(key)}}],
        }
        answer = self._call_in_session("kv/txn", order)
        if answer.get("succeeded"):
            return True
        found = answer["responses"][0]["response_range"].get("kvs", [])
        is_same = bool(found) and _decode(found[0].get("value", "")) == value
        return is_same and found[0].get("lease", "0") == (session or "0")

    def put(self, key: str, value: bytes, session: str = "") -> None:
        self._call_in_session("kv/put", self._put_request(key, value, session))

    def delete(self, key: str) -> None:
        self._call("kv/deleterange", {"key": self._key(key)})

    def watch(self, prefix: str = "") -> _EtcdWatch:
        return _EtcdWatch(self, prefix)

    def _list(self, prefix: str, patience_s: float | None = None) -> tuple[dict[str, bytes], int]:
        """The keys below a prefix, and the revision at which they were read."""
        answer = self._call("kv/range", self._range(prefix), patience_s)
        found = {self._name(one): _decode(one.get("value", "")) for one in answer.get("kvs", [])}
        return found, int(answer["header"]["revision"])

    def _range(self, prefix: str) -> dict[str, str]:
        start = (self._prefix + prefix).encode()
        end = start[:-1] + bytes([start[-1] + 1])  # keys are text, whose last byte is never 255
        return {"key": _encode(start), "range_end": _encode(end)}

    def _key(self, key: str) -> str:
        return _encode((self._prefix + key).encode())

    def _name(self, entry: Mapping[str, str]) -> str:
        return _decode(entry["key"]).decode().removeprefix(self._prefix)

    def _put_request(self, key: str, value: bytes, session: str) -> dict[str, str]:
        return {"key": self._key(key), "value": _encode(value), "lease": session or "0"}

    # ------------------------------------------------------------------ sessions

    def open_session(self, ttl_s: float) -> str:
        answer = self._call("lease/grant", {"TTL": str(max(1, round(ttl_s)))})
        return str(answer["ID"])

    def renew(self, session: str) -> bool:
        answer = self._call("lease/keepalive", {"ID": session}, patience_s=0.0)
        return int(answer.get("result", {}).get("TTL", 0)) > 0

    def end_session(self, session: str) -> None:
        try:
            self._call("lease/revoke", {"ID": session}, patience_s=_REQUEST_S)
        except _Refused as error:
            if error.code != _NOT_FOUND:
                raise

    def close(self) -> None:
        """Each request has a connection of its own."""

    # ------------------------------------------------------------------ requests

    def _call_in_session(self, method: str, order: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self._call(method, order)
        except _Refused as error:
            if error.code != _NOT_FOUND:
                raise
            raise SessionExpiredError("This host's lease in etcd is over: it was silent for too long.") from error

    def _call(self, method: str, order: Mapping[str, Any], patience_s: float | None = None) -> dict[str, Any]:
        """Send one request, to any endpoint, again and again while it may work; `Unreachable` after the patience."""
        give_up_at = current().monotonic() + (self._patience_s if patience_s is None else patience_s)
        failures = 0
        while True:
            try:
                with self._open(method, order, _REQUEST_S) as response:
                    return _parse(response.read())
            except _Refused as error:
                if error.code not in _MAY_PASS:
                    raise
                problem: Exception = error
            except (OSError, http.client.HTTPException) as error:
                problem = error
            failures += 1
            if failures % len(self._uri.endpoints) == 0:
                pause_s = backoff_s(failures // len(self._uri.endpoints), *_RETRY_S)
                if current().monotonic() + pause_s > give_up_at:
                    raise Unreachable(f"etcd at {self._uri.text} does not answer: {_reason(problem)}.") from problem
                current().sleep(pause_s)

    @contextmanager
    def _open(self, method: str, order: Mapping[str, Any], timeout_s: float) -> Iterator[http.client.HTTPResponse]:
        """The answer to one request, of which the caller reads as much as it wants."""
        for is_last_try in (False, True):
            token = self._token  # which another thread may take away at any time
            if self._uri.user and not token:
                token = self._authenticate()
            connection = self._connect(timeout_s)
            try:
                headers = {"Authorization": token} if token else {}
                response = _post(connection, method, order, headers)
                if response.status == 200:
                    yield response
                    return
                error = _refusal(response.status, response.read())
            except (OSError, http.client.HTTPException):
                self._first = (self._first + 1) % len(self._uri.endpoints)
                raise
            finally:
                connection.close()
            # etcd says of a token that is too old, or that it forgot when it was started again, that it is invalid.
            # After a change of its users it says that the revision at which the token was given is old.
            is_about_token = error.code == _UNAUTHENTICATED or any(one in str(error) for one in _TOKEN_PROBLEMS)
            if is_last_try or not (self._uri.user and is_about_token):
                raise self._explain(error)
            if self._token == token:
                self._token = ""

    def _authenticate(self) -> str:
        connection = self._connect(_REQUEST_S)
        try:
            order = {"name": self._uri.user, "password": self._uri.password}
            response = _post(connection, "auth/authenticate", order, {})
            data = response.read()
        finally:
            connection.close()
        if response.status != 200:
            error = _refusal(response.status, data)
            if error.code in _MAY_PASS:
                raise error
            raise ConfigError(f"etcd at {self._uri.text} refuses the user {self._uri.user!r}: {error}")
        token = self._token = str(_parse(data)["token"])
        return token

    def _explain(self, error: _Refused) -> Exception:
        if error.code in (_PERMISSION_DENIED, _UNAUTHENTICATED) or "user name is empty" in str(error):
            return ConfigError(
                f"etcd at {self._uri.text} does not let this user read and write {self._prefix}: {error} Write "
                "etcd://USER@HOST:2379/JOB, and set HOLDFAST_ETCD_PASSWORD."
            )
        return error

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        host, port = self._uri.endpoints[self._first]
        if self._context is None:
            return http.client.HTTPConnection(host, port, timeout=timeout_s)
        return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=self._context)


class _EtcdWatch:
    """A thread follows the changes; `wait` waits for it."""

    def __init__(self, rendezvous: EtcdRendezvous, prefix: str) -> None:
        self._rendezvous = rendezvous
        self._prefix = prefix
        self._changed = threading.Condition()
        self._entries: dict[str, bytes] | None = None
        self._closed = threading.Event()
        self._stream: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="holdfast-rendezvous-watch", daemon=True)
        self._thread.start()

    def wait(self, known: Mapping[str, bytes] | None, timeout_s: float) -> dict[str, bytes]:
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed.is_set() or (self._entries is not None and self._entries != known), timeout_s
            )
            return dict(self._entries or {})

    def close(self) -> None:
        with self._changed:
            self._closed.set()
            self._changed.notify_all()
            if self._stream is not None:
                with suppress(OSError):
                    self._stream.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _run(self) -> None:
        failures = 0
        while not self._closed.wait(backoff_s(failures, *_RETRY_S)):
            try:
                entries, revision = self._rendezvous._list(self._prefix, patience_s=0.0)
                self._set(entries)
                failures = 0
                self._follow(entries, revision)
            except (WireError, ConfigError, OSError, http.client.HTTPException) as error:
                failures += 1
                _log.debug("The watch of etcd is opened anew: %s", error)

    def _follow(self, entries: dict[str, bytes], revision: int) -> None:
        """Apply changes until the stream ends or is silent."""
        order = {"create_request": {**self._rendezvous._range(self._prefix), "start_revision": str(revision + 1)}}
        with self._rendezvous._open("watch", order, _SILENCE_S) as response:
            with self._changed:
                if self._closed.is_set():
                    return
                self._stream = _socket_of(response)
            try:
                while line := response.readline():
                    result = _parse(line).get("result", {})
                    if result.get("canceled"):
                        return
                    for event in result.get("events", []):
                        _apply(entries, self._rendezvous._name(event["kv"]), event)
                    self._set(entries)
            except TimeoutError:
                return
            finally:
                with self._changed:
                    self._stream = None

    def _set(self, entries: dict[str, bytes]) -> None:
        with self._changed:
            self._entries = dict(entries)
            self._changed.notify_all()


def _apply(entries: dict[str, bytes], name: str, event: Mapping[str, Any]) -> None:
    if event.get("type") == "DELETE":
        entries.pop(name, None)
    else:
        entries[name] = _decode(event["kv"].get("value", ""))


def _post(
    connection: http.client.HTTPConnection, method: str, order: Mapping[str, Any], headers: Mapping[str, str]
) -> http.client.HTTPResponse:
    connection.request("POST", f"/v3/{method}", json.dumps(order), {"Content-Type": "application/json", **headers})
    return connection.getresponse()


def _socket_of(response: http.client.HTTPResponse) -> socket.socket | None:
    """For `shutdown`, which ends a read in another thread; `close` would not."""
    raw = getattr(getattr(response, "fp", None), "raw", None)
    found = getattr(raw, "_sock", None)
    return found if isinstance(found, socket.socket) else None


def _parse(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError as error:
        raise http.client.HTTPException(f"what it answers is not etcd's JSON: {data[:80]!r}") from error
    if not isinstance(found, dict):
        raise http.client.HTTPException(f"what it answers is not etcd's JSON: {data[:80]!r}")
    if isinstance(refusal := found.get("error"), dict):  # in a stream
        raise _Refused(f"{refusal.get('message')}.", int(refusal.get("grpc_code") or refusal.get("code") or 0))
    return found


def _refusal(status: int, data: bytes) -> _Refused:
    try:
        found = json.loads(data)
        return _Refused(f"{found.get('message') or found.get('error')}.", int(found.get("code", 0)))
    except (ValueError, AttributeError):
        code = 14 if status >= 500 else 0
        return _Refused(f"It answers with HTTP status {status}: {data[:80].decode(errors='replace')!r}.", code)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error) or type(error).__name__).rstrip(".")


def _tls_context(uri: RendezvousUri) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=uri.cacert)
        if uri.cert is not None:
            context.load_cert_chain(uri.cert, uri.key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"The rendezvous {uri.text}: its certificates cannot be loaded: {error}.") from error
    return context


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _decode(text: str) -> bytes:
    return base64.b64decode(text)
