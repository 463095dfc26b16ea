"""Python imports this at its start where it lies on PYTHONPATH: with KILL_WORKER=rank:number, the worker of that rank
kills itself right before that report, in the first generation only."""

from __future__ import annotations

import os
import signal
from typing import Any

if "KILL_WORKER" in os.environ:
    from holdfast.worker.session import Session

    _report = Session.report

    def _killing_report(self: Session, *args: Any, **kwargs: Any) -> None:
        here = self.assignment
        if here.restart_count == 0 and f"{here.rank}:{self._number + 1}" == os.environ["KILL_WORKER"]:
            os.kill(os.getpid(), signal.SIGKILL)
        _report(self, *args, **kwargs)

    Session.report = _killing_report  # type: ignore[method-assign]
