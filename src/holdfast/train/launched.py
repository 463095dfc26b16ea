"""`fit()` in a script that `holdfast launch` runs on several hosts: one of them leads, and all return the same result.

Every host runs the script. Its `fit()` tells the launcher (`holdfast.launch`) that it could lead, and waits: until its
host is elected, then this process is the driver, and takes over what another leader has begun; or until the leader's
`fit()` has ended, whose result it then reads from storage. Where the storage is a directory, others may not see it: so
the leader sends what came of the run along. A leader that finds itself fenced waits again. `Tuner.fit()` does the same
with an experiment (`tune.launched`).
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import cache, partial
from typing import TypeVar

import msgspec

from holdfast.control.failures import run_error
from holdfast.control.history import RUN_FILE, read_history, run_id
from holdfast.control.request import TrainOutcome, TrainRequest
from holdfast.control.run import run_training
from holdfast.control.run_control import STOPPED_BY_CLIENT
from holdfast.control.view import read_reports, read_run
from holdfast.core.commands import RunStatus
from holdfast.core.records import RunFailed
from holdfast.engines.engine import EngineName
from holdfast.errors import ConfigError, Fenced, NotFound, RunError
from holdfast.rendezvous.launcher_messages import (
    FitEnded,
    FitEntered,
    FitFenced,
    FitResult,
    LauncherConnection,
    Lead,
    Listening,
    PublishedRun,
)
from holdfast.storage.locate import open_store
from holdfast.storage.store import Store
from holdfast.train.remote_driver import DriverOutcome, decode_outcome, encode_outcome
from holdfast.wire.join_string import format_address, parse_join_string

__all__ = [
    "Publish",
    "find_launcher",
    "fit_launched",
    "lead_or_follow",
    "listen_at",
    "published_run",
    "read_sent",
    "result_for_all",
]

_T = TypeVar("_T")
_Fit = tuple[TrainRequest, TrainOutcome, DriverOutcome | None]
"""The last if this host does not see the storage."""
Publish = Callable[[str, PublishedRun], None]
"""To be called with the join string and the run once agents are accepted."""
_FENCES_MAX = 5
_SENT_MAX_BYTES = 384 * 1024
"""Of what came of a run, compressed: etcd takes 1.5 MB at once."""
_REPORTS_MAX_BYTES = 4 * 1024 * 1024
"""Of result.json: more than that is not read only to be sent."""
_one_at_a_time = threading.Lock()
_fits = 0
"""How many times this process has called fit(): the same on every host, for all run the same script."""


@cache
def find_launcher() -> LauncherConnection | None:
    """The launcher of this process; None if it was started by something else."""
    return LauncherConnection.inherited(os.environ)


def fit_launched(request: TrainRequest) -> _Fit:
    """Lead the run, or wait for whoever does: the request with the run that was led, and what came of it. A process
    that no launcher started, such as a child of the script's, runs it by itself."""

    def lead(order: Lead, publish: Publish) -> tuple[_Fit, FitResult | None]:
        leading = _as_leader(request, order, publish)
        outcome = run_training(leading)
        run = published_run(outcome.store, leading.storage_path, leading.name)
        read = partial(_outcome_of_run, outcome.store)
        return (leading, outcome, None), result_for_all(run, outcome.status, outcome.interrupted_by, read)

    return lead_or_follow(lead, partial(_follow, request), lambda: (request, run_training(request), None))


def lead_or_follow(
    lead: Callable[[Lead, Publish], tuple[_T, FitResult | None]],
    follow: Callable[[FitResult], _T],
    alone: Callable[[], _T],
) -> _T:
    """Wait to be elected, or for the result of whoever was; `alone` where no launcher started this process.

    `lead` runs or takes over what its order names; it gives what `fit()` makes its result of here, and how it ended
    for all hosts (`result_for_all`).
    """
    global _fits
    launcher = find_launcher()
    if launcher is None:
        return alone()
    if not _one_at_a_time.acquire(blocking=False):
        raise ConfigError(
            "Two fit() at a time in one script cannot be told apart on the other hosts of `holdfast launch`: call them "
            "one after the other."
        )

    def publish(join_string: str, run: PublishedRun) -> None:
        launcher.send(Listening(join=parse_join_string(join_string), run=run))

    try:
        _fits += 1
        launcher.send(FitEntered(number=_fits))
        fences = 0
        while True:
            answer = launcher.receive()
            if not isinstance(answer, Lead):
                return follow(answer.result)
            try:
                outcome, result = lead(answer, publish)
            except Fenced:
                fences += 1
                if fences == _FENCES_MAX:
                    raise  # by somebody who takes no part in the rendezvous
                launcher.send(FitFenced())
                continue
            launcher.send(FitEnded(result=result))
            return outcome
    finally:
        _one_at_a_time.release()


