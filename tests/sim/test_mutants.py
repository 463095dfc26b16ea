"""The watchmen watched: break the core, the shell or the storage on purpose, and some seed must tell.

Each mutant is a bug that somebody could write. A mutant that survives its seeds means that a checker sleeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from tests.sim.__main__ import run_seeds
from tests.sim.disk import Disk
from tests.sim.driver import Driver
from tests.sim.persisting import Persisting

from holdfast.core import events as e
from holdfast.core import machine, pending_checkpoints, placement, removal
from holdfast.core import records as r
from holdfast.core import state as states
from holdfast.core.state import Durable, Generation, State

Patch = pytest.MonkeyPatch
_SEEDS = 1500


def form_while_a_checkpoint_is_pending(patch: Patch) -> None:
    settled = machine._advance

    def advance(state: State, now: float, out: machine.Output) -> None:
        settled(state, now, out)
        if state.generation is None and state.pending and not state.ended:
            machine._end_or_start(state, now, out)

    patch.setattr(machine, "_advance", advance)


def count_no_failure(patch: Patch) -> None:
    end = states._fold_end

    def fold_end(durable: Durable, record: r.GenerationEnded) -> None:
        end(durable, record)
        durable.failures = durable.streak = 0

    patch.setattr(states, "_fold_end", fold_end)


def let_the_fenced_commit(patch: Patch) -> None:
    patch.setattr(Disk, "is_fenced", lambda self, epoch, index: False)


def forget_the_floor(patch: Patch) -> None:
    patch.setattr(Disk, "_voids", lambda self, epoch, index: False)
    patch.setattr(Disk, "is_fenced", lambda self, epoch, index: False)
    patch.setattr(Disk, "seal", lambda self, epoch, floor: None)


def leave_reservations_open(patch: Patch) -> None:
    patch.setattr(Disk, "seal", lambda self, epoch, floor: None)


def run_commands_before_records_are_durable(patch: Patch) -> None:
    patch.setattr(Driver, "durable_first", False)


def take_reports_of_any_generation(patch: Patch) -> None:
    patch.setattr(machine, "_current", lambda state, generation: state.generation)


def start_before_the_old_are_gone(patch: Patch) -> None:
    stop = machine._stop

    def hasty(generation: Generation, out: machine.Output, *, dump_stacks: bool) -> None:
        stop(generation, out, dump_stacks=dump_stacks)
        generation.alive.clear()

    patch.setattr(machine, "_stop", hasty)


def delete_the_newest(patch: Patch) -> None:
    def choose(checkpoints: Iterable[Any], rule: Any, pinned: Any) -> list[str]:
        keep = rule.num_to_keep
        return [one.name for one in list(checkpoints)[keep:]] if keep is not None else []

    patch.setattr(removal, "to_delete", choose)


def write_a_deletion_down_before_it_is_done(patch: Patch) -> None:
    start = removal._start

    def hasty(name: str, one: states.Removal, out: machine.Output) -> None:
        start(name, one, out)
        out.record(r.CheckpointDeleted(at=0.0, name=name))

    patch.setattr(removal, "_start", hasty)


def use_a_name_before_its_old_checkpoint_is_gone(patch: Patch) -> None:
    patch.setattr(removal, "holds_name", lambda state, name: False)


def end_before_removals_are_answered(patch: Patch) -> None:
    patch.setattr(removal, "is_under_way", lambda state: False)


def resume_from_the_oldest(patch: Patch) -> None:
    patch.setattr(
        Durable, "resume_point", lambda self: min(self.checkpoints.values(), key=lambda s: s.index, default=None)
    )


def trust_the_journal_over_storage(patch: Patch) -> None:
    reconcile = pending_checkpoints.reconcile

    def deaf(state: State, event: e.ControllerBegan, now: float, out: machine.Output) -> None:
        known = tuple(state.durable.checkpoints.values())
        reconcile(state, e.ControllerBegan(epoch=event.epoch, host="", pid=0, stored=known), now, out)

    patch.setattr(pending_checkpoints, "reconcile", deaf)


def commit_what_lost_a_part(patch: Patch) -> None:
    def lose(state: State, agent: str, now: float, out: machine.Output) -> set[int]:
        for pending in list(state.pending.values()):
            if not pending.persisting and agent in pending.parts.values():
                state.pending.pop(pending.ticket)
        return set()

    patch.setattr(pending_checkpoints, "lose_agent", lose)


def wait_for_ranks_that_are_gone(patch: Patch) -> None:
    patch.setattr(pending_checkpoints, "drop_incomplete", lambda state, now, out: None)


def see_no_hang(patch: Patch) -> None:
    patch.setattr(machine, "_hung", lambda state, generation, now: False)


def excuse_all_while_one_waits(patch: Patch) -> None:
    excused = machine._excused
    patch.setattr(machine, "_excused", lambda state, generation: bool(generation.waiting) or excused(state, generation))


def go_on_after_being_fenced(patch: Patch) -> None:
    take_in = machine._apply

    def bold(state: State, event: e.Event, now: float, out: machine.Output) -> None:
        take_in(state, event, now, out)
        if isinstance(event, e.ControllerFenced):
            state.ended = False

    patch.setattr(machine, "_apply", bold)


def set_a_deadline_that_has_passed(patch: Patch) -> None:
    patch.setattr(placement, "deadlines", lambda state: [state.not_before])


def forget_those_who_never_came(patch: Patch) -> None:
    lose = Driver.lose

    def silent(self: Driver, node: Any, why: str) -> None:
        node.slots = node.slots if node.joined else 0
        lose(self, node, why)

    patch.setattr(Driver, "lose", silent)


def read_the_journal_before_the_indices(patch: Patch) -> None:
    def look(self: Driver) -> None:
        cuts = self.sim.disk.lengths(self.epoch)
        self.clock.after(3.0, lambda: self._pause(self._fence, self.sim.disk.next_index(), cuts))

    patch.setattr(Driver, "_look", look)


def let_the_overtaken_settle(patch: Patch) -> None:
    patch.setattr(Disk, "close_unsettled", lambda self, below: None)


def read_the_journal_before_the_lease_is_held(patch: Patch) -> None:
    take = Disk.take_epoch
    begin = Driver._begin
    seen: dict[int, list[r.Record]] = {}

    def note(self: Disk) -> int:
        records = list(self.records())
        epoch = take(self)
        seen[epoch] = records
        return epoch

    def stale(self: Driver, floor: int) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self.sim.disk, "records", lambda: iter(seen[self.epoch]))
            inner.setattr(self.sim.checkers, "began", lambda driver: None)
            begin(self, floor)

    patch.setattr(Disk, "take_epoch", note)
    patch.setattr(Driver, "_begin", stale)


def call_a_commit_failed_that_was_made(patch: Patch) -> None:
    tell = Persisting._tell

    def confused(self: Persisting) -> None:
        if self.clock.happens(0.2):
            self.driver.post(e.CheckpointFailed(ticket=self.command.ticket, error="no answer"))
        else:
            tell(self)

    patch.setattr(Persisting, "_tell", confused)


MUTANTS: list[Callable[[Patch], None]] = [
    form_while_a_checkpoint_is_pending,
    count_no_failure,
    let_the_fenced_commit,
    forget_the_floor,
    leave_reservations_open,
    run_commands_before_records_are_durable,
    take_reports_of_any_generation,
    start_before_the_old_are_gone,
    delete_the_newest,
    write_a_deletion_down_before_it_is_done,
    use_a_name_before_its_old_checkpoint_is_gone,
    end_before_removals_are_answered,
    resume_from_the_oldest,
    trust_the_journal_over_storage,
    commit_what_lost_a_part,
    wait_for_ranks_that_are_gone,
    see_no_hang,
    excuse_all_while_one_waits,
    go_on_after_being_fenced,
    set_a_deadline_that_has_passed,
    forget_those_who_never_came,
    read_the_journal_before_the_indices,
    let_the_overtaken_settle,
    read_the_journal_before_the_lease_is_held,
    call_a_commit_failed_that_was_made,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_seed_finds_the_mutant(mutant: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, KeyError, StopIteration)):
        run_seeds(0, _SEEDS)
