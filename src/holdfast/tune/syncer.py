"""`Syncer`: the user's own way to copy an experiment's directory elsewhere, and `SyncConfig`, which names it.

An experiment with a `Syncer` lies on the driver's own disk, where everything is committed; the syncer mirrors that
directory while the experiment goes on, and once more when it has ended. Nothing is ever read from the mirror, and no
commit depends on it. Without one, `SyncConfig(upload_dir)` is where the experiment lies.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass

from holdfast.errors import ConfigError
from holdfast.storage.locate import open_store
from holdfast.storage.uri import join
from holdfast.train import config as train_config
from holdfast.tune.user_code import describe_error

__all__ = ["Mirror", "SyncConfig", "Syncer", "make_mirror"]

_RETRIES = 2
_BACKOFF_S = 5.0
_log = logging.getLogger("holdfast")


class Syncer:
    """Derive from it, and implement `sync_up`. What takes long may be started there and waited for in `wait`. Methods
    are called one at a time, in a thread of the driver; an exception, or False, is a failure, which is tried again."""

    def __init__(self, sync_period: float = 300.0) -> None:
        """`sync_period`: `sync_up_if_needed` syncs after so many seconds."""
        self.sync_period = sync_period
        self.last_sync_up_time = float("-inf")
        self.last_sync_down_time = float("-inf")

    def sync_up(self, local_dir: str, remote_dir: str, exclude: list[str] | None = None) -> bool:
        """Start to copy what is new or changed below `local_dir` to `remote_dir`; False if that cannot be started."""
        raise NotImplementedError(f"{type(self).__name__} has no sync_up(): that is what a syncer does.")

    def sync_down(self, remote_dir: str, local_dir: str, exclude: list[str] | None = None) -> bool:
        """The way back. Experiments never call it."""
        raise NotImplementedError(f"{type(self).__name__} has no sync_down().")

    def delete(self, remote_dir: str) -> bool:
        """Remove the copy. Experiments never call it."""
        raise NotImplementedError(f"{type(self).__name__} has no delete().")

    def retry(self) -> None:
        """Start again what has failed last."""
        raise NotImplementedError(f"{type(self).__name__} has no retry().")

    def wait(self, timeout: float | None = None) -> None:
        """Until what was started has ended; raises if it failed. The base starts nothing."""

    def wait_or_retry(self, max_retries: int = _RETRIES, backoff_s: float = _BACKOFF_S) -> None:
        """`wait`, and start again what failed, up to `max_retries` times."""
        for tried in range(max_retries + 1):
            try:
                return self.wait()
            except Exception as error:
                if tried == max_retries:
                    raise
                _log.info("Syncing failed, and is tried again: %s", error)
                time.sleep(backoff_s)
                self.retry()

    def sync_up_if_needed(self, local_dir: str, remote_dir: str, exclude: list[str] | None = None) -> bool:
        """`sync_up`, unless that was called less than `sync_period` seconds ago."""
        now = time.time()
        if now - self.last_sync_up_time < self.sync_period:
            return False
        self.last_sync_up_time = now
        return self.sync_up(local_dir, remote_dir, exclude)

    def sync_down_if_needed(self, remote_dir: str, local_dir: str, exclude: list[str] | None = None) -> bool:
        """`sync_down`, unless that was called less than `sync_period` seconds ago."""
        now = time.time()
        if now - self.last_sync_down_time < self.sync_period:
            return False
        self.last_sync_down_time = now
        return self.sync_down(remote_dir, local_dir, exclude)

    def reset(self) -> None:
        """Let the next `sync_up_if_needed` and `sync_down_if_needed` sync."""
        self.last_sync_up_time = self.last_sync_down_time = float("-inf")

    def close(self) -> None:
        """Nothing is called after this."""


@dataclass
class SyncConfig(train_config.SyncConfig):
    """What goes where, besides `RunConfig(storage_path)`, and when.

    `upload_dir` is an older name of `RunConfig(storage_path)`. With a `Syncer` of your own as `syncer`, the experiment
    lies in `RunConfig(local_dir)` instead, and the syncer copies it to `upload_dir`: every `sync_period` seconds, soon
    after a trial's checkpoint (`sync_on_checkpoint`), and at the end. `syncer="auto"` and None are the same: what is
    stored is stored by the nodes that have it.
    """

    def __post_init__(self) -> None:
        if self.mirror is not None and self.upload_dir is None:
            raise ConfigError("SyncConfig(syncer) needs upload_dir: the place to which it copies.")
        super().__post_init__()

    @property
    def storage_path(self) -> str | os.PathLike[str] | None:
        return self.upload_dir if self.mirror is None else None

    @property
    def mirror(self) -> Syncer | None:
        """The user's syncer."""
        return self.syncer if isinstance(self.syncer, Syncer) else None

    @property
    def _effective(self) -> tuple[str, ...]:
        return () if self.mirror is None else ("syncer", "sync_on_checkpoint")


class Mirror:
    """Calls a `Syncer`, in a thread of its own. Use it in a `with` statement: at its end the copy is complete, or a
    warning says that it is not."""

    def __init__(self, syncer: Syncer, local_dir: str, remote_dir: str, sync_period_s: float) -> None:
        self._syncer, self._local_dir, self._remote_dir = syncer, local_dir, remote_dir
        self._period_s = sync_period_s
        self._changed = threading.Condition()
        self._due = self._ended = False
        self._thread = threading.Thread(target=self._work, name="holdfast-mirror", daemon=True)

    def __enter__(self) -> Mirror:
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join()

    def sync_soon(self) -> None:
        """There is something that should be copied before long. From any thread."""
        with self._changed:
            self._due = True
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due or self._ended, self._period_s)
                self._due, ended = False, self._ended
            failed = self._sync()
            if ended:
                break
            if failed:
                _log.info("%s could not be copied to %s this time: %s", self._local_dir, self._remote_dir, failed)
        try:
            self._syncer.close()
        except BaseException as error:  # noqa: BLE001  whatever users' syncers raise, an exit included
            failed = failed or f"close() raised {describe_error(error)}"
        if failed:
            _log.warning(
                "The copy at %s is not complete, since %s failed (%s); all of the experiment is in %s.",
                self._remote_dir,
                type(self._syncer).__name__,
                failed,
                self._local_dir,
            )

    def _sync(self) -> str:
        """What kept it from syncing; "" if nothing did."""
        try:
            if not self._syncer.sync_up(self._local_dir, self._remote_dir):
                return "sync_up() gave False"
            self._syncer.wait_or_retry()
        except BaseException as error:  # noqa: BLE001  whatever users' syncers raise, an exit included
            return describe_error(error)
        return ""


def make_mirror(
    config: train_config.SyncConfig, storage_path: str, name: str, filesystem: object | None
) -> Mirror | None:
    """The mirror of an experiment, if its `SyncConfig` has a `Syncer`."""
    syncer = config.mirror if isinstance(config, SyncConfig) else None
    if syncer is None:
        return None
    store = open_store(storage_path, filesystem)
    local_root = store.sub(name).local_root
    store.close()
    if local_root is None:
        raise ConfigError(
            f"SyncConfig(syncer) copies a directory of this machine, but the experiment lies in {storage_path}: leave "
            "the syncer out, or give RunConfig(local_dir) in the place of storage_path."
        )
    assert config.upload_dir is not None
    return Mirror(syncer, str(local_root), join(os.fspath(config.upload_dir), name), config.sync_period)
