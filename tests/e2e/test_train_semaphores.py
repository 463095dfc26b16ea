"""DataLoaders with spawned processes leave no named semaphore, when their worker is killed or stopped."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.faults.programs.sandbox import Sandbox

_SCRIPT = """
    import os, signal
    from multiprocessing import resource_tracker
    from torch.utils.data import DataLoader
    from holdfast import train

    def train_loop():
        register = resource_tracker.register

        def recording(name, kind):
            with open({names!r}, "a") as file:
                print(name, file=file)
            register(name, kind)

        resource_tracker.register = recording
        batches = iter(DataLoader(list(range(10)), num_workers=1, multiprocessing_context="spawn"))
        next(batches)
        if train.get_context().get_world_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

    train.DataParallelTrainer(
        train_loop,
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(name="run", storage_path={storage!r}),
    ).fit()
"""


def test_a_spawning_data_loader_leaves_no_named_semaphore_when_its_worker_is_killed_or_stopped(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TMPDIR")  # the test's own is too long for multiprocessing's sockets; workers get a short one
    script, names = sandbox.root / "script.py", sandbox.root / "names"
    text = textwrap.dedent(_SCRIPT).replace("{storage!r}", repr(str(sandbox.storage)))
    script.write_text(text.replace("{names!r}", repr(str(names))))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200, check=False)
    files = [Path("/dev/shm", f"sem.{name.removeprefix('/')}") for name in names.read_text().split()]
    left = [file for file in files if file.exists()]
    for file in left:
        file.unlink()
    assert done.returncode == 1 and "was killed by SIGKILL" in done.stderr, done.stderr
    assert len(files) >= 3
    assert left == []
