"""The zygote: imports, pre-imports for the next generation, fork safety, and what workers inherit."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.faults.agent_harness import AgentHarness, job_of, run_async, started_agent, wait_gone
from tests.faults.programs import processes

from holdfast import train
from holdfast.wire.frames import encode, receive
from holdfast.wire.messages import Shutdown
from holdfast.worker.job import Assignment
from holdfast.zygote.messages import Load, Warm

# One write: a line of two processes that share a pipe must not mix.
_TELLS_WHO_IMPORTS = """
import os
os.write(1, b'imported by %d\\n' % os.getpid())
MAKER = os.getpid()
"""

_STARTS_A_THREAD = """
import threading
threading.Thread(target=threading.Event().wait, name='ticker', daemon=True).start()
"""

# Each piece is read by the agent, for the pipe is empty, before the next one is written.
_PRINTS_IN_PIECES = """
import array, fcntl, os, termios
for piece in (b'first in ', b'pieces', b'\\nthen ', b'whole\\nno end'):
    os.write(1, piece)
    unread = array.array('i', [1])
    while unread[0]:
        fcntl.ioctl(1, termios.FIONREAD, unread)
"""


def _module(directory: Path, name: str, text: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.py").write_text(text)


@pytest.mark.parametrize("fork", [True, False], ids=["forked", "cold"])
def test_a_function_that_cannot_be_unpickled_fails_on_every_rank(tmp_path: Path, fork: bool) -> None:
    _module(tmp_path / "mine", "only_on_the_driver", "def function():\n    return 1\n")
    sys.path.insert(0, str(tmp_path / "mine"))
    try:
        import only_on_the_driver  # type: ignore[import-not-found]

        def function() -> Any:
            return only_on_the_driver.function()

        job = job_of(function)
    finally:
        sys.path.remove(str(tmp_path / "mine"))

    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            await harness.prepare(job, fork=fork)
            await harness.started(ranks=2)
            for rank in (0, 1):
                exited = await harness.exited(rank)
                assert exited.error_type == "ModuleNotFoundError"
                assert "No module named 'only_on_the_driver': import it in the function, or install" in exited.cause
                assert exited.traceback is not None and "Traceback" in exited.traceback

    run_async(test)


def test_threads_started_at_import_cause_cold_starts_with_a_logged_reason(tmp_path: Path) -> None:
    _module(tmp_path / "mine", "starts_a_thread", _STARTS_A_THREAD)

    def function() -> str:
        return sys.modules["__main__"].__spec__.name  # type: ignore[union-attr]

    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            prepared = await harness.prepare(
                job_of(function), preload=["starts_a_thread"], sys_path=[str(tmp_path / "mine"), *sys.path]
            )
            assert prepared.cold_reason == "Importing starts_a_thread started 1 thread(s) (ticker)"
            harness.start()
            assert (await harness.finished()).value == "holdfast.zygote.cold_start"
            await harness.expect_line("Workers are started cold from now on: Importing starts_a_thread")

    run_async(test)


def test_output_of_imports_is_forwarded_in_whole_lines(tmp_path: Path) -> None:
    _module(tmp_path / "mine", "prints_in_pieces", _PRINTS_IN_PIECES)

    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            search = [str(tmp_path / "mine"), *sys.path]
            await harness.prepare(job_of(_nothing), preload=["prints_in_pieces"], sys_path=search)
            await harness.expect_line("whole")
            os.kill(harness.zygote(), signal.SIGKILL)  # it says no more
            await harness.expect_line("no end")
            lines = [line.text for logs in harness.logs for line in logs.lines]
            assert lines == ["first in pieces", "then whole", "no end"]

    run_async(test)


def _nothing() -> None:
    """A training function that has nothing to do."""


def _makers(harness: AgentHarness) -> list[int]:
    """The zygotes that printed that they import the module."""
    lines = [line for logs in harness.logs for line in logs.lines if line.rank == -1]
    return [int(line.text.split()[-1]) for line in lines if line.text.startswith("imported by")]


def test_modules_imported_by_workers_are_preimported_for_the_next_generation(tmp_path: Path) -> None:
    names = tmp_path / "names"
    tells_name = f"with open({str(names)!r}, 'a') as file: file.write(open('/proc/self/comm').read())\n"
    _module(tmp_path / "mine", "slow_to_import", tells_name + _TELLS_WHO_IMPORTS)
    _module(tmp_path / "mine", "starts_a_thread", _STARTS_A_THREAD)

    def function() -> None:
        inherited = "slow_to_import" in sys.modules
        import slow_to_import  # type: ignore[import-not-found]
        import starts_a_thread  # type: ignore[import-not-found]  # noqa: F401

        train.report({"inherited": inherited, "maker": slow_to_import.MAKER, "threads": threading.active_count()})
        signal.pause()

    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            await harness.prepare(job_of(function), sys_path=[str(tmp_path / "mine"), *sys.path])
            await harness.started()
            await harness.expect_report()
            await harness.stop()
            # The next zygote prints when it imports the module, which it does in its own time, and takes over then.
            while not (makers := _makers(harness)):
                await harness.expect_more_logs()
            processes.wait_until(lambda: harness.zygote() == makers[-1], "the next zygote")
            await harness.started(generation=2)
            await harness.expect_report(2)
            first, second = (report.metrics for report in harness.reports)
            assert first is not None and second is not None
            assert not first["inherited"] and second["inherited"]
            assert second["maker"] == harness.zygote()
            assert second["threads"] == 2  # what starts threads was tried, and left out
            # Those that may be killed at once do not look like a zygote, which is left to clean up.
            assert {"hf-rank-0", "hf-forked", "hf-next-zygote"} == set(names.read_text().split())

    run_async(test)


_BLOCKS_OUTSIDE_OF_WORKERS = """
import os, pathlib
if "RANK" not in os.environ:
    pathlib.Path({arrived!r}).touch()
    open({gate!r}).close()
    print("imported at last")
