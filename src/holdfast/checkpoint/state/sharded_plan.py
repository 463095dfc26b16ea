"""States with DTensors: every rank writes its own part, and rank 0 also writes the index of the parts.

torch.distributed.checkpoint's own planner decides who writes what; our `StateWriter` only records the outcome as a
layout, since the bytes go into a buffer like those of any other state (`plan`). Tensors that are not DTensors are
taken for replicas, of which one rank writes one; plain values and numpy arrays are rank 0's. The planning is a
collective call over the default process group; once all ranks have seen a structure it is one number's reduction.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint import save as run_planner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from holdfast.checkpoint.state.flatten import Flat
from holdfast.checkpoint.state.grouping import Tensor, group
from holdfast.checkpoint.state.plan import Layout, Plan, Structure
from holdfast.checkpoint.state.shard_index import INDEX, Chunk, ShardedTensor, build_index
from holdfast.checkpoint.state.skeleton import FILE
from holdfast.checkpoint.state.tensors import Described, stored_as
from holdfast.errors import CheckpointError

__all__ = ["StateWriter", "plan_sharded"]

_Named = Sequence[tuple[int, str, Described]]


def plan_sharded(known: Structure, flat: Flat) -> Plan:
    """This rank's part. Every rank of the default process group must call it."""
    tensors = {name: flat.leaves[number] for number, name, how in known.named if how.kind in ("tensor", "dtensor")}
    others = [(number, name, how) for number, name, how in known.named if how.kind not in ("tensor", "dtensor")]
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    written = _written.get(known.skeleton)
    if written is not None and (written.rank, written.world) != (rank, world):
        written = None
    if not _agreed(written):
        written = _work_out(known, tensors, others, rank, world)
        _written[known.skeleton] = written
    assert written is not None and written.layout is not None
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(tensors, is_coordinator=rank == 0)
    leaves = [planner.resolve_data(item) for item in written.items]
    if rank != 0:
        return Plan(written.layout, leaves, [], other_ranks=None)
    leaves += [flat.leaves[number] for number, _, _ in others]
    text = known.skeleton.encode(flat.plains, written.files)
    return Plan(written.layout, leaves, [(FILE, text)], written.other_ranks)


def _work_out(known: Structure, tensors: Mapping[str, Any], others: _Named, rank: int, world: int) -> StateWriter:
    digest = hashlib.sha256(repr([(name, how) for _, name, how in known.named]).encode()).hexdigest()
    writer = StateWriter(rank, world, digest, others)
    try:
        run_planner(dict(tensors), storage_writer=writer, planner=_Planner(flatten_state_dict=False))
    except CheckpointException as error:
        reason = "; ".join(str(failure[0]) for failure in error.failures.values())
        raise CheckpointError(f"The ranks could not agree on a sharded checkpoint: {reason}") from error
    return writer


def _agreed(written: StateWriter | None) -> bool:
    """Whether every rank knows its structure already, and all know the same: if not, they must plan together."""
    if not dist.is_initialized():
        return written is not None
    on_cpu = "gloo" in str(dist.get_backend_config()) or "mpi" in str(dist.get_backend_config())
    known = 0 if written is None else int(written.digest[:15], 16)
    facts = torch.tensor(
        [written is not None, known, -known], device=torch.device("cpu" if on_cpu else "cuda"), dtype=torch.int64
    )
    dist.all_reduce(facts, op=dist.ReduceOp.MIN)
    all_ready, least, greatest = facts.tolist()
    return bool(all_ready) and least == -greatest


