"""`TuneError`, under the path that scripts for Ray Tune import it from."""

from holdfast.errors import TuneError

__all__ = ["TuneError"]
