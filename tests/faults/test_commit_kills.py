"""Kill a writer at each step of the commit protocol, on every kind of storage: what is committed stays whole, the
interrupted checkpoint is invisible, and the next commit succeeds.

`kill_writer` runs the process that is killed, `victims` checks the storage afterwards. Steps are counted in a first run
that is not killed, so a step that is added to the protocol is tested without a change here. On storage with slow calls
only the first and last of equal calls in a row are tested, and all of them in the slow tier.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.contract.servers import fuse_mount, moto, rclone_s3
from tests.faults.kill_writer import Job
from tests.faults.victims import Scene, Victims, make_source, victims

from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.commit import commit, commit_directory, reserve, upload_part
from holdfast.errors import Fenced
from holdfast.storage.locate import open_store

MIB = 1024 * 1024


READS = ("get", "get_range", "size", "list", "children", "download")


class Place(NamedTuple):
    """A storage to be killed on, and how often at random times."""

    uri: str
    victims: Victims
    random_kills: int
    every_call: bool

    def steps(self, calls: list[str]) -> list[int]:
        """The calls to be killed before: all of them; or those right after a change that begin or end a row of calls
        of the same kind (several uploads, several deletions)."""
        if self.every_call:
            return list(range(len(calls)))
        kinds = ["", *(call.partition(" ")[0] for call in calls), ""]

        def counts(at: int) -> bool:
            before, this, after = kinds[at : at + 3]
            return at == 0 or (before not in READS and not before == this == after)

        return [at for at in range(len(calls)) if counts(at)]


def _all_calls(name: str) -> object:
    return pytest.param(f"{name}-all", marks=[pytest.mark.slow, pytest.mark.timeout(900)])


@pytest.fixture(scope="module", params=["posix", "fuse", "moto", "rclone", _all_calls("moto"), _all_calls("rclone")])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    environment: Mapping[str, str] = {}
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        # In memory: a kill leaves the same files on any disk, and fsync to a real one takes most of the time.
        shm = "/dev/shm" if Path("/dev/shm").is_dir() else None
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-kills-", dir=shm)))
        kind, _, every = request.param.partition("-")
        if kind == "posix":
            uri, random_kills = str(root), 80
        elif kind == "fuse":
            uri, random_kills = str(stack.enter_context(fuse_mount(root / "backing", root / "mount"))), 20
        else:
            server = stack.enter_context(moto() if kind == "moto" else rclone_s3(root))
            environment, random_kills = server.environment, 50 if every else 8
            uri = server.uri(server.new_bucket())
        for variable, value in environment.items():
            patch.setenv(variable, value)
        yield Place(
            uri, stack.enter_context(victims(environment)), random_kills, every_call=bool(every) or not environment
        )


@pytest.fixture
def scene(place: Place, tmp_path: Path, request: pytest.FixtureRequest) -> Scene:
    """A run with one checkpoint in it, and the directory that the next one is made of."""
    store = open_store(place.uri).sub(f"run-{abs(hash(request.node.name)) % 10**8}")
    commit_directory(store, make_source(tmp_path / "source", 0), metrics={"attempt": 0})
    return Scene(store, store.uri, make_source(tmp_path / "source", 1))


def manifest_call(calls: list[str]) -> int:
    [at] = [
        at for at, call in enumerate(calls) if call.startswith(("create", "put")) and call.endswith("/.manifest.json")
    ]
    return at


@pytest.mark.parametrize("name", [None, "best"])
def test_writer_killed_before_each_store_call_of_a_commit(place: Place, scene: Scene, name: str | None) -> None:
    job = Job(uri=scene.uri, task="commit", source=str(scene.source), name=name)
    calls = place.victims.run(job).calls
    commits_at = manifest_call(calls)
    assert any(call.startswith("copy") for call in calls), "the unchanged file is copied, so that step is killed too"
    scene.recover()
    for at in place.steps(calls):
        before = scene.committed()
        outcome = place.victims.run(
            Job(uri=scene.uri, task="commit", source=str(scene.source), name=name, attempt=at + 1, before_call=at)
        )
        assert outcome.killed
        fresh = scene.check_after(before, attempt=at + 1)
        assert (fresh is not None) == (at > commits_at), (at, calls[at])
        scene.recover(name)


def test_writer_killed_before_each_store_call_of_a_two_rank_commit(place: Place, scene: Scene, tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / "ranks" / f"rank{rank}").mkdir(parents=True)
        (tmp_path / "ranks" / f"rank{rank}" / f"shard-{rank}.bin").write_bytes(bytes([rank]) * 1000)
    job = Job(uri=scene.uri, task="ranks", source=str(tmp_path / "ranks"))
    calls = place.victims.run(job).calls
    commits_at = manifest_call(calls)
    scene.recover()
    for at in place.steps(calls):
        before = scene.committed()
        assert place.victims.run(
            Job(uri=scene.uri, task="ranks", source=str(tmp_path / "ranks"), attempt=at + 1, before_call=at)
        ).killed
        fresh = scene.check_after(before, attempt=at + 1)
        assert (fresh is not None) == (at > commits_at), (at, calls[at])
        scene.recover()


def test_writer_killed_within_a_large_upload(place: Place, scene: Scene) -> None:
    make_source(scene.source, 2, big_bytes=17 * MIB)
    for block in range(5):
        before = scene.committed()
        job = Job(uri=scene.uri, task="commit", source=str(scene.source), attempt=9, at_block=block)
        assert place.victims.run(job).killed
        assert scene.check_after(before, attempt=9) is None
    scene.recover()


def test_writer_killed_at_random_times(place: Place, scene: Scene) -> None:
    job = Job(uri=scene.uri, task="commit", source=str(scene.source))
    normal_s = min(place.victims.run(job).took_s for _ in range(3))
    scene.recover()
    dice = random.Random(19)
    killed = 0
    for attempt in range(1, place.random_kills + 1):
        before = scene.committed()
        delay_s = dice.uniform(0, 1.2 * normal_s)
        job = Job(uri=scene.uri, task="commit", source=str(scene.source), attempt=attempt, delay_s=delay_s)
        outcome = place.victims.run(job)
        fresh = scene.check_after(before, attempt)
        killed += outcome.killed
        if not outcome.killed:
            assert fresh is not None
            normal_s = min(normal_s, outcome.took_s)  # the machine may have been busy with something else at first
        scene.recover()
    assert killed > place.random_kills // 5


def test_process_killed_before_each_store_call_of_a_removal(place: Place, scene: Scene) -> None:
    names = [commit_directory(scene.store, scene.source, metrics={}).name for _ in range(2)]
    calls = place.victims.run(Job(uri=scene.uri, task="remove", name=names[0])).calls
    for at in place.steps(calls):
        doomed = commit_directory(scene.store, scene.source, metrics={}).name
        kept = [name for name in scene.committed() if name != doomed]
        assert place.victims.run(Job(uri=scene.uri, task="remove", name=doomed, before_call=at)).killed
        visible = [name for name in scene.committed() if name != doomed]
        assert visible == kept
        scene.check_after(scene.committed(), attempt=0)
        scene.recover()


@pytest.mark.parametrize("task", ["seal", "repair"])
def test_process_killed_before_each_store_call_of_a_repair(place: Place, scene: Scene, task: str) -> None:
    job = Job(uri=scene.uri, task="commit", source=str(scene.source))
    dies_at = manifest_call(place.victims.run(job).calls)
    scene.recover()

    def crash() -> None:
        doomed = Job(uri=scene.uri, task="commit", source=str(scene.source), before_call=dies_at)
        assert place.victims.run(doomed).killed

    crash()
    calls = place.victims.run(Job(uri=scene.uri, task=task, attempt=1)).calls
    assert any(call.startswith("delete") for call in calls)
    scene.recover()
    for at in place.steps(calls):
        crash()
        before = scene.committed()
        outcome = place.victims.run(Job(uri=scene.uri, task=task, attempt=1, before_call=at))
        # A dead writer's claim is believed for a while: how often it is looked at until then depends on chance.
        assert outcome.killed or any(".claim-" in call for call in calls), outcome
        assert scene.check_after(before, attempt=0) is None
        scene.recover()


def test_a_writer_whose_draft_was_voided_cannot_commit(scene: Scene) -> None:
    draft = reserve(scene.store)
    files = upload_part(scene.store, draft, scene.source, rank=0, parent_files=None)
    assert Catalog(scene.store).void_drafts(1, floor=10**6) == [draft.name]
    with pytest.raises(Fenced):
        commit(scene.store, draft, files)
    assert draft.name not in scene.committed()
