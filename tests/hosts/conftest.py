"""The fixtures of all tests with several hosts: two or four of them, and a directory that all see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults.programs import processes
from tests.hosts.namespaces import Host, network

from holdfast.storage.run_secret import open_secret

PORT = 7077


class Hosts:
    """The driver runs on the first, agents on all of them."""

    def __init__(self, hosts: list[Host], root: Path) -> None:
        self.all = hosts
        self.first, self.second = hosts[:2]
        self.root = root
        self.storage = root / "storage"
        self.directory = root / "directory"
        self.directory.mkdir()
        self._processes: list[subprocess.Popen[str]] = []
        self.environment = {
            "HOLDFAST_STATE_DIR": str(root / "state"),
            "HOLDFAST_AGENTS_TIMEOUT_S": "120",
            "HOLDFAST_BACKOFF_S": "0.01",
            "HOLDFAST_QUIET": "1",
        }

    @property
    def listen(self) -> str:
        return f"{self.first.address}:{PORT}"

    def start_driver(self, function: str, workers: int = 2, **options: Any) -> subprocess.Popen[str]:
        """Run a function of `driver` on the first host."""
        scaling = {"num_workers": workers, "listen": self.listen}
        given = {
            "function": function,
            "scaling": scaling,
            "storage": str(self.storage),
            "config": {"directory": str(self.directory)},
            **options,
        }
        command = [sys.executable, "-m", "tests.hosts.driver", json.dumps(given)]
        return self._start(self.first, command, "driver", {})

    def start_agent(self, host: Host, name: str, *options: str, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "holdfast", "agent", "--join", f"holdfast://{self.listen}"]
        command += ["--agent-id", name, "--slots", "1", *options]
        return self._start(host, command, name, {"TEST_HOST": name, **environment})

    def start_agent_without_storage(self, host: Host, name: str) -> subprocess.Popen[str]:
        """An agent that sees an empty directory where the driver has its storage."""
        self.storage.mkdir(exist_ok=True)
        hide = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(self.storage)]
        command = [sys.executable, "-m", "holdfast", "agent", "--join", f"holdfast://{self.listen}"]
        command += ["--agent-id", name, "--slots", "1"]
        return self._start(host, [*hide, *command], name, {"TEST_HOST": name})

    def wait_for_file(self, name: str, minimum: int = 0) -> None:
        """Until a worker has written a file; with `minimum`, a number of at least so much."""
        path = self.directory / name

        def is_there() -> bool:
            return path.exists() and (not minimum or int(path.read_text()) >= minimum)

        processes.wait_until(is_there, f"{name} is written")

    def end(self) -> None:
        """Let the function `work` return."""
        (self.directory / "end").touch()

    def result(self, driver: subprocess.Popen[str], timeout_s: float = 120) -> dict[str, Any]:
        """What the driver's `fit()` returned."""
        assert driver.wait(timeout_s) == 0, self.output()
        found: dict[str, Any] = json.loads(self.log("driver").splitlines()[-1])
        return found

    def log(self, name: str) -> str:
        """What the driver printed, or an agent on stderr."""
        return (self.root / f"{name}.out").read_text()

    def output(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()}" for path in self.root.glob("*.out"))

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _start(self, host: Host, command: list[str], name: str, environment: dict[str, str]) -> subprocess.Popen[str]:
        own = {"HOLDFAST_LOCAL_CACHE_DIR": str(self.root / f"cache_{name}"), **self.environment, **environment}
        with (self.root / f"{name}.out").open("a") as output:
            process = host.start(command, own, stdout=output, stderr=subprocess.STDOUT, cwd=_TREE)
        self._processes.append(process)
        return process


_TREE = Path(__file__).parents[2]


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    yield from _hosts(2, tmp_path, monkeypatch)


@pytest.fixture
def four_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    yield from _hosts(4, tmp_path, monkeypatch)


def _hosts(count: int, root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    monkeypatch.setenv("HOLDFAST_STATE_DIR", str(root / "state"))
    monkeypatch.delenv("HOLDFAST_TOKEN", raising=False)
    open_secret()  # all hosts have the same home
    assert os.geteuid() == 0
    with network(count) as found:
        made = Hosts(found, root)
        try:
            yield made
        finally:
            made.close()
