"""Training functions for the fault tests: exact arithmetic on every rank, and faults at the places that a test names.

`steps` is a stand-in for training: each rank folds one sample a step into a number, so that a sample that was lost,
seen twice or taken in another order shows in everything that follows. `undisturbed` says what must come out.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from tests.faults.programs import processes

from holdfast import train

__all__ = ["State", "announce", "eat_memory", "fail", "heavy_steps", "losses", "steps", "undisturbed"]

State = dict[str, int]


def steps(config: dict[str, Any]) -> State:
    """Train for `config["steps"]` steps, a checkpoint of all ranks after every `config["every"]`.

    `config["faults"]` maps "generation:rank:step" (generation may be *) to what goes wrong before that step, see
    `fail`. `config["announce"]` names a datagram socket that is told of every step. With `config["settled"]` nothing
    goes wrong before the checkpoints that this rank has reported are committed: ranks do not keep step by themselves.
    With `config["prints"]` each worker prints a line first.
    """
    rank = train.get_context().get_world_rank()
    state = _restored(rank)
    if config.get("prints"):
        print(f"begins at step {state['step']}")
    send = announce(config)
    for step in range(state["step"], config["steps"]):
        if send is not None:
            send(rank, step)
        fail(config, rank, step)
        state = _advanced(state, rank)
        metrics = {"step": step, "loss": _loss(state), "samples": state["samples"]}
        if (step + 1) % config.get("every", 1):
            train.report(metrics)
            continue
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, f"rank_{rank}.json").write_text(json.dumps(state))
            for number in range(config.get("files", 0)):
                Path(directory, f"rank_{rank}_{number}.txt").write_text(str(step))
            checkpoint = train.Checkpoint.from_directory(directory)
            train.report(metrics, checkpoint=checkpoint, checkpoint_dir_name=_name_of(config, step))
    return state


def _name_of(config: dict[str, Any], step: int) -> str | None:
    """The name of this step's checkpoint: those of `config["names"]` in turn."""
    names = config.get("names")
    return names[step % len(names)] if names else None


def heavy_steps(config: dict[str, Any]) -> State:
    """`steps` with checkpoints of `config["ballast_bytes"]` and more from every rank."""
    rank = train.get_context().get_world_rank()
    state = _restored(rank)
    for step in range(state["step"], config["steps"]):
        state = _advanced(state, rank)
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, f"rank_{rank}.json").write_text(json.dumps(state))
            Path(directory, f"rank_{rank}.bin").write_bytes(os.urandom(1 << 16) * (config["ballast_bytes"] >> 16))
            metrics = {"step": step, "loss": _loss(state), "samples": state["samples"]}
            train.report(metrics, checkpoint=train.Checkpoint.from_directory(directory))
    return state


def eat_memory(config: dict[str, Any]) -> str:
    """In the first generation rank 0 leaves snapshots of `config["snapshot_bytes"]` with the agent; in the second all
    ranks, which have nothing of them in their own memory, fill the memory until one is killed."""
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
    if generation == 1:
        _leave_snapshots(config["snapshot_bytes"])
    eaten = []
    while generation == 2:
        eaten.append(b"x" * (1 << 20))
    return "recovered"


