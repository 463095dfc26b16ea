"""What the machine does for callbacks: it collects what all ranks report, waits for them, and ends if one raises."""

from __future__ import annotations

from tests.machine.rig import NOTHING, Rig, item, report, reported, running, two_nodes

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.failure_kind import FailureKind
from holdfast.core.machine import Step
from holdfast.core.pending_checkpoints import _RECENT_LIMIT

RAISED = r.RaisedError(where="Broken.after_report", error_type="ValueError", error="no")


def of_rank_1(number: int, at: float, checkpoint: bool = False) -> e.RankReported:
    return e.RankReported(generation=1, rank=1, reports=(item(number, at, checkpoint, {"mine": number}),))


def ranks_reported(iteration: int, at: float, *metrics: dict[str, int], checkpoint: bool = False) -> r.RanksReported:
    return r.RanksReported(at=at, generation=1, iteration=iteration, metrics=metrics, checkpoint=checkpoint)


def finished(rig: Rig, ranks: int, at: float) -> Step:
    for rank in range(ranks):
        last = rig.feed(e.WorkerFinished(generation=1, rank=rank), at)
    return last


def test_what_all_ranks_reported_is_recorded_in_the_order_of_ranks() -> None:
    rig = two_nodes(has_callbacks=True)
    assert rig.feed(of_rank_1(1, 5.0), 5.0) == NOTHING
    both = rig.feed(report(1, 6.0), 6.0)
    assert both == Step([reported(1, 6.0), ranks_reported(1, 6.0, {"loss": 1}, {"mine": 1})], [])


def test_a_checkpoint_of_any_rank_is_noted() -> None:
    rig = two_nodes(has_callbacks=True)
    rig.feed(report(1, 5.0), 5.0)
    both = rig.feed(of_rank_1(1, 6.0, checkpoint=True), 6.0)
    assert both.records == [ranks_reported(1, 6.0, {"loss": 1}, {"mine": 1}, checkpoint=True)]


def test_a_rank_that_has_finished_has_reported_nothing() -> None:
    rig = two_nodes(has_callbacks=True)
    rig.feed(report(1, 5.0), 5.0)
    ended = rig.feed(e.WorkerFinished(generation=1, rank=1), 6.0)
    assert ended.records == [ranks_reported(1, 6.0, {"loss": 1}, {})]


def test_reports_that_rank_0_never_made_are_not_recorded() -> None:
    rig = two_nodes(has_callbacks=True)
    rig.feed(of_rank_1(1, 5.0), 5.0)
    assert finished(rig, 2, 6.0) == Step([], [c.FinishCallbacks(generation=1)])


def test_a_rank_that_lags_far_behind_is_not_waited_for() -> None:
    rig = two_nodes(has_callbacks=True)
    for number in range(1, _RECENT_LIMIT + 1):
        assert len(rig.feed(report(number, 5.0), 5.0).records) == 1
    one_more = rig.feed(report(_RECENT_LIMIT + 1, 5.0), 5.0)
    assert one_more.records[1:] == [ranks_reported(1, 5.0, {"loss": 1}, {})]


def test_without_callbacks_nothing_is_collected() -> None:
    rig = two_nodes()
    rig.feed(of_rank_1(1, 5.0), 5.0)
    assert rig.feed(report(1, 6.0), 6.0) == Step([reported(1, 6.0)], [])


def test_the_run_finishes_after_its_callbacks() -> None:
    rig = running(has_callbacks=True)
    assert finished(rig, 1, 5.0) == Step([], [c.FinishCallbacks(generation=1)])
    assert rig.feed(e.TimePassed(), 6.0) == NOTHING
    done = rig.feed(e.CallbacksFinished(generation=1), 7.0)
    assert done == Step([r.RunFinished(at=7.0)], [c.EndRun(status=c.RunStatus.FINISHED)])


def test_an_error_of_a_callback_stops_the_workers_and_fails_the_run() -> None:
    rig = running(has_callbacks=True, max_failures=-1)
    assert rig.feed(e.CallbackFailed(raised=RAISED), 5.0).commands == [c.StopWorkers(generation=1, agents=("a",))]
    ended = rig.feed(e.WorkersStopped(generation=1, agent="a"), 6.0)
    why = "the callback Broken.after_report raised ValueError: no"
    assert ended.records[-1] == r.RunFailed(at=6.0, error=why, error_type=FailureKind.OTHER, raised=RAISED)
    assert ended.commands == [c.EndRun(status=c.RunStatus.FAILED)]


def test_an_error_of_the_last_callback_fails_a_run_whose_function_has_returned() -> None:
    rig = running(has_callbacks=True)
    finished(rig, 1, 5.0)
    rig.feed(e.CallbackFailed(raised=RAISED), 6.0)
    assert rig.feed(e.CallbacksFinished(generation=1), 6.0) == NOTHING
    ended = rig.feed(e.WorkersStopped(generation=1, agent="a"), 7.0)
    assert isinstance(ended.records[-1], r.RunFailed)
