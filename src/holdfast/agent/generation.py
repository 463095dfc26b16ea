"""This agent's share of one generation: its wards, from `Start` to `Stopped`.

Reports are gathered for a moment and sent together, at once when a checkpoint is among them. While it is
stopped only reports and errors are passed on, and when `stop` is over nothing more; the parts that its workers handed
over stay (`parts`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from holdfast.agent.log_writer import LogWriter
from holdfast.agent.memory import oom_kills
from holdfast.agent.output import Forwarder, RankLog
from holdfast.agent.parts import Parts
from holdfast.agent.spawner import Spawner
from holdfast.agent.ward import Ward
from holdfast.core.parts import Report
from holdfast.wire.messages import (
    Collected,
    Exited,
    Imported,
    Logs,
    Reports,
    Settled,
    Stacks,
    Started,
    WorkerMessage,
    WorkerReport,
)
from holdfast.worker.job import Assignment

__all__ = ["Generation"]

_GATHER_S = 0.002


class Generation:
    """The workers of one generation on this node."""

    def __init__(
        self,
        number: int,
        spawner: Spawner,
        parts: Parts,
        send: Callable[[object], None],
        backlog_bytes: Callable[[], int],
        log_writer: LogWriter,
    ) -> None:
        self.number = number
        self.stopping = False
        self._spawner = spawner
        self._parts = parts
        self._send = send
        self._forwarder = Forwarder(number, self._send_logs, backlog_bytes)
        self._wards: dict[int, Ward] = {}
        self._logs: list[RankLog] = []
        self._log_writer = log_writer
        self._reports: dict[int, list[Report]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._oom_kills = oom_kills()
        self._started = False

    def spawn(self, assignment: Assignment, log_file: Path, listen_fd: int | None) -> None:
        """Start one worker; `listen_fd` is handed over."""
        log = RankLog(log_file, assignment.rank, self._forwarder, self._log_writer)
        self._logs.append(log)
        ward = Ward(self.number, assignment.rank, log, listen_fd, self._heard)
        self._wards[assignment.rank] = ward
        self._spawner.spawn(assignment, ward.wires)

    @property
    def busy(self) -> bool:
        """Whether any of its workers lives."""
        return any(ward.alive for ward in self._wards.values())

    # ------------------------------------------------------------------ births and deaths

    def worker_started(self, rank: int, pid: int) -> None:
        self._wards[rank].pid = pid
        pids = {ward.rank: ward.pid for ward in self._wards.values() if ward.pid is not None}
        if len(pids) == len(self._wards) and not self._started and not self.stopping:
            self._started = True
            self._send(Started(generation=self.number, pids=pids))

    def worker_died(self, rank: int, status: int, *, killed: bool) -> None:
        ward = self._wards[rank]
        ended = ward.ended(status, out_of_memory=oom_kills() > self._oom_kills)
        self._tell_end(None if killed else ended)

    def workers_lost(self, why: str) -> None:
        for ward in self._wards.values():
            if ward.alive:
                self._tell_end(ward.lost(why))

    def _tell_end(self, ended: object | None) -> None:
        """Also while it is stopped: a rank that failed first may be heard of last, and is the one to blame."""
        self.flush()
        if ended is not None:
            self._send(ended)

    async def stop(self, dump_stacks: bool) -> None:
        """Returns when nothing of this generation is left."""
        if dump_stacks and not self.stopping:
            await self._dump_stacks()
        self.flush()
        self.stopping = True
        await self._spawner.clear(self.number)
        self.release()

    def release(self) -> None:
        """Its processes are gone: take what they left, and close everything."""
        self.stopping = True
        for ward in self._wards.values():
            ward.drain()
        self.flush()
        self._forwarder.flush()
        for log in self._logs:
            log.close()
        self._logs.clear()

    async def _dump_stacks(self) -> None:
        wards = [ward for ward in self._wards.values() if ward.alive]
        texts = await asyncio.gather(*(ward.dump_stacks() for ward in wards))
        for ward, text in zip(wards, texts, strict=True):
            if text:
                self._send(Stacks(generation=self.number, rank=ward.rank, text=text))

    # ------------------------------------------------------------------ words

    def settled(self, message: Settled) -> None:
        for ward in self._wards.values():
            ward.tell(message)

    def collected(self, message: Collected) -> None:
        for ward in self._wards.values():
            ward.tell(message)

    def pause(self) -> None:
        """The controller lags: leave reports where they are until `resume`."""
        for ward in self._wards.values():
            ward.pause()

    def resume(self) -> None:
        for ward in self._wards.values():
            ward.resume()

    def _heard(self, ward: Ward, message: WorkerMessage) -> None:
        if isinstance(message, Imported):
            self._spawner.learn(message.modules)
        elif self.stopping and not isinstance(message, Exited | WorkerReport):
            return  # but a `report` that has returned is kept, whatever happened meanwhile
        elif isinstance(message, WorkerReport):
            self._parts.take(self.number, ward.rank, message)
            self._reports.setdefault(ward.rank, []).append(message.report)
            if message.report.checkpoint:
                self.flush()
            elif self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(_GATHER_S, self.flush)
        else:
            self.flush()
            if isinstance(message, Exited):
                self._forwarder.flush()
            self._send(message)

    def flush(self) -> None:
        """Send the reports that were gathered."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        gathered, self._reports = self._reports, {}
        for rank, reports in gathered.items():
            self._send(Reports(generation=self.number, rank=rank, reports=reports))

    def _send_logs(self, logs: Logs) -> None:
        self._send(logs)
