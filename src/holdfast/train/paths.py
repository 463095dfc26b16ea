"""Paths of runs: where `RunConfig` puts one, and which `(storage_path, name)` a given path means.

`holdfast.storage.locate` knows what the URIs mean; this only takes them apart and fills in defaults.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.train.config import RunConfig

__all__ = ["join_run_path", "resolve_storage_path", "split_run_path"]

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def resolve_storage_path(config: RunConfig) -> str:
    """The directory or URI that holds the run's own: what was given, by its newest name, or the default."""
    given = config.storage_path or config.sync_config.upload_dir or config.local_dir
    if given is None:
        from holdfast.storage.locate import default_storage_path

        given = default_storage_path()
    text = os.fspath(given)
    if config.storage_filesystem is not None or _SCHEME.match(text):
        return text
    return str(Path(text).expanduser().absolute())


def join_run_path(storage_path: str, name: str) -> str:
    """The path of what is called `name` below a directory or URI; the opposite of `split_run_path`."""
    scheme = match[0] if (match := _SCHEME.match(storage_path)) else ""
    rest, mark, query = storage_path[len(scheme) :].partition("?") if scheme else (storage_path, "", "")
    return f"{scheme}{rest.rstrip('/')}/{name}{mark}{query}"


def split_run_path(path: str | os.PathLike[str]) -> tuple[str, str]:
    """`(storage_path, name)` of a run's directory; the query of a URI stays with the storage path."""
    text = os.fspath(path)
    scheme = match[0] if (match := _SCHEME.match(text)) else ""
    rest, mark, query = text[len(scheme) :].partition("?") if scheme else (text, "", "")
    parent, slash, name = rest.rstrip("/").rpartition("/")
    if scheme and scheme != "file://" and not parent:
        raise ConfigError(f"{text} names a bucket, not a run in it: write {scheme}bucket/name.")
    if not name or name in (".", ".."):
        raise ConfigError(f"{text} does not name a run's directory: write <storage_path>/<name>.")
    if not scheme and not slash:
        parent = "."
    return scheme + (parent or "/") + mark + query, name
