"""An agent that is forked from the driver, and so has imported already what the driver has.

`forked_agent` is called first thing in `fit()`, before threads of ours start. It forks in a thread that has done
nothing else: the child's stack is empty, settings of the driver's main thread do not reach it, and neither do thread
pools that belong to that thread (OpenMP's). The child puts itself in order (`zygote.driver_fork_reset`), waits for what
`local` would have put on an agent's command line, and is an agent like any other. The first zygote is forked from it
at once, and imports what the function will need while the driver sets up the run. Where a driver is not fit for all
that (`zygote.driver_fork_safety`), there is no such agent, and the log says why.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import logging
import os
import queue
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from holdfast.linux.process import thread_names
from holdfast.storage.run_secret import SECRET_VARIABLE
from holdfast.worker.environment import one_openblas_thread
from holdfast.zygote.driver_fork_safety import unfit_reason, user_modules

__all__ = ["ForkedAgent", "forked_agent"]

_log = logging.getLogger("holdfast")
_STACK_BYTES = 16 * 1024 * 1024
"""Of the thread that forks, which is the main thread of the agent, the zygote and the workers."""
_ANSWER_S = 10.0
_THREADS_GONE_S = 1.0
_OWN_THREADS_GONE_S = 5.0
_FIT = b"fit"
_ending: list[int] = []
"""Threads that forked an agent which has ended: they end, too, and must have before the next fork."""


class ForkedAgent:
    """A child of the driver that waits to be told what to do; used by `local` as it uses a `subprocess.Popen`."""

    def __init__(self, pid: int, connection: socket.socket, parent_may_end: _thread.LockType) -> None:
        """Made in the thread that has forked it, which ends when `parent_may_end` is released."""
        self.pid = pid
        self._parent_thread = _thread.get_native_id()
        self.is_started = False
        self._connection = connection
        self._parent_may_end = parent_may_end
        self._code: int | None = None

    def start(self, arguments: list[str], token_fd: int) -> None:
        """Be an agent with this command line; `--token-fd` is added to it."""
        self.is_started = True
        with self._connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its death is noticed
            socket.send_fds(self._connection, [msgspec.msgpack.encode(arguments)], [token_fd])

    def kill(self) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Wait for its end; the exit code, or the negative signal."""
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self._connection.close()  # nobody has started it
            # The kernel counts the thread that forked it as its parent, whose end it would have been told.
            self._parent_may_end.release()
            _ending.append(self._parent_thread)
        return self._code


@contextlib.contextmanager
def forked_agent(environment: Mapping[str, str], preload: Sequence[str] = ()) -> Iterator[ForkedAgent | None]:
    """An agent forked from this process, where it is fit for that; if nobody starts it in the block, it ends with it.
    `environment` is what workers will get besides the driver's; its zygote imports the modules `preload` at once."""
    agent = _fork_agent(environment, preload)
    try:
        yield agent
    finally:
        if agent is not None and not agent.is_started:
            agent.kill()
            agent.wait()


def _fork_agent(environment: Mapping[str, str], preload: Sequence[str]) -> ForkedAgent | None:
    _wait_for_ending_threads()
    reason = "HOLDFAST_TOKEN is set" if SECRET_VARIABLE in os.environ else unfit_reason(environment)
    if reason is None:
        answer = _fork_in_thread(preload)
        if isinstance(answer, ForkedAgent):
            _log.info("The agent is forked from the driver.")
            return answer
        reason = answer
    _log.info("The agent is started as a new process: %s.", reason)
    return None


def _wait_for_ending_threads() -> None:
    deadline = time.monotonic() + _OWN_THREADS_GONE_S
    while any(Path(f"/proc/self/task/{one}").exists() for one in _ending) and time.monotonic() < deadline:
        time.sleep(0.001)
    _ending.clear()


def _fork_in_thread(preload: Sequence[str]) -> ForkedAgent | str:
    """Fork in another thread, which lives as long as the agent; or why that failed."""
    answers: queue.SimpleQueue[ForkedAgent | str] = queue.SimpleQueue()
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()  # type: ignore[union-attr]  # or the child would have it, too
    ctypes.CDLL(None).fflush(None)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        # As in a zygote, which imports it with one thread: to set this in the child would start threads there.
        with one_openblas_thread():
            before = _thread.stack_size(_STACK_BYTES)
            try:
                _thread.start_new_thread(_fork, (answers, mask, user_modules(), preload))
            finally:
                _thread.stack_size(before)
            return answers.get()
    except RuntimeError as error:  # no thread can be started
        return str(error)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _fork(
    answers: queue.SimpleQueue[ForkedAgent | str],
    mask: set[int | signal.Signals],
    modules: Sequence[str],
    preload: Sequence[str],
) -> None:
    """The thread. Returns when the agent has ended."""
    parent_may_end = _thread.allocate_lock()
    parent_may_end.acquire()
    try:
        ours, theirs = socket.socketpair()
        with theirs, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside a thread, which waits for this one
            pid = os.fork()
            if pid == 0:
                _be_agent(theirs, mask, modules, preload)
    except OSError as error:
        answers.put(f"the driver cannot be forked ({error.strerror})")
        return
    agent = ForkedAgent(pid, ours, parent_may_end)
    if (reason := _threads_that_stayed() or _answer(ours)) is not None:
        ours.close()
        agent.kill()
        agent.wait()
        answers.put(reason)
        return
    answers.put(agent)
    parent_may_end.acquire()


def _threads_that_stayed() -> str | None:
    """OpenBLAS has ended its threads for the fork. If there are others, the child may lack something that one of them
    held or was about to do."""
    deadline = time.monotonic() + _THREADS_GONE_S
    while (extra := len(thread_names()) - 2) > 0:  # this one, and the main thread, which waits
        if time.monotonic() > deadline:
            return f"the driver has {extra} thread(s) of a library that is not known to survive a fork"
        time.sleep(0.001)  # a thread that was joined is shown for a moment longer
    return None


def _answer(connection: socket.socket) -> str | None:
    """Why the child says that it is of no use."""
    if not select.select([connection], [], [], _ANSWER_S)[0]:
        return "the forked process did not answer"
    answer = connection.recv(4096)
    if answer == _FIT:
        return None
    return answer.decode(errors="replace") or "the forked process ended at once"


def _be_agent(
    connection: socket.socket, mask: set[int | signal.Signals], modules: Sequence[str], preload: Sequence[str]
) -> NoReturn:
    """The child. `modules` are the user's, looked up before the fork: to look at each copies the page that it is in."""
    code = 1
    try:
        from holdfast.zygote.driver_fork_reset import reset_forked_process

        reason = reset_forked_process([connection.fileno()], modules)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        connection.sendall(_FIT if reason is None else reason.encode())
        if reason is None:
            from holdfast.agent.forked_from_driver import run_agent

            code = run_agent(connection, preload)
    except BaseException:  # noqa: BLE001  nothing may reach what the driver was doing when it was forked
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)
