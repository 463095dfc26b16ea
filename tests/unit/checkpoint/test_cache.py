"""The node's cache: one download for all readers, removed after the last one, nothing left after a crash."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.unit.checkpoint.far_store import FarStore, write_source

from holdfast.checkpoint.cache import shared_copy, shared_directory, sweep_cache
from holdfast.checkpoint.commit import commit_directory
from holdfast.errors import Damaged
from holdfast.storage.posix.store import PosixStore

REPOSITORY = Path(__file__).resolve().parents[3]

# Fills once, tells what it did, holds the directory until told to go on or killed.
READER = """
import sys
from pathlib import Path
from holdfast.checkpoint.cache import shared_copy
log = Path(sys.argv[1])
def fill(target):
    with log.open("a") as file:
        file.write("filled\\n")
    target.mkdir()
    (target / "x").write_text("bytes" * 1000)
    if sys.argv[2] == "dies filling":
        print("filling", flush=True)
        sys.stdin.readline()
for _ in range(int(sys.argv[3])):
    with shared_copy(("one",), fill) as found:
        assert (found / "x").read_text() == "bytes" * 1000
        if sys.argv[2] == "holds":
            print("holding", flush=True)
            sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("HOLDFAST_LOCAL_CACHE_DIR", str(tmp_path / "cache"))
    yield tmp_path / "cache" / "checkpoints"


def reader(log: Path, mode: str, rounds: int = 1) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", READER, str(log), mode, str(rounds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
        text=True,
    )


def finish(process: subprocess.Popen[str], answer: str = "") -> None:
    process.communicate(answer)
    assert process.returncode == 0


def left(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir()]


def test_a_local_checkpoint_is_used_in_place(tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "run")
    done = commit_directory(store, write_source(tmp_path / "source", model="weights"))
    with shared_directory(store, done) as found:
        assert found == tmp_path / "run" / done.name


def test_threads_share_one_download(tmp_path: Path, cache: Path) -> None:
    store = FarStore(tmp_path / "run")
    done = commit_directory(store, write_source(tmp_path / "source", model="weights", layers__0="zero"))
    inside = threading.Barrier(8, timeout=60)
    start = threading.Barrier(8, timeout=60)

    def ask() -> Path:
        start.wait()  # all at once, so that several find nothing there, and each must still get in while others read
        with shared_directory(store, done) as found:
            inside.wait()
            assert (found / "layers" / "0").read_text() == "zero"
            assert stat.S_IMODE((found / "model").stat().st_mode) & 0o222 == 0
            assert stat.S_IMODE(found.stat().st_mode) & 0o222 == 0
            inside.wait()
            return found

    with ThreadPoolExecutor(8) as pool:
        for _ in range(40):
            store.downloads.clear()
            found = {future.result() for future in [pool.submit(ask) for _ in range(8)]}
            assert len(found) == 1
            assert sorted(store.downloads) == [f"{done.name}/layers/0", f"{done.name}/model"]
            assert left(cache) == []


def test_a_damaged_checkpoint_is_an_error_and_is_not_cached(tmp_path: Path, cache: Path) -> None:
    store = FarStore(tmp_path / "run")
    done = commit_directory(store, write_source(tmp_path / "source", model="weights"))
    (tmp_path / "run" / done.name / "model").write_text("WEIGHTS")
    with pytest.raises(Damaged, match="model"), shared_directory(store, done):
        pytest.fail("damaged bytes were handed out")
    assert [name for name in left(cache) if not name.endswith(".lock")] == []


def test_many_processes_use_the_cache_at_once(tmp_path: Path, cache: Path) -> None:
    log = tmp_path / "log"
    readers = [reader(log, "passes", rounds=60) for _ in range(6)]
    for process in readers:
        finish(process)
    assert left(cache) == []
    assert 1 <= log.read_text().count("filled") <= 360


def test_processes_share_one_download(tmp_path: Path, cache: Path) -> None:
    log = tmp_path / "log"
    readers = [reader(log, "holds") for _ in range(4)]
    for process in readers:
        assert process.stdout is not None
        assert process.stdout.readline() == "holding\n"
    assert log.read_text() == "filled\n"
    for process in readers[:-1]:
        finish(process, "\n")
    assert len([name for name in left(cache) if "." not in name]) == 1
    assert sweep_cache() == [], "what is in use stays"
    finish(readers[-1], "\n")
    assert left(cache) == []


@pytest.mark.parametrize("mode", ["holds", "dies filling"])
def test_downloads_of_a_killed_process_are_reused_or_removed(tmp_path: Path, cache: Path, mode: str) -> None:
    for after in ("use", "sweep"):
        log = tmp_path / f"log-{after}"
        process = reader(log, mode)
        assert process.stdout is not None
        assert process.stdout.readline() in ("holding\n", "filling\n")
        process.kill()
        process.communicate()
        assert left(cache) != []
        if after == "use":
            finish(reader(log, "passes"))
        else:
            assert len(sweep_cache()) == 1
        assert left(cache) == []


def test_checkpoints_of_the_same_name_are_cached_apart(tmp_path: Path) -> None:
    with (
        shared_copy(("a", "bc"), lambda target: write_source(target, x="1")) as one,
        shared_copy(("ab", "c"), lambda target: write_source(target, x="2")) as two,
    ):
        assert ((one / "x").read_text(), (two / "x").read_text()) == ("1", "2")


def test_cache_locks_are_not_inherited_across_exec(tmp_path: Path) -> None:
    with shared_copy(("a",), lambda target: target.mkdir()) as found:
        shown = subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, check=True).stdout
        assert str(found) not in shown
        assert any(str(found) in os.readlink(f"/proc/self/fd/{fd}") for fd in _descriptors())  # noqa: PTH115


def _descriptors() -> list[str]:
    return [path.name for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
