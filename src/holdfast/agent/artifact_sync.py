"""Copies files of the node to the run's storage: log files, and the artifacts that the user left in the
working directory.

Files are uploaded whole when they changed since the last time; a failure is logged, and made good by the next
turn. `agent` says when: now and then, after a commit, and at the end of a generation. A log that is still written to
waits until it is longer by an eighth: so all its uploads together cost no more than nine times its length.
`joined_output` makes of logs the files that the user named.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.agent.joined_output import JoinedOutput, has_grown
from holdfast.core.own_names import is_own_name
from holdfast.errors import StorageError
from holdfast.runtime import current
from holdfast.storage.durability import volatile
from holdfast.storage.store import OnBytes, Store

__all__ = ["ArtifactSync"]

_log = logging.getLogger(__name__)

_Stamp = tuple[int, int]
"""When a file was changed, and its size."""


class ArtifactSync:
    """Remembers what was uploaded. Its methods block and may be called from any thread, one at a time works."""

    def __init__(
        self,
        open_store: Callable[[], Store],
        logs: Path,
        output: JoinedOutput,
        work_dir: Path | None,
        timeout_s: float = 1800.0,
    ) -> None:
        """A turn that takes longer than `timeout_s` is given up."""
        self._timeout_s = timeout_s
        self._open_store = open_store
        self._logs = logs
        self._output = output
        self._work_dir = work_dir
        self._uploaded: dict[Path, _Stamp] = {}
        self._refused: set[str] = set()
        self._lock = threading.Lock()

    def sync_logs(self, *, still_written: bool = False) -> None:
        """Upload log files that grew, as `logs/generation_000003/rank_0.log`, and then the files that the user named;
        of those that are `still_written` only what grew by an eighth."""
        logs = ((path, f"logs/{path.relative_to(self._logs).as_posix()}") for path in _files(self._logs))
        self._sync(logs, are_logs=True, still_written=still_written)

    def sync_artifacts(self) -> None:
        """Upload the working directory's new and changed files to the run's directory, under their own names."""
        if self._work_dir is not None:
            self._sync(self._artifacts(self._work_dir))

    def _artifacts(self, root: Path) -> Iterator[tuple[Path, str]]:
        local_root = self._open_store().local_root
        if local_root is not None and local_root.resolve() == root.resolve():
            return  # they are there already
        for path in _files(root):
            key = path.relative_to(root).as_posix()
            first = key.split("/", 1)[0]
            if not is_own_name(first) and not self._output.claims(key):
                yield path, key
            elif first not in self._refused:
                self._refused.add(first)
                _log.warning("The artifact %s is not stored: that name is the run's own; choose another.", first)

    def _sync(self, files: Iterator[tuple[Path, str]], *, are_logs: bool = False, still_written: bool = False) -> None:
        with self._lock:
            give_up_at = current().monotonic() + self._timeout_s

            def on_bytes(count: int) -> None:
                if current().monotonic() > give_up_at:
                    raise StorageError(f"they took longer than SyncConfig(sync_timeout={self._timeout_s:g}).")

            try:
                store = volatile(self._open_store()) if are_logs else self._open_store()
                for path, key in files:
                    self._upload(store, path, key, still_written, on_bytes)
                if are_logs:
                    self._output.store(store, on_bytes, still_written=still_written)
            except Exception as error:  # noqa: BLE001  a user's filesystem may raise anything
                _log.warning("Files of the working directory or logs could not be stored: %s", error)

    def _upload(self, store: Store, path: Path, key: str, still_written: bool, on_bytes: OnBytes) -> None:
        try:
            found = path.stat()
            stamp = (found.st_mtime_ns, found.st_size)
            before = self._uploaded.get(path)
            if before == stamp or (before and still_written and not has_grown(stamp[1], before[1])):
                return
            on_bytes(0)
            store.upload(key, path, on_bytes)
            self._uploaded[path] = stamp
        except FileNotFoundError:
            _log.debug("%s vanished before it could be stored", path)


def _files(root: Path) -> Iterator[Path]:
    """Regular files below `root`, symbolic links left alone."""
    for directory, below, names in os.walk(root):  # what vanishes meanwhile, or may not be entered, is left out
        below.sort()
        for name in sorted(names):
            path = Path(directory, name)
            if os.path.isfile(path) and not path.is_symlink():  # noqa: PTH113  Path raises where it may not look
                yield path
