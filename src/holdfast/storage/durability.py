"""Writing what need not survive a power cut, or need not yet: fewer fsyncs, where storage is a directory.

A `volatile` view of a store is for files that nothing depends on (logs, heartbeats, files for people), and for several
files of which none is acted upon before all are durable: `make_durable` pays one fsync for each file and directory
then, instead of one for each name on the way. Other stores have nothing to save, and are what they were.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from holdfast.storage.posix.store import PosixStore
from holdfast.storage.retry import RetryingStore, without_retries
from holdfast.storage.store import Store

__all__ = ["make_durable", "volatile"]


def volatile(store: Store) -> Store:
    """The same store, but what is written through this view may be lost, or empty, after a power cut."""
    if isinstance(store, RetryingStore):
        return store.over(volatile(without_retries(store)))
    make_view: Any = getattr(store, "volatile", None)  # a store in a directory, of this machine or another
    view: Store = store if make_view is None else make_view()
    return view


def make_durable(store: Store, keys: Iterable[str], directories: Iterable[str] = ()) -> None:
    """What was written to these keys survives a power cut from here on; `directories` are made as well, if need be,
    since they will be written to next. `NotFound` if a key is not there."""
    below = without_retries(store)
    if isinstance(below, PosixStore):
        below.sync(list(keys), list(directories))
