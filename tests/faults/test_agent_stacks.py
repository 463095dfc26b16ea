"""The stack dump of a hung worker is complete, even if the worker gets no CPU time for a while."""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from tests.faults.agent_harness import job_of, run_async, started_agent
from tests.faults.programs import processes

from holdfast import train
from holdfast.core.events import WorkerExited
from holdfast.linux import signal_state
from holdfast.wire.messages import Stacks
from holdfast.worker.stdio import DUMP_SIGNAL


def test_stacks_are_dumped_also_from_a_worker_that_gets_no_cpu_for_a_while(tmp_path: Path) -> None:
    """It does not let the signal through at first, as if the machine had too much else to do."""

    def stuck_in_here() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {DUMP_SIGNAL})
        train.report({})
        while DUMP_SIGNAL not in signal.sigpending():
            select.select([], [], [], 0.01)
        select.select([], [], [], 1.5)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {DUMP_SIGNAL})
        signal.pause()

    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            await harness.prepare(job_of(stuck_in_here))
            await harness.started()
            await harness.expect_report()
            await harness.stop(dump_stacks=True)
            (text,) = [message.text for message in harness.messages if isinstance(message, Stacks)]
            assert "in stuck_in_here" in text and "in _call" not in text and "bootstrap.py" not in text

    run_async(test)


class _StuckImport:
    """Opened in a worker, it stands for a module whose import never returns."""

    def __init__(self, flag: Path) -> None:
        self._flag = flag

    def __reduce__(self) -> tuple[object, ...]:
        return _hang, (self._flag,)


def _hang(flag: Path) -> None:
    flag.touch()
    signal.pause()


def test_stacks_of_a_worker_that_hangs_while_its_function_is_opened(tmp_path: Path) -> None:
    """A worker that is started cold imports what its function needs by itself."""
    stuck = _StuckImport(tmp_path / "hangs")

    def function() -> None:
        assert stuck

    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            await harness.prepare(job_of(function), fork=False)
            await harness.started()
            await asyncio.to_thread(processes.wait_until, (tmp_path / "hangs").exists, "it hangs")
            await harness.stop(dump_stacks=True)
            (text,) = [message.text for message in harness.messages if isinstance(message, Stacks)]
            assert "in _hang" in text and "job_loader.py" in text
            assert not any(isinstance(message, WorkerExited) for message in harness.messages)

    run_async(test)


def test_a_worker_that_has_only_begun_to_start_does_not_die_of_the_question_where_it_is(tmp_path: Path) -> None:
    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            await harness.prepare(job_of(signal.pause), fork=False)
            pids = await harness.started()
            os.kill(pids[0], DUMP_SIGNAL)
            await asyncio.sleep(0.5)
            await harness.stop()
            assert not any(isinstance(message, WorkerExited) for message in harness.messages)

    run_async(test)


_DUMPS_INTO_A_FULL_PIPE = f"""
import faulthandler, signal, sys
faulthandler.register({int(DUMP_SIGNAL)}, file=int(sys.argv[1]), all_threads=True, chain=False)
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_proc_status_shows_whether_a_stack_dump_is_unfinished(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    room_bytes = fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writing, b"x" * (room_bytes - 5))
    command = [sys.executable, "-c", _DUMPS_INTO_A_FULL_PIPE, str(writing)]
    with subprocess.Popen(command, pass_fds=[writing], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            before = signal_state.blocking(process.pid, DUMP_SIGNAL)
            assert before == set()
            assert not signal_state.has_to_handle(process.pid, DUMP_SIGNAL, before)
            process.send_signal(DUMP_SIGNAL)
            processes.wait_until(lambda: signal_state.blocking(process.pid, DUMP_SIGNAL), "the handler")
            assert signal_state.has_to_handle(process.pid, DUMP_SIGNAL, before)
            os.set_blocking(reading, False)
            text = bytearray()

            def is_over() -> bool:
                over = not signal_state.has_to_handle(process.pid, DUMP_SIGNAL, before)
                while select.select([reading], [], [], 0)[0]:
                    text.extend(os.read(reading, 4096))
                return over

            processes.wait_until(is_over, "the end of the dump")
            assert text.endswith(b" in <module>\n"), bytes(text[-200:])
        finally:
            process.kill()
            os.close(reading)
            os.close(writing)
    assert signal_state.blocking(process.pid, DUMP_SIGNAL) == set()
