"""The fixture of all tests of the training runtime."""

from __future__ import annotations

from tests.faults.programs.place import place

__all__ = ["place"]
