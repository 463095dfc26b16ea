"""The states of one rank's random generators as plain JSON: Python's, and numpy's and torch's where they are in use.

Saved with each report of a rank that has a loader with `rng_state=True`, and restored when the first of them is
iterated over after a restart: not earlier, since making models and loaders draws numbers too.
"""

from __future__ import annotations

import random
import sys
from array import array
from base64 import b64decode, b64encode
from typing import Any

__all__ = ["capture", "restore"]


def capture() -> dict[str, Any]:
    """The states as they are now."""
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {"python": [version, _text(array("I", words).tobytes()), gauss]}
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        found["numpy"] = [kind, _text(keys.tobytes()), int(position), int(has_gauss), float(cached)]
    if (torch := sys.modules.get("torch")) is not None:
        found["torch"] = _text(torch.get_rng_state().numpy().tobytes())
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            found["cuda"] = _text(torch.cuda.get_rng_state().numpy().tobytes())
    return found


def restore(states: dict[str, Any]) -> None:
    """Make the states what `capture` gave; generators of libraries that were not in use then are left alone."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(array("I", b64decode(words))), gauss))
    if "numpy" in states:
        import numpy

        kind, keys, position, has_gauss, cached = states["numpy"]
        numpy.random.set_state((kind, numpy.frombuffer(b64decode(keys), dtype="uint32"), position, has_gauss, cached))
    if "torch" in states:
        import torch

        torch.set_rng_state(_tensor(states["torch"]))
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(_tensor(states["cuda"]))


def _text(data: bytes) -> str:
    return b64encode(data).decode()


def _tensor(text: str) -> Any:
    import torch

    return torch.frombuffer(bytearray(b64decode(text)), dtype=torch.uint8)
