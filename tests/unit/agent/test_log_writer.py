"""Stalled files and streams: writers do not block, and everything is written in order."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from pathlib import Path

import pytest

from holdfast.agent import log_writer
from holdfast.agent.log_writer import LogFile, LogWriter, ThreadedHandler


def _unexpected(error: OSError) -> None:
    raise AssertionError(error)


def test_a_stalled_log_file_is_written_in_order_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "_BACKLOG_MAX_BYTES", 100_000)
    os.mkfifo(tmp_path / "log")
    reader = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)

    async def test() -> bytes:
        writer, caught_up = LogWriter(), asyncio.Event()
        file = LogFile(writer, tmp_path / "log", _unexpected)
        for number in range(300):
            file.write(f"{number:09d}\n".encode() * 100)
        assert writer.is_behind
        writer.when_caught_up(caught_up.set)
        os.set_blocking(reader, True)
        received = b""
        while len(received) < 300_000:
            received += await asyncio.to_thread(os.read, reader, 1 << 16)
        await caught_up.wait()
        assert not writer.is_behind
        file.close()
        writer.close()
        return received

    try:
        received = asyncio.run(test())
    finally:
        os.close(reader)
    assert received == b"".join(f"{number:09d}\n".encode() * 100 for number in range(300))


def test_flush_returns_after_everything_was_written(tmp_path: Path) -> None:
    async def test() -> None:
        writer = LogWriter()
        writer.wait_written(10)  # nothing was put yet
        file = LogFile(writer, tmp_path / "log", _unexpected)
        file.write(b"one\n")
        await asyncio.to_thread(writer.wait_written, 10)
        assert (tmp_path / "log").read_bytes() == b"one\n"
        file.close()
        writer.close()

    asyncio.run(test())


def test_a_write_error_is_reported_on_the_event_loop(tmp_path: Path) -> None:
    async def test() -> None:
        writer = LogWriter()
        failed: asyncio.Future[OSError] = asyncio.get_running_loop().create_future()
        (tmp_path / "file").touch()
        LogFile(writer, tmp_path / "file" / "log", failed.set_result).write(b"x")
        assert (await failed).errno == errno.ENOTDIR
        full: asyncio.Future[OSError] = asyncio.get_running_loop().create_future()
        file = LogFile(writer, Path("/dev/full"), full.set_result)
        file.write(b"x")
        assert (await full).errno == errno.ENOSPC
        file.close()
        writer.close()

    asyncio.run(test())


def test_logging_does_not_block_on_a_stalled_terminal() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as reader, os.fdopen(writing, "w") as stream:
        handler = ThreadedHandler(stream)
        logger = logging.Logger("test")
        logger.addHandler(handler)
        for number in range(3000):
            logger.warning("%s %06d", "x" * 100, number)
        lines = [reader.readline() for _ in range(3000)]
        handler.close()
    assert [int(line.split()[1]) for line in lines] == list(range(3000))
