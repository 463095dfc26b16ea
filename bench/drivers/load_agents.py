"""Many agents in one process, for `bench.agents`: they speak the real protocol over sockets, and start no workers.

`python -m bench.drivers.load_agents HOST:PORT [--tls]`, the run secret in HOLDFAST_TOKEN. Each line on standard input
is a command, and is answered with a line of JSON: `join N` (until all were told to start a worker), `rounds N` (every
rank reports and enters a barrier, N times), `die N` (until those that are left were told to stop). Ends at the end of
input.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import resource
import ssl
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core.checkpoint_types import Report
from holdfast.wire import auth
from holdfast.wire import messages as m
from holdfast.wire.envelope import Envelope, Stamp
from holdfast.wire.frames import Splitter, encode
from holdfast.wire.hello import Hello
from holdfast.wire.tls import client_context, fingerprint_of

__all__ = ["main"]

_HANDSHAKES_MAX = 64
"""So many agents connect at the same time: the controller takes more strangers for an attack."""
_handshake: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(auth.Challenge | auth.Accepted | auth.Rejected)
_messages: msgspec.msgpack.Decoder[Envelope[m.ControllerMessage]] = msgspec.msgpack.Decoder(
    Envelope[m.ControllerMessage]
)


class _Agent(asyncio.Protocol):
    """One agent with one slot."""

    def __init__(self, load: Load, name: str) -> None:
        self._load = load
        self.name = name
        self._splitter = Splitter()
        self._stamp: Stamp | None = None
        self._transport: Any = None
        self._sent = self._received = 0
        self.generation, self.rank, self.run = 0, -1, ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for body in self._splitter.feed(data):
            if self._stamp is not None:
                envelope = _messages.decode(body)
                self._received = envelope.sequence or self._received
                self._receive(envelope.run, envelope.message)
            else:
                self._authenticate(_handshake.decode(body))

    def connection_lost(self, exc: Exception | None) -> None:
        self._load.lost(self)

    def _authenticate(self, message: auth.Challenge | auth.Accepted | auth.Rejected) -> None:
        if isinstance(message, auth.Challenge):
            tls = self._transport.get_extra_info("ssl_object")
            fingerprint = "" if tls is None else fingerprint_of(tls.getpeercert(binary_form=True))
            hello = Hello(agent=self.name)
            self._transport.write(encode(auth.prove(message, self._load.secret, fingerprint, hello)))
        elif isinstance(message, auth.Accepted):
            self._stamp = Stamp(self.name)
            self._transport.write(encode(self._stamp.wrap(m.OpenChannel(incarnation=self.name), "")))
            self.send(e.AgentJoined(agent=self.name, host="127.0.0.1", slots=1, address="127.0.0.1"))
            self._load.joined.release()
        else:
            raise SystemExit(message.reason)

    def _receive(self, run: str, message: m.ControllerMessage) -> None:
        assert self._stamp is not None
        match message:
            case m.PrepareRun():
                self.run = run
                self.send(e.AgentPrepared(agent=self.name, master_port=1))
            case c.StartWorkers():
                (place,) = message.places
                self.generation, self.rank, self.reports = message.generation, place.ranks[0], 0
                self.send(e.WorkersStarted(generation=self.generation, agent=self.name, pids={self.rank: 1}))
                self._load.add("started")
            case c.StopWorkers():
                self.send(e.WorkersStopped(generation=message.generation, agent=self.name))
                self._load.add("stopped")
            case m.Collected():
                self._load.add("collected")
            case m.Ping():
                self._transport.write(encode(self._stamp.wrap(m.Pong(), "", 0, self._received)))
            case m.CloseRun():
                self.send(m.RunClosed())

    def send(self, message: m.AgentMessage) -> None:
        assert self._stamp is not None
        self._sent += 1
        self._transport.write(encode(self._stamp.wrap(message, self.run, self._sent, self._received)))

    def report(self, number: int) -> None:
        """Report, and enter a barrier."""
        metrics = {"loss": 0.5} if self.rank == 0 else None
        report = Report(number=number, at=time.time(), metrics=metrics)
        self.send(e.RankReported(generation=self.generation, rank=self.rank, reports=(report,)))
        kind = m.CollectiveKind.BARRIER
        self.send(m.Collect(generation=self.generation, rank=self.rank, sequence=number, kind=kind))

    def abort(self) -> None:
        self._transport.abort()


class Load:
    """All agents of this process, and how many of them were told what since the last command began."""

    def __init__(self, address: str, secret: str, tls: ssl.SSLContext | None) -> None:
        host, _, port = address.rpartition(":")
        self._address = host, int(port)
        self.secret = secret
        self._tls = tls
        self.joined = asyncio.Semaphore(_HANDSHAKES_MAX)
        self._numbers = itertools.count()
        self._agents: dict[str, _Agent] = {}
        self._counts: dict[str, int] = {}
        self._changed = asyncio.Event()

    def add(self, what: str) -> None:
        self._counts[what] = self._counts.get(what, 0) + 1
        self._changed.set()

    def lost(self, agent: _Agent) -> None:
        self._agents.pop(agent.name, None)

    async def _wait(self, what: str, count: int) -> None:
        while self._counts.get(what, 0) < count:
            self._changed.clear()
            await self._changed.wait()
        self._counts[what] = 0

    async def join(self, count: int) -> dict[str, float]:
        """Until every agent, those included that were there, was told to start a worker."""
        loop, began = asyncio.get_running_loop(), time.monotonic()
        for _ in range(count):
            await self.joined.acquire()
            agent = _Agent(self, f"load-{next(self._numbers)}")
            self._agents[agent.name] = agent
            await loop.create_connection(lambda agent=agent: agent, *self._address, ssl=self._tls)
        await self._wait("started", len(self._agents))
        self._rounds = 0
        return {"seconds": time.monotonic() - began, "agents": len(self._agents)}

    async def rounds(self, count: int) -> dict[str, float]:
        began = time.monotonic()
        for _ in range(count):
            self._rounds += 1
            for agent in self._agents.values():
                agent.report(self._rounds)
            await self._wait("collected", len(self._agents))
        return {"seconds": time.monotonic() - began, "events": 2 * count * len(self._agents)}

    async def die(self, count: int) -> dict[str, float]:
        """These agents' connections end at once. Until every other agent was told to stop its worker."""
        began = time.monotonic()
        for agent in list(self._agents.values())[:count]:
            self._agents.pop(agent.name)
            agent.abort()
        await self._wait("stopped", len(self._agents))
        return {"seconds": time.monotonic() - began}


async def _serve(load: Load) -> None:
    commands: dict[str, Callable[[int], Coroutine[Any, Any, dict[str, float]]]] = {
        "join": load.join,
        "rounds": load.rounds,
        "die": load.die,
    }
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, number = line.split()
        print(json.dumps(await commands[name](int(number))), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("--tls", action="store_true")
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    tls = client_context() if options.tls else None

    async def run() -> None:
        await _serve(Load(options.address, os.environ["HOLDFAST_TOKEN"], tls))

    asyncio.run(run())


if __name__ == "__main__":
    main()
