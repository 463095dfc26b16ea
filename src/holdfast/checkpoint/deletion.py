"""Deleting a checkpoint's directory in an order that a crash may interrupt anywhere.

The manifest goes first, so that readers stop seeing the checkpoint before its first file is gone; the
reservation goes last, so that the name stays taken, and the rest recognisable as ours, until nothing is left.
Nothing is ever written: deleting must work where no byte is free. `removal`, `abandon`, `reserve` and `repair` all
delete through here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from holdfast.checkpoint import layout
from holdfast.storage.keys import is_temporary
from holdfast.storage.store import Store

__all__ = [
    "StillOurs",
    "delete_all",
    "delete_files",
    "delete_part_records",
    "delete_rest",
    "delete_sidecars",
    "delete_temporaries",
    "delete_voided",
]

_BATCH = 100
"""Keys deleted between two checks that the directory is still the caller's."""

StillOurs = Callable[[], bool]


def delete_all(store: Store, name: str, still_ours: StillOurs) -> bool:
    """Delete everything: the manifest, then the files, then the reservation. `still_ours` as for `delete_rest`."""
    if not still_ours():
        return False
    store.delete([layout.key_of(name, layout.MANIFEST)])
    return delete_rest(store, name, still_ours)


def delete_part_records(store: Store, name: str) -> None:
    """Delete the part records that stayed in a committed checkpoint, before its manifest goes: what is left of an
    interrupted removal must not be committed a second time."""
    prefix = layout.key_of(name, "")
    keys = [entry.key for entry in store.list(name)]
    store.delete([key for key in keys if layout.is_part_record(key.removeprefix(prefix))])


def delete_rest(store: Store, name: str, still_ours: StillOurs = lambda: True) -> bool:
    """Delete everything in the directory of a checkpoint whose manifest is gone, the reservation last.

    `still_ours` is called before each batch: a process that was paused may find that the name is used again. Returns
    False then, and deletes no more.
    """
    reserved = layout.key_of(name, layout.RESERVED)
    keys = [entry.key for entry in store.list(name) if entry.key != reserved]
    for start in range(0, len(keys), _BATCH):
        if not still_ours():
            return False
        store.delete(keys[start : start + _BATCH])
    if not still_ours():
        return False
    delete_temporaries(store, name)
    _remove_empty_directories(store, name)
    store.delete([reserved])
    return True


def delete_voided(store: Store, name: str, still_ours: StillOurs) -> bool:
    """Delete everything if the manifest is a tombstone: that goes after the files, since it keeps late writers from
    committing. `still_ours` as for `delete_rest`."""
    return delete_files(store, name, still_ours) and delete_rest(store, name, still_ours)


def delete_files(store: Store, name: str, still_ours: StillOurs = lambda: True) -> bool:
    """Delete all but the reservation and the manifest (a tombstone). `still_ours` as for `delete_rest`."""
    keep = {layout.key_of(name, layout.RESERVED), layout.key_of(name, layout.MANIFEST)}
    keys = [entry.key for entry in store.list(name) if entry.key not in keep]
    for start in range(0, len(keys), _BATCH):
        if not still_ours():
            return False
        store.delete(keys[start : start + _BATCH])
    if store.local_root is not None:
        if not still_ours():
            return False
        delete_temporaries(store, name)
        _remove_empty_directories(store, name)
    return True


def delete_sidecars(store: Store, name: str, still_ours: StillOurs) -> None:
    """Give up the draft in a directory of the user's own: delete what Holdfast put there, the reservation last."""
    reserved, prefix = layout.key_of(name, layout.RESERVED), layout.key_of(name, "")
    paths = [entry.key.removeprefix(prefix) for entry in store.list(name)]
    keep = (layout.RESERVED, layout.METADATA, layout.PINNED)
    doomed = [layout.key_of(name, path) for path in paths if layout.is_sidecar(path) and path not in keep]
    for keys in (doomed, [reserved]):
        if keys and still_ours():
            store.delete(keys)


def delete_temporaries(store: Store, name: str, older_than_s: float = 0.0, now_s: float = 0.0) -> list[str]:
    """Delete unfinished writes, which a killed process leaves where keys are files: no `list` names them.

    Returns their paths below the store's root. `older_than_s` spares what was written to since `now_s` minus
    that.
    """
    if store.local_root is None:
        return []
    gone: list[str] = []
    newest_s = time.time() - older_than_s
    top = store.local_root / name
    for folder, _, names in os.walk(top):
        for found in filter(is_temporary, names):
            path = Path(folder, found)
            with suppress(FileNotFoundError):
                if older_than_s and path.stat().st_mtime > newest_s:
                    continue
                path.unlink()
                gone.append(str(path.relative_to(store.local_root)))
                _prune(path.parent, store.local_root)
    return gone


def _remove_empty_directories(store: Store, name: str) -> None:
    """Remove the empty directories that a checkpoint was committed with: no deletion of a file removes these."""
    if store.local_root is not None:
        top = store.local_root / name
        for folder, _, _ in os.walk(top, topdown=False):
            if Path(folder) != top:
                with suppress(OSError):
                    Path(folder).rmdir()


def _prune(folder: Path, root: Path) -> None:
    """Remove a directory that is empty now, and those above it that become so."""
    with suppress(OSError):
        while folder != root:
            folder.rmdir()
            folder = folder.parent