"""


def _inherits() -> None:
    inherited = "mine.slow" in sys.modules
    import mine.slow  # type: ignore[import-not-found]  # noqa: F401

    train.report({"inherited": inherited})
    signal.pause()


def test_generations_stop_and_start_while_the_next_zygote_imports(tmp_path: Path) -> None:
    gate, arrived = tmp_path / "gate", tmp_path / "arrived"
    os.mkfifo(gate)
    _module(tmp_path / "path" / "mine", "__init__", "")
    _module(tmp_path / "path" / "mine", "slow", _BLOCKS_OUTSIDE_OF_WORKERS.format(gate=str(gate), arrived=str(arrived)))

    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            search = [str(tmp_path / "path"), *sys.path]
            await harness.prepare(job_of(_inherits), sys_path=search, preload=["mine"])
            first = harness.zygote()
            for generation in (1, 2):
                await harness.started(generation)
                await harness.expect_report(generation)
                processes.wait_until(arrived.exists, "the import of the learned module")
                await harness.stop(generation)
                assert harness.zygote() == first
            with gate.open("wb"):
                await harness.expect_line("imported at last")
            await harness.started(3)
            await harness.expect_report(3)
            await harness.stop(3)
            processes.wait_until(lambda: harness.zygote() != first, "the next zygote")
            await harness.started(4)
            await harness.expect_report(4)
            inherited = [report.metrics["inherited"] for report in harness.reports if report.metrics]
            assert inherited[:2] == [False, False]
            assert inherited[3] is True
            lines = [line.text for logs in harness.logs for line in logs.lines]
            assert [line for line in lines if "replaced" in line or "cold" in line] == []

    run_async(test)


_SPOILS = {
    "starts a thread": _STARTS_A_THREAD,
    "crashes": "import ctypes\nctypes.string_at(0)\n",
    "exits": "import os\nos._exit(3)\n",
}


@pytest.mark.parametrize("how", _SPOILS)
def test_a_module_unsafe_to_fork_is_not_preimported_and_others_are(tmp_path: Path, how: str) -> None:
    """A module of a package that is trusted, so that no trial finds out."""
    for name, text in {
        "__init__": "",
        "a_good": "",
        "b_bad": _SPOILS[how],
        "c_good": "print('the last one')\n",
    }.items():
        unless_worker = "import os\nif 'RANK' not in os.environ:\n" + "".join(f"    {x}\n" for x in text.splitlines())
        _module(tmp_path / "path" / "mine", name, unless_worker if text else "")

    def function() -> None:
        inherited = sorted(name for name in sys.modules if name.startswith("mine."))
        import mine.a_good  # type: ignore[import-not-found]
        import mine.b_bad  # type: ignore[import-not-found]
        import mine.c_good  # type: ignore[import-not-found]  # noqa: F401

        train.report({"inherited": inherited})
        signal.pause()

    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            search = [str(tmp_path / "path"), *sys.path]
            await harness.prepare(job_of(function), sys_path=search, preload=["mine"])
            first = harness.zygote()
            await harness.started()
            await harness.expect_report()
            await harness.expect_line("the last one")
            await harness.stop()
            processes.wait_until(lambda: harness.zygote() != first, "the next zygote")
            await harness.started(generation=2)
            await harness.expect_report(2)
            metrics = harness.reports[-1].metrics
            assert metrics is not None
            assert metrics["inherited"] == ["mine.a_good", "mine.c_good"]

    run_async(test)


def test_the_next_zygote_cleans_up_after_a_killed_agent_too(tmp_path: Path) -> None:
    """After it took over, a killed agent is tidied up after as before."""
    _module(tmp_path / "path" / "mine", "__init__", "")
    _module(tmp_path / "path" / "mine", "more", "")

    def function() -> None:
        import mine.more  # type: ignore[import-not-found]  # noqa: F401

        train.report({})
        signal.pause()

    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            search = [str(tmp_path / "path"), *sys.path]
            await harness.prepare(job_of(function), sys_path=search, preload=["mine"])
            first = harness.zygote()
            await harness.started()
            await harness.expect_report()
            await harness.stop()
            processes.wait_until(lambda: harness.zygote() != first, "the next zygote")
            pids = await harness.started(generation=2, ranks=2)
            below = processes.descendants(harness.process.pid)
            assert set(pids.values()) <= set(below)
            harness.process.kill()
            await wait_gone(*below)
            assert harness.leftovers() == []

    run_async(test)


def test_workers_have_different_random_seeds(tmp_path: Path) -> None:
    def function() -> None:
        import numpy

        train.report({"python": random.random(), "numpy": float(numpy.random.rand())})

    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            await harness.prepare(job_of(function), preload=["numpy"])
            for generation in range(1, 4):
                harness.start(generation)
                await harness.finished()
                await harness.stop(generation)
            rolls = [report.metrics for report in harness.reports]
            assert len({roll["python"] for roll in rolls if roll}) == 3
            assert len({roll["numpy"] for roll in rolls if roll}) == 3

    run_async(test)


def test_master_port_can_be_bound_by_the_training_function(tmp_path: Path) -> None:
    def function() -> int:
        with socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"]))) as server:
            return int(server.getsockname()[1])

    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            await harness.prepare(job_of(function))
            port = harness.master_port
            harness.start(ranks=2)
            value = (await harness.finished(0)).value
            assert value == port

    run_async(test)


_SLOW_PARENT = """
import os
fork = os.fork
def slow():
    pid = fork()
    if pid:
        os.fork = fork
        open({gate!r}).close()
    return pid
