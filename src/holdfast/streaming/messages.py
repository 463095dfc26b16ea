"""What a client of the storage server sends, and what it is answered.

A connection begins with the handshake of agents (`wire.auth`), in which the key of the served directory takes the place
of the run secret. Then comes one request after the other, each a frame (`wire.frames`) with one `Reply`. The bytes of
files are no messages, and are copied into none: those of a `Receive` follow the request as chunks (four bytes of length
and so many bytes; a length of 0 is the end), those that `Read` asks for follow its reply. Keys are bytes, as the file
system has them: not every file name is text.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from holdfast.core.failure_kind import FailureKind

__all__ = [
    "CHUNK_HEADER",
    "CHUNK_MAX_BYTES",
    "Children",
    "Copy",
    "Create",
    "Delete",
    "IsExclusive",
    "List",
    "Put",
    "Read",
    "Receive",
    "Reply",
    "Request",
    "ServedStorage",
    "Stat",
]

CHUNK_HEADER = struct.Struct(">I")
CHUNK_MAX_BYTES = 4 * 1024 * 1024


class ServedStorage(msgspec.Struct, frozen=True, kw_only=True):
    """Where a directory of the driver's machine is served."""

    root: str
    """The directory, as a path on the driver's machine."""
    host: str
    port: int
    key: str
    """Opens this directory, and nothing else."""


class _Request(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Tagged by class name."""


class IsExclusive(_Request, frozen=True, kw_only=True):
    """Answered with whether creation is exclusive."""


class Put(_Request, frozen=True, kw_only=True):
    key: bytes
    data: bytes
    durable: bool = True


class Create(_Request, frozen=True, kw_only=True):
    key: bytes
    data: bytes
    durable: bool = True


class Read(_Request, frozen=True, kw_only=True):
    """Answered with the number of bytes, which follow."""

    key: bytes
    start: int = 0
    length: int | None = None
    """None: to the end."""


class Stat(_Request, frozen=True, kw_only=True):
    """Answered with size and version."""

    key: bytes


class Children(_Request, frozen=True, kw_only=True):
    """Answered with names."""

    prefix: bytes


class List(_Request, frozen=True, kw_only=True):
    """Answered with pairs of key and size."""

    prefix: bytes


class Delete(_Request, frozen=True, kw_only=True):
    keys: list[bytes]


class Copy(_Request, frozen=True, kw_only=True):
    source: bytes
    target: bytes


class Receive(_Request, frozen=True, kw_only=True):
    """Store the chunks that follow; answered with size and hash. A failure may be answered before all have come; the
    connection ends then."""

    key: bytes
    size_bytes: int
    """As far as is known."""
    mode: int | None = None
    """The permissions that the file is to have; None: the usual ones."""
    durable: bool = True


Request = IsExclusive | Put | Create | Read | Stat | Children | List | Delete | Copy | Receive


class Reply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    value: Any = None
    failure: FailureKind | None = None
    error: str = ""
    """What failed, as a sentence for a person."""
