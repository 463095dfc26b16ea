"""One run of `bench.counts`: `python counted.py SCENARIO COUNT STORAGE MESSAGES` trains on 2 workers.

Writes how many messages of each type crossed the wire to the file MESSAGES as JSON. Every message between the
controller and an agent passes this process, so counting here counts all of them.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from holdfast import train
from holdfast.train import Checkpoint, DataParallelTrainer, RunConfig, ScalingConfig

SCENARIO, COUNT, STORAGE, MESSAGES = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
_STATE_BYTES = 256 * 1024 * 1024


def noop(config: dict[str, int]) -> None:
    """Does nothing."""


def reports(config: dict[str, int]) -> None:
    for step in range(config["count"]):
        train.report({"step": step})


def commits(config: dict[str, int]) -> None:
    """Each commit is waited for, so that none is merged with, or waits for, another."""
    for step in range(config["count"]):
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = None
            if train.get_context().get_world_rank() == 0:
                Path(directory, "data").write_bytes(os.urandom(1024))
                checkpoint = Checkpoint.from_directory(directory)
            train.report({"step": step}, checkpoint, checkpoint_upload_mode=train.CheckpointUploadMode.SYNC)


def restore(config: dict[str, int]) -> None:
    """The first run commits a large file and fails; the second, which is counted, reads it and ends."""
    checkpoint = train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            assert Path(directory, "data").stat().st_size == _STATE_BYTES
        return
    with tempfile.TemporaryDirectory() as directory:
        given = None
        if train.get_context().get_world_rank() == 0:
            Path(directory, "data").write_bytes(os.urandom(_STATE_BYTES))
            given = Checkpoint.from_directory(directory)
        train.report({}, given, checkpoint_upload_mode=train.CheckpointUploadMode.SYNC)
    if given is not None:  # the other rank does not wait for the commit, and must not end the run before it
        raise RuntimeError("the first of two runs ends here")


def _connection_class() -> Any:
    """What the controller's messages pass."""
    try:
        from holdfast.wire.resumable_channel import ResumableChannel
    except ModuleNotFoundError:  # an older checkout
        from holdfast.wire.channel import Channel

        return Channel
    return ResumableChannel


def _count_messages() -> collections.Counter[str]:
    counts: collections.Counter[str] = collections.Counter()
    connection = _connection_class()
    send, receive = connection.send_nowait, connection.recv

    def send_nowait(self: Any, message: Any, *run: str) -> None:
        counts[type(message).__name__] += 1
        send(self, message, *run)

    async def recv(self: Any) -> Any:
        envelope = await receive(self)
        if envelope is not None:
            counts[type(getattr(envelope, "message", envelope)).__name__] += 1
        return envelope

    connection.send_nowait, connection.recv = send_nowait, recv
    return counts


def main() -> None:
    counts = _count_messages()
    trainer = DataParallelTrainer(
        {"noop": noop, "reports": reports, "commits": commits, "restore": restore}[SCENARIO],
        train_loop_config={"count": COUNT},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path=STORAGE),
    )
    with contextlib.suppress(train.TrainingFailedError):
        trainer.fit()
    MESSAGES.write_text(json.dumps(counts))


if __name__ == "__main__":
    main()
