"""Scripts without a main guard, in a notebook, with the function in `__main__`, called twice."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

from tests.faults.programs.sandbox import Sandbox

_SCRIPT = """
    import os
    from holdfast import train
    from holdfast.train import RunConfig, ScalingConfig
    import beside

    FACTOR = 3

    def scaled(value):
        return value * FACTOR

    def train_loop(config):
        train.report({{"x": scaled(config["x"]), "beside": beside.NAME}})
        return scaled(config["x"])

    print("top level", flush=True)
    trainer = train.DataParallelTrainer(
        train_loop,
        train_loop_config={{"x": 14}},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path={storage!r}),
    )
    result = trainer.fit()
    print("value", result.return_value, result.metrics["beside"], flush=True)
"""


def _write(sandbox: Sandbox) -> Path:
    (sandbox.root / "beside.py").write_text('NAME = "a module beside the script"\n')
    script = sandbox.root / "script.py"
    script.write_text(textwrap.dedent(_SCRIPT).format(storage=str(sandbox.storage)))
    return script


def _run(arguments: list[str], cwd: Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, input=text, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_a_script_without_main_guard_runs_its_top_level_once(sandbox: Sandbox) -> None:
    script = _write(sandbox)
    done = _run([str(script)], cwd=Path("/"))
    assert done.stdout.splitlines() == ["top level", "value 42 a module beside the script"]
    again = _run([str(script)], cwd=Path("/"))
    assert again.stdout.splitlines() == ["top level", "value 42 a module beside the script"]
    assert "complete already" in again.stderr or again.stderr == ""


def test_a_function_without_a_source_file_runs(sandbox: Sandbox) -> None:
    """As a notebook's cells, or what is typed at a prompt."""
    source = _write(sandbox).read_text()
    for name, arguments, typed in (("argument", ["-c", source], None), ("prompt", ["-"], source)):
        changed = [one.replace('"run"', f'"{name}"') for one in arguments]
        done = _run(changed, sandbox.root, typed and typed.replace('"run"', f'"{name}"'))
        assert done.stdout.splitlines()[-1] == "value 42 a module beside the script"


def test_notebook_cells_run_inside_a_running_event_loop(sandbox: Sandbox) -> None:
    """Notebooks run cells by `exec` inside an event loop."""
    _write(sandbox)
    cells = textwrap.dedent("""
        import asyncio
        cells = [open("script.py").read()]
        async def kernel():
            space = {"__name__": "__main__"}
            for cell in cells:
                exec(compile(cell, "<ipython-input-1>", "exec"), space)
        asyncio.run(kernel())
    """)
    done = _run(["-c", cells], sandbox.root)
    assert done.stdout.splitlines()[-1] == "value 42 a module beside the script"


def test_fit_works_outside_the_main_thread(sandbox: Sandbox) -> None:
    _write(sandbox)
    code = textwrap.dedent("""
        import threading
        thread = threading.Thread(target=lambda: exec(open("script.py").read(), {"__name__": "__main__"}))
        thread.start()
        thread.join()
    """)
    assert _run(["-c", code], sandbox.root).stdout.splitlines()[-1] == "value 42 a module beside the script"
