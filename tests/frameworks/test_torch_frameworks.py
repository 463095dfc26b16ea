"""Frameworks on top of torch, on two workers, one of which is killed on the way: the same weights as undisturbed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.faults.programs.sandbox import Sandbox
from tests.frameworks.examples import check_survives

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600)]


def test_lightning_survives_a_killed_worker(sandbox: Sandbox) -> None:
    pytest.importorskip("lightning")
    check_survives(sandbox, "train_lightning.py", "loss", kill="1:4")


def test_lightning_with_fsdp_survives_a_killed_worker(sandbox: Sandbox) -> None:
    pytest.importorskip("lightning")
    check_survives(sandbox, Path(__file__).with_name("train_lightning_fsdp.py"), "loss", kill="1:3")


def test_transformers_survives_a_killed_worker(sandbox: Sandbox) -> None:
    pytest.importorskip("transformers")
    check_survives(sandbox, "train_transformers.py", "loss", kill="1:4")


def test_accelerate_survives_a_killed_worker(sandbox: Sandbox) -> None:
    pytest.importorskip("accelerate")
    check_survives(sandbox, "train_accelerate.py", "loss", kill="1:4")


def test_fsdp2_survives_a_killed_worker(sandbox: Sandbox) -> None:
    check_survives(sandbox, "train_fsdp2.py", "loss", kill="1:4")


def test_torch_compile_survives_a_killed_worker(sandbox: Sandbox) -> None:
    check_survives(sandbox, "train_torch_compile.py", "loss", kill="1:4")
