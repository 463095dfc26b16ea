"""Processes that the training function spawns get what the script defines, without a main guard."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest
from tests.faults.programs.sandbox import Sandbox

_SCRIPT = """
    import dataclasses, io, multiprocessing, pickle
    import torch
    import torch.multiprocessing
    from torch.utils.data import DataLoader, Dataset
    from holdfast import train

    SCALE = 10

    @dataclasses.dataclass
    class Batch:
        values: list

    class Numbers(Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, at):
            return at * SCALE

    class Net(torch.nn.Module):
        def forward(self, x):
            return x

    def collate(items):
        return Batch(list(items))

    def doubled(x):
        return x * 2 * SCALE

    def in_child(rank, path):
        with open(f"{path}.{rank}", "w") as file:
            file.write(str(doubled(rank)))

    def train_loop(config):
        found = {}
        for context in ("spawn", "forkserver"):
            loader = DataLoader(
                Numbers(), batch_size=3, num_workers=1, collate_fn=collate, multiprocessing_context=context
            )
            batch, = loader
            assert type(batch) is Batch
            found[context] = batch.values
        torch.multiprocessing.spawn(in_child, ("spawned",), nprocs=1)
        found["children"] = [open(f"spawned.{rank}").read() for rank in (0,)]
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found["pool"] = pool.map(doubled, [1, 2])
            found["local"] = pool.apply(lambda: "a lambda")
        file = io.BytesIO()
        torch.save(Net(), file)
        file.seek(0)
        found["module"] = type(torch.load(file, weights_only=False)) is Net
        found["pickled"] = pickle.loads(pickle.dumps(Batch([1]))) == Batch([1])
        return found

    print("top level", flush=True)
    result = train.DataParallelTrainer(
        train_loop,
        scaling_config=train.ScalingConfig(num_workers=1),
        run_config=train.RunConfig(name="run", storage_path={storage!r}),
    ).fit()
    import json
    print(json.dumps(result.return_value))
"""


def test_spawned_processes_get_what_the_script_defines(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TMPDIR")  # the test's own is too long for the sockets of a forkserver; workers get a short one
    script = sandbox.root / "script.py"
    script.write_text(textwrap.dedent(_SCRIPT).replace("{storage!r}", repr(str(sandbox.storage))))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert first == "top level", "the script runs once"
    assert json.loads(last) == {
        "spawn": [0, 10, 20],
        "forkserver": [0, 10, 20],
        "children": ["0"],
        "pool": [20, 40],
        "local": "a lambda",
        "module": True,
        "pickled": True,
    }
