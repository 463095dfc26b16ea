"""The narrative of a run: records in, exact lines out."""

from __future__ import annotations

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st
from tests.machine.rig import checkpoint_of, died, exited, joined, report, running, stored
from tests.sim.simulation import Simulation

from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.retention import RetentionRule
from holdfast.views.formatting import utc_time
from holdfast.views.narrative import Narrator, narrate


def short(at: float) -> str:
    return f"{at:05.1f}"


def narrated(records: list[r.Record]) -> list[str]:
    return list(narrate(records, short))


def test_narrative_of_a_run_with_a_failure_and_a_dead_driver() -> None:
    rig = running(workers=2, max_failures=2, retention=RetentionRule(1))
    for number, now in ((1, 4.0), (2, 6.0)):
        rig.feed(report(number, now, checkpoint=number == 1), now)
        rig.feed(report(number, now, rank=1), now)
    found = stored(0, 1)
    rig.feed(
        e.CheckpointStored(ticket=e.Ticket(1, 1), stored=found, uploaded_bytes=1, elapsed_s=0.25),
        6.5,
    )
    echo = died(0, "raised RuntimeError: broken pipe", error_type="RuntimeError", error="Broken pipe")
    rig.feed(exited(echo), 7.0)
    rig.feed(exited(died(1)), 7.1)
    rig.feed(e.WorkersStopped(generation=1, agent="a"), 7.2)
    rig.feed(e.WorkersStarted(generation=2, agent="a"), 7.4)
    rig.feed(report(1, 8.0, checkpoint=True, generation=2), 8.0)
    rig = rig.next_controller()
    rig.feed(e.ControllerBegan(epoch=2, host="head", pid=102, stored=(found,)), 30.0)
    rig.feed(joined("b", 2), 31.0)
    rig.feed(e.AgentPrepared(agent="b"), 32.0)
    rig.feed(e.WorkersStarted(generation=3, agent="b"), 33.0)
    for rank in (0, 1):
        rig.feed(report(1, 35.0, checkpoint=True, rank=rank, generation=3), 35.0)
    rig.feed(checkpoint_of(1, stored(1, 2, generation=3)), 36.0)
    rig.feed(e.PinsFound(), 36.0)
    rig.feed(e.CheckpointRemoved(name=found.name, token=found.token), 36.0)
    for rank in (0, 1):
        rig.feed(e.WorkerFinished(generation=3, rank=rank), 37.0)
    assert narrated(rig.journal) == [
        "000.0  The run began on head (process 101), to train on 2 workers.",
        "001.0  Agent a joined from host-a with 2 slots.",
        "002.0  Generation 1 starts from the beginning: 2 workers on a.",
        "003.0  Generation 1 runs, 3.00 s after the controller started.",
        "006.5  checkpoint_000000 of iteration 1 was committed (0 B in 0.25 s).",
        "007.2  Generation 1 failed at iteration 2: rank 1 on host-a was killed by SIGKILL. Rank 0 failed with it. "
        "This is failure 1.",
        "007.2  Generation 2 starts from checkpoint_000000 at iteration 1: 2 workers on a. Iteration 2 is done again.",
        "007.4  Generation 2 runs, 0.40 s after the failure was noticed.",
        "030.0  A new controller on head (process 102) took the run on, 22.0 s after the last word of the one before.",
        "031.0  Agent b joined from host-b with 2 slots.",
        "032.0  Generation 3 starts from checkpoint_000000 at iteration 1: 2 workers on b. Iteration 2 is done again.",
        "033.0  Generation 3 runs, 3.00 s after the controller started.",
        "036.0  checkpoint_000001 of iteration 2 was committed.",
        "036.0  checkpoint_000000 was let go, as the retention rule says.",
        "037.0  The run finished after 2 iterations. Of 37.0 s, 14% went into training that was kept; "
        "2 iterations (3.60 s) had to be done again; 1 recovery, the slowest 0.40 s.",
    ]


