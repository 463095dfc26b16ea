"""What kind of error a failure was, as a value that decisions may depend on.

The kind is decided where the exception is caught (`worker.failure`, `agent.parts`, `control.persister`), from the
exception itself; messages, events and records carry it. The values are the names of the classes in `holdfast.errors`,
which is what the journal held before there was this enum.
"""

from __future__ import annotations

import enum

from holdfast import errors

__all__ = ["FailureKind"]


class FailureKind(enum.StrEnum):
    """One member for each class of `holdfast.errors` (`TRAINING_FAILED` for its subclasses as well), and `OTHER` for
    every other exception."""

    OTHER = "Other"
    HOLDFAST_ERROR = "HoldfastError"
    CONFIG = "ConfigError"
    INVALID_URI = "InvalidURI"
    MISSING_EXTRA = "MissingExtra"
    STORAGE = "StorageError"
    NOT_FOUND = "NotFound"
    ALREADY_EXISTS = "AlreadyExists"
    ACCESS_DENIED = "AccessDenied"
    OUT_OF_SPACE = "OutOfSpace"
    UNAVAILABLE = "Unavailable"
    CHECKPOINT = "CheckpointError"
    NOT_COMMITTED = "NotCommitted"
    DAMAGED = "Damaged"
    DUPLICATE_FILE = "DuplicateFile"
    NAME_TAKEN = "NameTaken"
    PINNED = "Pinned"
    UNSUPPORTED_FORMAT = "UnsupportedFormat"
    RUN = "RunError"
    RUN_BUSY = "RunBusy"
    FENCED = "Fenced"
    TRAINING_FAILED = "TrainingFailedError"
    WIRE = "WireError"

    @property
    def is_transient(self) -> bool:
        """Whether the same may succeed later: storage that did not answer, or was full."""
        return self in (FailureKind.UNAVAILABLE, FailureKind.OUT_OF_SPACE)

    @classmethod
    def _missing_(cls, value: object) -> FailureKind:
        """A journal or peer of a newer version may name kinds that are unknown here."""
        return cls.OTHER

    @classmethod
    def of(cls, error: BaseException) -> FailureKind:
        """The kind of the nearest class of `holdfast.errors` that `error` is an instance of."""
        for base in type(error).__mro__:
            if base.__module__ == errors.__name__ and base.__name__ in cls._value2member_map_:
                return cls(base.__name__)
        return cls.OTHER

    def as_error(self, message: str, otherwise: type[errors.HoldfastError]) -> errors.HoldfastError:
        """An exception of this kind; of the class `otherwise` for a kind that has no class of ours."""
        found = getattr(errors, self.value, otherwise)
        error: errors.HoldfastError = found(message)
        return error
