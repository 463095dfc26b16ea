"""Download a checkpoint to a local directory, verified on the way; find the newest intact one.

Nothing is trusted before it is compared with the manifest. `cache` and `handle` call `fetch`; the
controller calls `newest_intact` before it resumes.
"""

from __future__ import annotations

import secrets
import shutil
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from msgspec import UnsetType

from holdfast.checkpoint import layout
from holdfast.checkpoint.catalog import Catalog, Survey
from holdfast.checkpoint.digest import check_files, mismatch
from holdfast.checkpoint.known_files import process_wide
from holdfast.checkpoint.manifest import Manifest
from holdfast.core.checkpoint_types import FileEntry, VerifiedFile
from holdfast.errors import Damaged, NotCommitted, NotFound
from holdfast.storage.store import OnBytes, Store

__all__ = ["fetch", "fetch_manifest", "newest_intact", "require_intact", "verify_in_place"]


def fetch(
    store: Store,
    manifest_or_name: Manifest | str,
    target: Path,
    *,
    verify: bool = True,
    threads: int = 4,
    on_bytes: OnBytes | None = None,
) -> Path:
    """Download a committed checkpoint of the run at the store's root into the directory `target`.

    A target that is not there yet, or is empty, gets everything or nothing. Raises `Damaged`, naming the file, if
    a byte is not what was committed.
    """
    if isinstance(manifest_or_name, str):
        manifest_or_name = Catalog(store).get(manifest_or_name)
    return fetch_manifest(store, manifest_or_name.name, manifest_or_name, target, verify, threads, on_bytes)


def fetch_manifest(
    store: Store,
    name: str,
    manifest: Manifest,
    target: Path,
    verify: bool = True,
    threads: int = 4,
    on_bytes: OnBytes | None = None,
) -> Path:
    """Like `fetch`, for a manifest that was read from the directory `name`, whatever it calls itself."""
    if manifest.void:
        raise NotCommitted(f"{store.uri}: {manifest.name} was shut before it was committed; use another checkpoint.")
    if target.exists() and any(target.iterdir()):
        _download(store, name, manifest, target, verify, threads, on_bytes)
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.parent / f".{target.name}.{secrets.token_hex(6)}.partial"
    try:
        staging.mkdir()
        _download(store, name, manifest, staging, verify, threads, on_bytes)
        with suppress(OSError):
            shutil.copymode(target, staging)
        staging.replace(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def verify_in_place(
    store: Store, name: str, *, threads: int = 4, on_bytes: OnBytes | None = None
) -> list[VerifiedFile]:
    """Verify a local checkpoint that workers will read in place, without reading again what this process wrote or
    hashed itself and has not changed since. Raises `Damaged` or `NotCommitted`.

    Returns the files with the versions that were verified; none for a remote checkpoint, which is verified as it is
    downloaded.
    """
    if store.local_root is None:
        return []
    manifest = Catalog(store).get(name)
    require_intact(store, name, manifest, threads=threads, on_bytes=on_bytes)
    found: list[VerifiedFile] = []
    for entry in manifest.files:
        key = layout.key_of(name, entry.path)
        version, digest = store.version(key), process_wide.digest(store, key)
        if version is not None and digest == (entry.size_bytes, entry.blake3):
            found.append(VerifiedFile(entry.path, version, entry.size_bytes, entry.blake3))
    return found


def require_intact(
    store: Store, name: str, manifest: Manifest, *, threads: int = 4, on_bytes: OnBytes | None = None
) -> None:
    """Raise `Damaged` unless every file of a stored checkpoint is what its manifest says. Files whose digest
    this process knows, and that have not changed, are not read again."""
    if manifest.void:
        raise NotCommitted(f"{store.uri}: {manifest.name} was shut before it was committed; use another checkpoint.")
    known = process_wide.read_digest
    problems = check_files(store, manifest, name=name, deep=True, threads=threads, on_bytes=on_bytes, digest_of=known)
    if not problems:
        return
    now = Catalog(store).read_manifest(name).manifest
    if now is None or now.token != manifest.token:
        raise NotCommitted(f"{store.uri}: {manifest.name} was removed while it was read; use another checkpoint.")
    raise _damaged(store, name, manifest, "; ".join(problems))


def newest_intact(
    store: Store,
    *,
    deep: bool,
    on_damage: Callable[[Manifest, str], None],
    threads: int = 4,
    survey: Survey | None = None,
) -> Manifest | None:
    """The newest committed checkpoint whose files are all there with the right size (and, if `deep`, hash).

    `on_damage` is called for each damaged one on the way, newest first, with what is wrong and what happens next; for
    one whose manifest cannot be read, with an empty manifest of that name.
    """

    def unreadable(name: str, problem: str) -> None:
        index = layout.parse_index(name)
        blank = Manifest(name=name, index=-1 if index is None else index, epoch=0, token="", created_at="", writer="")
        on_damage(blank, f"{problem} The checkpoint before it is used instead.")

    for manifest in (survey or Catalog(store).survey()).newest_first(unreadable):
        problems = check_files(store, manifest, name=manifest.name, deep=deep, threads=threads)
        if not problems:
            return manifest
        on_damage(
            manifest,
            f"{store.uri}: {manifest.name} is damaged ({'; '.join(problems)})."
            " The checkpoint before it is used instead.",
        )
    return None


def _download(
    store: Store,
    name: str,
    manifest: Manifest,
    target: Path,
    verify: bool,
    threads: int,
    on_bytes: OnBytes | None,
) -> None:
    def one(entry: FileEntry) -> None:
        try:
            found = store.download(layout.key_of(name, entry.path), target / entry.path, on_bytes)
        except NotFound:
            raise _damaged(store, name, manifest, f"{entry.path} is missing") from None
        problem = mismatch(entry, found) if verify else None
        if problem is not None:
            (target / entry.path).unlink(missing_ok=True)
            raise _damaged(store, name, manifest, problem)
        if not isinstance(entry.mode, UnsetType):
            (target / entry.path).chmod(entry.mode | stat.S_IRUSR)

    for path in manifest.directories:
        (target / path).mkdir(parents=True, exist_ok=True)
    order = sorted(manifest.files, key=lambda entry: entry.size_bytes, reverse=True)
    with ThreadPoolExecutor(max(1, min(threads, len(order))), "fetch") as pool:
        futures = [pool.submit(one, entry) for entry in order]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    try:
        metadata = store.get(layout.key_of(name, layout.METADATA))
    except NotFound:
        return
    (target / layout.METADATA).write_bytes(metadata)


def _damaged(store: Store, name: str, manifest: Manifest, problem: str) -> Damaged:
    return Damaged(
        f"{store.uri}: {manifest.name} is damaged: {problem}; use an earlier checkpoint"
        f" (`holdfast ckpt ls {store.uri}`), or put the file back from a backup.",
        checkpoint=store.sub(name).uri if name else store.uri,
    )
