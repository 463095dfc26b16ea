"""Which drivers may be forked: each reason against it, in a process of its own, since the tests' own has threads."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

_REASONS = {
    "HOLDFAST_FORK_DRIVER is 0": "os.environ['HOLDFAST_FORK_DRIVER'] = '0'",
    "the driver has 1 thread(s) besides its main one (ticker)": (
        "threading.Thread(target=threading.Event().wait, name='ticker', daemon=True).start()"
    ),
    "the driver is interactive": "sys.ps1 = '>>> '",
    "a debugger, a profiler or a tracer is active in the driver": "sys.setprofile(lambda *_: None)",
    "its standard input, output or error is closed": "os.close(0)",
    "the driver has /dev/accel-0 open": "real = os.readlink; os.readlink = lambda path: '/dev/accel-0'",
    "workers get the variable MINE, which modules of the driver may have read already": "environment['MINE'] = '1'",
    "fit() is called while the module half_imported is imported": "import half_imported",
    "the driver has 1 thread(s) of a library that is not known to survive a fork": (
        "import ctypes; libc = ctypes.CDLL(None); handle = ctypes.c_ulong(); "
        "libc.pthread_create(ctypes.byref(handle), None, libc.pause, None)"
    ),
    "the extension module built cannot be imported twice": (
        "import types, importlib.machinery as m; built = types.ModuleType('built'); built.__file__ = '/mine/built.so'; "
        "built.__spec__ = m.ModuleSpec('built', None, origin='/mine/built' + m.EXTENSION_SUFFIXES[0]); "
        "sys.modules['built'] = built"
    ),
    "the driver holds 1.1 GiB of memory": "safety._private_bytes = lambda: int(1.1 * (1 << 30))",
    None: "os.environ['HOLDFAST_FORK_DRIVER'] = '1'; os.environ['HERE'] = environment['HERE'] = '1'",
}


def _run(tmp_path: Path, text: str, *options: str) -> list[Any]:
    """What a process prints, one JSON a line."""
    head = "import json, os, sys, threading, warnings\nimport holdfast.zygote.driver_fork_safety as safety\n"
    (tmp_path / "script.py").write_text(head + textwrap.dedent(text))
    command = [sys.executable, *options, str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("reason", _REASONS, ids=lambda reason: str(reason)[:40])
def test_a_driver_is_not_forked_for_this_reason(tmp_path: Path, reason: str | None) -> None:
    (tmp_path / "half_imported.py").write_text("from __main__ import tell\ntell()\n")
    text = f"""
        environment, told = {{}}, []
        def tell():
            if not told:
                told.append(safety.unfit_reason(environment))
        {_REASONS[reason]}
        tell()
        sys.setprofile(None)
        print(json.dumps(told[0]))
    """
    assert _run(tmp_path, text) == [reason]


@pytest.mark.parametrize("options", [["-O"], ["-u", "-X", "dev"], ["-u"]], ids=" ".join)
def test_options_of_the_interpreter_keep_a_driver_from_being_forked(tmp_path: Path, options: list[str]) -> None:
    (reason,) = _run(tmp_path, "print(json.dumps(safety.unfit_reason({})))", *options)
    wanted = next((one for one in options if one != "-u"), None)
    assert reason == (wanted and f"the driver was started with an option of the interpreter ({wanted})")


def test_only_modules_that_are_not_installed_are_forgotten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "part.py").write_text("")
    text = """
        import mine.part, msgspec, http.client, types
        sys.modules["made_up"] = types.ModuleType("made_up")
        print(json.dumps(sorted(safety.user_modules())))
    """
    assert _run(tmp_path, text) == [["made_up", "mine", "mine.part"]]


def test_an_agent_that_nobody_starts_leaves_no_socket_open(tmp_path: Path) -> None:
    text = """
        from holdfast.engines.driver_fork import forked_agent

        with forked_agent({}) as agent:
            assert agent is not None
        print(json.dumps(agent._connection.fileno()))
    """
    assert _run(tmp_path, text) == [-1]


def test_settings_of_torch_and_its_devices_keep_a_driver_from_being_forked(tmp_path: Path) -> None:
    text = """
        import logging, torch
        from holdfast.engines.driver_fork import forked_agent

        told = []
        class Tell(logging.Handler):
            def emit(self, record):
                told.append(record.getMessage().partition(": ")[2])
        logging.getLogger("holdfast").addHandler(Tell())
        logging.getLogger("holdfast").setLevel(logging.INFO)

        def tell():
            with forked_agent({}):
                pass
            print(json.dumps(told.pop()))

        torch.set_default_dtype(torch.float64)
        tell()
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(True)
        tell()
        torch.use_deterministic_algorithms(False)
        torch.cuda.is_initialized = lambda: True
        tell()
        torch.cuda.is_initialized = lambda: False
        driver = os.getpid()
        torch.cuda._is_in_bad_fork = lambda: os.getpid() != driver
        tell()
        torch.cuda._is_in_bad_fork = lambda: False
        class Settings:
            @property
            def __class__(self):
                raise RuntimeError("nothing is configured yet")
        settings = Settings()
        operators = torch.library.Library("mine", "DEF")
        tell()
        del operators
        tell()
        torch.set_num_threads(2)
        tell()
    """
    default = "is not at its default in the driver, and would be seen by workers."
    assert _run(tmp_path, text) == [
        f"torch.set_default_dtype {default}",
        f"torch.use_deterministic_algorithms {default}",
        "the driver has initialised CUDA.",
        "the driver has asked CUDA for its devices, which could not be used in a forked process.",
        "the module __main__ has registered operators of torch, which cannot be done twice.",
        "",  # it was forked
        "the driver has 1 thread(s) of a library that is not known to survive a fork.",
    ]