def _leave_snapshots(size_bytes: int) -> None:
    import numpy

    rank = train.get_context().get_world_rank()
    state = {"weights": numpy.full(size_bytes // 8, 1.0)} if rank == 0 else None
    for _ in range(2):  # both buffers of rank 0's slot
        train.report({}, checkpoint=None if state is None else train.Checkpoint.from_state(state))
    if rank == 0:
        train.get_all_reported_checkpoints()  # waits for the commits
        raise ValueError("the first generation is over")
    signal.pause()


def undisturbed(count: int, rank: int = 0) -> list[State]:
    """The states after each step of a run without faults."""
    states, state = [], _first(rank)
    for _ in range(count):
        state = _advanced(state, rank)
        states.append(state)
    return states


def losses(count: int) -> list[float]:
    """Rank 0's curve of a run without faults."""
    return [_loss(state) for state in undisturbed(count)]


def fail(config: dict[str, Any], rank: int, step: int) -> None:
    """Cause the fault that the configuration has for this step, if any."""
    faults = config.get("faults", {})
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
    fault = faults.get(f"{generation}:{rank}:{step}") or faults.get(f"*:{rank}:{step}")
    if fault is not None:
        if config.get("settled"):
            train.get_all_reported_checkpoints()  # waits for what is on its way
        _FAULTS[fault](config)


def announce(config: dict[str, Any]) -> Any:
    """A function that sends pid, rank and step to the socket `config["announce"]`; None without such a socket."""
    if "announce" not in config:
        return None
    line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    line.setblocking(False)

    def send(rank: int, step: int) -> None:
        try:
            line.sendto(json.dumps([os.getpid(), rank, step]).encode(), config["announce"])
        except (BlockingIOError, ConnectionRefusedError):
            return  # nobody has to hear of every step, and nobody may be there

    return send


def _first(rank: int) -> State:
    return {"step": 0, "value": rank + 1, "samples": 0}


def _advanced(state: State, rank: int) -> State:
    step = state["step"]
    sample = step * 2 + rank
    value = (state["value"] * 6364136223846793005 + sample * 1442695040888963407 + 1) % 2**63
    return {"step": step + 1, "value": value, "samples": state["samples"] + 1}


def _loss(state: State) -> float:
    return state["value"] / 2**63


def _restored(rank: int) -> State:
    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        return _first(rank)
    with checkpoint.as_directory() as directory:
        found: State = json.loads(Path(directory, f"rank_{rank}.json").read_text())
        return found


# ---------------------------------------------------------------- the ways to fail


def _raise(config: dict[str, Any]) -> None:
    raise ValueError("the data is bad")


def _exit(config: dict[str, Any]) -> None:
    sys.exit(0)


def _kill(config: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_agent(config: dict[str, Any]) -> None:
    agent = processes.parent_of(os.getppid())
    assert agent is not None
    os.kill(agent, signal.SIGKILL)
    while True:
        signal.pause()  # whoever kills the agent kills this process with it


def _crash(config: dict[str, Any]) -> None:
    ctypes.string_at(0)


def _stop(config: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _deadlock(config: dict[str, Any]) -> None:
    lock = threading.Lock()
    with lock:
        lock.acquire()


def _wait_for_others(config: dict[str, Any]) -> None:
    train.collective.barrier()


def _hold(config: dict[str, Any]) -> None:
    """Wait until the test opens the pipe for writing (`Sandbox.open_gate`)."""
    os.close(os.open(config["go"], os.O_RDONLY))


def _hold_later(config: dict[str, Any]) -> None:
    """The same at a second gate."""
    os.close(os.open(config["later"], os.O_RDONLY))


def _die_while_staging(config: dict[str, Any]) -> None:
    from holdfast.worker import session

    def half(source: Path, target: Path, *, move: bool) -> None:
        target.mkdir(parents=True)
        (target / "half.bin").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    session.stage = half  # type: ignore[attr-defined]


def _die_after_report(config: dict[str, Any]) -> None:
    """The agents have the files when every rank's `report` is over; what follows is the upload."""
    from holdfast.wire.messages import CollectiveKind
    from holdfast.worker.session import current

    session = current()
    real = session._send_report

    def last(*arguments: Any, **options: Any) -> None:
        real(*arguments, **options)
        session._agent.collect(CollectiveKind.BARRIER, None)  # `report` holds the lock that `train.collective` takes
        os.kill(os.getpid(), signal.SIGKILL)

    session._send_report = last  # type: ignore[method-assign]


_FAULTS = {
    "raise": _raise,
    "exit": _exit,
    "kill": _kill,
    "kill-agent": _kill_agent,
    "crash": _crash,
    "stop": _stop,
    "deadlock": _deadlock,
    "barrier": _wait_for_others,
    "hold": _hold,
    "hold-later": _hold_later,
    "staging": _die_while_staging,
    "uploading": _die_after_report,
}
