"""Handing a directory over: when `stage` returns, the target is the agent's alone and the user may do as they like.

Blocks are shared where the filesystem can (reflink), copied inside the kernel otherwise; a directory that the user
lets go of is renamed. Never a hard link: the user may write to that very file again. `session` calls this from
`report`; the agent uploads what it finds and removes it, also when this process dies half way.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from holdfast.checkpoint.layout import METADATA, is_sidecar
from holdfast.errors import CheckpointError, OutOfSpace
from holdfast.storage.files import copy_bytes, reflink
from holdfast.storage.private_directory import make_private_directory

__all__ = ["stage", "staged_files"]

_FULL = {errno.ENOSPC, errno.EDQUOT}


def stage(source: Path, target: Path, *, move: bool) -> None:
    """Make the new directory `target` hold what `source` holds; with `move`, `source` is gone afterwards."""
    if not source.is_dir():
        raise CheckpointError(
            f"The checkpoint directory {source} is not there: save the files before train.report() and keep "
            "the directory until it returns."
        )
    make_private_directory(target.parent)
    owned = move and not (source / ".manifest.json").exists()
    if owned and _is_self_contained(source) and _moved(source, target):
        return
    try:
        _copy_tree(source, target, "", ())
    except BaseException as error:
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in _FULL:
            raise OutOfSpace(
                f"There is no room for a copy of the checkpoint {source} in {target.parent}: free some, or point "
                "HOLDFAST_LOCAL_CACHE_DIR at a larger disk."
            ) from error
        raise
    if owned:
        shutil.rmtree(source, ignore_errors=True)


def staged_files(directory: Path) -> Iterator[str]:
    """The `/`-separated paths of the files that `stage` made."""
    for entry in _walk(directory):
        if not entry.is_dir(follow_symlinks=False):
            yield os.path.relpath(entry.path, directory)


def _moved(source: Path, target: Path) -> bool:
    try:
        os.rename(source, target)  # noqa: PTH104  refuses to replace a non-empty directory; pathlib hides that
    except OSError:
        return False
    return True


def _is_self_contained(directory: Path) -> bool:
    """Whether a rename moves all of it: there is no symbolic link in it, and no hard link into it."""
    if directory.is_symlink():
        return False
    return all(
        entry.is_dir(follow_symlinks=False)
        or (entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_nlink == 1)
        for entry in _walk(directory)
    )


def _walk(directory: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        for entry in entries:
            yield entry
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(Path(entry.path))


def _copy_tree(source: Path, target: Path, prefix: str, above: tuple[tuple[int, int], ...]) -> None:
    """Links are followed: a checkpoint is complete, wherever its files came from."""
    status = source.stat()
    here = (status.st_dev, status.st_ino)
    if here in above:
        raise CheckpointError(f"The checkpoint directory contains itself at {source}: remove that link.")
    target.mkdir(mode=stat.S_IMODE(status.st_mode) & 0o777 | stat.S_IRWXU)
    with os.scandir(source) as entries:
        for entry in entries:
            path = prefix + entry.name
            if is_sidecar(path) and path != METADATA:
                continue  # Left by an earlier commit of this very directory: they say nothing about the new one.
            if entry.is_dir():
                _copy_tree(Path(entry.path), target / entry.name, path + "/", (*above, here))
            else:
                _copy_file(entry.path, target / entry.name)


def _copy_file(source: str, target: Path) -> None:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # A pipe without a writer must not hang us.
    try:
        reader = os.open(source, flags)
    except FileNotFoundError:
        raise CheckpointError(f"{source} vanished, or is a link to nothing, while it was being copied.") from None
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise CheckpointError(f"{source} is a socket or a pipe: a checkpoint holds files only.") from None
        raise
    try:
        status = os.fstat(reader)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{source} is neither a file nor a directory: a checkpoint holds files only.")
        writer = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(writer, stat.S_IMODE(status.st_mode) & 0o777)  # whatever the umask: it is the user's choice
            if not reflink(reader, writer):
                with suppress(AttributeError):
                    os.posix_fadvise(reader, 0, 0, os.POSIX_FADV_SEQUENTIAL)
                copy_bytes(reader, writer)
        finally:
            os.close(writer)
    finally:
        os.close(reader)
