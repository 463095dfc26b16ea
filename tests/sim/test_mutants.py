"""The watchmen watched: break the core or the shell on purpose, and some seed must tell.

Each mutant is a bug that somebody could write. A mutant that survives its seeds means that a checker sleeps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.sim import driver as drivers
from tests.sim.__main__ import run_seeds
from tests.sim.checkers import Checkers
from tests.sim.scenario import Scenario, draw
from tests.sim.worker import Connection

from holdfast.agent import snapshot_fetch
from holdfast.agent.agent import Agent
from holdfast.agent.buffers import Buffers
from holdfast.agent.parts import Parts
from holdfast.agent.run_host import RunHost
from holdfast.agent.run_storage import RunStorage
from holdfast.agent.snapshot_fetch import SnapshotFetch
from holdfast.checkpoint import claims, commit, part_records, worker_states
from holdfast.checkpoint import reserve as reserving
from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.epochs import Fences
from holdfast.checkpoint.part_records import PartRecord
from holdfast.checkpoint.reservation import Reservation
from holdfast.checkpoint.reserve import reserve
from holdfast.control import lease, persister
from holdfast.control.agent_link import AgentLink
from holdfast.control.agent_pool import AgentPool
from holdfast.control.history import History, read_history
from holdfast.control.loop import Controller
from holdfast.control.persister import Persister
from holdfast.control.remover import Remover
from holdfast.control.run_agents import RunAgents
from holdfast.core import (
    bounds,
    machine,
    pending_checkpoints,
    placement,
    planned_change,
    preemption,
    quarantine,
    removal,
    validation,
)
from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core import state as states
from holdfast.core.admission import Admission, Grant
from holdfast.core.checkpoint_interval import CheckpointInterval
from holdfast.core.checkpoint_types import Draft
from holdfast.core.state import Durable, Generation, State
from holdfast.errors import Damaged, StorageError
from holdfast.journal.format import Line, Segment
from holdfast.journal.reader import JournalReader, Position, position
from holdfast.runtime import current
from holdfast.storage.store import Store
from holdfast.train import elastic
from holdfast.wire import messages as m
from holdfast.wire.envelope import Envelope
from holdfast.wire.frames import HEADER_BYTES
from holdfast.wire.resumable_channel import ResumableChannel

Patch = pytest.MonkeyPatch
_SEEDS = 1000
"""So many are tried for each mutant."""


# ---------------------------------------------------------------- the core


def form_while_a_checkpoint_is_pending(patch: Patch) -> None:
    settled = machine._advance

    def advance(state: State, now: float, out: machine.Output) -> None:
        settled(state, now, out)
        if state.generation is None and state.pending and not state.ended:
            machine._end_or_start(state, now, out)

    patch.setattr(machine, "_advance", advance)


def change_the_group_at_any_commit(patch: Patch) -> None:
    def gather(state: State, generation: Generation, change: Any, now: float, out: machine.Output) -> None:
        newest = state.durable.resume_point()
        if newest is not None and newest.generation == generation.number:
            generation.stop_reason = states.StopReason(change.kind, change.why, now)

    patch.setattr(planned_change, "_gather", gather)


def grow_without_a_settling_time(patch: Patch) -> None:
    def watch(state: State, generation: Generation, now: float) -> None:
        is_larger = planned_change._largest(state) > generation.world_size
        state.may_grow_since = now - state.spec.resize_settle_s if is_larger else None

    patch.setattr(planned_change, "_watch_growth", watch)


def let_no_rank_go_on(patch: Patch) -> None:
    send = planned_change._send

    def stay(generation: Generation, number: int | None, now: float, out: machine.Output) -> None:
        if not number:
            send(generation, number, now, out)

    patch.setattr(planned_change, "_send", stay)


def start_with_fewer_workers_than_are_needed(patch: Patch) -> None:
    patch.setattr(State, "workers_min", property(lambda self: 1))


def forget_the_bounds_that_were_set(patch: Patch) -> None:
    patch.setattr(bounds, "restore", lambda state, now, out: None)


def start_with_more_workers_than_are_wanted(patch: Patch) -> None:
    patch.setattr(State, "workers_max", property(lambda self: self.spec.workers_max))


def give_places_back_that_are_in_use(patch: Patch) -> None:
    def release(state: State, now: float, out: machine.Output) -> None:
        left = state.workers_max
        for agent in list(state.agents.values()):
            if left <= 0:
                state.remove_agent(agent.name)
                out.do(c.ReleasePlaces(agent=agent.name, keep=0, held=agent.slots))
            left -= agent.slots

    patch.setattr(placement, "release_surplus", release)


def count_no_failure(patch: Patch) -> None:
    end = states._fold_end

    def fold_end(durable: Durable, record: r.GenerationEnded) -> None:
        end(durable, record)
        durable.failures = durable.streak = 0

    patch.setattr(states, "_fold_end", fold_end)


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


def give_up_what_the_living_hold(patch: Patch) -> None:
    patch.setattr(pending_checkpoints, "complete_without_dead", lambda state, generation, now, out: None)


def take_any_part_for_the_whole(patch: Patch) -> None:
    patch.setattr(states.Pending, "has_all_it_needs", property(lambda self: bool(self.parts)))


def wait_for_ranks_that_are_gone(patch: Patch) -> None:
    patch.setattr(pending_checkpoints, "drop_incomplete", lambda state, now, out: None)


def see_no_hang(patch: Patch) -> None:
    patch.setattr(machine, "_hang_deadline", lambda state, generation: None)


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


# ---------------------------------------------------------------- the fence


def let_the_fenced_commit(patch: Patch) -> None:
    patch.setattr(Fences, "may_void", lambda self, epoch, index: False)


def forget_the_floor(patch: Patch) -> None:
    patch.setattr(Fences, "voids", lambda self, epoch, index: False)
    patch.setattr(Fences, "may_void", lambda self, epoch, index: False)
    patch.setattr(Catalog, "void_drafts", lambda self, epoch, floor, wait=None: [])


def leave_reservations_open(patch: Patch) -> None:
    patch.setattr(Catalog, "void_drafts", lambda self, epoch, floor, wait=None: [])


def let_the_overtaken_settle(patch: Patch) -> None:
    create = lease._create

    def lenient(store: Store, key: str, data: bytes, mount: Any) -> bool:
        if b'"floor":null' in data:
            return True
        if key.endswith(".floor.json"):
            current().sleep(current().uniform(0.0, 10.0))
        return create(store, key, data, mount)

    patch.setattr(lease, "_create", lenient)
    _reserve_without_looking_at_the_fence(patch)


def reserve_as_whoever_counts(patch: Patch) -> None:
    """A controller that was taken over reserves in the name of its successor."""

    def bold(store: Store, *, epoch: int | None = None, **options: Any) -> Draft:
        return reserve(store, epoch=None, **options)

    patch.setattr(persister, "reserve", bold)


def remove_without_looking_at_the_lease(patch: Patch) -> None:
    init = Remover.__init__

    def careless(self: Remover, store: Store, check_lease: Callable[[], None], *rest: Any) -> None:
        init(self, store, lambda: None, *rest)

    patch.setattr(Remover, "__init__", careless)


def commit_without_looking_at_the_reservation(patch: Patch) -> None:
    """The manifest is created although somebody has cleared the reservation away."""
    make = commit.commit
    token: ContextVar[str] = ContextVar("token")  # of the thread's own draft

    def blind(store: Store, draft: Draft, *arguments: Any, **options: Any) -> Any:
        token.set(draft.token)
        return make(store, draft, *arguments, **options)

    def ours(store: Store, name: str) -> Reservation:
        return Reservation(token=token.get(), index=0, epoch=0, created_at="", writer=current_process())

    patch.setattr(commit, "commit", blind)
    patch.setattr(commit, "read_reservation", ours)


def create_without_refusal_where_storage_has_none(patch: Patch) -> None:
    """Nobody announces itself before it creates what must be created once."""

    def hasty(store: Store, key: str, data: bytes, **options: Any) -> bool:
        store.create(key, data)
        return True

    patch.setattr(claims, "create_by_claim", hasty)


# ---------------------------------------------------------------- the journal


def run_commands_before_records_are_durable(patch: Patch) -> None:
    flush = Controller._make_durable

    async def later(self: Controller) -> bool:
        self._spawn(_ignore(flush(self)))
        return True

    patch.setattr(Controller, "_make_durable", later)


def go_on_without_a_journal(patch: Patch) -> None:
    """Commands run although their records could not be written."""
    flush = Controller._make_durable

    async def bold(self: Controller) -> bool:
        await flush(self)
        return True

    patch.setattr(Controller, "_make_durable", bold)


def forget_that_the_journal_is_lost(patch: Patch) -> None:
    """Records that could not be written are taken for written."""

    async def deaf(self: Controller) -> bool:
        try:
            await self._journal.flush()
        except StorageError:
            journal = self._journal._journal
            journal._unsaved.clear()
            journal.saved = journal.appended
        return True

    patch.setattr(Controller, "_make_durable", deaf)


def read_the_journal_before_the_indices(patch: Patch) -> None:
    class Early(Catalog):
        def survey(self) -> Any:
            ends[self._store] = position(self._store)
            if ends[self._store].key:  # not the first controller
                current().sleep(8.0)
            return super().survey()

    ends: dict[Store, Position] = {}
    patch.setattr(lease, "Catalog", Early)
    patch.setattr(lease, "position", lambda store: ends[store])
    _reserve_without_looking_at_the_fence(patch)


def read_the_journal_before_the_lease_is_held(patch: Patch) -> None:
    read = read_history
    seen: dict[Store, History] = {}

    def early(store: Store) -> History:
        if store not in seen:
            seen[store] = read(store)
        return seen[store]

    patch.setattr(drivers, "read_history", early)
    patch.setattr(Checkers, "read_history", lambda self, driver, durable: None)


def read_what_was_cut_off(patch: Patch) -> None:
    patch.setattr(JournalReader, "_limit", lambda self, epoch: float("inf"))


def stop_reading_at_a_torn_line(patch: Patch) -> None:
    joined = JournalReader._joined

    def strict(self: JournalReader, text: bytes) -> list[Line]:
        found = joined(self, text)
        if text and not found:
            raise Damaged("the journal is torn")
        return found

    patch.setattr(JournalReader, "_joined", strict)


def trust_the_name_of_a_torn_segment(patch: Patch) -> None:
    """A segment is taken to hold what its name says: gaps are not told, and later records take the place."""
    parse = JournalReader._parse

    def trusting(self: JournalReader, segment: Segment, blocks: Iterable[bytes], first: int = 1) -> Iterator[Line]:
        n = segment.first
        for line in parse(self, segment, blocks, first):
            yield line._replace(n=n) if not segment.lease else line
            n += 1
        while segment.last is not None and n <= segment.last:
            yield Line(n, "", 0, r.RunInterrupted(at=0.0, why="torn"))
            n += 1

    patch.setattr(JournalReader, "_parse", trusting)


# ---------------------------------------------------------------- checkpoints


def call_a_commit_failed_that_was_made(patch: Patch) -> None:
    persist = Persister.persist

    async def confused(self: Persister, command: c.PersistCheckpoint) -> Any:
        outcome = await persist(self, command)
        if isinstance(outcome, e.CheckpointStored) and current().uniform(0, 1) < 0.2:
            return e.CheckpointFailed(ticket=command.ticket, error="no answer")
        return outcome

    patch.setattr(Persister, "persist", confused)


def try_again_with_another_token(patch: Patch) -> None:
    reserve_once = Persister._reserve

    def forgetful(self: Persister, command: c.PersistCheckpoint, token: str) -> Draft:
        return reserve_once(self, command, current().token_hex(16))

    patch.setattr(Persister, "_reserve", forgetful)


def take_the_answer_of_an_earlier_upload(patch: Patch) -> None:
    """An agent's answer is taken for that to the present order, whichever ticket it names."""

    def lax(self: Persister, answer: Any) -> None:
        for (_, rank), waiting in self._answers.items():
            if rank == answer.rank and not waiting.done() and hasattr(answer, "files"):
                waiting.set_result(answer)

    patch.setattr(Persister, "deliver", lax)


