"""The least that a restart of such a script can cost: `python framework_floor.py SCRIPT CHECKPOINT`.

The training function in two workers that are forked from a process which has imported everything, from the same
checkpoint, to the first step; no controller, no agent, no journal. Prints the seconds from the fork to that step.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import pickle
import signal
import socket
import statistics
import sys
import tempfile
import time
import traceback
from typing import Any, NoReturn

from bench.drivers.marked_reports import on_optimizer_step

from holdfast.linux.process import die_with_parent
from holdfast.storage.local_cache import local_cache_dir
from holdfast.train import Checkpoint
from holdfast.train.trainer import DataParallelTrainer
from holdfast.worker import session as sessions
from holdfast.worker.environment import refresh_randomness, set_environment, set_torch_threads
from holdfast.worker.job import Assignment
from holdfast.worker.job_loader import import_quietly
from holdfast.zygote.fork_safety import one_thread_each

SCRIPT, CHECKPOINT = sys.argv[1:3]
_SIZE = 65536


class _Session(sessions.Session):
    """Enough of a session to train with: collectives over a socket pair, and an end at the first report."""

    def __init__(self, assignment: Assignment, peer: socket.socket, answers: socket.socket) -> None:
        self._silent = socket.socketpair()
        super().__init__(self._silent[0], assignment)
        self._peer = peer
        self._answers = answers
        self._stepped_at: float | None = None

    def get_checkpoint(self) -> Checkpoint:
        return Checkpoint(CHECKPOINT)

    def step(self) -> None:
        if self._stepped_at is None:
            self._stepped_at = time.monotonic()

    def report(self, *args: Any, **kwargs: Any) -> None:
        self.step()
        answer = {"at": self._stepped_at, "modules": list(sys.modules)}
        if self.assignment.rank == 0:
            self._answers.sendall(json.dumps(answer).encode() + b"\n")
        signal.pause()  # to be killed with the other rank

    def _collect(self, kind: str, data: Any) -> Any:
        if self.assignment.rank == 0:
            self._peer.recv(1)
            self._peer.sendall(pickle.dumps(data))
            return data
        self._peer.sendall(b"x")
        return pickle.loads(self._peer.recv(_SIZE))


def _assignment(rank: int, port: int) -> Assignment:
    return Assignment(
        generation=1, rank=rank, local_rank=rank, node_rank=0, world_size=2, local_world_size=2, node_count=1,
        master_address="127.0.0.1", master_port=port, restart_count=1, max_restarts=1, checkpoint=None,
        experiment="run", trial_id="run", temp_dir=tempfile.gettempdir(), change_directory=False,
        storage="", trial_dir="", work_dir="", staging_dir="", error_file="",
    )  # fmt: skip


def _work(trainer: DataParallelTrainer, here: Assignment, listen_fd: int | None, session: _Session) -> NoReturn:
    die_with_parent(os.getppid())
    set_environment(here)
    refresh_randomness()
    set_torch_threads()
    sessions.install(session)
    framework = trainer._framework()
    if framework is not None:
        framework.setup(here, listen_fd)
    on_optimizer_step(session.step)
    trainer.train_loop_per_worker(trainer.train_loop_config)
    os._exit(1)


def _restart(trainer: DataParallelTrainer) -> tuple[float, list[str]]:
    """Seconds from the first fork to rank 0's first step, and the modules that it has at its first report."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    ends, (ours, theirs) = socket.socketpair(), socket.socketpair()
    began, pids = time.monotonic(), []
    for rank in range(2):
        if (pid := os.fork()) == 0:
            if rank != 0:
                listener.close()
            here = _assignment(rank, port)
            ours.close()
            try:
                _work(trainer, here, listener.detach() if rank == 0 else None, _Session(here, ends[rank], theirs))
            except BaseException:  # noqa: BLE001  a forked child must not go on as its parent
                traceback.print_exc()
                os._exit(1)
        pids.append(pid)
    listener.close()
    theirs.close()
    with ours.makefile("rb") as file:
        answer = json.loads(file.readline())
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return answer["at"] - began, answer["modules"]


def main() -> None:
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(local_cache_dir() / "torch_compile"))
    trainers: list[DataParallelTrainer] = []

    def keep_and_exit(trainer: DataParallelTrainer) -> NoReturn:
        """Instead of `fit()`: the trainer that the example has made is all that is wanted of it."""
        trainers.append(trainer)
        sys.exit()

    DataParallelTrainer.fit = keep_and_exit  # type: ignore[method-assign, assignment]
    spec = importlib.util.spec_from_file_location("example", SCRIPT)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    sys.argv = [SCRIPT]
    with one_thread_each():
        spec.loader.exec_module(example)
        try:
            example.main()
        except SystemExit:
            pass
        _, modules = _restart(trainers[0])
        for name in modules:
            import_quietly(name)
    gc.collect()
    gc.freeze()  # as our zygote does: frameworks call the collector when they start, and would copy every page
    print(statistics.median(_restart(trainers[0])[0] for _ in range(3)))
    os._exit(0)


main()
