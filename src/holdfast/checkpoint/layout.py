"""The layout of a run's directory: names of checkpoints, and of the hidden files beside the user's.

docs/store-format.md specifies them. Everything in `holdfast.checkpoint` takes its keys from here.
"""

from __future__ import annotations

import re

from holdfast.errors import ConfigError

__all__ = [
    "CLAIM_KEEP",
    "CLAIM_PREFIX",
    "EPOCHS",
    "MANIFEST",
    "METADATA",
    "OWN_NAMES",
    "PINNED",
    "RESERVED",
    "WORKER_STATES",
    "check_name",
    "checkpoint_name",
    "is_checkpoint_like",
    "is_part_record",
    "is_sidecar",
    "key_of",
    "parse_index",
    "part_name",
]

RESERVED = ".reserved.json"
MANIFEST = ".manifest.json"
METADATA = ".metadata.json"
PINNED = ".pinned.json"
WORKER_STATES = ".workers.json"
"""What Holdfast itself saves of each rank (`worker_states`); the only sidecar that a manifest lists."""
CLAIM_PREFIX = ".claim-"
CLAIM_KEEP = ".claim-keep"
"""An empty file that keeps a directory from becoming empty while claims in it come and go."""
EPOCHS = "epochs"
OWN_NAMES = frozenset({EPOCHS, "journal", "logs", "artifacts"})

_SIDECARS = frozenset({RESERVED, MANIFEST, METADATA, PINNED, WORKER_STATES})
_GENERATED = re.compile(r"checkpoint_([0-9]{6,18})\Z")
_PART = re.compile(r"\.part-[0-9]{1,9}\.json\Z")
_MAX_NAME_BYTES = 200


def checkpoint_name(index: int) -> str:
    """The name that a checkpoint gets when the user gives it none."""
    return f"checkpoint_{index:06d}"


def parse_index(name: str) -> int | None:
    """The index in a generated name, or None for a custom one."""
    found = _GENERATED.match(name)
    if found is None or checkpoint_name(int(found[1])) != name:
        return None
    return int(found[1])


def check_name(name: str) -> str:
    """The name itself if it is valid for a checkpoint, or a `ConfigError` that says why not."""
    if not isinstance(name, str) or not name or "/" in name or "\\" in name:
        raise ConfigError(f"The checkpoint name {name!r} is refused: write one name, without slashes.")
    if name.startswith(".") or name in OWN_NAMES:
        raise ConfigError(
            f"The checkpoint name {name!r} is refused: names with a leading dot, and "
            f"{', '.join(sorted(OWN_NAMES))}, are the run's own; choose another."
        )
    try:
        length_bytes = len(name.encode())
    except UnicodeEncodeError:
        raise ConfigError(f"The checkpoint name {name!r} is refused: it is not valid Unicode.") from None
    if length_bytes > _MAX_NAME_BYTES or not name.isprintable() or name != name.strip():
        raise ConfigError(
            f"The checkpoint name {name!r} is refused: write at most {_MAX_NAME_BYTES} bytes, without control"
            " characters or blanks at its ends."
        )
    return name


def is_checkpoint_like(name: str) -> bool:
    """Whether a directory directly below a run may hold a checkpoint: the run's own and hidden ones do
    not."""
    return name not in OWN_NAMES and not name.startswith(".")


def is_sidecar(path: str) -> bool:
    """Whether a path below a checkpoint's directory is ours rather than the user's."""
    return path in _SIDECARS or (path.startswith(CLAIM_PREFIX) and "/" not in path) or is_part_record(path)


def part_name(rank: int) -> str:
    """The file in a draft that says that all files of `rank` are there (see `part_records`)."""
    return f".part-{rank}.json"


def is_part_record(path: str) -> bool:
    return _PART.match(path) is not None


def key_of(name: str, path: str) -> str:
    """The key of a file in a checkpoint; the name "" is a store whose root is the checkpoint's own
    directory."""
    return f"{name}/{path}" if name else path