def commit_for_a_dead_controller_what_is_not_whole(patch: Patch) -> None:
    """Part records of some ranks are taken for those of all."""
    read = part_records._read_records

    def lax(store: Store, name: str, token: str) -> dict[int, PartRecord]:
        found = read(store, name, token)
        return {rank: msgspec.structs.replace(one, ranks=tuple(found)) for rank, one in found.items()}

    patch.setattr(part_records, "_read_records", lax)


# ---------------------------------------------------------------- agents


def forget_those_who_never_came(patch: Patch) -> None:
    patch.setattr(RunAgents, "unavailable", lambda self, why: None)


def lose_no_agent_that_is_silent(patch: Patch) -> None:
    patch.setattr(AgentPool, "ping", lambda self, limit, silence_s: None)


def _reserve_without_looking_at_the_fence(patch: Patch) -> None:
    """The looks before and after a reservation cover some mutants up: a controller that was taken over does not get as
    far as it must to show them."""

    class Blind(Catalog):
        def survey(self) -> Any:
            found = super().survey()
            found.fences = Fences()
            return found

    patch.setattr(reserving, "Catalog", Blind)
    patch.setattr(reserving, "list_epochs", lambda store: {})


def answer_stop_before_the_workers_are_gone(patch: Patch) -> None:
    stop = RunHost._stop

    async def hasty(self: RunHost, command: c.StopWorkers) -> None:
        self._send(e.WorkersStopped(generation=command.generation, agent=self._agent))
        await stop(self, command)

    patch.setattr(RunHost, "_stop", hasty)


