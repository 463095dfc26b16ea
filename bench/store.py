"""`make bench-store`: checkpoints made durable, sent to S3, committed again and brought back, against what others do.

Prints ratios from one run, with the aim beside each. `python -m bench.store --size 256MiB --rounds 3` is a shorter one.
Sources lie in the page cache, as a checkpoint that was just written does. `peers` holds the others, `timing` the clock.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import peers
from bench.timing import Aim, Contender, Section, print_section, race, settle
from tests.contract.servers import Server, rclone_s3

from holdfast.checkpoint.commit import commit_directory
from holdfast.checkpoint.restore import fetch
from holdfast.storage.files import mount_kind
from holdfast.storage.locate import open_store
from holdfast.storage.store import Digest, OnBytes, Source

__all__ = ["main", "parse_size"]

_FILES = 20
_CHANGED = 2
_AIM_UPLOADED = 0.11
_UNITS = {"": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}


@dataclass(slots=True)
class _Bench:
    """One run of it: where, how much, how often, and what came out."""

    scratch: Path
    size_bytes: int
    rounds: int
    missed: list[str] = field(default_factory=list)

    @property
    def source(self) -> Path:
        return self.scratch / "source"

    def make_source(self) -> None:
        self.source.mkdir()
        for number in range(_FILES):
            self._fill(number)

    def change_source(self) -> None:
        """New bytes for a tenth of the files, never of another size: that is the hardest case for us."""
        for number in range(_CHANGED):
            self._fill(number)

    def compare(self, section: Section, moved_bytes: int | None = None) -> None:
        medians = race(section, self.rounds, self.scratch)
        if not print_section(section, medians, moved_bytes or self.size_bytes):
            self.missed.append(section.title)

    def _fill(self, number: int) -> None:
        (self.source / f"shard_{number:02d}.bin").write_bytes(os.urandom(self.size_bytes // _FILES))


class _Counting:
    """A store that counts what is really sent."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.sent_bytes = 0

    def upload(self, key: str, source: Source, on_bytes: OnBytes | None = None) -> Digest:
        digest: Digest = self._store.upload(key, source, on_bytes)
        self.sent_bytes += digest.size_bytes
        return digest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def main(arguments: list[str] | None = None) -> int:
    """Run all comparisons; 1 if an aim was missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.store", description=__doc__)
    parser.add_argument("--size", type=parse_size, default=_UNITS["GiB"], help="bytes of the directory (default 1GiB)")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds of each comparison (default 3)")
    parser.add_argument("--dir", type=Path, default=None, help="where to work (default: the temporary directory)")
    given = parser.parse_args(arguments)
    os.environ.setdefault("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")  # else rclone stores pyarrow's trailer
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=given.dir) as scratch:
        bench = _Bench(Path(scratch), given.size, given.rounds)
        bench.make_source()
        where = f"{_FILES} files, {given.size / 1024**2:.0f} MiB, {mount_kind(bench.scratch)}, {os.cpu_count()} cores"
        print(f"{where}; medians of {given.rounds} interleaved rounds")
        _durable(bench)
        _restored(bench)
        _again(bench, "Second commit on disk, 10 % of the files changed", str(bench.scratch / "again"))
        with _s3_root(bench) as root, rclone_s3(Path(root)) as server:
            os.environ.update(server.environment)
            _sent(bench, server)
            _fetched(bench, server)
            bucket = server.uri(server.new_bucket(), "again")
            _again(bench, "Second commit to S3, 10 % of the files changed", bucket)
    print("\nEvery aim was met." if not bench.missed else f"\nMissed: {'; '.join(bench.missed)}.")
    return 1 if bench.missed else 0


def _durable(bench: _Bench) -> None:
    target = bench.scratch / "target"

    def contender(name: str, work: Callable[[], object], note: str = "") -> Contender:
        return Contender(name, work, after=lambda: shutil.rmtree(target), note=note)

    def copied_durably() -> None:
        peers.cp(bench.source, target)
        peers.fsync_tree(target)

    def copied_and_synced() -> None:
        peers.cp(bench.source, target)
        peers.sync_file_system(target)

    def arrow() -> None:
        peers.arrow_copy(str(bench.source), str(target))

    def arrow_durably() -> None:
        arrow()
        peers.fsync_tree(target)

    contenders = (
        contender("holdfast commit", lambda: commit_directory(open_store(target), bench.source), "hashed, durable"),
        contender("cp -r + fsync", copied_durably),
        contender("cp -r + sync -f", copied_and_synced),
        contender("pyarrow copy_files + fsync", arrow_durably),
        contender("pyarrow copy_files", arrow, "as Ray does; not durable"),
    )
    aims = [Aim("cp -r + fsync", 1.3)]
    bench.compare(Section("A directory made durable on disk", contenders, aims))


def _restored(bench: _Bench) -> None:
    run, target = bench.scratch / "run", bench.scratch / "target"
    store = open_store(run)
    manifest = commit_directory(store, bench.source)
    stored = run / manifest.name
    for path in stored.iterdir():
        path.read_bytes()  # the commit writes past the page cache; all start from a warm one
    clean = lambda: shutil.rmtree(target)  # noqa: E731
    contenders = (
        Contender("holdfast fetch", lambda: fetch(store, manifest, target), after=clean, note="verified"),
        Contender("cp -r", lambda: peers.cp(stored, target), after=clean),
        Contender("pyarrow copy_files", lambda: peers.arrow_copy(str(stored), str(target)), after=clean),
    )
    bench.compare(Section("Restore and verify from disk", contenders))
    shutil.rmtree(run)


def _sent(bench: _Bench, server: Server) -> None:
    bucket = server.new_bucket()
    filesystem = peers.arrow_s3(server.endpoint, server.environment)
    uri = server.uri(bucket, "ours")
    store = open_store(uri)
    clean = lambda: store.delete([entry.key for entry in store.list()])  # noqa: E731
    others = open_store(server.uri(bucket, "theirs"))
    clean_others = lambda: others.delete([entry.key for entry in others.list()])  # noqa: E731
    contenders = (
        Contender("holdfast commit", lambda: commit_directory(store, bench.source), after=clean, note="hashed"),
        Contender(
            "pyarrow copy_files",
            lambda: peers.arrow_copy(str(bench.source), f"{bucket}/theirs", target_filesystem=filesystem),
            after=clean_others,
            note="as Ray does",
        ),
        Contender(
            "rclone copy",
            lambda: peers.rclone_copy(str(bench.source), f"peer:{bucket}/theirs", server.endpoint, server.environment),
            after=clean_others,
        ),
    )
    bench.compare(Section("A directory sent to S3 (rclone serve)", contenders, [Aim("pyarrow copy_files", 1.0)]))


def _fetched(bench: _Bench, server: Server) -> None:
    bucket, target = server.new_bucket(), bench.scratch / "target"
    filesystem = peers.arrow_s3(server.endpoint, server.environment)
    store = open_store(server.uri(bucket, "run"))
    manifest = commit_directory(store, bench.source)
    stored = f"{bucket}/run/{manifest.name}"
    clean = lambda: shutil.rmtree(target)  # noqa: E731
    contenders = (
        Contender("holdfast fetch", lambda: fetch(store, manifest, target), after=clean, note="verified"),
        Contender(
            "pyarrow copy_files",
            lambda: peers.arrow_copy(stored, str(target), source_filesystem=filesystem),
            after=clean,
        ),
        Contender(
            "rclone copy",
            lambda: peers.rclone_copy(f"peer:{stored}", str(target), server.endpoint, server.environment),
            after=clean,
        ),
    )
    bench.compare(Section("Restore and verify from S3 (rclone serve)", contenders))
    store.delete([entry.key for entry in store.list()])


def _again(bench: _Bench, title: str, uri: str) -> None:
    """Commit once more to a run whose newest checkpoint differs in a tenth of the files."""
    fresh, known = (
        open_store(f"{uri}-fresh" if "?" not in uri else uri.replace("?", "-fresh?")),
        _Counting(open_store(uri)),
    )
    commit_directory(known, bench.source)
    known.sent_bytes = 0
    commits = bench.rounds + 1
    contenders = (
        Contender("second commit", lambda: commit_directory(known, bench.source), before=bench.change_source),
        Contender(
            "first commit",
            lambda: commit_directory(fresh, bench.source),
            after=lambda: fresh.delete([entry.key for entry in fresh.list()]),
        ),
    )
    bench.compare(Section(title, contenders))
    share = known.sent_bytes / commits / bench.size_bytes
    met = share <= _AIM_UPLOADED
    print(f"  uploaded {share:.1%} of the bytes   aim <= {_AIM_UPLOADED:.0%}: {'met' if met else 'MISSED'}")
    if not met:
        bench.missed.append(title)
    known.delete([entry.key for entry in known.list()])
    settle(bench.scratch)


def _s3_root(bench: _Bench) -> tempfile.TemporaryDirectory[str]:
    """Where the S3 server keeps its objects: in memory where there is room, so that clients are measured, not disks."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > (bench.rounds + 6) * bench.size_bytes
    return tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=memory if roomy else bench.scratch)


def parse_size(text: str) -> int:
    """Bytes from "256MiB"."""
    found = re.fullmatch(r"([0-9]+)\s*([KMG]iB)?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 256MiB or 1GiB")
    return int(found[1]) * _UNITS[found[2] or ""]


if __name__ == "__main__":
    raise SystemExit(main())
