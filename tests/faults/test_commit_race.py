"""Several processes commit to one run at once: every commit is complete, indices are unique, nothing is lost.

Also where the server ignores put-if-absent, so that writers use claims.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from tests.contract.servers import Server, fuse_mount

from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.verify import verify
from holdfast.storage.locate import open_store

PROCESSES = 6
ROUNDS = 3


@pytest.fixture(params=["posix", "fuse", "moto", "rclone"])
def uri(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    environment: Mapping[str, str] = {}
    with ExitStack() as stack:
        if request.param == "posix":
            found = str(tmp_path / "run")
        elif request.param == "fuse":
            found = str(stack.enter_context(fuse_mount(tmp_path / "backing", tmp_path / "mount")) / "run")
        else:
            server: Server = request.getfixturevalue(request.param)
            found, environment = server.uri(server.new_bucket(), "run"), server.environment
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)
        yield found


def test_many_processes_commit_at_once(uri: str) -> None:
    store = open_store(uri)
    repository = Path(__file__).resolve().parents[2]
    racers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.faults.race_writer", uri, str(who), str(ROUNDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=repository,
            text=True,
        )
        for who in range(PROCESSES)
    ]
    commits: list[tuple[str, int]] = []
    try:
        for racer in racers:
            assert racer.stdout is not None
            assert racer.stdout.readline() == "ready\n"
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        for racer in racers:
            answer, _ = racer.communicate()
            assert racer.returncode == 0
            commits += [msgspec.json.decode(line, type=tuple[str, int]) for line in answer.splitlines()]
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()
    assert len(commits) == PROCESSES * ROUNDS
    assert len({index for _, index in commits}) == len(commits)
    report = verify(store, deep=True)
    assert report.damaged == {} and report.leftovers == [] and report.void == []
    assert [(found.name, found.index) for found in report.ok] == sorted(commits, key=lambda one: one[1])
    assert Catalog(store).committed() == report.ok
    everyone = {(who, number) for who in range(PROCESSES) for number in range(ROUNDS)}
    assert {(found.metrics["who"], found.metrics["round"]) for found in report.ok} == everyone
    for found in report.ok:
        said = store.get(f"{found.name}/own.txt").decode()
        assert said == f"writer {found.metrics['who']}, round {found.metrics['round']}"
