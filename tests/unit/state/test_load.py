"""Loading a state: into existing tensors, and from damaged or forged files."""

from __future__ import annotations

import os
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
import torch
from tests.unit.state.trips import contents, in_memory, on_disk, same

from holdfast.checkpoint.state.load import load_state
from holdfast.checkpoint.state.plan import plan
from holdfast.errors import CheckpointError, ConfigError, Damaged, NotFound, UnsupportedFormat

STATE = {
    "model": {"weight": torch.arange(6.0).view(2, 3), "bias": torch.ones(2)},
    "moments": {0: (torch.ones(3), numpy.arange(2))},
    "step": 5,
}


def blank() -> dict[str, Any]:
    return {
        "model": {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)},
        "moments": {0: (torch.zeros(3), numpy.zeros(2, dtype=int))},
        "step": 0,
    }


def test_load_into_fills_tensors_in_place_and_returns_the_rest() -> None:
    into = blank()
    result = in_memory(STATE, into=into)
    assert same(result, STATE)
    assert result["model"]["weight"] is into["model"]["weight"]
    assert result["moments"][0][1] is into["moments"][0][1]
    assert into["step"] == 0


def test_tensors_begin_where_torch_puts_them_also_from_a_file(tmp_path: Path) -> None:
    # A file has no holes between them; BLAS adds in another order where memory is not aligned.
    state = {f"number {size}": torch.ones(size, dtype=torch.float64) for size in range(1, 9)}
    for back in (on_disk(state, tmp_path), in_memory(state)):
        assert same(back, state)
        assert {tensor.data_ptr() % 64 for tensor in back.values()} == {0}


def test_load_into_may_leave_out_keys() -> None:
    weight = torch.zeros(2, 3)
    result = in_memory(STATE, into={"model": {"weight": weight, "bias": None}})
    assert same(result, STATE) and result["model"]["weight"] is weight


def test_load_into_accepts_parameters_and_strided_tensors() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, 2).t())
    in_memory(STATE, into={"model": {"weight": weight, "bias": None}})
    assert weight.equal(STATE["model"]["weight"]) and weight.requires_grad and not weight.is_contiguous()  # type: ignore[index]


def changed(path: list[Any], value: Any) -> dict[str, Any]:
    state = at = blank()
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return state


MISFITS = {
    "shape": (
        ["model", "weight"],
        torch.zeros(3, 2),
        r"model\.weight has shape \(2, 3\) in the checkpoint, and \(3, 2\)",
    ),
    "dtype": (["model", "bias"], torch.zeros(2).double(), r"model\.bias has dtype torch\.float32 .* torch\.float64"),
    "missing": (["model", "more"], torch.zeros(2), r"model\.more is missing from the checkpoint"),
    "missing at the top": (["else"], torch.zeros(2), r"else is missing from the checkpoint"),
    "unexpected": (["model"], {"weight": torch.zeros(2, 3)}, r"model\.bias is in the checkpoint, and not in"),
    "kind": (["moments", 0], (numpy.zeros(3), numpy.zeros(2, int)), r"moments\[0\]\[0\] is a tensor in the checkpoint"),
    "other kind": (["moments", 0], (torch.zeros(3), torch.zeros(2)), r"moments\[0\]\[1\] is a numpy array in the"),
    "length": (["moments", 0], [torch.zeros(3)], r"moments\[0\] is a tuple of 2 in the checkpoint"),
    "no dict": (["model"], [], r"model is a dict in the checkpoint"),
    "plain": (["step"], torch.zeros(1), r"step is int in the checkpoint"),
    "meta": (["model", "bias"], torch.zeros(2, device="meta"), r"model\.bias is a meta tensor here"),
}


@pytest.mark.parametrize("path, value, sentence", MISFITS.values(), ids=MISFITS)
def test_mismatched_tensors_are_named_and_nothing_is_copied(path: list[Any], value: Any, sentence: str) -> None:
    into = changed(path, value)
    with pytest.raises(ConfigError, match=sentence):
        in_memory(STATE, into=into)
    assert same(into, changed(path, value))


def test_all_mismatches_are_counted() -> None:
    with pytest.raises(ConfigError, match="and 2 more"):
        in_memory({f"w{at}": torch.ones(2) for at in range(10)}, into={f"w{at}": torch.ones(3) for at in range(10)})


def test_a_loaded_state_outlives_its_files(tmp_path: Path) -> None:
    back = on_disk(STATE, tmp_path)
    for file in tmp_path.iterdir():
        file.unlink()
    assert same(back, STATE)


def open_below(directory: Path) -> list[str]:
    """What this process has open there; what others of its threads open and close elsewhere is no matter."""
    found = []
    for fd in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))  # noqa: PTH115
    return [path for path in found if path.startswith(str(directory))]


def test_loading_leaves_no_file_open(tmp_path: Path) -> None:
    back = on_disk(STATE, tmp_path)
    del back
    assert open_below(tmp_path) == []
    with (tmp_path / "state.json").open():
        assert open_below(tmp_path) == [str(tmp_path / "state.json")], "it would be seen"


def test_a_loaded_state_is_independent_of_a_reused_buffer() -> None:
    planned = plan(STATE)
    buffer = memoryview(bytearray(planned.size_bytes))
    planned.write_into(buffer)
    table = {file.path: buffer[file.offset : file.offset + file.size] for file in planned.files}
    back = load_state(table.__getitem__)
    buffer[:] = bytes(len(buffer))
    assert same(back, STATE)


