"""Rounds of a plain script, as pure decisions, and over random histories of hosts that come, fail, die and return."""

from __future__ import annotations

import random

import msgspec
import pytest

from holdfast.launch import rounds as rd
from holdfast.launch.options import LaunchOptions
from holdfast.launch.workers import worker_environment
from holdfast.rendezvous.uri import parse_rendezvous_uri


def _rounds(least: int = 1, most: int = 3, restarts: int = 0, last_call_s: float = 5.0) -> rd.Rounds:
    bounds = rd.Bounds(
        min_hosts=least, max_hosts=most, last_call_s=last_call_s, max_restarts=restarts, join_timeout_s=600.0
    )
    return rd.Rounds("a", bounds)


class _Keys(dict[str, bytes]):
    def host(self, name: str, ready: int, workers: int = 1, incarnation: str = "") -> None:
        address = f"{name}.net"
        self[f"hosts/{name}"] = msgspec.json.encode(
            rd.HostRecord(address=address, port=1000 + ready, ready=ready, workers=workers, incarnation=incarnation)
        )

    def apply(self, decision: rd.Decision | None) -> None:
        match decision:
            case rd.OpenRound(made):
                self[f"rounds/{made.number}"] = msgspec.json.encode(made)
            case rd.CloseRound(number, closed):
                self[f"closed/{number}"] = msgspec.json.encode(closed)
            case rd.EndJob(result):
                self["result"] = msgspec.json.encode(result)

    def end(self, number: int, host: str, code: int = 0) -> None:
        self[f"ended/{number}/{host}"] = msgspec.json.encode(rd.Ended(code=code, what="it broke"))


def _running(rounds: rd.Rounds, *names: str) -> _Keys:
    keys = _Keys()
    for name in names:
        keys.host(name, 1)
    rounds.decide(keys, 0.0)
    keys.apply(rounds.decide(keys, 5.0))
    assert "rounds/1" in keys
    return keys


def test_the_first_round_waits_for_a_last_call_unless_all_are_there() -> None:
    rounds, keys = _rounds(least=2), _Keys()
    keys.host("b", 1)
    assert rounds.decide(keys, 0.0) is None and rounds.wake_at == 600.0
    keys.host("a", 1)
    assert rounds.decide(keys, 10.0) is None and rounds.wake_at == 15.0
    found = rounds.decide(keys, 15.0)
    assert isinstance(found, rd.OpenRound)
    assert [one.host for one in found.round.members] == ["a", "b"]
    assert (found.round.master_address, found.round.master_port) == ("a.net", 1001)
    keys.host("c", 1)
    found = _rounds(least=2).decide(keys, 0.0)
    assert isinstance(found, rd.OpenRound) and len(found.round.members) == 3, "nobody else may come"


def test_too_few_hosts_end_the_job_in_a_sentence() -> None:
    rounds, keys = _rounds(least=2), _Keys()
    keys.host("a", 1)
    assert rounds.decide(keys, 0.0) is None
    found = rounds.decide(keys, 600.0)
    assert found == rd.EndJob(rd.JobResult(code=1, why="1 hosts after 600 s, but 2 are needed"))


def test_the_job_ends_when_all_workers_have() -> None:
    rounds = _rounds()
    keys = _running(rounds, "a", "b")
    keys.end(1, "a")
    assert rounds.decide(keys, 6.0) is None
    del keys["hosts/a"]
    assert rounds.decide(keys, 6.0) is None, "it had ended well before it left"
    keys.end(1, "b")
    assert rounds.decide(keys, 6.0) == rd.EndJob(rd.JobResult(code=0))


