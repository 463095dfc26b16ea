"""What `train.report` and the other functions of `holdfast.train` do inside a worker.

Synchronous and without a thread: a report is one encoded frame and one `sendall` (`agent_connection`), some
microseconds. A reported directory is staged (`staging`) before `report` returns, and at most one of this rank is on its
way at a time; a reported state is copied to the agent's memory (`snapshot`), two at a time. `bootstrap` makes the
session and installs it; `holdfast.train` finds it with `current()`.
"""

from __future__ import annotations

import enum
import os
import shutil
import socket
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.checkpoint.layout import check_name
from holdfast.core.checkpoint_types import ExistingPart, Part, Report, Snapshot, StagedPart, Validation, ValidationTask
from holdfast.core.records import Preemption
from holdfast.errors import CheckpointError, ConfigError, HoldfastError
from holdfast.storage.private_directory import make_private_directory
from holdfast.storage.uri import join
from holdfast.wire.messages import CollectiveKind, Note, WorkerMessage, WorkerReport
from holdfast.worker.agent_connection import AgentConnection
from holdfast.worker.job import Assignment
from holdfast.worker.plain_data import plain_metrics
from holdfast.worker.report_sender import ReportSender
from holdfast.worker.snapshot import Snapshots
from holdfast.worker.staging import stage, staged_files
from holdfast.worker.stdio import fill_standard_descriptors

if TYPE_CHECKING:
    from holdfast.checkpoint.handle import Checkpoint
    from holdfast.checkpoint.manifest import Manifest
    from holdfast.checkpoint.state.handle import StateCheckpoint
    from holdfast.checkpoint.worker_states import WorkerStates
    from holdfast.storage.store import Store

__all__ = [
    "CheckpointConsistencyMode",
    "CheckpointUploadMode",
    "ReportedCheckpoint",
    "ReportedCheckpointStatus",
    "Session",
    "TrainingStopped",
    "UploadFunction",
    "current",
    "install",
    "installed",
    "is_installed",
    "note",
]

_READ_EVERY_S = 0.01
"""How often, at most, a report of metrics reads what the agent has sent: others' checkpoints, which would fill the
socket, and that this rank has to stay in a report."""


_LAG_WAIT_S = 60.0
"""How long ranks that have not reported as often as this one are waited for before it says so."""


class CheckpointUploadMode(enum.Enum):
    """When `train.report` returns: after the copy to the agent (ASYNC), or after the commit (SYNC, and NO_UPLOAD, where
    the files lie in the run's storage already)."""

    ASYNC = "ASYNC"
    SYNC = "SYNC"
    NO_UPLOAD = "NO_UPLOAD"

    def default_delete_local_checkpoint_after_upload(self) -> bool:
        """Whether a reported directory is let go where the user does not say."""
        return self is CheckpointUploadMode.ASYNC


class CheckpointConsistencyMode(enum.Enum):
    """What `get_all_reported_checkpoints` waits for: commits, or the validations that were asked for as well."""

    COMMITTED = "COMMITTED"
    VALIDATED = "VALIDATED"


class ReportedCheckpointStatus(enum.Enum):
    """What has come of a reported checkpoint; COMMITTED where no validation was asked for."""

    COMMITTED = "COMMITTED"
    PENDING_VALIDATION = "PENDING_VALIDATION"
    VALIDATED = "VALIDATED"
    VALIDATION_TIMEOUT = "VALIDATION_TIMEOUT"
    VALIDATION_FAILED = "VALIDATION_FAILED"


UploadFunction = Callable[["Checkpoint", str], "Checkpoint"]
"""`report(checkpoint_upload_fn)`: stores a checkpoint in the run's directory, under the name that it is given."""


@dataclass(frozen=True, slots=True)
class ReportedCheckpoint:
    """A committed checkpoint of this run with the metrics it was reported with."""

    checkpoint: Checkpoint
    metrics: dict[str, Any]
    status: ReportedCheckpointStatus


