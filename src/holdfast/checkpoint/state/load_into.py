"""Load a state into existing tensors: first every path is checked, then everything is copied.

A training function that has its model in memory loads this way without a second copy of it, and a mismatch names the
paths at fault instead of leaving half a model behind. `load` calls this; sharded tensors go on to `resharding`.
"""

from __future__ import annotations

import sys
from typing import Any

from holdfast.checkpoint.state.decode import Reference, load_torch
from holdfast.checkpoint.state.load import LoadedLeaves
from holdfast.errors import ConfigError

__all__ = ["fill"]

_PROBLEMS_SHOWN = 8


def fill(found: Any, into: Any, leaves: LoadedLeaves) -> Any:
    """`found`, with its tensors replaced by those of `into`, which hold the checkpoint's values afterwards."""
    matching = _Matching(leaves)
    result = matching.match(found, into, "")
    if matching.problems:
        shown = "; ".join(matching.problems[:_PROBLEMS_SHOWN])
        more = len(matching.problems) - _PROBLEMS_SHOWN
        raise ConfigError(
            f"load_state(into=...) does not fit the checkpoint, and nothing was copied: {shown}"
            + (f"; and {more} more." if more > 0 else ".")
        )
    matching.copy()
    return result


class _Matching:
    def __init__(self, leaves: LoadedLeaves) -> None:
        self.problems: list[str] = []
        self._leaves = leaves
        self._pairs: list[tuple[Reference, Any]] = []

    def match(self, found: Any, into: Any, path: str) -> Any:
        if into is None:
            return self._afresh(found)
        if isinstance(found, Reference):
            return self._match_leaf(found, into, path)
        if isinstance(found, dict):
            return self._match_dict(found, into, path)
        if isinstance(found, list | tuple):
            if not isinstance(into, list | tuple) or len(into) != len(found):
                self._wrong(path, f"is a {type(found).__name__} of {len(found)} in the checkpoint")
                return None
            items = [self.match(item, into[at], f"{path}[{at}]") for at, item in enumerate(found)]
            return items if isinstance(found, list) else tuple(items)
        if _is_tensor(into) or _is_array(into) or isinstance(into, dict | list | tuple):
            self._wrong(path, f"is {type(found).__name__} in the checkpoint")
        return found

    def copy(self) -> None:
        """Everything fits: copy it."""
        spread = []
        for reference, target in self._pairs:
            pieces = self._leaves.files.pieces(reference.name)
            if not reference.is_tensor:
                target[...] = self._leaves.make(reference)
            elif _is_sharded(target) or len(pieces) > 1:
                spread.append((reference, target))
            elif pieces:
                with load_torch().no_grad():
                    target.copy_(self._leaves.view(reference))
        if spread:
            from holdfast.checkpoint.state.resharding import read_into

            read_into(self._leaves.files, spread)

    def _match_dict(self, found: dict[Any, Any], into: Any, path: str) -> Any:
        if not isinstance(into, dict):
            self._wrong(path, "is a dict in the checkpoint")
            return None
        for key in into:
            if key not in found:
                self._wrong(_step(path, key), "is missing from the checkpoint")
        for key in found:
            if path and key not in into:
                self._wrong(_step(path, key), "is in the checkpoint, and not in what it is to be loaded into")
        return {key: self.match(item, into.get(key), _step(path, key)) for key, item in found.items()}

    def _match_leaf(self, found: Reference, into: Any, path: str) -> Any:
        if _is_tensor(into) != found.is_tensor or _is_array(into) == found.is_tensor:
            if not _is_tensor(into) and not _is_array(into) and not isinstance(into, dict | list | tuple):
                return self._leaves.make(found)  # A plain value only holds the place.
            kind = "tensor" if found.is_tensor else "numpy array"
            self._wrong(path, f"is a {kind} in the checkpoint, and {type(into).__name__} here")
            return None
        if tuple(into.shape) != found.shape:
            self._wrong(path, f"has shape {found.shape} in the checkpoint, and {tuple(into.shape)} here")
        elif into.dtype != found.dtype:
            self._wrong(path, f"has dtype {found.dtype} in the checkpoint, and {into.dtype} here")
        elif found.is_tensor and into.is_meta:
            self._wrong(path, "is a meta tensor here, which has no memory: materialize it first")
        else:
            self._pairs.append((found, into))
        return into

    def _afresh(self, found: Any) -> Any:
        if isinstance(found, Reference):
            return self._leaves.make(found)
        if isinstance(found, dict):
            fresh = {key: self._afresh(item) for key, item in found.items()}
            return type(found)(fresh)
        if type(found) in (list, tuple):
            return type(found)([self._afresh(item) for item in found])
        return found

    def _wrong(self, path: str, problem: str) -> None:
        self.problems.append(f"{path.removeprefix('.') or 'the state itself'} {problem}")


def _step(path: str, key: Any) -> str:
    return f"{path}.{key}" if isinstance(key, str) else f"{path}[{key!r}]"


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_sharded(value: Any) -> bool:
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(value, distributed.DTensor)
