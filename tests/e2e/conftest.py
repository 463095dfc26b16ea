"""The fixture of all tests that run whole training runs."""

from __future__ import annotations

from tests.faults.programs.sandbox import sandbox

__all__ = ["sandbox"]