def start_although_stopped_meanwhile(patch: Patch) -> None:
    """A generation that is being started is not cancelled when it is stopped."""
    stop = RunHost._stop

    async def deaf(self: RunHost, command: c.StopWorkers) -> None:
        self._starting = None
        await stop(self, command)

    patch.setattr(RunHost, "_stop", deaf)


def drop_parts_with_their_generation(patch: Patch) -> None:
    ended = RunStorage.generation_ended

    def careless(self: RunStorage, staging: Path) -> None:
        ended(self, staging)
        self.parts._parts.clear()

    patch.setattr(RunStorage, "generation_ended", careless)


def answer_for_another_draft(patch: Patch) -> None:
    """The answer to an upload names a draft that there is not."""
    upload = Parts._upload

    async def confused(self: Parts, order: Any, store: Any, threads: int) -> Any:
        answer = await upload(self, order, store, threads)
        return msgspec.structs.replace(answer, token=order.draft.token[::-1])

    patch.setattr(Parts, "_upload", confused)


def linger_without_records(patch: Patch) -> None:
    """An agent whose controller died finishes the uploads and leaves no record of them."""
    patch.setattr(part_records, "write_part_record", lambda *arguments, **options: True)


def end_with_the_controller(patch: Patch) -> None:
    """An agent whose controller died finishes nothing."""
    patch.setattr(RunHost, "finish_uploads", lambda self: asyncio.sleep(0))


