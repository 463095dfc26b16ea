"""The invariants themselves: each impossible state is refused with its own sentence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.machine.rig import Rig, died, report, two_nodes

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.invariants import Monitor, check
from holdfast.core.machine import Step
from holdfast.core.state import Generation, Pending, State, StopKind, StopReason


def busy() -> Rig:
    """Two ranks; a checkpoint is being persisted, the next is reported by rank 0."""
    rig = two_nodes()
    for rank in (0, 1):
        rig.feed(report(1, 5.0, checkpoint=True, rank=rank), 5.0)
    rig.feed(report(2, 6.0, checkpoint=True), 6.0)
    return rig


def current(state: State) -> Generation:
    assert state.generation is not None
    return state.generation


def _persist_two(state: State) -> None:
    state.pending[e.Ticket(1, 2)].complete = state.pending[e.Ticket(1, 2)].persisting = True


def _lose_order(state: State) -> None:
    first, second = state.pending.values()
    first.persisting, second.persisting, second.complete = False, True, True


def _pend_for_the_dead(state: State) -> None:
    state.pending[e.Ticket(0, 1)] = Pending(e.Ticket(0, 1), 1, 0.0, 2, parts={0: "a"})


def _overspend(state: State) -> None:
    state.durable.failures = 2


def _place_twice(state: State) -> None:
    current(state).places = (c.Place(agent="a", node_rank=0, ranks=(0, 1)), c.Place(agent="b", node_rank=1, ranks=(1,)))


def _ignore_a_failure(state: State) -> None:
    current(state).failures.append(died(1))


def _forget_to_stop(state: State) -> None:
    current(state).stop_reason = StopReason(StopKind.STOP, "Ctrl+C", 6.0)


def _stay_without_workers(state: State) -> None:
    current(state).stop_reason, current(state).stop_sent = StopReason(StopKind.STOP, "Ctrl+C", 6.0), True
    current(state).alive.clear()


def _go_back_a_generation(state: State) -> None:
    current(state).number = 0


def _wait_for_nothing(state: State) -> None:
    state.generation = None
    state.pending.clear()


def _keep_workers(state: State) -> None:
    state.stop = "Ctrl+C"


CASES: list[tuple[Callable[[State], None], str]] = [
    (_persist_two, "are persisted at once"),
    (_lose_order, "is persisted before"),
    (_pend_for_the_dead, "waits for ranks of a generation that is gone"),
    (_overspend, "2 failures were counted with a budget of 0"),
    (_place_twice, "are not each placed once"),
    (_ignore_a_failure, "failed and the generation goes on"),
    (_forget_to_stop, "was not told to stop"),
    (_stay_without_workers, "nothing is alive"),
    (_go_back_a_generation, "generation"),
    (_wait_for_nothing, "waits for nothing"),
    (_keep_workers, "keeps its workers"),
]


@pytest.mark.parametrize(("spoil", "sentence"), CASES, ids=lambda case: getattr(case, "__name__", ""))
def test_an_impossible_state_is_refused(spoil: Callable[[State], None], sentence: str) -> None:
    state = busy().state
    check(state)
    spoil(state)
    with pytest.raises(AssertionError, match=sentence):
        check(state)


def test_counters_and_generations_only_grow() -> None:
    state = busy().state
    monitor = Monitor(state)
    current(state).counts[0] = 1
    with pytest.raises(AssertionError, match="became fewer"):
        monitor.after(Step([], []), 7.0)


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        (Step([], [c.EndRun(status=c.RunStatus.FINISHED)]), "ended without a word, or twice"),
        (Step([r.Reported(at=1.0, generation=7, iteration=1, metrics={})], []), "report of generation 7 counted"),
        (Step([r.CheckpointDeleted(at=1.0, name="x")], []), "the newest, x, was let go"),
        (
            Step([r.GenerationStarted(at=1.0, generation=1, world_size=1, agents=("a",), iteration=0)], []),
            "generation 1 came after 1",
        ),
    ],
)
def test_an_impossible_step_is_refused(step: Step, sentence: str) -> None:
    monitor = Monitor(busy().state)
    with pytest.raises(AssertionError, match=sentence):
        monitor.after(step, 7.0)
