"""Which torch fits which."""

from __future__ import annotations

import pytest

from holdfast.core.torch_version import find_torch_mismatch


@pytest.mark.parametrize(
    ("offered", "wanted"), [("2.13.1+cu126", "2.13.0"), ("1.13.1", ""), ("", ""), (None, "2.13.0"), (None, "")]
)
def test_a_torch_of_the_same_minor_version_fits_and_so_does_any_where_none_is_needed(
    offered: str | None, wanted: str
) -> None:
    assert find_torch_mismatch("a", offered, wanted) is None


def test_another_minor_version_and_none_do_not_fit() -> None:
    assert find_torch_mismatch("a", "2.1.0", "2.13.0") == (
        "Agent a gets no workers of this run: it has torch 2.1.0 and the controller torch 2.13.0, which cannot be in "
        "one process group; install the same minor version on both."
    )
    assert find_torch_mismatch("a", "", "2.13.0") == (
        "Agent a gets no workers of this run, which needs torch: install torch 2.13 there."
    )
