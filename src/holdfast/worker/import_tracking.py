"""What a worker imports beyond its zygote, told to the agent so that the next generation finds it there
already.

The count of loaded modules is compared at each report, which costs nothing; only when it has grown is anything
sent. `zygote` decides what of it to import.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Set
from typing import Any

from holdfast.wire.messages import Imported
from holdfast.worker.session import Session

__all__ = ["ImportTrackingSession"]


class ImportTrackingSession(Session):
    """A session that sends, before each report, which modules are new."""

    def __init__(self, known: Set[str] | None, *args: Any, **kwargs: Any) -> None:
        """`known` are the zygote's modules; None where there is no zygote to learn. They are not copied: touching
        thousands of names in a forked process copies the pages that they lie in."""
        super().__init__(*args, **kwargs)
        self._known = known
        self._told: set[str] = set()
        self._modules = len(sys.modules)

    def report(self, metrics: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        # Before the report, so that a worker that is stopped as soon as that arrives has sent its modules.
        if len(sys.modules) != self._modules:
            self.send_imports()
        super().report(metrics, *args, **kwargs)

    def send_imports(self) -> None:
        """Send the names of the modules that were imported since the last time."""
        if self._known is None:
            return
        with self._lock:
            self._modules = len(sys.modules)
            new = [name for name, module in list(sys.modules.items()) if self._is_new(name, module)]
            self._told.update(new)
            if new:
                self._send(Imported(modules=new))

    def _is_new(self, name: str, module: object) -> bool:
        if self._known is None or name in self._known or name in self._told or name.startswith("__"):
            return False
        # Modules made up at run time have no spec, or one without a file, and cannot be imported elsewhere.
        spec = getattr(module, "__spec__", None)
        return spec is not None and spec.name == name and bool(spec.origin)
