"""Local mode under torchrun: each of its processes runs the training function itself, with the rank that it has there.

Rank 0 is the run: it holds the lease and writes everything, as local mode does in one process. The other ranks write
nothing. They are told by rank 0 from which checkpoint to start, and meet it in the collectives of `holdfast.train`,
over the store at MASTER_ADDR:MASTER_PORT that torchrun's processes have in common (`torch.distributed.rendezvous`).
`bootstrap` runs the function; `holdfast.train.trainer` decides who does what.
"""

from __future__ import annotations

import datetime
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.checkpoint.layout import check_name
from holdfast.errors import ConfigError, RunError
from holdfast.wire.messages import CollectiveKind
from holdfast.worker.import_tracking import ImportTrackingSession
from holdfast.worker.job import Assignment, Job
from holdfast.worker.plain_data import plain_metrics
from holdfast.worker.session import Session

if TYPE_CHECKING:
    from holdfast.checkpoint.handle import Checkpoint

__all__ = ["OtherRankSession", "RankZeroSession", "TorchrunStart", "Torchrun"]

_SIGNALS_EVERY = datetime.timedelta(seconds=1)
"""A wait for the store is cut into pieces of this length, for Python answers signals in between only."""

_LEFT = "left"
"""What a rank puts into the store when it takes part in no collective any more."""

_NO_MORE = 2**62
"""The number of rank 0's last report, once its function has returned."""

_store: Any = None
"""One connection for all runs of this process. Where rank 0 serves the store, it does so as long as this lives."""
_runs = 0
"""How many times this process has called fit() under torchrun: the same in every process of one script."""


