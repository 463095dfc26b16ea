"""What `holdfast launch` does: join the job, agree on the run secret, run this host's part, leave.

Both kinds of script are run by an object with `run` and `stop`: `fit.FitHost`, `workers.TorchrunHost`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from holdfast.agent.process_directory import ProcessDirectory
from holdfast.errors import WireError
from holdfast.launch.fit import FitHost
from holdfast.launch.job import Job
from holdfast.launch.options import LaunchOptions
from holdfast.launch.script import calls_holdfast, fetch_script
from holdfast.launch.workers import TorchrunHost
from holdfast.rendezvous.uri import open_rendezvous
from holdfast.storage.local_cache import local_cache_dir
from holdfast.storage.private_directory import make_private_directory
from holdfast.storage.run_secret import FILE_VARIABLE, SECRET_VARIABLE, make_secret, read_secret_file

__all__ = ["launch"]

_RENEW_S = 3600.0


class _Host(Protocol):
    async def run(self) -> int: ...

    def stop(self, signum: int) -> None: ...


def launch(options: LaunchOptions) -> int:
    """Run this host's part of the job to its end; the exit code."""
    logging.basicConfig(level=logging.WARNING, format="holdfast launch: %(message)s", stream=sys.stderr)
    directory = ProcessDirectory(local_cache_dir() / "launches", f"{options.host_id}-{secrets.token_hex(4)}")
    try:
        return asyncio.run(_launch(options, directory))
    finally:
        directory.remove()


async def _launch(options: LaunchOptions, own: ProcessDirectory) -> int:
    directory = own.path
    renewing = asyncio.create_task(_renew_times(own))
    if not options.is_module:
        # In a directory of its own, which is sent to agents: the run secret lies beside it.
        path = await asyncio.to_thread(fetch_script, options.script, make_private_directory(directory / "script"))
        command = [sys.executable, str(path), *options.arguments]
    else:
        command = [sys.executable, "-m", options.script, *options.arguments]
    kind = options.kind
    if kind is None:
        script = options.script if options.is_module else str(path)
        kind = "fit" if calls_holdfast(script, is_module=options.is_module) else "torchrun"
    with _Signals() as signals:
        rendezvous = await asyncio.to_thread(open_rendezvous, options.rendezvous)
        job = Job(rendezvous, options.rendezvous.ttl_s)
        await job.open(options.host_id, msgspec.json.encode({"address": options.address}))
        try:
            print(
                f"holdfast launch: {options.host_id} at {options.address} has joined job {job.number} at "
                f"{options.rendezvous.text}.",
                file=sys.stderr,
                flush=True,
            )
            host: _Host
            if kind == "fit":
                secret_file = await _agree_on_secret(options, job, directory)
                host = FitHost(options, job, command, directory, secret_file)
            else:
                host = TorchrunHost(options, job, command)
            signals.connect(host.stop)
            return await host.run()
        finally:
            renewing.cancel()
            await job.close()


async def _renew_times(own: ProcessDirectory) -> None:
    while True:
        await asyncio.sleep(_RENEW_S)
        own.renew_times()


async def _agree_on_secret(options: LaunchOptions, job: Job, directory: Path) -> Path:
    """The file with the run secret: what was given, or what the first host has put into the rendezvous."""
    if options.token_file is not None or FILE_VARIABLE in os.environ:
        path = options.token_file or Path(os.environ[FILE_VARIABLE]).expanduser()
        read_secret_file(path)  # or says what is wrong with it
        return path
    secret = os.environ.get(SECRET_VARIABLE, "").strip()
    if not secret:
        mine = make_secret()
        try:
            secret = (await job.keep("token", mine.encode())).decode()
        except UnicodeDecodeError as error:
            raise WireError(f"The token in {options.rendezvous.text} is not text: remove it.") from error
        if secret == mine:
            print(
                f"holdfast launch: whoever can read {options.rendezvous.text} can run code on these hosts, since the "
                "run secret is kept there; give every host HOLDFAST_TOKEN, or --token-file, to keep it elsewhere.",
                file=sys.stderr,
                flush=True,
            )
    path = directory / "secret"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(secret)
    return path


class _Signals:
    """SIGTERM and SIGINT from now on: kept until there is somebody to tell."""

    def __init__(self) -> None:
        self._stop: Callable[[int], None] | None = None
        self._early: list[int] = []

    def __enter__(self) -> _Signals:
        loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._handle, signum)
        return self

    def __exit__(self, *error: object) -> None:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(signum)

    def connect(self, stop: Callable[[int], None]) -> None:
        self._stop = stop

    def _handle(self, signum: int) -> None:
        if self._stop is not None:
            self._stop(signum)
        elif self._task is not None:
            self._task.cancel()  # nothing runs yet
