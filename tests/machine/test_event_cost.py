"""What an event costs the machine does not grow with the number of agents and ranks: counted in instructions."""

from __future__ import annotations

from typing import Any

import pytest
from tests.machine.rig import began, item
from tests.opcodes import count_opcodes

from holdfast.core import events as e
from holdfast.core.machine import deadline, step
from holdfast.core.records import WorkerFailure
from holdfast.core.spec import RunSpec
from holdfast.core.state import State

FEW, MANY = 8, 800


class Machine:
    """One rank on each of `size` agents; remembers what the last event cost."""

    def __init__(self, size: int, **settings: Any) -> None:
        settings = {"progress_timeout_s": 60.0, "max_failures": 3} | settings
        self.state = State(RunSpec(workers_min=size, workers_max=size, **settings))
        self.size, self.now = size, 0.0
        self.feed(began())

    def feed(self, event: e.Event) -> int:
        self.now += 0.001
        cost = count_opcodes(step, self.state, event, self.now)
        return cost + count_opcodes(deadline, self.state)

    def join(self, number: int) -> int:
        name = f"agent-{number}"
        joined = self.feed(e.AgentJoined(agent=name, host=name, slots=1))
        return joined + self.feed(e.AgentPrepared(agent=name))

    def run(self) -> Machine:
        for number in range(self.size):
            self.join(number)
        for number in range(self.size):
            self.feed(e.WorkersStarted(generation=1, agent=f"agent-{number}", pids={number: 1}))
        return self

    def report(self, rank: int, number: int, checkpoint: bool = False) -> int:
        reports = (item(number, self.now, checkpoint, {"loss": 1.0} if rank == 0 else None),)
        return self.feed(e.RankReported(generation=1, rank=rank, reports=reports))


def _cost_of_an_agent(size: int) -> int:
    machine = Machine(size)
    return [machine.join(number) for number in range(size - 1)][-1]


def _cost_of_a_start(size: int) -> int:
    machine = Machine(size)
    for number in range(size):
        machine.join(number)
    machine.feed(e.WorkersStarted(generation=1, agent="agent-0", pids={0: 1}))
    return machine.feed(e.WorkersStarted(generation=1, agent="agent-1", pids={1: 1}))


def _cost_of_a_report(size: int) -> int:
    machine = Machine(size).run()
    machine.report(0, 1)
    return machine.report(1, 1)


def _cost_of_a_part(size: int) -> int:
    machine = Machine(size).run()
    machine.report(0, 1, checkpoint=True)
    return machine.report(1, 1, checkpoint=True)


def _cost_of_a_question(size: int) -> int:
    machine = Machine(size).run()
    for rank in range(size - 1):
        machine.report(rank, 1)
        machine.feed(e.WorkerWaited(generation=1, rank=rank, waiting=True, until_report=1))
    return machine.feed(e.WorkerWaited(generation=1, rank=0, waiting=True))


def _cost_of_an_exception(size: int) -> int:
    machine = Machine(size).run()
    for rank in range(size // 2):
        machine.report(rank, 1)
        failure = WorkerFailure(rank=rank, cause="raised", error_type="ValueError", error="no")
        cost = machine.feed(e.WorkerExited(generation=1, failure=failure))
    return cost


def _cost_of_a_lost_agent(size: int) -> int:
    machine = Machine(size).run()
    machine.report(0, 1, checkpoint=True)
    return [machine.feed(e.AgentLost(agent=f"agent-{n}", why="it is gone")) for n in range(size // 2)][-1]


def _cost_of_a_finish(size: int) -> int:
    machine = Machine(size).run()
    return [machine.feed(e.WorkerFinished(generation=1, rank=rank)) for rank in range(size - 1)][-1]


@pytest.mark.parametrize(
    "cost",
    [
        _cost_of_an_agent,
        _cost_of_a_start,
        _cost_of_a_report,
        _cost_of_a_part,
        _cost_of_a_question,
        _cost_of_an_exception,
        _cost_of_a_lost_agent,
        _cost_of_a_finish,
    ],
    ids=lambda cost: cost.__name__.removeprefix("_cost_of_"),
)
def test_an_event_costs_the_same_with_many_ranks_as_with_few(cost: Any) -> None:
    assert cost(MANY) == pytest.approx(cost(FEW), rel=0.2)
