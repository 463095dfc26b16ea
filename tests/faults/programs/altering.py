"""A training function that alters its own newest checkpoint in storage, as a bad disk would, and then fails."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from holdfast import train
from holdfast.train import Checkpoint, CheckpointUploadMode

__all__ = ["count_steps", "flip_byte", "keep_one_file"]


def flip_byte(path: Path) -> None:
    """Alter one byte in place; size and modification time stay as they were."""
    before = path.stat()
    with path.open("r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def count_steps(config: dict[str, Any]) -> int:
    """Add 1 a step, with a checkpoint each. Before step 4 the first generation alters the newest checkpoint and fails.

    `config["read"]` is how a checkpoint is loaded, `config["run"]` the run's directory, `config["steps"]` how many.
    """
    saved = _load(config["read"])
    total = saved["total"]
    for step in range(saved["next"], config["steps"]):
        if step == 4 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            flip_byte(Path(config["run"], "checkpoint_000003", "state.json"))
            raise ValueError("restart, please")
        total += 1
        checkpoint = _save({"total": total, "next": step + 1}, config["read"])
        train.report({"total": total}, checkpoint=checkpoint, checkpoint_upload_mode=CheckpointUploadMode.SYNC)
    return int(total)


def keep_one_file(config: dict[str, Any]) -> None:
    """Commit four checkpoints that share one file, which is altered in the first of them once that is committed."""
    for step in range(4):
        Path("out").mkdir(exist_ok=True)
        Path("out", "frozen.bin").write_bytes(b"frozen" * 100_000)
        Path("out", "step").write_text(str(step))
        checkpoint = Checkpoint.from_directory("out")
        train.report({}, checkpoint=checkpoint, checkpoint_upload_mode=CheckpointUploadMode.SYNC)
        if step == 0:
            flip_byte(Path(config["run"], "checkpoint_000000", "frozen.bin"))


def _load(read: str) -> dict[str, Any]:
    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        return {"total": 0, "next": 0}
    if read == "load_state":
        state: dict[str, Any] = checkpoint.load_state()
    elif read == "to_directory":
        state = json.loads(Path(checkpoint.to_directory("copy"), "state.json").read_text())
    else:
        with checkpoint.as_directory() as directory:
            state = json.loads(Path(directory, "state.json").read_text())
    return state


def _save(state: dict[str, Any], read: str) -> Checkpoint:
    if read == "load_state":
        return Checkpoint.from_state(state)
    directory = Path("out")
    directory.mkdir(exist_ok=True)
    (directory / "state.json").write_text(json.dumps(state))
    return Checkpoint.from_directory(directory)
