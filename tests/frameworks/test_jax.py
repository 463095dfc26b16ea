"""JAX on two workers, one of which is killed on the way: the same parameters as undisturbed."""

from __future__ import annotations

import pytest
from tests.faults.programs.place import Place
from tests.frameworks.examples import check_survives

pytestmark = pytest.mark.frameworks


def test_jax_survives_a_killed_worker(place: Place) -> None:
    pytest.importorskip("jax")
    check_survives(place, "train_jax.py", "loss", kill="1:4")
