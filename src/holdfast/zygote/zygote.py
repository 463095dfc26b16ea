"""The zygote: a process that has imported everything once, starts no thread, and forks workers in
milliseconds.

`python -m holdfast.zygote.zygote FD PARENT`, started by the agent (`agent.zygote_client`), which speaks to it over the
socket FD in the words of `messages`. A plain loop over that socket and SIGCHLD; `children` ends children, `job_loader`
opens the job, `import_trial` tries out what workers imported by themselves, and `next_zygote` imports it, to take this
process's place between two generations. If the agent dies, by whatever hand, the zygote ends all its children, removes
the agent's directory, and goes.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import selectors
import signal
import socket
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec

from holdfast.core.records import WorkerFailure
from holdfast.linux.locked_directory import remove_unlocked
from holdfast.linux.process import become_subreaper, die_with_parent, is_exiting, live_without_parent, name_process
from holdfast.wire.frames import Splitter, encode
from holdfast.worker.bootstrap import ForkContext, run_worker
from holdfast.worker.environment import (
    OpenBlas,
    find_openblas,
    keep_compile_cache,
    set_environment,
    set_openblas_threads,
)
from holdfast.worker.job import Assignment
from holdfast.worker.job_loader import Loaded, import_for_good, load_job, set_up_imports
from holdfast.worker.main_module import send_main_by_value
from holdfast.worker.stdio import DUMP_SIGNAL, WorkerFds, redirect_output
from holdfast.zygote.children import Child, Children
from holdfast.zygote.cold_start import ColdStart
from holdfast.zygote.fork_safety import one_thread_each, unsafe_reason
from holdfast.zygote.import_trial import ImportTrial
from holdfast.zygote.messages import (
    AddImports,
    Cleared,
    Died,
    Dismiss,
    Fork,
    Forked,
    FromZygote,
    ImportAhead,
    Kill,
    Load,
    TookOver,
    ToZygote,
    Warm,
)
from holdfast.zygote.next_zygote import NextZygote, import_until_takeover, wait_for_reparenting

__all__ = ["Zygote", "main"]

_RECEIVE_BYTES = 256 * 1024
_FDS_MAX = 8
_LAST_WORD_S = 1.0
_EXIT_TIMEOUT_S = 10.0
"""How long an agent that was killed may take to exit: it may have much memory to give back."""
_EXIT_PAUSE_S = 0.001
_decoder: msgspec.msgpack.Decoder[ToZygote] = msgspec.msgpack.Decoder(ToZygote)


@dataclass(frozen=True, slots=True)
class _ForkedWorker:
    """What a forked child is to run, once the zygote's loop has returned in it."""

    loaded: Loaded
    assignment: Assignment
    worker_fds: WorkerFds


