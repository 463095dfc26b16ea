"""A training function whose checkpoints are states in memory, with kills at every step of a snapshot.

Each array holds the number of its step in every element, so that a mixture of two snapshots shows. `config["faults"]`
maps "generation:step" to what happens at that step's report, see `_FAULTS`; with "agent" in `config`, the agent is
killed instead of the worker.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy
from tests.faults.programs import processes

from holdfast import train
from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpoint.state.plan import Plan
from holdfast.worker.session import Session, current

__all__ = ["MOMENTS", "check", "steps"]

_Config = dict[str, Any]
_COUNT = (16 << 20) // 8
"""Elements of an array that has a file of its own."""


def steps(config: _Config) -> int:
    """Train for `config["steps"]` steps with a snapshot after each; returns the last step."""
    rank = train.get_context().get_world_rank()
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
    step, source = _restored()
    expected = config.get("sources", {}).get(str(generation))
    if expected is not None and source != expected:
        raise AssertionError(f"rank {rank} loaded from {source}")
    if rank == 0 and "agent" not in config and step < _accepted(config):
        raise AssertionError(f"report() had accepted step {_accepted(config)}, and it is lost: this is step {step}")
    train.collective.barrier()  # every rank has loaded before any snapshot is taken over the one that was loaded
    while step < config["steps"]:
        step += 1
        fault = config.get("faults", {}).get(f"{generation}:{step}")
        if rank != 0:
            train.report({"step": step})
            if fault == "peer-fails":
                _until_accepted(config, step)
                raise ValueError("rank 1 fails")
            continue
        if fault in _FAULTS:
            _FAULTS[fault](config)
        checkpoint = train.Checkpoint.from_state(_state(step))
        train.report({"step": step, "source": source}, checkpoint=checkpoint)
        with Path(config["accepted"]).open("a") as file:
            file.write(f"{step}\n")
        if fault == "peer-fails":
            signal.pause()
        if fault in _FAULTS:
            _afterwards(fault, config, step)
    return step


def check(state: Any) -> int:
    """The step of a state; an error if it is not all of one step."""
    step = int(state["step"])
    if not ((state["weights"] == step).all() and (state["frozen"] == 7).all() and (state["small"] == step).all()):
        raise AssertionError(f"this state is torn, somewhere about step {step}")
    return step


def _state(step: int) -> dict[str, Any]:
    frozen = numpy.full(_COUNT, 7.0)
    return {"step": step, "weights": numpy.full(_COUNT, float(step)), "frozen": frozen, "small": numpy.full(5, step)}


def _restored() -> tuple[int, str]:
    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        return 0, "nothing"
    read: list[str] = []
    real = Checkpoint.load_state

    def spied(self: Checkpoint, *arguments: Any) -> Any:
        read.append("storage")
        return real(self, *arguments)

    Checkpoint.load_state = spied  # type: ignore[method-assign, assignment]
    try:
        return check(checkpoint.load_state()), "storage" if read else "memory"
    finally:
        Checkpoint.load_state = real  # type: ignore[method-assign]


def _accepted(config: _Config) -> int:
    return max(map(int, processes.whole_lines(Path(config["accepted"]))), default=0)


# ---------------------------------------------------------------- the moments


def _die(config: _Config) -> NoReturn:
    if "agent" not in config:
        os.kill(os.getpid(), signal.SIGKILL)
    zygote = os.getppid()
    agent = processes.parent_of(zygote)
    assert agent is not None
    os.kill(agent, signal.SIGKILL)
    while True:
        signal.pause()  # whoever kills the agent kills this process with it


def _before_copy(config: _Config) -> None:
    def write_into(self: Plan, buffer: memoryview) -> None:
        _die(config)

    Plan.write_into = write_into  # type: ignore[method-assign]


def _half_copied(config: _Config) -> None:
    real = Plan.write_into

    def write_into(self: Plan, buffer: memoryview) -> None:
        whole = memoryview(bytearray(self.size_bytes))
        real(self, whole)
        half = self.size_bytes // 3
        buffer[:half] = whole[:half]
        _die(config)

    Plan.write_into = write_into  # type: ignore[method-assign]


def _unsealed(config: _Config) -> None:
    real = Plan.write_into

    def write_into(self: Plan, buffer: memoryview) -> None:
        real(self, buffer)
        _die(config)

    Plan.write_into = write_into  # type: ignore[method-assign]


def _unsent(config: _Config) -> None:
    def send(self: Session, *arguments: Any) -> None:
        _die(config)

    Session._send_report = send  # type: ignore[method-assign, assignment]


def _sent(config: _Config) -> None:
    session = current()
    real = session._send_report

    def send(*arguments: Any) -> None:
        real(*arguments)
        with Path(config["accepted"]).open("a") as file:
            file.write(f"{arguments[0].report.metrics['step']}\n")
        _die(config)

    session._send_report = send  # type: ignore[method-assign, assignment]


def _later(config: _Config) -> None:
    """Nothing yet: see `_afterwards`."""


def _afterwards(fault: str, config: _Config, step: int) -> None:
    """After `report` has returned: at once, or when storage holds what is waited for. Each step is committed once."""
    if fault in ("before-copy", "half-copied", "unsealed", "unsent", "sent"):
        raise AssertionError(f"{fault} did not happen")
    if fault == "stored-half":
        _until(lambda: any(_run(config).glob("checkpoint_*/state-00001-*")))
    if fault == "committed":
        _until(lambda: len(list(_run(config).glob("checkpoint_*/.manifest.json"))) >= step)
    _die(config)


def _until_accepted(config: _Config, step: int) -> None:
    _until(lambda: _accepted(config) == step)


def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.0005)


def _run(config: _Config) -> Path:
    return Path(config["run"])


_FAULTS: dict[str, Callable[[_Config], None]] = {
    "before-copy": _before_copy,
    "half-copied": _half_copied,
    "unsealed": _unsealed,
    "unsent": _unsent,
    "sent": _sent,
    "returned": _later,
    "stored-half": _later,
    "committed": _later,
}
MOMENTS = list(_FAULTS)