os.fork = slow
"""


def test_master_port_can_be_bound_while_other_processes_hold_its_socket(tmp_path: Path) -> None:
    """The zygote closes its copy only after the worker has bound the port."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    _module(tmp_path / "mine", "slow_parent", _SLOW_PARENT.format(gate=str(gate)))

    def function(config: dict[str, Any]) -> None:
        try:
            with socket.socket() as server:
                server.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
                server.listen()
        finally:
            Path(config["gate"]).write_bytes(b"")

    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            await harness.prepare(
                job_of(function, {"gate": str(gate)}),
                preload=["slow_parent"],
                sys_path=[str(tmp_path / "mine"), *sys.path],
            )
            harness.start()
            await harness.finished()

    run_async(test)


class Listening:
    """A framework that uses the bound socket, and prints so when it is shut down."""

    def setup(self, assignment: Assignment, master_listen_fd: int | None) -> None:
        if master_listen_fd is not None:
            with socket.socket(fileno=os.dup(master_listen_fd)) as listener:
                print(f"rank {assignment.rank} listens on {listener.getsockname()[1]}")

    def shutdown(self) -> None:
        print("shut down")


def test_a_framework_gets_the_listening_socket_of_master_port(tmp_path: Path) -> None:
    def function() -> None:
        if os.environ["RANK"] == "0":  # the others may come after it has gone
            socket.create_connection(("127.0.0.1", int(os.environ["MASTER_PORT"]))).close()

    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            await harness.prepare(job_of(function, framework=Listening()))
            port = harness.master_port
            harness.start(ranks=2)
            await harness.expect_line(f"rank 0 listens on {port}")
            await harness.finished(0)
            await harness.finished(1)
            await harness.expect_line("shut down")

    run_async(test)


