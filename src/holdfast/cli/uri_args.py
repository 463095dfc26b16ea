"""What a URI on the command line names: a run, or one checkpoint in it.

A directory with a manifest or a reservation is a checkpoint; anything else counts as a run. Commands that read one
checkpoint accept a run's URI, too, and use its newest.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from holdfast.checkpoint import layout
from holdfast.checkpoint.catalog import Catalog, ManifestRead
from holdfast.checkpoint.manifest import Manifest
from holdfast.cli.output import print_line
from holdfast.errors import ConfigError, Damaged, NotCommitted, NotFound
from holdfast.storage import uri as uris
from holdfast.storage.locate import default_storage_path, open_store
from holdfast.storage.store import Store
from holdfast.storage.uri import is_uri

__all__ = ["Chosen", "choose", "find", "find_checkpoint", "find_run", "find_run_or_name", "nothing_text", "split"]

_NAMED = 5
"""So many directories are named."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """One committed checkpoint: the run's store, the directory's name in it, and its manifest."""

    store: Store
    name: str
    manifest: Manifest


def split(uri: str) -> tuple[str, str]:
    """The URI of the directory above, and the last part's name; a query stays with the URI."""
    if not is_uri(uri):
        uri = os.path.abspath(os.path.expanduser(uri))  # noqa: PTH100, PTH111  keeps symlinks
    return uris.split(uri)


def find(uri: str) -> tuple[Store, str | None]:
    """The run's store and the checkpoint's name in it; None for the name where the URI names a run."""
    here = open_store(uri)
    if not any(_holds(here, sidecar) for sidecar in (layout.MANIFEST, layout.RESERVED)):
        return here, None
    above, name = split(uri)
    return open_store(above), name


def find_run(uri: str) -> Store:
    """The store of a run, for commands that are about all of its checkpoints."""
    store, name = find(uri)
    if name is not None:
        raise ConfigError(f"{_shown(store, name)} is a checkpoint: name its run, {store.uri}, or use `ckpt show`.")
    return store


def find_run_or_name(text: str) -> Store:
    """The store of a run that is named by its URI, or by its name alone where it lies in the default storage path."""
    if is_uri(text) or "/" in text or Path(text).is_dir():
        return find_run(text)
    from holdfast.control.history import RUN_FILE

    store = find_run(uris.join(default_storage_path(), text))
    if not _holds(store, RUN_FILE):
        raise NotFound(
            f"There is no run {text} in {default_storage_path()}, where a name alone is looked for: give the path or "
            f"URI of its directory, such as results/{text}."
        )
    return store


def find_checkpoint(uri: str) -> tuple[Store, str]:
    """The run's store and a checkpoint's name, for commands that change exactly the one that was named."""
    store, name = find(uri)
    if name is not None:
        return store, name
    newest = Catalog(store).newest()
    if newest is None:
        raise NotFound(f"{store.uri} is no checkpoint: `holdfast ckpt ls` shows those of a run.")
    raise ConfigError(f"{store.uri} is a run: name one of its checkpoints, such as {_shown(store, newest.name)}.")


def choose(uri: str) -> Chosen:
    """The committed checkpoint that a URI names, or the newest of the run that it names; prints which that is."""
    store, name = find(uri)
    if name is not None:
        return Chosen(store, name, _read(store, name))
    newest = next(Catalog(store).newest_first(_warn), None)
    if newest is None:
        raise NotFound(f"{store.uri} holds no committed checkpoint: check the path, or see `holdfast ckpt verify`.")
    print_line(f"{store.uri} is a run: taking its newest checkpoint, {newest.name}.", err=True)
    return Chosen(store, newest.name, newest)


def _read(store: Store, name: str) -> Manifest:
    entry: ManifestRead = Catalog(store).read_manifest(name)
    if entry.problem is not None and not entry.torn:
        raise Damaged(entry.problem)
    found = entry.manifest
    if found is not None and not found.void and found.name != name:
        return found  # somebody's copy of a checkpoint, outside its run: as good as its bytes
    if found is None:
        raise NotCommitted(f"{_shown(store, name)} was never committed, or is being written: use another checkpoint.")
    return Catalog(store).get(name)


def _holds(store: Store, key: str) -> bool:
    try:
        store.size(key)
    except NotFound:
        return False
    return True


def _warn(name: str, problem: str) -> None:
    print_line(f"warning: {name} is passed over: {problem}", err=True)


def _shown(store: Store, name: str) -> str:
    return store.sub(name).uri


def nothing_text(store: Store) -> str:
    """Where no checkpoint is: that there is none, and what is below, in case the path is that of several runs."""
    below = Catalog(store).names()
    if not below:
        return f"{store.uri} holds no committed checkpoint."
    named = ", ".join(below[:_NAMED]) + (", ..." if len(below) > _NAMED else "")
    return f"{store.uri} holds no committed checkpoint; below it are: {named}."
