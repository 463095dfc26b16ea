"""Open the store that a path or URI names; defaults from the environment.

The one place that knows every backend; `objects` and `arrow`, and the libraries below them, are imported only when a
path asks for them. `uri` has the syntax of URIs.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from holdfast.errors import InvalidURI, MissingExtra
from holdfast.storage.files import mount_kind
from holdfast.storage.posix.store import PosixStore
from holdfast.storage.retry import RetryingStore
from holdfast.storage.store import Store
from holdfast.storage.uri import redact, scheme_of

__all__ = ["default_storage_path", "open_directories_below", "open_store"]

_NEARLY = re.compile(r"(s3|gs|gcs|az|abfs|abfss|hdfs|file):", re.IGNORECASE)
_BAD_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_OBJECT_EXTRAS = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
_NETWORK_MOUNTS = ("fuse", "nfs", "cifs", "smb", "ceph", "lustre", "gpfs", "beegfs", "glusterfs")


def open_store(path: str | os.PathLike[str], filesystem: object | None = None) -> Store:
    """The store that `path` names. Opening writes and creates nothing."""
    text = os.fspath(path)
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise InvalidURI(
            f"The storage path {text!r} is empty or not text: write a directory or a URI such as s3://bucket/runs."
        )
    scheme = scheme_of(text)
    if filesystem is not None:
        if scheme is not None:
            raise InvalidURI(
                f"The storage path {redact(text)} has a scheme beside a filesystem: write it without {scheme}://."
            )
        return _open_arrow(text, filesystem)
    if scheme is None:
        return _open_directory(_local_path(text))
    _check_encoding(text)
    if scheme == "file":
        return _open_directory(_file_path(text))
    if scheme in _OBJECT_EXTRAS:
        _check_bucket(text, scheme)
        return _open_objects(text, scheme)
    if scheme == "hdfs":
        return _open_arrow(text, None)
    raise InvalidURI(
        f"The storage path {redact(text)} has the unknown scheme {scheme}://: use a directory, file://, s3://, gs://, az://,"
        " abfs:// or hdfs://, or give a filesystem."
    )


def default_storage_path() -> str:
    """The default storage path: HOLDFAST_STORAGE, RAY_STORAGE, or ~/holdfast_results."""
    for name in ("HOLDFAST_STORAGE", "RAY_STORAGE"):
        if value := os.environ.get(name, "").strip():
            return value
    return os.path.expanduser("~/holdfast_results")  # noqa: PTH111  does not fail without a home


_elsewhere: dict[Path, Store] = {}
"""Directories of another machine, and the stores through which this process reaches them."""


def open_directories_below(root: Path, store: Store) -> None:
    """From here on `open_store` finds `root`, and what lies below it, in `store`: this machine has no such directory,
    or another one of that name."""
    _elsewhere[root] = store


def _open_directory(path: Path) -> Store:
    store = PosixStore(path)
    for root, other in _elsewhere.items():
        if (found := Path(store.uri)).is_relative_to(root):
            return other if found == root else other.sub(found.relative_to(root).as_posix())
    # A disk that fails will fail again; a mount over a network may not.
    return RetryingStore(store) if mount_kind(Path(store.uri)).startswith(_NETWORK_MOUNTS) else store


def _open_objects(uri: str, scheme: str) -> Store:
    try:
        from holdfast.storage.objects.store import open_objects

        store: Store = open_objects(uri)
    except ImportError as error:
        _only_missing("obstore", error)
        raise MissingExtra(
            f"{scheme}:// needs the object-store client; run: pip install 'holdfast[{_OBJECT_EXTRAS[scheme]}]'"
        ) from error
    return RetryingStore(store)


def _open_arrow(path: str, filesystem: object | None) -> Store:
    try:
        from holdfast.storage.arrow.store import open_arrow

        store: Store = open_arrow(path, filesystem)
    except ImportError as error:
        _only_missing("pyarrow", error)
        what = "hdfs://" if filesystem is None else "A filesystem"
        raise MissingExtra(f"{what} needs pyarrow; run: pip install 'holdfast[arrow]'") from error
    return RetryingStore(store)


def _only_missing(package: str, error: ImportError) -> None:
    """Raise `error` itself unless it means that this very package is not installed."""
    if isinstance(error, MissingExtra) or (error.name or "").partition(".")[0] != package:
        raise error


def _local_path(text: str) -> Path:
    if (nearly := _NEARLY.match(text)) and not os.path.exists(text):  # noqa: PTH110
        raise InvalidURI(
            f"The storage path {text} is no URI: write {nearly[1]}://..., or ./{text} for a directory of that name."
        )
    expanded = os.path.expanduser(text)  # noqa: PTH111  pathlib's raises without naming the path
    if expanded.startswith("~"):
        raise InvalidURI(
            f"The storage path {text} names no user's home: write the whole path, or ./{text} for a directory."
        )
    return Path(expanded)


def _file_path(uri: str) -> Path:
    parts = urlsplit(uri)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or parts.query or parts.fragment:
        raise InvalidURI(
            f"The storage path {redact(uri)} is no file URI: write file:///directory, and %3F for ? or %23 for #."
        )
    return Path(unquote(parts.path, errors="strict"))


def _check_encoding(uri: str) -> None:
    if _BAD_PERCENT.search(uri):
        raise InvalidURI(
            f"The storage path {redact(uri)} has a % without two hexadecimal digits: write %25 for a % of its own."
        )
    try:
        unquote(uri, errors="strict")
    except UnicodeDecodeError:
        raise InvalidURI(f"The storage path {redact(uri)} holds percent-encoded bytes that are not UTF-8.") from None


def _check_bucket(uri: str, scheme: str) -> None:
    try:
        bucket = urlsplit(uri).netloc.rpartition("@")[2]
    except ValueError:
        bucket = ""
    if not bucket:
        raise InvalidURI(f"The storage path {redact(uri)} names no bucket: write {scheme}://bucket/prefix.")
