"""A script with local mode under torchrun: it is refused in one sentence, not run as copies of rank 0."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.faults.programs.place import Place

_SCRIPT = """
    from pathlib import Path
    from holdfast import train

    def train_loop():
        Path({marker!r}).write_text("ran")
        return train.get_context().get_world_size()

    print(train.DataParallelTrainer(
        train_loop,
        scaling_config=train.ScalingConfig(num_workers=0),
        run_config=train.RunConfig(name="run", storage_path={storage!r}),
    ).fit().return_value)
"""


@pytest.mark.parametrize("count", [1, 2])
def test_local_mode_under_torchrun_is_one_process_or_refused(place: Place, count: int) -> None:
    marker = place.root / "marker"
    script = place.root / "script.py"
    script.write_text(textwrap.dedent(_SCRIPT).format(marker=str(marker), storage=str(place.storage)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", str(script)]
    done = subprocess.run(command, cwd=Path("/"), capture_output=True, text=True, timeout=200, check=False)
    if count == 1:
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["1"]
        return
    assert done.returncode != 0
    assert "ScalingConfig(num_workers=0) under torchrun" in done.stderr
    assert "python script.py" in done.stderr and "num_workers=2" in done.stderr
    assert not marker.exists(), "no copy of the function ran"
    assert not (place.storage / "run").exists()
