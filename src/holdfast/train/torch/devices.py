"""Which device a worker trains on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["get_device", "get_devices"]


def get_device() -> torch.device:
    """This worker's device: its GPU with `ScalingConfig(use_gpu=True)`, the CPU otherwise."""
    return get_devices()[0]


def get_devices() -> list[torch.device]:
    """All devices of this worker: more than one where `resources_per_worker` gives it several GPUs."""
    import torch

    if os.environ.get("HOLDFAST_USE_GPU") != "1" or not torch.cuda.is_available():
        return [torch.device("cpu")]
    there = torch.cuda.device_count()
    if os.environ.get("HOLDFAST_OWN_GPUS") == "1":  # what this process sees is its own
        return [torch.device("cuda", at) for at in range(there)]
    workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    each = max(1, there // workers)
    return [torch.device("cuda", (rank * each + at) % there) for at in range(each)]
