"""`fit()` of a caller outside the cluster's network (`ray://`): its driver is a process on the cluster's head, and what
that prints, and what comes of it, is brought here.

The caller may go away and come back: the driver of a `(storage_path, name)` is found by an actor's name that follows
from them. A signal stops the run, as it does everywhere; whatever else ends the caller does not.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import cloudpickle
import msgspec
from blake3 import blake3

from holdfast.control.failures import rebuilt_error, run_error
from holdfast.control.fingerprint import Fingerprint
from holdfast.control.request import TrainRequest
from holdfast.control.working_dir import find_working_dir, pack_directory
from holdfast.engines.ray.client import ClusterDriver, connect
from holdfast.errors import ConfigError, HoldfastError, RunError
from holdfast.train.interrupted import make_interrupted
from holdfast.train.remote_driver import DriverJob, DriverOutcome, SentCode, decode_outcome
from holdfast.train.runtime import init_runtime_env

__all__ = ["fit_on_cluster", "for_cluster"]

_MODULE = "holdfast.train.remote_driver"
_SETTINGS = (
    *("HOLDFAST_QUIET", "HOLDFAST_JSON", "HOLDFAST_GRACE_S", "HOLDFAST_BACKOFF_S", "HOLDFAST_AGENTS_TIMEOUT_S"),
    *("HOLDFAST_AGENT_SILENCE_S", "HOLDFAST_STORAGE_PATIENCE_S"),
)
"""Variables that say how a run goes, not where something is on this machine."""
_SIGNALS_TO_LEAVE = 3


def for_cluster(run_config: Any, storage_path: str) -> Any:
    """The run's configuration as it goes to another machine: a path is this machine's absolute one, and the working
    directory is sent beside it."""
    sent = copy.copy(run_config)
    sent.storage_path = storage_path
    if isinstance(sent.worker_runtime_env, dict):
        sent.worker_runtime_env = _without_code(sent.worker_runtime_env)
    return sent


def fit_on_cluster(address: str, request: TrainRequest, fitted: object) -> DriverOutcome:
    """What came of the driver on the cluster: one that runs there, or one that gets `fitted` (a trainer, or a tuner).
    `request` is the run, or what the trials of an experiment have in common. Raises what its `fit()` raised, except the
    failure of a run."""
    connect(address)
    words = f"The run {request.name}"
    key = blake3(f"{request.storage_path}\0{request.name}".encode()).hexdigest()[:32]
    runtime_env = init_runtime_env()
    driver = ClusterDriver(f"fit-{key}", runtime_env, words)
    fingerprint = _digest(request.fingerprint)
    state, is_same = driver.find(fingerprint)
    if not state or (state == "ended" and not is_same):
        job = msgspec.msgpack.encode(_job(request, fitted, runtime_env))
        driver.start(_MODULE, job, fingerprint, _keep_outcome_s())
        # The name may have been made up: nobody else could tell it then.
        print(
            f"holdfast: {words} has its driver on the Ray cluster. If this process goes away, the same call comes back "
            f"to it with RunConfig(name={request.name!r}, storage_path={request.storage_path!r}).",
            file=sys.stderr,
            flush=True,
        )
    else:
        what = "is running" if state == "running" else "has ended"
        other = "" if is_same else "; it has another function or configuration than this call, which is not used"
        print(f"holdfast: {words} {what} on the Ray cluster{other}.", file=sys.stderr, flush=True)
    return _follow(driver, words)


def _keep_outcome_s() -> float:
    text = os.environ.get("HOLDFAST_KEEP_OUTCOME_S", "3600")
    try:
        keep_s = float(text)
    except ValueError:
        keep_s = -1.0
    if not 0 <= keep_s < float("inf"):
        raise ConfigError(f"HOLDFAST_KEEP_OUTCOME_S must be a number of seconds of 0 or more, not {text!r}.")
    return keep_s


def _job(request: TrainRequest, fitted: object, runtime_env: dict[str, Any]) -> DriverJob:
    root = find_working_dir(request.working_dir)
    code = None
    if root is not None:
        packed = pack_directory(root, request.excludes, request.storage_path)
        code = SentCode(root=packed.root, archive=packed.archive, hash=packed.hash)
    try:
        pickled = cloudpickle.dumps(fitted, protocol=pickle.HIGHEST_PROTOCOL)
    except (TypeError, AttributeError, ValueError, pickle.PicklingError, RecursionError) as error:
        raise ConfigError(
            f"{request.words.function} cannot be sent to the cluster ({error}): open files, locks, connections and the "
            "like inside the function instead."
        ) from error
    return DriverJob(
        pickled=pickled,
        code=code,
        sys_path=[os.path.abspath(one) for one in sys.path],  # noqa: PTH100  "" is the working directory
        command=sys.orig_argv,
        environment={name: os.environ[name] for name in _SETTINGS if name in os.environ},
        runtime_env=_without_code(runtime_env),
    )


def _without_code(runtime_env: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in runtime_env.items() if key not in ("working_dir", "excludes")}


def _digest(fingerprint: Fingerprint) -> str:
    """Equal for equal functions and configurations."""
    values = {**fingerprint.values, **{f"config {name}": value for name, value in fingerprint.config.items()}}
    digests = {name: value.digest for name, value in values.items()}
    parts = [fingerprint.function, fingerprint.python, dict(fingerprint.code), digests]
    return blake3(msgspec.msgpack.encode(parts, order="sorted")).hexdigest()


def _follow(driver: ClusterDriver, words: str) -> DriverOutcome:
    """Print what the driver prints, and hand signals to it, until it has ended."""
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(driver, waiting), name="holdfast-remote-output", daemon=True).start()
    with _signals(waiting):
        while True:
            match waiting.get():
                case signal.Signals() as number:
                    driver.stop(number)
                case HoldfastError() as error:
                    raise error
                case list() as pieces:
                    _print(pieces)
                case (bytes() as outcome, _):
                    return _checked(decode_outcome(outcome))
                case (_, why):
                    raise RunError(
                        f"{words}: its driver on the Ray cluster has died, {why}; the same call continues it."
                    )


def _read(driver: ClusterDriver, waiting: queue.SimpleQueue[Any]) -> None:
    position, has_ended = 0, False
    try:
        while not has_ended:
            position, pieces, has_ended, outcome, why = driver.read(position)
            if pieces:
                waiting.put(pieces)
            if has_ended:
                driver.taken()
                waiting.put((outcome, why))
    except HoldfastError as error:
        waiting.put(error)


def _print(pieces: list[tuple[int, str]]) -> None:
    for fd, text in pieces:
        stream = sys.stdout if fd == 1 else sys.stderr
        stream.write(text)
        stream.flush()


@contextlib.contextmanager
def _signals(waiting: queue.SimpleQueue[Any]) -> Iterator[None]:
    """Ctrl+C and SIGTERM are for the run; the third one leaves it alone, in case the cluster does not answer."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        if asked == _SIGNALS_TO_LEAVE:
            raise make_interrupted("Ctrl+C" if number == signal.SIGINT else signal.Signals(number).name)
        waiting.put(signal.Signals(number))

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _checked(outcome: DriverOutcome) -> DriverOutcome:
    if outcome.interrupted_by:
        raise make_interrupted(outcome.interrupted_by)
    if outcome.error is not None:
        raise rebuilt_error(*outcome.error)
    if outcome.failure is not None:
        raise run_error(outcome.failure, outcome.uri)
    return outcome
