"""Where the time went: every second in one bucket, whatever happened, and the reports that count."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.machine.rig import committed, died, reported, stored
from tests.sim.checkers import reports_that_count
from tests.sim.simulation import Simulation

from holdfast.core import records as r
from holdfast.core.accounting import Account, Recovery
from holdfast.core.curve import effective_reports
from holdfast.core.summary import summarize


def controller(at: float, epoch: int = 1) -> r.ControllerStarted:
    return r.ControllerStarted(at=at, epoch=epoch, host="head", pid=1, workers=2)


def generation(at: float, number: int = 1, iteration: int = 0) -> r.GenerationStarted:
    return r.GenerationStarted(at=at, generation=number, world_size=2, agents=("a",), iteration=iteration)


def runs(at: float, number: int = 1) -> r.GenerationRunning:
    return r.GenerationRunning(at=at, generation=number)


def failed(at: float, detected_at: float, iteration: int, number: int = 1) -> r.GenerationEnded:
    return r.GenerationEnded(
        at=at,
        generation=number,
        why="rank 1 was killed by SIGKILL",
        detected_at=detected_at,
        iteration=iteration,
        counted=True,
        failures=(died(1), died(0, "raised RuntimeError", error_type="RuntimeError", error="Broken pipe")),
    )


def account(records: list[r.Record]) -> Account:
    return summarize(records).account


START: list[r.Record] = [controller(0.0), generation(2.0), runs(3.0)]


def test_an_undisturbed_run_is_all_training_time() -> None:
    records: list[r.Record] = [*START, reported(1, 5.0), reported(2, 8.0), r.RunFinished(at=9.0)]
    found = account(records)
    assert found == Account(start_up_s=3.0, training_kept_s=6.0)
    assert found.wall_s == 9.0
    assert found.goodput == pytest.approx(6 / 9)


def test_checkpoint_stalls_are_not_training_time() -> None:
    slow = r.Reported(at=5.0, generation=1, iteration=1, metrics={}, checkpoint=True, stall_s=0.5)
    endless = r.Reported(at=6.0, generation=1, iteration=2, metrics={}, stall_s=50.0)
    assert account([*START, slow, endless]) == Account(start_up_s=3.0, training_kept_s=1.5, stall_s=1.5)


def test_time_since_the_last_checkpoint_is_lost_at_a_failure() -> None:
    records: list[r.Record] = [
        *START,
        reported(1, 5.0, checkpoint=True),
        committed(stored(0, 1), 5.5),
        reported(2, 7.0),
        failed(8.5, detected_at=8.0, iteration=2),
        generation(10.0, 2, iteration=1),
        runs(10.25, 2),
        reported(2, 12.0, generation=2),
        r.RunFinished(at=12.5),
    ]
    found = account(records)
    assert found == Account(
        start_up_s=3.0,
        training_kept_s=2.0 + 1.75 + 0.5,
        training_lost_s=2.0 + 1.0,
        recovery_s=0.5 + 0.25,
        waiting_s=1.5,
        lost_iterations=1,
        recoveries=(
            Recovery(
                generation=1,
                cause=died(1),
                why="rank 1 was killed by SIGKILL",
                ranks=(0, 1),
                lost_iterations=1,
                elapsed_s=2.25,
            ),
        ),
    )
    assert found.wall_s == 12.5


def test_a_dead_driver_counts_as_down_time_from_its_last_record() -> None:
    records: list[r.Record] = [
        *START,
        reported(1, 5.0, checkpoint=True),
        committed(stored(0, 1), 6.0),
        controller(20.0, 2),
        generation(21.0, 2, iteration=1),
        runs(22.0, 2),
        reported(2, 24.0, generation=2),
    ]
    assert account(records) == Account(
        start_up_s=3.0 + 2.0, training_kept_s=2.0 + 2.0, training_lost_s=1.0, down_s=14.0
    )


def test_a_stopped_run_counts_as_down_time_until_resumed() -> None:
    ended = r.GenerationEnded(at=7.0, generation=1, why="Ctrl+C", detected_at=6.0, iteration=1)
    records: list[r.Record] = [
        *START,
        reported(1, 5.0),
        ended,
        r.RunInterrupted(at=8.0, why="Ctrl+C"),
        controller(10.0, 2),
    ]
    found = account(records)
    assert found == Account(start_up_s=3.0, training_lost_s=3.0, down_s=4.0, lost_iterations=1)


def test_falling_back_to_an_older_checkpoint_loses_more_time() -> None:
    records: list[r.Record] = [*START]
    for iteration in (1, 2, 3):
        records += [reported(iteration, 3.0 + iteration, checkpoint=True), committed(stored(iteration, iteration), 9.0)]
    records += [generation(9.0, 2, iteration=3), generation(9.0, 3, iteration=1)]
    found = account(records)
    assert (found.training_kept_s, found.training_lost_s, found.lost_iterations) == (1.0, 2.0 + 3.0, 2)


def test_falling_back_into_a_segment_divides_its_time() -> None:
    records: list[r.Record] = [
        *START,
        *(reported(iteration, 3.0 + iteration) for iteration in (1, 2, 3, 4)),
        generation(7.0, 2, 1),
    ]
    found = account(records)
    assert (found.training_kept_s, found.training_lost_s, found.lost_iterations) == (1.0, 3.0, 3)


def test_consecutive_failures_count_as_recoveries_each() -> None:
    records: list[r.Record] = [
        *START,
        failed(4.0, 4.0, 0),
        generation(4.0, 2),
        failed(5.0, 5.0, 0, number=2),
        generation(6.0, 3),
        runs(7.0, 3),
    ]
    assert [(one.generation, one.elapsed_s) for one in account(records).recoveries] == [(1, 3.0), (2, 2.0)]


def test_an_empty_journal_gives_empty_totals() -> None:
    assert account([]) == Account()
    assert account([]).goodput is None
    assert effective_reports([]) == []


@given(st.lists(st.floats(0, 100), max_size=8))
def test_clock_skew_never_gives_negative_times(times: list[float]) -> None:
    records: list[r.Record] = [*START]
    for iteration, at in enumerate(times, start=1):
        records.append(reported(iteration, at))
    found = account([*records, failed(50.0, 10.0, len(times))])
    buckets = (found.start_up_s, found.training_kept_s, found.training_lost_s, found.recovery_s, found.down_s)
    assert all(seconds >= 0 for seconds in buckets)
    assert found.wall_s == pytest.approx(max(50.0, *times, 0.0))


def test_superseded_reports_do_not_count() -> None:
    records: list[r.Record] = [
        *START,
        reported(1, 4.0),
        reported(2, 5.0),
        generation(6.0, 2, iteration=1),
        reported(2, 7.0, generation=2),
        reported(3, 8.0, generation=2),
    ]
    assert effective_reports(records) == [records[3], records[6], records[7]]


@pytest.mark.parametrize("start", range(0, 100, 50))
def test_totals_of_any_journal_add_up(start: int) -> None:
    """Whatever the simulator does to a run, each second is spent once and the two views of reports agree."""
    for seed in range(start, start + 50):
        simulation = Simulation(seed)
        simulation.run()
        records = simulation.records()
        found = account(records)
        assert found.wall_s == pytest.approx(max(one.at for one in records) - records[0].at)
        assert min(found.training_kept_s, found.training_lost_s, found.waiting_s, found.down_s) >= -1e-9
        assert effective_reports(records) == reports_that_count(records)
