"""What a machine has for workers, read from files of machines that are not here."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.linux.resources import cpu_count, memory_bytes, visible_gpus


def test_this_machine_has_cpus_and_memory() -> None:
    assert cpu_count() >= 1
    assert memory_bytes() > 2**20


@pytest.mark.parametrize(
    ("devices", "variable", "found"),
    [
        ([], None, []),
        (["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"], None, ["0", "1"]),
        (["nvidia0", "nvidia1"], "1", ["1"]),
        (["nvidia0"], "GPU-3a, GPU-4b", ["GPU-3a", "GPU-4b"]),
        (["nvidia0"], "", []),
        (["nvidia0"], "-1", []),
        (["kfd", "dri/renderD128", "dri/renderD129", "dri/card0"], None, ["0", "1"]),
        (["dri/renderD128"], None, []),
    ],
)
def test_gpus_are_named_as_cuda_names_them(
    tmp_path: Path, devices: list[str], variable: str | None, found: list[str]
) -> None:
    for name in devices:
        path = tmp_path / "dev" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    environment = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert visible_gpus(tmp_path, environment) == found