def test_a_failure_restarts_all_at_once_until_the_restarts_are_spent() -> None:
    rounds = _rounds(restarts=1)
    keys = _running(rounds, "a", "b")
    keys.end(1, "b", 3)
    closing = rounds.decide(keys, 6.0)
    assert isinstance(closing, rd.CloseRound) and closing.closed.is_failure and closing.closed.why == "b: it broke"
    keys.apply(closing)
    keys.host("a", 2)
    assert rounds.decide(keys, 6.0) is None, "b still stops its workers"
    keys.host("b", 2)
    opening = rounds.decide(keys, 6.0)
    assert isinstance(opening, rd.OpenRound) and opening.round.restarts == 1
    keys.apply(opening)
    keys.end(2, "a", 3)
    keys.apply(rounds.decide(keys, 7.0))
    keys.host("a", 3)
    assert rounds.decide(keys, 7.0) is None, "b may have died with it"
    keys.host("b", 3)
    assert rounds.decide(keys, 8.0) == rd.EndJob(rd.JobResult(code=3, why="a: it broke"))


def test_workers_that_fail_before_the_host_that_died_is_missed_spend_nothing() -> None:
    """They notice their broken connections at once, the rendezvous the host's silence after the time-to-live."""
    rounds = _rounds(least=1, restarts=0)
    keys = _running(rounds, "a", "b")
    keys.end(1, "a", 1)
    keys.apply(rounds.decide(keys, 6.0))
    keys.host("a", 2)
    assert rounds.decide(keys, 7.0) is None
    del keys["hosts/b"]
    opening = rounds.decide(keys, 16.0)
    assert isinstance(opening, rd.OpenRound) and opening.round.restarts == 0
    assert [one.host for one in opening.round.members] == ["a"]


def test_a_launcher_that_is_started_again_before_it_is_missed_has_left_its_round() -> None:
    rounds = _rounds(restarts=0)
    keys = _running(rounds, "a", "b")
    keys.host("b", 2, incarnation="second")
    closing = rounds.decide(keys, 6.0)
    assert isinstance(closing, rd.CloseRound) and closing.closed.why == "b left" and not closing.closed.is_failure


def test_workers_that_fail_with_a_launcher_that_is_started_again_spend_nothing() -> None:
    rounds = _rounds(restarts=0)
    keys = _running(rounds, "a", "b")
    keys.end(1, "a", 1)
    keys.apply(rounds.decide(keys, 6.0))
    keys.host("a", 2)
    keys.host("b", 2, incarnation="second")
    opening = rounds.decide(keys, 7.0)
    assert isinstance(opening, rd.OpenRound) and opening.round.restarts == 0
    assert [one.incarnation for one in opening.round.members] == ["", "second"]


def test_workers_that_fail_with_a_lost_host_spend_nothing() -> None:
    rounds = _rounds(least=1, restarts=0)
    keys = _running(rounds, "a", "b")
    del keys["hosts/b"]
    keys.end(1, "a", 1)
    keys.apply(rounds.decide(keys, 6.0))
    assert "closed/1" in keys
    keys.host("a", 2)
    opening = rounds.decide(keys, 6.0)
    assert isinstance(opening, rd.OpenRound) and opening.round.restarts == 0
    assert [one.host for one in opening.round.members] == ["a"]


def test_hosts_that_join_within_the_settling_time_make_one_new_round() -> None:
    rounds = _rounds(most=4)
    keys = _running(rounds, "a")
    keys.host("b", 2)
    assert rounds.decide(keys, 10.0) is None and rounds.wake_at == 15.0
    keys.host("c", 2)
    assert rounds.decide(keys, 13.0) is None
    closing = rounds.decide(keys, 15.0)
    assert isinstance(closing, rd.CloseRound) and closing.closed.why == "b, c joined" and not closing.closed.is_failure
    keys.apply(closing)
    keys.host("a", 2)
    opening = rounds.decide(keys, 16.0)
    assert isinstance(opening, rd.OpenRound)
    assert [one.host for one in opening.round.members] == ["a", "b", "c"]
    assert opening.round.restarts == 0


