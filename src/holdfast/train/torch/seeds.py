"""`enable_reproducibility`: the same numbers every time, at some cost in speed."""

from __future__ import annotations

import os
import random
import sys

__all__ = ["enable_reproducibility"]


def enable_reproducibility(seed: int = 0) -> None:
    """Seed Python, numpy (where it is in use) and torch, and keep torch to deterministic algorithms."""
    import torch

    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # cuBLAS is deterministic only with a fixed workspace, and reads this when it starts.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
