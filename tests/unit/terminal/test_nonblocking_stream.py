"""A terminal that stalls or closes does not block the run."""

from __future__ import annotations

import io
import os
import pty

import pytest

from holdfast.views.terminal.nonblocking_stream import NonblockingStream


def test_a_full_pipe_drops_and_counts_lines_instead_of_blocking() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as reader, os.fdopen(writing, "w", encoding="utf-8") as stream:
        outlet = NonblockingStream(stream)
        for n in range(60_000):
            outlet.line(f"line {n:06} " + "x" * 88)
            outlet.drain()
        text = b""
        while not text.endswith(b"too slow]\n"):
            text += os.read(reader.fileno(), 65_536)
            outlet.drain()
        lines = text.decode().splitlines()
        shown = [line for line in lines if line.startswith("line ")]
        assert lines[-1] == f"[{60_000 - len(shown)} lines are left out here: the terminal was too slow]"
        assert [line[5:11] for line in shown] == [f"{n:06}" for n in range(len(shown))]


def test_a_closed_pipe_ends_the_output_only() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w", encoding="utf-8")
    outlet = NonblockingStream(stream)
    outlet.line("hello")
    outlet.drain(wait=True)
    outlet.line("anyone?")
    outlet.drain(wait=True)
    with pytest.raises(BrokenPipeError):
        stream.close()  # Python's own buffer still holds the line


def test_a_terminal_is_detected() -> None:
    master, slave = pty.openpty()
    with os.fdopen(master, "rb") as _, os.fdopen(slave, "w", encoding="utf-8") as stream:
        outlet = NonblockingStream(stream)
        assert outlet.interactive
        outlet.line("hello", "31")
        outlet.drain()
        text = b""
        while not text.endswith(b"\n"):  # the kernel may pass the end of the line on by itself
            text += os.read(master, 100)
        assert text == b"\x1b[31mhello\x1b[0m\r\n"


def test_boxes_only_if_the_encoding_has_their_characters() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    outlet = NonblockingStream(stream)
    assert not outlet.fine
    outlet.line("naïve 漢")
    outlet.drain()
    assert raw.getvalue() == b"na?ve ?\n"
    assert NonblockingStream(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")).fine


def test_a_closed_stream_is_ignored() -> None:
    stream = io.StringIO()
    outlet = NonblockingStream(stream)
    outlet.line("hello")
    stream.close()
    outlet.drain()
    outlet.line("again")
    outlet.drain(wait=True)
