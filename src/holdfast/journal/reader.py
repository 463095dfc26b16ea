"""Reading a journal: every record that counts, in order, whatever became of the files.

Segments are ordered by epoch and by the number of their first record. A record that stands in several segments (small
ones and the one that they were merged into) is read once. What a fenced controller wrote after its successor had looked
is cut off by number. Damage is skipped and told: a line whose checksum is wrong, a file that is no segment, a gap.
Where a gap shows, every other file is searched for the missing numbers before they are given up.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from holdfast.checkpoint.epochs import epoch_key
from holdfast.checkpoint.layout import EPOCHS
from holdfast.core.decode_errors import DECODE_ERRORS
from holdfast.errors import NotFound
from holdfast.journal.format import (
    DIRECTORY,
    Line,
    Segment,
    claimed_number,
    is_fold,
    parse_header,
    parse_line,
    parse_name,
    split_joined,
)
from holdfast.printable import printable
from holdfast.runtime import current
from holdfast.storage.store import Store

__all__ = ["START", "JournalReader", "Mark", "OnDamage", "Position", "position"]

_HEADER_BYTES = 1024
_FETCHES = 16
_BLOCK_BYTES = 256 * 1024
_PROBE_BYTES = 4096
_RELISTS = 5
_log = logging.getLogger(__name__)

OnDamage = Callable[[str], None]
"""Told one sentence for each thing that was skipped."""


class Position(msgspec.Struct, frozen=True):
    """How far a journal was read: up to the record `number` of the lease that wrote the segment `key`."""

    key: str = ""
    size_bytes: int = 0
    number: int = 0


class Mark(msgspec.Struct, frozen=True):
    """A place in the journal: after the record `n` of this lease, which has this checksum."""

    epoch: int = 0
    lease: str = ""
    n: int = 0
    crc: int = 0


START = Mark()


def position(store: Store) -> Position:
    """The journal's present end."""
    return JournalReader(store).end()


