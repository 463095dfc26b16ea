"""DTensors saved by four ranks and loaded by one, two or three, with torch's own planners."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from tests.unit.state.ranks import run_on_ranks
from tests.unit.state.trips import same
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpoint.state.plan import plan
from holdfast.errors import CheckpointError, ConfigError, Damaged

SAVED_BY = 4


def build(world: int) -> tuple[Any, Any]:
    """A model in FSDP2, with layers that do not divide evenly, and one that leaves a rank without a part."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 8), torch.nn.Linear(8, 3))
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: Any, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((4, 5), float(step + 1))).square().mean().backward()
        optimizer.step()


def gathered(value: Any) -> Any:
    """The same state with whole tensors. Every rank must call it."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: gathered(item) for key, item in value.items()}
    if isinstance(value, list):
        return [gathered(item) for item in value]
    return value


def matrices(world: int) -> dict[str, Any]:
    """DTensors of all kinds of placement."""
    mesh = init_device_mesh("cpu", (world,))
    matrix = torch.arange(35.0, dtype=torch.float64).view(5, 7)
    return {
        "rows": distribute_tensor(matrix, mesh, [Shard(0)]),
        "columns": distribute_tensor(matrix + 1, mesh, [Shard(1)]),
        "everywhere": distribute_tensor(matrix + 2, mesh, [Replicate()]),
        "complex": distribute_tensor(matrix.to(torch.complex128) * 1j, mesh, [Shard(0)]),
        "few": distribute_tensor(torch.ones(2, 3), mesh, [Shard(0)]),
        "none": distribute_tensor(torch.ones(0, 3), mesh, [Shard(0)]),
        "scalar": distribute_tensor(torch.tensor(3.0), mesh, [Replicate()]),
    }


def state_of(model: Any, optimizer: Any, world: int) -> dict[str, Any]:
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "matrices": matrices(world),
        "local": torch.arange(4),
        "array": numpy.arange(3),
        "step": 3,
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint that four ranks wrote, and what is in it."""
    top = tmp_path_factory.mktemp("sharded")
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]).zero_grad()  # Imported once, here, not in every rank.

    def work(rank: int) -> None:
        model, optimizer = build(SAVED_BY)
        train(model, optimizer, 1)
        plan(state_of(model, optimizer, SAVED_BY))  # What is remembered of this must not find its way below.
        train(model, optimizer, 1)
        state = state_of(model, optimizer, SAVED_BY)
        Checkpoint.from_state(state).to_directory(top / f"rank{rank}")
        whole = gathered(state)
        if rank == 0:
            torch.save(whole, top / "whole.pt")

    run_on_ranks(SAVED_BY, work, top / "meeting")
    merged = top / "checkpoint"
    merged.mkdir()
    for rank in range(SAVED_BY):
        for file in (top / f"rank{rank}").iterdir():
            assert not (merged / file.name).exists(), "two ranks gave the same file"
            file.rename(merged / file.name)
    return merged, torch.load(top / "whole.pt", weights_only=False)


def test_every_rank_writes_its_part_and_nothing_is_written_twice(saved: tuple[Path, dict[str, Any]]) -> None:
    directory, _ = saved
    names = sorted(file.name for file in directory.iterdir())
    assert names == [f"shard-r{rank:04d}-00001.safetensors" for rank in range(4)] + ["sharded.json", "state.json"]
    stored = [set(safetensors.torch.load_file(directory / name)) for name in names[:4]]
    assert sum(map(len, stored)) == len(set.union(*stored))
    assert all(len(part) > 10 for part in stored), "the work is shared"
    index = msgspec.json.decode((directory / "sharded.json").read_bytes())["tensors"]
    assert [chunk["offsets"] for chunk in index["matrices.rows"]["chunks"]] == [[0, 0], [2, 0], [4, 0]]
    assert index["matrices.none"]["chunks"] == []
    assert len(index["matrices.everywhere"]["chunks"]) == len(index["local"]["chunks"]) == 1


def test_one_process_loads_a_sharded_state_whole(saved: tuple[Path, dict[str, Any]]) -> None:
    directory, whole = saved
    assert same(Checkpoint(directory).load_state(), whole)
    into = {"matrices": {**whole["matrices"], "rows": torch.zeros(5, 7, dtype=torch.float64)}}
    Checkpoint(directory).load_state(into=into)
    assert same(into["matrices"]["rows"], whole["matrices"]["rows"])


