"""The fixture for whole runs."""

from __future__ import annotations

from tests.faults.programs.place import place

__all__ = ["place"]