def test_narrative_of_a_run_that_backs_off_and_is_stopped() -> None:
    rig = running(max_failures=5)
    rig.feed(exited(died(0)), 5.0)
    rig.feed(e.WorkersStopped(generation=1, agent="a"), 5.0)
    rig.feed(exited(died(0), 2), 6.0)
    rig.feed(e.WorkersStopped(generation=2, agent="a"), 6.0)
    rig.feed(e.TimePassed(), 7.0)
    rig.feed(e.StopRequested(why="Ctrl+C"), 8.0)
    rig.feed(e.WorkersStopped(generation=3, agent="a"), 9.0)
    again = rig.next_controller()
    again.feed(e.ControllerBegan(epoch=2, host="head", pid=102), 20.0)
    assert narrated(again.journal)[4:] == [
        "005.0  Generation 1 failed at iteration 0: rank 0 on host-a was killed by SIGKILL. This is failure 1.",
        "005.0  Generation 2 starts from the beginning: 1 worker on a.",
        "006.0  Generation 2 failed at iteration 0: rank 0 on host-a was killed by SIGKILL. This is failure 2.",
        "007.0  Generation 3 starts from the beginning after a wait of 1.00 s: 1 worker on a.",
        "009.0  Generation 3 was stopped at iteration 0: Ctrl+C.",
        "009.0  The run was interrupted at iteration 0 (Ctrl+C); the same call continues it.",
        "020.0  The run was continued on head (process 102) 11.0 s after it had ended.",
    ]


def test_narrative_of_all_other_records() -> None:
    records: list[r.Record] = [
        r.AgentRemoved(at=1.0, agent="a", host="host-a", why="its connection closed"),
        r.AgentRefused(at=1.2, agent="b", why="Agent b gets no workers of this run."),
        r.DrainStarted(at=1.5, agent="b", host="host-b", why="holdfast drain"),
        r.DrainStarted(at=1.6, agent="b", host="host-b", why="SIGTERM", deadline=26.6),
        r.AgentAdded(at=1.65, agent="c", host="host-c", slots=2, spare=True),
        r.BoundsChanged(at=1.7, workers_min=2, workers_max=6, why="holdfast scale"),
        r.BoundsChanged(at=1.8, workers_min=1, workers_max=1, why="holdfast scale"),
        r.CheckpointAbandoned(at=2.0, generation=1, iteration=4, why="the disk is full."),
        r.CheckpointDamaged(at=3.0, name="checkpoint_000001", why="a hash differs"),
        r.RanksLagging(at=4.0, generation=1, number=5, ranks=(1, 2, 3)),
        r.RunFailed(at=5.0, error="rank 0 raised ValueError"),
        r.ControllerStarted(at=6.0, epoch=1, host="head", pid=1, workers=1),
        r.RunFailed(at=7.0, error="no space left."),
        r.ControllerStarted(at=190.0, epoch=2, host="head", pid=2, workers=1),
    ]
    assert narrated(records) == [
        "001.0  Agent a on host-a was lost: its connection closed.",
        "001.2  Agent b gets no workers of this run.",
        "001.5  Agent b on host-b is being drained (holdfast drain).",
        "001.6  Agent b on host-b is being drained (SIGTERM), and is gone in 25.0 s.",
        "001.6  Agent c joined from host-c with 2 slots as a spare.",
        "001.7  The run may have 2 to 6 workers from here on: holdfast scale.",
        "001.8  The run may have 1 worker from here on: holdfast scale.",
        "002.0  The checkpoint of iteration 4 was given up: the disk is full.",
        "003.0  checkpoint_000001 is not used any more: a hash differs.",
        "004.0  A checkpoint waits for ranks 1-3, still short of report 5.",
        "005.0  The run failed after 0 iterations: rank 0 raised ValueError.",
        "006.0  The run began on head (process 1), to train on 1 worker.",
        "007.0  The run failed after 0 iterations: no space left.",
        "190.0  The run was started again on head (process 2) 3 min 3 s after it had failed; "
        "failures are counted anew.",
    ]


def test_every_journal_has_a_narrative() -> None:
    for seed in range(30):
        simulation = Simulation(seed)
        ending = simulation.run()
        lines = list(narrate(simulation.records()))
        assert f"The run {ending}" in lines[-1]
        assert all(line.endswith(".") or line.endswith("it.") for line in lines)


def test_a_narrative_continues_as_records_come_in() -> None:
    rig = running()
    narrator = Narrator(short)
    assert [line for record in rig.journal if (line := narrator.line(record))] == narrated(rig.journal)


