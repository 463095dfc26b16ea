"""`accelerate`, `prepare_optimizer` and `backward`: names of Ray Train that it refuses since its second version.

They do what is left of them without mixed precision, and warn with the name of what PyTorch has for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.train import checks

if TYPE_CHECKING:
    import torch

__all__ = ["accelerate", "backward", "prepare_optimizer"]

_O = TypeVar("_O", bound="torch.optim.Optimizer")


def accelerate(amp: bool = False) -> None:
    """Does nothing; mixed precision is `torch.autocast` around the forward pass."""
    if amp:
        checks.warn_of_no_effect(
            "train.torch.accelerate(amp=True)", "call the model within torch.autocast(...).", stacklevel=3
        )


def prepare_optimizer(optimizer: _O) -> _O:
    """The optimizer as it is."""
    checks.warn_of_no_effect("train.torch.prepare_optimizer()", "use the optimizer as it is.", stacklevel=3)
    return optimizer


def backward(tensor: Any) -> None:
    """`tensor.backward()`."""
    checks.warn_of_no_effect("train.torch.backward()", "it is loss.backward(); write that.", stacklevel=3)
    tensor.backward()
