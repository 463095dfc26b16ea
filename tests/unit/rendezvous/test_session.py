"""A host's session over a rendezvous that fails at each step of making it anew."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

import pytest

from holdfast.errors import ConfigError, HoldfastError, Unreachable
from holdfast.rendezvous.rendezvous import Rendezvous
from holdfast.rendezvous.session import Session

_LONG_S = 20.0


class _Rendezvous:
    """Sessions live until they are forgotten; each of `problems` is raised once by the method of its name."""

    def __init__(self) -> None:
        self.sessions: list[str] = []
        self.living: set[str] = set()
        self.keys: dict[str, tuple[bytes, str]] = {}
        self.problems: list[tuple[str, HoldfastError]] = []

    def _fail(self, method: str) -> None:
        for problem in self.problems:
            if problem[0] == method:
                self.problems.remove(problem)
                raise problem[1]

    def open_session(self, ttl_s: float) -> str:
        self._fail("open_session")
        self.sessions.append(f"session {len(self.sessions)}")
        self.living.add(self.sessions[-1])
        return self.sessions[-1]

    def renew(self, session: str) -> bool:
        self._fail("renew")
        return session in self.living

    def put(self, key: str, value: bytes, session: str = "") -> None:
        self._fail("put")
        self.keys[key] = value, session

    def end_session(self, session: str) -> None:
        self.living.discard(session)

    def forget(self) -> None:
        self.living.clear()
        self.keys.clear()


@pytest.mark.parametrize(
    "problem",
    [
        ("put", Unreachable("It is away.")),
        ("open_session", Unreachable("It is away.")),
        ("renew", ConfigError("It does not know this user.")),
        ("put", ConfigError("It does not let this user write.")),
    ],
    ids=lambda problem: f"{problem[0]}-{type(problem[1]).__name__}",
)
def test_a_host_is_registered_again_whatever_failed_on_the_way(problem: tuple[str, HoldfastError]) -> None:
    rendezvous, reopened = _Rendezvous(), threading.Event()
    session = Session(cast(Rendezvous, rendezvous), 0.3, reopened.set)
    session.register("host", b"1")
    rendezvous.problems.append(problem)
    rendezvous.forget()
    assert reopened.wait(_LONG_S)
    assert rendezvous.keys == {"host": (b"1", session.id)} and session.id in rendezvous.living
    assert not rendezvous.problems
    session.close()
    assert session.id not in rendezvous.living


def test_closing_raises_nothing_where_the_rendezvous_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    rendezvous = _Rendezvous()
    session = Session(cast(Rendezvous, rendezvous), 60.0)

    def refuse(*arguments: Any) -> None:
        raise ConfigError("It does not know this user.")

    monkeypatch.setattr(rendezvous, "end_session", refuse)
    began = time.monotonic()
    session.close()
    assert time.monotonic() - began < _LONG_S
