"""Which directories `train.report` refuses to take, before anything is copied, moved or deleted.

A reported directory is copied to the agent's staging directory, or moved there if the user lets it go. Neither may
happen to a directory that holds the run's storage, or in which the agent keeps its own files: the copy would contain
itself, and the move would take every run of the storage with it. Paths are compared by device and inode along their
parents, so symbolic links and bind mounts do not hide that two of them are the same.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from holdfast.checkpoint.layout import EPOCHS, MANIFEST, RESERVED
from holdfast.checkpoint.manifest import decode
from holdfast.errors import CheckpointError, ConfigError
from holdfast.storage.local_cache import local_cache_dir
from holdfast.worker.job import Assignment

__all__ = ["check_reported_directory", "is_committed"]

_RUN_FILE = "run.json"
_Identity = tuple[int, int]
"""The device and inode of a directory."""


def check_reported_directory(source: Path, run: Path | None, assignment: Assignment, *, move: bool) -> None:
    """Raise `ConfigError` if `source` must not be reported.

    `run` is the run's directory where storage is local files; `move` says that `source` is to be gone afterwards.
    """
    if not source.is_dir():
        return  # staging says what is wrong with it
    keep = {"the agent's staging directory": Path(assignment.staging_dir), "holdfast's cache": local_cache_dir()}
    if run is not None:
        keep = {"the run's storage": run, "the storage path": run.parent, **keep}
    if move:
        keep["the worker's working directory"] = Path.cwd()
        keep["the run's working directory"] = Path(assignment.work_dir)
        keep["the directory for temporary files"] = Path(tempfile.gettempdir())
        keep["the home directory"] = Path(os.path.expanduser("~"))  # noqa: PTH111  does not fail where there is none
    identities: dict[Path, _Identity | None] = {}  # most of the directories above these are the same
    for what, path in keep.items():
        if _holds(source, path, identities):
            raise ConfigError(
                f"train.report() cannot take {source}: it is or contains {what} {path}; save the checkpoint's files "
                "in a directory of their own, such as tempfile.mkdtemp(), and report that."
            )
    if move:
        _check_inside(source, run, assignment)


def is_committed(directory: Path) -> bool:
    """Whether this is a checkpoint where it was committed, rather than a copy of one, which is the user's to alter.

    A draft (reserved, without a manifest) and a manifest that cannot be read count too: reading them as a checkpoint
    says what is wrong.
    """
    try:
        return decode((directory / MANIFEST).read_bytes(), str(directory)).name == directory.name
    except FileNotFoundError:
        return (directory / RESERVED).exists()
    except NotADirectoryError:
        return False
    except CheckpointError:
        return True


def _check_inside(source: Path, run: Path | None, assignment: Assignment) -> None:
    """Refuse to let go of a directory that lies inside a run, in the agent's staging or in the shared cache, or that
    holds a run anywhere below it."""
    keep = [path for path in (run, Path(assignment.staging_dir), local_cache_dir() / "checkpoints") if path is not None]
    within = next((path for path in keep if _holds(path, source)), None)
    if within is None:
        within = next((path for path in (source, *Path(os.path.realpath(source)).parents) if _is_run(path)), None)
    if within is not None:
        raise ConfigError(
            f"train.report() cannot take {source} and delete it: it lies in {within}, which is kept; report it with "
            "delete_local_checkpoint_after_upload=False, or save the checkpoint elsewhere."
        )
    below = next((path for path in _directories(source) if _is_run(path)), None)
    if below is not None:
        raise ConfigError(
            f"train.report() cannot take {source} and delete it: it contains the run {below}; save the checkpoint's "
            "files in a directory of their own and report that."
        )


def _holds(directory: Path, path: Path, identities: dict[Path, _Identity | None] | None = None) -> bool:
    """Whether `directory` is `path` or one of the directories above it, whatever the two are called. Of whom
    `identities` knows is not looked at again."""
    known = {} if identities is None else identities

    def identity(place: Path) -> _Identity | None:
        if place not in known:
            known[place] = _identity(place)
        return known[place]

    wanted = identity(directory)
    real = Path(os.path.realpath(path))
    return wanted is not None and any(identity(parent) == wanted for parent in (real, *real.parents))


def _identity(path: Path) -> _Identity | None:
    try:
        found = path.stat()
    except OSError:  # it need not exist yet; what is above it may
        return None
    return found.st_dev, found.st_ino


def _is_run(directory: Path) -> bool:
    return (directory / _RUN_FILE).is_file() and (directory / EPOCHS).is_dir()


def _directories(top: Path) -> Iterator[Path]:
    for folder, names, _ in os.walk(top):
        yield from (Path(folder, name) for name in names)
