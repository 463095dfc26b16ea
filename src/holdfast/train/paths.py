"""Paths of runs: where `RunConfig` puts one, and which `(storage_path, name)` a given path means.

`holdfast.storage.uri` joins and splits them; this only fills in defaults.
"""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.storage.uri import is_uri, redact, scheme_of, split
from holdfast.train.config import RunConfig
from holdfast.worker.session import is_installed

__all__ = ["resolve_storage_path", "split_run_path"]


def resolve_storage_path(config: RunConfig) -> str:
    """The directory or URI that holds the run's own; a path is made absolute. In a worker, which runs in a directory of
    its own, a relative path is meant from where the script was started."""
    assert config.storage_path is not None  # `RunConfig` fills it in
    text = os.fspath(config.storage_path)
    if config.storage_filesystem is not None or is_uri(text):
        return text
    path = Path(text).expanduser()
    if is_installed() and (start := os.environ.get("TUNE_ORIG_WORKING_DIR")) and Path(start).is_dir():
        path = Path(start, path)
    return str(path.absolute())


def split_run_path(path: str | os.PathLike[str]) -> tuple[str, str]:
    """`(storage_path, name)` of a run's directory; the query of a URI stays with the storage path."""
    text = os.fspath(path)
    parent, name = split(text)
    if is_uri(text) and not name:
        raise ConfigError(f"{redact(text)} names a bucket, not a run in it: write {scheme_of(text)}://bucket/name.")
    if name in ("", ".", ".."):
        raise ConfigError(f"{redact(text)} does not name a run's directory: write <storage_path>/<name>.")
    return parent, name
