"""A host of a plain script: runs its workers of each round with torchrun's variables, and leads if it is elected.

`rounds` decides. Nothing here knows what the script does: its checkpoints are its own affair, and no fence keeps the
workers of a host that has lost the rendezvous from writing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from contextlib import suppress

import msgspec

from holdfast.launch import rounds as rd
from holdfast.launch.job import Job
from holdfast.launch.options import LaunchOptions
from holdfast.linux.process import die_with_parent
from holdfast.runtime import current as current_runtime

__all__ = ["TorchrunHost", "worker_environment"]

_STOP_S = 10.0
"""From SIGTERM to SIGKILL."""
_log = logging.getLogger(__name__)


class TorchrunHost:
    """One host. `run` returns the job's exit code."""

    def __init__(self, options: LaunchOptions, job: Job, command: list[str]) -> None:
        self._options = options
        self._job = job
        self._command = command
        self._rounds = rd.Rounds(
            options.host_id,
            rd.Bounds(
                min_hosts=options.min_hosts,
                max_hosts=options.max_hosts,
                last_call_s=options.rendezvous.last_call_timeout_s,
                max_restarts=options.max_restarts,
                join_timeout_s=options.join_timeout_s,
            ),
        )
        self._incarnation = current_runtime().token_hex(4)
        self._ready = 0
        self._round = 0
        """The round whose workers run here, or ran last."""
        self._workers: list[asyncio.subprocess.Process] = []
        self._watching: asyncio.Task[None] | None = None
        self._ended: rd.Ended | None = None
        self._stopped_by = 0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._job.changed.clear()
                entries = self._job.entries
                if self._stopped_by:
                    return 128 + self._stopped_by
                if (result := entries.get("result")) is not None:
                    return self._finish(msgspec.json.decode(result, type=rd.JobResult))
                wake = None
                if not await self._take_part(entries) and not await self._lead(entries):
                    if self._rounds.wake_at is not None:
                        wake = loop.call_at(self._rounds.wake_at, self._job.changed.set)
                    await self._job.changed.wait()
                if wake is not None:
                    wake.cancel()
        finally:
            await self._stop_workers()

    def stop(self, signum: int) -> None:
        """This host leaves: its workers are stopped, and the others go on without it."""
        self._stopped_by = signum
        self._job.changed.set()

    def _finish(self, result: rd.JobResult) -> int:
        if result.code != 0:
            _say(f"The job has failed: {result.why}.")
        return result.code

    # ------------------------------------------------------------------ this host's workers

    async def _take_part(self, entries: dict[str, bytes]) -> bool:
        """Do what the newest round asks of this host; whether anything was done."""
        current = rd.newest_round(entries)
        number = current.number if current is not None else 0
        is_open = current is not None and f"closed/{number}" not in entries
        if self._workers and (self._round != number or not is_open):
            await self._stop_workers()
            return True
        is_member = current is not None and any(
            (one.host, one.incarnation) == (self._options.host_id, self._incarnation) for one in current.members
        )
        if current is not None and is_open and is_member:
            if self._round != number:
                await self._start_workers(current)
                return True
            if self._ended is not None and f"ended/{number}/{self._options.host_id}" not in entries:
                await self._job.create(f"ended/{number}/{self._options.host_id}", msgspec.json.encode(self._ended))
            return False
        if self._ready != number + 1 and await self._register(number + 1):
            self._ready = number + 1
            return True
        return False

    async def _register(self, number: int) -> bool:
        """Ready for the next round, in which rank 0 may be here, at a port that was free a moment ago."""
        with socket.create_server(("", 0)) as free:
            port = int(free.getsockname()[1])
        record = rd.HostRecord(
            address=self._options.address,
            port=port,
            workers=self._options.workers_per_host,
            ready=number,
            incarnation=self._incarnation,
        )
        return await self._job.register(f"hosts/{self._options.host_id}", msgspec.json.encode(record))

    async def _start_workers(self, current: rd.Round) -> None:
        self._round = current.number
        self._ended = None
        _say(
            f"Round {current.number}: {self._options.host_id} is host {_node_rank(current, self._options.host_id)} of "
            f"{len(current.members)}."
        )
        for local_rank in range(self._options.workers_per_host):
            own = worker_environment(current, self._options.host_id, local_rank, self._options, self._job.number)
            self._workers.append(
                await asyncio.create_subprocess_exec(
                    *self._command, env={**os.environ, **own}, start_new_session=True, preexec_fn=die_with_parent
                )
            )
        self._watching = asyncio.create_task(self._watch_workers(list(self._workers)))

    async def _watch_workers(self, workers: list[asyncio.subprocess.Process]) -> None:
        """Until all have ended well, or the first has not."""
        waiting = {asyncio.create_task(one.wait()): rank for rank, one in enumerate(workers)}
        try:
            pending = set(waiting)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if (code := task.result()) != 0:
                        what = f"the worker of local rank {waiting[task]} {_describe_exit(code)}"
                        self._ended = rd.Ended(code=code if code > 0 else 128 - code, what=what)
                        return
            self._ended = rd.Ended(code=0)
        finally:
            for task in waiting:
                task.cancel()
            self._job.changed.set()

    async def _stop_workers(self) -> None:
        """Stop all processes of the workers' sessions."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        _signal_groups(self._workers, signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                await asyncio.gather(*(one.wait() for one in self._workers))
        _signal_groups(self._workers, signal.SIGKILL)
        await asyncio.gather(*(one.wait() for one in self._workers))
        self._workers, self._watching, self._ended, self._round = [], None, None, 0

    # ------------------------------------------------------------------ the leader

    async def _lead(self, entries: dict[str, bytes]) -> bool:
        """Decide for all, if this host is elected; whether something was written, which the watch will show."""
        leader = entries.get("leader", b"").decode()
        if not leader:
            await self._job.create("leader", self._options.host_id.encode(), leased=True)
            return False
        if leader != self._options.host_id:
            self._rounds.wake_at = None
            return False
        match self._rounds.decide(entries, asyncio.get_running_loop().time()):
            case rd.OpenRound(made):
                await self._job.create(f"rounds/{made.number}", msgspec.json.encode(made))
            case rd.CloseRound(number, closed):
                _say(f"Round {number} is over: {closed.why}.")
                await self._job.create(f"closed/{number}", msgspec.json.encode(closed))
            case rd.EndJob(result):
                await self._job.create("result", msgspec.json.encode(result))
                await self._job.create("over", self._options.host_id.encode())
        return False


def worker_environment(
    current: rd.Round, host: str, local_rank: int, options: LaunchOptions, job: int
) -> dict[str, str]:
    """What torchrun sets for a worker."""
    node_rank = _node_rank(current, host)
    first = sum(one.workers for one in current.members[:node_rank])
    world = sum(one.workers for one in current.members)
    local_world = current.members[node_rank].workers
    found = {
        "RANK": first + local_rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": local_world,
        "GROUP_RANK": node_rank,
        "GROUP_WORLD_SIZE": len(current.members),
        "ROLE_RANK": first + local_rank,
        "ROLE_WORLD_SIZE": world,
        "ROLE_NAME": "default",
        "MASTER_ADDR": current.master_address,
        "MASTER_PORT": current.master_port,
        "TORCHELASTIC_RESTART_COUNT": current.restarts,
        "TORCHELASTIC_MAX_RESTARTS": options.max_restarts,
        "TORCHELASTIC_RUN_ID": f"{options.rendezvous.job or options.rendezvous.directory.name}-{job}",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    if local_world > 1 and "OMP_NUM_THREADS" not in os.environ:
        found["OMP_NUM_THREADS"] = 1  # as torchrun does: workers would otherwise take all cores each
    return {name: str(value) for name, value in found.items()}


def _node_rank(current: rd.Round, host: str) -> int:
    return [one.host for one in current.members].index(host)


def _signal_groups(workers: list[asyncio.subprocess.Process], signum: int) -> None:
    for one in workers:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(one.pid, signum)


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _say(text: str) -> None:
    print(f"holdfast launch: {text}", file=sys.stderr, flush=True)
