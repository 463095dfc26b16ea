"""Names and keys."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.checkpoint.layout import check_name, checkpoint_name, is_checkpoint_like, is_sidecar, key_of, parse_index
from holdfast.errors import ConfigError


@pytest.mark.parametrize("index", [0, 9, 999_999, 1_000_000, 10**12])
def test_generated_names_contain_their_index(index: int) -> None:
    assert parse_index(checkpoint_name(index)) == index


@pytest.mark.parametrize(
    "name", ["checkpoint_9", "checkpoint_0000009", "checkpoint_00000x", "best", "checkpoint_-00001"]
)
def test_other_names_have_no_index(name: str) -> None:
    assert parse_index(name) is None


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "a/b", "a\\b", "epochs", "journal", "x" * 201, "a\nb", " a", "\ud800", None, 3]
)
def test_invalid_checkpoint_names_are_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match="checkpoint name"):
        check_name(name)


@pytest.mark.parametrize("name", ["best", "epoch=3-loss=0.1", "ünïcode 1", "checkpoint_000001", "x" * 200])
def test_valid_checkpoint_names_are_accepted(name: str) -> None:
    assert check_name(name) == name
    assert is_checkpoint_like(name)


def test_sidecar_names_are_reserved_at_the_top_level_only() -> None:
    assert is_sidecar(".manifest.json") and is_sidecar(".claim-1.json")
    assert not is_sidecar("layers/.manifest.json") and not is_sidecar(".claim-1/x") and not is_sidecar("a.json")
    assert key_of("c", "a/b") == "c/a/b" and key_of("", "a") == "a"
