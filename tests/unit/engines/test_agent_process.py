"""How an agent's end is told."""

from __future__ import annotations

import signal

from holdfast.engines.agent_process import exit_phrase


def test_an_agent_that_any_signal_has_killed_is_told_of() -> None:
    assert exit_phrase(3) == "its agent exited with code 3"
    assert exit_phrase(-signal.SIGKILL) == "its agent was killed by SIGKILL"
    assert exit_phrase(-(signal.SIGRTMIN + 1)) == f"its agent was killed by signal {signal.SIGRTMIN + 1}"
