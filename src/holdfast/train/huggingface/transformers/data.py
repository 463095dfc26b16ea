"""`prepare_trainer`: a `transformers.Trainer` whose data sets may be iterables of ready batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import Trainer

__all__ = ["prepare_trainer"]


class _Batches(IterableDataset):  # type: ignore[misc]
    """An iterable of batches as torch knows it."""

    def __init__(self, batches: Iterable[Any]) -> None:
        super().__init__()
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def prepare_trainer(trainer: Trainer) -> Trainer:
    """Let `train_dataset` and `eval_dataset` be iterables of batches, such as those of
    `train.get_dataset_shard("train").iter_torch_batches(...)`; data sets of torch stay as they are."""
    kind = type(trainer)

    class _TakesBatches(kind):  # type: ignore[misc, valid-type]
        def get_train_dataloader(self) -> Any:
            loader = _loader(self.train_dataset)
            return super().get_train_dataloader() if loader is None else loader

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            chosen = self.eval_dataset if eval_dataset is None else eval_dataset
            if isinstance(eval_dataset, str) and isinstance(self.eval_dataset, dict):
                chosen = self.eval_dataset[eval_dataset]
            loader = _loader(chosen)
            return super().get_eval_dataloader(eval_dataset) if loader is None else loader

    _TakesBatches.__name__, _TakesBatches.__qualname__ = kind.__name__, kind.__qualname__
    trainer.__class__ = _TakesBatches
    return trainer


def _loader(dataset: Any) -> DataLoader[Any] | None:
    """A loader that hands the batches on; None for what is no plain iterable. `Trainer` shards what it makes a loader
    of itself, and these batches are this rank's own."""
    plain = isinstance(dataset, Iterable) and not isinstance(dataset, Sized | Dataset)
    return DataLoader(_Batches(dataset), batch_size=1, collate_fn=_first) if plain else None


def _first(batches: list[Any]) -> Any:
    return batches[0]
