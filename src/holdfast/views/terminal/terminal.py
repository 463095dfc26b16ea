"""`Terminal`: the observer that shows the progress of a run, at a rate that a person can read.

On a terminal a live line shows the newest report; elsewhere each report is a line, and of those that come faster than
one can read the latest (`throttle`). Nothing that needs attention is ever left out. HOLDFAST_QUIET=1 leaves warnings,
the last line, and the traceback of a failure that ends the run; HOLDFAST_JSON=1 prints every record as a line of JSON
instead. Neighbours: `layouts` makes the texts, `live_line` the live one, `worker_output` shows worker output,
`nonblocking_stream` writes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

import msgspec

from holdfast.core import records as r
from holdfast.core.checkpoint_types import ValidationStatus
from holdfast.core.curve import Row
from holdfast.core.metrics import find_metric
from holdfast.core.root_cause import root_cause, signature
from holdfast.core.summary import Summary
from holdfast.journal.format import encode_record
from holdfast.printable import printable
from holdfast.views.formatting import (
    bounds_text,
    count_text,
    drain_text,
    list_text,
    local_time,
    losses_text,
    place,
    ranks_text,
    running_time,
    trim,
)
from holdfast.views.terminal import layouts
from holdfast.views.terminal.live_line import LiveLine
from holdfast.views.terminal.nonblocking_stream import is_notebook, is_same_file, open_stream
from holdfast.views.terminal.throttle import Throttle
from holdfast.views.terminal.worker_output import WorkerOutput
from holdfast.wire.messages import LogLine

__all__ = ["Terminal", "is_set", "print_complete"]

_RED, _YELLOW, _GREEN, _BOLD, _DIM = "31", "33", "32", "1", "2"
_DRAW_S = 0.1
_FLUSH_S = 0.2
_CLOCK_S = 1.0
"""How often the live line's clocks change, if nothing else does."""
_GATHER_S = 0.5
"""Agents that are lost within this time are told of in one line."""
_WAITING_S = 5.0
_WAITING_MAX_S = 600.0
_encode = msgspec.json.Encoder().encode