_AGENT = """
import os, subprocess, sys
zygote = [sys.executable, "-m", "holdfast.zygote.zygote", sys.argv[1], str(os.getpid())]
subprocess.Popen(zygote, pass_fds=[int(sys.argv[1])])
sys.stdin.read()
"""


@contextmanager
def _in_memory(data: bytes) -> Iterator[int]:
    fd = os.memfd_create("test")
    os.write(fd, data)
    yield fd
    os.close(fd)


def test_the_zygote_cleans_up_after_an_agent_that_dies_slowly(tmp_path: Path) -> None:
    """The kernel tells of the death of its first thread; the connection ends with its last one, which is this test."""
    leftover = tmp_path / "leftover"
    leftover.touch()

    def function() -> None:
        return

    ours, theirs = socket.socketpair()
    with ours, theirs:
        fd = theirs.fileno()
        agent = subprocess.Popen([sys.executable, "-c", _AGENT, str(fd)], stdin=subprocess.PIPE, pass_fds=[fd])
        try:
            load = Load(
                sys_path=sys.path,
                environment={},
                preload=[],
                fork=True,
                leftovers=[str(leftover)],
            )
            with _in_memory(job_of(function)) as job:
                socket.send_fds(ours, [encode(load)], [job])
            warm = receive(ours, msgspec.msgpack.Decoder(Warm))
            assert warm is not None and warm.cold_reason is None
            zygotes = processes.children(agent.pid)
        finally:
            agent.kill()
            agent.communicate()
        processes.wait_gone(*zygotes)
        assert len(zygotes) == 1
        assert not leftover.exists()


def test_a_module_that_crashes_the_zygote_causes_cold_starts(tmp_path: Path) -> None:
    _module(tmp_path / "mine", "crashes", "import ctypes\nctypes.string_at(0)\n")

    def function() -> int:
        return 1

    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            prepared = await harness.prepare(
                job_of(function), preload=["crashes"], sys_path=[str(tmp_path / "mine"), *sys.path]
            )
            assert prepared.cold_reason is not None and "killed by SIGSEGV" in prepared.cold_reason
            harness.start()
            assert (await harness.finished()).value == 1
            harness.send(Shutdown())
            await wait_gone(harness.process.pid)

    run_async(test)


# A module that can be seen importing, and that waits until it may go on.
_WAITS_AT_IMPORT = """
import os
from pathlib import Path
Path(os.environ['TEST_HERE']).write_text('importing')
Path(os.environ['TEST_GO']).read_text()
MAKER = os.getpid()
"""


def _reports_maker() -> None:
    import waits_at_import  # type: ignore[import-not-found]  # of `_fifos`

    train.report({"maker": waits_at_import.MAKER})


class _ImportsAhead(AgentHarness):
    def options(self) -> list[str]:
        return [*super().options(), "--import", "waits_at_import", "--import", "nowhere_to_be_found"]


@contextmanager
def _fifos(directory: Path) -> Iterator[tuple[Path, Path, dict[str, str]]]:
    here, go = directory / "here", directory / "go"
    for one in (here, go):
        os.mkfifo(one)
    _module(directory / "mine", "waits_at_import", _WAITS_AT_IMPORT)
    path = os.pathsep.join([str(directory / "mine"), *filter(None, [os.environ.get("PYTHONPATH")])])
    yield here, go, {"TEST_HERE": str(here), "TEST_GO": str(go), "PYTHONPATH": path}


def test_modules_are_imported_before_there_is_a_function_that_needs_them(tmp_path: Path) -> None:
    with _fifos(tmp_path) as (here, go, environment):

        async def test() -> None:
            async with started_agent(_ImportsAhead(tmp_path / "agent"), **environment) as harness:
                assert here.read_text() == "importing"
                go.write_text("go")
                await harness.prepare(job_of(_reports_maker), preload=["waits_at_import"])
                await harness.started()
                await harness.expect_report()
                assert (harness.reports[0].metrics or {})["maker"] == harness.zygote()
                harness.send(Shutdown(flush_s=0.0))

        run_async(test)


def test_a_killed_agent_leaves_nothing_when_its_zygote_was_importing_ahead(tmp_path: Path) -> None:
    with _fifos(tmp_path) as (here, _, environment):

        async def test() -> None:
            async with started_agent(_ImportsAhead(tmp_path / "agent"), **environment) as harness:
                assert here.read_text() == "importing"
                zygote = harness.zygote()
                harness.process.kill()
                await wait_gone(zygote)
                assert harness.leftovers() == []

        run_async(test)
