"""Load tensors into others that are sharded over another number of ranks.

torch.distributed.checkpoint's own planner works out which parts of the files belong where; our `StateReader` copies
them from the mapped files. No rank needs another for this, so there is no collective call. `load_into` comes here for
DTensors, and for tensors that several ranks wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan, LoadPlanner, Metadata
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from holdfast.checkpoint.state.decode import Reference, read_part
from holdfast.checkpoint.state.load import StateFiles
from holdfast.checkpoint.state.tensors import carrier_of
from holdfast.errors import Damaged

__all__ = ["StateReader", "read_into"]


def read_into(files: StateFiles, pairs: Sequence[tuple[Reference, Any]]) -> None:
    """Copy each tensor into its target, a DTensor or an ordinary tensor of the same global shape and dtype."""
    left = list(pairs)
    while left:
        now: dict[str, tuple[Reference, Any]] = {}
        later = []
        for reference, target in left:
            if now.setdefault(reference.name, (reference, target))[1] is not target:
                later.append((reference, target))  # An alias that was none here: its turn comes.
        reader = StateReader(files, {name: reference for name, (reference, _) in now.items()})
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner({name: target.detach() for name, (_, target) in now.items()}, reader.read_metadata())
        reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
        left = later


class StateReader(StorageReader):  # type: ignore[misc]
    """A storage reader of torch.distributed.checkpoint over a state's files."""

    def __init__(self, files: StateFiles, references: dict[str, Reference]) -> None:
        self._files = files
        self._references = references

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing to reset: a reader serves one state."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        found = {}
        for name, reference in self._references.items():
            dims = len(reference.shape)
            chunks = [
                ChunkStorageMetadata(torch.Size(chunk.offsets[:dims]), torch.Size(chunk.sizes[:dims]))
                for chunk, _ in self._files.pieces(name)
            ]
            properties = TensorProperties(dtype=reference.dtype)
            found[name] = TensorStorageMetadata(properties, torch.Size(reference.shape), chunks)
        return Metadata(state_dict_metadata=found)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up: the files are open."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        parts: dict[MetadataIndex, Any] = {}
        for name, reference in self._references.items():
            for chunk, piece in self._files.pieces(name):
                index = MetadataIndex(name, chunk.offsets[: len(reference.shape)])
                parts[index] = (reference, chunk, piece)
        with torch.no_grad():
            for item in plan.items:
                if item.type != LoadItemType.TENSOR:
                    raise Damaged(f"{item.dest_index.fqn} is no tensor in this checkpoint: use another one.")
                reference, chunk, piece = parts[item.storage_index]
                part = read_part(reference, chunk, piece)
                for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    part = part.narrow(dim, offset, length)
                target = planner.resolve_tensor(item)
                target.view(carrier_of(torch, reference.dtype)).copy_(part)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True
