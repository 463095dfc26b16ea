"""Plan the files of a state before anything is copied: their names, offsets in one buffer, and the copies.

`plan(state)` is what the worker's session and `StateCheckpoint` call. The same structure again costs a walk and a
comparison (`flatten`), since layouts are cached. `Plan.write_into` is the stall of a checkpoint: it copies the
tensors to their offsets, so that the owner of the buffer can write files from it as they are.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from holdfast.checkpoint.state.flatten import Flat, flatten
from holdfast.checkpoint.state.grouping import Tensor, TensorFile, group, round_up
from holdfast.checkpoint.state.skeleton import FILE, Skeleton
from holdfast.checkpoint.state.tensors import Arrays, CheckedArrays, Copier, Described, stored_as

__all__ = ["INDEX", "Layout", "Plan", "PlannedFile", "Structure", "plan"]

INDEX = "state.safetensors.index.json"
_STRUCTURES_KEPT = 8

_arrays = Arrays()


class PlannedFile(NamedTuple):
    """One file: its path in the checkpoint's directory, and where its bytes lie in the buffer."""

    path: str
    offset: int
    size: int


class Plan:
    """A state that is ready to be copied. It holds the state's tensors until it is dropped."""

    __slots__ = ("_layout", "_leaves", "_tail", "files", "other_ranks", "size_bytes")

    def __init__(
        self,
        layout: Layout,
        leaves: Sequence[Any],
        tail: Sequence[tuple[str, bytes]],
        other_ranks: tuple[int, ...] | None = (),
    ) -> None:
        """`tail`: the files that differ for every state, by path and content."""
        self.other_ranks = other_ranks
        """The other ranks whose plans are needed as well for a whole state; None where only rank 0 knows."""
        self._layout = layout
        self._leaves = leaves
        self._tail = [content for _, content in tail]
        last = _lay_behind(layout.size_bytes, [(path, len(content)) for path, content in tail])
        self.files: tuple[PlannedFile, ...] = (*layout.files, *last)
        """In the order of their offsets, each at a multiple of 4096."""
        self.size_bytes = _end(self.files)
        """How large the buffer must be at least."""

    def write_into(self, buffer: memoryview) -> None:
        """Fill `buffer` with the files. What lies between two files is left as it is."""
        if buffer.nbytes < self.size_bytes:
            raise ValueError(f"The buffer has {buffer.nbytes} bytes, and the state needs {self.size_bytes}.")
        self._layout.copier.copy(self._leaves, buffer)
        for file, content in zip(self.files, (*self._layout.heads, *self._tail), strict=True):
            buffer[file.offset : file.offset + len(content)] = content

    def write_files(self, directory: Path) -> None:
        """Write the files into `directory`, if there is no buffer: one after the other, so that this takes no more
        memory than the largest of them."""
        directory.mkdir(parents=True, exist_ok=True)
        heads = (*self._layout.heads, *self._tail)
        largest = max((file.size for file in self.files), default=1)
        with mmap.mmap(-1, largest) as memory, memoryview(memory) as view:
            for number, (file, head) in enumerate(zip(self.files, heads, strict=True)):
                self._layout.copier_of_file(number).copy(self._leaves, view)
                view[: len(head)] = head
                with (directory / file.path).open("wb") as out, view[: file.size] as content:
                    out.write(content)


class Layout:
    """The files and offsets for all states of one structure."""

    def __init__(
        self, groups: Sequence[TensorFile], leaves: Sequence[tuple[int, Described]], index: tuple[str, bytes] | None
    ) -> None:
        """`leaves`: for each tensor in the groups the leaf that it is, and that leaf's description; `index`: one file
        more, by path and content."""
        self.heads = [file.header for file in groups]
        """What each file begins with: all of it, where the file has no tensors."""
        sizes = [(file.path, file.size_bytes) for file in groups]
        if index is not None:
            path, content = index
            self.heads.append(content)
            sizes.append((path, len(content)))
        self.files = _lay_behind(0, sizes)
        self.size_bytes = _end(self.files)
        self._places = [[(*leaves[spot.number], spot.offset) for spot in file.spots] for file in groups]
        self.copier = Copier(
            [
                (number, described, file.offset + offset)
                for file, places in zip(self.files, self._places, strict=False)
                for number, described, offset in places
            ]
        )

    def copier_of_file(self, number: int) -> Copier:
        """The copies of one file, into a buffer of its own."""
        return Copier(self._places[number] if number < len(self._places) else [])