@given(st.integers(-62_135_596_800, 253_402_300_799))
def test_narrative_times_are_utc(at: int) -> None:
    expected = datetime.fromtimestamp(0, UTC).fromordinal(at // 86_400 + 719_163)
    clock = f"{at % 86_400 // 3600:02d}:{at % 3600 // 60:02d}:{at % 60:02d}"
    assert utc_time(at + 0.9) == f"{expected:%Y}".rjust(4, "0") + f"{expected:-%m-%d} {clock}"


def test_agents_that_are_lost_at_once_are_one_line() -> None:
    lost = [r.AgentRemoved(at=at, agent=name, host="h", why="gone") for name, at in (("a", 1), ("b", 1.5), ("c", 2.0))]
    later = r.AgentRemoved(at=3.5, agent="d", host="h", why="gone")
    assert list(narrate([*lost, later], short)) == [
        "001.0  The run lost 3 agents, a, b and c: gone.",
        "003.5  Agent d on h was lost: gone.",
    ]
    assert len(list(narrate(lost, short, fold=False))) == 3


def committed(index: int, at: float) -> r.CheckpointCommitted:
    return r.CheckpointCommitted(
        at=at, name=f"checkpoint_{index:06d}", index=index, iteration=index + 1, generation=1, metrics={}
    )


def test_many_commits_in_a_row_are_one_line() -> None:
    records: list[r.Record] = []
    for index in range(10):
        records.append(committed(index, 10.0 + index))
        records.append(r.Reported(at=10.0 + index, generation=1, iteration=index + 2, metrics={}))
        if index >= 3:
            records.append(r.CheckpointDeleted(at=10.0 + index, name=f"checkpoint_{index - 3:06d}"))
    lost = r.AgentRemoved(at=30.0, agent="a", host="host-a", why="its connection closed")
    few: list[r.Record] = [committed(10 + n, 31.0 + n) for n in range(4)]
    assert list(narrate([*records, lost, *few], short)) == [
        "010.0  checkpoint_000000 of iteration 1 was committed.",
        "019.0  9 more checkpoints were committed, the last checkpoint_000009 of iteration 10; "
        "7 were let go, as the retention rule says.",
        "030.0  Agent a on host-a was lost: its connection closed.",
        *(f"{31 + n:05.1f}  checkpoint_{10 + n:06d} of iteration {11 + n} was committed." for n in range(4)),
    ]
    assert len(list(narrate(records, short, fold=False))) == 17


def _failing(number: int, at: float, iteration: int = 3, cause: str = "was killed by SIGKILL") -> list[r.Record]:
    failure = r.WorkerFailure(rank=0, cause=cause, host="host-a")
    return [
        r.GenerationStarted(at=at, generation=number, world_size=1, agents=("a",), iteration=iteration),
        r.GenerationRunning(at=at, generation=number),
        r.GenerationEnded(
            at=at + 1,
            generation=number,
            why="?",
            detected_at=at + 1,
            iteration=iteration,
            counted=True,
            failures=(failure,),
        ),
    ]


def test_generations_that_fail_in_the_same_way_are_one_line() -> None:
    records: list[r.Record] = [r.ControllerStarted(at=0.0, epoch=1, host="head", pid=1, workers=1)]
    for number in range(1, 6):
        records += _failing(number, 10.0 * number)
    records += _failing(6, 60.0, cause="called sys.exit(1)")
    started, running, first, same, *rest = narrated(records)[1:]
    assert (started[:5], running[:5]) == ("010.0", "010.0")
    assert first.startswith("011.0  Generation 1 failed at iteration 3: rank 0 on host-a was killed by SIGKILL.")
    assert same == "051.0  Generations 2 to 5 failed in the same way."
    assert [line[:5] for line in rest] == ["060.0", "060.0", "061.0"]
    assert len(list(narrate(records, short, fold=False))) == 1 + 6 * 3


def test_two_failures_or_such_with_progress_are_told_one_by_one() -> None:
    for records in ([*_failing(1, 10.0), *_failing(2, 20.0)], [*_failing(1, 10.0), *_failing(2, 20.0, iteration=4)]):
        assert narrated(records) == list(narrate(records, short, fold=False))


def test_what_was_told_already_is_not_told_again() -> None:
    lagging = [r.RanksLagging(at=1.0 + n, generation=1, number=5 + n, ranks=(1, 2)) for n in range(5)]
    failed = [r.RemovalFailed(at=6.0 + n, name="checkpoint_000001", why="no permission") for n in range(5)]
    assert [line[:5] for line in narrated([*lagging, *failed])] == ["001.0", "006.0"]
    assert len(list(narrate([*lagging, *failed], short, fold=False))) == 10
