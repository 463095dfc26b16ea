"""JAX on two workers, one of which is killed on the way: the same parameters as undisturbed."""

from __future__ import annotations

import shutil

import pytest
from tests.faults.programs.sandbox import Sandbox
from tests.frameworks.examples import check_survives

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600)]


def test_jax_survives_a_killed_worker(sandbox: Sandbox) -> None:
    pytest.importorskip("jax")
    check_survives(sandbox, "train_jax.py", "loss", kill="1:4")
    compiled = sandbox.cache / "jax"  # kept on purpose: a restarted worker finds it
    assert any(compiled.iterdir())
    shutil.rmtree(compiled)
