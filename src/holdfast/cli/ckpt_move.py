"""`holdfast ckpt put` and `holdfast ckpt get`: a directory into a run, and a checkpoint out of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.commit import commit_directory
from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.restore import fetch_manifest
from holdfast.cli.exit_codes import Refused
from holdfast.cli.output import json_option, print_json, print_line
from holdfast.cli.progress import Meter
from holdfast.cli.uri_args import choose, find_run
from holdfast.storage.store import Store
from holdfast.views.formatting import count_text, rough_duration, size_text

__all__ = ["get", "put"]


@click.command(short_help="Commit a directory as a run's next checkpoint.")
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR")
@click.argument("uri", metavar="RUN")
@click.option("--name", help="A name of your own instead of checkpoint_NNNNNN.")
@click.option("--metric", "metrics", multiple=True, metavar="KEY=VALUE", help="Kept with it; may be repeated.")
@json_option
def put(directory: Path, uri: str, name: str | None, metrics: tuple[str, ...], as_json: bool) -> None:
    """Commit DIR as the next checkpoint of RUN.

    Readers see it when every byte of it is durable, and not before. Files that the checkpoint before it holds already
    are not sent again.
    """
    store = find_run(uri)
    plain = dict(_metric(text) for text in metrics)
    with Meter("Committing", _size_below(directory)) as meter:
        manifest = commit_directory(store, directory, metrics=plain, name=name, on_bytes=meter)
        elapsed_s = meter.elapsed_s
    reused = _reused(store, manifest)
    where = store.sub(manifest.name).uri
    if as_json:
        shape = {
            "uri": where,
            "name": manifest.name,
            "index": manifest.index,
            "file_count": len(manifest.files),
            "size_bytes": manifest.size_bytes,
            "unchanged_bytes": reused,
        }
        print_json(shape)
        return
    unchanged = f", {size_text(reused)} of it unchanged" if reused else ""
    details = f"{count_text(len(manifest.files), 'file', grouped=True)}, {size_text(manifest.size_bytes)}{unchanged}"
    print_line(f"Committed {where} ({details}) in {rough_duration(elapsed_s)}.")


@click.command(short_help="Fetch a checkpoint into a directory, verified.")
@click.argument("uri", metavar="CHECKPOINT")
@click.argument("target", type=click.Path(file_okay=False, path_type=Path), metavar="TARGET")
@click.option(
    "--force", is_flag=True, help="Fetch into a directory that has files, and replace those of the same name."
)
@json_option
def get(uri: str, target: Path, force: bool, as_json: bool) -> None:
    """Fetch CHECKPOINT into the directory TARGET, hashing every byte on the way.

    A run's URI means its newest checkpoint. A TARGET that is new or empty gets all of it or nothing.
    """
    if not force and target.is_dir() and any(target.iterdir()):
        raise Refused(f"{target} is not empty: name another directory, or use --force to fetch into it.")
    chosen = choose(uri)
    manifest = chosen.manifest
    with Meter("Fetching", manifest.size_bytes) as meter:
        fetch_manifest(chosen.store, chosen.name, manifest, Path(os.path.abspath(target)), on_bytes=meter)  # noqa: PTH100
        elapsed_s = meter.elapsed_s
    if as_json:
        shape = {
            "uri": chosen.store.sub(chosen.name).uri,
            "name": chosen.name,
            "target": str(target),
            "file_count": len(manifest.files),
            "size_bytes": manifest.size_bytes,
        }
        print_json(shape)
        return
    details = f"{count_text(len(manifest.files), 'file', grouped=True)}, {size_text(manifest.size_bytes)}, verified"
    print_line(f"Fetched {chosen.name} to {target} ({details}) in {rough_duration(elapsed_s)}.")


def _metric(text: str) -> tuple[str, Any]:
    """`loss=0.25` is a number, `stage=warm` a string, `sizes=[1,2]` what JSON says it is."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise click.BadParameter(f"{text!r} is no metric: write KEY=VALUE, such as loss=0.25.", param_hint="--metric")
    try:
        return key, json.loads(value)
    except ValueError:
        pass
    try:
        return key, float(value)  # nan, inf and the like, which JSON has not
    except ValueError:
        return key, value


def _size_below(directory: Path) -> int:
    """For the progress line: what cannot be read is left to the upload to complain about."""
    total_bytes = 0
    for folder, _, names in os.walk(directory, followlinks=False):
        for name in names:
            path = Path(folder, name)
            total_bytes += path.stat().st_size if path.exists() else 0
    return total_bytes


def _reused(store: Store, manifest: Manifest) -> int:
    """How many bytes the parent had already."""
    parent = Catalog(store).read_manifest(manifest.parent).manifest if manifest.parent is not None else None
    known = {(one.size_bytes, one.blake3) for one in parent.files} if parent is not None else set()
    return sum(one.size_bytes for one in manifest.files if (one.size_bytes, one.blake3) in known)
