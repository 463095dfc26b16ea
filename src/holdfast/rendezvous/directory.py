"""A rendezvous in a directory that all hosts see: on NFS, Lustre or any file system with exclusive creation.

    keys/<key>@<version>     one file per write, created by `link`, never changed: the highest version counts
    sessions/<id>            rewritten with a higher number by its owner, every third of its time-to-live
    sessions/<id>.over       created once by whoever finds that number unchanged for too long, or by the owner

Creating the next version is what only one host can do, so a key needs no lock. Whether an owner lives is judged by the
observer's own monotonic clock between its own looks, never by the times of files, which other machines' clocks set; as
soon as `.over` is there, the session's keys are gone for everybody. File times only say for whose next beat a host that
comes waits before it looks at keys: so a job whose hosts all died long ago does not seem to live. Only superseded
versions are removed: a version that was removed while it was the highest could be created a second time.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec

from holdfast.errors import Unreachable
from holdfast.rendezvous.rendezvous import SessionExpiredError
from holdfast.runtime import current
from holdfast.storage.private_directory import make_private_directory

__all__ = ["RENDEZVOUS_FILE", "DirectoryRendezvous"]

RENDEZVOUS_FILE = ".rendezvous"
"""Empty; says what the directory is to those who pack a script's directory."""
_POLL_S = 0.1
_LOOKS_PER_TTL = 4
"""A gap between two looks counts for at most this part of the time-to-live: an observer that stood still may look
before the owner, which stood still with it, could write."""


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    value: bytes | None
    """None: deleted."""
    session: str = ""


