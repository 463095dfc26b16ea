"""The fixture of all tests of the training runtime."""

from __future__ import annotations

from tests.faults.programs.sandbox import sandbox

__all__ = ["sandbox"]
