"""The driver of a caller outside the cluster: a process on the cluster's head, which calls the caller's `fit()` there.

`engines.ray.driver_actor` starts it, `remote_fit` sends the job and reads the outcome. The caller gets no pickle back:
an outcome is what the run's directory says of it, in the types of the journal.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.agent.code_directory import map_paths, unpack
from holdfast.control.history import read_history
from holdfast.control.view import RunView
from holdfast.core.json_floats import tag_floats, untag_floats
from holdfast.core.records import Reported, RunFailed
from holdfast.engines.ray.driver_actor import JOB_FILE, OUTCOME_FILE
from holdfast.errors import HoldfastError, TrainingFailedError
from holdfast.journal.format import Line
from holdfast.storage.locate import open_store
from holdfast.train.interrupted import Interrupted
from holdfast.train.runtime import init

if TYPE_CHECKING:
    from holdfast.control.request import TrainRequest
    from holdfast.train.trainer import DataParallelTrainer

__all__ = [
    "DriverJob",
    "DriverOutcome",
    "SentCode",
    "decode_outcome",
    "encode_outcome",
    "main",
    "trainer_outcome",
]


class SentCode(msgspec.Struct, frozen=True, kw_only=True):
    """The caller's working directory."""

    root: str
    archive: bytes
    hash: str


class DriverJob(msgspec.Struct, frozen=True, kw_only=True):
    """What the process shall do."""

    pickled: bytes
    """A trainer or a tuner, by value."""
    code: SentCode | None
    sys_path: Sequence[str]
    command: Sequence[str]
    """The caller's, for what people are told to type."""
    environment: dict[str, str]
    """Settings of the caller's that are about the run."""
    runtime_env: dict[str, Any]
    """What `holdfast.init` was given."""


class DriverOutcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What came of it: exactly one of `view`, `failure`, `lines`, `interrupted_by` and `error` is there."""

    uri: str = ""
    """The run's directory as a person would write it."""
    view: RunView | None = None
    reports: list[Reported] | None = None
    """Of the run of the view; None: those are in storage only."""
    failure: RunFailed | None = None
    lines: list[Line] | None = None
    """The journal of an experiment."""
    experiment_id: str = ""
    interrupted_by: str = ""
    error: tuple[str, str] | None = None
    """Class and text of what else `fit()` raised."""


def encode_outcome(outcome: DriverOutcome) -> bytes:
    """As JSON, which takes whatever the journal does: numbers of any size, and those that are not finite."""
    return msgspec.json.encode(tag_floats(msgspec.to_builtins(outcome)))


def decode_outcome(data: bytes) -> DriverOutcome:
    """The inverse of `encode_outcome`."""
    return msgspec.convert(untag_floats(msgspec.json.decode(data)), DriverOutcome, str_keys=True)


def trainer_outcome(trainer: DataParallelTrainer, request: TrainRequest) -> DriverOutcome:
    """Call `fit()` of a trainer; `request` is what it will ask for."""
    try:
        result = trainer.fit()
    except TrainingFailedError:
        store = open_store(request.storage_path, request.filesystem).sub(request.name)
        ended = read_history(store).durable.outcome
        if not isinstance(ended, RunFailed):
            raise
        return DriverOutcome(uri=store.uri, failure=ended)
    assert result._view is not None
    return DriverOutcome(view=replace(result._view, error=None))


def main(directory: str) -> None:
    """Do the job in this directory, and write the outcome there."""
    here = Path(directory)
    # Ray has its processes, and what they start, begin with SIGINT blocked.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    actor_is_gone = threading.Event()
    threading.Thread(target=_end_with_actor, args=(actor_is_gone,), daemon=True).start()
    try:
        outcome = _outcome_or_interruption(here)
        draft = here / f"{OUTCOME_FILE}.draft"
        draft.write_bytes(encode_outcome(outcome))
        draft.rename(here / OUTCOME_FILE)
    finally:
        if actor_is_gone.is_set():  # which would have removed it
            shutil.rmtree(here, ignore_errors=True)


def _outcome_or_interruption(here: Path) -> DriverOutcome:
    try:
        return _outcome(here)
    except Interrupted as error:
        return DriverOutcome(interrupted_by=error.why)
    except KeyboardInterrupt:
        return DriverOutcome(interrupted_by="Ctrl+C")
    except HoldfastError as error:
        return DriverOutcome(error=(f"{type(error).__module__}.{type(error).__qualname__}", str(error)))


def _outcome(here: Path) -> DriverOutcome:
    job = msgspec.msgpack.decode((here / JOB_FILE).read_bytes(), type=DriverJob)
    (here / JOB_FILE).unlink()
    code = here / "code"
    code.mkdir()
    root = ""
    if job.code is not None:
        unpack(job.code.archive, job.code.hash, code)
        root = job.code.root
    os.chdir(code)
    sys.path[:] = list(dict.fromkeys([*map_paths(job.sys_path, root or str(code), code), *sys.path]))
    sys.orig_argv = list(job.command)
    os.environ.update({**job.environment, **job.runtime_env.get("env_vars", {})})
    init(runtime_env=job.runtime_env)
    import cloudpickle

    outcome: DriverOutcome = cloudpickle.loads(job.pickled)._outcome_as_driver()
    return outcome


def _end_with_actor(actor_is_gone: threading.Event) -> None:
    """Stop the run, as SIGTERM does, when the actor above is gone; nobody else would end this process."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    actor_is_gone.set()
    os.kill(os.getpid(), signal.SIGTERM)
