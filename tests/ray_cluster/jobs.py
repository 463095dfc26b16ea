"""What workers run on a Ray cluster, and what they do to the processes above them."""

from __future__ import annotations

import math
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from holdfast import train
from holdfast.train import Checkpoint, collective

__all__ = ["ancestors", "meet", "steps"]


def ancestors() -> dict[str, int]:
    """The pids of this worker's agent, of the actor that started it, and of that one's raylet."""
    chain: list[tuple[str, int]] = []
    pid = os.getpid()
    while pid > 1:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        chain.append((name, pid))
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    at = next(n for n, (name, _) in enumerate(chain) if name == "hf-agent")
    return {
        "worker": os.getpid(),
        "agent": chain[at][1],
        "actor": chain[at + 1][1],
        "raylet": chain[at + 2][1],
    }


def steps(config: dict[str, Any]) -> dict[str, Any]:
    """Count to `steps`, or until a file is there, with a checkpoint at each. From
    `kill_at` on a rank kills `kill`, once, if it is one of `kill_workers` at least."""
    rank = train.get_context().get_world_rank()
    first = 0
    if (checkpoint := train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            first = int((Path(directory) / "step").read_text())
    if "nodes_directory" in config:
        (Path(config["nodes_directory"]) / f"{first}-{rank}").write_text(os.environ["TEST_NODE"])
    for step in range(first + 1, config["steps"] + 1):
        _kill_once(config, rank, step)
        with tempfile.TemporaryDirectory() as directory:
            if rank == 0:
                (Path(directory) / "step").write_text(str(step))
            given = Checkpoint.from_directory(directory) if rank == 0 else None
            train.report({"step": step, "at": time.time(), "resumed_from": first}, checkpoint=given)
        if "until_file" in config:  # all ranks after the same step
            time.sleep(0.02)
            if collective.broadcast_from_rank_zero(Path(config["until_file"]).exists()):
                break
        if "hold_at" in config and step == config["hold_at"]:
            _wait_for(Path(config["hold_file"]).parent, Path(config["hold_file"]).name)
    return {"node": os.environ["TEST_NODE"], "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "first": first}


def meet(place: str, count: int) -> None:
    """Wait until so many workers have come here."""
    directory = Path(place)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{time.time_ns()}-{os.getpid()}").touch()
    give_up_at = time.monotonic() + 60
    while len(list(directory.iterdir())) < count:
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"{len(list(directory.iterdir()))} of {count} workers came")
        time.sleep(0.02)


def _kill_once(config: dict[str, Any], rank: int, step: int) -> None:
    # Not the head's raylet: that is the driver's own.
    is_killer = os.environ["TEST_NODE"] != "0" if config.get("kill") == "raylet" else rank == 1
    if not is_killer or step < config.get("kill_at", math.inf):
        return
    if train.get_context().get_world_size() < config.get("kill_workers", 1):
        return
    try:
        os.close(os.open(config["killed_file"], os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return
    _wait_for(Path(config["run_directory"]), "checkpoint_*/.manifest.json")  # rank 0 may be behind
    if "kill_when" in config:
        _wait_for(Path(config["kill_when"]).parent, Path(config["kill_when"]).name)
    Path(config["killed_file"]).write_text(os.environ["TEST_NODE"])
    os.kill(ancestors()[config["kill"]], signal.SIGKILL)
    time.sleep(60)  # until the kill arrives here


def _wait_for(directory: Path, pattern: str) -> None:
    while not any(directory.glob(pattern)):
        time.sleep(0.02)