class Zygote:
    """One zygote's state; `run` returns in a forked child only."""

    def __init__(self, control: socket.socket, *, from_driver: bool = False) -> None:
        self._from_driver = from_driver
        self._pid = os.getpid()
        self._agent = os.getppid()
        self._control = control
        self._splitter = Splitter()
        self._fds: deque[int] = deque()
        self._children = Children()
        self._import_trial = ImportTrial()
        self._leftovers: list[str] = []
        self._load: Load | None = None
        self._function_fd = -1
        self._loaded: Loaded | None = None
        self._clearing: dict[str, int] = {}
        """The generation of each run whose workers are being killed."""
        self._next: NextZygote | None = None
        self._taking_over: socket.socket | None = None
        """In the next zygote only: its connection to the present one."""
        self._forked: _ForkedWorker | None = None
        self._dismissed = False
        self._reading = False
        self._terminated = False
        self._openblas: list[OpenBlas] = []
        self.fork_context = ForkContext("")

    def run(self) -> _ForkedWorker:
        """Serve the agent until it goes, which ends this process; or until this process is a forked worker."""
        while True:
            self._serve()
            if self._forked is not None:
                return self._forked
            self._take_over()

    def _serve(self) -> None:
        """Returns in a forked child only."""
        alarm, self._alarm = socket.socketpair()
        for end in (alarm, self._alarm):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._terminate())
        signal.set_wakeup_fd(self._alarm.fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as self._selector:
            self._selector.register(self._control, selectors.EVENT_READ, self._receive)
            self._selector.register(alarm, selectors.EVENT_READ, lambda: self._reap(alarm))
            while not self._is_child:
                for key, _ in self._selector.select(0 if self._has_imports_to_try else None):
                    key.data()
                    if self._is_child:
                        break
                else:
                    self._import_new_modules()
        signal.set_wakeup_fd(-1)
        alarm.close()
        self._alarm.close()

    @property
    def _is_child(self) -> bool:
        """Whether this process was forked a moment ago, and must leave the zygote's loop."""
        return self._forked is not None or self._taking_over is not None

    # ------------------------------------------------------------------ messages of the agent

    def _receive(self) -> None:
        self._reading = True
        try:
            data, fds, _, _ = socket.recv_fds(self._control, _RECEIVE_BYTES, _FDS_MAX)
        except ConnectionResetError:
            data, fds = b"", []
        for fd in fds:
            os.set_inheritable(fd, False)
        self._fds.extend(fds)
        orders = self._decode(data)
        self._reading = False
        if not data or self._terminated:
            self._end()
        for order in orders:
            self._handle(order)
            if self._is_child:
                return

    def _decode(self, data: bytes) -> list[ToZygote]:
        orders = [_decoder.decode(body) for body in self._splitter.feed(data)]
        self._dismissed = self._dismissed or any(isinstance(order, Dismiss) for order in orders)
        return orders

    def _handle(self, order: ToZygote) -> None:
        if isinstance(order, ImportAhead):
            self._leftovers = order.leftovers
            _import_with_one_thread(order.modules)
        elif isinstance(order, Load):
            self._warm_up(order)
        elif isinstance(order, Fork):
            self._fork(order)
        elif isinstance(order, Kill):
            self._children.kill_workers(order.run)
            self._clearing[order.run] = order.generation
            self._clear()
        elif isinstance(order, AddImports):
            self._import_trial.add(order.modules)

    def _send(self, message: FromZygote) -> None:
        try:
            self._control.sendall(encode(message))
        except (BrokenPipeError, ConnectionResetError):
            self._end()

    # ------------------------------------------------------------------ importing

    def _warm_up(self, load: Load) -> None:
        self._load, self._leftovers = load, load.leftovers
        self._function_fd = self._fds.popleft()
        if not load.fork:
            self._send(Warm())
            return
        set_up_imports(load.sys_path, load.environment)
        reason = None
        with one_thread_each():
            for name in load.preload:
                import_for_good(name)
                if (reason := unsafe_reason(f"Importing {name}")) is not None:
                    break
            else:
                self._loaded = load_job(self._function_fd)
                reason = unsafe_reason("Opening the training function")
                if self._from_driver and isinstance(self._loaded.job, WorkerFailure):
                    # Perhaps only here: a module that registers something with a library cannot do so twice.
                    reason = f"Opening the training function failed: {self._loaded.job.cause}"
        self._import_trial.trust(load.preload)
        self._prepare_to_fork()
        self._send(Warm(cold_reason=reason))

    def _prepare_to_fork(self) -> None:
        """Look up what forked children will need, and keep the garbage collector from touching their pages."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or every child would print it again
        send_main_by_value()  # imports multiprocessing, which each child would do by itself
        self._openblas = find_openblas()
        self.fork_context = ForkContext(next(reversed(sys.modules)))
        _leave_torch_libraries()
        keep_compile_cache()
        self._children.keep_trackers()
        gc.collect()
        gc.freeze()

    @property
    def _has_imports_to_try(self) -> bool:
        return not self._clearing and self._can_hand_over and not self._import_trial.idle

    @property
    def _can_hand_over(self) -> bool:
        return self._loaded is not None and self._load is not None and self._load.agent_is_subreaper

    def _import_new_modules(self) -> None:
        """When no message is left to handle: have new modules tried out, have those that did no harm imported by the
        next zygote, and let that take over when it is ready."""
        if self._next is not None and self._next.spoiled:
            self._replace_next()
        elif not self._hand_over() and self._has_imports_to_try:
            self._try_imports()

    def _try_imports(self) -> None:
        if modules := self._import_trial.pop_safe():
            if self._next is None:
                self._fork_next(modules)
            else:
                self._next.import_modules(modules)
        elif self._import_trial.start_trial():
            self._import_trial.trial_pid = self._fork_trial()

    def _fork_trial(self) -> int:
        pid = self._fork_child()
        if pid == 0:
            self._import_trial.run_trial()
        return pid

    # ------------------------------------------------------------------ the next zygote

    def _fork_next(self, modules: list[str]) -> None:
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            name_process("hf-next-zygote")
            die_with_parent(parent)
            ours.close()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            self._taking_over = theirs
            return
        theirs.close()
        self._next = NextZygote(pid, ours, modules)
        self._selector.register(ours, selectors.EVENT_READ, self._next.receive)

    def _replace_next(self) -> None:
        """Try another one without the module that spoiled it."""
        assert self._next is not None
        spoiled, self._next = self._next, None
        self._selector.unregister(spoiled.connection)
        if modules := spoiled.end():
            self._fork_next(modules)

    def _hand_over(self) -> bool:
        """Let the next zygote take over, and end, if it is ready and nothing here is unfinished; whether that was
        tried."""
        unread = self._fds or self._splitter.pending_bytes
        busy = self._children.workers or self._clearing or self._dismissed or unread
        if busy or self._next is None or not self._next.is_ready:
            return False
        if self._next.hand_over(self._import_trial.untried):
            self._children.end(spared=self._next.pid)
            os._exit(0)
        return True

    def _take_over(self) -> None:
        """Become the next zygote: import, wait for the takeover, then serve the agent."""
        former, self._pid = self._pid, os.getpid()
        connection, self._taking_over = self._taking_over, None
        assert connection is not None
        self._next = None
        self._children = Children()
        self._splitter = Splitter()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        untried = import_until_takeover(connection, self._prepare_to_fork)
        self._import_trial.restart(untried)
        live_without_parent()
        wait_for_reparenting(connection, former)
        become_subreaper()
        name_process("hf-zygote")
        if os.getppid() != self._agent:
            self._end()
        # Before the kernel may send it: an agent that dies right now leaves things that this process must remove.
        signal.signal(signal.SIGTERM, lambda *_: self._terminate())
        die_with_parent(self._agent, signal.SIGTERM)
        self._send(TookOver(pid=self._pid))

    # ------------------------------------------------------------------ children

    def _fork_child(self) -> int:
        """`os.fork`; the child, which gets 0, leads a session of its own and dies with this process."""
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            name_process("hf-forked")  # who must not kill a zygote knows it by its name
            os.setsid()
            die_with_parent(parent)
            self._reset_child()
        return pid

    def _fork(self, order: Fork) -> None:
        here = order.assignment
        worker_fds = WorkerFds.from_fds([self._fds.popleft() for _ in range(5 if order.listens else 4)])
        set_openblas_threads(here, self._openblas)
        pid = self._fork_child()
        if pid == 0:
            if self._loaded is None:
                self._become_cold(here, worker_fds)
            os.close(self._function_fd)
            redirect_output(worker_fds)
            self._forked = _ForkedWorker(self._loaded, here, worker_fds)
            return
        self._children.add(pid, Child(here.run, here.generation, here.rank))
        for fd in worker_fds.fds:
            os.close(fd)
        self._send(Forked(run=here.run, generation=here.generation, rank=here.rank, pid=pid))

    def _reset_child(self) -> None:
        """In a child: undo the zygote's signal handlers, and close its sockets."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._control.close()
        if self._next is not None:
            self._next.connection.close()

    def _become_cold(self, assignment: Assignment, worker_fds: WorkerFds) -> NoReturn:
        assert self._load is not None
        os.environ.update(self._load.environment)
        set_environment(assignment)
        orders_fd = os.memfd_create("holdfast-cold-start", 0)
        with os.fdopen(os.dup(orders_fd), "wb") as file:
            file.write(msgspec.msgpack.encode(ColdStart(self._load, assignment)))
        redirect_output(worker_fds)
        fds = [
            orders_fd,
            self._function_fd,
            worker_fds.connection,
            worker_fds.dump,
            *([] if worker_fds.listen is None else [worker_fds.listen]),
        ]
        for fd in fds:
            os.set_inheritable(fd, True)
        command = [sys.executable, "-m", "holdfast.zygote.cold_start", *map(str, fds)]
        os.execv(sys.executable, command)

    def _reap(self, alarm: socket.socket) -> None:
        alarm.recv(4096)
        for pid, child, status, killed in self._children.reap():
            if child is not None:
                self._send(
                    Died(run=child.run, generation=child.generation, rank=child.rank, status=status, killed=killed)
                )
            elif pid == self._import_trial.trial_pid:
                self._import_trial.trial_ended(status)
            elif self._next is not None and pid == self._next.pid:
                self._next.spoiled = True
        self._clear()

    def _clear(self) -> None:
        spared = [] if self._next is None else [self._next.pid]
        if self._import_trial.trial_pid is not None:
            spared.append(self._import_trial.trial_pid)
        for run, generation in list(self._clearing.items()):
            if not self._children.kill(run, spared):
                del self._clearing[run]
                self._send(Cleared(run=run, generation=generation))

    def _terminate(self) -> None:
        """By the kernel when the agent died, or by the agent itself; also in the midst of an import."""
        self._terminated = True
        if not self._reading:  # or what was just read would be lost
            self._end()

    def _end(self) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.getpid() != self._pid:
            os._exit(1)  # a forked child that still has its parent's signal handlers
        self._children.end()
        if self._leftovers and not self._agent_lives():
            self._remove_leftovers()
        os._exit(0)

    def _remove_leftovers(self) -> None:
        """Remove what the agent leaves, unless another of its name, which was started meanwhile, has it by now."""
        deadline = time.monotonic() + _EXIT_TIMEOUT_S
        # It gives up its lock a moment after the connection, and is our parent until then.
        while os.getppid() == self._agent and time.monotonic() < deadline:
            time.sleep(_EXIT_PAUSE_S)
        for path in map(Path, self._leftovers):
            if path.is_symlink():
                path.unlink(missing_ok=True)
            else:
                remove_unlocked(path, inherits=True)

    def _agent_lives(self) -> bool:
        """Whether the agent is alive: it sends `Dismiss` before it closes the connection. A killed one sends nothing,
        and its connection may end a while after the kernel's signal: that comes with the death of one thread, the end
        of the connection with the last. Until then the kernel shows that the process is exiting."""
        self._control.settimeout(_LAST_WORD_S)
        try:
            while not self._dismissed:
                data = self._control.recv(_RECEIVE_BYTES)
                if not data:
                    break
                self._decode(data)
        except (TimeoutError, ConnectionResetError):
            pass
        # Or its last words had no room in the socket.
        return self._dismissed or (os.getppid() == self._agent and not is_exiting(self._agent))


def _import_with_one_thread(modules: Sequence[str]) -> None:
    if not modules:
        return
    with one_thread_each():
        for name in modules:
            import_for_good(name)


def _leave_torch_libraries() -> None:
    """Let workers not take apart at their exit, for some 30 ms, what torch has registered with itself."""
    for finalizer, entry in list(weakref.finalize._registry.items()):  # type: ignore[attr-defined]
        if entry.func.__module__ == "torch.library":
            finalizer.detach()


def main(control_fd: int, parent_pid: int, *, imports: Sequence[str] | None = None) -> NoReturn:
    """Be a zygote for the agent at the other end of `control_fd`. In a copy of the driver, `imports` are what the
    function will need: they are imported before it is there, in an environment and with a search path like its own."""
    die_with_parent(parent_pid, signal.SIGTERM)
    become_subreaper()
    name_process("hf-zygote")
    sys.argv[:] = [__file__]  # neither ours nor an agent's arguments are for the user's code
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(DUMP_SIGNAL, signal.SIG_IGN)  # a worker that does not know yet where to dump must not die of it
    _import_with_one_thread(imports or ())
    zygote = Zygote(socket.socket(fileno=control_fd), from_driver=imports is not None)
    forked = zygote.run()
    run_worker(forked.loaded, forked.assignment, forked.worker_fds, zygote.fork_context)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
