"""Module attributes that are imported on first use: naming a framework's package must not import the framework.

The packages of the frameworks (`lightning`, `xgboost`, ...) call `lazy_attributes`; the first attribute that is asked
for imports the framework, or says how to install it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.errors import MissingExtra

__all__ = ["lazy_attributes", "require"]


def lazy_attributes(
    module: str, homes: Mapping[str, str], needs: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of `module`: each name is found in the submodule that `homes` gives.

    `needs` maps the packages that must be installed (one of them is enough) to the extras that bring them.
    """

    def __getattr__(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if needs is not None:
            require(f"{module}.{name}", needs)
        try:
            found = importlib.import_module(f"{module}.{home}")
        except AttributeError as error:  # Python would take it for a name that is not there
            raise ImportError(f"{module}.{name} cannot be imported: {error}.") from error
        value = getattr(found, name)
        setattr(sys.modules[module], name, value)
        return value

    return __getattr__, lambda: sorted(homes)


def require(what: str, needs: Mapping[str, str]) -> None:
    """Raise `MissingExtra` if none of the packages is installed; nothing is imported."""
    if not any(sys.modules.get(package) or importlib.util.find_spec(package) for package in needs):
        package, extra = next(iter(needs.items()))
        raise MissingExtra(f"{what} needs {package}; run: pip install 'holdfast[{extra}]'")
