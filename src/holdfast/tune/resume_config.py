"""`ResumeConfig`: what becomes of the trials of an experiment that is continued, by how they had ended."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from holdfast.errors import ConfigError

__all__ = ["ResumeConfig"]


@dataclass
class ResumeConfig:
    """Of trials that had finished, that had not, and that had failed."""

    class ResumeType(enum.Enum):
        """Go on from the newest checkpoint, start anew, or leave as it is."""

        RESUME = "resume"
        RESTART = "restart"
        SKIP = "skip"

    finished: Any = ResumeType.SKIP
    unfinished: Any = ResumeType.RESUME
    errored: Any = ResumeType.SKIP

    def __post_init__(self) -> None:
        for name in ("finished", "unfinished", "errored"):
            value = getattr(self, name)
            try:
                setattr(self, name, self.ResumeType(value))
            except ValueError:
                raise ConfigError(
                    f'ResumeConfig({name}) must be "resume", "restart" or "skip", not {value!r}.'
                ) from None
        if self.finished is not self.ResumeType.SKIP:
            raise ConfigError("ResumeConfig(finished): trials that have finished are never run again; leave it out.")
        if self.unfinished is self.ResumeType.RESTART:
            raise ConfigError(
                'ResumeConfig(unfinished="restart"): trials go on from their checkpoints; give "resume" or "skip".'
            )
