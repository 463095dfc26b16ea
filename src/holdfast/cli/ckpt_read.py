"""`holdfast ckpt ls` and `holdfast ckpt show`: what a run holds, by its manifests. Neither reads a file's bytes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click

from holdfast.checkpoint.catalog import Catalog, visible
from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.removal import is_pinned
from holdfast.cli.output import json_option, print_json, print_line, print_table
from holdfast.cli.uri_args import choose, find_run, nothing_text
from holdfast.errors import NotFound
from holdfast.storage.store import Store
from holdfast.views.formatting import count_text, iso_time, metrics_text, size_text

__all__ = ["ls", "show"]

_THREADS = 16


@click.command(short_help="List a run's committed checkpoints.")
@click.argument("uri", metavar="RUN")
@json_option
def ls(uri: str, as_json: bool) -> None:
    """List the committed checkpoints of RUN, oldest first.

    The newest is marked: it is the one from which training would go on. Unfinished and removed checkpoints are not
    there to any reader; `holdfast ckpt verify` lists what crashed writers left.
    """
    store = find_run(uri)
    committed, damaged = _look(store)
    if not committed and not damaged:
        _check_exists(store)
    pinned = _pinned(store, committed)
    newest = committed[-1].name if committed else None
    if as_json:
        print_json(
            {
                "uri": store.uri,
                "checkpoints": [
                    {**_summary(one), "pinned": one.name in pinned, "newest": one.name == newest} for one in committed
                ],
                "damaged": [{"name": name, "problem": problem} for name, problem in damaged],
            }
        )
        return
    if committed:
        rows = [_row(one, one.name in pinned, one.name == newest) for one in committed]
        print_table(("NAME", "INDEX", "CREATED", "SIZE", "FILES", "METRICS", ""), rows, right=(1, 3, 4))
    else:
        print_line(nothing_text(store), err=True)
    for name, problem in damaged:
        print_line(f"warning: {name} is not listed: {problem}", err=True)


@click.command(short_help="Show a checkpoint's manifest and files.")
@click.argument("uri", metavar="CHECKPOINT")
@json_option
def show(uri: str, as_json: bool) -> None:
    """Show what the manifest of CHECKPOINT says: how it came about, and its files with sizes and hashes.

    A run's URI means its newest checkpoint.
    """
    chosen = choose(uri)
    store, name, manifest = chosen.store, chosen.name, chosen.manifest
    pinned = is_pinned(store, name)
    where = store.sub(name).uri
    if as_json:
        files = [
            {"path": one.path, "size_bytes": one.size_bytes, "blake3": one.blake3, "rank": one.rank}
            for one in manifest.files
        ]
        print_json({"uri": where, **_details(manifest), "pinned": pinned, "files": files})
        return
    shown = {
        "checkpoint": where,
        "index": str(manifest.index),
        "created": f"{iso_time(manifest.created_at)} by {manifest.writer}",
        "parent": manifest.parent or "none",
        "run": f"controller {manifest.epoch}, generation {manifest.generation}, iteration {manifest.iteration}",
        "world size": str(manifest.world_size),
        "metrics": metrics_text(manifest.metrics) or "none",
        "pinned": "yes" if pinned else "no",
        "size": f"{size_text(manifest.size_bytes)} in {count_text(len(manifest.files), 'file', grouped=True)}",
    }
    for key, value in shown.items():
        print_line(f"{key + ':':12}{value}")
    if manifest.files:
        print_line()
        rows = [(one.path, size_text(one.size_bytes), str(one.rank), one.blake3) for one in manifest.files]
        print_table(("FILE", "SIZE", "RANK", "BLAKE3"), rows, right=(1, 2))


def _look(store: Store) -> tuple[list[Manifest], list[tuple[str, str]]]:
    """The committed checkpoints, oldest first, and names with what is wrong with their manifests; each read once."""
    catalog = Catalog(store)
    entries = catalog.read_manifests()
    fences = catalog.fences()
    committed = [found for entry in entries if (found := visible(entry, fences)) is not None]
    damaged = [(entry.name, entry.problem) for entry in entries if entry.problem is not None and not entry.torn]
    return sorted(committed, key=lambda manifest: manifest.order), damaged


def _summary(manifest: Manifest) -> dict[str, Any]:
    return {
        "name": manifest.name,
        "index": manifest.index,
        "created_at": manifest.created_at,
        "size_bytes": manifest.size_bytes,
        "file_count": len(manifest.files),
        "metrics": manifest.metrics,
    }


def _details(manifest: Manifest) -> dict[str, Any]:
    return {
        **_summary(manifest),
        "format": manifest.format,
        "writer": manifest.writer,
        "parent": manifest.parent,
        "epoch": manifest.epoch,
        "generation": manifest.generation,
        "iteration": manifest.iteration,
        "world_size": manifest.world_size,
    }


def _row(manifest: Manifest, pinned: bool, newest: bool) -> tuple[str, ...]:
    marks = [mark for mark, wanted in (("pinned", pinned), ("newest", newest)) if wanted]
    return (
        manifest.name,
        str(manifest.index),
        iso_time(manifest.created_at),
        size_text(manifest.size_bytes),
        str(len(manifest.files)),
        metrics_text(manifest.metrics),
        ", ".join(marks),
    )


def _pinned(store: Store, committed: list[Manifest]) -> set[str]:
    """Which of them are pinned; at the same time, since each is a trip over the network where storage is remote."""
    names = [one.name for one in committed]
    if not names:
        return set()
    with ThreadPoolExecutor(min(_THREADS, len(names)), "pins") as pool:
        answers = pool.map(lambda name: is_pinned(store, name), names)
        return {name for name, answer in zip(names, answers, strict=True) if answer}


def _check_exists(store: Store) -> None:
    """An empty run and a mistyped path both have no checkpoints: raise `NotFound` for the second."""
    there = bool(store.list()) if store.local_root is None else store.local_root.is_dir()
    if not there:
        raise NotFound(f"{store.uri} does not exist, or is empty: check the path.")
