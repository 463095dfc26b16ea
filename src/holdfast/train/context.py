"""`holdfast.train.context`: the worker's place in the group, under the path that users of Ray Train import it from."""

from __future__ import annotations

from holdfast.train.functions import get_context
from holdfast.worker.context import StorageContext, TrainContext

__all__ = ["StorageContext", "TrainContext", "get_context"]
