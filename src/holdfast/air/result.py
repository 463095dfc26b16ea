"""`air.result.Result`."""

from holdfast.train.result import Result

__all__ = ["Result"]
