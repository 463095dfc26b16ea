"""Runs the training function in a worker: sets up environment, session and framework, calls it, sends how it ended.

The zygote calls `run_worker` in a forked child, `cold_start` in a fresh process, and local mode `run_inline` in the
user's own (`run_other_rank` in those of torchrun's that are not rank 0). How it ended is sent over the connection
(`WorkerFinished`, `WorkerExited`) before the process ends; a `WorkerFinished` counts only if the process then exits
with 0.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from holdfast.core.events import WorkerExited, WorkerFinished
from holdfast.core.failure_kind import FailureKind
from holdfast.core.records import WorkerFailure
from holdfast.errors import RunError, WireError
from holdfast.linux.process import name_process, prefer_for_oom_kill
from holdfast.wire import frames
from holdfast.worker import session as sessions
from holdfast.worker.environment import (
    NO_TERMINAL,
    enter_work_dir,
    refresh_randomness,
    refuse_breakpoints,
    set_environment,
    set_torch_threads,
    use_temp_dir,
)
from holdfast.worker.failure import damage_behind, failure_of
from holdfast.worker.import_tracking import ImportTrackingSession
from holdfast.worker.job import Assignment, Job
from holdfast.worker.job_loader import Loaded, unpickling_failure
from holdfast.worker.main_module import send_main_by_value
from holdfast.worker.return_value import encode_value
from holdfast.worker.stdio import WorkerFds, watch_for_crashes
from holdfast.worker.torchrun import OtherRankSession, RankZeroSession, Torchrun

__all__ = ["RETURN_VALUE_LIMIT_BYTES", "ForkContext", "release_port", "run_inline", "run_other_rank", "run_worker"]


RETURN_VALUE_LIMIT_BYTES = 64 * 1024 * 1024
"""It is kept in the journal, which every later driver reads."""


@dataclass(frozen=True, slots=True)
class ForkContext:
    """What a forked worker gets from its zygote besides the job; the zygote looks it up once for all workers."""

    last_module: str
    """Of those that the zygote has imported: what comes after it in `sys.modules` is the worker's own."""


def run_worker(
    loaded: Loaded, assignment: Assignment, worker_fds: WorkerFds, fork_context: ForkContext | None = None
) -> NoReturn:
    """Be the worker of `assignment`; standard output and error are set already."""
    code = 1
    try:
        name_process(f"hf-rank-{assignment.rank}")
        if fork_context is not None:
            prefer_for_oom_kill()  # a cold worker did so before it opened the job
        watch_for_crashes(worker_fds.dump)
        connection = socket.socket(fileno=worker_fds.connection)
        set_environment(assignment)
        use_temp_dir(assignment)
        if assignment.served is not None:
            from holdfast.streaming.client import use_streamed

            use_streamed(assignment.served)
        last_module = None
        if fork_context is not None:
            last_module = fork_context.last_module
            refresh_randomness()
            set_torch_threads()
        job = _with_config(loaded.job, assignment)
        session = _make_session(job, assignment, connection, last_module)
        if session is not None and not isinstance(job, WorkerFailure):
            send_main_by_value()
            refuse_breakpoints()
            code = _run_job(job, session, connection, worker_fds.listen)
            _exit_like_python(code)
    except BaseException:  # noqa: BLE001  ours, or of something that runs at exit: the last words go to the log
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _exit_like_python(code: int) -> None:
    """What the interpreter does at its end: wait for threads that are no daemons, and run what was left to `atexit`.
    After an error nothing is waited for."""
    if code == 0:
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def run_inline(
    job: Job,
    environment: Mapping[str, str],
    assignment: Assignment,
    connection: socket.socket,
    listen_fd: int | None,
    torchrun: Torchrun | None = None,
) -> int:
    """Be the worker inside the calling process, for a debugger's sake, or as rank 0 of torchrun's processes."""
    filesystem = _open_filesystem(assignment.filesystem)  # pickled by this very process
    if torchrun is None:
        session = ImportTrackingSession(None, connection, assignment, filesystem)
        with _restored(session, environment):
            set_environment(assignment)
            return _run_job(job, session, connection, listen_fd)
    if listen_fd is not None:
        os.close(listen_fd)  # torchrun has a port of its own
    try:
        torchrun.start(assignment)
    except RunError as error:
        _send_failure(connection, assignment, failure_of(error, assignment.rank))
        return 1
    session = RankZeroSession(torchrun, connection, assignment, filesystem)
    with _restored(session, environment):
        return _run_job(torchrun.returning_together(job), session, connection, None)


def run_other_rank(job: Job, session: OtherRankSession, variables: Mapping[str, str]) -> None:
    """Run the function as a rank of torchrun's that is not 0; raises what the function raises."""
    with _restored(session, variables):
        sessions.install(session)
        try:
            _call(job, session.assignment, None)
        finally:
            if job.framework is not None:
                job.framework.shutdown()


@contextmanager
def _restored(session: sessions.Session, variables: Mapping[str, str]) -> Iterator[None]:
    """A worker's surroundings inside the calling process, which gets its directory and environment back."""
    environment, directory = dict(os.environ), os.getcwd()  # noqa: PTH109
    outer = sessions.installed()  # of the worker that has started this run, if one has
    try:
        os.environ.update(variables)
        enter_work_dir(session.assignment)
        yield
    finally:
        sessions.install(outer)
        session.close()
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)


