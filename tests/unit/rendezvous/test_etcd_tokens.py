"""The token of etcd's user: given anew whenever etcd does not take it any more, and shared by threads."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any

import pytest

from holdfast.rendezvous import etcd as module
from holdfast.rendezvous.etcd import EtcdRendezvous
from holdfast.rendezvous.uri import parse_rendezvous_uri


class _Answer:
    def __init__(self, status: int, shape: Mapping[str, Any]) -> None:
        self.status = status
        self._data = json.dumps(shape).encode()

    def read(self) -> bytes:
        return self._data


class _Etcd:
    """Gives tokens, and takes the newest one only."""

    def __init__(self, refusal: str) -> None:
        self.given = 0
        self._refusal = refusal

    def post(
        self, connection: http.client.HTTPConnection, method: str, order: Mapping[str, Any], headers: Mapping[str, str]
    ) -> _Answer:
        if method == "auth/authenticate":
            self.given += 1
            return _Answer(200, {"token": f"token {self.given}"})
        if "Authorization" not in headers:
            return _Answer(400, {"code": 3, "message": "etcdserver: user name is empty"})
        if headers["Authorization"] != f"token {self.given}":
            return _Answer(400, {"code": 3, "message": self._refusal})
        return _Answer(200, {"header": {"revision": "1"}})


@pytest.mark.parametrize(
    "refusal", ["etcdserver: revision of auth store is old", "etcdserver: invalid auth token"], ids=["old", "invalid"]
)
def test_a_token_that_is_not_taken_any_more_is_replaced(monkeypatch: pytest.MonkeyPatch, refusal: str) -> None:
    server = _Etcd(refusal)
    monkeypatch.setattr(module, "_post", server.post)
    rendezvous = EtcdRendezvous(parse_rendezvous_uri("etcd://me:word@127.0.0.1:1/job"), patience_s=0.0)
    assert rendezvous.list() == {}
    server.given += 1  # an administrator has changed users, or etcd was started again
    assert rendezvous.list() == {}
    assert server.given == 3


def test_a_request_keeps_the_token_that_another_thread_has_put_away(monkeypatch: pytest.MonkeyPatch) -> None:
    server = _Etcd("etcdserver: invalid auth token")
    monkeypatch.setattr(module, "_post", server.post)
    rendezvous = EtcdRendezvous(parse_rendezvous_uri("etcd://me:word@127.0.0.1:1/job"), patience_s=0.0)
    connect = rendezvous._connect

    def connect_while_another_thread_is_refused(timeout_s: float) -> http.client.HTTPConnection:
        rendezvous._token = ""
        return connect(timeout_s)

    assert rendezvous.list() == {}
    monkeypatch.setattr(rendezvous, "_connect", connect_while_another_thread_is_refused)
    assert rendezvous.list() == {}, "it was sent without a token, which etcd takes for a user without a name"
