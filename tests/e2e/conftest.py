"""The fixture that every test of whole runs asks for."""

from __future__ import annotations

from tests.faults.programs.place import place

__all__ = ["place"]
