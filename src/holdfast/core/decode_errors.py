"""What decoding may raise. msgspec has an error of its own for text that is no JSON or of another type, but lets
Python's through for bytes that are not UTF-8 and for nesting that is too deep; whoever reads what others wrote, in
storage or on the wire, catches all of these."""

from __future__ import annotations

import msgspec

__all__ = ["DECODE_ERRORS"]

DECODE_ERRORS = (msgspec.MsgspecError, ValueError, TypeError, RecursionError)
