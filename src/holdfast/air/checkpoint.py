"""`air.checkpoint.Checkpoint`, with `from_dict` and `to_dict`, which do not pickle."""

from holdfast.checkpoint.handle import Checkpoint

__all__ = ["Checkpoint"]
