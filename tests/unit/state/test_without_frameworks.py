"""Neither torch nor numpy is needed for what does not use them, and none of the package imports them by itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy
import torch

from holdfast.checkpoint.state.plan import plan

PROGRAM = """
import sys
for missing in {missing!r}:
    sys.modules[missing] = None
from holdfast.checkpoint.handle import Checkpoint
from holdfast.errors import MissingExtra
state = {state}
where = sys.argv[1]
Checkpoint.from_state(state).to_directory(where)
back = Checkpoint(where).load_state()
assert repr(back) == repr(state), back
assert repr(Checkpoint.from_state(state).load_state()) == repr(state)
for other in sys.argv[2:]:
    try:
        Checkpoint(other).load_state()
    except MissingExtra as error:
        assert "pip install" in str(error)
    else:
        raise AssertionError("it was loaded")
assert not ({loaded!r} & set(sys.modules))
"""


def run(program: str, *arguments: Path) -> None:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_plain_values_work_without_torch_and_numpy(tmp_path: Path) -> None:
    plan({"a": torch.ones(1)}).write_files(tmp_path / "torch")
    plan({"a": numpy.ones(1)}).write_files(tmp_path / "numpy")
    plan({"a": torch.float32}).write_files(tmp_path / "tag")
    state = "{'a': [1, 2.5, None, (True, b'x')], 3: {'b': 'text'}}"
    program = PROGRAM.format(missing=["torch", "numpy"], state=state, loaded={"safetensors"})
    run(program, tmp_path / "plain", tmp_path / "torch", tmp_path / "numpy", tmp_path / "tag")


def test_plain_values_import_no_framework(tmp_path: Path) -> None:
    program = PROGRAM.format(missing=[], state="{'a': 1}", loaded={"torch", "numpy", "safetensors", "pickle5"})
    run(program, tmp_path / "plain")


def test_arrays_work_without_torch(tmp_path: Path) -> None:
    state = "{'a': __import__('numpy').arange(5), 'b': __import__('numpy').float32(1.5), 'c': 1}"
    run(PROGRAM.format(missing=["torch"], state=state, loaded={"safetensors"}), tmp_path / "arrays")
