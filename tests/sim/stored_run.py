"""What a run's directory holds, read by the rules of docs/store-format.md and not by the code under test.

The checkers ask this what counts: which checkpoints are committed, which records. Nothing here takes time.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from blake3 import blake3
from tests.sim.memory_store import Bucket

from holdfast.core.records import Record
from holdfast.journal.format import parse_line

__all__ = ["Epoch", "StoredManifest", "StoredRun"]

_T = TypeVar("_T")
_EPOCH = re.compile(r"[^/]+/epochs/(\d+)\.json\Z")
_SEGMENT = re.compile(r"[^/]+/journal/(\d+)-([0-9a-f]+)-\d+-\d+\.jsonl\Z")


@dataclass(frozen=True, slots=True)
class Epoch:
    """One controller: its lease, and where those before it end."""

    lease: str
    floor: int | None
    cut_epoch: int = 0
    cut_record: int = 0


@dataclass(frozen=True, slots=True)
class StoredManifest:
    """A manifest that is whole."""

    name: str
    index: int
    epoch: int
    token: str
    iteration: int
    world_size: int
    void: bool
    files: tuple[tuple[str, int, str, int], ...]
    """(path, size, BLAKE3, rank) of each."""


class StoredRun:
    """The run below `name`. What was read is kept as long as its version is the same."""

    def __init__(self, bucket: Bucket, name: str) -> None:
        self._bucket, self._name = bucket, name
        self._epochs: tuple[list[int], dict[int, Epoch]] = ([], {})
        self._cache: dict[str, tuple[int, Any]] = {}

    def _read(self, key: str, parse: Callable[[bytes], _T]) -> _T | None:
        version = self._bucket.versions.get(key)
        if version is None:
            return None
        known = self._cache.get(key)
        if known is None or known[0] != version:
            known = self._cache[key] = (version, parse(self._bucket.objects[key]))
        found: _T = known[1]
        return found

    def epochs(self) -> dict[int, Epoch]:
        keys = [key for key in self._bucket.below(f"{self._name}/epochs") if key.endswith(".json")]
        versions = [self._bucket.versions[key] for key in keys]
        if versions != self._epochs[0]:
            self._epochs = (versions, self._read_epochs())
        return self._epochs[1]

    def _read_epochs(self) -> dict[int, Epoch]:
        found: dict[int, Epoch] = {}
        for key in self._bucket.below(f"{self._name}/epochs"):
            if (named := _EPOCH.match(key)) is not None:
                own = self._read(key, _parse_json) or {}
                floor = self._read(f"{key.removesuffix('.json')}.floor.json", _parse_json) or {}
                cut = _SEGMENT.match(f"{self._name}/{floor.get('journal_key', '')}")
                found[int(named[1])] = Epoch(
                    own.get("id", ""),
                    floor.get("floor"),
                    int(cut[1]) if cut is not None else 0,
                    floor.get("journal_record", 0),
                )
        return found

    def manifests(self) -> list[StoredManifest]:
        keys = [key for key in self._bucket.below(self._name) if key.endswith("/.manifest.json")]
        found = [self._read(key, _parse_manifest) for key in keys]
        return [one for one in found if one is not None]

    def is_open(self, name: str, token: str) -> bool:
        """Whether a draft may still be committed: it is reserved, and has neither manifest nor tombstone."""
        reserved = self._read(f"{self._name}/{name}/.reserved.json", _parse_json) or {}
        return reserved.get("token") == token and f"{self._name}/{name}/.manifest.json" not in self._bucket.objects

    def has_part(self, name: str, token: str, rank: int) -> bool:
        """Whether there is a record of this rank's part."""
        record = self._read(f"{self._name}/{name}/.part-{rank}.json", _parse_json) or {}
        return record.get("token") == token and record.get("rank") == rank

    def visible(self) -> list[StoredManifest]:
        """What counts as committed, oldest first."""
        epochs = self.epochs()
        found = [
            one
            for one in self.manifests()
            if not one.void
            and f"{self._name}/epochs/void-{one.token}" not in self._bucket.objects
            and not any(
                later.floor is not None and one.index >= later.floor
                for number, later in epochs.items()
                if number > one.epoch
            )
        ]
        return sorted(found, key=lambda one: (one.index, one.name))

    def problem_with(self, manifest: StoredManifest) -> str | None:
        """Which of its files is not what it says, if one is not."""
        for path, size_bytes, digest, _ in manifest.files:
            data = self._bucket.objects.get(f"{self._name}/{manifest.name}/{path}")
            if data is None:
                return f"{path} is missing"
            if len(data) != size_bytes or blake3(data).hexdigest() != digest:
                return f"{path} holds other bytes"
        return None

    def states(self, manifest: StoredManifest) -> dict[int, tuple[int, int]]:
        """(iteration, sum) by rank, from the files of a checkpoint."""
        found: dict[int, tuple[int, int]] = {}
        for path, _, _, rank in manifest.files:
            if path.startswith("rank"):
                state = json.loads(self._bucket.objects[f"{self._name}/{manifest.name}/{path}"])
                found[rank] = (state["iteration"], state["sum"])
        return found

    def is_pinned(self, name: str) -> bool:
        return f"{self._name}/{name}/.pinned.json" in self._bucket.objects

    def records(self) -> list[Record]:
        """The journal that counts, in order."""
        epochs = self.epochs()
        lines: dict[int, dict[int, Record]] = {number: {} for number in epochs}
        for key in self._bucket.below(f"{self._name}/journal"):
            named = _SEGMENT.match(key)
            if named is not None and int(named[1]) in epochs and epochs[int(named[1])].lease == named[2]:
                lines[int(named[1])].update(self._read(key, _parse_segment) or {})
        found: list[Record] = []
        for number in sorted(lines):
            last = float("inf")
            for later, other in epochs.items():
                if later > number and other.floor is not None:
                    if number > other.cut_epoch:
                        last = 0
                    elif number == other.cut_epoch:
                        last = min(last, other.cut_record)
            found += [lines[number][n] for n in sorted(lines[number]) if n <= last]
        return found


def _parse_json(data: bytes) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(data)
    except ValueError:
        return {}  # torn
    return found


def _parse_manifest(data: bytes) -> StoredManifest | None:
    body, sign, seal = data.rpartition(b',"self":"')
    if not sign or seal != blake3(body + b"}").hexdigest().encode() + b'"}\n':
        return None
    found = json.loads(data)
    return StoredManifest(
        found["name"],
        found["index"],
        found["epoch"],
        found["token"],
        found.get("iteration", 0),
        found["world_size"],
        found.get("void", False),
        tuple((one["path"], one["size_bytes"], one["blake3"], one.get("rank", 0)) for one in found["files"]),
    )


def _parse_segment(data: bytes) -> dict[int, Record]:
    """Records by number. A line that is torn is no record."""
    found: dict[int, Record] = {}
    for line in data.split(b"\n"):
        if line.startswith(b'{"segment"'):
            continue
        crc = re.search(rb',"crc":"([0-9a-f]{8})"\}\Z', line)
        if crc is not None and zlib.crc32(line[: crc.start()]) == int(crc[1], 16):
            parsed = parse_line(line)
            assert parsed is not None
            found[parsed.n] = parsed.record
    return found
