"""The manifest: the small file whose presence commits a checkpoint, and its codec.

`.manifest.json` is one JSON object on one line whose last member, `self`, is the BLAKE3 of the same text without that
member. So it is plain JSON to every tool, and a reader can tell a whole manifest from a torn one without knowing
how any library orders keys. docs/store-format.md is the specification; `commit` writes these, `restore` and `verify`
trust nothing else.
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
from blake3 import blake3

from holdfast.core.parts import FileEntry
from holdfast.errors import Damaged, UnsupportedFormat

__all__ = ["FORMAT_MAJOR", "FORMAT_MINOR", "Manifest", "decode", "encode"]

FORMAT_MAJOR = 1
FORMAT_MINOR = 0

_SEAL = re.compile(rb',"self":"([0-9a-f]{64})"\}\n?\Z')


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is known of one committed checkpoint.

    `void` marks a tombstone: a later controller shut this name before its writer could commit.
    """

    format: str = f"holdfast.checkpoint/{FORMAT_MAJOR}.{FORMAT_MINOR}"
    name: str
    index: int
    epoch: int
    token: str
    created_at: str
    writer: str
    world_size: int = 1
    generation: int = 0
    iteration: int = 0
    parent: str | None = None
    metrics: dict[str, Any] = {}
    files: tuple[FileEntry, ...] = ()
    void: bool = False

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files)


def encode(manifest: Manifest) -> bytes:
    """The manifest's bytes as they lie in storage."""
    plain = msgspec.structs.replace(manifest, metrics=_tag_floats(manifest.metrics))
    body = msgspec.json.encode(plain)
    return body[:-1] + b',"self":"' + blake3(body).hexdigest().encode() + b'"}\n'


def decode(data: bytes, where: str) -> Manifest:
    """Read a manifest; `where` names it in errors. Raises `Damaged` or `UnsupportedFormat`, never anything else."""
    seal = _SEAL.search(data)
    if seal is None or blake3(data[: seal.start()] + b"}").hexdigest().encode() != seal[1]:
        raise Damaged(f"{where}: the manifest is torn or altered (its seal does not match).")
    try:
        version = msgspec.json.decode(data, type=_Header).format.rpartition("/")[2]
        major = int(version.partition(".")[0])
        if major > FORMAT_MAJOR:
            raise UnsupportedFormat(
                f"{where}: written in format {major}, this holdfast reads up to {FORMAT_MAJOR}; upgrade holdfast to read it."
            )
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, ValueError) as error:
        raise Damaged(f"{where}: the manifest does not follow the format ({error}).") from error
    return msgspec.structs.replace(manifest, metrics=_untag_floats(manifest.metrics))


class _Header(msgspec.Struct):
    format: str


def _tag_floats(value: Any) -> Any:
    """JSON has no NaN or infinities: they travel as {"$float": "nan"}."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if isinstance(value, dict):
        return {key: _tag_floats(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_tag_floats(item) for item in value]
    return value


def _untag_floats(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"$float"}:
            return float(value["$float"])
        return {key: _untag_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_untag_floats(item) for item in value]
    return value
