"""What a worker imports beyond its zygote, told to the agent so that the next generation finds it there
already.

The count of loaded modules is compared at each report, which costs nothing; only when it has grown is anything
sent. `zygote` decides what of it to import.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from holdfast.wire.messages import Imported
from holdfast.worker.session import Session

__all__ = ["ImportTrackingSession"]


class ImportTrackingSession(Session):
    """A session that sends, before each report, which modules are new."""

    def __init__(self, last_module: str | None, *args: Any, **kwargs: Any) -> None:
        """`last_module` is the last one that the zygote has imported; None where there is no zygote to learn."""
        super().__init__(*args, **kwargs)
        self._last = last_module
        self._modules = len(sys.modules)

    def report(self, metrics: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        # Before the report, so that a worker that is stopped as soon as that arrives has sent its modules.
        if len(sys.modules) != self._modules:
            self._check_process()  # what another process imports is not the worker's, nor may it use the connection
            self.send_imports()
        super().report(metrics, *args, **kwargs)

    def send_imports(self) -> None:
        """Send the names of the modules that were imported since the last time."""
        if self._last is None:
            return
        with self._lock:
            self._modules = len(sys.modules)
            new = _imported_since(self._last)
            if new:
                self._last = new[-1]
            if new := [name for name in new if _can_be_imported_elsewhere(name)]:
                self._send(Imported(modules=new))


def _imported_since(last: str) -> list[str]:
    """In their order. Found from the end: to look at a module, or at its name, copies the page that it is in, which a
    forked process shares with its zygote, and there are thousands of them."""
    while True:
        new = []
        try:
            for name in reversed(sys.modules):
                if name == last:
                    break
                new.append(name)
            return new[::-1]
        except RuntimeError:
            continue  # another thread has imported something meanwhile


def _can_be_imported_elsewhere(name: str) -> bool:
    """Not modules made up at run time: those have no spec, or one without a file."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return not name.startswith("__") and spec is not None and spec.name == name and bool(spec.origin)
