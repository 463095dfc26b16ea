"""`Checkpoint.from_state` outside of a run: writing, reading, and clear errors."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from tests.unit.state.trips import same

from holdfast.checkpoint.handle import Checkpoint
from holdfast.errors import ConfigError, NotFound

STATE = {"w": torch.arange(3.0), "step": 1}


def test_a_state_is_written_and_read_as_an_ordinary_checkpoint(tmp_path: Path) -> None:
    made = Checkpoint.from_state(STATE)
    directory = made.to_directory(tmp_path / "there")
    assert sorted(os.listdir(directory)) == ["state.json", "state.safetensors"]  # noqa: PTH208
    assert same(Checkpoint.from_directory(directory).load_state(map_location="cpu"), STATE)


def test_as_directory_lasts_until_its_with_block_ends() -> None:
    with Checkpoint.from_state(STATE).as_directory() as directory:
        back = Checkpoint(directory).load_state()
    assert not Path(directory).exists()
    assert same(back, STATE)


def test_a_state_loaded_from_memory_is_a_copy() -> None:
    made = Checkpoint.from_state(STATE)
    back = made.load_state()
    assert same(back, STATE) and back["w"] is not STATE["w"]
    back["w"].zero_()
    assert same(made.load_state(), STATE)
    into = {"w": torch.zeros(3)}
    assert made.load_state(into=into)["w"] is into["w"]
    assert same(into["w"], STATE["w"])


def test_a_state_in_memory_has_no_path() -> None:
    made = Checkpoint.from_state(STATE)
    for ask in (lambda: made.path, lambda: made.filesystem, made.get_metadata, lambda: made.set_metadata({})):
        with pytest.raises(ConfigError, match="has no place in storage until it is reported"):
            ask()
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(made)
    assert made == made and made != Checkpoint.from_state(STATE) and len({made, made}) == 1
    assert repr(made) == "Checkpoint.from_state(...)"
    assert isinstance(made, Checkpoint)


def test_what_cannot_be_saved_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"^step\[1\]: function"):
        Checkpoint.from_state({"step": [0, print, lambda: 0][:1] + [lambda: 0]}).to_directory(tmp_path / "there")


def test_an_ordinary_directory_holds_no_state(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"")
    with pytest.raises(NotFound, match="from_state"):
        Checkpoint(tmp_path).load_state()
