"""`holdfast ckpt rm`, `pin` and `unpin`: which checkpoints go, and which may not.

Nothing is removed unless everything that was named may be. The order of deletion is `holdfast.checkpoint.deletion`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import click

from holdfast.checkpoint import removal
from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.manifest import Manifest
from holdfast.cli.exit_codes import Refused
from holdfast.cli.output import json_option, print_json, print_line
from holdfast.cli.uri_args import find_checkpoint
from holdfast.errors import Damaged
from holdfast.storage.store import Store
from holdfast.views.formatting import size_text

__all__ = ["pin", "rm", "unpin"]


@click.command(short_help="Remove checkpoints.")
@click.argument("uris", nargs=-1, required=True, metavar="CHECKPOINT...")
@click.option("--force", is_flag=True, help="Remove a run's newest checkpoint too.")
@json_option
def rm(uris: tuple[str, ...], force: bool, as_json: bool) -> None:
    """Remove each CHECKPOINT, for good.

    A pinned one is refused until it is unpinned; a run's newest, from which training would go on, needs --force. If
    one of several is refused, none is removed.
    """
    named = {(store.uri, name): store for store, name in map(find_checkpoint, uris)}
    found = {key: _removable(store, key[1], force) for key, store in named.items()}
    for (_, name), store in named.items():
        manifest = found[store.uri, name]
        removal.remove(store, name, token=None if manifest is None else manifest.token)
        if not as_json:
            size_bytes = None if manifest is None else manifest.size_bytes
            print_line(f"Removed {name}" + ("." if size_bytes is None else f" ({size_text(size_bytes)})."))
    if as_json:
        print_json({"removed": [store.sub(name).uri for (_, name), store in named.items()]})


@click.command(short_help="Keep checkpoints from retention and removal.")
@click.argument("uris", nargs=-1, required=True, metavar="CHECKPOINT...")
@json_option
def pin(uris: tuple[str, ...], as_json: bool) -> None:
    """Keep each CHECKPOINT: retention passes it over, and `rm` refuses it, until it is unpinned."""
    _each(uris, removal.pin, "Pinned", as_json)


@click.command(short_help="Lift the pin of checkpoints.")
@click.argument("uris", nargs=-1, required=True, metavar="CHECKPOINT...")
@json_option
def unpin(uris: tuple[str, ...], as_json: bool) -> None:
    """Lift the pin of each CHECKPOINT; no error if it has none."""
    _each(uris, removal.unpin, "Unpinned", as_json)


def _removable(store: Store, name: str, force: bool) -> Manifest | None:
    """What would go, None where its manifest is damaged; raises if it may not go."""
    catalog = Catalog(store)
    found: Manifest | None = None
    with suppress(Damaged):
        found = catalog.get(name)
    if removal.is_pinned(store, name):
        raise Refused(f"{store.sub(name).uri} is pinned: `holdfast ckpt unpin` it first.")
    newest = None if force else catalog.newest()
    if newest is not None and newest.name == name:
        raise Refused(f"{store.sub(name).uri} is its run's newest checkpoint: use --force to remove it nevertheless.")
    return found


def _each(uris: tuple[str, ...], action: Callable[[Store, str], None], done: str, as_json: bool) -> None:
    found = [find_checkpoint(uri) for uri in uris]
    for store, name in found:
        action(store, name)
        if not as_json:
            print_line(f"{done} {name}.")
    if as_json:
        print_json({done.lower(): [store.sub(name).uri for store, name in found]})