class TorchrunStart(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 sends the others before its function is called; without an assignment the run is complete."""

    storage: str
    assignment: Assignment | None = None


class _StoreAnswer(msgspec.Struct, frozen=True, kw_only=True):
    data: Any = None
    error: str | None = None


class Torchrun:
    """This process's place in torchrun's group, and its connection to the others, for one `fit()`."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.rank = int(variables["RANK"])
        self.world_size = int(variables["WORLD_SIZE"])
        self._local_rank = int(variables["LOCAL_RANK"])
        self._local_world_size = int(variables["LOCAL_WORLD_SIZE"])
        self._node_rank = int(variables["GROUP_RANK"])
        self._node_count = int(variables["GROUP_WORLD_SIZE"])
        self._restart_count = int(variables["TORCHELASTIC_RESTART_COUNT"])
        self._max_restarts = int(variables["TORCHELASTIC_MAX_RESTARTS"])
        self._master = (variables["MASTER_ADDR"], int(variables["MASTER_PORT"]))
        self._others = range(1, self.world_size)
        self._prefix = ""
        self._sequence = 0
        self._started = False

    def connect(self) -> None:
        """Reach the store. Nobody else may have used this place in it: torchrun may keep one store for several
        incarnations of its group, and what an earlier one said must not be taken for an answer."""
        global _store, _runs
        if _store is None:
            import torch.distributed as dist

            _store, _, _ = next(iter(dist.rendezvous("env://")))
        _runs += 1
        self._prefix = f"holdfast/{self._restart_count}/{_runs}"
        if _store.add(f"{self._prefix}/here/{self.rank}", 1) != 1:
            raise RunError(
                f"torchrun started rank {self.rank} again with the store of the processes before it, in which their "
                "messages still are: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or start torchrun again."
            )

    def place(self, assignment: Assignment) -> Assignment:
        """The assignment that rank 0's controller made for a group of one, with this process's true place."""
        return msgspec.structs.replace(
            assignment,
            rank=self.rank,
            local_rank=self._local_rank,
            node_rank=self._node_rank,
            world_size=self.world_size,
            local_world_size=self._local_world_size,
            node_count=self._node_count,
            master_address=self._master[0],
            master_port=self._master[1],
            restart_count=self._restart_count,
            max_restarts=self._max_restarts,
        )

    # ------------------------------------------------------------------ rank 0

    def start(self, assignment: Assignment) -> None:
        """Tell the others that the function is about to be called. It can be called once: the other processes cannot
        be started again from here."""
        if self._started:
            raise RunError(
                "Under torchrun the function cannot be called again in the same processes after a failure: start "
                "torchrun again (or let it, with --max-restarts), and the run continues."
            )
        self._started = True
        plain = msgspec.structs.replace(assignment, buffers=[], snapshots=[], verified=[])
        self.collect("start", msgspec.to_builtins(TorchrunStart(storage=assignment.storage, assignment=plain)))

    def finish(self, storage: str) -> None:
        """The run is complete, and maybe was before: let the others return, and wait until they know."""
        if self._started:
            self.collect("end", None)
        else:
            self.collect("start", msgspec.to_builtins(TorchrunStart(storage=storage)))
        self._wait([self._key("left", rank) for rank in self._others])

    def fail(self, why: str) -> None:
        """Send the others why this rank does not go on, if they still read; torchrun ends them in any case."""
        self._sequence += 1
        with suppress(RuntimeError):  # the store has gone, and with it torchrun
            self._set(self._key(self._sequence, 0), _StoreAnswer(error=why))

    def publish_report(self, number: int, file_names: list[str] | None) -> None:
        """Tell the others that rank 0 makes its `number`-th report, and which files its checkpoint has."""
        if file_names is not None:
            _store.set(self._key(f"files/{number}", 0), msgspec.json.encode(file_names))
        _store.set(self._key("reports", 0), str(number).encode())

    # ------------------------------------------------------------------ the other ranks

    def await_file_names(self, number: int) -> set[str]:
        """The files of the checkpoint that rank 0 gives with its `number`-th report; none if it gives no directory."""
        files, reports = self._key(f"files/{number}", 0), self._key("reports", 0)
        while not self._is_set([files]):
            if self._is_set([reports]) and int(_store.get(reports)) >= number and not self._is_set([files]):
                return set()
        return set(msgspec.json.decode(_store.get(files), type=list[str]))

    def await_start(self) -> TorchrunStart:
        return msgspec.convert(self.collect("start", None), TorchrunStart)

    def await_end(self) -> None:
        self.collect("end", None)

    def leave(self) -> None:
        """The last message of a rank: rank 0 may end, and the store with it, without waiting for this rank."""
        with suppress(RuntimeError):  # they have gone already
            _store.set(self._key(self._sequence + 1, self.rank), _LEFT.encode())
            _store.set(self._key("left", self.rank), b"")

    # ------------------------------------------------------------------ all

    def returning_together(self, job: Job) -> Job:
        """The job with a function that returns once it has on every rank: before that the run is not finished."""

        def function(*arguments: Any) -> Any:
            value = job.function(*arguments)
            if self.rank == 0:
                self.publish_report(_NO_MORE, None)
            self.collect("return", None)
            return value

        return replace(job, function=function)

    def collect(self, kind: str, data: Any) -> Any:
        """Meet all ranks; rank 0's `data`, on every rank."""
        self._sequence += 1
        number = self._sequence
        if self.rank != 0:
            _store.set(self._key(number, self.rank), kind.encode())
            self._wait([self._key(number, 0)])
            answer = msgspec.msgpack.decode(_store.get(self._key(number, 0)), type=_StoreAnswer)
            if answer.error is not None:
                raise RunError(f"Rank 0 does not go on, and so rank {self.rank} cannot: {answer.error}")
            return answer.data
        self._wait([self._key(number, rank) for rank in self._others])
        for rank in self._others:
            theirs = _store.get(self._key(number, rank)).decode()
            if theirs == _LEFT:
                raise RunError(f"Rank {rank} has ended before rank 0 was done; its own error says why.")
            if theirs != kind:
                raise RunError(
                    f"Rank 0 is at {kind!r} and rank {rank} at {theirs!r}: every rank must call the functions of "
                    "holdfast.train.collective and should_checkpoint() equally often and in the same order."
                )
        self._set(self._key(number, 0), _StoreAnswer(data=data))
        for rank in range(self.world_size):  # whoever has come here has read the answer before
            _store.delete_key(self._key(number - 1, rank))
        return data

    def _key(self, what: int | str, rank: int) -> str:
        return f"{self._prefix}/{what}/{rank}"

    def _set(self, key: str, answer: _StoreAnswer) -> None:
        _store.set(key, msgspec.msgpack.encode(answer))

    def _wait(self, keys: list[str]) -> None:
        while not self._is_set(keys):
            pass

    def _is_set(self, keys: list[str]) -> bool:
        """Wait for one period at most until all `keys` are in the store."""
        import torch.distributed as dist

        try:
            _store.wait(keys, _SIGNALS_EVERY)
        except dist.DistStoreError:  # not yet
            return False
        except dist.DistNetworkError as error:
            raise RunError(
                f"Rank {self.rank} has lost the store of torchrun at {self._master[0]}:{self._master[1]}: rank 0 "
                "or torchrun itself has ended."
            ) from error
        return True


class RankZeroSession(ImportTrackingSession):
    """Rank 0's session: reports go to its own agent, collectives to all processes of torchrun."""

    def __init__(
        self, torchrun: Torchrun, connection: socket.socket, assignment: Assignment, filesystem: object | None
    ) -> None:
        super().__init__(None, connection, torchrun.place(assignment), filesystem)
        self._torchrun = torchrun

    def report(self, metrics: Mapping[str, Any], checkpoint: Checkpoint | None = None, *others: Any) -> None:
        number = self._number + 1
        file_names = _file_names(checkpoint)
        super().report(metrics, checkpoint, *others)
        self._torchrun.publish_report(number, file_names)

    def _collect(self, kind: CollectiveKind, data: Any) -> Any:
        with self._lock:
            if kind is CollectiveKind.CHECKPOINT_INTERVAL:
                data = self._agent.collect(kind, data)  # only the run knows; the others get its answer
            return self._torchrun.collect(kind, data)


class OtherRankSession(Session):
    """The session of a rank other than 0, which has no agent: `metrics` are its own last report, and go nowhere."""

    def __init__(self, torchrun: Torchrun, assignment: Assignment, filesystem: object | None) -> None:
        connection, self._silent = socket.socketpair()  # nothing is ever said on it
        self._connection = connection
        super().__init__(connection, torchrun.place(assignment), filesystem)
        self._torchrun = torchrun
        self.metrics: dict[str, Any] | None = None
        self._report_count = 0

    def close(self) -> None:
        super().close()
        self._connection.close()
        self._silent.close()

    def report(
        self,
        metrics: Mapping[str, Any],
        checkpoint: Checkpoint | None = None,
        checkpoint_dir_name: str | None = None,
        *others: Any,
    ) -> None:
        """Check what is reported; only rank 0's is kept."""
        self._check_process()
        plain = plain_metrics(metrics)
        if checkpoint_dir_name is not None:
            check_name(checkpoint_dir_name)
        self._report_count += 1
        if checkpoint is not None:
            self._check_files(checkpoint)
        self.metrics = dict(plain)

    def _check_files(self, checkpoint: Checkpoint) -> None:
        """The lowest rank that gives a file name owns it, so what rank 0 gives too is not missed. Nothing else can be
        kept: this rank has no agent."""
        names = _file_names(checkpoint)
        missed = set(names or ()) - self._torchrun.await_file_names(self._report_count) if names != [] else ()
        if names is None or missed:
            what = f"a checkpoint with {min(missed)!r}" if missed else "a checkpoint"
            raise ConfigError(
                f"train.report(checkpoint=...) on rank {self.assignment.rank}: with num_workers=0 under torchrun only "
                f"rank 0 can give {what}; gather it there, or let Holdfast start the workers "
                f"(`python` instead of torchrun, and num_workers={self.assignment.world_size})."
            )

    def note(self, text: str) -> None:
        """Nobody listens."""

    def _collect(self, kind: CollectiveKind, data: Any) -> Any:
        with self._lock:
            return self._torchrun.collect(kind, data)


def _file_names(checkpoint: object) -> list[str] | None:
    """The relative names of the files of a checkpoint that is a local directory."""
    from holdfast.checkpoint.handle import Checkpoint
    from holdfast.checkpoint.state.handle import StateCheckpoint

    if not isinstance(checkpoint, Checkpoint) or isinstance(checkpoint, StateCheckpoint):
        return None
    directory = Path(checkpoint.path)
    if not directory.is_dir():
        return None
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
