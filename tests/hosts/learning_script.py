"""`learning.learn` for `holdfast launch`: `python -m tests.hosts.learning_script DIRECTORY LEAST MOST` trains until a
file `end` is in the directory, and prints what `fit()` returned as its last line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.hosts.learning import make_trainer

from holdfast.train import ScalingConfig


def main() -> None:
    directory, least, most = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    scaling = ScalingConfig(num_workers=(least, most), elastic_resize_monitor_interval_s=0.5, last_call_timeout=0)
    result = make_trainer(directory, directory / "storage", scaling).fit()
    frame, checkpoint = result.metrics_dataframe, result.checkpoint
    assert frame is not None and checkpoint is not None
    told = {"value": result.return_value, "metrics": result.metrics, "path": result.path, "config": result.config}
    told |= {"steps": frame["step"].tolist(), "checkpoint": checkpoint.path}
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
