"""Load a state from its files, in a directory or in memory.

`StateFiles` reads `state.json`, maps the files that it lists and checks their headers; `load_state` puts the state
together. `load_into` copies it into tensors that are there already, `resharding` where these are sharded.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.checkpoint.state.decode import (
    Piece,
    Reference,
    join_pieces,
    load_torch,
    make_array,
    make_tag,
    make_tensor,
    read_reference,
    view_tensor,
)
from holdfast.checkpoint.state.safetensors import TensorInfo, parse_header
from holdfast.checkpoint.state.shard_index import INDEX, Chunk, ShardedTensor, read_index
from holdfast.checkpoint.state.skeleton import FILE, read_document, restore
from holdfast.errors import Damaged, NotFound

__all__ = ["LoadedLeaves", "OpenFile", "StateFiles", "load_state"]

OpenFile = Callable[[str], memoryview | Path]
"""Returns a file of the checkpoint by its name: its path, or its bytes. Bytes are copied, since their owner may reuse
that memory; a file is mapped, so it must not be written to in place (deleting it is harmless)."""

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,250}")


def load_state(open_file: OpenFile, map_location: Any = None, into: Any = None) -> Any:
    """The state that these files hold.

    `map_location`: the device for tensors, as torch names it. `into`: a structure of tensors that are copied into in
    place and stand where the loaded ones would; what it does not mention at its top level, or has as None, is loaded
    afresh. Nothing is copied unless everything fits.
    """
    files = StateFiles(open_file)
    leaves = LoadedLeaves(files, map_location)
    if into is None:
        return restore(files.skeleton, leaves.revive, files.where)
    from holdfast.checkpoint.state.load_into import fill

    return fill(restore(files.skeleton, leaves.refer, files.where), into, leaves)


class StateFiles:
    """The files of one state, opened and checked, but not read."""

    def __init__(self, open_file: OpenFile) -> None:
        self._open_file = open_file
        content, self.where, _ = self._open(FILE)
        if content is None:
            raise NotFound(f"{self.where} does not exist: load_state() reads checkpoints that from_state() made.")
        document = read_document(content, self.where)
        self.skeleton: Any = document["state"]
        self._pieces: dict[tuple[str, str], Piece] = {}
        self.tensors: dict[str, ShardedTensor] = {}
        """Every tensor by its name; one that a single rank wrote has one part."""
        for name in document["files"]:
            if not _FILE_NAME.fullmatch(name):
                raise Damaged(f"{self.where} names a file {name!r:.100} that cannot be: use another checkpoint.")
        for name in document["files"]:
            if name.endswith(".safetensors"):
                self._add_file(name, whole=INDEX not in document["files"])
        if INDEX in document["files"]:
            self._add_shards()

    def pieces(self, name: str) -> list[tuple[Chunk, Piece]]:
        """The parts of a tensor."""
        return [(chunk, self._pieces[chunk.file, chunk.name]) for chunk in self.tensors[name].chunks]

    def _add_file(self, file: str, whole: bool) -> None:
        content, where, own = self._open(file)
        if content is None:
            raise Damaged(f"{where} is missing, and {FILE} lists it: use another checkpoint.")
        for stored in parse_header(content, where).values():
            self._pieces[file, stored.name] = Piece(content, stored, own)
            if not whole:
                continue
            if stored.name in self.tensors:
                raise Damaged(f"{where} holds {stored.name!r:.100}, as another file does: use another checkpoint.")
            begin = (0,) * len(stored.shape)
            chunks = (Chunk(begin, stored.shape, file, stored.name),)
            self.tensors[stored.name] = ShardedTensor(stored.code, stored.shape, chunks)

    def _add_shards(self) -> None:
        content, where, _ = self._open(INDEX)
        if content is None:
            raise Damaged(f"{where} is missing, and {FILE} lists it: use another checkpoint.")
        self.tensors = read_index(content, where)
        for name, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                piece = self._pieces.get((chunk.file, chunk.name))
                if piece is None or not _fits(piece.stored, tensor.code, chunk):
                    raise Damaged(f"{where}: {name!r:.100} is not in {chunk.file!r:.100}: use another checkpoint.")

    def _open(self, name: str) -> tuple[memoryview | None, str, bool]:
        """The file's bytes, its name for errors, and whether its memory is ours alone."""
        found = self._open_file(name)
        if not isinstance(found, Path):
            return found.cast("B") if found.format != "B" else found, name, False
        try:
            with found.open("rb") as file:
                size = file.seek(0, 2)
                if size == 0:
                    return memoryview(b""), str(found), False
                return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)), str(found), True
        except FileNotFoundError:
            return None, str(found), False


def _fits(stored: TensorInfo, code: str, chunk: Chunk) -> bool:
    return stored.code == code and stored.shape == chunk.sizes


class LoadedLeaves:
    """The leaves of a state that is being loaded. One name gives one object, so that shared tensors are shared
    again."""

    def __init__(self, files: StateFiles, map_location: Any = None) -> None:
        self.files = files
        self._device = None if map_location is None else _device(map_location)
        self._made: dict[tuple[str, bool], Any] = {}

    def refer(self, node: dict[str, Any]) -> Any:
        """What a tagged node of the skeleton is: a `Reference`, or a plain value of torch's."""
        reference = read_reference(node, self.files.tensors.get, self.files.where)
        return make_tag(node, self.files.where) if reference is None else reference

    def revive(self, node: dict[str, Any]) -> Any:
        """What a tagged node of the skeleton stands for."""
        found = self.refer(node)
        return self.make(found) if isinstance(found, Reference) else found

    def make(self, reference: Reference) -> Any:
        """The leaf itself."""
        key = (reference.name, reference.is_tensor)
        if key not in self._made:
            self._made[key] = self._make(reference)
        made = self._made[key]
        return made[()] if reference.is_scalar else made

    def view(self, reference: Reference) -> Any:
        """A tensor of one part as a temporary view, to be copied from at once."""
        return view_tensor(reference, self.files.pieces(reference.name)[0][1])

    def _make(self, reference: Reference) -> Any:
        pieces = self.files.pieces(reference.name)
        if not reference.is_tensor:
            return make_array(reference, pieces[0][1] if pieces else None)
        tensor = make_tensor(reference, pieces[0][1]) if len(pieces) == 1 else join_pieces(reference, pieces)
        return tensor if self._device is None else tensor.to(self._device)


def _device(map_location: Any) -> Any:
    torch = load_torch()
    if not isinstance(map_location, str | torch.device):
        raise TypeError(
            f"map_location must be a device such as 'cpu' or 'cuda:0', not {type(map_location).__name__}: "
            "move single tensors after loading."
        )
    return torch.device(map_location)
