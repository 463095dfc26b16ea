"""Quarantine: a host on which workers fail again and again is set aside for a time, if there is room without it.

Only failures count that the machine may be to blame for: nodes that are lost, workers that die of a signal or hang.
Exceptions of the training function would follow it to any host. Whether there is room elsewhere for as many
workers as the run needs, the pool knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core import commands as c
from holdfast.core.root_cause import is_bug
from holdfast.core.state import Generation, State

if TYPE_CHECKING:
    from holdfast.core.machine import Output

__all__ = ["FAILURES", "SET_ASIDE_S", "WITHIN_S", "count_failure"]

FAILURES = 3
WITHIN_S = 600.0
"""So many failures within this time are too many for one host."""
SET_ASIDE_S = 1800.0


def count_failure(state: State, generation: Generation, now: float, out: Output) -> None:
    """The generation has failed, and that counts: attribute it to the host of its root cause."""
    cause = generation.cause
    if cause is None or is_bug([cause]):
        return
    agent = state.agents.get(cause.agent)
    host = cause.host or (agent.host if agent is not None else "")
    if not host:
        return
    times = [at for at in state.host_failures.get(host, ()) if at > now - WITHIN_S] + [now]
    state.host_failures[host] = times
    if len(times) >= FAILURES:
        del state.host_failures[host]
        why = f"{FAILURES} failures on its host within {WITHIN_S / 60:g} min; set aside for {SET_ASIDE_S / 60:g} min"
        state.setting_aside.add(host)
        out.do(c.SetHostAside(host=host, why=why, duration_s=SET_ASIDE_S))
