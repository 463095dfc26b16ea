"""`prepare_model`: a model that trains on all workers as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar

from holdfast.errors import ConfigError
from holdfast.train.torch.devices import get_device
from holdfast.worker import session as sessions

if TYPE_CHECKING:
    import torch

__all__ = ["prepare_model", "unwrap_model"]

_M = TypeVar("_M", bound="torch.nn.Module")


def prepare_model(
    model: _M,
    move_to_device: bool | torch.device = True,
    parallel_strategy: Literal["ddp", "fsdp"] | None = "ddp",
    parallel_strategy_kwargs: dict[str, Any] | None = None,
) -> _M | torch.nn.Module:
    """Move the model to this worker's device and, with more than one worker, wrap it for parallel training.

    `parallel_strategy` is "ddp" (every worker has the whole model), "fsdp" (each has a part) or None; the keyword
    arguments go to its class. With one worker the model comes back unwrapped.
    """
    import torch.distributed as dist

    if parallel_strategy not in ("ddp", "fsdp", None):
        raise ConfigError(f'prepare_model(parallel_strategy) must be "ddp", "fsdp" or None, not {parallel_strategy!r}.')
    device = get_device() if isinstance(move_to_device, bool) else move_to_device
    if move_to_device:
        model = model.to(device)
        sessions.note(f"The model is moved to {device}")
    if parallel_strategy is None or not dist.is_initialized() or dist.get_world_size() == 1:
        return model
    sessions.note(f"The model is wrapped for {parallel_strategy.upper()}")
    options = dict(parallel_strategy_kwargs or {})
    if parallel_strategy == "fsdp":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, **options)
    from torch.nn.parallel import DistributedDataParallel

    if device.type == "cuda":
        options.setdefault("device_ids", [device])
        options.setdefault("output_device", device)
    return DistributedDataParallel(model, **options)


def unwrap_model(model: Any) -> Any:
    """The module that `prepare_model` was given: its state dict has the same keys with any number of workers.

    Takes DDP's and `torch.compile`'s wrappers off. FSDP's stays, since its parameters are spread over the workers: save
    those with `Checkpoint.from_state`, which every rank reports.
    """
    import torch
    from torch.nn.parallel import DistributedDataParallel

    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), torch.nn.Module):
            model = inner
        else:
            return model
