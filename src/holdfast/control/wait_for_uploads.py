"""Waiting for the agents of a controller that died on this machine, while they finish its uploads.

They hold locks (`checkpoint.upload_locks`) and end by themselves within HOLDFAST_LINGER_S; then `Catalog.void_drafts`
commits what they have completed. The lease is kept meanwhile.
"""

from __future__ import annotations

import logging

from holdfast.agent.platform import linger_s
from holdfast.checkpoint.catalog import Leftover
from holdfast.checkpoint.upload_locks import is_uploading
from holdfast.control.lease import GuestLease, Lease
from holdfast.runtime import current

__all__ = ["wait_for_uploads"]

_LOOK_S = 0.02
_BEAT_S = 5.0
_MARGIN_S = 5.0
_log = logging.getLogger("holdfast")


def wait_for_uploads(draft: Leftover, *, lease: Lease | GuestLease) -> None:
    """Returns when no agent on this machine uploads to the draft any more, or has had more time than it may take."""
    if draft.reservation is None or not is_uploading(draft.reservation.token):
        return
    limit_s = linger_s() + _MARGIN_S
    _log.warning(
        "%s is still being stored for the driver that died; waiting for it (%g s at most).", draft.name, limit_s
    )
    runtime = current()
    began = beat_at = runtime.monotonic()
    while is_uploading(draft.reservation.token):
        now = runtime.monotonic()
        if now - began > limit_s:
            _log.warning("%s is given up: its agent takes too long.", draft.name)
            return
        if now - beat_at > _BEAT_S:
            lease.beat()
            beat_at = now
        runtime.sleep(_LOOK_S)
