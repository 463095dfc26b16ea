"""Kill a writer at each step of the commit protocol, on every kind of storage: what is committed stays whole, the
interrupted checkpoint is invisible, and the next commit succeeds.

`kill_writer` runs the process that is killed, `kill_writer_process` checks the storage afterwards. Steps are counted
in a first run that is not killed, so a step that is added to the protocol is tested without a change here. On storage
with slow calls only the first and last of equal calls in a row are tested, and all of them in the slow tier.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.contract.servers import Server, fuse_mount
from tests.faults.kill_writer import Job
from tests.faults.kill_writer_process import CheckedRun, KillWriter, kill_writer_process, make_source

from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.commit import commit, commit_directory, reserve, upload_part
from holdfast.errors import Fenced
from holdfast.storage.locate import open_store

MIB = 1024 * 1024


READS = ("get", "get_range", "size", "list", "children", "download")


class KillTarget(NamedTuple):
    """A storage, the program whose writers are killed, and how often at random times."""

    uri: str
    kill_writer: KillWriter
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


_LOCAL = ["posix", "fuse"]
_ALL_CALLS = [_all_calls("moto"), _all_calls("rclone")]


@pytest.fixture(scope="module", params=[*_LOCAL, "moto", "rclone", *_ALL_CALLS])
def target(request: pytest.FixtureRequest) -> Iterator[KillTarget]:
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
            server: Server = request.getfixturevalue(kind)
            environment, random_kills = server.environment, 50
            uri = server.uri(server.new_bucket())
        for variable, value in environment.items():
            patch.setenv(variable, value)
        yield KillTarget(
            uri,
            stack.enter_context(kill_writer_process(environment)),
            random_kills,
            every_call=bool(every) or not environment,
        )


@pytest.fixture
def run(target: KillTarget, tmp_path: Path, request: pytest.FixtureRequest) -> CheckedRun:
    """A run with one checkpoint in it, and the directory that the next one is made of."""
    store = open_store(target.uri).sub(f"run-{abs(hash(request.node.name)) % 10**8}")
    commit_directory(store, make_source(tmp_path / "source", 0), metrics={"attempt": 0})
    return CheckedRun(store, store.uri, make_source(tmp_path / "source", 1))


def manifest_call(calls: list[str]) -> int:
    [at] = [
        at for at, call in enumerate(calls) if call.startswith(("create", "put")) and call.endswith("/.manifest.json")
    ]
    return at


def _target_and_name() -> list[object]:
    """With and without a name; on servers one of them in turn, for their calls are slow."""
    both = [pytest.param(target, name) for target in _LOCAL for name in (None, "best")]
    slow = [
        pytest.param(f"{kind}-all", name, marks=[pytest.mark.slow, pytest.mark.timeout(900)])
        for kind in ("moto", "rclone")
        for name in (None, "best")
    ]
    return [*both, pytest.param("moto", None), pytest.param("rclone", "best"), *slow]


@pytest.mark.parametrize(("target", "name"), _target_and_name(), indirect=["target"])
def test_writer_killed_before_each_store_call_of_a_commit(
    target: KillTarget, run: CheckedRun, name: str | None
) -> None:
    job = Job(uri=run.uri, task="commit", source=str(run.source), name=name)
    calls = target.kill_writer.run(job).calls
    commits_at = manifest_call(calls)
    assert any(call.startswith("copy") for call in calls), "the unchanged file is copied, so that step is killed too"
    run.recover()
    for at in target.steps(calls):
        before = run.committed()
        outcome = target.kill_writer.run(
            Job(uri=run.uri, task="commit", source=str(run.source), name=name, attempt=at + 1, before_call=at)
        )
        assert outcome.killed
        fresh = run.check_after(before, attempt=at + 1)
        assert (fresh is not None) == (at > commits_at), (at, calls[at])
        run.recover(name)


def test_writer_killed_before_each_store_call_of_a_two_rank_commit(
    target: KillTarget, run: CheckedRun, tmp_path: Path
) -> None:
    for rank in (0, 1):
        (tmp_path / "ranks" / f"rank{rank}").mkdir(parents=True)
        (tmp_path / "ranks" / f"rank{rank}" / f"shard-{rank}.bin").write_bytes(bytes([rank]) * 1000)
    job = Job(uri=run.uri, task="ranks", source=str(tmp_path / "ranks"))
    calls = target.kill_writer.run(job).calls
    commits_at = manifest_call(calls)
    run.recover()
    for at in target.steps(calls):
        before = run.committed()
        assert target.kill_writer.run(
            Job(uri=run.uri, task="ranks", source=str(tmp_path / "ranks"), attempt=at + 1, before_call=at)
        ).killed
        fresh = run.check_after(before, attempt=at + 1)
        assert (fresh is not None) == (at > commits_at), (at, calls[at])
        run.recover()


def test_writer_killed_within_a_large_upload(target: KillTarget, run: CheckedRun) -> None:
    make_source(run.source, 2, big_bytes=17 * MIB)
    for block in range(5):
        before = run.committed()
        job = Job(uri=run.uri, task="commit", source=str(run.source), attempt=9, at_block=block)
        assert target.kill_writer.run(job).killed
        assert run.check_after(before, attempt=9) is None
    run.recover()


@pytest.mark.parametrize("target", [*_LOCAL, *_ALL_CALLS], indirect=True)
def test_writer_killed_at_random_times(target: KillTarget, run: CheckedRun) -> None:
    job = Job(uri=run.uri, task="commit", source=str(run.source))
    normal_s = min(target.kill_writer.run(job).took_s for _ in range(3))
    run.recover()
    dice = random.Random(19)
    killed = 0
    for attempt in range(1, target.random_kills + 1):
        before = run.committed()
        delay_s = dice.uniform(0, 1.2 * normal_s)
        job = Job(uri=run.uri, task="commit", source=str(run.source), attempt=attempt, delay_s=delay_s)
        outcome = target.kill_writer.run(job)
        fresh = run.check_after(before, attempt)
        killed += outcome.killed
        if not outcome.killed:
            assert fresh is not None
            normal_s = min(normal_s, outcome.took_s)  # the machine may have been busy with something else at first
        run.recover()
    assert killed > target.random_kills // 5


def test_process_killed_before_each_store_call_of_a_removal(target: KillTarget, run: CheckedRun) -> None:
    names = [commit_directory(run.store, run.source, metrics={}).name for _ in range(2)]
    calls = target.kill_writer.run(Job(uri=run.uri, task="remove", name=names[0])).calls
    for at in target.steps(calls):
        doomed = commit_directory(run.store, run.source, metrics={}).name
        kept = [name for name in run.committed() if name != doomed]
        assert target.kill_writer.run(Job(uri=run.uri, task="remove", name=doomed, before_call=at)).killed
        visible = [name for name in run.committed() if name != doomed]
        assert visible == kept
        run.check_after(run.committed(), attempt=0)
        run.recover()


@pytest.mark.parametrize("task", ["seal", "repair"])
def test_process_killed_before_each_store_call_of_a_repair(target: KillTarget, run: CheckedRun, task: str) -> None:
    job = Job(uri=run.uri, task="commit", source=str(run.source))
    dies_at = manifest_call(target.kill_writer.run(job).calls)
    run.recover()

    def crash() -> None:
        doomed = Job(uri=run.uri, task="commit", source=str(run.source), before_call=dies_at)
        assert target.kill_writer.run(doomed).killed

    crash()
    calls = target.kill_writer.run(Job(uri=run.uri, task=task, attempt=1)).calls
    assert any(call.startswith("delete") for call in calls)
    run.recover()
    for at in target.steps(calls):
        crash()
        before = run.committed()
        outcome = target.kill_writer.run(Job(uri=run.uri, task=task, attempt=1, before_call=at))
        # A dead writer's claim is believed for a while: how often it is looked at until then depends on chance.
        assert outcome.killed or any(".claim-" in call for call in calls), outcome
        assert run.check_after(before, attempt=0) is None
        run.recover()


def test_a_writer_whose_draft_was_voided_cannot_commit(run: CheckedRun) -> None:
    draft = reserve(run.store)
    files = upload_part(run.store, draft, run.source, rank=0, parent_files=None)
    assert Catalog(run.store).void_drafts(1, floor=10**6) == [draft.name]
    with pytest.raises(Fenced):
        commit(run.store, draft, files)
    assert draft.name not in run.committed()
