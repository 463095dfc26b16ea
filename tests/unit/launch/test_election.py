"""The election of a `fit()`, as pure decisions, and over many random histories of hosts that come, die and return."""

from __future__ import annotations

import random

import msgspec
import pytest

from holdfast.launch import election as el
from holdfast.launch.election import FitState, next_step
from holdfast.rendezvous.launcher_messages import FitResult, PublishedRun

RUN = PublishedRun(storage_path="/s", name="run", host="a")
RESULT = FitResult(run=RUN, status="finished")


def test_nothing_is_done_before_the_script_calls_fit() -> None:
    assert next_step(FitState(host="a"), {}) is None


def test_a_host_that_waits_campaigns_where_nobody_leads() -> None:
    waiting = FitState(host="a", fit=1, is_waiting=True)
    assert next_step(waiting, {}) == el.Campaign(1)
    assert next_step(waiting, {"fits/1/leader": b"b"}) is None
    assert next_step(waiting, {"fits/2/leader": b"b"}) == el.Campaign(1), "another fit()"


def test_the_elected_host_is_told_which_run_to_take_over() -> None:
    waiting = FitState(host="a", fit=1, is_waiting=True)
    assert next_step(waiting, {"fits/1/leader": b"a"}) == el.SendLead(None)
    begun = {"fits/1/leader": b"a", "fits/1/run": msgspec.json.encode(RUN)}
    assert next_step(waiting, begun) == el.SendLead(RUN)


def test_a_result_is_returned_whoever_leads() -> None:
    waiting = FitState(host="a", fit=1, is_waiting=True)
    for leader in ({}, {"fits/1/leader": b"a"}, {"fits/1/leader": b"b"}):
        assert next_step(waiting, {**leader, "fits/1/result": msgspec.json.encode(RESULT)}) == el.SendResult(RESULT)


def test_a_host_that_does_not_see_the_storage_never_leads() -> None:
    assert next_step(FitState(host="b", fit=1, is_waiting=True, sees_storage=False), {}) is None


def test_after_a_lost_session_a_leader_that_lives_goes_first() -> None:
    assert next_step(FitState(host="b", fit=1, is_waiting=True, may_campaign=False), {}) is None
    leading = FitState(host="a", fit=1, is_leading=True, run=RUN, address="a:1", may_campaign=False)
    assert next_step(leading, {}) == el.Campaign(1)


def test_a_leader_puts_what_is_missing_and_then_rests() -> None:
    leading = FitState(host="a", fit=1, is_leading=True)
    keys = {"fits/1/leader": b"a"}
    assert next_step(leading, keys) is None, "it does not listen yet"
    leading.run, leading.address = RUN, "a:1"
    assert next_step(leading, keys) == el.PutRun(1, RUN)
    keys["fits/1/run"] = msgspec.json.encode(RUN)
    assert next_step(leading, keys) == el.PutAddress(1, "a:1")
    keys["fits/1/address"] = b"a:1"
    assert next_step(leading, keys) is None
    assert el.current_address({**keys, "fits/2/address": b"b:2", "fits/10/address": b"c:3"}) == "c:3"
    assert el.current_address({}) is None


def test_a_leader_whose_place_was_taken_writes_nothing() -> None:
    leading = FitState(host="a", fit=1, is_leading=True, run=RUN, address="a:1")
    assert next_step(leading, {"fits/1/leader": b"b"}) is None


def test_a_result_is_published_once() -> None:
    ended = FitState(host="a", fit=1, result=RESULT)
    assert next_step(ended, {}) == el.CreateResult(1, RESULT)
    assert next_step(ended, {"fits/1/result": b"{}"}) is None


class _Sim:
    """Hosts over one set of keys, whose sessions end at random; each host sees the keys as they were some time ago."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.keys: dict[str, tuple[bytes, str]] = {}
        self.hosts: dict[str, FitState] = {}
        self.seen: dict[str, dict[str, bytes]] = {}
        self.returned: dict[str, FitResult] = {}
        self.epoch = 0
        """The store's: the highest counts."""
        self.epochs: dict[str, int] = {}
        self.finished_by = 0
        self.made = 0

    def add(self) -> None:
        self.made += 1
        name = f"h{self.made}"
        self.hosts[name] = FitState(host=name, fit=1, is_waiting=True)
        self.seen[name] = {}

    def lose_session(self, host: str) -> None:
        self.keys = {key: value for key, value in self.keys.items() if value[1] != host}

    def die(self, host: str) -> None:
        self.lose_session(host)
        del self.hosts[host]

    def look(self, host: str) -> None:
        self.seen[host] = {key: value for key, (value, _) in self.keys.items()}

    def act(self, host: str) -> None:
        state = self.hosts[host]
        step = next_step(state, self.seen[host])
        match step:
            case el.Campaign(fit):
                self.keys.setdefault(f"fits/{fit}/leader", (host.encode(), host))
            case el.PutRun(fit, run):
                self.keys[f"fits/{fit}/run"] = (msgspec.json.encode(run), "")
            case el.PutAddress(fit, address):
                self.keys[f"fits/{fit}/address"] = (address.encode(), host)
            case el.CreateResult(fit, result):
                self.keys.setdefault(f"fits/{fit}/result", (msgspec.json.encode(result), ""))
            case el.SendLead(_):
                state.is_waiting, state.is_leading = False, True
                self.epoch += 1  # `fit()` takes the run over
                self.epochs[host] = self.epoch
                state.address, state.run = host, msgspec.structs.replace(RUN, host=host)
            case el.SendResult(result):
                state.is_waiting = False
                self.returned[host] = result

    def work(self, host: str) -> None:
        """The controller finishes, if it is not fenced; it finds out if it is."""
        state = self.hosts[host]
        if not state.is_leading or state.result is not None:
            return
        if self.epochs[host] < self.epoch:
            state.is_leading, state.is_waiting, state.run = False, True, None
        elif self.random.random() < 0.05:
            self.finished_by = self.finished_by or self.epochs[host]
            state.is_leading = False
            state.result = FitResult(run=msgspec.structs.replace(RUN, host=host), status="finished")
            self.returned[host] = state.result

    def step(self) -> None:
        moves = [self.look, self.act, self.act, self.work]
        if not self.hosts or (len(self.hosts) < 4 and self.random.random() < 0.02):
            self.add()
            return
        host = self.random.choice(sorted(self.hosts))
        if len(self.hosts) > 1 and self.random.random() < 0.01:
            self.die(host)
        elif self.random.random() < 0.01:
            self.lose_session(host)
        elif self.random.random() < 0.003:
            self.keys.clear()  # an etcd without a volume
        else:
            self.random.choice(moves)(host)


@pytest.mark.parametrize("seed", range(40))
def test_over_any_history_all_hosts_that_live_return_and_one_controller_counts(seed: int) -> None:
    sim = _Sim(seed)
    for _ in range(3):
        sim.add()
    for _ in range(400):
        sim.step()
    # From here on nothing fails, and everybody looks before acting.
    for _ in range(400):
        for host in sorted(sim.hosts):
            sim.look(host)
            sim.act(host)
            sim.work(host)
    assert set(sim.hosts) <= set(sim.returned), "a host that lives never returned"
    assert sim.finished_by, "no controller that counts has finished"
    leaders = [value for key, value in sim.keys.items() if key.endswith("leader")]
    assert len(leaders) <= 1
