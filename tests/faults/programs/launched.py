"""Hosts of `holdfast launch` for tests: each is a launcher with its script and its agent, on loopback or elsewhere.

Run as a script it trains until a file `end` is there: `python -m tests.faults.programs.launched DIRECTORY WORKERS`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.faults.programs import processes

from holdfast import train
from holdfast.train import Checkpoint, DataParallelTrainer, FailureConfig, RunConfig, ScalingConfig

_TREE = Path(__file__).parents[3]


class LaunchedHost:
    """One launcher. `directory` is where all hosts of a test write; each has a cache of its own."""

    def __init__(
        self,
        name: str,
        directory: Path,
        rendezvous: str,
        script: Sequence[str],
        *,
        address: str = "127.0.0.1",
        prefix: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        """`script` is what follows the launcher's own options; `prefix` a command that runs another."""
        self.name = name
        self._directory = directory
        command = [sys.executable, "-m", "holdfast", "launch", "--rdzv", rendezvous, "--host-id", name]
        command += ["--advertise", address, *script]
        with self._out.open("a") as out, self._err.open("a") as err:
            self.process = subprocess.Popen(
                [*prefix, *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=_TREE,
                env={
                    **os.environ,
                    "HOLDFAST_LOCAL_CACHE_DIR": str(directory / f"cache_{name}"),
                    "HOLDFAST_STATE_DIR": str(directory / f"state_{name}"),
                    "HOLDFAST_AGENTS_TIMEOUT_S": "120",
                    "HOLDFAST_BACKOFF_S": "0.01",
                    "HOLDFAST_QUIET": "1",
                    "TEST_HOST": name,
                    **(environment or {}),
                },
            )

    @property
    def _out(self) -> Path:
        return self._directory / f"{self.name}.out"

    @property
    def _err(self) -> Path:
        return self._directory / f"{self.name}.err"

    @property
    def output(self) -> str:
        return self._out.read_text()

    @property
    def errors(self) -> str:
        return self._err.read_text()

    @property
    def leads(self) -> bool:
        return f"{self.name} leads" in self.errors

    def wait(self, timeout_s: float = 120.0) -> int:
        return self.process.wait(timeout_s)

    def result(self) -> dict[str, Any]:
        """What the script printed last."""
        code = self.wait()
        assert code == 0, f"{self.name} ended with {code}:\n{self.errors}{self.output}"
        found: dict[str, Any] = json.loads(self.output.splitlines()[-1])
        return found

    def kill_all(self) -> None:
        """As if the power failed: nothing here runs on, or says goodbye. Agents are in sessions of their own, but they
        and what they start have this host's name in their environment."""
        while pids := self._pids():
            processes.signal_all(pids, signal.SIGKILL)
            if self.process.pid in pids:
                self.process.wait()

    def _pids(self) -> list[int]:
        cache = f"HOLDFAST_LOCAL_CACHE_DIR={self._directory / f'cache_{self.name}'}"
        return [pid for pid in processes.with_environment(cache) if processes.describe(pid).find("state Z") < 0]


@contextmanager
def launched_hosts() -> Iterator[list[LaunchedHost]]:
    """Whoever is put into the list is killed at the end, with everything that it has started."""
    hosts: list[LaunchedHost] = []
    try:
        yield hosts
    finally:
        for host in hosts:
            host.kill_all()
            host.process.wait()


def work(config: dict[str, Any]) -> dict[str, Any]:
    """Count steps, with a checkpoint after each, until the file `end` is there."""
    directory = Path(config["directory"])
    rank = train.get_context().get_world_rank()
    step = 0
    if (checkpoint := train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as restored:
            step = int(Path(restored, "step").read_text())
    first = step
    with (directory / f"starts_{rank}").open("a") as file:
        file.write(f"{os.environ['TEST_HOST']} {step}\n")
    while not (directory / "end").exists():
        step += 1
        with tempfile.TemporaryDirectory() as made:
            Path(made, "step").write_text(str(step))
            train.report({"step": step}, checkpoint=Checkpoint.from_directory(made) if rank == 0 else None)
        time.sleep(0.02)
    return {"first": first, "last": step}


def main() -> None:
    directory, workers = Path(sys.argv[1]), int(sys.argv[2])
    trainer = DataParallelTrainer(
        work,
        train_loop_config={"directory": str(directory)},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(storage_path=directory / "storage", failure_config=FailureConfig(max_failures=-1)),
    )
    result = trainer.fit()
    print(json.dumps({"value": result.return_value, "metrics": result.metrics, "path": result.path}), flush=True)


if __name__ == "__main__":
    main()
