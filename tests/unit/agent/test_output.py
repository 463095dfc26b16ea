"""Worker output: the log file is complete, what is sent to the controller is bounded."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holdfast.agent import output
from holdfast.agent.log_writer import LogWriter
from holdfast.agent.output import Forwarder, RankLog
from holdfast.wire.messages import Logs


class Lagging:
    """A controller whose connection holds `backlog_bytes`."""

    def __init__(self) -> None:
        self.sent: list[Logs] = []
        self.backlog_bytes = 0

    @property
    def texts(self) -> list[str]:
        return [line.text for logs in self.sent for line in logs.lines]


def test_lines_are_whole_and_streams_do_not_mix(tmp_path: Path) -> None:
    async def test() -> None:
        controller = Lagging()
        writer = LogWriter()
        forwarder = Forwarder(3, controller.sent.append, lambda: 0)
        log = RankLog(tmp_path / "rank_0.log", 0, forwarder, writer)
        log.feed("stdout", b"one ")
        log.feed("stderr", b"warning\nand ")
        log.feed("stdout", b"two\nthree\n\xff\n")
        log.feed("stderr", b"more")
        log.close()
        writer.close()
        forwarder.flush()
        assert controller.texts == ["warning", "one two", "three", "\N{REPLACEMENT CHARACTER}", "and more"]
        assert (tmp_path / "rank_0.log").read_bytes() == b"warning\none two\nthree\n\xff\nand more\n"
        assert list(log.tail) == ["warning", "and more"]

    asyncio.run(test())


def test_a_lagging_controller_is_told_how_many_lines_were_dropped(tmp_path: Path) -> None:
    async def test() -> None:
        controller = Lagging()
        writer = LogWriter()
        forwarder = Forwarder(1, controller.sent.append, lambda: controller.backlog_bytes)
        log = RankLog(tmp_path / "rank_2.log", 2, forwarder, writer)
        controller.backlog_bytes = 100 * 1024 * 1024
        for number in range(7):
            log.feed("stdout", f"lost {number}\n".encode())
        forwarder.flush()
        assert controller.sent == []
        controller.backlog_bytes = 0
        log.feed("stdout", b"seen\n")
        forwarder.flush()
        log.close()
        writer.close()
        assert controller.texts == ["seen", "7 lines are left out here: they are in the log file."]
        assert (tmp_path / "rank_2.log").read_text().count("lost") == 7

    asyncio.run(test())


def test_output_between_two_flushes_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_LINES_MAX", 10)

    async def test() -> None:
        controller = Lagging()
        writer = LogWriter()
        forwarder = Forwarder(1, controller.sent.append, lambda: 0)
        log = RankLog(tmp_path / "rank_0.log", 0, forwarder, writer)
        log.feed("stdout", b"line\n" * 25)
        forwarder.flush()
        log.close()
        writer.close()
        assert controller.texts == ["line"] * 10 + ["15 lines are left out here: they are in the log file."]
        assert (tmp_path / "rank_0.log").read_bytes() == b"line\n" * 25

    asyncio.run(test())


def test_an_endless_line_is_cut_to_bounded_memory(tmp_path: Path) -> None:
    async def test() -> None:
        controller = Lagging()
        writer = LogWriter()
        forwarder = Forwarder(1, controller.sent.append, lambda: 0)
        log = RankLog(tmp_path / "rank_0.log", 0, forwarder, writer)
        for _ in range(100):
            log.feed("stdout", b"x" * 1000)
        log.close()
        writer.close()
        assert (tmp_path / "rank_0.log").stat().st_size > 80_000
        forwarder.flush()
        assert max(map(len, controller.texts)) <= 16 * 1024

    asyncio.run(test())