class TrainingStopped(BaseException):
    """Raised by `report` where it was decided that the run does not go on: the function ends as if it had returned."""


class Session:
    """One worker's side of one generation."""

    def __init__(self, connection: socket.socket, assignment: Assignment, filesystem: object | None = None) -> None:
        self.assignment = assignment
        self.initial_checkpoint: Checkpoint | None = None
        """What `get_checkpoint` gives as long as the run has committed nothing."""
        self.inputs: Any = None
        """What the trainer hands to the function besides its configuration, while that runs (`train.worker_inputs`)."""
        self._agent = AgentConnection(connection, assignment)
        self._reports = ReportSender(self._agent.send, self._forget_upload)
        self._snapshots = Snapshots(assignment, self._agent)
        self._filesystem = filesystem
        self._store: Store | None = None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._number = 0
        self._verified = assignment.verified
        self.elastic_shards: dict[str, Any] = {}
        """Shards of data sets whose progress is saved, by name: one of each in a generation."""
        self._captures: dict[str, Callable[[], Any]] = {}
        self._restored: WorkerStates | None = None
        self._asks = 0
        self._next_ask = 1
        """At which call of `should_checkpoint` all ranks ask the run."""
        self._stay_in_next = False
        """Whether all ranks have to stay in their next report, as `should_checkpoint` was told."""
        self._read_at = 0.0

    def close(self) -> None:
        """Unmap the agent's memory, in a process that goes on (local mode)."""
        self._snapshots.close()

    # ------------------------------------------------------------------ reporting

    def report(
        self,
        metrics: Mapping[str, Any],
        checkpoint: Checkpoint | None = None,
        checkpoint_dir_name: str | None = None,
        checkpoint_upload_mode: CheckpointUploadMode | None = None,
        delete_local_checkpoint_after_upload: bool | None = None,
        checkpoint_upload_fn: UploadFunction | None = None,
        validation: ValidationTask | None = None,
        complete: bool = False,
    ) -> None:
        """See `holdfast.train.report`."""
        self._check_process()
        self._reports.check()
        plain = plain_metrics(metrics)
        worker_state = self._capture_state()  # of now: what follows may take its time, and another thread
        if checkpoint_dir_name is not None:
            check_name(checkpoint_dir_name)
        if validation is not None:
            self._check_validation(checkpoint)
        if complete and checkpoint is None:
            raise ConfigError("train.report(complete=True) needs a checkpoint: it says that this one is complete.")
        if checkpoint is None:
            with self._lock:
                held = self._must_stay(gives_part=False)
                self._send_report(self._make_report(plain, checkpoint_dir_name, worker_state=worker_state, held=held))
            if self.assignment.awaits_decisions:
                self._await_decision()
            if held:
                self._stay()
            return
        _check_type(checkpoint)
        mode, move = _upload_mode(checkpoint_upload_mode, delete_local_checkpoint_after_upload)
        waits = mode is not CheckpointUploadMode.ASYNC
        self._reports.finish()  # one checkpoint at a time
        with self._lock:
            if checkpoint_upload_fn is not None and mode is not CheckpointUploadMode.NO_UPLOAD:
                in_background = checkpoint_upload_mode is CheckpointUploadMode.ASYNC
                held = self._report_uploaded(
                    plain,
                    checkpoint,
                    checkpoint_dir_name,
                    move,
                    checkpoint_upload_fn,
                    in_background,
                    validation,
                    (self.assignment.rank,) if complete else None,
                    worker_state,
                    waits=waits,
                )
            else:
                began = time.monotonic()
                part, needed_ranks = self._make_part(checkpoint, mode, move)
                stall_s = time.monotonic() - began
                needed_ranks = (self.assignment.rank,) if complete else needed_ranks
                held = self._must_stay(gives_part=True)
                report = self._make_report(
                    plain,
                    checkpoint_dir_name,
                    part,
                    stall_s,
                    validation=validation,
                    needed_ranks=needed_ranks,
                    worker_state=worker_state,
                    held=held,
                    waits=waits,
                )
                self._send_report(report)
                self._agent.pending.append(self._number)
            if waits:
                self._wait_for_commit(self._number)
        if self.assignment.awaits_decisions:
            self._await_decision()
        if held:
            self._stay()

    def _must_stay(self, *, gives_part: bool) -> bool:
        """Whether the report that is about to be sent must not return, since the generation is about to end."""
        agent = self._agent
        now = time.monotonic()
        if gives_part or agent.hold is not None or now - self._read_at >= _READ_EVERY_S:
            self._read_at = now
            agent.drain()
        if agent.hold is None:
            self._stay_in_next = False
            return False
        if self._stay_in_next:
            return True
        return gives_part if agent.hold == 0 else self._number + 1 >= agent.hold

    def _stay(self) -> None:
        """Stay in a report that is held until the rank is told to go on. Where the change comes about, it never is."""
        self._stay_in_next = False
        with self._lock:
            self._agent.read_until(lambda: self._agent.hold is None or self._agent.hold > self._number)

    def _await_decision(self) -> None:
        """Somebody decides by reports whether the run goes on: wait for that, so that nothing is done that the
        decision makes void."""
        if not self._collect(CollectiveKind.DECISION, None):
            raise TrainingStopped

    def _send_report(self, message: WorkerReport) -> None:
        self._reports.send(message)
        self._number = message.report.number

    def _check_validation(self, checkpoint: Checkpoint | None) -> None:
        if checkpoint is None:
            raise ConfigError("train.report(validation=...) needs a checkpoint: that is what is validated.")
        if not self.assignment.has_validation:
            raise ConfigError(
                "train.report(validation=...): the trainer was given no function for it; write "
                "TorchTrainer(..., validation_config=ValidationConfig(fn=...))."
            )

    def _wait_for_commit(self, number: int) -> None:
        """The report has said that this rank waits."""
        self._agent.read_until(lambda: number not in self._agent.pending)
        last = self._agent.announced
        if last is None or last.ticket.number != number or last.name is None:
            raise CheckpointError(f"The checkpoint of report {number} was not committed; the run's log says why.")

    def _report_uploaded(
        self,
        metrics: dict[str, Any],
        checkpoint: Checkpoint,
        dir_name: str | None,
        move: bool,
        upload: UploadFunction,
        in_background: bool,
        validation: ValidationTask | None,
        needed_ranks: tuple[int, ...] | None,
        worker_state: bytes,
        *,
        waits: bool,
    ) -> bool:
        """Report a checkpoint that the user's function stores, under a name on which all ranks agree without asking.
        Gives whether the report must not return."""
        local = self._directory_to_stage(checkpoint, move) if move and not _is_state(checkpoint) else None
        self._agent.wait_for_pending()
        number = self._number + 1
        name = dir_name or f"checkpoint-g{self.assignment.generation:03d}-r{number:06d}"
        held = self._must_stay(gives_part=True)
        began = time.monotonic()

        def store() -> WorkerReport:
            part = ExistingPart(self._name_in_run(_check_type(upload(checkpoint, name), "checkpoint_upload_fn")))
            if local is not None:
                shutil.rmtree(local)
            stall_s = 0.0 if in_background else time.monotonic() - began
            return self._make_report(
                metrics, dir_name, part, stall_s, number, validation, needed_ranks, worker_state, held=held, waits=waits
            )

        if in_background:
            without = self._make_report(metrics, dir_name, worker_state=worker_state, held=held)
            self._reports.send_uploaded(store, without)
            self._number = number
        else:
            self._send_report(store())
        self._agent.pending.append(number)
        return held

    def _forget_upload(self) -> None:
        """The user's function has failed in its thread: nobody will say what has become of a checkpoint that there is
        not. It was the only one on its way."""
        self._agent.pending.clear()

    def _make_part(
        self, checkpoint: Checkpoint, mode: CheckpointUploadMode, move: bool
    ) -> tuple[Part, tuple[int, ...] | None]:
        """Make the checkpoint the agent's: what happens in here is the stall. Gives the part, and the ranks whose parts
        make the checkpoint whole, where that is known: of a state, not of a directory."""
        from holdfast.checkpoint.state.handle import StateCheckpoint

        fill_standard_descriptors()  # what is printed must not end up in a snapshot or a staged file
        if isinstance(checkpoint, StateCheckpoint):
            return self._make_part_of_state(checkpoint, mode)
        if mode is CheckpointUploadMode.NO_UPLOAD:
            existing = self._name_in_run(checkpoint)
            self._agent.wait_for_pending()
            return ExistingPart(existing), None
        source = self._directory_to_stage(checkpoint, move)
        self._agent.wait_for_pending()
        target = self._staging_target()
        if source is None:
            make_private_directory(target.parent)
            checkpoint.to_directory(target)  # verified on the way: a damaged one must not become a new commit
        else:
            stage(source, target, move=move)
        return StagedPart(str(target)), None

    def _directory_to_stage(self, checkpoint: Checkpoint, move: bool) -> Path | None:
        """The local directory of a reported checkpoint; None if it is remote, or a committed one. Refuses what must
        not be reported, before anything is touched."""
        from holdfast.worker.reported_directory import check_reported_directory, is_committed

        source = checkpoint._open().local_root
        if source is None:
            return None
        committed = is_committed(source)
        run = self._open_store().local_root
        check_reported_directory(source, run, self.assignment, move=move and not committed)
        return None if committed else source

    def _make_part_of_state(
        self, checkpoint: StateCheckpoint, mode: CheckpointUploadMode
    ) -> tuple[Part, tuple[int, ...] | None]:
        if mode is CheckpointUploadMode.NO_UPLOAD:
            raise ConfigError("A checkpoint made by from_state() is in memory, not in storage: use ASYNC or SYNC.")
        plan = checkpoint.plan()
        others = plan.other_ranks
        needed_ranks = None if others is None else tuple(sorted({self.assignment.rank, *others}))
        snapshot = self._snapshots.copy(plan, self._number + 1)
        if snapshot is not None:
            return snapshot, needed_ranks
        self._agent.wait_for_pending()
        target = self._staging_target()
        make_private_directory(target.parent)
        plan.write_files(target)
        return StagedPart(str(target)), needed_ranks

    def _staging_target(self) -> Path:
        here = self.assignment
        return Path(here.staging_dir) / f"g{here.generation}-r{here.rank}-n{self._number + 1}"

    def _make_report(
        self,
        metrics: dict[str, Any],
        dir_name: str | None,
        part: Part | None = None,
        stall_s: float = 0.0,
        number: int | None = None,
        validation: ValidationTask | None = None,
        needed_ranks: tuple[int, ...] | None = None,
        worker_state: bytes = b"",
        *,
        held: bool = False,
        waits: bool = False,
    ) -> WorkerReport:
        """The next report, unless it has a number already."""
        existing = part.name if isinstance(part, ExistingPart) else None
        # A rank that knows a checkpoint to be whole may have to stand in for rank 0.
        metrics_count = self.assignment.rank == 0 or self.assignment.all_metrics or needed_ranks is not None
        report = Report(
            number=number or self._number + 1,
            at=time.time(),
            metrics=metrics if metrics_count else None,
            checkpoint=part is not None,
            checkpoint_dir_name=existing or dir_name,
            adopt=existing is not None,
            file_names=_file_names(part) if self.assignment.world_size > 1 else (),
            stall_s=stall_s,
            validation=validation,
            needed_ranks=needed_ranks,
            worker_state=worker_state,
            held=held,
            waits=waits,
        )
        return WorkerReport(report=report, part=part)

    def finish(self) -> None:
        """The training function has returned: wait until what a thread of it still stores is reported."""
        self._reports.finish()

    def abandon(self) -> None:
        """The training function has failed: nothing is sent any more but that."""
        self._reports.abandon()

    def _name_in_run(self, checkpoint: Checkpoint) -> str:
        """The name of a directory that the user wrote straight into the run's own."""
        from holdfast.checkpoint.handle import Checkpoint

        run, given = self._open_store(), checkpoint._open()
        name = check_name(PurePosixPath(checkpoint.path).name)
        expected = run.sub(name)
        if expected.local_root is not None and given.local_root is not None:
            same = expected.local_root.resolve() == given.local_root.resolve()
        else:  # the same place may be given as a URI, or as a path with a filesystem
            same = Checkpoint(join(self.assignment.storage, name), self._filesystem) == checkpoint
        if not same:
            raise ConfigError(
                f"With CheckpointUploadMode.NO_UPLOAD or a checkpoint_upload_fn the checkpoint must lie directly in "
                f"the run's directory {run.uri}, but it is {given.uri}: write it there, or let report() store it."
            )
        return name

    def should_checkpoint(self) -> bool:
        """Whether a checkpoint is worth its cost now; the same answer on every rank at the same call."""
        self._asks += 1
        if self._asks < self._next_ask:
            return False
        self._check_process()
        due, self._next_ask, stay = self._collect(CollectiveKind.CHECKPOINT_INTERVAL, self._asks)
        if stay:
            self._stay_in_next = True
            self._agent.hold = self._agent.hold or 0  # the message that says so may still be on its way
        return bool(due)

    # ------------------------------------------------------------------ reading back

    def get_checkpoint(self) -> Checkpoint | None:
        """The newest committed checkpoint. One that every rank has reported is waited for until it is committed or
        given up; ranks that have not reported it yet only for a while, and only by a rank that gave a part of it."""
        self._check_process()
        self._reports.finish()
        agent = self._agent
        with self._lock:
            agent.drain()
            gave_part = bool(agent.pending)
            if agent.settled < self._number:
                with agent.waiting(self._number):
                    if self._wait_for_ranks(_LAG_WAIT_S if gave_part else 0.0):
                        agent.read_until(lambda: agent.settled >= self._number)
                    elif gave_part:
                        warnings.warn(
                            f"train.get_checkpoint(): {self._laggards()} within {_LAG_WAIT_S:g} s, so this is the "
                            "checkpoint before the one that was reported last.",
                            stacklevel=3,
                        )
        newest = agent.newest
        return self.initial_checkpoint if newest is None else self._handle(newest)

    def get_all_reported_checkpoints(
        self,
        mode: CheckpointConsistencyMode = CheckpointConsistencyMode.VALIDATED,
        timeout_s: float | None = None,
    ) -> list[ReportedCheckpoint]:
        """Every committed checkpoint of the run that retention has left, oldest first; waits for those up to this
        rank's last report, whichever ranks gave them, and gives what there is if that takes longer than `timeout_s`."""
        self._check_process()
        agent, deadline = self._agent, None if timeout_s is None else time.monotonic() + timeout_s
        self._reports.finish()
        with self._lock:
            agent.drain()
            if agent.settled < self._number or self.assignment.has_validation:
                with agent.waiting(self._number, mode is CheckpointConsistencyMode.VALIDATED):
                    is_patient = timeout_s is None or timeout_s > _LAG_WAIT_S
                    if is_patient and not self._wait_for_ranks(_LAG_WAIT_S):
                        warnings.warn(
                            f"train.get_all_reported_checkpoints() still waits: {self._laggards()}.", stacklevel=3
                        )
                    left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
                    agent.read_until(lambda: agent.is_settled, left_s)
        from holdfast.checkpoint.catalog import Catalog

        validations = agent.standing.validations if agent.standing is not None else {}
        return [self._reported(manifest, validations) for manifest in Catalog(self._open_store()).committed()]

    def _reported(self, manifest: Manifest, validations: Mapping[str, Validation]) -> ReportedCheckpoint:
        validation = validations.get(manifest.name)
        if validation is None or validation.token != manifest.token:
            status, metrics = ReportedCheckpointStatus.COMMITTED, dict(manifest.metrics)
        else:
            status = ReportedCheckpointStatus(validation.status.value)
            metrics = {**manifest.metrics, **validation.metrics}
        return ReportedCheckpoint(self._handle(manifest.name), metrics, status)

    def _wait_for_ranks(self, timeout_s: float) -> bool:
        """Until every rank has reported as often as this one, or has finished; False if not all have in time. Waits for
        the controller's first answer in any case."""
        self._agent.read_until(lambda: self._agent.standing is not None)
        return self._agent.read_until(lambda: self._agent.none_lags, timeout_s)

    def _laggards(self) -> str:
        lagging = self._agent.standing.lagging if self._agent.standing is not None else ()
        ranks = ("rank " if len(lagging) == 1 else "ranks ") + ", ".join(map(str, lagging))
        return f"{ranks} did not call train.report() as often as rank {self.assignment.rank}"

    @property
    def filesystem(self) -> object | None:
        """The custom filesystem of the run's storage, where the user gave one."""
        return self._filesystem

    def _handle(self, name: str) -> Checkpoint:
        from holdfast.checkpoint.handle import Checkpoint  # with all of its machinery, only once one is asked for

        here = self.assignment
        if self._filesystem is not None:
            found = Checkpoint(f"{here.storage.rstrip('/')}/{name}", self._filesystem)
        else:
            found = Checkpoint._from_store(self._open_store(), name)
        if name == here.checkpoint:
            self._trust_agent(name)
        if name == here.checkpoint and here.snapshots:
            from holdfast.worker.memory_checkpoint import MemoryCheckpoint

            return MemoryCheckpoint(found, here.snapshots)
        return found

    def _trust_agent(self, name: str) -> None:
        """Do not read again what the agent verified before it started this worker, unless it has changed since."""
        from holdfast.checkpoint.known_files import process_wide
        from holdfast.storage.store import Digest

        files, self._verified = self._verified, []
        for file in files:
            digest = Digest(file.size_bytes, file.blake3)
            process_wide.remember(self._open_store(), f"{name}/{file.path}", digest, file.version)

    def checkpoint_at(self, uri: str | None) -> str | None:
        """The name of the checkpoint at `uri`; None if that is not in this run's directory."""
        if uri is None:
            return None
        from holdfast.storage.uri import split

        with suppress(HoldfastError):  # it cannot be the name of a checkpoint
            name = check_name(split(uri)[1])
            return name if self._open_store().sub(name).uri == uri else None
        return None

    def _open_store(self) -> Store:
        if self._store is None:
            from holdfast.storage.locate import open_store

            self._store = open_store(self.assignment.storage, self._filesystem)
        return self._store

    # ------------------------------------------------------------------ what is saved of this rank

    def save_with_reports(self, name: str, capture: Callable[[], Any]) -> None:
        """Have what `capture` gives at each report (plain data) saved with the checkpoint that the report may be."""
        self._captures[name] = capture

    @property
    def saved_names(self) -> tuple[str, ...]:
        """What is saved with reports."""
        return tuple(self._captures)

    def saved_states(self, name: str) -> tuple[dict[int, Any], int]:
        """What ranks saved as `name` with the checkpoint that this generation started from, by rank, and how many ranks
        there were then. Nothing, and 0, where there is no such checkpoint or it has none."""
        if self.assignment.checkpoint is None:
            return {}, 0
        if self._restored is None:
            from holdfast.checkpoint.worker_states import WorkerStates, read_worker_states

            found = read_worker_states(self._open_store(), self.assignment.checkpoint)
            self._restored = found or WorkerStates(world_size=0, ranks={})
        states = self._restored.ranks.items()
        return {rank: state[name] for rank, state in states if name in state}, self._restored.world_size

    def drop_saved_states(self, name: str) -> None:
        """What ranks saved as `name` has been restored, and must not be again."""
        if self._restored is not None:
            for state in self._restored.ranks.values():
                state.pop(name, None)

    def _capture_state(self) -> bytes:
        if not self._captures:
            return b""
        return msgspec.json.encode({name: capture() for name, capture in self._captures.items()})

    # ------------------------------------------------------------------ nodes that are taken away

    def preemption(self) -> Preemption | None:
        """What this rank has been told of nodes that are about to be taken away; waits for nobody."""
        self._check_process()
        with self._lock:
            self._agent.drain()
            return self._agent.preemption

    # ------------------------------------------------------------------ collectives

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self._check_process()
        self._collect(CollectiveKind.BARRIER, None)

    def broadcast_from_rank_zero(self, data: Any) -> Any:
        """Rank 0's `data`, on every rank; what others pass is ignored."""
        self._check_process()
        import cloudpickle

        mine = cloudpickle.dumps(data) if self.assignment.rank == 0 else None
        return cloudpickle.loads(self._collect(CollectiveKind.BROADCAST, mine))  # a worker's own, of the same run

    def _collect(self, kind: CollectiveKind, data: Any) -> Any:
        with self._lock:
            return self._agent.collect(kind, data)

    def _send(self, message: WorkerMessage) -> None:
        self._agent.send(message)

    def note(self, text: str) -> None:
        """Send a line of Holdfast's own to the worker's log and the driver's terminal."""
        if os.getpid() == self._pid:
            with self._lock:
                self._send(Note(text=text))

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                "holdfast.train was called in a process that the training function forked (a DataLoader worker?): "
                "call it from the training function's own process."
            )


