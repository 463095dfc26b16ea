"""What a run asks of the Ray engine besides places for its workers. Runs that ask for the same share their agents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["RayOptions"]


@dataclass(frozen=True, slots=True)
class RayOptions:
    """Compared by value; `runtime_env` by how it is written down."""

    placement_strategy: str = "PACK"
    label_selectors: tuple[tuple[tuple[str, str], ...], ...] = ()
    """Of each worker, or one for all; () for none."""
    runtime_env: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """As Ray's actors take it: the agents, and so the workers, run in it."""
    runtime_env_text: str = field(init=False)
    imports: tuple[str, ...] = field(default=(), compare=False)
    """Modules that workers will probably need: agents import them while they connect."""

    def __post_init__(self) -> None:
        text = repr(sorted(self.runtime_env.items(), key=lambda item: item[0]))
        object.__setattr__(self, "runtime_env_text", text)
