"""The progress line: none in the first second or without a terminal, erased at the end; Ctrl-C stops transfers."""

from __future__ import annotations

import io

import pytest

from holdfast.cli import interrupt
from holdfast.cli.progress import Meter
from holdfast.errors import HoldfastError

MIB = 1024**2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_nothing_is_drawn_in_the_first_second() -> None:
    terminal, clock = Terminal(), Clock()
    with Meter("Fetching", 100 * MIB, terminal, clock) as meter:
        for _ in range(9):
            clock.now_s += 0.1
            meter(MIB)
    assert terminal.getvalue() == ""
    assert meter.done_bytes == 9 * MIB


def test_bytes_rate_and_time_left_are_drawn_and_wiped() -> None:
    terminal, clock = Terminal(), Clock()
    with Meter("Fetching", 100 * MIB, terminal, clock) as meter:
        clock.now_s += 2
        meter(50 * MIB)
        drawn = terminal.getvalue()
    assert drawn.startswith("\r\x1b[KFetching  ████")
    assert drawn.endswith("░░  50%  50.0 MiB of 100.0 MiB  25.0 MiB/s  2.0 s left")
    assert len(drawn) == len("\r\x1b[K") + 79
    assert terminal.getvalue() == drawn + "\r\x1b[K"


def test_the_progress_line_is_redrawn_at_most_ten_times_a_second() -> None:
    terminal, clock = Terminal(), Clock()
    with Meter("Fetching", MIB, terminal, clock) as meter:
        clock.now_s += 1
        for _ in range(100):
            meter(1)
        clock.now_s += 0.11
        meter(1)
        assert terminal.getvalue().count("\r") == 2


def test_a_narrow_terminal_gets_no_bar() -> None:
    clock = Clock()
    meter = Meter("Fetching", 100 * MIB, Terminal(), clock)
    clock.now_s += 2
    meter(50 * MIB)
    assert meter.line(60) == "Fetching   50%  50.0 MiB of 100.0 MiB  25.0 MiB/s  2.0 s left"[:60]
    assert meter.line(200).count("█") == meter.line(200).count("░") == 12


def test_without_a_total_bytes_and_rate_are_shown() -> None:
    clock = Clock()
    meter = Meter("Verifying", None, Terminal(), clock)
    clock.now_s += 4
    meter(8 * MIB)
    assert meter.line() == "Verifying  8.0 MiB  2.0 MiB/s"
    meter.expect(16 * MIB)
    assert " 50%  8.0 MiB of 16.0 MiB" in meter.line()


def test_no_progress_is_drawn_to_files_and_pipes() -> None:
    stream, clock = io.StringIO(), Clock()
    with Meter("Fetching", 100, stream, clock) as meter:
        clock.now_s += 10
        meter(10)
    assert stream.getvalue() == ""


def test_ctrl_c_stops_the_next_block_of_every_transfer() -> None:
    with pytest.raises(KeyboardInterrupt), interrupt.watching():
        meter = Meter("Fetching", 100, io.StringIO(), Clock())
        meter(1)
        try:
            interrupt._on_interrupt(2, None)
        finally:
            with pytest.raises(HoldfastError, match="interrupted"):
                meter(1)
    with interrupt.watching():
        Meter("Fetching", 100, io.StringIO(), Clock())(1)
