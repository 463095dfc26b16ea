"""What this machine has for workers: CPUs, memory, and GPUs by their ids. No device is opened for that."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["cpu_count", "memory_bytes", "visible_gpus"]

_ROOT = Path("/")


def cpu_count() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def memory_bytes(root: Path = _ROOT) -> int:
    """All of the machine's memory; 0 where that is not told."""
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return 0


def visible_gpus(root: Path = _ROOT, environment: Mapping[str, str] = os.environ) -> list[str]:
    """The ids of the GPUs, as CUDA_VISIBLE_DEVICES names them; by the devices that the kernel shows where that is not
    set, since asking CUDA would start it in this process."""
    given = environment.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        named = [one.strip() for one in given.split(",") if one.strip()]
        return [] if "-1" in named else named
    nvidia = [path for path in (root / "dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()]
    if nvidia:
        return [str(number) for number in range(len(nvidia))]
    is_amd = (root / "dev/kfd").exists()
    return [str(number) for number, _ in enumerate((root / "dev/dri").glob("renderD*"))] if is_amd else []
