"""Agent and zygote are forked from the driver where that is safe: what workers see of it, and when it is not done.

Drivers are scripts in processes of their own: the process of the tests has threads.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from tests.faults.programs import processes
from tests.faults.programs.sandbox import Sandbox

_HEAD = """
import json, logging, os, sys, threading
logging.basicConfig(level=logging.INFO, filename="driver.log")
from holdfast import train

def fit(function, name="run", workers=1, kind=train.DataParallelTrainer, **run):
    config = train.RunConfig(name=name, storage_path="storage", **run)
    return kind(function, scaling_config=train.ScalingConfig(num_workers=workers), run_config=config).fit().return_value

"""
_FORKED = "The agent is forked from the driver."


def _start(sandbox: Sandbox, text: str, **environment: str) -> subprocess.Popen[str]:
    script = sandbox.root / "script.py"
    script.write_text(_HEAD + textwrap.dedent(text))
    return subprocess.Popen(
        [sys.executable, str(script)],
        cwd=sandbox.root,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )


def _run(sandbox: Sandbox, text: str, **environment: str) -> Any:
    """The last line that a driver prints, which is JSON."""
    driver = _start(sandbox, text, **environment)
    out, errors = driver.communicate(timeout=100)
    assert driver.returncode == 0, errors
    return json.loads(out.splitlines()[-1])


def _log(sandbox: Sandbox) -> str:
    """What the driver says of where agents come from."""
    lines = (sandbox.root / "driver.log").read_text().splitlines()
    return "\n".join(line.partition(":holdfast:")[2] for line in lines if "The agent is" in line)


_SURROUNDINGS = """
    import atexit, gc, random, socket, tempfile, mine
    SEEN = "at first"
    mine.VALUE = "changed by the driver"
    kept = open("kept", "w")
    sys.setrecursionlimit(5000)
    gc.disable()
    random.seed(1)
    socket.setdefaulttimeout(3.0)
    logging.getLogger("mine").setLevel(logging.DEBUG)
    atexit.register(lambda: open("ended", "a").write(f"{os.getpid()} "))
    temporary = tempfile.TemporaryDirectory(dir=".")
    import signal
    signal.signal(signal.SIGUSR1, lambda *_: None)

    class Kept:
        pass

    def look():
        import gc, logging, random, signal, socket, threading, mine, multiprocessing
        main = sys.modules["__main__"]
        names = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if int(fd) > 2
                 and os.path.exists(f"/proc/self/fd/{fd}")]
        return {
            "seen": SEEN,
            "value": mine.VALUE,
            "argv": [os.path.basename(one) for one in sys.argv],
            "main has": sorted(name for name in vars(main) if name in ("fit", "kept", "SEEN", "temporary")),
            "files": [name for name in names if "kept" in name or "driver.log" in name],
            "recursion": sys.getrecursionlimit(),
            "gc": gc.isenabled(),
            "timeout": socket.getdefaulttimeout(),
            "root": [type(one).__name__ for one in logging.getLogger().handlers],
            "levels": [logging.getLogger().level, logging.getLogger("mine").level],
            "threads": [one.name for one in threading.enumerate()],
            "is main": threading.current_thread() is threading.main_thread(),
            "input": sys.stdin.read(),
            "usr1": signal.getsignal(signal.SIGUSR1).name,
            "start method": multiprocessing.get_start_method(allow_none=True),
            "class": Kept.__module__,
            "work dir": os.path.basename(os.getcwd()).startswith("run-"),
            "temporary": "TMPDIR" in os.environ,
            "session": os.getsid(0) == os.getpid(),
        }

    import multiprocessing
    multiprocessing.set_start_method("spawn")
    SEEN = "as of fit()"
    found = fit(look)
    assert os.path.isdir(temporary.name)
    print(json.dumps(found))
"""


def test_workers_see_of_a_driver_that_was_forked_what_they_see_otherwise(sandbox: Sandbox) -> None:
    (sandbox.root / "mine.py").write_text("VALUE = 'as imported'\n")
    found = {}
    for fork in ("1", "0"):
        found[fork] = _run(sandbox, _SURROUNDINGS, HOLDFAST_FORK_DRIVER=fork)
        (sandbox.root / "storage").rename(sandbox.root / f"storage-{fork}")
    log = _log(sandbox).splitlines()
    assert log == [_FORKED, "The agent is started as a new process: HOLDFAST_FORK_DRIVER is 0."]
    assert found["1"] == found["0"]
    assert found["1"]["value"] == "as imported"
    assert found["1"]["seen"] == "as of fit()"
    assert len((sandbox.root / "ended").read_text().split()) == 2  # the drivers, and no process of theirs


_DRAWS = """
    import random, numpy, torch

    def draw():
        mine = [random.random(), float(numpy.random.rand()), float(torch.rand(()))]
        train.report({"drawn": mine})
        return mine

    for module in (random, numpy.random):
        module.seed(1)
    torch.manual_seed(1)
    expected = [random.random(), float(numpy.random.rand()), float(torch.rand(()))]
    for module in (random, numpy.random):
        module.seed(1)
    torch.manual_seed(1)
    drawn = [fit(draw, name) for name in ("run", "again")]
    print(json.dumps([expected, *drawn]))