def test_a_host_that_does_not_stop_its_workers_is_left_out_after_some_time() -> None:
    rounds = _rounds(restarts=1, last_call_s=0.0)
    keys = _running(rounds, "a", "b")
    keys.end(1, "a", 1)
    keys.apply(rounds.decide(keys, 6.0))
    keys.host("a", 2)
    assert rounds.decide(keys, 7.0) is None and rounds.wake_at == 37.0
    opening = rounds.decide(keys, 37.0)
    assert isinstance(opening, rd.OpenRound) and [one.host for one in opening.round.members] == ["a"]


def test_nobody_is_added_beyond_the_maximum_or_to_a_round_that_ends() -> None:
    rounds = _rounds(most=2)
    keys = _running(rounds, "a", "b")
    keys.host("c", 2)
    assert rounds.decide(keys, 10.0) is None and rounds.decide(keys, 100.0) is None
    rounds = _rounds(most=3)
    keys = _running(rounds, "a", "b")
    keys.end(1, "a")
    keys.host("c", 2)
    assert rounds.decide(keys, 10.0) is None and rounds.decide(keys, 100.0) is None


def test_the_variables_are_those_of_torchrun() -> None:
    current = rd.Round(
        number=3,
        members=(rd.Member(host="b", workers=2), rd.Member(host="a", workers=3)),
        master_address="b.net",
        master_port=1234,
        restarts=2,
    )
    options = LaunchOptions(
        rendezvous=parse_rendezvous_uri("etcd://e/imagenet"), script="x", host_id="a", address="a.net", max_restarts=4
    )
    found = worker_environment(current, "a", 1, options, 7)
    expected = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "3", "GROUP_RANK": "1"}
    expected |= {"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "b.net", "MASTER_PORT": "1234"}
    expected |= {"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_MAX_RESTARTS": "4"}
    expected |= {"TORCHELASTIC_RUN_ID": "imagenet-7", "TORCHELASTIC_USE_AGENT_STORE": "False", "OMP_NUM_THREADS": "1"}
    assert expected.items() <= found.items()


@pytest.mark.parametrize("seed", range(30))
def test_over_any_history_members_never_overlap_rounds_and_the_job_ends(seed: int) -> None:
    """Hosts follow the keys as `TorchrunHost` does: one round at a time, ready for the next when the last is over."""
    dice = random.Random(seed)
    rounds, keys = _rounds(least=1, most=3, restarts=10**6, last_call_s=3.0), _Keys()
    running: dict[str, int] = {}
    hosts = {"a": 0, "b": 0}
    made = 2
    for now in range(600):
        calm = now > 300
        if not calm and dice.random() < 0.05 and len(hosts) < 5:
            made += 1
            hosts[f"h{made}"] = 0
        if not calm and dice.random() < 0.05 and len(hosts) > 1:
            lost = dice.choice(sorted(hosts))
            hosts.pop(lost)
            running.pop(lost, None)
            keys.pop(f"hosts/{lost}", None)
        for name in dice.sample(sorted(hosts), len(hosts)):
            current = rd.newest_round(keys)
            number = current.number if current is not None else 0
            is_open = current is not None and f"closed/{number}" not in keys
            members = [one.host for one in current.members] if current is not None else []
            if name in running and (running[name] != number or not is_open):
                del running[name]
            elif is_open and name in members:
                running.setdefault(name, number)
                if dice.random() < 0.02 and not calm:
                    keys.end(number, name, 1)
                elif calm and dice.random() < 0.2:
                    keys.end(number, name, 0)
            elif hosts[name] != number + 1:
                hosts[name] = number + 1
                keys.host(name, number + 1)
        if "a" not in hosts:
            rounds = _rounds(least=1, most=3, restarts=10**6, last_call_s=3.0) if dice.random() < 0.1 else rounds
        keys.apply(rounds.decide(keys, float(now)))
        opened = rd.newest_round(keys)
        if opened is not None and f"closed/{opened.number}" not in keys:
            assert len(opened.members) <= 3
            others = {name: number for name, number in running.items() if number != opened.number}
            assert not set(others) & {one.host for one in opened.members}, "a host is in two rounds"
        if "result" in keys:
            break
    assert msgspec.json.decode(keys["result"], type=rd.JobResult).code == 0