def _run_job(job: Job, session: ImportTrackingSession, connection: socket.socket, listen_fd: int | None) -> int:
    """Run the function and send how it ended; gives the process's exit code."""
    here, pid = session.assignment, os.getpid()
    sessions.install(session)
    try:
        value = _call(job, here, listen_fd)
        session.finish()
        if job.framework is not None:
            job.framework.shutdown()
    except BaseException as error:
        if os.getpid() != pid:
            raise  # a process that the function forked and let escape: its end is not the worker's
        session.abandon()
        # Sent first: to shut a framework down while its peers hang may take for ever.
        _send_failure(connection, here, _failure(error, session))
        if job.framework is not None:
            with suppress(Exception):
                job.framework.shutdown()
        return 1
    if os.getpid() != pid:
        os._exit(0)
    with suppress(WireError):
        session.send_imports()
    frames.send(connection, _finished(here, value))
    return 0


def _call(job: Job, assignment: Assignment, listen_fd: int | None) -> Any:
    if job.framework is not None:
        job.framework.setup(assignment, listen_fd)
    elif listen_fd is not None:
        release_port(listen_fd)
    try:
        if job.takes_config:
            return job.function(job.config if job.config is not None else {})
        return job.function()
    except sessions.TrainingStopped:
        return None


def release_port(listen_fd: int) -> None:
    """Close the listening socket of MASTER_PORT, so that the function or a library can bind it, as under torchrun. The
    processes by way of which it came here may not have closed theirs yet, so it is shut down for all of them."""
    with socket.socket(fileno=listen_fd) as listener:
        listener.shutdown(socket.SHUT_RDWR)


def _failure(error: BaseException, session: ImportTrackingSession) -> WorkerFailure:
    """What `error` was, and which of the run's checkpoints is damaged if it says that one is."""
    failure = failure_of(error, session.assignment.rank, _our_frames(error), _hint(error))
    if (damage := damage_behind(error)) is not None:
        name = session.checkpoint_at(damage.checkpoint)
        failure = msgspec.structs.replace(failure, kind=FailureKind.DAMAGED, damaged_checkpoint=name)
    return failure


def _hint(error: BaseException) -> str:
    """What to do about an error that has to do with the worker's surroundings."""
    if type(error).__module__ == "bdb":
        return f"\nA debugger found no input: {NO_TERMINAL}"
    return _path_hint(error)


def _path_hint(error: BaseException) -> str:
    """Where a relative path that was not found would have been, if that is the driver's directory."""
    name, directory = getattr(error, "filename", None), os.environ.get("TUNE_ORIG_WORKING_DIR")
    if (
        not isinstance(error, FileNotFoundError)
        or not isinstance(name, str)
        or not directory
        or Path(name).is_absolute()
    ):
        return ""
    meant = Path(directory, name)
    if not meant.exists():
        return ""
    return (
        f"\n{meant} is there: workers run in a directory of the run's, so write the whole path, join it to "
        'os.environ["TUNE_ORIG_WORKING_DIR"], or set HOLDFAST_CHDIR_TO_TRIAL_DIR=0.'
    )


def _send_failure(connection: socket.socket, assignment: Assignment, failure: WorkerFailure) -> None:
    frames.send(connection, WorkerExited(generation=assignment.generation, failure=failure))


def _our_frames(error: BaseException) -> int:
    """How many frames of `_run_job` and `_call` stand above the user's."""
    count, trace = 0, error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        count, trace = count + 1, trace.tb_next
    return count


def _finished(assignment: Assignment, value: Any) -> WorkerFinished:
    here: dict[str, Any] = {"generation": assignment.generation, "rank": assignment.rank}
    if assignment.rank != 0:
        return WorkerFinished(**here)
    try:
        finished = WorkerFinished(**here, value=encode_value(value))
    except (TypeError, ValueError) as error:
        return WorkerFinished(**here, value_error=str(error))
    size_bytes = len(msgspec.msgpack.encode(finished))
    if size_bytes <= RETURN_VALUE_LIMIT_BYTES:
        return finished
    limit_mib = RETURN_VALUE_LIMIT_BYTES >> 20
    why = f"it has {size_bytes / (1 << 20):.1f} MiB, more than the {limit_mib} MiB that are kept"
    return WorkerFinished(**here, value_error=f"The return value is None: {why}; report large results as a checkpoint.")


def _with_config(job: Job | WorkerFailure, assignment: Assignment) -> Job | WorkerFailure:
    """The job with the run's configuration; or why that cannot be opened."""
    if assignment.config is None or isinstance(job, WorkerFailure):
        return job
    import cloudpickle

    try:
        return replace(job, config=cloudpickle.loads(assignment.config))
    except BaseException as error:  # noqa: BLE001  unpickling runs the user's code, which may raise or exit at will
        return unpickling_failure(error, assignment.rank)


def _make_session(
    job: Job | WorkerFailure, assignment: Assignment, connection: socket.socket, last_module: str | None
) -> ImportTrackingSession | None:
    """The session, or None when there can be none: the failure is sent then."""
    rank = assignment.rank
    if isinstance(job, WorkerFailure):
        failure = msgspec.structs.replace(job, rank=rank)
    else:
        try:
            enter_work_dir(assignment)
            return ImportTrackingSession(last_module, connection, assignment, _open_filesystem(assignment.filesystem))
        except BaseException as error:  # noqa: BLE001  a filesystem's own code may raise anything
            failure = failure_of(error, rank)
    _send_failure(connection, assignment, failure)
    return None


def _open_filesystem(pickled: bytes | None) -> object | None:
    if pickled is None:
        return None
    import cloudpickle

    filesystem: object = cloudpickle.loads(pickled)
    return filesystem
