"""Translate errors of object stores to `holdfast.errors`.

obstore's messages hold whole answers and addresses; only the status and the server's own error code are taken from
them, so nothing that was signed or secret can pass through. `storage.failures` does the same for the
operating system.
"""

from __future__ import annotations

import re

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    InvalidPathError,
    NotFoundError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from holdfast.errors import AccessDenied, AlreadyExists, NotFound, OutOfSpace, StorageError, Unavailable
from holdfast.storage.objects.location import Location

__all__ = ["RAISED", "NoBucket", "translate"]

RAISED = (BaseError, FileNotFoundError, PermissionError, NotImplementedError, ValueError)
"""What obstore raises: some of its errors are Python's own."""

_STATUS = re.compile(r"status code: (\d{3})|\(code: (\d{3})\)")
_CODE = re.compile(r"<Code>(\w{1,80})</Code>")
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|(bucket|container) does not exist", re.IGNORECASE)
_ELSEWHERE = re.compile(r"PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocationConstraint|ReceivedRedirect")
_BAD_KEYS = re.compile(
    r"ExpiredToken|InvalidToken|InvalidAccessKeyId|TokenRefreshRequired|RequestTimeTooSkewed|InvalidAuthenticationInfo"
)
_EXPIRED = re.compile(r"ExpiredToken|TokenRefreshRequired|RequestExpired")
_NO_KEYS = re.compile(
    r"169\.254\.169\.254|metadata\.google\.internal|token request|MissingCredential|IMDS|credential", re.I
)
_FULL = re.compile(r"QuotaExceeded|InsufficientStorage|StorageFull|EntityTooLarge|no space left", re.IGNORECASE)
_LATER = re.compile(
    r"HTTP error|error sending request|error decoding|timed out|timeout|connection|SlowDown|NoSuchUpload|InvalidPart\b"
    r"|OperationAborted|ConditionalRequestConflict|RequestTimeout|ServerBusy|dispatch",
    re.IGNORECASE,
)


class NoBucket(NotFound):
    """The whole bucket is missing, not just the key."""


def translate(error: BaseException, location: Location, what: str) -> StorageError:
    """The storage error that says what happened to `what`, a URI, and the way out."""
    text = str(error).partition("\n\nDebug source")[0]
    found = _STATUS.search(text)
    status = int(found[1] or found[2]) if found else 0
    code = _CODE.search(text)
    reason = code[1] if code else f"HTTP {status}" if status else "no answer"
    if isinstance(error, AlreadyExistsError | PreconditionError) or status == 412:
        return AlreadyExists(f"{what} exists already: choose another name.")
    if _NO_BUCKET.search(text):
        return NoBucket(
            f"The {_bucket_word(location)} {location.bucket} of {what} does not exist: create it, or check the name."
        )
    if isinstance(error, NotFoundError | FileNotFoundError) or status == 404:
        return NotFound(f"{what} does not exist: check the path.")
    if _FULL.search(text) or status == 507:
        return OutOfSpace(f"No space is left to write {what} ({reason}): free some, or raise the quota.")
    if status in (301, 307, 308) or _ELSEWHERE.search(text):
        return StorageError(f"{what} is in another region: set AWS_REGION, or add ?region= to the path.")
    if location.credentials is not None and (_EXPIRED.search(text) or (status == 400 and code is None)):
        # The answer to a HEAD has no body, so it names no code.
        return Unavailable(f"The credentials for {what} have expired: renew them in the AWS profile, and it goes on.")
    if denied := _denied(error, status, reason, text, location, what):
        return denied
    if status in (408, 429) or status >= 500 or _LATER.search(text):
        return Unavailable(f"{what} cannot be reached at the moment ({reason}): check the endpoint and the network.")
    if isinstance(error, InvalidPathError) or "Error parsing Path" in text:
        return StorageError(f"{what} is no name that object stores take (control characters): rename the file.")
    if isinstance(error, NotSupportedError | NotImplementedError):
        return StorageError(f"{what} failed: the server does not know this request; check which server it is.")
    return StorageError(f"{what} failed ({reason}): check the path and the server's own log.")


def _denied(
    error: BaseException, status: int, reason: str, text: str, location: Location, what: str
) -> AccessDenied | None:
    if re.search(r"Error performing \w+ \S*169\.254|token request", text) or (not status and _NO_KEYS.search(text)):
        return AccessDenied(f"No credentials were found for {what}: set {location.variables}.")
    refused = isinstance(error, PermissionDeniedError | UnauthenticatedError | PermissionError)
    if refused or status in (401, 403) or _BAD_KEYS.search(text):
        return AccessDenied(
            f"Access to {what} was refused ({reason}): check {location.variables}, and what they may do there."
        )
    return None


def _bucket_word(location: Location) -> str:
    return "container" if location.kind == "azure" else "bucket"
