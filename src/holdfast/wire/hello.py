"""What a client says of itself when it dials, and whether it can work together with this process.

The training function travels as a cloudpickle with byte code, so both sides need the same minor version of Python.
Processes that form a torch process group need the same minor version of torch, whose protocols are its own.
Anything else that both must agree upon is in the messages, and so in `messages.PROTOCOL`.
"""

from __future__ import annotations

import enum
import functools
import importlib.util
import re
import sys
from pathlib import Path

import msgspec

from holdfast import __version__

__all__ = ["Hello", "Role", "find_incompatibility", "find_torch_mismatch", "installed_torch"]

_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_VERSION = re.compile(r"""^__version__ = ['"]([^'"]+)""", re.MULTILINE)


class Role(enum.StrEnum):
    """What a client is, which decides what messages it may send."""

    AGENT = "agent"
    CONTROL = "control client"


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The first that a hub learns of a client; authenticated as a whole."""

    role: Role = Role.AGENT
    agent: str = ""
    """The agent's name; a control client has none."""
    address: str = ""
    """Where other machines reach the agent; "": where it dials from."""
    python: str = _PYTHON
    """Major and minor version."""
    holdfast: str = __version__
    torch: str = ""
    """What is installed; "" where there is none, or nobody looked."""


def find_incompatibility(hello: Hello) -> str | None:
    """Why this client cannot work together with this process, as a sentence for a person; None if it can."""
    if hello.role is Role.AGENT and hello.python != _PYTHON:
        return (
            f"Agent {hello.agent} has Python {hello.python} and the controller Python {_PYTHON}, which cannot exchange "
            "functions: install the same minor version on both."
        )
    return None


def find_torch_mismatch(hello: Hello, torch: str) -> str | None:
    """The same for workers that form a process group with torch, of this version on the controller's side. Versions
    that nobody knows are let pass, and so is another patch or build (CPU, CUDA)."""
    if not hello.torch or not torch or _minor(hello.torch) == _minor(torch):
        return None
    return (
        f"Agent {hello.agent} has torch {hello.torch} and the controller torch {torch}, which cannot be in one process "
        "group: install the same minor version on both."
    )


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


@functools.cache
def installed_torch() -> str:
    """The version of torch that this process would import, or "". It is not imported for that, nor is
    `importlib.metadata`: agents and drivers start with this."""
    try:
        found = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return ""
    if found is None or found.origin is None:
        return ""
    try:
        text = Path(found.origin).with_name("version.py").read_text(errors="replace")
    except OSError:
        return ""
    match = _VERSION.search(text)
    return "" if match is None else match[1]
