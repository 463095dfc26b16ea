"""The user's file of rank 0's output holds that of every generation, in order, whichever agent stores what when."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.agent.artifact_sync import ArtifactSync
from holdfast.agent.joined_output import JoinedOutput, output_part
from holdfast.errors import StorageError
from holdfast.storage.posix.store import PosixStore
from holdfast.storage.store import Digest, OnBytes, Source


class _Store(PosixStore):
    """Storage of which the next upload of the user's file can be held up."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.before_upload: Callable[[], None] | None = None
        self.uploads = 0

    def volatile(self) -> _Store:
        return self

    def upload(self, key: str, source: Source, on_bytes: OnBytes | None = None) -> Digest:
        if key == "stdout":
            self.uploads += 1
            if (call := self.before_upload) is not None:
                self.before_upload = None
                call()
        return super().upload(key, source, on_bytes)


class _Agent:
    def __init__(self, root: Path, store: _Store) -> None:
        self._logs = root / "logs"
        output = JoinedOutput(self._logs, root / "output", ["stdout"])
        self._sync = ArtifactSync(lambda: store, self._logs, output, None)

    def print(self, generation: int, text: str) -> None:
        path = output_part(self._logs, generation, "stdout")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(text)

    def sync(self, *, still_written: bool = False) -> None:
        self._sync.sync_logs(still_written=still_written)


@pytest.fixture
def store(tmp_path: Path) -> _Store:
    return _Store(tmp_path / "run")


@pytest.fixture
def agents(tmp_path: Path, store: _Store) -> list[_Agent]:
    return [_Agent(tmp_path / f"agent_{number}", store) for number in range(3)]


def test_what_the_agent_before_stores_late_takes_its_place(agents: list[_Agent], store: _Store) -> None:
    """It stood still, say, while rank 0 went elsewhere and came back."""
    agents[0].print(1, "one\n")
    agents[0].sync()
    agents[0].print(1, "one, late\n")
    agents[1].print(2, "two, which is a longer line\n")
    agents[1].sync()
    assert store.get("stdout") == b"one\ntwo, which is a longer line\n"
    agents[0].sync()
    assert store.get("stdout") == b"one\none, late\ntwo, which is a longer line\n"
    agents[0].print(10, "ten\n")
    agents[0].sync()
    assert store.get("stdout").endswith(b"line\nten\n")


def test_agents_that_join_at_the_same_time_do_not_replace_what_the_other_joined(
    agents: list[_Agent], store: _Store
) -> None:
    agents[0].print(1, "one\n")
    agents[1].print(2, "two\n")
    store.before_upload = agents[1].sync  # all of it, after the first has looked at what there is
    agents[0].sync()
    assert store.get("stdout") == b"one\ntwo\n"


def test_an_agent_that_dies_at_the_wrong_moment_is_made_good_by_the_next(agents: list[_Agent], store: _Store) -> None:
    """After it has put an older file over a newer one."""

    class Killed(BaseException):
        pass

    def upload(*_: object) -> None:
        raise Killed

    agents[0].print(1, "one\n")
    agents[1].print(2, "two\n")
    agents[0].sync()
    older = store.get("stdout")
    agents[1].sync()
    store.put("stdout", older)
    agents[2].print(3, "three\n")
    agents[2].sync()
    assert store.get("stdout") == b"one\ntwo\nthree\n"

    agents[0].print(1, "one, late\n")
    store.before_upload = upload
    with pytest.raises(Killed):
        agents[0].sync()
    agents[1].sync()
    assert store.get("stdout") == b"one\none, late\ntwo\nthree\n"


def test_in_any_order_the_last_turns_leave_everything(agents: list[_Agent], store: _Store) -> None:
    for seed in range(5):
        chance = random.Random(seed)
        generation = seed * 10
        for _ in range(10):
            generation += 1
            agent = chance.choice(agents)
            for number in range(chance.randrange(1, 4)):
                agent.print(generation, f"{generation}-{number}\n" * chance.randrange(1, 9))
                threads = [
                    threading.Thread(target=one.sync, kwargs={"still_written": chance.random() < 0.5})
                    for one in agents
                    if chance.random() < 0.5
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
        last = [threading.Thread(target=one.sync) for one in agents]
        for thread in last:
            thread.start()
        for thread in last:
            thread.join()
        parts = [entry.key for entry in store.list("logs")]
        lines = store.get("stdout").split()
        assert b"".join(map(store.get, parts)).split() == lines
        assert sorted(lines, key=lambda line: [int(part) for part in line.split(b"-")]) == lines


def test_a_file_that_is_still_written_is_not_joined_for_each_line(agents: list[_Agent], store: _Store) -> None:
    agents[0].print(1, "first\n" * 100)
    agents[0].sync()
    for _ in range(200):
        agents[0].print(1, "line\n")
        agents[0].sync(still_written=True)
    assert store.uploads < 12
    agents[0].sync()
    assert store.get("stdout") == b"first\n" * 100 + b"line\n" * 200
    before = store.uploads
    agents[0].sync()
    agents[1].sync()
    assert store.uploads == before


def test_a_full_disk_of_the_node_is_a_warning_and_the_next_turn_goes_on(
    agents: list[_Agent], store: _Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agents[0].print(1, "one\n")
    (tmp_path / "agent_0" / "output").write_text("in the way")
    agents[0].sync()
    assert "could not be stored" in caplog.text
    (tmp_path / "agent_0" / "output").unlink()
    agents[0].sync()
    assert store.get("stdout") == b"one\n"


def test_a_part_that_vanishes_while_it_is_read_is_no_loss_of_the_rest(
    agents: list[_Agent], store: _Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents[0].print(1, "one\n")
    agents[0].sync()
    agents[1].print(2, "two\n")
    monkeypatch.setattr(store, "download", _fail)
    agents[1].sync()
    assert store.get("stdout") == b"one\n"
    monkeypatch.undo()
    agents[1].sync()
    assert store.get("stdout") == b"one\ntwo\n"


def _fail(*_: object) -> None:
    raise StorageError("not now")
