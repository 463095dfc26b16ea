"""Admission: exact decisions by example, and its promises for any order of events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from tests.opcodes import count_opcodes

from holdfast.core.admission import Admission, Decision, Gang, Grant, PlacementStrategy, Revoke, capacity
from holdfast.core.resources import Offer, Taken

CPU = Taken(amounts={"CPU": 10_000})
SPREAD, STRICT_SPREAD = PlacementStrategy.SPREAD, PlacementStrategy.STRICT_SPREAD
STRICT_PACK = PlacementStrategy.STRICT_PACK


def offer(cpus: float = 0, *gpus: str, slots: int | None = None) -> Offer:
    return Offer(resources={"CPU": cpus}, gpus=gpus, slots=slots)


def gang(run: str, workers: int, workers_per_agent: int | None = None, **resources: float) -> Gang:
    return Gang(run=run, workers=workers, resources=resources, workers_per_agent=workers_per_agent)


def grant(run: str, agent: str, *workers: Taken) -> Grant:
    return Grant(run=run, agent=agent, workers=workers)


def admission(**offers: Offer) -> Admission:
    made = Admission()
    for agent, one in offers.items():
        assert made.agent_joined(agent, one) == []
    return made


def test_a_gang_is_placed_on_agents_in_the_order_in_which_they_joined() -> None:
    policy = admission(a=offer(2), b=offer(2))
    assert policy.ask(gang("r", 3, CPU=1)) == [grant("r", "a", CPU, CPU), grant("r", "b", CPU)]
    assert policy.waiting == []


def test_a_gang_gets_all_or_nothing() -> None:
    policy = admission(a=offer(2))
    assert policy.ask(gang("r", 3, CPU=1)) == []
    assert policy.held("r") == {}
    assert policy.agent_joined("b", offer(1)) == [grant("r", "a", CPU, CPU), grant("r", "b", CPU)]


def test_a_gang_that_needs_torch_is_placed_where_its_minor_version_is() -> None:
    torches = {"a": "", "b": "1.13.1", "c": "2.13.1+cu126", "d": None}
    policy = admission(**{name: Offer(resources={"CPU": 1}, torch=torch) for name, torch in torches.items()})
    wanted = msgspec.structs.replace(gang("r", 3, CPU=1), torch="2.13.0")
    assert capacity(wanted, [offer(1), Offer(resources={"CPU": 1}, torch="1.13.1")]) == 1
    assert policy.ask(wanted) == []
    assert policy.ask(gang("any", 2, CPU=1)) == [grant("any", "a", CPU), grant("any", "b", CPU)]
    assert policy.agent_joined("e", Offer(resources={"CPU": 1}, torch="2.13.0")) == [
        grant("r", "c", CPU),
        grant("r", "d", CPU),
        grant("r", "e", CPU),
    ]


def elastic(run: str, fewest: int, most: int) -> Gang:
    return Gang(run=run, workers=most, min_workers=fewest, resources={"CPU": 1})


def test_an_elastic_gang_starts_with_what_it_needs_and_takes_more_as_it_comes() -> None:
    policy = admission(a=offer(1))
    assert policy.ask(elastic("r", 2, 4)) == []
    assert policy.agent_joined("b", offer(1)) == [grant("r", "a", CPU), grant("r", "b", CPU)]
    assert not policy.is_waiting("r") and policy.would_take_more("r")
    assert policy.agent_joined("c", offer(8)) == [grant("r", "c", CPU, CPU)]
    assert not policy.would_take_more("r")
    assert policy.agent_lost("c") == [] and not policy.is_waiting("r")
    assert policy.agent_lost("b") == [] and policy.missing("r") == 1


def test_an_elastic_gang_does_not_grow_on_what_a_gang_that_waits_could_use() -> None:
    policy = admission(a=offer(1))
    policy.ask(elastic("elastic", 1, 4))
    assert policy.ask(gang("other", 2, CPU=1)) == []
    assert policy.agent_joined("b", offer(1)) == []
    assert policy.agent_joined("c", offer(2)) == [
        grant("other", "b", CPU),
        grant("other", "c", CPU),
        grant("elastic", "c", CPU),
    ]


def test_an_elastic_gang_leaves_an_agent_that_is_drained_and_waits_only_below_what_it_needs() -> None:
    policy = admission(a=offer(1), b=offer(1))
    policy.ask(elastic("r", 1, 2))
    assert policy.drain("b") == [] and not policy.is_waiting("r")
    assert policy.agent_joined("c", offer(1)) == [grant("r", "c", CPU)]


def test_a_gang_that_is_resized_is_given_more_at_once_and_keeps_what_is_too_much_until_it_gives_it_back() -> None:
    policy = admission(a=offer(2), b=offer(2))
    policy.ask(elastic("one", 1, 2))
    assert policy.resize(elastic("one", 1, 4)) == [grant("one", "b", CPU, CPU)]
    assert policy.resize(elastic("one", 1, 1)) == []
    assert policy.ask(gang("two", 3, CPU=1)) == []
    assert policy.give_back("one", "a", 1) == []
    assert policy.leave("one", "b") == [], "it is still there"
    assert policy.release("one", "b") == [grant("two", "a", CPU), grant("two", "b", CPU, CPU)]
    assert {agent: len(taken) for agent, taken in policy.held("one").items()} == {"a": 1}


def test_a_gang_that_is_resized_below_what_it_waits_for_is_placed() -> None:
    policy = admission(a=offer(1))
    assert policy.ask(elastic("one", 2, 3)) == []
    assert policy.resize(elastic("one", 1, 3)) == [grant("one", "a", CPU)]


def test_places_that_are_being_left_are_given_again_once_they_are_released() -> None:
    policy = admission(a=offer(1), b=offer(1))
    policy.ask(elastic("one", 1, 2))
    policy.resize(elastic("one", 1, 1))
    policy.leave("one", "b")
    assert policy.resize(elastic("one", 1, 2)) == []
    assert policy.release("one", "b") == [grant("one", "b", CPU)]


def test_a_gang_with_other_bounds_is_spread_over_as_many_agents() -> None:
    assert Gang(run="one", workers=6, workers_per_agent=3).with_bounds(2, 8).workers_per_agent == 4
    assert Gang(run="one", workers=6).with_bounds(2, 8) == Gang(run="one", workers=8, min_workers=2)


def test_a_gang_keeps_a_spare_agent_once_its_workers_are_placed_and_another_after_a_loss() -> None:
    policy = admission(a=offer(2))
    wanted = Gang(run="one", workers=2, resources={"CPU": 1}, workers_per_agent=2, spares=1)
    assert policy.ask(wanted) == [grant("one", "a", CPU, CPU)]
    assert policy.would_take_more("one") and not policy.is_waiting("one")
    assert policy.agent_joined("b", offer(3)) == [grant("one", "b", CPU, CPU)]
    assert not policy.would_take_more("one")
    assert policy.agent_joined("c", offer(2)) == []
    assert policy.agent_lost("a") == [grant("one", "c", CPU, CPU)]
    assert policy.missing("one") == 0, "what it holds on the spare is enough"
    assert policy.drain("b") == [] and policy.would_take_more("one")


def test_a_spare_is_not_placed_on_what_a_gang_that_waits_could_use() -> None:
    policy = admission(a=offer(1))
    policy.ask(Gang(run="one", workers=1, resources={"CPU": 1}, spares=1))
    assert policy.ask(gang("two", 2, CPU=1)) == []
    assert policy.agent_joined("b", offer(1)) == []
    assert policy.agent_joined("c", offer(1)) == [grant("two", "b", CPU), grant("two", "c", CPU)]
    assert policy.agent_joined("d", offer(1)) == [grant("one", "d", CPU)]


def test_gangs_are_served_in_the_order_in_which_they_came() -> None:
    policy = admission(a=offer(2))
    policy.ask(gang("first", 2, CPU=1))
    assert policy.ask(gang("second", 2, CPU=1)) == []
    assert policy.ask(gang("third", 1, CPU=1)) == []
    assert policy.withdraw("first") == []
    assert policy.release("first", "a") == [grant("second", "a", CPU, CPU)]
    assert [one.run for one in policy.waiting] == ["third"]


def test_nobody_overtakes_a_waiting_gang_on_what_it_could_use() -> None:
    policy = admission(a=offer(4))
    policy.ask(gang("small", 1, CPU=1))
    assert policy.ask(gang("large", 4, CPU=1)) == []
    assert policy.ask(gang("late", 1, CPU=1)) == []
    policy.withdraw("small")
    assert policy.release("small", "a") == [grant("large", "a", CPU, CPU, CPU, CPU)]


def test_a_gang_that_waits_for_gpus_does_not_hold_up_one_that_needs_none() -> None:
    policy = admission(a=offer(4, "0"))
    policy.ask(gang("g", 1, GPU=1))
    assert policy.ask(gang("g2", 1, GPU=1)) == []
    assert policy.ask(gang("c", 1, CPU=1)) == [grant("c", "a", CPU)]
    assert policy.ask(gang("half", 1, GPU=0.5)) == []


def test_a_gang_that_takes_no_slots_waits_neither_for_those_who_have_them_nor_for_those_who_wait_for_them() -> None:
    policy = admission(a=offer(slots=1))
    policy.ask(gang("training", 1))
    assert policy.ask(gang("next", 1)) == []
    extra = Gang(run="validation", workers=1, slots_per_worker=0)
    assert policy.ask(extra) == [grant("validation", "a", Taken(slots=0))]
    policy.withdraw("validation")
    assert policy.release("validation", "a") == []
    policy.withdraw("training")
    assert policy.release("training", "a") == [grant("next", "a", Taken())]


def test_a_gang_that_fits_no_agent_blocks_nobody_until_one_joins_that_could_hold_it() -> None:
    policy = admission(a=offer(2))
    assert policy.ask(gang("large", 1, CPU=8)) == []
    assert policy.ask(gang("small", 1, CPU=1)) == [grant("small", "a", CPU)]
    assert policy.agent_joined("b", offer(8)) == [grant("large", "b", Taken(amounts={"CPU": 80_000}))]


def test_gangs_that_take_nothing_share_an_agent() -> None:
    policy = admission(a=offer(1))
    assert policy.ask(gang("r", 3)) == [grant("r", "a", Taken(), Taken(), Taken())]
    assert policy.ask(gang("s", 2)) == [grant("s", "a", Taken(), Taken())]


def test_workers_per_agent_spread_a_gang() -> None:
    policy = admission(a=offer())
    assert policy.ask(gang("r", 3, 2)) == []
    two = (Taken(), Taken())
    assert policy.agent_joined("b", offer()) == [grant("r", "a", *two), grant("r", "b", Taken())]


def placed(decisions: list[Decision]) -> dict[str, int]:
    return {one.agent: len(one.workers) for one in decisions if isinstance(one, Grant)}


def strategic(strategy: PlacementStrategy, workers: int, fewest: int | None = None, run: str = "r") -> Gang:
    return Gang(run=run, workers=workers, min_workers=fewest, resources={"CPU": 1}, strategy=strategy)


def test_spread_workers_are_placed_evenly_and_go_where_there_is_room() -> None:
    policy = admission(a=offer(4), b=offer(4), c=offer(1))
    assert placed(policy.ask(strategic(SPREAD, 5))) == {"a": 2, "b": 2, "c": 1}
    assert placed(policy.ask(strategic(SPREAD, 3, run="s"))) == {"a": 2, "b": 1}


def test_spread_workers_that_are_replaced_go_where_the_fewest_of_their_run_are() -> None:
    policy = admission(a=offer(4), b=offer(4), c=offer(4))
    assert placed(policy.ask(strategic(SPREAD, 4))) == {"a": 2, "b": 1, "c": 1}
    assert placed(policy.agent_lost("b")) == {"c": 1}


def test_no_two_strictly_spread_workers_share_an_agent() -> None:
    policy = admission(a=offer(4), b=offer(4))
    assert policy.ask(strategic(STRICT_SPREAD, 3)) == []
    assert placed(policy.agent_joined("c", offer(1))) == {"a": 1, "b": 1, "c": 1}
    assert policy.resize(strategic(STRICT_SPREAD, 4, 4)) == []
    assert policy.agent_lost("a") == [] and policy.missing("r") == 2
    assert placed(policy.agent_joined("d", offer(8))) == {}
    assert placed(policy.agent_joined("e", offer(8))) == {"d": 1, "e": 1}
    wider = strategic(STRICT_SPREAD, 2).with_bounds(4, 4)
    assert capacity(wider, [offer(8)] * 3) == 3


def test_strictly_packed_workers_are_all_on_one_agent_and_move_together() -> None:
    policy = admission(a=offer(1), b=offer(2))
    assert policy.ask(strategic(STRICT_PACK, 3)) == []
    assert placed(policy.agent_joined("c", offer(3))) == {"c": 3}
    assert policy.agent_joined("d", offer(2)) == []
    assert policy.agent_lost("c") == [] and policy.missing("r") == 3
    assert placed(policy.agent_joined("e", offer(4))) == {"e": 3}
    assert policy.drain("e") == []
    assert placed(policy.agent_joined("f", offer(3))) == {"f": 3}


def test_a_strictly_packed_elastic_gang_takes_the_agent_with_most_room_and_grows_only_there() -> None:
    policy = admission(a=offer(1), b=offer(3), c=offer(2))
    other = gang("other", 1, CPU=1)
    assert placed(policy.ask(strategic(STRICT_PACK, 4, 2))) == {"b": 3}
    assert policy.agent_joined("d", offer(8)) == []
    assert placed(policy.ask(other)) == {"a": 1}
    assert placed(policy.agent_lost("b")) == {"d": 4}


def test_a_strictly_packed_gang_waits_only_for_an_agent_that_can_hold_it() -> None:
    policy = admission(a=offer(2), b=offer(4))
    assert placed(policy.ask(gang("first", 4, CPU=1))) == {"a": 2, "b": 2}
    assert policy.ask(strategic(STRICT_PACK, 3)) == []
    assert policy.withdraw("first") == []
    assert policy.release("first", "a") == []
    assert placed(policy.release("first", "b")) == {"b": 3}


def test_capacity_is_of_one_agent_for_strictly_packed_and_of_one_worker_each_for_strictly_spread_gangs() -> None:
    offers = [offer(2), offer(3)]
    assert capacity(strategic(STRICT_PACK, 5), offers) == 3
    assert capacity(strategic(STRICT_SPREAD, 5), offers) == 2
    assert capacity(strategic(SPREAD, 5), offers) == 5


def test_slots_limit_workers_of_all_runs() -> None:
    policy = admission(a=offer(slots=3))
    policy.ask(gang("r", 2))
    assert policy.ask(gang("s", 2)) == []
    policy.withdraw("r")
    assert policy.release("r", "a") == [grant("s", "a", Taken(), Taken())]


def test_a_gang_that_loses_an_agent_keeps_the_rest_and_its_turn() -> None:
    policy = admission(a=offer(2), b=offer(2))
    policy.ask(gang("r", 4, CPU=1))
    assert policy.ask(gang("s", 1, CPU=1)) == []
    assert policy.agent_lost("b") == []
    assert dict(policy.held("r")) == {"a": (CPU, CPU)}
    assert policy.agent_joined("c", offer(2)) == [grant("r", "c", CPU, CPU)]


def test_of_two_gangs_that_lost_places_the_later_gives_its_own_up_to_the_earlier() -> None:
    policy = admission(a=offer(2), b=offer(2), c=offer(4))
    policy.ask(gang("r", 4, CPU=1))  # a, b
    policy.ask(gang("s", 4, CPU=1))  # c
    policy.agent_lost("c")
    assert policy.agent_joined("d", offer(2)) == []
    assert policy.agent_lost("b") == [grant("r", "d", CPU, CPU)]
    assert policy.agent_joined("e", offer(4)) == [grant("s", "e", CPU, CPU, CPU, CPU)]

    policy = admission(a=offer(2), b=offer(2), c=offer(2), d=offer(2))
    policy.ask(gang("r", 4, CPU=1))  # a, b
    policy.ask(gang("s", 4, CPU=1))  # c, d
    assert policy.agent_lost("d") == []
    assert policy.agent_lost("b") == [Revoke(run="s", agent="c")]
    assert policy.release("s", "c") == [grant("r", "c", CPU, CPU)]
    assert [one.run for one in policy.waiting] == ["s"]


def test_a_gang_that_runs_is_never_revoked() -> None:
    policy = admission(a=offer(2), b=offer(2), c=offer(2))
    policy.ask(gang("r", 4, CPU=1))  # a, b
    policy.ask(gang("s", 2, CPU=1))  # c
    assert policy.agent_lost("b") == []


def test_a_gang_on_a_draining_agent_gets_places_elsewhere_and_keeps_its_own_until_it_releases_them() -> None:
    policy = admission(a=offer(2), b=offer(1))
    policy.ask(gang("r", 2, CPU=1))
    assert policy.drain("a") == []
    assert policy.missing("r") == 2 and list(policy.held("r")) == ["a"]
    assert policy.ask(gang("later", 1, CPU=1)) == [], "who came later does not get what it waits for"
    assert policy.agent_joined("c", offer(1)) == [grant("r", "b", CPU), grant("r", "c", CPU)]
    assert policy.release("r", "a") == [], "nothing is free on an agent that is taken away"
    assert policy.agent_lost("a") == []
    assert policy.agent_joined("d", offer(1)) == [grant("later", "d", CPU)]


def test_a_gang_on_a_draining_agent_gets_the_places_of_later_gangs_that_wait() -> None:
    """It leaves the agent only when it has them, so nothing becomes free there before."""
    policy = admission(a=offer(2), b=offer(1))
    policy.ask(gang("first", 2, CPU=1))  # a
    policy.ask(gang("later", 1, CPU=1))  # b
    assert policy.agent_joined("c", offer(1)) == []
    policy.resize(gang("later", 3, CPU=1))
    assert policy.missing("later") == 2 and list(policy.held("later")) == ["b"]
    assert policy.drain("a") == [Revoke(run="later", agent="b")]
    assert policy.release("later", "b") == [grant("first", "b", CPU), grant("first", "c", CPU)]


def test_capacity_counts_what_empty_agents_could_hold() -> None:
    assert capacity(gang("r", 5, CPU=2), [offer(4), offer(3)]) == 3
    assert capacity(gang("r", 2, CPU=1), [offer(4)]) == 2
    assert capacity(gang("r", 2, GPU=0.5), [offer(0, "0")]) == 2
    assert capacity(gang("r", 2, GPU=1.0), [offer(4)]) == 0


RESOURCES = st.sampled_from([{}, {"CPU": 1.0}, {"CPU": 3.0}, {"GPU": 1.0}, {"GPU": 0.5, "CPU": 1.0}, {"GPU": 2.0}])


class AnyOrder(RuleBasedStateMachine):
    """A model that adds up what was granted and trusts nothing."""

    agents = Bundle("agents")
    runs = Bundle("runs")

    def __init__(self) -> None:
        super().__init__()
        self.policy = Admission()
        self.number = 0
        self.offers: dict[str, Offer] = {}
        self.gangs: dict[str, Gang] = {}
        self.given: dict[tuple[str, str], list[Taken]] = {}
        self.leaving: set[tuple[str, str]] = set()
        self.drained: set[str] = set()

    def follow(self, decisions: list[Decision]) -> None:
        granted: dict[str, int] = {}
        for one in decisions:
            if isinstance(one, Grant):
                assert one.agent not in self.drained
                self.given.setdefault((one.run, one.agent), []).extend(one.workers)
                granted[one.run] = granted.get(one.run, 0) + len(one.workers)
            else:
                assert self.count(one.run) < self.gangs[one.run].workers, "a gang that runs was revoked"
                self.leaving.add((one.run, one.agent))
        for run in granted:
            assert self.count(run) == self.gangs[run].workers, "a gang was given a part"

    def count(self, run: str) -> int:
        return sum(len(one) for key, one in self.given.items() if key[0] == run and key not in self.leaving)

    def name(self, kind: str) -> str:
        self.number += 1
        return f"{kind}{self.number}"

    @rule(target=agents, cpus=st.integers(0, 4), gpus=st.integers(0, 2), slots=st.sampled_from([None, None, 3]))
    def join(self, cpus: int, gpus: int, slots: int | None) -> str:
        name = self.name("a")
        self.offers[name] = offer(cpus, *(f"{name}-{n}" for n in range(gpus)), slots=slots)
        self.follow(self.policy.agent_joined(name, self.offers[name]))
        return name

    @rule(agent=agents)
    def drain(self, agent: str) -> None:
        self.drained.add(agent)
        self.leaving |= {key for key in self.given if key[1] == agent}
        self.follow(self.policy.drain(agent))

    @rule(agent=consumes(agents))
    def lose(self, agent: str) -> None:
        del self.offers[agent]
        for key in [key for key in self.given if key[1] == agent]:
            del self.given[key]
            self.leaving.discard(key)
        self.follow(self.policy.agent_lost(agent))

    @rule(
        target=runs,
        workers=st.integers(1, 5),
        resources=RESOURCES,
        most=st.sampled_from([None, None, 1, 2]),
        strategy=st.sampled_from([PlacementStrategy.PACK, *PlacementStrategy]),
    )
    def ask(self, workers: int, resources: dict[str, float], most: int | None, strategy: PlacementStrategy) -> str:
        name = self.name("r")
        self.gangs[name] = msgspec.structs.replace(gang(name, workers, most, **resources), strategy=strategy)
        self.follow(self.policy.ask(self.gangs[name]))
        return name

    @rule(run=consumes(runs))
    def end(self, run: str) -> None:
        self.follow(self.policy.withdraw(run))
        for key in [key for key in self.given if key[0] == run]:
            del self.given[key]
            self.leaving.discard(key)
            self.follow(self.policy.release(*key))
        del self.gangs[run]

    @rule(data=st.data())
    def give_up(self, data: Any) -> None:
        if self.leaving:
            key = data.draw(st.sampled_from(sorted(self.leaving)))
            self.leaving.discard(key)
            del self.given[key]
            self.follow(self.policy.release(*key))

    @invariant()
    def nothing_is_given_twice(self) -> None:
        for agent, has in self.offers.items():
            workers = [one for key, given in self.given.items() if key[1] == agent for one in given]
            assert has.slots is None or len(workers) <= has.slots
            for name, amount in has.resources.items():
                assert sum(one.amounts.get(name, 0) for one in workers) <= amount * 10_000
            for gpu in has.gpus:
                assert sum(one.gpu_units for one in workers if gpu in one.gpus) <= 10_000
            assert all(set(one.gpus) <= set(has.gpus) for one in workers)

    @invariant()
    def no_gang_has_more_on_an_agent_than_it_allows(self) -> None:
        for (run, _), workers in self.given.items():
            assert len(workers) <= (self.gangs[run].workers_per_agent or 99)

    @invariant()
    def strict_strategies_are_kept(self) -> None:
        for run, one in self.gangs.items():
            here = [len(workers) for key, workers in self.given.items() if key[0] == run and key not in self.leaving]
            assert one.strategy is not STRICT_PACK or len(here) <= 1
            assert one.strategy is not STRICT_SPREAD or all(count == 1 for count in here)

    @invariant()
    def those_who_wait_are_those_who_miss_something(self) -> None:
        waiting = [one.run for one in self.policy.waiting]
        assert waiting == [run for run in self.gangs if self.count(run) < self.gangs[run].workers]


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), RESOURCES), max_size=5),
    st.lists(st.tuples(st.integers(1, 2), RESOURCES), min_size=30, max_size=30),
    st.integers(1, 4),
    st.sampled_from([{"CPU": 1.0}, {"CPU": 3.0}, {"GPU": 1.0}, {"GPU": 0.5, "CPU": 1.0}]),
)
def test_a_large_gang_is_not_overtaken_for_ever(
    before: list[tuple[int, dict[str, float]]],
    after: list[tuple[int, dict[str, float]]],
    workers: int,
    resources: dict[str, float],
) -> None:
    """Runs arrive without end and each ends some time; when all that came before the large gang have ended, it runs."""
    agents = {"a": offer(6, "a0", "a1", slots=6), "b": offer(6, "b0", "b1", slots=6)}
    policy = admission(**agents)
    running: list[str] = []

    def follow(decisions: list[Decision]) -> None:
        running.extend(one.run for one in decisions if isinstance(one, Grant) and one.run not in running)

    for n, (count, wanted) in enumerate(before):
        follow(policy.ask(gang(f"before{n}", count, None, **wanted)))
    large = gang("large", workers, None, **resources)
    if capacity(large, agents.values()) < workers:
        return
    follow(policy.ask(large))
    for n, (count, wanted) in enumerate(after):
        if "large" in running:
            return
        follow(policy.ask(gang(f"after{n}", count, None, **wanted)))
        # Of those that came before, the oldest ends; those that came later never do.
        for run in [one for one in running if one.startswith("before")][:1]:
            running.remove(run)
            follow(policy.withdraw(run))
            for agent in list(policy.held(run)):
                follow(policy.release(run, agent))
    assert "large" in running or any(one.run.startswith("before") for one in policy.waiting)


def _cost_of_joining(agents: int) -> int:
    """While a gang waits that needs every agent, and runs hold other agents."""
    policy = admission(**{f"busy-{n}": offer(1) for n in range(agents)})
    for n in range(agents):
        policy.ask(gang(f"run-{n}", 1, CPU=1))
    policy.ask(gang("all", agents, CPU=1))
    return [count_opcodes(policy.agent_joined, f"agent-{n}", offer(1)) for n in range(agents - 1)][-1]


def _cost_of_losing(agents: int) -> int:
    """A gang that holds every agent loses them one after the other."""
    policy = admission(**{f"agent-{n}": offer(1) for n in range(agents)})
    policy.ask(gang("all", agents, CPU=1))
    return [count_opcodes(policy.agent_lost, f"agent-{n}") for n in range(agents // 2)][-1]


def _cost_of_releasing(agents: int) -> int:
    policy = admission(**{f"agent-{n}": offer(1) for n in range(agents)})
    policy.ask(gang("all", agents, CPU=1))
    policy.withdraw("all")
    return [count_opcodes(policy.release, "all", f"agent-{n}") for n in range(agents // 2)][-1]


@pytest.mark.parametrize("cost", [_cost_of_joining, _cost_of_losing, _cost_of_releasing])
def test_an_agent_that_changes_costs_the_same_among_many_as_among_few(cost: Callable[[int], int]) -> None:
    assert cost(800) == pytest.approx(cost(8), rel=0.2)
