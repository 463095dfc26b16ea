"""A terminal that stalls or closes does not block the run."""

from __future__ import annotations

import io
import os
import pty
import shutil

import pytest

from holdfast.views.terminal.nonblocking_stream import NonblockingStream


def test_a_full_pipe_drops_and_counts_lines_instead_of_blocking() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as reader, os.fdopen(writing, "w", encoding="utf-8") as stream:
        nonblocking = NonblockingStream(stream)
        for n in range(60_000):
            nonblocking.line(f"line {n:06} " + "x" * 88)
            nonblocking.drain()
        text = b""
        while not text.endswith(b"too slow]\n"):
            text += os.read(reader.fileno(), 65_536)
            nonblocking.drain()
        lines = text.decode().splitlines()
        shown = [line for line in lines if line.startswith("line ")]
        assert lines[-1] == f"[{60_000 - len(shown)} lines are left out here: the terminal was too slow]"
        assert [line[5:11] for line in shown] == [f"{n:06}" for n in range(len(shown))]


def test_a_closed_pipe_ends_the_output_only() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w", encoding="utf-8")
    nonblocking = NonblockingStream(stream)
    nonblocking.line("hello")
    nonblocking.drain(wait=True)
    nonblocking.line("anyone?")
    nonblocking.drain(wait=True)
    with pytest.raises(BrokenPipeError):
        stream.close()  # Python's own buffer still holds the line


def test_a_terminal_is_detected() -> None:
    master, slave = pty.openpty()
    with os.fdopen(master, "rb") as _, os.fdopen(slave, "w", encoding="utf-8") as stream:
        nonblocking = NonblockingStream(stream)
        assert nonblocking.interactive
        nonblocking.line("hello", "31")
        nonblocking.drain()
        text = b""
        while not text.endswith(b"\n"):  # the kernel may pass the end of the line on by itself
            text += os.read(master, 100)
        assert text == b"\x1b[31mhello\x1b[0m\r\n"


def test_boxes_only_if_the_encoding_has_their_characters() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    nonblocking = NonblockingStream(stream)
    assert not nonblocking.fine
    nonblocking.line("naïve 漢")
    nonblocking.drain()
    assert raw.getvalue() == b"na?ve ?\n"
    assert NonblockingStream(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")).fine


def test_a_closed_stream_is_ignored() -> None:
    stream = io.StringIO()
    nonblocking = NonblockingStream(stream)
    nonblocking.line("hello")
    stream.close()
    nonblocking.drain()
    nonblocking.line("again")
    nonblocking.drain(wait=True)


def test_the_terminal_is_not_asked_for_its_size_while_there_is_nothing_to_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def size_of(*_: int) -> os.terminal_size:
        asked.append("its size")
        return os.terminal_size((80, 24))

    class Run:
        """Whose status is shown."""

    run = Run()
    for module in (os, shutil):
        monkeypatch.setattr(module, "get_terminal_size", size_of)
    nonblocking = NonblockingStream(io.StringIO(), True)
    for n in range(100):
        nonblocking.set_status(run, f"step {n}")
        nonblocking.line("a report")
        nonblocking.drain()
    assert not asked
    nonblocking.set_status(run, "one\ntwo\nthree")
    nonblocking.drain()
    assert asked
