"""Holdfast: training that survives.

The public names live in `holdfast.train` and `holdfast.train.torch`; importing this package costs nothing.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
