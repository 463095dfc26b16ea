"""A training process that obeys `bench.checkpoint`: `python snapshots.py SOCKET STORAGE SIZE_BYTES holdfast|ray`.

It holds a state of twenty tensors and reports it, times itself, trains for a while, restores, or dies, as it is told
over the socket; with Ray, whose checkpoints are directories, the state is saved into one first, as its users do.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from bench.saving import Others, change, make_state

SOCKET, STORAGE, SIZE_BYTES, SYSTEM = sys.argv[1:5]
train: Any = importlib.import_module(f"{SYSTEM}.train")


def serve() -> None:
    import torch

    began = time.perf_counter()
    checkpoint = train.get_checkpoint()
    restored = None if checkpoint is None else checkpoint.load_state()
    line = Client(SOCKET)
    line.send({"restored_s": time.perf_counter() - began, "threads": torch.get_num_threads()})
    del restored
    state = make_state(int(SIZE_BYTES))
    while (order := line.recv())["do"] != "end":
        if order["do"] == "report":
            change(state, order["share"])
            line.send(_reported(state, order["mode"]))
        elif order["do"] == "train":
            line.send(_trained(order["seconds"], make_state(order["size_bytes"]), order["by"]))
        elif order["do"] == "die":
            os.kill(os.getpid(), signal.SIGKILL)


def _reported(state: dict[str, Any], mode: str) -> dict[str, float]:
    """How long training waited, and when the checkpoint was known to be stored."""
    began = time.perf_counter()
    if SYSTEM == "holdfast":
        train.report({}, checkpoint=train.Checkpoint.from_state(state))
        stalled = time.perf_counter()
        train.get_all_reported_checkpoints()  # waits for the commit
        return {"stall_s": stalled - began, "durable_s": time.perf_counter() - began}
    import torch

    with contextlib.ExitStack() as stack:
        directory = tempfile.mkdtemp(dir=STORAGE)
        torch.save(state, Path(directory, "state.pt"))
        train.report(
            {},
            checkpoint=train.Checkpoint.from_directory(directory),
            checkpoint_upload_mode=train.CheckpointUploadMode[mode],
            delete_local_checkpoint_after_upload=True,
        )
        stalled = time.perf_counter()
        train.get_all_reported_checkpoints()
        stack.close()
    return {"stall_s": stalled - began, "durable_s": time.perf_counter() - began}


def _trained(seconds: float, state: dict[str, Any], by: str) -> dict[str, float]:
    """Steps a second of a small training loop on one core, that changes its state each second and has it saved `by`
    somebody; how long that kept it waiting each time. One that is due before the last is over follows at once."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    left, right = torch.randn(384, 384), torch.randn(384, 384)
    with _saver(by, state) as save:
        began = change_at = time.perf_counter()
        queued_s, count, stalls_s = _queued_s(), 0, []
        while (now := time.perf_counter()) - began < seconds:
            if now >= change_at:
                change_at = max(change_at + 1.0, now)
                change(state, 1.0)
                started = time.perf_counter()
                save()
                stalls_s.append(time.perf_counter() - started)
            right = (left @ right).tanh()
            count += 1
        elapsed_s = time.perf_counter() - began
        queued = (_queued_s() - queued_s) / elapsed_s
    torch.set_num_threads(threads)
    return {"rate": count / elapsed_s, "stall_s": sum(stalls_s) / len(stalls_s), "queued": queued}


def _queued_s() -> float:
    """How long this thread has waited for a core so far."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


@contextlib.contextmanager
def _saver(by: str, state: dict[str, Any]) -> Iterator[Callable[[], object]]:
    """What saves the state; everything is stored when the block ends."""
    if by == "async_save":
        with tempfile.TemporaryDirectory(dir=STORAGE) as directory:
            others = Others(Path(directory), state)
            try:
                yield others.save_again
                others.finish()
            finally:
                others.close()
    elif by == "holdfast":
        yield lambda: train.report({}, checkpoint=train.Checkpoint.from_state(state))
        train.get_all_reported_checkpoints()
    else:
        yield lambda: None


if __name__ == "__main__":
    if SYSTEM == "ray":
        ray: Any = importlib.import_module("ray")
        scratch = str(Path(STORAGE).parent / "t")  # a short name: there will be sockets below it
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR", _temp_dir=scratch)
        trainer: Any = importlib.import_module("ray.train.v2.api.data_parallel_trainer").DataParallelTrainer
    else:
        trainer = train.DataParallelTrainer
    trainer(
        serve,
        scaling_config=train.ScalingConfig(num_workers=1),
        run_config=train.RunConfig(
            name=SYSTEM,
            storage_path=STORAGE,
            failure_config=train.FailureConfig(max_failures=-1),
            checkpoint_config=train.CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
