"""A driver that tests can kill: `python -m tests.faults.programs.driver_main JSON` runs a function of `jobs`.

Its standard output is one line of JSON for each record of the run (HOLDFAST_JSON) and a last one for what `fit()` came
to; `driver` reads them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.faults.programs import jobs

from holdfast import train
from holdfast.errors import HoldfastError
from holdfast.storage.store import Store

__all__ = ["main", "trainer"]


def trainer(
    *,
    storage: str,
    name: str = "run",
    job: str = "steps",
    config: dict[str, Any],
    workers: int = 2,
    failure: dict[str, Any] | None = None,
    run: dict[str, Any] | None = None,
) -> train.DataParallelTrainer:
    """The trainer that these options mean; tests in one process use it as well."""
    run = dict(run or {})
    if "checkpoint_config" in run:
        run["checkpoint_config"] = train.CheckpointConfig(**run["checkpoint_config"])
    return train.DataParallelTrainer(
        getattr(jobs, job),
        train_loop_config=config,
        scaling_config=train.ScalingConfig(num_workers=workers),
        run_config=train.RunConfig(
            name=name, storage_path=storage, failure_config=train.FailureConfig(**(failure or {})), **run
        ),
    )


def _stop_in_removal_of(name: str) -> None:
    """Have this process stop itself, once, in the middle of the removal of the checkpoint `name`."""
    from holdfast.checkpoint import removal

    look, names = removal.is_pinned, [name]

    def stopping(store: Store, name: str) -> bool:
        caller = sys._getframe(1).f_code.co_name
        if caller == "remove" and name in names:
            names.remove(name)
            os.kill(os.getpid(), signal.SIGSTOP)
        return look(store, name)

    removal.is_pinned = stopping


def main() -> int:
    code, outcome = 0, {}
    if (name := os.environ.get("HOLDFAST_TEST_STOP_IN_REMOVAL")) is not None:
        _stop_in_removal_of(name)
    try:
        options = json.loads(sys.argv[1])
        if (procs := options.pop("cgroup_procs", None)) is not None:
            Path(procs).write_text(str(os.getpid()))  # this process and all that it starts
        result = trainer(**options).fit()
        outcome = {"kind": "Returned", "value": result.return_value, "metrics": result.metrics}
    except KeyboardInterrupt:
        code, outcome = 130, {"kind": "Raised", "type": "KeyboardInterrupt", "text": ""}
    except HoldfastError as error:
        failures = {rank: repr(one) for rank, one in getattr(error, "worker_failures", {}).items()}
        code = 1
        outcome = {"kind": "Raised", "type": type(error).__name__, "text": str(error), "failures": failures}
    print(json.dumps(outcome), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
