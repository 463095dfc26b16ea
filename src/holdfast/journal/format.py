"""How records lie in a journal's segments: line by line, each with its number, its run and a checksum.

A line is one JSON object: `{"n":17,"run":"1a2b3c4d","kind":...,"crc":"89abcdef"}`. `n` counts the records of one lease
from 1; `crc` is the CRC-32 of the bytes before it, so a flipped bit is found instead of read. The first line of a
segment says whose it is, so that a file whose name was damaged still finds its place. `writer` writes segments,
`reader` reads them.
"""

from __future__ import annotations

import re
import sys
from typing import NamedTuple
from zlib import crc32

import msgspec

from holdfast.core.decode_errors import DECODE_ERRORS
from holdfast.core.json_floats import tag_floats, untag_floats
from holdfast.core.records import CheckpointCommitted, CheckpointValidated, RanksReported, Record, Reported, RunFinished

__all__ = [
    "DIRECTORY",
    "Header",
    "Line",
    "Segment",
    "claimed_number",
    "encode_header",
    "encode_line",
    "encode_record",
    "fold_key",
    "is_fold",
    "parse_header",
    "parse_line",
    "parse_name",
    "segment_key",
    "split_joined",
]

DIRECTORY = "journal"
_FORMAT = "holdfast.journal/1.0"
_SEAL = re.compile(rb',"crc":"([0-9a-f]{8})"\}')
_SEAL_BYTES = 18
_NAME = re.compile(rf"{DIRECTORY}/([0-9]{{6,18}})-([0-9a-f]{{8,64}})-([0-9]{{9,18}})(?:-([0-9]{{9,18}}))?\.jsonl\Z")
_OLD_NAME = re.compile(rf"{DIRECTORY}/([0-9]{{6,18}})-([0-9]{{6,18}})\.jsonl\Z")
_FOLD_NAME = re.compile(rf"{DIRECTORY}/([0-9]{{6,18}})-([0-9a-f]{{8,64}})\.[a-z]+\.json\Z")
_NUMBER = re.compile(rb'\{"n":([0-9]{1,18}),')
_encoder = msgspec.json.Encoder()


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a segment: whose records follow."""

    segment: str = _FORMAT
    epoch: int
    lease: str


class Line(NamedTuple):
    """One record as it was read: its number within its lease, its run, its checksum."""

    n: int
    run: str
    crc: int
    record: Record


class Segment(NamedTuple):
    """What a segment's name says. `last` is None where lines may still be appended; `lease` is "" for segments of
    the format before leases had names, in which lines have no numbers and `first` counts files."""

    key: str
    size_bytes: int
    epoch: int
    lease: str
    first: int
    last: int | None


class _Envelope(msgspec.Struct, frozen=True):
    n: int = 0
    run: str = ""


_records: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)
_envelopes: msgspec.json.Decoder[_Envelope] = msgspec.json.Decoder(_Envelope)
_headers: msgspec.json.Decoder[Header] = msgspec.json.Decoder(Header)


def encode_record(record: Record) -> bytes:
    """The record alone as JSON, without a newline."""
    if isinstance(record, Reported | CheckpointCommitted | CheckpointValidated):
        record = msgspec.structs.replace(record, metrics=tag_floats(record.metrics))
    elif isinstance(record, RanksReported):
        record = msgspec.structs.replace(record, metrics=tuple(map(tag_floats, record.metrics)))
    elif isinstance(record, RunFinished):
        record = msgspec.structs.replace(record, return_value=tag_floats(record.return_value))
    return _encoder.encode(record)


def encode_line(record: Record, n: int, run: str) -> bytes:
    """The record as it stands in a segment, newline included."""
    return _seal(b'{"n":%d,"run":%b,%b' % (n, _encoder.encode(run), encode_record(record)[1:-1]))


def encode_header(epoch: int, lease: str) -> bytes:
    """The first line of a segment."""
    return _seal(_encoder.encode(Header(epoch=epoch, lease=lease))[:-1])


def _seal(body: bytes) -> bytes:
    return b'%b,"crc":"%08x"}\n' % (body, crc32(body))


def parse_line(line: bytes, *, old: bool = False) -> Line | None:
    """A line without its newline; None if it is damaged. In segments of the older format lines have no checksum, and
    no number: it is 0. Raises `msgspec.MsgspecError` if the line is whole, but no record that this version knows."""
    if (crc := _check(line)) is None:
        if not old or line.startswith(b'{"n":'):
            return None
        crc = crc32(line)
    envelope = _envelopes.decode(line)
    record = _records.decode(line)
    if isinstance(record, Reported | CheckpointCommitted | CheckpointValidated):
        record = msgspec.structs.replace(record, metrics=untag_floats(record.metrics))
    elif isinstance(record, RanksReported):
        record = msgspec.structs.replace(record, metrics=tuple(map(untag_floats, record.metrics)))
    elif isinstance(record, RunFinished):
        record = msgspec.structs.replace(record, return_value=untag_floats(record.return_value))
    return Line(envelope.n, envelope.run, crc, record)


def claimed_number(line: bytes) -> int:
    """The number that a line says it has, unchecked: cheap enough to skip most of a segment. Where it says none, one
    that is larger than any, so that nothing is skipped by mistake."""
    named = _NUMBER.match(line)
    return int(named[1]) if named is not None else sys.maxsize


def parse_header(line: bytes) -> Header | None:
    """None if this line is no header, or a damaged one."""
    if not line.startswith(b'{"segment":') or _check(line) is None:
        return None
    try:
        return _headers.decode(line)
    except DECODE_ERRORS:
        return None


def _check(line: bytes) -> int | None:
    """The checksum at the line's end if it is there and matches."""
    sealed = _SEAL.fullmatch(line, max(0, len(line) - _SEAL_BYTES))
    if sealed is None:
        return None
    crc = int(sealed[1], 16)
    return crc if crc32(line[:-_SEAL_BYTES]) == crc else None


def split_joined(line: bytes) -> list[bytes]:
    """The whole lines inside a damaged one: where a newline was damaged, checksums tell its neighbours apart."""
    found: list[bytes] = []
    start = 0
    for seal in _SEAL.finditer(line):
        begin = line.find(b"{", start, seal.end())  # the damaged newline itself starts no object
        if _check(line[begin : seal.end()]) is not None:
            found.append(line[begin : seal.end()])
            start = seal.end()
    return found


def segment_key(epoch: int, lease: str, first: int, last: int | None = None) -> str:
    end = "" if last is None else f"-{last:09d}"
    return f"{DIRECTORY}/{epoch:06d}-{lease}-{first:09d}{end}.jsonl"


def fold_key(epoch: int, lease: str, what: str = "fold") -> str:
    return f"{DIRECTORY}/{epoch:06d}-{lease}.{what}.json"


def is_fold(key: str) -> bool:
    """Whether this is one of the summaries that may lie beside the segments."""
    return _FOLD_NAME.match(key) is not None


def parse_name(key: str, size_bytes: int) -> Segment | None:
    """None if this is no segment's name."""
    if (named := _NAME.match(key)) is not None:
        first, last = int(named[3]), None if named[4] is None else int(named[4])
        return (
            None
            if last is not None and last < first
            else Segment(key, size_bytes, int(named[1]), named[2], first, last)
        )
    if (named := _OLD_NAME.match(key)) is not None:
        return Segment(key, size_bytes, int(named[1]), "", int(named[2]), None)
    return None
