"""Create a key once: of any number of concurrent writers exactly one succeeds, whatever the storage.

Where the storage refuses a second creation, that decides. But some S3 servers ignore put-if-absent, pyarrow's
filesystems have no such thing, and two FUSE mounts of one bucket do not see each other's exclusive creations. There
each writer announces itself by a claim, a small file of its own beside the key, and looks: whoever sees neither the
key nor another's claim creates the key. Of two writers at least one put its claim before the other looked, so at most
one of them finds itself alone. When several see each other, the one with the smallest token looks again until the
others have withdrawn; those wait for the key. Reservations, manifests, epochs, floors and `run.json` are created
here.
"""

from __future__ import annotations

from contextlib import suppress

import msgspec

from holdfast.checkpoint.layout import CLAIM_KEEP, CLAIM_PREFIX
from holdfast.checkpoint.process_identity import ProcessIdentity, is_dead, this_process
from holdfast.checkpoint.timestamps import now_text
from holdfast.core.backoff import backoff_s
from holdfast.core.decode_errors import DECODE_ERRORS
from holdfast.errors import AlreadyExists, NotFound, StorageError, Unavailable
from holdfast.runtime import Runtime, current
from holdfast.storage.store import Store

__all__ = ["CLAIM_TIME_TO_LIVE_S", "Claim", "create_by_claim", "create_once", "decode_claim"]

CLAIM_TIME_TO_LIVE_S = 30.0
"""A claim that others have seen for this long is one of a writer that crashed. A living writer gives up its own claim
in half that time."""

_ATTEMPTS = 200
_MIN_PAUSE_S = 0.01
_MAX_PAUSE_S = 2.0
_TRUSTED_S = 1.0
"""How long a claim counts without a check whether its writer lives: most claims are gone sooner."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Who is about to create a key."""

    format: str = "holdfast.claim/1.0"
    key: str
    token: str
    writer: ProcessIdentity
    created_at: str = ""


def decode_claim(data: bytes) -> Claim | None:
    """Read a claim; None if it is torn or somebody else's file."""
    try:
        return msgspec.json.decode(data, type=Claim)
    except DECODE_ERRORS:
        return None


def create_once(store: Store, key: str, data: bytes) -> bool:
    """Create a key that must not be there; False if it is."""
    if not store.exclusive:
        return create_by_claim(store, key, data)
    try:
        store.create(key, data)
    except AlreadyExists:
        return False
    return True


def create_by_claim(store: Store, key: str, data: bytes, *, cache_s: float = 0.0) -> bool:
    """Create `key`; False if it is there. `cache_s` is how long other writers' files may stay unseen."""
    runtime = current()
    contender = _Contender(store, key, data, cache_s, runtime)
    for failures in range(1, _ATTEMPTS + 1):
        outcome = contender.attempt()
        if outcome is not None:
            return outcome
        runtime.sleep(runtime.uniform(0, backoff_s(failures, _MIN_PAUSE_S, _MAX_PAUSE_S)))
    raise Unavailable(f"{store.uri}: {key} could not be created in {_ATTEMPTS} tries; let fewer writers start at once.")


class _Contender:
    """One writer's attempts at one key."""

    def __init__(self, store: Store, key: str, data: bytes, cache_s: float, runtime: Runtime) -> None:
        self._store = store
        self._key = key
        self._data = data
        self._cache_s = cache_s
        self._runtime = runtime
        self._directory, _, name = key.rpartition("/")
        self._below = f"{self._directory}/" if self._directory else ""
        self._prefix = f"{self._below}{CLAIM_PREFIX}{name}-"
        self._keep = f"{self._below}{CLAIM_KEEP}"
        self._has_made_keep = False
        self._stale: list[str] = []
        self._first_seen_s: dict[str, float] = {}

    def attempt(self) -> bool | None:
        """True: created. False: it was there. None: another writer is at it, so try again."""
        found = self._list()
        if self._key in found:
            self._clean_up([], settled=True)
            return False
        if not any(_is_lasting(one) for one in found):
            # Some servers forget a file that is made in a directory which they are just removing as empty. Several
            # writers may make this one at once; if it fails, the claim itself is looked for below.
            with suppress(StorageError):
                self._store.create(self._keep, b"")
                self._has_made_keep = True
        if self._live_claims(found):
            return None
        claim = Claim(key=self._key, token=self._runtime.token_hex(8), writer=this_process(), created_at=now_text())
        own = f"{self._prefix}{claim.token}.json"
        began_s = self._runtime.monotonic()
        outcome: bool | None = None
        try:
            # Not `put`: a mount may have to copy what is put in the place of something.
            self._store.create(own, msgspec.json.encode(claim))
            outcome = self._contend(own, began_s)
            return outcome
        finally:
            # After the key: whoever sees no claim any more must see the key. `create` looks at it last of all.
            self._clean_up([own, *self._stale], settled=outcome is not None)

    def _clean_up(self, claims: list[str], *, settled: bool) -> None:
        """Delete claims and, once the key is there (`settled`), the file that kept the directory from being empty."""
        doomed = [*claims, self._keep] if settled and self._has_made_keep else claims
        if doomed:
            with suppress(StorageError):
                self._store.delete(doomed)

    def _contend(self, own: str, began_s: float) -> bool | None:
        while True:
            if self._cache_s:
                self._runtime.sleep(self._cache_s)
            found = self._list()
            if self._key in found:
                return False
            claims = self._live_claims(found)
            # A claim that is not listed would not be seen by others either.
            if own not in claims or own != min(claims):
                return None
            if self._runtime.monotonic() - began_s > self._cache_s + CLAIM_TIME_TO_LIVE_S / 2:
                return None  # others may soon take this claim for a dead writer's
            if len(claims) == 1:
                created = self._create()
                self._stale = [one for one in found if one.startswith(self._prefix) and one != own]
                return created
            self._runtime.sleep(self._runtime.uniform(0, _MIN_PAUSE_S))

    def _create(self) -> bool:
        try:
            self._store.create(self._key, self._data)
        except AlreadyExists:
            return False
        return True

    def _list(self) -> set[str]:
        return {entry.key for entry in self._store.list(self._directory)}

    def _live_claims(self, found: set[str]) -> set[str]:
        return {one for one in found if one.startswith(self._prefix) and not self._is_stale(one)}

    def _is_stale(self, claim: str) -> bool:
        """Whether a claim's writer is gone: certainly dead, or its claim was seen for the whole time to live, by this
        process's own clock."""
        seen_s = self._runtime.monotonic() - self._first_seen_s.setdefault(claim, self._runtime.monotonic())
        if seen_s > self._cache_s + CLAIM_TIME_TO_LIVE_S:
            return True
        return seen_s > _TRUSTED_S and self._is_dead(claim)

    def _is_dead(self, claim: str) -> bool:
        try:
            found = decode_claim(self._store.get(claim))
        except NotFound:
            return False  # withdrawn meanwhile: it counts as seen
        return found is not None and is_dead(found.writer) is True


def _is_lasting(key: str) -> bool:
    """Whether this file keeps its directory from becoming empty when claims are withdrawn."""
    name = key.rpartition("/")[2]
    return name == CLAIM_KEEP or not name.startswith(CLAIM_PREFIX)
