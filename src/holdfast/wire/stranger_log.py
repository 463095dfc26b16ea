"""What is logged of peers that were not accepted: one line a minute for each host and kind of trouble.

A port scan, or a thousand connections that say nothing, must not fill the driver's terminal.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict

from holdfast.printable import printable

__all__ = ["StrangerLog"]

_QUIET_S = 60.0
_HOSTS_MAX = 256
_log = logging.getLogger(__name__)


class StrangerLog:
    """Used from one event loop."""

    def __init__(self) -> None:
        self._logged_at: OrderedDict[tuple[str, str], float] = OrderedDict()

    def warn(self, peer: str, kind: str, text: str) -> None:
        """Log `text` of a peer, `host:port`, unless trouble of this kind with its host was logged a moment ago."""
        key = (peer.rpartition(":")[0], kind)
        now = asyncio.get_running_loop().time()
        if now - self._logged_at.get(key, now - _QUIET_S) < _QUIET_S:
            return
        self._logged_at[key] = now
        self._logged_at.move_to_end(key)
        if len(self._logged_at) > _HOSTS_MAX:
            self._logged_at.popitem(last=False)
        _log.warning("%s", printable(text))