class Terminal:
    """Prints to `stderr`, and what workers print to standard output, or JSON, to `stdout`. In notebooks all goes to
    `stdout`: they show the other one as an error. A switch that is None follows the environment and the stream."""

    def __init__(
        self,
        stderr: TextIO,
        stdout: TextIO,
        *,
        name: str,
        uri: str,
        quiet: bool | None = None,
        json_lines: bool | None = None,
        interactive: bool | None = None,
        command: Sequence[str] | None = None,
        prior: Summary | None = None,
        work_dir: str = "",
        config: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`work_dir` is where workers run, `config` the training function's configuration."""
        self._json = is_set("HOLDFAST_JSON") if json_lines is None else json_lines
        self._quiet = is_set("HOLDFAST_QUIET") if quiet is None else quiet
        if self._json or is_notebook(stdout):
            stderr = stdout
        self._stream = open_stream(stderr, interactive)
        self._stream.set_status(self, "")
        same = is_same_file(stdout, stderr)
        self._stdout = self._stream if same else open_stream(stdout, interactive)
        self._name, self._uri = name, uri
        self._command = sys.orig_argv if command is None else command
        self._clock = clock
        self._run = prior if prior is not None else Summary()
        """The run so far, over all of its controllers."""
        self._hosts_of_agents: dict[str, tuple[str, int]] = {}
        self._hosts: dict[int, str] = {}
        self._work_dir = work_dir
        self._worker_output = WorkerOutput(self._stdout, self._stream, self._hosts, clock, name)
        self._throttle = Throttle(self._stream.live, clock)
        self._live_line = LiveLine(config or {})
        self._draw_at = float("-inf")
        self._is_drawn = True
        """Whether the live line shows all that there is."""
        self._death = ""
        """How a generation ended, in quiet, until it is known that the run goes on."""
        self._told_score = False
        self._losses: list[r.AgentRemoved] = []
        """Those that are not shown yet."""
        self._tell_losses_at = float("inf")
        self.waiting_for: Callable[[], str] = str
        """What keeps the run from starting workers, "" if nothing does. Who knows that it begins to wait has `flush`
        called."""
        self._waiting_since: float | None = None
        self._tell_waiting_at = 0.0
        self._epoch = 0
        self._restored = False
        """Whether it was shown where this controller's first generation starts from."""
        self._ended: r.GenerationEnded | None = None
        self._changed: r.GenerationEnded | None = None
        """The generation that ended on purpose, until the next one starts."""
        self._started: r.GenerationStarted | None = None
        self._running_at: float | None = None
        self._last_error = ("", 0)

    def record(self, record: r.Record) -> None:
        if self._json:
            self._stream.line(encode_record(record).decode())
            if not isinstance(record, r.Reported):  # which may be thousands a second
                self._stream.drain()
            return
        row = self._run.apply(record).row
        self._is_drawn = False
        if row is None:
            self._draw_at = float("-inf")  # the live line may not be true any more
            self._show_record(record)
        elif not self._quiet:
            self._show_report(row, waits=isinstance(record, r.Reported) and record.checkpoint)
        else:
            return  # there may be thousands a second
        self._drain()

    def logs(self, generation: int, lines: Sequence[LogLine]) -> None:
        if self._json:
            for line in lines:
                entry = {"kind": "WorkerOutput", "generation": generation, "rank": line.rank, "stream": line.stream}
                self._stream.line(_encode(entry | {"text": line.text}).decode())
        elif not self._quiet:
            self._worker_output.lines(lines)
        self._drain()

    @property
    def next_flush_s(self) -> float | None:
        """Soon while something is held back; as often as a clock that is shown; when it is due to be told again what
        the run waits for."""
        streams = self._stream.has_backlog or self._stdout.has_backlog
        if streams or self._death or self._losses or self._worker_output.is_waiting or self._throttle.is_waiting:
            return _FLUSH_S
        if self._quiet or self._json:
            return None
        if self._stream.live:
            return _CLOCK_S if self._is_drawn else _FLUSH_S
        if not self.waiting_for():
            return None
        # A record tells of whatever comes next.
        until_told_s = 0.0 if self._waiting_since is None else self._tell_waiting_at - self._clock()
        return max(_FLUSH_S, until_told_s)

    def flush(self, final: bool = False) -> None:
        self._show_death()
        if final:
            self._show_waiting()
        self._worker_output.flush(everything=final)
        self._drain()

    def close(self) -> None:
        self._stream.leave(self)
        for stream in (self._stdout, self._stream):
            stream.drain(wait=True)

    # ------------------------------------------------------------ one method a kind of record

    def _show_record(self, record: r.Record) -> None:
        if not isinstance(record, r.RunFailed):
            self._show_death()
        self._death = ""
        match record:
            case r.ControllerStarted():
                self._show_start(record)
            case r.RunRestarted():
                self._restored = True
                self._print("Training starts over; the checkpoints from before are kept and not restored")
            case r.AgentAdded():
                self._hosts_of_agents[record.agent] = (record.host, record.slots)
                if record.spare:
                    self._print(f"Agent {record.agent} on {record.host} is kept ready as a spare")
            case r.AgentRemoved():
                self._losses.append(record)
                self._tell_losses_at = min(self._tell_losses_at, self._clock() + _GATHER_S)
            case r.AgentRefused():
                self._warn(record.why)
            case r.BoundsChanged():
                bounds = bounds_text(record.workers_min, record.workers_max)
                self._print(f"The run may have {bounds} from here on: {printable(record.why)}")
            case r.DrainStarted():
                left_s = None if record.deadline is None else record.deadline - record.at
                self._warn(drain_text(record.agent, record.host, record.why, left_s))
            case r.ChangePlanned():
                self._print(f"The next checkpoint is the last of these workers: {printable(record.why)}")
            case r.GenerationStarted():
                self._show_generation(record)
            case r.GenerationRunning():
                self._running_at = record.at
                self._live_line.run(self._clock())
                for line in layouts.worker_lines(self._hosts, record.pids):
                    self._print(line)
            case r.GenerationEnded():
                self._running_at = None
                self._live_line.wait("workers stopped", self._clock())
                if record.planned:
                    self._changed = record
                else:
                    self._show_failure(record)
            case r.CheckpointCommitted():
                self._live_line.commit(self._clock())
                if not self._quiet:
                    self._throttle.commit(record)
                self._check_score(record)
            case r.CheckpointAbandoned():
                self._throttle.stop_waiting(record.iteration)
                self._warn(f"the checkpoint of iteration {record.iteration} was not kept: {record.why}")
            case r.CheckpointDamaged():
                where = place(self._uri, record.name)
                text = f"WARNING: the checkpoint {where} is NOT USED any more: {printable(record.why)}"
                self._stream.line(text, f"{_BOLD};{_RED}")
            case r.CheckpointValidated():
                if record.status is not ValidationStatus.VALIDATED:
                    self._warn(f"{record.name} was not validated: {record.error}")
            case r.RemovalFailed():
                self._warn(f"{record.name} could not be removed, which is tried again later: {record.why}")
            case r.RanksLagging():
                who = ranks_text(record.ranks)
                self._warn(f"a checkpoint waits for {who}, which called report() fewer than {record.number} times")
            case r.RunFinished() | r.RunFailed() | r.RunInterrupted():
                self._show_end(record)

    def _show_start(self, record: r.ControllerStarted) -> None:
        self._epoch = record.epoch
        verb = "started" if record.epoch <= 1 else "continues"
        bounds = self._run.durable.bounds  # `holdfast scale` has set them under an earlier controller
        if bounds is not None:
            workers = bounds_text(bounds.workers_min, bounds.workers_max)
        else:
            workers = bounds_text(record.workers_min or record.workers, record.workers)
        self._print(
            f"Run {printable(self._name)} {verb} at {local_time(record.at)} with {workers} in {place(self._uri)}"
        )
        if self._work_dir:
            self._print(f"Workers run in the directory {self._work_dir}")
        self._live_line.wait("starting", self._clock())

    def _show_generation(self, record: r.GenerationStarted) -> None:
        self._started, self._running_at = record, None
        self._find_hosts(record)
        self._worker_output.world_size = record.world_size
        self._live_line.start(record.world_size, self._clock())
        if self._changed is not None:
            self._show_change(self._changed, record)
            self._changed = None
        if self._restored:
            return
        self._restored = True
        if record.checkpoint is not None:
            where = place(self._uri, record.checkpoint)
            self._print(f"Restored from checkpoint: {where} (iteration {record.iteration})")
        elif self._epoch > 1:
            self._print("There was no checkpoint to restore: training starts from the beginning")

    def _show_change(self, ended: r.GenerationEnded, started: r.GenerationStarted) -> None:
        lost = ended.iteration - started.iteration
        lost_text = f"{count_text(lost, 'iteration')} to do again" if lost > 0 else "nothing is lost"
        workers = count_text(started.world_size, "worker")
        self._print(f"Training goes on with {workers} from iteration {started.iteration}, {lost_text}")

    def _show_failure(self, record: r.GenerationEnded) -> None:
        if self._quiet and record.counted:
            self._losses.clear()  # the failure is told with its cause
        self._show_waiting()
        self._ended = self._ended or record
        if not record.counted and record.preemption is None:
            return
        if self._quiet:
            self._death = layouts.death(record, self._hosts)
            return
        self._stream.line("")
        self._stream.line(f"{self._prefix}{layouts.death(record, self._hosts)}", _RED)
        cause = root_cause(record.failures) if record.failures else None
        if cause is None or not (cause.traceback or cause.last_lines):
            return
        kind, times = signature(cause), self._last_error[1] + 1
        if kind == self._last_error[0]:
            self._stream.line(f"  (the same error as above, {times} times now)")
        else:
            times = 1
            self._stream.line(layouts.short_traceback(cause), _DIM)
        self._last_error = (kind, times)

    def _show_death(self) -> None:
        """In quiet, the failure that was held back, since one that ends the run says the same."""
        if self._death:
            self._warn(self._death)
        self._death = ""

    def _check_score(self, record: r.CheckpointCommitted) -> None:
        """Warn of the first checkpoint that lacks the metric by which they are ranked, and is not to be validated."""
        started = self._run.started
        score = started.score_attribute if started is not None else None
        if score is None or self._told_score or record.name in self._run.durable.validations:
            return
        if find_metric(record.metrics, score) is None:
            self._told_score = True
            has = f"has {list_text(sorted(record.metrics))}" if record.metrics else "has none"
            self._warn(f"{record.name} counts as the worst: checkpoint_score_attribute is {score!r}, and it {has}")

    def _show_report(self, row: Row, *, waits: bool) -> None:
        self._show_recovery(row.at)
        self._live_line.report(row, self._clock())
        self._throttle.report(row, waits=waits)

    def _show_recovery(self, reported_at: float | None) -> None:
        """Once the workers have reported, or the run has ended: until then nobody knows what the failure cost."""
        if self._ended is None or self._started is None or self._running_at is None:
            return
        text = layouts.recovery(
            self._ended, self._started, self._running_at, reported_at, self._hosts, fine=self._stream.fine
        )
        self._ended = None
        self._worker_output.flush(everything=True)
        self._print(text)

    def _show_end(self, record: r.RunFinished | r.RunFailed | r.RunInterrupted) -> None:
        self._show_waiting()
        if not isinstance(record, r.RunFailed):
            self._show_recovery(None)
        self._live_line.end()
        done = f"after {count_text(self._run.iteration, 'iteration')} at {local_time(record.at)}"
        match record:
            case r.RunFinished():
                status, colour, head = "finished", _GREEN, f"Training completed {done}"
            case r.RunFailed():
                status, colour, head = "failed", _RED, f"Training failed {done}"
            case r.RunInterrupted():
                status, colour, head = "interrupted", _YELLOW, f"Training was stopped {done} ({printable(record.why)})"
        if self._quiet:
            self._stream.line(layouts.summary_line(self._name, self._uri, status, self._run))
        else:
            total = running_time(record.at - self._started_at)
            self._stream.line("")
            self._stream.line(f"{self._prefix}{head}", colour, f". Total running time: {total}")
            width = self._stream.width
            self._stream.line(
                layouts.summary(self._name, self._uri, status, self._run, width=width, fine=self._stream.fine)
            )
            if self._run.iteration:
                self._stream.line(layouts.tensorboard_hint(self._uri))
        if isinstance(record, r.RunFinished) and record.return_value_error:
            self._stream.line(f"Warning: {printable(record.return_value_error)}", _YELLOW)
        if isinstance(record, r.RunFailed):
            self._stream.line(f"Error: {printable(record.error)}", _RED)
            if self._quiet and record.failures:
                self._stream.line(layouts.short_traceback(root_cause(record.failures)))
        if not isinstance(record, r.RunFinished):
            failed = record if isinstance(record, r.RunFailed) else None
            self._stream.line(layouts.how_to_continue(self._run.newest_checkpoint, self._command, failed))

    # ------------------------------------------------------------ printing

    def _show_waiting(self) -> None:
        """What was held back, whatever it waits for."""
        self._show_losses()
        self._worker_output.flush(everything=True)
        self._show_reports(everything=True)

    def _show_losses(self) -> None:
        """The agents that were lost lately: many are often lost at once."""
        losses, self._losses = self._losses, []
        if len(losses) == 1:
            self._warn(f"agent {losses[0].agent} on {losses[0].host} is gone: {losses[0].why}")
        elif losses:
            self._warn(f"lost {losses_text([one.agent for one in losses], [one.why for one in losses])}")
        self._tell_losses_at = float("inf")

    def _show_reports(self, *, everything: bool = False) -> None:
        for row, skipped, commit in self._throttle.due(everything=everything):
            self._worker_output.flush(everything=True)  # what was printed before the report
            if row is not None:
                self._print(layouts.report_line(row, skipped, commit))
            elif commit is not None:
                self._print(layouts.commit_line(commit))

    def _drain(self) -> None:
        """Show what is due, and write what the streams accept."""
        now = self._clock()
        if not self._json:
            self._show_reports()
        if now >= self._tell_losses_at:
            self._show_losses()
        waiting = self._show_waiting_for(now)
        if self._stream.live and not self._quiet and now >= self._draw_at:
            self._draw_at, self._is_drawn = now + _DRAW_S, True
            prefix = self._prefix
            width = max(1, self._stream.width - 1 - len(prefix))
            text = waiting[:width] or self._live_line.text(now, width)
            self._stream.set_status(self, f"{prefix}{text}" if text else "")
        self._stdout.drain()
        if self._stream is not self._stdout:
            self._stream.drain()

    def _show_waiting_for(self, now: float) -> str:
        """What the run waits for, and how long: as a line now and then where there is no live one."""
        what = self.waiting_for()
        if not what:
            self._waiting_since = None
            return ""
        if self._waiting_since is None:
            self._waiting_since, self._tell_waiting_at = now, now + _WAITING_S
        waited_s = now - self._waiting_since
        if now >= self._tell_waiting_at and not self._stream.live and not self._json:
            self._tell_waiting_at = now + min(_WAITING_MAX_S, max(_WAITING_S, waited_s))
            self._print(f"Waiting for {what} (for {running_time(waited_s)})")
        return f"waiting for {what}, {running_time(waited_s)}"

    @property
    def _started_at(self) -> float:
        """When the present controller started."""
        return self._run.started.at if self._run.started is not None else 0.0

    @property
    def _prefix(self) -> str:
        """Tells this run's lines from those of others in the same terminal."""
        return f"{trim(printable(self._name), 30)}: " if self._stream.is_shared else ""

    def _print(self, text: str) -> None:
        if not self._quiet:
            self._stream.line(f"{self._prefix}{text}")

    def _warn(self, text: str) -> None:
        self._stream.line(f"{self._prefix}Warning: {printable(text)}", _YELLOW)

    def _find_hosts(self, record: r.GenerationStarted) -> None:
        """Ranks fill the agents in their order, as `core.placement` places them."""
        self._hosts.clear()
        for agent in record.agents:
            host, slots = self._hosts_of_agents.get(agent, ("", 0))
            first = len(self._hosts)
            for rank in range(first, min(first + slots, record.world_size)):
                self._hosts[rank] = host


def print_complete(stdout: TextIO, stderr: TextIO, name: str, uri: str, iterations: int) -> None:
    """Print one line, where a run's output goes: the run that was asked for is complete already."""
    if not (is_set("HOLDFAST_QUIET") or is_set("HOLDFAST_JSON")):
        done = f"Run {name} is complete already, with {count_text(iterations, 'iteration')}: {uri}"
        print(printable(done), file=stdout if is_notebook(stdout) else stderr, flush=True)


def is_set(variable: str) -> bool:
    """Whether this variable of the environment says yes."""
    return os.environ.get(variable, "").strip().lower() not in ("", "0", "false", "no", "off")