@pytest.mark.parametrize("world", [2, 3])
def test_another_number_of_ranks_loads_a_sharded_state(
    world: int, saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    directory, whole = saved

    def work(rank: int) -> None:
        model, optimizer = build(world)
        train(model, optimizer, 1)  # So that the optimizer has a state to load into.
        into = state_of(model, optimizer, world)
        for tensor in into["matrices"].values():
            tensor.zero_()
        result = Checkpoint(directory).load_state(into=into)
        assert result["model"]["0.weight"] is into["model"]["0.weight"]
        assert same(gathered(result), whole)
        assert same(gathered(dict(model.state_dict())), whole["model"]), "it is the model itself that was filled"

    run_on_ranks(world, work, tmp_path / "meeting")


def test_a_state_of_one_process_loads_into_dtensors(tmp_path: Path) -> None:
    whole = {"w": torch.arange(35.0).view(5, 7), "tied": None, "b": torch.arange(3)}
    whole["tied"] = whole["w"]
    Checkpoint.from_state(whole).to_directory(tmp_path / "checkpoint")

    def work(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        rows = distribute_tensor(torch.zeros(5, 7), mesh, [Shard(0)])
        columns = distribute_tensor(torch.zeros(5, 7), mesh, [Shard(1)])
        Checkpoint(tmp_path / "checkpoint").load_state(into={"w": rows, "tied": columns})
        assert rows.full_tensor().equal(whole["w"]) and columns.full_tensor().equal(whole["w"])

    run_on_ranks(2, work, tmp_path / "meeting")


def test_all_ranks_raise_when_their_plans_disagree(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        tensor = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        with pytest.raises(CheckpointError, match="rank 1 gave a state with other paths"):
            plan({"a" if rank == 0 else "b": tensor})
        assert len(plan({"a": tensor}).files) == (3 if rank == 0 else 1)
        assert plan({"a": tensor}).other_ranks == ((1,) if rank == 0 else None)
        assert len(plan({"b": tensor}).files) == (3 if rank == 0 else 1)
        with pytest.raises(CheckpointError, match="rank 1 gave a state with other paths"):
            plan({"a" if rank == 0 else "b": tensor})  # Each is known by now, and they differ all the same.
        dist.barrier()

    run_on_ranks(2, work, tmp_path / "meeting")


def test_pending_reductions_and_incomplete_shards_are_refused(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        partial = DTensor.from_local(torch.ones(4), mesh, [Partial()])
        with pytest.raises(TypeError, match=r"a\[0\]: a DTensor with a partial placement"):
            plan({"a": [partial]})
        tensor = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        with pytest.raises(ConfigError, match="no rank has all of it"):
            Checkpoint.from_state({"a": tensor}).load_state()

    run_on_ranks(2, work, tmp_path / "meeting")


def _drop_chunk(index: dict[str, Any]) -> None:
    index["tensors"]["matrices.rows"]["chunks"].pop()


def _move_chunk(index: dict[str, Any]) -> None:
    index["tensors"]["matrices.rows"]["chunks"][0]["offsets"] = [3, 0]


def _double_chunk(index: dict[str, Any]) -> None:
    chunks = index["tensors"]["matrices.everywhere"]["chunks"]
    chunks.append(chunks[0])


def _rename_chunk(index: dict[str, Any]) -> None:
    index["tensors"]["local"]["chunks"][0]["name"] = "array"


def _change_dtype(index: dict[str, Any]) -> None:
    index["tensors"]["local"]["dtype"] = "F64"


def _drop_tensor(index: dict[str, Any]) -> None:
    del index["tensors"]["local"]


def _be_another(index: dict[str, Any]) -> None:
    index["format"] = "pickle"


FORGERIES = [_drop_chunk, _move_chunk, _double_chunk, _rename_chunk, _change_dtype, _drop_tensor, _be_another]


@pytest.mark.parametrize("forge", FORGERIES)
def test_a_forged_index_is_damage(
    forge: Callable[[dict[str, Any]], None], saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    for file in saved[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    index = msgspec.json.decode((tmp_path / "sharded.json").read_bytes())
    forge(index)
    (tmp_path / "sharded.json").write_bytes(msgspec.json.encode(index))
    with pytest.raises(Damaged):
        Checkpoint(tmp_path).load_state()