def record_a_part_that_failed(patch: Patch) -> None:
    """An upload that failed counts as done when the controller has died."""
    upload = Parts._upload

    async def hopeful(self: Parts, order: Any, store: Any, threads: int) -> Any:
        answer = await upload(self, order, store, threads)
        stored = m.Uploaded(ticket=order.ticket, rank=order.rank, token=order.draft.token, files=[])
        return stored if hasattr(answer, "kind") else answer

    patch.setattr(Parts, "_upload", hopeful)


def give_the_snapshot_of_another_checkpoint(patch: Patch) -> None:
    """What lies in memory is taken for the checkpoint to start from, whichever it is."""

    def snapshots(self: Buffers, token: str | None) -> Any:
        found = [one.snapshot for one in self._buffers.values() if token and one.token and one.snapshot is not None]
        return [one for one in found if self.is_intact(one)]

    patch.setattr(Buffers, "snapshots", snapshots)


def lose_the_last_reports_of_the_dead(patch: Patch) -> None:
    """What a worker had sent before it died, and was not read yet, is dropped."""

    def drain(self: Connection) -> None:
        self.alive = False

    patch.setattr(Connection, "drain", drain)


# ---------------------------------------------------------------- several runs on shared agents


def carry_out_the_command_for_another_run(patch: Patch) -> None:
    """An agent gives a command to the run that came to it first, whichever it names."""
    handle = Agent._handle

    def confused(self: Agent, run: str, message: m.ControllerMessage) -> None:
        is_command = isinstance(message, c.StartWorkers | c.StopWorkers | c.AnnounceCheckpoint | m.Upload)
        handle(self, next(iter(self._runs), run) if is_command else run, message)

    patch.setattr(Agent, "_handle", confused)


def stop_the_workers_of_another_run(patch: Patch) -> None:
    """A generation's number alone says which workers are to be stopped."""
    handle = Agent._handle

    def careless(self: Agent, run: str, message: m.ControllerMessage) -> None:
        for one in list(self._runs) if isinstance(message, c.StopWorkers) else [run]:
            handle(self, one, message)

    patch.setattr(Agent, "_handle", careless)


def close_all_runs_with_one(patch: Patch) -> None:
    close = Agent._close_run

    async def careless(self: Agent, run: str, flush_s: float) -> None:
        await asyncio.gather(*(close(self, one, flush_s) for one in {*self._runs, run}))

    patch.setattr(Agent, "_close_run", careless)


def keep_parts_of_all_runs_together(patch: Patch) -> None:
    """Parts are found by generation and report, whichever run's they are."""
    init = RunHost.__init__
    parts: dict[Any, Any] = {}

    def sharing(self: RunHost, run: str, node: Any, platform: Any, *rest: Any) -> None:
        init(self, run, node, platform, *rest)
        self._storage.parts._parts = parts.setdefault(platform, self._storage.parts._parts)

    patch.setattr(RunHost, "__init__", sharing)


def deliver_to_every_run(patch: Patch) -> None:
    """What an agent sends is received by all runs that have places there."""
    receive = RunAgents.receive

    def gossip(self: RunAgents, agent: str, message: m.AgentMessage) -> None:
        for run in list(self._pool._runs.values()):
            if agent in run.links and not isinstance(message, m.RunClosed | e.AgentPrepared):
                receive(run, agent, message)
        if isinstance(message, m.RunClosed | e.AgentPrepared):
            receive(self, agent, message)

    patch.setattr(RunAgents, "receive", gossip)


def tell_one_run_of_a_lost_agent(patch: Patch) -> None:
    lost = RunAgents.lost
    told: dict[AgentLink, RunAgents] = {}

    def only_first(self: RunAgents, agent: str, why: str) -> None:
        if (link := self.links.get(agent)) is not None and told.setdefault(link, self) is self:
            lost(self, agent, why)

    patch.setattr(RunAgents, "lost", only_first)


def grant_a_place_twice(patch: Patch) -> None:
    """What a run was given is still free for the next."""
    grant = Admission._grant

    def generous(self: Admission, request: Any, agent: str, count: int, left: Any) -> Grant:
        free = self._free[agent].copy()
        granted = grant(self, request, agent, count, left)
        self._free[agent] = free
        self._agent_changed(agent)
        return granted

    patch.setattr(Admission, "_grant", generous)


def give_no_place_back(patch: Patch) -> None:
    patch.setattr(Admission, "release", lambda self, run, agent: [])


# ---------------------------------------------------------------- notices, stops, hosts


def count_preemptions_as_failures(patch: Patch) -> None:
    patch.setattr(preemption, "preemption_of", lambda generation: None)


