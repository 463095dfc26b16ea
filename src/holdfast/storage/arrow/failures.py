"""Translate errors of pyarrow and fsspec filesystems to `holdfast.errors`.

They raise OSErrors with and without a number, botocore's errors, texts of C++ and Java. Only the class and known codes
are used, never the text, which may hold addresses and keys. `storage.failures` does the same for the operating system.
"""

from __future__ import annotations

import re

from holdfast.errors import AccessDenied, AlreadyExists, NotFound, OutOfSpace, StorageError, Unavailable
from holdfast.storage.failures import translate as translate_os

__all__ = ["translate"]

_CODE = re.compile(r"AWS Error ([A-Z_]+)|\((\w+)\) when calling|\b(\w+Exception)\b")
_NO_BUCKET = re.compile(r"NO_SUCH_BUCKET|NoSuchBucket|bucket does not exist|bucket '[^']*' not found", re.IGNORECASE)
_DENIED = re.compile(
    r"ACCESS_DENIED|SIGNATURE_DOES_NOT_MATCH|INVALID_ACCESS_KEY_ID|INVALID_CLIENT_TOKEN_ID|EXPIRED_TOKEN|Forbidden|\b40[13]\b"
    r"|AccessDenied|SignatureDoesNotMatch|InvalidAccessKeyId|AccessControlException|credentials|Permission denied",
    re.IGNORECASE,
)
_FULL = re.compile(r"QuotaExceeded|No space left|StorageFull|InsufficientStorage", re.IGNORECASE)
_LATER = re.compile(
    r"NETWORK_CONNECTION|SLOW_DOWN|INTERNAL_FAILURE|INTERNAL_ERROR|SERVICE_UNAVAILABLE|REQUEST_TIMEOUT|THROTTL|SlowDown"
    r"|InternalError|ServiceUnavailable|EndpointConnectionError|Could not connect|curlCode|timed? ?out|refused|reset"
    r"|SafeModeException|HTTP response code 5\d\d|HTTP Status Code: 5\d\d|Content-?Length|end of file|closed",
    re.IGNORECASE,
)


def translate(error: BaseException, what: str) -> StorageError:
    """The storage error that says what happened to `what`, and the way out."""
    text = f"{type(error).__name__}: {error}"
    code = _CODE.search(text)
    reason = next(filter(None, code.groups())) if code else type(error).__name__
    if _NO_BUCKET.search(text):
        return NotFound(f"The bucket of {what} does not exist: create it, or check the name.")
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return NotFound(f"{what} does not exist: check the path.")
    if isinstance(error, FileExistsError):
        return AlreadyExists(f"{what} exists already: choose another name.")
    if isinstance(error, PermissionError) or _DENIED.search(text):
        return AccessDenied(
            f"Access to {what} was refused ({reason}): check the filesystem's credentials, and what they may do there."
        )
    if _FULL.search(text):
        return OutOfSpace(f"No space is left to write {what} ({reason}): free some, or raise the quota.")
    if isinstance(error, ConnectionError | TimeoutError) or _LATER.search(text):
        return Unavailable(f"{what} cannot be reached at the moment ({reason}): check the server and the network.")
    if isinstance(error, OSError) and error.errno:
        return translate_os(OSError(error.errno, reason), what)
    return StorageError(f"{what} failed ({reason}): check the path and the filesystem that was given.")
