"""The fixture for whole runs."""

from __future__ import annotations

from tests.faults.programs.sandbox import sandbox

__all__ = ["sandbox"]
