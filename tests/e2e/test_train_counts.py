"""How often a run waits for the disk, reads its storage, and sends messages: what is counted must not grow."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.small import fit, save
from tests.faults.programs.sandbox import Sandbox

from holdfast.storage.posix.store import PosixStore
from holdfast.train import CheckpointUploadMode
from holdfast.wire.resumable_channel import ResumableChannel


def test_a_run_that_does_nothing_syncs_each_name_once(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what a command waits for (the first records, the start of the workers, the end) ten calls, in the driver:
    the agent has none. Where the agent is there at once, the start of the workers is among the first records; on a slow
    machine, records that no command waits for may be flushed in between."""
    synced: list[str] = []
    fsync, fdatasync = os.fsync, os.fdatasync

    def noting_fsync(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))  # noqa: PTH115  no real path while it has no name
        synced.append(path.name if path.exists() else f"new in {path.parent.name}")
        fsync(fd)

    def noting_fdatasync(fd: int) -> None:
        synced.append("records")
        fdatasync(fd)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "fdatasync", noting_fdatasync)
    fit(sandbox, lambda: None, verbose=0)
    once = ["000001.json", "run.json", sandbox.root.name, "storage", "run", "epochs", "new in journal", "journal"]
    assert [name for name in synced if name != "records"] == once
    assert synced.count("records") >= 1

    synced.clear()
    fit(sandbox, lambda: 1, verbose=0)
    again = ["000002.json", "000002.floor.json", "run.json"]
    assert [name for name in synced if name != "records"][:3] == again


def test_a_run_that_does_nothing_reads_no_file_without_need(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the driver: the run's identity once the lease is held, its epoch when it begins and ends, its floor for the
    journal and for the checkpoints; then what `Result` shows."""
    read: Counter[str] = Counter()
    get, get_range = PosixStore.get, PosixStore.get_range

    def counting_get(store: PosixStore, key: str) -> bytes:
        data = get(store, key)
        read[key] += 1
        return data

    def counting_get_range(store: PosixStore, key: str, start: int, length: int) -> bytes:
        read[key.partition("/")[0]] += 1
        return get_range(store, key, start, length)

    monkeypatch.setattr(PosixStore, "get", counting_get)
    monkeypatch.setattr(PosixStore, "get_range", counting_get_range)
    fit(sandbox, lambda: None, verbose=0)
    once = {"journal": 1, "params.json": 1}
    assert read == {"run.json": 2, "epochs/000001.json": 2, "epochs/000001.floor.json": 4, **once}


def test_a_commit_takes_four_messages(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report says itself that its rank waits for the commit, and the commit ends that."""
    messages: Counter[str] = Counter()
    send, receive = ResumableChannel.send_nowait, ResumableChannel.recv

    def counting_send(channel: ResumableChannel[Any], message: Any, run: str = "") -> None:
        messages[type(message).__name__] += 1
        send(channel, message, run)

    async def counting_receive(channel: ResumableChannel[Any]) -> Any:
        envelope = await receive(channel)
        if envelope is not None:
            messages[type(envelope.message).__name__] += 1
        return envelope

    def train_loop() -> None:
        for step in range(5):
            save(step, checkpoint_upload_mode=CheckpointUploadMode.SYNC)

    monkeypatch.setattr(ResumableChannel, "send_nowait", counting_send)
    monkeypatch.setattr(ResumableChannel, "recv", counting_receive)
    fit(sandbox, train_loop, verbose=0)
    each = {name: count for name, count in messages.items() if count >= 5}
    assert each == {"RankReported": 5, "Upload": 5, "Uploaded": 5, "AnnounceCheckpoint": 5}
    assert "WorkerWaited" not in messages
