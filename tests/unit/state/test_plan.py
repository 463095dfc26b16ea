"""Plans: the same structure gives the same files and offsets, and unchanged tensors keep their bytes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
import torch
from tests.unit.state.trips import contents, in_memory, same

from holdfast.checkpoint.state import plan as planning
from holdfast.checkpoint.state.grouping import GROUP_BYTES
from holdfast.checkpoint.state.plan import INDEX, plan
from holdfast.checkpoint.state.safetensors import parse_header

MIB = 2**20


def big(count: int, mib: float) -> dict[str, torch.Tensor]:
    return {f"w{at}": torch.full((int(mib * MIB) // 4,), float(at)) for at in range(count)}


def test_large_tensors_have_files_of_their_own_and_small_ones_share() -> None:
    state = {"big": big(2, 16), "small": big(5, 6), "tiny": torch.ones(3)}
    files = contents(plan(state))
    tensors = {path: set(parse_header(memoryview(data), path)) for path, data in files.items() if "-of-" in path}
    assert sorted(map(sorted, tensors.values())) == [
        ["big.w0"],
        ["big.w1"],
        ["small.w0", "small.w1"],
        ["small.w2", "small.w3"],
        ["small.w4", "tiny"],
    ]
    assert set(tensors) == {f"state-{n:05d}-of-00005.safetensors" for n in range(1, 6)}
    index = msgspec.json.decode(files[INDEX])
    assert index["metadata"] == {"total_size": 2 * 16 * MIB + 5 * 6 * MIB + 12}
    assert index["weight_map"] == {name: path for path, names in tensors.items() for name in names}
    assert msgspec.json.decode(files["state.json"])["files"] == [*sorted(tensors), INDEX]


def test_one_file_needs_no_index_and_no_tensor_needs_no_file() -> None:
    assert set(contents(plan({"a": torch.ones(2)}))) == {"state.safetensors", "state.json"}
    assert set(contents(plan({"a": 1}))) == {"state.json"}


def test_tensors_and_files_are_aligned() -> None:
    generator = random.Random(3)
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.complex128, torch.bool]
    state: dict[str, Any] = {
        f"t{at}": torch.zeros(generator.randrange(0, 9), dtype=generator.choice(dtypes)) for at in range(60)
    }
    state["text"] = numpy.array(["abcde", "f"])
    planned = plan(state)
    assert all(file.offset % 4096 == 0 for file in planned.files)
    ends = [file.offset + file.size for file in planned.files]
    assert all(end <= file.offset for end, file in zip(ends, planned.files[1:], strict=False))
    assert planned.size_bytes % 4096 == 0 and planned.size_bytes >= ends[-1]
    stored = parse_header(memoryview(contents(planned)["state.safetensors"]), "")
    assert min(entry.start for entry in stored.values()) % 64 == 0
    for name, value in state.items():
        if name != "text" and value.numel():
            assert stored[name].start % value.dtype.itemsize == 0, name
    assert stored["text"].start % 4 == 0


def test_the_plan_of_a_structure_is_cached() -> None:
    def state(step: int) -> dict[str, Any]:
        return {"model": {f"w{at}": torch.randn(4) for at in range(50)}, "step": step, "best": [0.5 * step, None]}

    first, second = plan(state(1)), plan(state(2**40))
    assert first._layout is second._layout
    assert [file.offset for file in first.files] == [file.offset for file in second.files]
    assert plan({**state(3), "more": 1})._layout is not first._layout
    given = state(4)
    assert same(in_memory(given), given)


@pytest.mark.parametrize(
    "one, other",
    [
        ({1: 0}, {True: 0}),
        ({1: 0}, {1.0: 0}),
        ({"1": 0}, {1: 0}),
        ({0.0: 0}, {-0.0: 0}),
        ([1], (1,)),
        ([1], [True]),
        ([0.0], [-0.0]),
        ([1], [1.0]),
        ({"a": 1}, {"$a": 1}),
        ([[], 1], [[1]]),
        ({"a": torch.ones(2)}, {"a": torch.ones(2, dtype=torch.float64)}),
        ({"a": torch.ones(2)}, {"a": torch.ones(1, 2)}),
        ({"a": torch.ones(2)}, {"a": numpy.ones(2, dtype="f4")}),
        ({"a": numpy.ones(1)[0]}, {"a": numpy.ones(())}),
        ({"a": torch.tensor(1.0)}, {"a": 1.0}),
    ],
    ids=repr,
)
def test_similar_structures_have_different_plans(one: Any, other: Any) -> None:
    for state in (one, other, one, other):
        assert same(in_memory(state), state)


def test_aliases_that_come_and_go_change_the_layout() -> None:
    tensor = torch.arange(4.0)
    for state in ([tensor, tensor], [tensor, tensor + 1], [tensor, tensor]):
        assert same(in_memory(state), state)


def test_unchanged_states_give_the_same_bytes_and_so_does_another_order_of_planning() -> None:
    state = {"model": big(3, 1), "step": 5}
    before = contents(plan(state))
    planning._seen.clear()
    assert contents(plan(state)) == before


def test_changed_tensors_change_only_their_own_files() -> None:
    state = {"model": big(20, 16), "optimizer": {"step": torch.zeros(1)}}
    before = contents(plan(state))
    state["model"]["w4"] += 1
    state["model"]["w9"] += 1
    after = contents(plan(state))
    changed = {path for path in after if before[path] != after[path]}
    assert len(changed) == 2
    assert sum(len(after[path]) for path in changed) <= 0.12 * sum(map(len, after.values()))


def test_changed_plain_values_change_only_the_skeleton() -> None:
    before, after = (contents(plan({"model": big(2, 1), "step": step, "note": "x" * step})) for step in (1, 9000))
    assert {path for path in after if before[path] != after[path]} == {"state.json"}


def test_files_and_buffer_have_the_same_bytes(tmp_path: Path) -> None:
    state = {"big": big(2, 17), "small": big(3, 1), "a": numpy.arange(5), "step": 3}
    plan(state).write_files(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == contents(plan(state))


def test_files_are_written_again_over_longer_ones(tmp_path: Path) -> None:
    for text in ("long" * 1000, "short"):
        plan({"a": torch.ones(2), "text": text}).write_files(tmp_path)
    assert (tmp_path / "state.json").stat().st_size < 1000


def test_a_buffer_may_be_larger_but_not_smaller() -> None:
    planned = plan({"a": torch.ones(2000)})
    planned.write_into(memoryview(bytearray(planned.size_bytes + 1234)))
    with pytest.raises(ValueError, match="needs"):
        planned.write_into(memoryview(bytearray(planned.size_bytes - 1)))


def test_a_group_is_never_larger_than_it_may_be() -> None:
    files = contents(plan(big(40, 1.5)))
    sizes = [len(data) for path, data in files.items() if path.endswith(".safetensors")]
    assert len(sizes) == 4 and max(sizes) < GROUP_BYTES + 8192