class _Planner(DefaultSavePlanner):  # type: ignore[misc]
    """The default planner, with an error that names a rank whose state differs."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        odd = [rank for rank, plan in enumerate(all_plans) if plan.storage_data != all_plans[0].storage_data]
        if odd:
            raise ValueError(f"rank {odd[0]} gave a state with other paths, dtypes or shapes than rank 0.")
        planned: tuple[list[SavePlan], Metadata] = super().create_global_plan(all_plans)
        return planned


class StateWriter(StorageWriter):  # type: ignore[misc]
    """Records what this rank must write, instead of writing it."""

    def __init__(self, rank: int, world: int, digest: str, others: _Named) -> None:
        """`others` are written by rank 0 besides; `digest` stands for the structure, the same on every rank."""
        self.rank = rank
        self.world = world
        self.items: list[WriteItem] = []
        self.layout: Layout | None = None
        self.files: list[str] = []
        """Of rank 0: every rank's files."""
        self.other_ranks: tuple[int, ...] = ()
        """Of rank 0: those that write any."""
        self.digest = digest
        self._others = others if rank == 0 else []
        self._tensors: list[Tensor] = []
        self._described: list[Described] = []

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing to reset: a writer serves one plan."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up: there is no storage here."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return SavePlan(plan.items, storage_data=self.digest, planner_data=plan.planner_data)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        for item in plan.items:
            if item.tensor_data is None:
                raise ValueError(f"{item.index.fqn} is no tensor.")
            if math.prod(item.tensor_data.chunk.sizes) == 0:
                continue
            described = Described("tensor", item.tensor_data.properties.dtype, tuple(item.tensor_data.chunk.sizes))
            self.items.append(item)
            self._add(described, _chunk_name(item))
        for _, name, described in self._others:
            self._add(described, name)
        self._lay_out(None)
        results = [
            WriteResult(index=item.index, size_in_bytes=tensor.size_bytes, storage_data=tuple(chunk))
            for item, tensor, chunk in zip(self.items, self._tensors, self._chunks(), strict=False)
        ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0: add the index of all ranks' parts as one more file."""
        chunks: dict[str, list[Chunk]] = {}
        for result in itertools.chain.from_iterable(results):
            chunks.setdefault(result.index.fqn, []).append(Chunk(*result.storage_data))
        tensors = {}
        for name, stored in metadata.state_dict_metadata.items():
            whole, _ = stored_as(Described("tensor", stored.properties.dtype, tuple(stored.size)), name)
            tensors[name] = ShardedTensor(whole.code, whole.shape, tuple(sorted(chunks.get(name, ()))))
        count = len(self.items)
        for tensor, chunk in zip(self._tensors[count:], self._chunks()[count:], strict=True):
            tensors[tensor.name] = ShardedTensor(tensor.code, tensor.shape, (chunk,) if tensor.size_bytes else ())
        self._lay_out((INDEX, build_index(tensors)))
        self.files = sorted({chunk.file for tensor in tensors.values() for chunk in tensor.chunks}) + [INDEX]
        self.other_ranks = tuple(rank for rank, written in enumerate(results) if rank != self.rank and written)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def _add(self, described: Described, name: str) -> None:
        self._described.append(described)
        self._tensors.append(stored_as(described, name)[0])

    def _lay_out(self, index: tuple[str, bytes] | None) -> None:
        self._groups = group(self._tensors, lambda number, _: f"shard-r{self.rank:04d}-{number:05d}.safetensors")
        self.layout = Layout(self._groups, list(enumerate(self._described)), index)

    def _chunks(self) -> list[Chunk]:
        """For each of this rank's tensors, what part of the whole it is, and where it lies."""
        files = {spot.number: file.path for file in self._groups for spot in file.spots}
        found = []
        for number, tensor in enumerate(self._tensors):
            begin = tuple(self.items[number].tensor_data.chunk.offsets) if number < len(self.items) else ()
            offsets = (*begin, *(0,) * (len(tensor.shape) - len(begin)))
            found.append(Chunk(offsets, tensor.shape, files[number], tensor.name))
        return found


_written: weakref.WeakKeyDictionary[Any, StateWriter] = weakref.WeakKeyDictionary()
"""What was worked out for a structure, by its skeleton, and for as long as `plan` remembers that."""


def _chunk_name(item: WriteItem) -> str:
    """The tensor's own name where the chunk is all of it."""
    chunk = item.tensor_data.chunk
    name: str = item.index.fqn
    return name if chunk.sizes == item.tensor_data.size else f"{name}@{','.join(map(str, chunk.offsets))}"