"""


def test_random_numbers_of_workers_are_neither_the_drivers_nor_each_others(sandbox: Sandbox) -> None:
    rows = _run(sandbox, _DRAWS)
    assert all(len(set(column)) == 3 for column in zip(*rows, strict=True))
    assert _log(sandbox).splitlines() == [_FORKED] * 2


_COUNTS_IMPORTS = """
    import sitecustomize, torch
    from holdfast.train.torch import TorchTrainer

    # The pools of OpenBLAS and OpenMP have threads now.
    import numpy
    numpy.ones((500, 500)) @ numpy.ones((500, 500))
    model = torch.nn.Linear(1000, 1000)
    model(torch.ones(1000, 1000)).sum().backward()

    def function():
        torch.set_num_threads(2)
        model = torch.nn.Linear(1000, 1000)
        model(torch.ones(1000, 1000)).sum().backward()
        torch.optim.SGD(model.parameters()).step()  # needs torch._dynamo
        (numpy.ones((500, 500)) @ numpy.ones((500, 500))).sum()
        return len(os.listdir("/proc/self/task"))

    value = fit(function, workers=2, kind=TorchTrainer)
    (torch.ones(1000, 1000) + 1).sum()  # the driver's pools work again
    numpy.ones((500, 500)) @ numpy.ones((500, 500))
    print(json.dumps([value, torch.get_num_threads()]))
"""


def test_torch_and_what_optimizers_need_are_imported_once_and_thread_pools_used_before_do_not_hang_workers(
    sandbox: Sandbox,
) -> None:
    site = sandbox.root / "site"
    site.mkdir()
    # The finder is asked for torch only where it is not there yet.
    (site / "sitecustomize.py").write_text(
        textwrap.dedent(f"""
        import os, sys
        class Count:
            @staticmethod
            def find_spec(name, path=None, target=None):
                if name in ("torch", "torch._dynamo"):
                    with open({str(sandbox.root / "imports")!r}, "a") as file:
                        file.write(f"{{name}}\\n")
        sys.meta_path.insert(0, Count)
        """)
    )
    _, threads = _run(sandbox, _COUNTS_IMPORTS, PYTHONPATH=str(site))
    assert threads == len(os.sched_getaffinity(0))
    assert _log(sandbox) == _FORKED
    assert (sandbox.root / "imports").read_text().split() == ["torch", "torch._dynamo"]


_LOGS = """
    import torch
    from torch._logging import trace_structured

    given = logging.StreamHandler(sys.stdout)
    logging.getLogger("torch").addHandler(given)
    logging.getLogger("json").addHandler(logging.lastResort)

    def function():
        before = os.readlink("/proc/self/fd/2")
        trace_structured("artifact", lambda: {})  # as torch.compile does
        after = os.readlink("/proc/self/fd/2") if os.path.exists("/dev/fd/2") else "closed"
        given = logging.getLogger("torch").handlers[-1]
        return [before == after, given.stream.fileno()]

    print(json.dumps(fit(function)))
"""


def test_handlers_that_open_files_of_their_own_do_not_close_the_standard_error_of_workers(sandbox: Sandbox) -> None:
    assert _run(sandbox, _LOGS) == [True, 2]
    assert _log(sandbox) == _FORKED


_REGISTERS = """
import colorsys
assert not hasattr(colorsys, "registered"), "registered twice"
colorsys.registered = True
def function():
    return __name__
"""


def test_a_module_that_cannot_be_imported_twice_is_imported_by_a_new_zygote(sandbox: Sandbox) -> None:
    """What it left in the library is there in a forked process."""
    (sandbox.root / "registering.py").write_text(_REGISTERS)
    text = """
        import registering
        print(json.dumps(fit(lambda: registering.function())))
    """
    assert _run(sandbox, text) == "registering"
    assert _log(sandbox) == _FORKED


def test_fit_in_two_threads_starts_the_agent_as_a_new_process(sandbox: Sandbox) -> None:
    text = """
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(2) as threads:
            values = list(threads.map(lambda name: fit(lambda: os.getppid(), name), ("a", "b")))
        print(json.dumps(len(values)))
    """
    assert _run(sandbox, text) == 2
    first, *_ = _log(sandbox).splitlines()
    assert first.startswith("The agent is started as a new process: the driver has")


def test_a_complete_run_leaves_no_forked_process(sandbox: Sandbox) -> None:
    text = """
        for _ in range(2):
            value = fit(lambda: 1)
        children = open(f"/proc/self/task/{os.getpid()}/children").read()
        print(json.dumps([value, children, threading.active_count()]))
        while len(os.listdir("/proc/self/task")) > 1:
            pass  # a thread that has ended is shown for a moment longer
    """
    assert _run(sandbox, text) == [1, "", 1]
    assert _log(sandbox).splitlines() == [_FORKED] * 2


def test_forked_agents_end_with_a_killed_driver(sandbox: Sandbox) -> None:
    gate = sandbox.gate("running")
    text = f"""
        def wait():
            open({gate!r}, "w").close()
            threading.Event().wait()

        print("started", flush=True)
        fit(wait, workers=1)
    """
    driver = _start(sandbox, text)
    try:
        with Path(gate).open("rb"):
            below = processes.descendants(driver.pid)
        commands = {processes.command_of(pid) for pid in below}
        assert {processes.name_of(pid) for pid in below} >= {"hf-agent", "hf-zygote", "hf-rank-0"}
        assert not any("script.py" in command for command in commands), "a kill by the script's name hits the agent"
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.communicate()
    processes.wait_gone(*below)
    assert _log(sandbox) == _FORKED