def count_each_drain_as_a_preemption(patch: Patch) -> None:
    gather = planned_change._gather

    def late(state: State, generation: Generation, change: Any, now: float, out: machine.Output) -> None:
        gather(state, generation, change, now, out)
        change.timed_out = generation.stop_reason is not None

    patch.setattr(preemption, "preemption_of", lambda generation: generation.preemption)
    patch.setattr(planned_change, "_gather", late)


def survive_any_number_of_preemptions(patch: Patch) -> None:
    patch.setattr(preemption, "is_spent", lambda state: state.durable.preemptions > 0)


def count_room_that_went_away(patch: Patch) -> None:
    """Who leaves before the settling time is over still makes a resize, of whoever comes next."""

    def watch(state: State, generation: Generation, now: float) -> None:
        if planned_change._largest(state) > generation.world_size and state.may_grow_since is None:
            state.may_grow_since = now

    patch.setattr(planned_change, "_watch_growth", watch)


def stop_without_a_last_checkpoint(patch: Patch) -> None:
    patch.setattr(CheckpointInterval, "next_within_s", lambda self, limit_s, now: 0.0)


def wait_for_a_last_checkpoint_for_ever(patch: Patch) -> None:
    patch.setattr(CheckpointInterval, "next_within_s", lambda self, limit_s, now: 300.0)


def set_a_host_aside_at_its_first_failure(patch: Patch) -> None:
    patch.setattr(quarantine, "FAILURES", 1)


def set_no_host_aside(patch: Patch) -> None:
    patch.setattr(quarantine, "count_failure", lambda state, generation, now, out: None)


def start_workers_on_hosts_that_are_set_aside(patch: Patch) -> None:
    patch.setattr(AgentPool, "set_aside", lambda self, host, why, duration_s, run: None)


def set_aside_only_what_the_largest_world_can_do_without(patch: Patch) -> None:
    set_aside = AgentPool.set_aside

    def rarely(self: AgentPool, host: str, why: str, duration_s: float, run: RunAgents) -> None:
        gang = run.gang
        run.gang = msgspec.structs.replace(gang, min_workers=None)
        set_aside(self, host, why, duration_s, run)
        run.gang = gang

    patch.setattr(AgentPool, "set_aside", rarely)


def start_before_a_host_is_set_aside(patch: Patch) -> None:
    count = quarantine.count_failure

    def hasty(state: State, generation: Generation, now: float, out: machine.Output) -> None:
        count(state, generation, now, out)
        state.setting_aside.clear()

    patch.setattr(quarantine, "count_failure", hasty)


# ---------------------------------------------------------------- data


def forget_what_was_to_be_validated(patch: Patch) -> None:
    """What a report asks for is not written down."""
    patch.setattr(validation, "record_request", lambda *_: None)


def resume_no_validation(patch: Patch) -> None:
    """One that a controller has begun is left to it, also when it is dead."""
    due_names, validate_next = validation.due_names, validation.validate_next
    begun: set[str] = set()

    def due(state: State) -> set[str]:
        return {name for name in due_names(state) if state.durable.validations[name].token not in begun}

    def begin(state: State, out: machine.Output) -> None:
        validate_next(state, out)
        if state.validating is not None:
            begun.add(state.validating[1])

    patch.setattr(validation, "due_names", due)
    patch.setattr(validation, "validate_next", begin)


def write_a_score_down_twice(patch: Patch) -> None:
    finish = validation.finish_validation

    def again(state: State, event: e.ValidationFinished, now: float, out: machine.Output) -> None:
        validating = state.validating
        finish(state, event, now, out)
        state.validating = validating
        finish(state, event, now, out)

    patch.setattr(validation, "finish_validation", again)


def save_what_ranks_were_given_last(patch: Patch) -> None:
    """The checkpoint of a report holds the positions of a later one."""

    def keep(state: State, generation: Generation, rank: int, item: Any) -> None:
        kept = generation.worker_states
        for number in [*(one for one in kept if one < item.number), item.number]:
            kept.setdefault(number, {})[rank] = item.worker_state

    patch.setattr(pending_checkpoints, "_keep_worker_state", keep)


def save_where_one_rank_was(patch: Patch) -> None:
    put = worker_states.put_worker_states

    def alone(store: Store, name: str, world_size: int, states: dict[int, bytes]) -> Any:
        return put(store, name, world_size, {min(states): states[min(states)]})

    patch.setattr(persister, "put_worker_states", alone)


def begin_an_epoch_anew_in_another_world(patch: Patch) -> None:
    restore = elastic.Progress.restore

    def forget(self: elastic.Progress, states: Any, world_size: int) -> None:
        restore(self, states if world_size == self._world_size else {}, world_size)

    patch.setattr(elastic.Progress, "restore", forget)


def give_two_ranks_one_sample(patch: Patch) -> None:
    split = elastic.split

    def generous(count: int, rank: int, world_size: int) -> elastic.Share:
        share = split(count, rank, world_size)
        return msgspec.structs.replace(share, stop=min(share.stop + 1, count))

    patch.setattr(elastic, "split", generous)


