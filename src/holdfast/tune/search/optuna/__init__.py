"""`OptunaSearch`: Optuna's samplers propose configurations. Optuna is imported when one is made."""

from holdfast.tune.search.optuna.optuna_search import OptunaSearch

__all__ = ["OptunaSearch"]