_current: Session | None = None


def install(session: Session | None) -> None:
    """Make `session` the one of this process; None removes it."""
    global _current
    _current = session


def installed() -> Session | None:
    """The one of this process; None where it is no worker."""
    return _current


def is_installed() -> bool:
    """Whether this process is a worker of a run."""
    return _current is not None


def note(text: str) -> None:
    """`Session.note` of this process's session; nothing where there is none."""
    if _current is not None:
        _current.note(text)


def current(what: str = "train.report()") -> Session:
    """This process's session; `what` is the call that needs it, for the error outside of a training function."""
    if _current is None:
        raise RuntimeError(
            f"{what} works only inside a training function: give that function to a trainer, such as "
            "TorchTrainer(train_loop_per_worker, ...), and call fit()."
        )
    return _current


def _check_type(checkpoint: Any, what: str = "") -> Checkpoint:
    from holdfast.checkpoint.handle import Checkpoint

    if not isinstance(checkpoint, Checkpoint):
        where = f"{what} must return" if what else "train.report(checkpoint=...) takes"
        raise TypeError(
            f"{where} a Checkpoint, not {type(checkpoint).__name__}: "
            "write Checkpoint.from_directory(path) or Checkpoint.from_state(state)."
        )
    return checkpoint


def _is_state(checkpoint: Checkpoint) -> bool:
    from holdfast.checkpoint.state.handle import StateCheckpoint

    return isinstance(checkpoint, StateCheckpoint)


def _file_names(part: Part | None) -> tuple[str, ...]:
    """The paths of a part's files; none of what lies in storage already, where every rank means the same files."""
    match part:
        case StagedPart(directory):
            return tuple(sorted(staged_files(Path(directory))))
        case Snapshot(files=files):
            return tuple(sorted(file.path for file in files))
        case _:
            return ()


def _upload_mode(mode: CheckpointUploadMode | None, delete_local: bool | None) -> tuple[CheckpointUploadMode, bool]:
    """What was asked for, with the defaults of those who named a mode: ASYNC then lets the directory go."""
    if mode is not None and not isinstance(mode, CheckpointUploadMode):
        raise ConfigError(
            f"checkpoint_upload_mode must be a CheckpointUploadMode (SYNC, ASYNC or NO_UPLOAD), not {mode!r}."
        )
    if delete_local is None:
        delete_local = mode is not None and mode.default_delete_local_checkpoint_after_upload()
    return mode or CheckpointUploadMode.ASYNC, delete_local