# ---------------------------------------------------------------- memory of neighbours


def take_whatever_neighbours_send(patch: Patch) -> None:
    """What comes is not compared with the manifest."""
    patch.setattr(snapshot_fetch, "mismatch", lambda *_: None)


def read_nothing_where_neighbours_fail(patch: Patch) -> None:
    """What no neighbour gives is taken for read."""
    patch.setattr(SnapshotFetch, "_read_stored", lambda *_: None)


def give_neighbours_any_checkpoint(patch: Patch) -> None:
    """What lies in memory is taken for the checkpoint that is asked for; hashes catch it at the other end."""
    stored_files, open_file = Buffers.stored_files, Buffers.open_file

    def stale(self: Buffers, token: str) -> str:
        return next((one.token for one in self._buffers.values() if one.token is not None), token)

    patch.setattr(Buffers, "stored_files", lambda self, token: stored_files(self, stale(self, token)))
    patch.setattr(Buffers, "open_file", lambda self, token, path: open_file(self, stale(self, token), path))


def keep_what_was_fetched_for_the_next_checkpoint(patch: Patch) -> None:
    """It goes on to be taken for what workers start from when there is a newer commit."""
    release = Buffers.release

    def released(self: Buffers, ticket: e.Ticket, token: str | None) -> None:
        release(self, ticket, token)
        for buffer in self._buffers.values():
            if buffer.is_fetched and token is not None:
                buffer.token = token

    patch.setattr(Buffers, "release", released)
    patch.setattr(Buffers, "_close_unused", lambda *_: None)


# ---------------------------------------------------------------- agents that come back


def send_nothing_again(patch: Patch) -> None:
    """What was on its way when the connection broke is taken for received."""
    patch.setattr(ResumableChannel, "_attach", _without_resending(ResumableChannel._attach))


def _without_resending(attach: Any) -> Any:
    def attached(self: ResumableChannel[Any], channel: Any, received: int) -> None:
        attach(self, channel, self._sent)

    return attached


def send_everything_again_under_new_numbers(patch: Patch) -> None:
    """The receiver cannot tell that it has some of it already."""
    attach = ResumableChannel._attach

    def careless(self: ResumableChannel[Any], channel: Any, received: int) -> None:
        kept = [frame for _, frame in self._unacknowledged]
        attach(self, channel, received)
        for frame in kept:
            known: Envelope[Any] = msgspec.msgpack.decode(frame[HEADER_BYTES:], type=Envelope[msgspec.Raw])
            if known.sequence <= received:
                self.send_nowait(known.message, known.run)

    patch.setattr(ResumableChannel, "_attach", careless)


def lose_an_agent_with_its_connection(patch: Patch) -> None:
    receive = AgentPool._receive

    async def impatient(self: AgentPool, link: AgentLink) -> None:
        await receive(self, link)
        if not link.channel.is_connected:
            self.lose(link, "its connection closed")

    patch.setattr(AgentPool, "_receive", impatient)


def let_workers_go_on_without_a_controller(patch: Patch) -> None:
    end = Agent._end_runs

    async def lenient(self: Agent) -> None:
        if not self._comes_back:
            await end(self)

    patch.setattr(Agent, "_end_runs", lenient)


def take_a_rank_for_waiting_after_its_commit(patch: Patch) -> None:
    patch.setattr(states.Generation, "settle", lambda self, number, now: self.waiting_in.clear())


async def _ignore(work: Any) -> None:
    await work


def current_process() -> Any:
    from holdfast.checkpoint.process_identity import this_process

    return this_process()


def _has(scenario: Scenario, *kinds: str) -> bool:
    return any(fault.kind in kinds for fault in scenario.faults)


def _is_taken_over(scenario: Scenario) -> bool:
    return _has(scenario, "overtake", "take_over")


def _is_taken_over_twice(scenario: Scenario) -> bool:
    return sum(fault.kind in ("overtake", "take_over") for fault in scenario.faults) > 1


def _changes(scenario: Scenario) -> bool:
    return _has(scenario, "drain", "preempt")


def _scales(scenario: Scenario) -> bool:
    return _has(scenario, "scale")


def _shares(scenario: Scenario) -> bool:
    return bool(scenario.others)


def _is_announced(scenario: Scenario) -> bool:
    return scenario.only_announced


def _has_data(scenario: Scenario) -> bool:
    return scenario.data is not None


def _reconnects(scenario: Scenario) -> bool:
    return scenario.agents_come_back


def _reads_neighbours(scenario: Scenario) -> bool:
    return scenario.streams and scenario.spec.workers_max > 1 and scenario.checkpoint_ranks != "last"


def _always(scenario: Scenario) -> bool:
    return True


