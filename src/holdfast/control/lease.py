"""The lease: at most one controller's decisions count.

Each controller creates `epochs/<n>.json`, which only one can; the highest number is the one that counts, and everybody
below it is fenced (`holdfast.checkpoint.epochs` voids their late commits, `writer` their late records). A living
holder is known by its process where it runs on this machine, otherwise by `epochs/<n>.beat`, which it rewrites every
few seconds: a beat that does not change for the time-to-live, by the clock of whoever waits, is a dead one. So is an
epoch file that stays torn for as long: where creation is not atomic, its controller may just be writing it.

A lease may have guests: runs whose directories lie below its own (the trials of an experiment). A guest has no lease in
storage; its directory gets a fence, under the number of the lease's epoch, when there is something to fence.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.claims import create_by_claim, create_once
from holdfast.checkpoint.epochs import EpochFloor, epoch_key, floor_key, list_epochs, read_floor
from holdfast.checkpoint.layout import EPOCHS
from holdfast.checkpoint.process_identity import ProcessIdentity, is_dead, this_process
from holdfast.checkpoint.timestamps import now_text
from holdfast.core.decode_errors import DECODE_ERRORS
from holdfast.errors import Fenced, NotFound, RunBusy, StorageError
from holdfast.journal.format import DIRECTORY as JOURNAL
from holdfast.journal.reader import Position, position
from holdfast.runtime import current
from holdfast.storage.durability import make_durable, volatile
from holdfast.storage.mount_cache import find_mount_cache
from holdfast.storage.store import Store

__all__ = [
    "TIME_TO_LIVE_S",
    "EpochFile",
    "GuestLease",
    "Holder",
    "Lease",
    "acquire",
    "find_holder",
    "read_cuts",
]

TIME_TO_LIVE_S = 15.0
_MAX_CACHE_WAIT_S = 5.0
"""A mount that shows names for longer than this is waited for no longer, but the user is told."""
_log = logging.getLogger(__name__)
_held: set[str] = set()
"""The ids of the leases of this process: one that could not be released in storage is released here."""


class EpochFile(msgspec.Struct, frozen=True, kw_only=True):
    """What a controller declares when it takes a run on."""

    epoch: int
    id: str = ""
    """16 random hexadecimal digits: this lease and no other, whatever its number. Names the controller's journal."""
    holder: ProcessIdentity
    started_at: str
    time_to_live_s: float = TIME_TO_LIVE_S
    address: str = ""
    """Of the holder's control API, `HOST:PORT`. The run secret, which opens it, is never in storage."""


class Holder(NamedTuple):
    """Who took a run on last, and whether it still holds it."""

    epoch: EpochFile
    is_alive: bool | None
    """None: it runs on another machine, so only its address, or its heartbeat, can tell."""