class Structure(NamedTuple):
    """A structure that was seen before, with its cached plan."""

    tokens: list[Any]
    aliases: tuple[int, ...] | None
    skeleton: Skeleton
    named: list[tuple[int, str, Described]]
    """The leaves that are written (an alias is not): number, name and description."""
    layout: Layout | None
    """None for a sharded one, which the ranks lay out together."""


_lock = threading.Lock()
_seen: list[Structure] = []


def plan(state: Any) -> Plan:
    """Plan the files of `state`. Raises a `TypeError` that names the path of what cannot be saved."""
    flat = flatten(state, _arrays)
    try:
        aliases = _arrays.aliases(flat.leaves)
    except RuntimeError:  # A tensor without memory of the usual kind: if we refuse it, then by its path.
        flatten(state, CheckedArrays())
        raise
    with _lock:
        known = _find(flat, aliases) or _work_out(state, flat.tokens, aliases)
        if known.layout is not None:
            text = known.skeleton.encode(flat.plains, [file.path for file in known.layout.files])
            return Plan(known.layout, flat.leaves, [(FILE, text)])
    from holdfast.checkpoint.state.sharded_plan import plan_sharded

    return plan_sharded(known, flat)


def _find(flat: Flat, aliases: tuple[int, ...] | None) -> Structure | None:
    for number, known in enumerate(_seen):
        if known.tokens == flat.tokens and known.aliases == aliases:
            _seen.insert(0, _seen.pop(number))
            return known
    return None


def _work_out(state: Any, tokens: list[Any], aliases: tuple[int, ...] | None) -> Structure:
    checked = flatten(state, CheckedArrays())
    names: dict[int, str] = {}
    leaves: list[Described] = []
    taken = {"", "__metadata__"}

    def reference(number: int, described: Described, path: tuple[str, ...]) -> dict[str, Any]:
        leaves.append(described)
        owner = number if aliases is None else aliases[number]
        if owner == number:
            names[number] = _unique(".".join(path), taken)
        return stored_as(described, names[owner])[1]

    skeleton = Skeleton(checked.tokens, reference)
    named = [(number, names[number], leaves[number]) for number in sorted(names)]
    sharded = any(described.kind == "dtensor" for described in leaves)
    known = Structure(tokens, aliases, skeleton, named, None if sharded else _lay_out(named))
    _seen.insert(0, known)
    del _seen[_STRUCTURES_KEPT:]
    return known


def _lay_out(named: Sequence[tuple[int, str, Described]]) -> Layout:
    tensors = [stored_as(described, name)[0] for _, name, described in named]
    groups = group(tensors, _name_file)
    index = (INDEX, _index(groups, tensors)) if len(groups) > 1 else None
    return Layout(groups, [(number, described) for number, _, described in named], index)


def _unique(name: str, taken: set[str]) -> str:
    found, more = name, 1
    while found in taken:
        more += 1
        found = f"{name}#{more}"
    taken.add(found)
    return found


def _name_file(number: int, count: int) -> str:
    return "state.safetensors" if count == 1 else f"state-{number:05d}-of-{count:05d}.safetensors"


def _index(groups: Sequence[TensorFile], tensors: Sequence[Tensor]) -> bytes:
    """The index file that other tools expect, with the file of each tensor; our own reader uses the headers."""
    weights = {tensors[spot.number].name: file.path for file in groups for spot in file.spots}
    total = sum(tensor.size_bytes for tensor in tensors)
    return msgspec.json.encode({"metadata": {"total_size": total}, "weight_map": weights})


def _lay_behind(begin: int, sizes: Iterable[tuple[str, int]]) -> tuple[PlannedFile, ...]:
    files = []
    for path, size in sizes:
        files.append(PlannedFile(path, begin, size))
        begin = round_up(begin + size)
    return tuple(files)


def _end(files: Sequence[PlannedFile]) -> int:
    return round_up(files[-1].offset + files[-1].size) if files else 0