class _Beat(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    ttl_s: float


class _Observed:
    """What this process has seen of another's session."""

    def __init__(self, beat: _Beat, now: float) -> None:
        self.beat = beat
        self.looked_at = now
        self.silent_s = 0.0


class DirectoryRendezvous:
    """Keys in files below one directory."""

    def __init__(self, directory: Path) -> None:
        self._keys = directory / "keys"
        self._sessions = directory / "sessions"
        self._lock = threading.Lock()
        self._cache: dict[str, _Record] = {}
        """By file name: a version never changes."""
        self._observed: dict[str, _Observed] = {}
        self._over: set[str] = set()
        self._marker = directory / RENDEZVOUS_FILE
        self._has_looked = False
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for one in (self._keys, self._sessions):
                make_private_directory(one)
            self._marker.touch(mode=0o600)
        except OSError as error:
            raise Unreachable(f"The rendezvous {directory} cannot be made: {error.strerror or error}.") from error

    # ------------------------------------------------------------------ keys

    def get(self, key: str) -> bytes | None:
        return self.list(key).get(key)

    def list(self, prefix: str = "") -> dict[str, bytes]:
        with self._lock, _reachable(self._keys):
            found = {key: record for key, (_, record) in self._read(prefix).items()}
            return {
                key: record.value
                for key, record in sorted(found.items())
                if record.value is not None and not self._is_over(record.session)
            }

    def create(self, key: str, value: bytes, session: str = "") -> bool:
        with self._lock, _reachable(self._keys):
            while True:
                self._check_session(session)
                version, record = self._read(key).get(key, (0, None))
                if record is not None and record.value is not None and not self._is_over(record.session):
                    return record.value == value and record.session == session
                if self._write(key, version + 1, _Record(value=value, session=session)):
                    return True

    def put(self, key: str, value: bytes, session: str = "") -> None:
        self._overwrite(key, _Record(value=value, session=session))

    def delete(self, key: str) -> None:
        self._overwrite(key, _Record(value=None))

    def watch(self, prefix: str = "") -> _DirectoryWatch:
        return _DirectoryWatch(self, prefix)

    def _overwrite(self, key: str, record: _Record) -> None:
        with self._lock, _reachable(self._keys):
            while True:
                self._check_session(record.session)
                version, _ = self._read(key).get(key, (0, None))
                if self._write(key, version + 1, record):
                    return

    def _read(self, prefix: str) -> dict[str, tuple[int, _Record]]:
        """The highest version of each key that begins with the prefix."""
        while True:
            highest: dict[str, int] = {}
            start = quote(prefix, safe="")
            for name in os.listdir(self._keys):  # noqa: PTH208
                quoted, mark, version = name.rpartition("@")
                if mark and quoted.startswith(start):
                    highest[quoted] = max(highest.get(quoted, 0), int(version))
            try:
                return {
                    unquote(quoted): (version, self._read_version(f"{quoted}@{version:08d}"))
                    for quoted, version in highest.items()
                }
            except OSError as error:
                if not _was_removed(error):
                    raise
                continue  # it was superseded meanwhile

    def _read_version(self, name: str) -> _Record:
        found = self._cache.get(name)
        if found is None:
            found = msgspec.json.decode((self._keys / name).read_bytes(), type=_Record)
            self._cache[name] = found
        return found

    def _write(self, key: str, version: int, record: _Record) -> bool:
        """Create a version; False if somebody else was faster."""
        quoted = quote(key, safe="")
        target = self._keys / f"{quoted}@{version:08d}"
        if not _link(target, msgspec.json.encode(record)):
            return False
        others = [int(name.rpartition("@")[2]) for name in os.listdir(self._keys) if name.startswith(f"{quoted}@")]  # noqa: PTH208
        if max(others) > version:
            # What this was to follow had been superseded and removed before it was read here.
            target.unlink(missing_ok=True)
            return False
        for older in others:
            if older < version:
                (self._keys / f"{quoted}@{older:08d}").unlink(missing_ok=True)
                self._cache.pop(f"{quoted}@{older:08d}", None)
        return True

    # ------------------------------------------------------------------ sessions

    def open_session(self, ttl_s: float) -> str:
        session = current().token_hex(8)
        self._end_dead_sessions()
        with _reachable(self._sessions):
            self._write_beat(session, _Beat(number=1, ttl_s=ttl_s))
        return session

    def _end_dead_sessions(self) -> None:
        """Before this host looks for who is there: of a session that it never saw it could not tell whether its owner
        lives or died long ago. Only those are waited for whose last beat is old by the file system's own clock."""
        if self._has_looked:
            return
        self._has_looked = True
        while True:
            with self._lock, _reachable(self._sessions):
                self._marker.touch()
                now = self._marker.stat().st_mtime
                names = {one for one in os.listdir(self._sessions) if not one.startswith(".")}  # noqa: PTH208
                if not [one for one in self._silent_since(now, names) if not self._is_over(one)]:
                    return
            current().sleep(_POLL_S)

    def _silent_since(self, now: float, names: Set[str]) -> Iterator[str]:
        """The sessions whose files are older than their time-to-live."""
        for name in names:
            if name.endswith(".over") or f"{name}.over" in names or (beat := self._read_beat(name)) is None:
                continue
            with suppress(FileNotFoundError):
                if now - (self._sessions / name).stat().st_mtime > beat.ttl_s:
                    yield name

    def renew(self, session: str) -> bool:
        with self._lock, _reachable(self._sessions):
            if self._has_mark(session):
                return False
            beat = self._read_beat(session)
            if beat is None:
                return False
            self._write_beat(session, _Beat(number=beat.number + 1, ttl_s=beat.ttl_s))
            return True

    def end_session(self, session: str) -> None:
        with self._lock, _reachable(self._sessions):
            self._mark_over(session)
            (self._sessions / session).unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing is open."""

    def _check_session(self, session: str) -> None:
        if session and self._has_mark(session):
            raise SessionExpiredError("This host's session in the rendezvous is over: it was silent for too long.")

    def _is_over(self, session: str) -> bool:
        """Whether a session has ended; one that has been silent for its time-to-live is ended."""
        if not session:
            return False
        if session in self._over or self._has_mark(session):
            return True
        now = current().monotonic()
        beat = self._read_beat(session)
        seen = self._observed.get(session)
        if seen is None:
            self._observed[session] = _Observed(beat or _Beat(number=0, ttl_s=_POLL_S), now)
            return False
        if beat is not None and beat != seen.beat:
            seen.beat, seen.silent_s = beat, 0.0
        else:
            seen.silent_s += min(now - seen.looked_at, seen.beat.ttl_s / _LOOKS_PER_TTL)
        seen.looked_at = now
        if seen.silent_s < seen.beat.ttl_s:
            return False
        self._mark_over(session)
        return True

    def _has_mark(self, session: str) -> bool:
        if session not in self._over and (self._sessions / f"{session}.over").exists():
            self._over.add(session)
            self._observed.pop(session, None)
        return session in self._over

    def _mark_over(self, session: str) -> None:
        _link(self._sessions / f"{session}.over", b"")
        self._has_mark(session)

    def _read_beat(self, session: str) -> _Beat | None:
        try:
            return msgspec.json.decode((self._sessions / session).read_bytes(), type=_Beat)
        except msgspec.DecodeError:
            return None
        except OSError as error:
            if not _was_removed(error):
                raise
            return None

    def _write_beat(self, session: str, beat: _Beat) -> None:
        draft = _draft(self._sessions / session, msgspec.json.encode(beat))
        draft.rename(self._sessions / session)


class _DirectoryWatch:
    """Looks again and again: no file system tells one host what another one wrote."""

    def __init__(self, rendezvous: DirectoryRendezvous, prefix: str) -> None:
        self._rendezvous = rendezvous
        self._prefix = prefix
        self._closed = threading.Event()
        self._last: dict[str, bytes] = {}

    def wait(self, known: Mapping[str, bytes] | None, timeout_s: float) -> dict[str, bytes]:
        give_up_at = current().monotonic() + timeout_s
        while True:
            with suppress(Unreachable):
                self._last = self._rendezvous.list(self._prefix)
            left_s = give_up_at - current().monotonic()
            if self._last != known or left_s <= 0 or self._closed.wait(min(_POLL_S, left_s)):
                return dict(self._last)

    def close(self) -> None:
        self._closed.set()


class _reachable:
    """Turns errors of the file system into `Unreachable`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OSError):
            raise Unreachable(f"The rendezvous {self._path} does not work: {error.strerror or error}.") from error


def _was_removed(error: OSError) -> bool:
    """NFS says of a file that another host has removed or replaced since it was opened that its handle is stale."""
    return error.errno in (errno.ENOENT, errno.ESTALE)


def _draft(target: Path, data: bytes) -> Path:
    """A file beside the target, whose name no key has."""
    draft = target.with_name(f".{current().token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    return draft


def _link(target: Path, data: bytes) -> bool:
    """Create a file with all that is in it at once; False if it is there."""
    draft = _draft(target, data)
    try:
        os.link(draft, target)
    except FileExistsError:
        # NFS repeats a request whose answer was lost, and then finds its own link.
        return draft.stat().st_nlink == 2
    else:
        return True
    finally:
        draft.unlink()
