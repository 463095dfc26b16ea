"""What `XGBoostTrainer` and `LightGBMTrainer` share: checks of their arguments, and the methods that have gone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from holdfast.errors import ConfigError
from holdfast.train.backend import BackendConfig
from holdfast.train.lazy_attributes import require
from holdfast.train.trainer import DataParallelTrainer

if TYPE_CHECKING:
    from holdfast.checkpoint.handle import Checkpoint

__all__ = ["BoosterTrainer"]


class BoosterTrainer(DataParallelTrainer):
    """A trainer whose workers grow one model's trees. Subclasses name the package and the type of its configuration."""

    _package: ClassVar[str]
    _config_type: ClassVar[type[BackendConfig]]

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        config: BackendConfig | None,
        legacy: Mapping[str, Any],
        **settings: Any,
    ) -> None:
        """`legacy` are the arguments of trainers that took no function, and `settings` those of every trainer."""
        name = type(self).__name__
        if given := [argument for argument, value in legacy.items() if value is not None]:
            raise DeprecationWarning(
                f"{name}({', '.join(given)}) has gone: call the framework's own train() in a train_loop_per_worker, "
                "and give that function to the trainer."
            )
        require(name, {self._package: self._package})
        if config is not None and not isinstance(config, self._config_type):
            wanted = self._config_type.__name__
            raise ConfigError(f"{name}({self._package}_config) must be of type {wanted}, not {type(config).__name__}.")
        super().__init__(train_loop_per_worker, backend_config=config or self._config_type(), **settings)

    @classmethod
    def get_model(cls, checkpoint: Checkpoint) -> Any:
        raise DeprecationWarning(f"{cls.__name__}.get_model() has gone: call RayTrainReportCallback.get_model().")
