"""Carrying out `PersistCheckpoint`: reserve a name, have the agents upload their parts, create the manifest.

Storage that fails for a while is waited for, since training goes on meanwhile; what cannot get better (no permission,
two ranks with the same file, a name in use) ends the ticket at once and, being fatal, the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from msgspec import UNSET, UnsetType

from holdfast.checkpoint import commit
from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.reserve import reserve
from holdfast.checkpoint.upload import merge_parts, owned_by_others
from holdfast.checkpoint.worker_states import put_worker_states
from holdfast.control.agent_link import AgentLink
from holdfast.control.blocking_calls import BlockingCalls
from holdfast.control.lease import GuestLease, Lease
from holdfast.control.retry import retry_for
from holdfast.control.run_agents import RunAgents
from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core.checkpoint_types import CheckpointInfo, Draft, FileEntry
from holdfast.core.failure_kind import FailureKind
from holdfast.errors import DuplicateFile, HoldfastError, OutOfSpace, StorageError, Unavailable
from holdfast.runtime import current
from holdfast.storage.store import Store
from holdfast.wire.messages import Upload, Uploaded, UploadFailed

__all__ = ["Persister"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class _AgentGone(Exception):
    """The agent that held a part is lost, and the part with it."""


class Persister:
    """Persists one ticket at a time. `deliver` hands it the agents' answers."""

    def __init__(
        self,
        store: Store,
        lease: Lease | GuestLease,
        agents: RunAgents,
        patience_s: float,
        blocking: BlockingCalls,
        *,
        refuse_conflicts: bool = False,
    ) -> None:
        """`refuse_conflicts`: a file name that several ranks give is an error."""
        self._store = store
        self._lease = lease
        self._agents = agents
        agents.on_upload = self.deliver
        self._patience_s = patience_s
        self._blocking = blocking
        self._refuse_conflicts = refuse_conflicts
        self._warned = False
        self._answers: dict[tuple[str, int], asyncio.Future[Uploaded]] = {}
        """By the draft's token and the rank: what is uploaded to a draft that was given up is of no use to the next."""
        self._parent: Manifest | None = None

    async def persist(self, command: c.PersistCheckpoint) -> e.CheckpointStored | e.CheckpointFailed:
        """Never raises for what storage or agents did: the outcome is an event."""
        clock = asyncio.get_running_loop().time
        began = clock()
        draft: Draft | None = None
        try:
            # One token for all tries, or a reservation whose answer was lost would be taken for another writer's.
            token = current().token_hex(16)
            hash_only = self._find_conflicts(command)
            links = {agent: self._agents.links.get(agent) for _, agent in command.parts}
            draft = await self._retry(lambda: self._blocking.run(self._reserve, command, token))
            made = draft
            worker_states: FileEntry | UnsetType = UNSET
            if command.worker_states:  # before any upload: agents that finish those without us name it in their records
                worker_states = await self._retry(lambda: self._blocking.run(self._put_worker_states, command, made))
            answers = await self._upload(command, draft, links, hash_only, worker_states)
            files = merge_parts({rank: answer.files for rank, answer in answers.items()})
            self._warn_of_differences(files)

            def seal() -> Manifest:
                manifest = commit.commit(
                    self._store,
                    made,
                    files,
                    metrics=command.metrics,
                    world_size=command.world_size,
                    generation=command.ticket.generation,
                    iteration=command.iteration,
                    worker_states=worker_states,
                )
                self._lease.check_commit()
                return manifest

            self._parent = await self._retry(lambda: self._blocking.run(seal))
        except (HoldfastError, _AgentGone) as error:
            if draft is not None:
                await self._abandon(draft, command.adopt)
            fatal = not isinstance(error, _AgentGone)
            kind = FailureKind.of(error) if fatal else FailureKind.STORAGE
            return e.CheckpointFailed(ticket=command.ticket, error=str(error), kind=kind, fatal=fatal)
        stored = self._parent.stored
        sent = sum(answer.uploaded_bytes for answer in answers.values())
        elapsed_s = clock() - began
        return e.CheckpointStored(ticket=command.ticket, stored=stored, uploaded_bytes=sent, elapsed_s=elapsed_s)

    def deliver(self, answer: Uploaded | UploadFailed) -> None:
        """An agent's answer to an `Upload`."""
        waiting = self._answers.get((answer.token, answer.rank))
        if waiting is None or waiting.done():
            return
        if isinstance(answer, Uploaded):
            waiting.set_result(answer)
        else:
            waiting.set_exception(answer.kind.as_error(answer.error, otherwise=StorageError))

    def _find_conflicts(self, command: c.PersistCheckpoint) -> dict[int, frozenset[str]]:
        """The files of each rank that a lower rank gives as well; `DuplicateFile` if the user wants none."""
        names = command.file_names
        found = owned_by_others(names)
        if self._refuse_conflicts:
            for rank, taken in found.items():
                for path in sorted(taken):
                    first = min(other for other in names if path in names[other])
                    raise DuplicateFile(
                        f"Ranks {first} and {rank} both reported a file {path!r}: give each rank's file a name of its "
                        "own, for example with the rank in it."
                    )
        return found

    def _warn_of_differences(self, files: Sequence[FileEntry]) -> None:
        """Once a run: what is kept of a file whose ranks do not agree may not be what was meant."""
        for entry in files:
            if entry.differing_ranks and not isinstance(entry.differing_ranks, UnsetType) and not self._warned:
                self._warned = True
                others = ", ".join(map(str, entry.differing_ranks))
                _log.warning(
                    "Ranks %d and %s reported the file %r with different bytes: rank %d's is kept. Report it from one "
                    "rank only, or give each rank's file a name of its own.",
                    entry.rank,
                    others,
                    entry.path,
                    entry.rank,
                )

    async def _upload(
        self,
        command: c.PersistCheckpoint,
        draft: Draft,
        links: Mapping[str, AgentLink | None],
        hash_only: Mapping[int, frozenset[str]],
        worker_states: FileEntry | UnsetType,
    ) -> dict[int, Uploaded]:
        parent_files = list(self._parent.files) if self._parent and self._parent.name == draft.parent else []
        ranks = [rank for rank, _ in command.parts]
        info = CheckpointInfo(
            ranks=tuple(ranks),
            world_size=command.world_size,
            iteration=command.iteration,
            metrics=command.metrics,
            worker_states=worker_states,
        )
        asking = [
            asyncio.ensure_future(
                self._retry(
                    partial(self._ask, command.ticket, draft, rank, agent, links[agent], parent_files, hashed, info)
                )
            )
            for rank, agent in command.parts
            for hashed in [hash_only.get(rank, ())]
        ]
        try:
            found = await asyncio.gather(*asking)
        finally:  # after the first failure nobody asks for the other parts again
            for one in asking:
                one.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        return dict(zip(ranks, found, strict=True))

    async def _ask(
        self,
        ticket: e.Ticket,
        draft: Draft,
        rank: int,
        agent: str,
        link: AgentLink | None,
        parent_files: list[FileEntry],
        hash_only: Collection[str],
        info: CheckpointInfo,
    ) -> Uploaded:
        if link is None or self._agents.links.get(agent) is not link:  # another of that name has no part
            raise _AgentGone(f"agent {agent} was lost with the part of rank {rank}")
        answer: asyncio.Future[Uploaded] = asyncio.get_running_loop().create_future()
        self._answers[draft.token, rank] = answer
        gone = asyncio.ensure_future(link.gone.wait())
        either: set[asyncio.Future[Any]] = {answer, gone}
        try:
            self._agents.send(
                [agent],
                Upload(
                    ticket=ticket,
                    rank=rank,
                    draft=draft,
                    parent_files=parent_files,
                    hash_only=tuple(sorted(hash_only)),
                    info=info,
                ),
            )
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise _AgentGone(f"agent {agent} was lost while it stored the part of rank {rank}")
            return answer.result()
        finally:
            gone.cancel()
            self._answers.pop((draft.token, rank), None)

    def _reserve(self, command: c.PersistCheckpoint, token: str) -> Draft:
        self._lease.make_fence()
        draft = reserve(
            self._store,
            epoch=self._lease.epoch,
            name=command.name,
            at_least=command.at_least_index,
            adopt=command.adopt,
            token=token,
        )
        if draft.parent is not None and (self._parent is None or self._parent.name != draft.parent):
            # None if somebody has removed it since: then there is nothing to copy from.
            self._parent = Catalog(self._store).read_manifest(draft.parent).manifest
        return draft

    def _put_worker_states(self, command: c.PersistCheckpoint, draft: Draft) -> FileEntry:
        return put_worker_states(self._store, draft.name, command.world_size, command.worker_states)

    async def _abandon(self, draft: Draft, adopt: bool) -> None:
        try:
            await self._blocking.run(partial(commit.abandon, self._store, draft, adopt=adopt))
        except HoldfastError as error:
            _log.info("What was uploaded of %s stays until the next clean-up: %s", draft.name, error)

    async def _retry(self, action: Callable[[], Awaitable[_T]]) -> _T:
        warning = "Storage trouble; training goes on while it is tried again"
        return await retry_for(self._patience_s, action, (Unavailable, OutOfSpace), warning)