MUTANTS: dict[Callable[[Patch], None], Callable[[Scenario], bool]] = {
    form_while_a_checkpoint_is_pending: _always,
    count_no_failure: _always,
    take_reports_of_any_generation: _always,
    start_before_the_old_are_gone: _always,
    delete_the_newest: _always,
    write_a_deletion_down_before_it_is_done: _always,
    use_a_name_before_its_old_checkpoint_is_gone: lambda one: one.names_in_turn,
    end_before_removals_are_answered: lambda one: one.spec.retention.num_to_keep is not None,
    resume_from_the_oldest: _always,
    trust_the_journal_over_storage: _always,
    give_up_what_the_living_hold: lambda one: one.whole_parts,
    take_any_part_for_the_whole: lambda one: one.checkpoint_ranks == "all" and not one.whole_parts,
    commit_what_lost_a_part: lambda one: _has(one, "kill_node", "cut_link"),
    wait_for_ranks_that_are_gone: _always,
    see_no_hang: _always,
    excuse_all_while_one_waits: _always,
    take_a_rank_for_waiting_after_its_commit: lambda one: one.waits_for_commits and _has(one, "hang_worker"),
    go_on_after_being_fenced: _is_taken_over,
    set_a_deadline_that_has_passed: _always,
    let_the_fenced_commit: _is_taken_over,
    forget_the_floor: _is_taken_over,
    leave_reservations_open: lambda one: _has(one, "overtake") and one.beat_s > 3.0 and one.iterations >= 6,
    let_the_overtaken_settle: _is_taken_over_twice,
    reserve_as_whoever_counts: _is_taken_over,
    remove_without_looking_at_the_lease: lambda one: _is_taken_over(one) and one.spec.retention.num_to_keep is not None,
    commit_without_looking_at_the_reservation: lambda one: _is_taken_over(one) and one.names_in_turn,
    create_without_refusal_where_storage_has_none: lambda one: _is_taken_over(one) and not one.exclusive,
    run_commands_before_records_are_durable: _always,
    go_on_without_a_journal: lambda one: _has(one, "outage"),
    forget_that_the_journal_is_lost: _always,
    read_the_journal_before_the_indices: _is_taken_over,
    read_the_journal_before_the_lease_is_held: _is_taken_over,
    read_what_was_cut_off: _is_taken_over,
    stop_reading_at_a_torn_line: lambda one: one.tears and _has(one, "kill_driver"),
    trust_the_name_of_a_torn_segment: lambda one: one.tears and _has(one, "kill_driver"),
    call_a_commit_failed_that_was_made: _always,
    try_again_with_another_token: lambda one: one.names_in_turn and one.storage_trouble > 0 and not one.retries,
    take_the_answer_of_an_earlier_upload: lambda one: one.repeats > 0,
    commit_for_a_dead_controller_what_is_not_whole: lambda one: (
        one.checkpoint_ranks == "all" and _has(one, "kill_driver")
    ),
    forget_those_who_never_came: _always,
    lose_no_agent_that_is_silent: _always,
    answer_stop_before_the_workers_are_gone: _always,
    start_although_stopped_meanwhile: _always,
    drop_parts_with_their_generation: _always,
    answer_for_another_draft: _always,
    linger_without_records: lambda one: _has(one, "kill_driver"),
    end_with_the_controller: lambda one: _has(one, "kill_driver"),
    record_a_part_that_failed: lambda one: one.storage_trouble > 0,
    give_the_snapshot_of_another_checkpoint: lambda one: one.spec.max_failures != 0,
    change_the_group_at_any_commit: _changes,
    grow_without_a_settling_time: _changes,
    let_no_rank_go_on: _changes,
    start_with_fewer_workers_than_are_needed: _changes,
    forget_the_bounds_that_were_set: lambda one: _scales(one) and _has(one, "kill_driver", "take_over", "stop"),
    start_with_more_workers_than_are_wanted: _scales,
    give_places_back_that_are_in_use: _scales,
    count_preemptions_as_failures: _is_announced,
    count_each_drain_as_a_preemption: _is_announced,
    survive_any_number_of_preemptions: _is_announced,
    count_room_that_went_away: lambda one: _has(one, "flap"),
    stop_without_a_last_checkpoint: lambda one: _has(one, "stop") and one.asks,
    wait_for_a_last_checkpoint_for_ever: lambda one: _has(one, "stop") and one.asks,
    set_a_host_aside_at_its_first_failure: _always,
    set_no_host_aside: lambda one: one.hosts > 0,
    start_workers_on_hosts_that_are_set_aside: lambda one: one.hosts > 0,
    set_aside_only_what_the_largest_world_can_do_without: lambda one: (
        one.hosts > 0 and one.spec.workers_min < one.spec.workers_max
    ),
    start_before_a_host_is_set_aside: lambda one: one.hosts > 0,
    forget_what_was_to_be_validated: lambda one: one.validates,
    resume_no_validation: lambda one: one.validates,
    write_a_score_down_twice: lambda one: one.validates,
    save_what_ranks_were_given_last: _has_data,
    save_where_one_rank_was: lambda one: one.data is not None and one.data.uneven and one.spec.workers_max > 1,
    begin_an_epoch_anew_in_another_world: lambda one: _has_data(one) and one.spec.workers_min < one.spec.workers_max,
    give_two_ranks_one_sample: lambda one: _has_data(one) and one.spec.workers_max > 1,
    lose_the_last_reports_of_the_dead: _always,
    carry_out_the_command_for_another_run: _shares,
    stop_the_workers_of_another_run: _shares,
    close_all_runs_with_one: _shares,
    keep_parts_of_all_runs_together: _shares,
    deliver_to_every_run: _shares,
    tell_one_run_of_a_lost_agent: lambda one: _shares(one) and _has(one, "kill_node", "cut_link"),
    grant_a_place_twice: lambda one: _shares(one) and one.agent_slots > 0,
    give_no_place_back: lambda one: _shares(one) and one.agent_slots > 0 and one.runs_take_turns,
    take_whatever_neighbours_send: _reads_neighbours,
    read_nothing_where_neighbours_fail: _reads_neighbours,
    give_neighbours_any_checkpoint: _reads_neighbours,
    keep_what_was_fetched_for_the_next_checkpoint: _reads_neighbours,
    send_nothing_again: _reconnects,
    send_everything_again_under_new_numbers: _reconnects,
    lose_an_agent_with_its_connection: _reconnects,
    let_workers_go_on_without_a_controller: _reconnects,
}
"""Each with the scenarios that may find it; the others cannot, and are left out to save time."""


