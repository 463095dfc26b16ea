"""Direct writes to disk: their buffers and threads."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import threading
from pathlib import Path

import pytest

from holdfast.storage import hugepages, transfer
from holdfast.storage.posix.store import PosixStore
from holdfast.storage.store import InMemory

LARGE_BYTES = 5 * hugepages.BUFFER_BYTES + 12_345
DATA = os.urandom(LARGE_BYTES)


@pytest.fixture(autouse=True)
def _nothing_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugepages, "_spare", [])


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Every thread that wrote, once for each block."""
    seen: list[threading.Thread] = []
    write = transfer._write_block

    def spied(fd: int, block: memoryview) -> None:
        seen.append(threading.current_thread())
        write(fd, block)

    monkeypatch.setattr(transfer, "_write_block", spied)
    return seen


def address(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def test_buffers_are_whole_huge_pages_and_reused() -> None:
    with hugepages.borrow_buffers(3) as buffers:
        first = {address(buffer) for buffer in buffers}
        assert len(first) == 3
        for buffer in buffers:
            assert address(buffer) % hugepages.BUFFER_BYTES == 0
            assert len(buffer) == hugepages.BUFFER_BYTES
    with hugepages.borrow_buffers(2) as buffers:
        assert {address(buffer) for buffer in buffers} < first


def test_the_number_of_pooled_buffers_is_bounded() -> None:
    with hugepages.borrow_buffers(hugepages._SPARE_MAX + 5), hugepages.borrow_buffers(2):
        pass
    assert len(hugepages._spare) == hugepages._SPARE_MAX


def test_buffers_are_advised_to_use_huge_pages() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel knows no large pages")
    with hugepages.borrow_buffers(1) as (buffer,):
        assert "hg" in _flags(address(buffer))


def _flags(wanted: int) -> list[str]:
    """What the kernel notes of the mapping at this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= wanted < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


def test_filling_a_buffer() -> None:
    with hugepages.borrow_buffers(1) as (buffer,):
        hugepages.fill(buffer, memoryview(DATA)[1:1001])
        assert buffer[:1000] == DATA[1:1001]
        hugepages.fill(buffer[:0], memoryview(b""))
        with pytest.raises(ValueError, match="5 bytes do not fit into 4"):
            hugepages.fill(buffer[:4], memoryview(b"12345"))


def test_each_uploading_thread_has_one_writer_thread(tmp_path: Path, writers: list[threading.Thread]) -> None:
    store = PosixStore(tmp_path)

    def upload() -> None:
        for number in range(3):
            store.upload(str(number), InMemory(memoryview(DATA)))

    uploading = threading.Thread(target=upload)
    uploading.start()
    uploading.join()
    assert [store.get(str(number)) for number in range(3)] == [DATA] * 3
    assert len(writers) == 3 * 6
    assert len(set(writers)) == 1
    assert writers[0] is not uploading
    writers[0].join()  # or the test times out


def test_a_forked_child_has_its_own_writer_thread(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    store.upload("parent", InMemory(memoryview(DATA)))
    if (child := os.fork()) == 0:
        signal.alarm(60)  # one that hangs shall not stay
        try:
            store.upload("child", InMemory(memoryview(DATA)))
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert store.get("child") == DATA


def test_a_buffer_is_not_reused_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, given_up = threading.Event(), threading.Event()
    told: list[int] = []

    def refuse(count: int) -> None:
        told.append(count)
        if len(told) == 2:  # the first block is being written
            given_up.set()
            raise InterruptedError("enough")

    monkeypatch.setattr(transfer, "_write_block", lambda fd, block: go.wait())
    raised: list[BaseException] = []

    def upload() -> None:
        try:
            PosixStore(tmp_path).upload("x", InMemory(memoryview(DATA)), refuse)
        except InterruptedError as error:
            raised.append(error)

    thread = threading.Thread(target=upload)
    thread.start()
    given_up.wait()
    thread.join(0.05)  # time for a mistake
    held = thread.is_alive() and hugepages._spare == []
    go.set()
    thread.join()
    assert held
    assert raised
    assert len(hugepages._spare) == 2
    assert list(tmp_path.iterdir()) == []


def test_the_number_of_large_files_written_at_once_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, taken = threading.Event(), threading.Semaphore(0)
    busy: list[int] = []

    def slow(fd: int, block: memoryview) -> None:
        busy.append(fd)
        taken.release()
        go.wait()

    monkeypatch.setattr(transfer, "_write_block", slow)
    store = PosixStore(tmp_path)
    threads = [
        threading.Thread(target=store.upload, args=(str(number), InMemory(memoryview(DATA))))
        for number in range(transfer._AT_ONCE + 2)
    ]
    for thread in threads:
        thread.start()
    for _ in range(transfer._AT_ONCE):
        taken.acquire()
    more = taken.acquire(timeout=0.05)  # time for a mistake
    files = set(busy)
    go.set()
    for thread in threads:
        thread.join()
    assert not more
    assert len(files) == transfer._AT_ONCE
    assert len(store.list()) == transfer._AT_ONCE + 2
