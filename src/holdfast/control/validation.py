"""Carrying out `RunValidation`: a worker beside those that train calls the user's function on a committed checkpoint.

It is a guest of the hub like the run itself, with a gang of its own, but without a core, a journal or a lease: what
comes of it is one event, and the run's core decides. The gang takes nothing that is counted, so it never waits for
places that training has while the run waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from holdfast.control.agent_link import Preparation
from holdfast.control.hub import Hub
from holdfast.control.publisher import Publisher
from holdfast.control.run_agents import RunAgents
from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core.admission import Gang
from holdfast.core.checkpoint_types import ValidationStatus, ValidationTask
from holdfast.engines.engine import EngineName
from holdfast.engines.ray.options import RayOptions
from holdfast.wire.messages import CollectiveKind
from holdfast.worker.return_value import decode_value

__all__ = ["PrepareValidation", "ValidationRunner"]

_GENERATIONS_PER_EPOCH = 1_000_000
"""Generations of validations are numbered from here on by the first controller, from twice as much on by the second:
their logs lie beside those of training, and of validations that earlier controllers ran."""

_FLUSH_S = 5.0
"""How long the agent may take to store the worker's log."""

PrepareValidation = Callable[[ValidationTask], tuple[Preparation, float | None]]
"""From a task to what the agent is sent, and the time limit."""


class ValidationRunner:
    """Runs one validation at a time. Used from the hub's event loop only."""

    def __init__(
        self,
        hub: Hub,
        run: str,
        epoch: int,
        prepare: PrepareValidation,
        publisher: Publisher,
        engine: EngineName | RayOptions = EngineName.LOCAL,
        torch: str = "",
    ) -> None:
        """`run` is the id of the run whose checkpoints are validated, `epoch` its controller's; `engine` the one whose
        agents it uses, `torch` the version that they must have."""
        self._hub = hub
        self._run = run
        self._prepare = prepare
        self._publisher = publisher
        self._engine = engine
        self._torch = torch
        self._generation = epoch * _GENERATIONS_PER_EPOCH

    async def run(self, command: c.RunValidation) -> e.ValidationFinished:
        """Never raises for what the function or its worker did: the outcome is an event."""
        preparation, timeout_s = self._prepare(command.task)
        events: asyncio.Queue[e.Event] = asyncio.Queue()
        self._generation += 1
        gang = Gang(run=f"{self._run}-validation-{self._generation}", workers=1, slots_per_worker=0, torch=self._torch)
        agents = self._hub.enter(gang, preparation, events.put_nowait, self._publisher, _answer, engine=self._engine)
        try:
            async with asyncio.timeout(timeout_s):
                outcome = await self._follow(agents, events, command.name)
        except TimeoutError:
            outcome = ValidationStatus.TIMEOUT, {}, f"it took longer than {timeout_s:g} s"
        finally:  # also if the run ends before it, and cancels this: the validation stays due
            await agents.close(_FLUSH_S)
        status, metrics, error = outcome
        return e.ValidationFinished(name=command.name, token=command.token, status=status, metrics=metrics, error=error)

    async def _follow(
        self, agents: RunAgents, events: asyncio.Queue[e.Event], checkpoint: str
    ) -> tuple[ValidationStatus, dict[str, Any], str]:
        """From the request for an agent to the end of its worker."""
        agents.request(1)
        joined: e.AgentJoined | None = None
        is_started = False
        while True:
            match await events.get():
                case e.AgentJoined() as joined:
                    pass
                case e.AgentPrepared(agent=agent, master_port=port) if joined is not None and not is_started:
                    is_started = True
                    agents.start_workers(
                        c.StartWorkers(
                            generation=self._generation,
                            world_size=1,
                            places=(c.Place(agent=agent, node_rank=0, ranks=(0,)),),
                            node_count=1,
                            checkpoint=checkpoint,
                            iteration=0,
                            restart_count=0,
                            master_address=joined.address,
                            master_port=port,
                        )
                    )
                case e.WorkerFinished(value=value, value_error=None):
                    return ValidationStatus.VALIDATED, decode_value(value), ""
                case e.WorkerFinished(value_error=why):
                    return ValidationStatus.FAILED, {}, why or ""
                case e.WorkerExited(failure=failure):
                    return ValidationStatus.FAILED, {}, failure.cause
                case e.DamageFound(why=why) | e.AgentLost(why=why) | e.AgentUnavailable(why=why):
                    return ValidationStatus.FAILED, {}, why
                case _:
                    continue


def _answer(kind: CollectiveKind, data: Any) -> Any:
    """Of collectives with nobody else in them."""
    return (False, int(data) + 1, False) if kind is CollectiveKind.CHECKPOINT_INTERVAL else data