_FOUND_BY: dict[Callable[[Patch], None], list[int]] = {
    count_preemptions_as_failures: [2390],
    count_each_drain_as_a_preemption: [28],
    tell_one_run_of_a_lost_agent: [153],
    survive_any_number_of_preemptions: [142],
    count_room_that_went_away: [93],
    stop_without_a_last_checkpoint: [68],
    wait_for_a_last_checkpoint_for_ever: [90],
    set_a_host_aside_at_its_first_failure: [5],
    set_no_host_aside: [29],
    start_workers_on_hosts_that_are_set_aside: [29],
    start_before_a_host_is_set_aside: [562],
    save_what_ranks_were_given_last: [344],
    save_where_one_rank_was: [67],
    take_any_part_for_the_whole: [48],
    change_the_group_at_any_commit: [21],
    grow_without_a_settling_time: [1043],
    let_no_rank_go_on: [341],
    start_with_fewer_workers_than_are_needed: [9],
    forget_the_bounds_that_were_set: [51],
    start_with_more_workers_than_are_wanted: [69],
    give_places_back_that_are_in_use: [31],
    form_while_a_checkpoint_is_pending: [9],
    count_no_failure: [9],
    take_reports_of_any_generation: [64],
    start_before_the_old_are_gone: [9],
    use_a_name_before_its_old_checkpoint_is_gone: [198],
    resume_from_the_oldest: [9],
    end_before_removals_are_answered: [34],
    wait_for_ranks_that_are_gone: [22],
    excuse_all_while_one_waits: [63],
    forget_the_floor: [132],
    commit_what_lost_a_part: [48],
    see_no_hang: [63],
    let_the_fenced_commit: [39],
    let_the_overtaken_settle: [1545],
    remove_without_looking_at_the_lease: [16],
    go_on_without_a_journal: [225],
    read_the_journal_before_the_indices: [76],
    read_what_was_cut_off: [16],
    trust_the_name_of_a_torn_segment: [259],
    leave_reservations_open: [39],
    reserve_as_whoever_counts: [16],
    commit_without_looking_at_the_reservation: [4775],
    forget_that_the_journal_is_lost: [19],
    read_the_journal_before_the_lease_is_held: [17],
    stop_reading_at_a_torn_line: [259],
    try_again_with_another_token: [13832],
    commit_for_a_dead_controller_what_is_not_whole: [211],
    call_a_commit_failed_that_was_made: [31],
    take_the_answer_of_an_earlier_upload: [41],
    forget_those_who_never_came: [97],
    answer_stop_before_the_workers_are_gone: [6],
    drop_parts_with_their_generation: [9],
    linger_without_records: [174],
    record_a_part_that_failed: [52],
    lose_the_last_reports_of_the_dead: [6],
    lose_no_agent_that_is_silent: [118],
    start_although_stopped_meanwhile: [136],
    end_with_the_controller: [174],
    give_the_snapshot_of_another_checkpoint: [23],
    stop_the_workers_of_another_run: [15],
    grant_a_place_twice: [9],
    send_nothing_again: [19],
    send_everything_again_under_new_numbers: [106],
    lose_an_agent_with_its_connection: [32],
    let_workers_go_on_without_a_controller: [51],
}
"""Seeds that found mutants which take many, tried first to save time. After a change of the simulator they may find
nothing, which costs one seed each: then the search finds another."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_seed_finds_the_mutant(mutant: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match="Replay it with"):
        run_seeds(_seeds(mutant))


def _seeds(mutant: Callable[[Patch], None]) -> Iterator[int]:
    """The seed that found the mutant lately, then the first of all seeds whose scenarios may find it."""
    may_find = MUTANTS[mutant]
    return chain(_FOUND_BY.get(mutant, ()), islice((seed for seed in count() if may_find(draw(seed))), _SEEDS))
