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
from holdfast.agent.output import Forwarder, RankLog
from holdfast.agent.parts import Parts
from holdfast.agent.spawner import Spawner
from holdfast.agent.worker_handle import WorkerHandle
from holdfast.core.checkpoint_types import Report
from holdfast.linux.memory import oom_kills
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

__all__ = ["WorkerGroup"]

_GATHER_S = 0.002


class WorkerGroup:
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
        self._workers: dict[int, WorkerHandle] = {}
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
        worker = WorkerHandle(self.number, assignment.rank, log, listen_fd, self._heard)
        self._workers[assignment.rank] = worker
        self._spawner.spawn(assignment, worker.worker_fds)

    @property
    def busy(self) -> bool:
        """Whether any of its workers lives."""
        return any(worker.alive for worker in self._workers.values())

    # ------------------------------------------------------------------ births and deaths

    def worker_started(self, rank: int, pid: int) -> None:
        self._workers[rank].pid = pid
        pids = {worker.rank: worker.pid for worker in self._workers.values() if worker.pid is not None}
        if len(pids) == len(self._workers) and not self._started and not self.stopping:
            self._started = True
            self._send(Started(generation=self.number, pids=pids))

    def worker_died(self, rank: int, status: int, *, killed: bool) -> None:
        worker = self._workers[rank]
        ended = worker.ended(status, out_of_memory=oom_kills() > self._oom_kills)
        self._tell_end(None if killed else ended)

    def workers_lost(self, why: str) -> None:
        for worker in self._workers.values():
            if worker.alive:
                self._tell_end(worker.lost(why))

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
        for worker in self._workers.values():
            worker.drain()
        self.flush()
        self._forwarder.flush()
        for log in self._logs:
            log.close()
        self._logs.clear()

    async def _dump_stacks(self) -> None:
        wards = [worker for worker in self._workers.values() if worker.alive]
        texts = await asyncio.gather(*(worker.dump_stacks() for worker in wards))
        for worker, text in zip(wards, texts, strict=True):
            if text:
                self._send(Stacks(generation=self.number, rank=worker.rank, text=text))

    # ------------------------------------------------------------------ words

    def settled(self, message: Settled) -> None:
        for worker in self._workers.values():
            worker.tell(message)

    def collected(self, message: Collected) -> None:
        for worker in self._workers.values():
            worker.tell(message)

    def pause(self) -> None:
        """The controller lags: leave reports where they are until `resume`."""
        for worker in self._workers.values():
            worker.pause()

    def resume(self) -> None:
        for worker in self._workers.values():
            worker.resume()

    def _heard(self, worker: WorkerHandle, message: WorkerMessage) -> None:
        if isinstance(message, Imported):
            self._spawner.learn(message.modules)
        elif self.stopping and not isinstance(message, Exited | WorkerReport):
            return  # but a `report` that has returned is kept, whatever happened meanwhile
        elif isinstance(message, WorkerReport):
            self._parts.take(self.number, worker.rank, message)
            self._reports.setdefault(worker.rank, []).append(message.report)
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
