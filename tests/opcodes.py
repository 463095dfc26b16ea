"""Counts the bytecode instructions that Python executes: a cost that does not depend on how busy the machine is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["count_opcodes"]


def count_opcodes(function: Callable[..., object], *arguments: Any) -> int:
    """How many instructions a call executes, those of the functions that it calls included; a loop in C is one."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*arguments)
    finally:
        sys.settrace(before)
    return count