def test_a_directory_without_a_state_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"state\.json does not exist: load_state\(\) reads"):
        load_state(lambda name: tmp_path / name)


def test_a_newer_format_version_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"format":"holdfast-state","version":2,"files":[],"state":{"$new":1}}')
    with pytest.raises(UnsupportedFormat, match="version 2"):
        load_state(lambda name: tmp_path / name)


def test_a_missing_or_empty_file_is_damage(tmp_path: Path) -> None:
    plan(STATE).write_files(tmp_path)
    (tmp_path / "state.safetensors").write_bytes(b"")
    with pytest.raises(Damaged, match=r"state\.safetensors"):
        load_state(lambda name: tmp_path / name)
    (tmp_path / "state.safetensors").unlink()
    with pytest.raises(Damaged, match=r"state\.safetensors is missing"):
        load_state(lambda name: tmp_path / name)


FORGED: dict[str, Any] = {
    "an unknown tag": {"$code": "import os"},
    "a tensor that is not there": {"$tensor": "nope"},
    "a tensor without a name": {"$tensor": ["w"]},
    "a dtype that is a function": {"$dtype": "load"},
    "a dtype that is none": {"$dtype": 5},
    "a tensor of another dtype": {"$tensor": "w", "dtype": "complex128"},
    "a tensor of a function": {"$tensor": "w", "dtype": "load"},
    "an array of objects": {"$array": "raw", "dtype": "|O8"},
    "an array of nonsense": {"$array": "raw", "dtype": "no"},
    "an array of too much": {"$array": "raw", "dtype": "<U999999999"},
    "an array of bfloat16": {"$array": "half"},
    "a device that is none": {"$device": "os.system"},
    "a device that is a number": {"$device": 5},
    "a size that is none": {"$size": ["x"]},
    "a size that is text": {"$size": "xy"},
    "bytes that are none": {"$bytes": "%%%"},
    "bytes that are a number": {"$bytes": 5},
    "an int that is none": {"$int": "zz"},
    "a float that needs no tag": {"$float": "1.0"},
    "a tuple that is none": {"$tuple": 5},
    "a dict that is none": {"$dict": {}},
    "a pair of three": {"$dict": [[1, 2, 3]]},
    "a key that is a list": {"$dict": [[[], 1]]},
    "a key that is a dict": {"$dict": [[{}, 1]]},
    "a key that is a tensor": {"$dict": [[{"$tensor": "w"}, 1]]},
    "a key twice": {"$dict": [[1, 1], [1, 2]]},
    "a counter that is none": {"$counter": [[]]},
}


@pytest.mark.parametrize("node", FORGED.values(), ids=FORGED)
def test_forged_skeletons_are_damage(node: Any) -> None:
    files = contents(
        plan({"w": torch.ones(3), "raw": torch.ones(8, dtype=torch.uint8), "half": torch.ones(1).bfloat16()})
    )
    document = msgspec.json.decode(files["state.json"])
    files["state.json"] = msgspec.json.encode({**document, "state": {"a": [node]}})
    with pytest.raises(Damaged, match=r"^state\.json"):
        load_state(lambda name: memoryview(files[name]))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\x80\x04K\x05.",
        b"[]",
        b"null",
        b'{"format":"holdfast-state","version":1,"files":[]}',
        b'{"format":"other","version":1,"files":[],"state":1}',
        b'{"format":"holdfast-state","version":"1","files":[],"state":1}',
        b'{"format":"holdfast-state","version":1,"files":[5],"state":1}',
        b'{"format":"holdfast-state","version":1,"files":["a","a"],"state":1}',
        b'{"format":"holdfast-state","version":1,"files":["../x.safetensors"],"state":1}',
        b'{"format":"holdfast-state","version":1,"files":["/etc/passwd.safetensors"],"state":1}',
        b'{"format":"holdfast-state","version":1,"files":[],"state":' + b"[" * 80 + b"]" * 80 + b"}",
        b'{"format":"holdfast-state","version":1,"files":[],"state":' + b"[" * 100_000,
        b'{"format":"holdfast-state","version":1,"files":[],"state":"\xff"}',
    ],
    ids=range(14),
)
def test_forged_documents_are_damage(text: bytes) -> None:
    with pytest.raises(Damaged, match=r"^state\.json"):
        load_state({"state.json": memoryview(text)}.__getitem__)


def test_flipped_bits_anywhere_give_a_state_or_an_error_of_ours() -> None:
    state = {"w": torch.ones(3), "c": torch.ones(2, dtype=torch.complex128), 1: (numpy.arange(3), 2.5, "x", b"y", None)}
    files = contents(plan(state))
    generator = random.Random(11)
    failed = 0
    for _ in range(1500):
        path = generator.choice(sorted(files))
        bad = bytearray(files[path])
        for _ in range(generator.choice([1, 1, 3])):
            bad[generator.randrange(len(bad))] = generator.randrange(256)
        try:
            load_state({**{name: memoryview(data) for name, data in files.items()}, path: memoryview(bad)}.__getitem__)
        except (CheckpointError, KeyError) as error:  # KeyError: this dict has no such file.
            failed += isinstance(error, CheckpointError)
    assert failed > 300