class JournalReader:
    """Reads the journal in the store's directory. `cuts` are (epoch, position) pairs: what earlier epochs wrote beyond
    the position came after that epoch's controller had taken over. `run` is the run that is wanted; "" is any. With
    `shared`, the lease's other runs have their records there as well."""

    def __init__(
        self,
        store: Store,
        cuts: Sequence[tuple[int, Position]] = (),
        run: str = "",
        on_damage: OnDamage | None = None,
        *,
        shared: bool = False,
    ) -> None:
        self._store = store
        self._run = run
        self._shared = shared
        self._told: set[str] = set()
        self._on_damage = on_damage
        self._cuts = list(self._parse_cuts(cuts))

    def read(self, after: Mark = START) -> Iterator[tuple[Mark, Line]]:
        """The records after a mark, each with the mark that it makes. Segments may be merged meanwhile: a reader that
        finds one gone looks again."""
        for attempt in range(_RELISTS):
            try:
                for mark, line in self._read(after):
                    after = mark
                    yield mark, line
            except NotFound:
                if attempt == _RELISTS - 1:
                    raise
                continue
            return

    def end(self) -> Position:
        """Where the newest lease's records end at present."""
        for attempt in range(_RELISTS):
            try:
                return self._end()
            except NotFound:
                if attempt == _RELISTS - 1:
                    raise
        raise AssertionError

    def find(self, mark: Mark) -> int | None:
        """The checksum of the record that a mark names; None if it is not there, or is cut off."""
        earlier = Mark(mark.epoch, mark.lease, mark.n - 1)
        for found, line in self.read(earlier):
            same = (found.epoch, found.lease, found.n) == (mark.epoch, mark.lease, mark.n)
            return line.crc if same else None
        return None

    def is_cut(self, mark: Mark) -> bool:
        """Whether the record that a mark names came too late to count."""
        return mark.n > self._limit(mark.epoch)

    # ------------------------------------------------------------ lease by lease

    def _read(self, after: Mark) -> Iterator[tuple[Mark, Line]]:
        leases = self._leases()
        for epoch, lease in sorted(leases):
            if epoch < after.epoch:
                continue
            first = after.n + 1 if (epoch, lease) == (after.epoch, after.lease) else 1
            segments = leases[epoch, lease]
            lines = self._read_lease(segments, first, self._limit(epoch)) if lease else self._read_old(segments, first)
            for line in lines:
                mark = Mark(epoch, lease, line.n, line.crc)
                if self._is_wanted(line, segments[0].key):
                    yield mark, line

    def _is_wanted(self, line: Line, key: str) -> bool:
        """Whether the record is of the wanted run. Older journals, of one run each, do not name it."""
        if not self._run or line.run == self._run:
            return True
        if self._shared or not line.run:
            return not self._shared
        self._tell(f"{key} holds records of another run ({line.run}), which are left out.")
        return False

    def _read_lease(self, segments: list[Segment], first: int, limit: float) -> Iterator[Line]:
        wanted = self._needed(segments, first)
        next_n = first
        for segment, blocks in self._fetch(wanted, first):
            for line in self._parse(segment, blocks, first):
                if line.n < next_n or line.n > limit:
                    continue
                if line.n > next_n:
                    yield from self._rescue(segments, segment, next_n, line.n)
                yield line
                next_n = line.n + 1
            if segment.last is not None and next_n <= min(segment.last, limit):
                end = int(min(segment.last, limit)) + 1
                yield from self._rescue(segments, segment, next_n, end)
                next_n = end

    def _needed(self, segments: list[Segment], first: int) -> list[Segment]:
        """In order, without those whose records stand in another one, or before `first`."""
        ordered = sorted(segments, key=lambda one: (one.first, -(one.last or one.first)))
        found: list[Segment] = []
        covered = first - 1
        for n, segment in enumerate(ordered):
            if segment.last is not None and segment.last <= covered:
                continue
            following = ordered[n + 1].first if n + 1 < len(ordered) else None
            if segment.last is None and following is not None and following <= first:
                continue  # appended to until the next one began
            found.append(segment)
            covered = max(covered, segment.last or 0)
        return found

    def _fetch(self, segments: list[Segment], first: int = 1) -> Iterator[tuple[Segment, Iterable[bytes]]]:
        """Each segment with its bytes: files block by block from near the record `first` on, objects whole and ahead
        of the reader, since each costs a round trip."""
        if self._store.local_root is not None:
            yield from ((segment, self._blocks(segment, first)) for segment in segments)
            return
        for start in range(0, len(segments), _FETCHES):
            some = segments[start : start + _FETCHES]
            found = current().map_in_threads(self._store.get, [one.key for one in some], _FETCHES)
            yield from ((segment, [data]) for segment, data in zip(some, found, strict=True))

    def _blocks(self, segment: Segment, first: int) -> Iterator[bytes]:
        """Several views may read at the same time, each in its own thread: whole segments would take megabytes each."""
        start = self._offset_before(segment, first) if segment.lease and first > segment.first else 0
        while block := self._store.get_range(segment.key, start, _BLOCK_BYTES):
            yield block
            start += len(block)
            if len(block) < _BLOCK_BYTES:  # the segment's end: no need to ask again
                return

    def _offset_before(self, segment: Segment, first: int) -> int:
        """Where a line begins that is not behind the record `first`, less than a block before it if lines are whole.

        A view that lags reads the newest records again and again: a search by halves spares it the lines before them.
        Only lines whose checksum matches are believed."""
        low, high = 0, segment.size_bytes
        while high - low > _BLOCK_BYTES:
            middle = (low + high) // 2
            cut, _, rest = self._store.get_range(segment.key, middle, _PROBE_BYTES).partition(b"\n")
            try:
                line = parse_line(rest.partition(b"\n")[0])
            except DECODE_ERRORS:
                line = None
            if line is not None and line.n <= first:
                low = middle + len(cut) + 1
            else:
                high = middle
        return low

    def _rescue(self, segments: list[Segment], around: Segment, first: int, end: int) -> Iterator[Line]:
        """The records from `first` up to `end`, without it, wherever else they stand; what is found nowhere is told."""
        found: dict[int, Line] = {}
        for segment in segments:
            if segment.key != around.key and len(found) < end - first:
                found.update((line.n, line) for line in self._lines(segment) if first <= line.n < end)
        for n in sorted(found):
            yield found[n]
        if missing := end - first - len(found):
            these = f"record {first}" if end - first == 1 else f"{missing} of the records {first} to {end - 1}"
            self._tell(
                f"{around.key}: {these} of controller {around.epoch} cannot be read, and the rest goes on without."
            )

    def _read_old(self, segments: list[Segment], first: int) -> Iterator[Line]:
        """Segments of the older format, whose lines have no numbers."""
        n = 0
        for segment in sorted(segments, key=lambda one: one.first):
            size_bytes = self._old_size(segment)
            if size_bytes is None:
                continue
            for line in self._parse(segment, [self._store.get(segment.key)[:size_bytes]]):
                n += 1
                if n >= first:
                    yield line._replace(n=n)

    # ------------------------------------------------------------ lines

    def _lines(self, segment: Segment) -> Iterator[Line]:
        ((_, blocks),) = self._fetch([segment])
        return self._parse(segment, blocks)

    def _parse(self, segment: Segment, blocks: Iterable[bytes], first: int = 1) -> Iterator[Line]:
        """The segment's lines from the record `first` on, which are all that is checked. One by one: a segment's
        records take several times the memory of its bytes."""
        old = not segment.lease
        bad = 0
        begins, rest = True, b""
        for block in blocks:
            *texts, rest = (rest + block).split(b"\n")
            for text in texts:
                is_header = begins and parse_header(text) is not None
                begins = False
                if is_header or (first > 1 and claimed_number(text) < first):
                    continue
                try:
                    line = parse_line(text, old=old)
                except DECODE_ERRORS:
                    line = None
                if line is not None:
                    yield line
                elif joined := self._joined(text):
                    yield from joined
                else:
                    bad += 1
        yield from self._joined(rest)  # whole but for its newline, or never acted upon
        if bad:
            lines = "1 line is" if bad == 1 else f"{bad} lines are"
            self._tell(f"{segment.key}: {lines} damaged and left out.")

    def _joined(self, text: bytes) -> list[Line]:
        """The records inside one line that a damaged newline made of several."""
        found: list[Line] = []
        for part in split_joined(text):
            try:
                line = parse_line(part)
            except DECODE_ERRORS:  # the header, joined to the first record
                continue
            if line is not None:
                found.append(line)
        return found

    # ------------------------------------------------------------ which files there are

    def _leases(self) -> dict[tuple[int, str], list[Segment]]:
        """The segments of each lease, by epoch and id. Names that cannot be right are settled by the file's header."""
        named: list[Segment] = []
        odd: list[Segment] = []
        for entry in self._store.list(DIRECTORY):
            if is_fold(entry.key):
                continue
            segment = parse_name(entry.key, entry.size_bytes)
            (odd if segment is None else named).append(segment or Segment(*entry, 0, "", 0, None))
        known = self._epochs() if len({one.epoch for one in named}) > 1 or odd else set()
        ids: defaultdict[int, set[str]] = defaultdict(set)
        for segment in named:
            ids[segment.epoch].add(segment.lease)
        disputed = [epoch for epoch, found in ids.items() if len(found) > 1]
        owners = {epoch: owner for epoch in disputed if (owner := self._owner(epoch))}
        leases: defaultdict[tuple[int, str], list[Segment]] = defaultdict(list)
        for segment in named:
            unknown = bool(known) and segment.epoch not in known
            if unknown or owners.get(segment.epoch, segment.lease) != segment.lease:
                odd.append(segment)
            else:
                leases[segment.epoch, segment.lease].append(segment)
        for segment in odd:
            self._place_odd(segment, leases, owners)
        return leases

    def _place_odd(
        self, segment: Segment, leases: dict[tuple[int, str], list[Segment]], owners: dict[int, str]
    ) -> None:
        """Whose a file with a name that cannot be right is, by its first line; if nobody's, it is left out."""
        head = self._store.get_range(segment.key, 0, _HEADER_BYTES).partition(b"\n")[0]
        header = parse_header(head)
        if header is None:
            self._tell(f"{segment.key} is no segment of this journal, and is left out.")
        elif owners.get(header.epoch, header.lease) != header.lease:
            self._tell(
                f"{segment.key} is of a controller that lost the race to be number {header.epoch}, and is left out."
            )
        else:
            if (header.epoch, header.lease) != (segment.epoch, segment.lease):
                self._tell(
                    f"{segment.key} is misnamed: it holds records of controller {header.epoch}, and is read as such."
                )
            mended = segment._replace(epoch=header.epoch, lease=header.lease, last=None)
            lines = list(self._lines(mended))
            if lines:
                mended = mended._replace(first=lines[0].n, last=lines[-1].n)
                leases[header.epoch, header.lease].append(mended)

    def _epochs(self) -> set[int]:
        names = (entry.key.removeprefix(EPOCHS + "/").partition(".")[0] for entry in self._store.list(EPOCHS))
        return {int(name) for name in names if name.isdecimal()}

    def _owner(self, epoch: int) -> str:
        """The id of the lease that won the epoch; "" if its file cannot be read."""
        try:
            return msgspec.json.decode(self._store.get(epoch_key(epoch)), type=_Id).id
        except (NotFound, *DECODE_ERRORS):
            return ""

    # ------------------------------------------------------------ where journals end

    def _parse_cuts(self, cuts: Iterable[tuple[int, Position]]) -> Iterator[tuple[int, Segment | None, Position]]:
        for epoch, end in cuts:
            segment = parse_name(end.key, end.size_bytes)
            if segment is None and end.key:
                self._tell(f"epochs/{epoch:06d}.floor.json names a segment {end.key!r} that none can be called.")
                continue
            yield epoch, segment, end

    def _limit(self, epoch: int) -> float:
        """The last record of this epoch that counts."""
        limit = float("inf")
        for later, segment, end in self._cuts:
            if epoch < later:
                last = segment.epoch if segment is not None else 0
                if epoch > last:
                    return 0
                if epoch == last and segment is not None and segment.lease:
                    limit = min(limit, end.number)
        return limit

    def _old_size(self, segment: Segment) -> int | None:
        """How many bytes of a segment of the older format count; None for nothing."""
        size_bytes = segment.size_bytes
        for later, _, end in self._cuts:
            if segment.epoch < later:
                if segment.key > end.key:
                    return None
                if segment.key == end.key:
                    size_bytes = min(size_bytes, end.size_bytes)
        return size_bytes

    def _end(self) -> Position:
        leases = self._leases()
        if not leases:
            return Position()
        newest = leases[max(leases)]
        last = max(newest, key=lambda one: (one.last or one.first, one.first))
        if not last.lease:
            return Position(last.key, last.size_bytes)
        data = self._store.get(last.key)
        number = max((line.n for line in self._parse(last, [data])), default=last.first - 1)
        return Position(last.key, len(data), number)

    def _tell(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            _log.warning("%s/%s", self._store.uri, printable(sentence))
            if self._on_damage is not None:
                self._on_damage(sentence)


class _Id(msgspec.Struct, frozen=True):
    id: str = ""
