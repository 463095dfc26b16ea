"""One host of a job, with its keys in the test's hands: launchers that are started again, signalled early, or alone."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import cast

import msgspec

from holdfast.errors import Unreachable
from holdfast.launch import rounds as rd
from holdfast.launch.fit import FitHost
from holdfast.launch.job import Job
from holdfast.launch.options import LaunchOptions
from holdfast.launch.workers import TorchrunHost
from holdfast.rendezvous.directory import DirectoryRendezvous
from holdfast.rendezvous.uri import parse_rendezvous_uri

_LONG_S = 30.0


class _Job:
    """What a host needs of `Job`; keys change when the test changes them."""

    number = 1
    reopened_at = None

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}
        self.changed = asyncio.Event()
        self.registered: list[rd.HostRecord] = []
        self.is_away = False

    async def register(self, key: str, value: bytes) -> bool:
        if self.is_away:
            self.is_away = False
            asyncio.get_running_loop().call_later(0.05, self.changed.set)
            return False
        self.registered.append(msgspec.json.decode(value, type=rd.HostRecord))
        self.changed.set()
        return True

    async def create(self, key: str, value: bytes, *, leased: bool = False) -> bool:
        return False

    def end(self) -> None:
        self.entries["result"] = msgspec.json.encode(rd.JobResult(code=0))
        self.changed.set()


def _options(tmp_path: Path) -> LaunchOptions:
    uri = parse_rendezvous_uri(f"file://{tmp_path}/rendezvous")
    return LaunchOptions(rendezvous=uri, script="x", host_id="a", address="127.0.0.1")


async def _until(job: _Job, count: int) -> None:
    async with asyncio.timeout(_LONG_S):
        while len(job.registered) < count:
            await asyncio.sleep(0.01)


def test_a_launcher_starts_no_workers_in_a_round_of_the_one_before_it(tmp_path: Path) -> None:
    async def check() -> None:
        job = _Job()
        current = rd.Round(
            number=1, members=(rd.Member(host="a", workers=1, incarnation="before"),), master_address="", master_port=1
        )
        job.entries = {"leader": b"b", "rounds/1": msgspec.json.encode(current)}
        command = [sys.executable, "-c", f"open({str(tmp_path / 'started')!r}, 'w')"]
        running = asyncio.create_task(TorchrunHost(_options(tmp_path), cast(Job, job), command).run())
        await _until(job, 1)
        assert job.registered[0].ready == 2 and job.registered[0].incarnation not in ("", "before")
        job.end()
        assert await running == 0

    asyncio.run(check())
    assert not (tmp_path / "started").exists()


def test_a_host_that_cannot_register_tries_again(tmp_path: Path) -> None:
    async def check() -> None:
        job = _Job()
        job.is_away = True
        running = asyncio.create_task(TorchrunHost(_options(tmp_path), cast(Job, job), ["true"]).run())
        await _until(job, 1)
        assert job.registered[0].ready == 1
        job.end()
        assert await running == 0

    asyncio.run(check())


def test_a_key_that_the_rendezvous_does_not_take_ends_no_host(tmp_path: Path) -> None:
    class Rendezvous(DirectoryRendezvous):
        is_away = False

        def put(self, key: str, value: bytes, session: str = "") -> None:
            if self.is_away:
                raise Unreachable("It is away.")
            super().put(key, value, session)

    async def check() -> None:
        rendezvous = Rendezvous(tmp_path)
        job = Job(rendezvous, 60.0)
        await job.open("a", b"{}")
        try:
            rendezvous.is_away = True
            assert not await job.register("hosts/a", b"1")
            rendezvous.is_away = False
            assert await job.register("hosts/a", b"1")
            assert rendezvous.get(f"{job.prefix}hosts/a") == b"1"
        finally:
            await job.close()

    asyncio.run(check())


def test_a_signal_that_comes_before_the_script_reaches_it(tmp_path: Path) -> None:
    async def check() -> int:
        secret = tmp_path / "secret"
        secret.write_text("0" * 32)
        secret.chmod(0o600)
        command = [sys.executable, "-c", "import time; time.sleep(100)"]
        host = FitHost(_options(tmp_path), cast(Job, _Job()), command, tmp_path, secret)
        host.stop(signal.SIGTERM)
        async with asyncio.timeout(_LONG_S):
            return await host.run()

    assert asyncio.run(check()) == 128 + signal.SIGTERM
