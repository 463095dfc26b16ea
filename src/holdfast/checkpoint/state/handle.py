"""`StateCheckpoint`: the result of `Checkpoint.from_state`, a checkpoint that is still in the worker's memory.

It holds the state itself, not a copy: `train.report` takes the copy, by its `plan`. Outside of a run it can be written
to a directory, or loaded from at once. Once reported, it is an ordinary checkpoint to everybody who asks for it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpoint.state.load import load_state
from holdfast.checkpoint.state.plan import Plan, plan
from holdfast.checkpoint.state.skeleton import FILE
from holdfast.errors import ConfigError

__all__ = ["StateCheckpoint"]


class StateCheckpoint(Checkpoint):
    """A state that is not stored yet."""

    def __init__(self, state: Any) -> None:
        # Not the base's: there is no path to make sense of.
        self._state = state

    def plan(self) -> Plan:
        """The plan of the state's files. With DTensors in it this is a collective call: every rank must make it."""
        return plan(self._state)

    @property
    def path(self) -> str:
        """There is none until the checkpoint is reported."""
        self._refuse()

    @property
    def filesystem(self) -> Any:
        """There is none until the checkpoint is reported."""
        self._refuse()

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        """The files in a temporary directory, for as long as the block lasts."""
        directory = self.to_directory()
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def load_state(self, map_location: Any = None, into: Any = None) -> Any:
        """The state as it would be loaded: copies that share nothing with what was given."""
        planned = self.plan()
        table = {file.path: file for file in planned.files}
        if FILE not in table or any(file.path.startswith("shard-") for file in planned.files):
            raise ConfigError(
                "This checkpoint is sharded and not written yet, so no rank has all of it: report it, and load "
                "what train.get_checkpoint() gives."
            )
        memory = memoryview(bytearray(planned.size_bytes))
        planned.write_into(memory)
        return load_state(
            lambda name: memory[table[name].offset :][: table[name].size], map_location=map_location, into=into
        )

    def __repr__(self) -> str:
        return "Checkpoint.from_state(...)"

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __reduce__(self) -> tuple[Callable[..., Checkpoint], tuple[Any, ...]]:
        raise TypeError("A checkpoint made by from_state() cannot be pickled: report it, or write it to_directory().")

    def _open(self) -> NoReturn:
        self._refuse()

    def _copy_to(self, target: Path) -> None:
        self.plan().write_files(target)

    def _refuse(self) -> NoReturn:
        raise ConfigError(
            "A checkpoint made by from_state() has no place in storage until it is reported: give it to "
            "train.report(), or write it to_directory()."
        )