def published_run(store: Store, storage_path: str, name: str) -> PublishedRun:
    """What all hosts are told of a run, or experiment, whose directory is the root of `store`."""
    return PublishedRun(
        storage_path=storage_path,
        name=name,
        id=run_id(store.get(RUN_FILE)),
        is_directory=store.local_root is not None,
    )


def read_sent(store: Store, result: FitResult) -> DriverOutcome | None:
    """What the leader has sent, if its run, or experiment, is not in the storage that this host sees; None if it is."""
    try:
        found = run_id(store.get(RUN_FILE))
    except NotFound:
        found = None
    # This host may have led a run of that name before, in a directory of its own.
    if found is not None and found in ("", result.run.id or found):
        return None
    if result.outcome:
        return decode_outcome(zlib.decompress(result.outcome))
    raise RunError(
        f"The run {store.uri} has ended ({result.status}) on {result.run.host}, but this host does not see it "
        "there, and its result is too large to be sent: use storage that all hosts share."
    )


def listen_at(order: Lead) -> str:
    """Where the leader accepts agents, if nothing else was given."""
    return format_address(order.address, 0)


def result_for_all(
    run: PublishedRun, status: RunStatus, interrupted_by: str, read: Callable[[], DriverOutcome]
) -> FitResult | None:
    """None if a signal stopped this host alone: another takes over. `read` gives what came of it."""
    is_interrupted = status is RunStatus.INTERRUPTED
    if is_interrupted and interrupted_by != STOPPED_BY_CLIENT:
        return None
    sent = _encode(read()) if run.is_directory and not is_interrupted else b""
    return FitResult(run=run, status=status.value, interrupted_by=interrupted_by, outcome=sent)


def _encode(outcome: DriverOutcome) -> bytes:
    """Without the reports if they are too much for a rendezvous; empty if the rest is."""
    for sent in (outcome, msgspec.structs.replace(outcome, reports=None)):
        data = zlib.compress(encode_outcome(sent))
        if len(data) <= _SENT_MAX_BYTES:
            return data
    return b""


def _outcome_of_run(store: Store) -> DriverOutcome:
    ended = read_history(store).durable.outcome
    if isinstance(ended, RunFailed):
        return DriverOutcome(uri=store.uri, failure=ended)
    return DriverOutcome(
        uri=store.uri,
        view=replace(read_run(store), error=None),
        reports=read_reports(store) if _has_few_reports(store) else None,
    )


def _has_few_reports(store: Store) -> bool:
    try:
        return store.size("result.json") <= _REPORTS_MAX_BYTES
    except NotFound:
        return True


def _follow(request: TrainRequest, result: FitResult) -> _Fit:
    """What the leader's outcome is here."""
    request = _with_run(request, result.run)
    store = open_store(request.storage_path, request.filesystem).sub(request.name)
    status = RunStatus(result.status)
    sent = None if status is RunStatus.INTERRUPTED else read_sent(store, result)
    error = run_error(sent.failure, sent.uri) if sent is not None and sent.failure is not None else None
    outcome = TrainOutcome(status=status, uri=store.uri, store=store, interrupted_by=result.interrupted_by, error=error)
    return request, outcome, sent


def _with_run(request: TrainRequest, run: PublishedRun | None) -> TrainRequest:
    """The same run as the first leader's, which may have made up another name, or have another home directory."""
    if run is None:
        return request
    storage_path = run.storage_path if request.filesystem is None else request.storage_path
    return replace(request, storage_path=storage_path, name=run.name)


def _as_leader(request: TrainRequest, order: Lead, publish: Publish) -> TrainRequest:
    request = _with_run(request, order.run)

    def on_listening(join_string: str) -> None:
        with closing(open_store(request.storage_path, request.filesystem).sub(request.name)) as store:
            publish(join_string, published_run(store, request.storage_path, request.name))

    # Whoever led before is fenced, whether it has died or only lost the rendezvous.
    request = replace(request, takeover=request.takeover or order.run is not None, on_listening=on_listening)
    if request.local_mode:
        return request
    if order.workers is not None:
        least, most = order.workers
        request = replace(request, min_workers=least, max_workers=most, last_call_s=order.last_call_s)
    if request.listen is None:
        request = replace(request, listen=listen_at(order))
    return replace(request, engine=EngineName.JOIN)
