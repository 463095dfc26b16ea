"""A driver that trains on agents that join by themselves, for `bench.agents`.

`python -m bench.drivers.hub STORAGE HOST:PORT WORKERS [--tls]`: listens there, with TLS though the address is one of
loopback where asked for. Raises its limit on open files.
"""

from __future__ import annotations

import argparse
import resource
from pathlib import Path

from holdfast.train import DataParallelTrainer, FailureConfig, RunConfig, ScalingConfig
from holdfast.wire import channel

__all__ = ["main"]


def _nothing() -> None:
    """No agent of the benchmark ever runs it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("storage")
    parser.add_argument("address")
    parser.add_argument("workers", type=int)
    parser.add_argument("--tls", action="store_true")
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if options.tls:
        channel.is_loopback = lambda address: False  # type: ignore[attr-defined]
    empty = Path(options.storage, "working-dir")  # or every agent would be sent this repository
    empty.mkdir(parents=True)
    DataParallelTrainer(
        _nothing,
        scaling_config=ScalingConfig(num_workers=options.workers, engine="join", listen=options.address),
        run_config=RunConfig(
            name="agents",
            storage_path=options.storage,
            verbose=0,
            failure_config=FailureConfig(max_failures=-1),
            worker_runtime_env={"working_dir": str(empty)},
        ),
    ).fit()


if __name__ == "__main__":
    main()