class _Beat(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    at: str
    released: bool = False


class Lease:
    """A held lease. `beat` from time to time, `release` at the end."""

    def __init__(self, store: Store, own: EpochFile, floor: int) -> None:
        self.floor = floor
        """The first checkpoint index that is this controller's own."""
        self._store = store
        self._own = own
        self._number = 0
        self._fenced = False

    @property
    def epoch(self) -> int:
        return self._own.epoch

    @property
    def id(self) -> str:
        """16 random hexadecimal digits that the epoch file holds."""
        return self._own.id

    def beat(self) -> None:
        """Show that this controller lives, and find out whether it still counts: `Fenced` if not."""
        self.check()
        self._number += 1
        self._put(released=False)

    def check(self) -> None:
        """Raises `Fenced` if another controller has taken the run over: its epoch is higher, or it holds ours, which
        can happen where a store shows this controller's files to others too late."""
        highest = max(list_epochs(self._store), default=0)
        if highest < self.epoch:
            return
        other = _read(self._store, highest)
        if highest > self.epoch or other.id not in (self.id, ""):
            self._fenced = True
            raise Fenced(
                f"{self._store.uri} was taken over by {_name(other.holder)} at {other.started_at}; "
                "what this controller does no longer counts."
            )

    @property
    def known_fenced(self) -> bool:
        """Whether this process has found out that another controller has taken over."""
        return self._fenced

    def is_fenced(self) -> bool:
        """Whether another controller has taken the run over, or might have: one look for the next number. Where the
        storage does not answer, nobody knows, and whoever asks must not write."""
        if not self._fenced:
            try:
                self._store.size(epoch_key(self.epoch + 1))
                self._fenced = True
            except NotFound:
                return False
            except StorageError:
                return True
        return self._fenced

    def make_fence(self) -> None:
        """Before the first reservation: the fence stands since the lease was acquired."""

    def check_commit(self) -> None:
        """After a commit, which has looked at the epochs itself."""

    def guest(self, store: Store, *, is_new: bool) -> GuestLease:
        """The share of a run whose directory is the root of `store`. `is_new`: no holder of this lease, now or before,
        has started the run, as far as the journal tells."""
        return GuestLease(self, store, self._own, is_new=is_new)

    def release(self) -> None:
        """Let the next controller in without a wait; never fails, since a dead holder is found out all the same."""
        _held.discard(self.id)
        self._number += 1
        try:
            self._put(released=True)
        except StorageError as error:
            _log.info("The lease could not be released in storage: %s", error)

    def _put(self, *, released: bool) -> None:
        beat = _Beat(number=self._number, at=now_text(), released=released)
        # A power cut ends the holder as well, so a beat need not survive one.
        volatile(self._store).put(_beat_key(self.epoch), msgspec.json.encode(beat))


class GuestLease:
    """One run's share of a lease that it does not hold alone. What it asks of the lease is answered without a request
    to storage wherever the holder's own beat will tell soon enough."""

    def __init__(self, holder: Lease, store: Store, own: EpochFile, *, is_new: bool) -> None:
        self.floor = 0
        """The first checkpoint index that is this holder's own, once there is a fence."""
        self._holder = holder
        self._store = store
        self._own = own
        self._is_new = is_new
        self._is_fence_made = False

    @property
    def epoch(self) -> int:
        return self._holder.epoch

    @property
    def id(self) -> str:
        return self._holder.id

    def make_fence(self) -> None:
        """Create the epoch's files in the run's directory, unless that is done: before the first reservation of a new
        run, and before anything is read of a run that an earlier holder had started.

        What an earlier holder commits to a run that is new to this one does not count: it was fenced by then, or the
        journal would tell of the run. So the floor of a new run is 0, whatever its directory holds."""
        if self._is_fence_made:
            return
        cache_s = _mount_cache_s(self._store)
        key = epoch_key(self.epoch)
        is_created = _create(self._store, key, msgspec.json.encode(self._own), cache_s)
        if not is_created and _read(self._store, self.epoch).id != self.id:
            raise Fenced(f"{self._store.uri} was taken over by another controller this very moment.")
        settled = read_floor(self._store, self.epoch)  # by this lease, if an answer was lost
        if settled is None or settled.floor is None:
            self.floor = _settle(self._store, self.epoch, cache_s, 0 if self._is_new else None)
        else:
            self.floor = settled.floor
        make_durable(self._store, [key, floor_key(self.epoch)], [])
        self.check()
        self._is_fence_made = True

    def check_commit(self) -> None:
        """After a commit: a new holder may have started the run anew without a fence of its own in the run's directory,
        for it knew of nothing there. Its floor will void the commit."""
        self.check()

    def check(self) -> None:
        """Raises `Fenced` if another controller has taken the lease over."""
        self._holder.check()

    def beat(self) -> None:
        """Raises `Fenced` if the holder has found out that it is fenced."""
        if self._holder.known_fenced:
            self.check()

    def is_fenced(self) -> bool:
        return self._holder.is_fenced()


def acquire(
    store: Store,
    *,
    takeover: bool = False,
    time_to_live_s: float = TIME_TO_LIVE_S,
    sleep: Callable[[float], None] | None = None,
    with_keys: Sequence[str] = (),
    address: str = "",
    has_checkpoints: bool = True,
) -> Lease:
    """Become the run's controller; `RunBusy` names who holds it otherwise. The lease is durable when this returns, and
    so are `with_keys`, which may have been written through a `volatile` view. `address` is of the control API. A
    directory without checkpoints of its own (an experiment's, which has thousands of others in it) is not searched for
    them."""
    sleep = sleep or current().sleep
    cache_s = _mount_cache_s(store)
    highest = max(list_epochs(store), default=0)
    if highest and not takeover:
        holder = _wait_until_whole(store, highest, sleep)
        if holder is not None and _is_alive(store, holder, sleep):
            raise RunBusy(
                f"{store.uri} is held by {_name(holder.holder)} since {holder.started_at}; wait for it, stop it, "
                "or pass RunConfig(takeover=True) to fence it off."
            )
    epoch = highest + 1
    own = EpochFile(
        epoch=epoch,
        id=current().token_hex(8),
        holder=this_process(),
        started_at=now_text(),
        time_to_live_s=time_to_live_s,
        address=address,
    )
    _held.add(own.id)  # before others can see the epoch file: they are to find its holder alive
    try:
        if not _create(store, epoch_key(epoch), msgspec.json.encode(own), cache_s):
            raise RunBusy(f"{store.uri} was taken by another controller this very moment; try again.")
        lease = Lease(store, own, _settle(store, epoch, cache_s, None if has_checkpoints else 0))
        # The fence works from the moment that others see it. It must survive a power cut as soon as anything is done in
        # its name, which begins now. Where nothing was before, the floor voids nothing, and a lost one is as good.
        made = [epoch_key(epoch), *([floor_key(epoch)] if epoch > 1 or lease.floor > 0 else [])]
        make_durable(store, [*made, *with_keys], [JOURNAL])
        lease.beat()
    except BaseException:
        _held.discard(own.id)
        raise
    return lease


def find_holder(store: Store) -> Holder | None:
    """Who took the run on last, unless it has let go of it; None if nobody holds it. One look, without waiting."""
    highest = max(list_epochs(store), default=0)
    if not highest:
        return None
    beat = _read_beat(store, highest)
    if beat is not None and beat.released:
        return None
    found = _read(store, highest)
    dead = is_dead(found.holder)
    if dead is False and found.holder == this_process() and found.id not in _held:
        dead = True
    return Holder(found, None if dead is None else not dead)


def read_cuts(store: Store) -> list[tuple[int, Position]]:
    """For each controller, where the journal of those before it ends (see `history.read_records`)."""
    settled = [read_floor(store, number) for number, has_floor in list_epochs(store).items() if has_floor]
    return [
        (one.epoch, Position(one.journal_key, one.journal_bytes, one.journal_record))
        for one in settled
        if one is not None and one.floor is not None
    ]


def _mount_cache_s(store: Store) -> float | None:
    """How long a FUSE mount may show names too late, as far as it is waited for; None where the store is no such mount.
    Creation is exclusive among the processes of one mount only."""
    cache = find_mount_cache(store.local_root) if store.local_root is not None else None
    if cache is None:
        return None
    if cache.time_s is None or cache.time_s > _MAX_CACHE_WAIT_S:
        _warn_of_cache(cache.kind, cache.time_s)
    return min(cache.time_s or 0.0, _MAX_CACHE_WAIT_S)


@functools.cache
def _warn_of_cache(kind: str, time_s: float | None) -> None:
    """Once a process."""
    told = "does not say for how long it does so" if time_s is None else f"says it does so for {time_s:g} s"
    _log.warning(
        "The storage is a %s mount, which may show what other machines wrote too late, and %s: start one driver at a "
        "time for each run, mount it with short caches, or set HOLDFAST_MOUNT_CACHE_S (docs/storage.md).",
        kind,
        told,
    )


def _create(store: Store, key: str, data: bytes, cache_s: float | None) -> bool:
    """Create a file that only one controller may create, on whatever machine; False if it is there."""
    if cache_s is None:
        return create_once(volatile(store), key, data)
    return create_by_claim(store, key, data, cache_s=cache_s)


def _settle(store: Store, epoch: int, cache_s: float | None = None, floor: int | None = None) -> int:
    """The fence is up: nobody below may commit any more. Only now is it settled how far they had come, unless `floor`
    says.

    Whoever stands below and has not settled its own floor never will: it could only void what counts by then. Indices
    are looked at before the journal: what is reserved below the floor has its reports there already, and they count.
    """
    for number in (number for number, has_floor in list_epochs(store).items() if number < epoch and not has_floor):
        overtaken = EpochFloor(epoch=number, floor=None)
        _create(store, floor_key(number), msgspec.json.encode(overtaken), cache_s)
    if cache_s and epoch > 1:
        # Once until the one before sees the fence, once until this controller sees what that had committed by then.
        current().sleep(2 * cache_s)
    if floor is None:
        floor = Catalog(store).survey().next_index()
    end = position(store)
    settled = EpochFloor(
        epoch=epoch,
        floor=floor,
        journal_key=end.key,
        journal_bytes=end.size_bytes,
        journal_record=end.number,
    )
    if not _create(store, floor_key(epoch), msgspec.json.encode(settled), cache_s):
        raise Fenced(f"{store.uri} was taken over by another controller this very moment.")
    return floor


def _name(holder: ProcessIdentity) -> str:
    return f"process {holder.pid} on {holder.host}"


def _wait_until_whole(store: Store, epoch: int, sleep: Callable[[float], None]) -> EpochFile | None:
    """The epoch file; None if its controller died while it wrote it."""
    waited_s, pause_s = 0.0, TIME_TO_LIVE_S / 100
    while (found := _decode(store.get(epoch_key(epoch)))) is None and waited_s < TIME_TO_LIVE_S:
        sleep(pause_s)
        waited_s += pause_s
    return found


def _is_alive(store: Store, holder: EpochFile, sleep: Callable[[float], None]) -> bool:
    first = _read_beat(store, holder.epoch)
    if first is not None and first.released:
        return False
    dead = is_dead(holder.holder)
    if dead is False and holder.holder == this_process():
        return holder.id in _held
    if dead is not None:
        return not dead
    waited_s, pause_s = 0.0, holder.time_to_live_s / 10
    while waited_s < holder.time_to_live_s:
        sleep(pause_s)
        waited_s += pause_s
        if _read_beat(store, holder.epoch) != first:
            return True
    return False


def _read(store: Store, epoch: int) -> EpochFile:
    found = _decode(store.get(epoch_key(epoch)))
    if found is not None:
        return found
    return EpochFile(epoch=epoch, holder=ProcessIdentity(host="unknown", pid=0), started_at="", time_to_live_s=0.0)


def _decode(data: bytes) -> EpochFile | None:
    """None: torn, since its controller is just creating it, or died while it did, where that is not atomic."""
    try:
        return msgspec.json.decode(data, type=EpochFile)
    except DECODE_ERRORS:
        return None


def _read_beat(store: Store, epoch: int) -> _Beat | None:
    try:
        return msgspec.json.decode(store.get(_beat_key(epoch)), type=_Beat)
    except (NotFound, *DECODE_ERRORS):
        return None


def _beat_key(epoch: int) -> str:
    return f"{EPOCHS}/{epoch:06d}.beat"
