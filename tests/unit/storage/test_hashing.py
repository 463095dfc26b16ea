"""Digests are of the bytes that were transferred."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.storage.hashing import blocks, digest_file, new_hasher
from holdfast.storage.store import Digest, InMemory


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.binary(max_size=200), block_bytes=st.integers(min_value=1, max_value=64), own=st.booleans())
@pytest.mark.parametrize("in_memory", [False, True])
def test_blocks_are_full_and_hashed(tmp_path: Path, in_memory: bool, data: bytes, block_bytes: int, own: bool) -> None:
    path, hasher, told = tmp_path / "source", new_hasher(), list[int]()
    path.write_bytes(data)
    source = InMemory(memoryview(data)) if in_memory else path
    buffer = memoryview(bytearray(block_bytes))
    found = blocks(source, hasher, told.append, 1 if own else block_bytes, (lambda: buffer) if own else None)
    got = [bytes(block) for block in found]
    assert b"".join(got) == data
    assert [len(block) for block in got[:-1]] == [block_bytes] * (len(got) - 1)
    assert told == [len(block) for block in got]
    assert hasher.hexdigest() == blake3(data).hexdigest()


def test_blocks_may_be_kept(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"aabb")
    assert list(blocks(tmp_path / "x", new_hasher(), block_bytes=2)) == [b"aa", b"bb"]


def test_a_pipe_with_short_reads_still_gives_full_blocks(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def trickle() -> None:
        with pipe.open("wb", buffering=0) as writer:
            for letter in b"abcdefghi":
                writer.write(bytes([letter]))

    writing = threading.Thread(target=trickle)
    writing.start()
    assert list(blocks(pipe, new_hasher(), block_bytes=4)) == [b"abcd", b"efgh", b"i"]
    writing.join()


@pytest.mark.parametrize("size_bytes", [0, 1, 256 * 1024, 256 * 1024 + 1, 3_000_000])
def test_digest_of_a_file(tmp_path: Path, size_bytes: int) -> None:
    data = os.urandom(size_bytes)
    (tmp_path / "x").write_bytes(data)
    assert digest_file(tmp_path / "x") == Digest(size_bytes, blake3(data).hexdigest())


def test_on_bytes_may_cancel(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"aabb")

    def refuse(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(blocks(tmp_path / "x", new_hasher(), refuse))
