"""What a client says of itself when it dials, and whether it can work together with this process.

The training function travels as a cloudpickle with byte code, so both sides need the same minor version of Python.
Anything else that both must agree upon is in the messages, and so in `messages.PROTOCOL`.
"""

from __future__ import annotations

import enum
import sys

import msgspec

from holdfast import __version__

__all__ = ["Hello", "Role", "find_incompatibility"]

_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


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


def find_incompatibility(hello: Hello) -> str | None:
    """Why this client cannot work together with this process, as a sentence for a person; None if it can."""
    if hello.role is Role.AGENT and hello.python != _PYTHON:
        return (
            f"Agent {hello.agent} has Python {hello.python} and the controller Python {_PYTHON}, which cannot exchange "
            "functions: install the same minor version on both."
        )
    return None
