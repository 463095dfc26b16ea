"""The fixture of all tests that run whole training runs."""

from __future__ import annotations

from tests.faults.programs.place import place

__all__ = ["place"]
