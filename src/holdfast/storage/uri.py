"""The syntax of storage paths: a local path, or a URI with a scheme, percent-encoded parts and perhaps a query.

The one place that recognises a scheme, joins and splits paths, and removes credentials from what is shown. `locate`
opens the store that a path names.
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode

__all__ = ["AZURE_SCHEMES", "UriParts", "is_uri", "join", "redact", "scheme_of", "split", "uri_parts"]

AZURE_SCHEMES = frozenset({"az", "abfs", "abfss"})

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SECRET = re.compile(
    r"secret|token|passw|credential|signature|\bsig\b|sas|auth|access_?key|account_?key|api_?key|^key$", re.I
)
_PARTS = re.compile(r"([^/?#]*)([^?#]*)(?:\?([^#]*))?(?:#(.*))?", re.DOTALL)
_RAW_PASSWORD = re.compile(r"[^/@?#]*:(?!\d*(?:[/?#]|$))[^@]*@")


def scheme_of(path: str) -> str | None:
    """The scheme in lower case; None for a plain path."""
    match = _SCHEME.match(path)
    return match[1].lower() if match else None


def is_uri(path: str) -> bool:
    """Whether `path` has a scheme: its parts are then percent-encoded, and a query may follow."""
    return scheme_of(path) is not None


class UriParts(NamedTuple):
    """A URI as it is written: nothing is decoded."""

    scheme: str
    """In lower case; "" for a plain path."""
    authority: str
    """User, password, hosts and ports."""
    path: str
    query: str
    fragment: str


def uri_parts(uri: str) -> UriParts:
    """Unlike `urlsplit`, whose versions differ in that, this takes several hosts, some of them IPv6 addresses."""
    match = _SCHEME.match(uri)
    parts = _PARTS.fullmatch(uri[match.end() :] if match else uri)
    assert parts is not None  # every text matches
    return UriParts(match[1].lower() if match else "", parts[1], parts[2], parts[3] or "", parts[4] or "")


def join(path: str, name: str) -> str:
    """The path or URI of `name` below `path`. Below a URI the name is percent-encoded, and the query stays last."""
    scheme, rest, query = _partition(path)
    return f"{scheme}{rest.rstrip('/')}/{quote(name) if scheme else name}{query}"


def split(path: str) -> tuple[str, str]:
    """The opposite of `join`: what holds the directory `path`, with a URI's query, and its name. The name is empty
    where there is none, as in `s3://bucket` or `/`."""
    scheme, rest, query = _partition(path)
    rest = rest.rstrip("/")
    parent, slash, name = rest.rpartition("/")
    if scheme and scheme.lower() != "file://" and not parent:
        return scheme + rest + query, ""
    if not scheme and not slash:
        return ".", name
    return f"{scheme}{parent or '/'}{query}", unquote(name) if scheme else name


def _partition(path: str) -> tuple[str, str, str]:
    """A URI's scheme with its `://`, what follows it, and its query with its `?`; a plain path has only the middle."""
    if not (match := _SCHEME.match(path)):
        return "", path, ""
    rest, mark, query = path[match.end() :].partition("?")
    return match[0], rest, mark + query


def redact(uri: str) -> str:
    """The URI without user, password and secret query values; anything else as it is."""
    if not (match := _SCHEME.match(uri)):
        return uri
    scheme, rest = match[1].lower(), uri[match.end() :]
    # In Azure's URIs what stands before the @ is the container, unless a password follows it.
    container = f"{rest.partition('@')[0].partition(':')[0]}@" if scheme in AZURE_SCHEMES and "@" in rest else ""
    # A password that was not percent-encoded may hold a slash, which would end the authority.
    while password := _RAW_PASSWORD.match(rest):
        rest = rest[password.end() :]
    parts = uri_parts(f"{scheme}://{rest}")
    host = container + parts.authority.rpartition("@")[2]
    pairs = [(k, redact(v)) for k, v in parse_qsl(parts.query, keep_blank_values=True) if not _SECRET.search(k)]
    query = "?" + urlencode(pairs, safe=":/") if pairs else ""
    return f"{scheme}://{host}{parts.path}{query}" + (f"#{parts.fragment}" if parts.fragment else "")
