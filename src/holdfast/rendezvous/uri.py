"""The URI of a rendezvous: `etcd://HOST:PORT/JOB?min_workers=1&max_workers=3` or `file:///directory?...`.

The query holds what torch's launcher and torchelastic call by these names. A password may be in the URI, as in every
other; it is better in HOLDFAST_ETCD_PASSWORD, and `RendezvousUri.text` never shows it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, unquote

from holdfast.errors import ConfigError
from holdfast.rendezvous.rendezvous import Rendezvous
from holdfast.storage.uri import redact, uri_parts

__all__ = ["RendezvousUri", "open_rendezvous", "parse_rendezvous_uri"]

PASSWORD_VARIABLE = "HOLDFAST_ETCD_PASSWORD"
_DEFAULT_PORT = 2379
_WORKERS_MAX = 1_000_000
_ETCD_OPTIONS = frozenset({"protocol", "cacert", "cert", "key"})
_OPTIONS = frozenset({"min_workers", "max_workers", "last_call_timeout", "ttl"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousUri:
    """A rendezvous, and the bounds of the job that meets there."""

    text: str
    """As given, without user and password: for people."""
    endpoints: tuple[tuple[str, int], ...] = ()
    """Hosts and ports of etcd; none where the rendezvous is a directory."""
    job: str = ""
    """The prefix of the job's keys in etcd."""
    directory: Path = Path()
    min_workers: int | None = None
    max_workers: int | None = None
    last_call_timeout_s: float = 5.0
    """How long more hosts are waited for once there are enough."""
    ttl_s: float = 10.0
    """How long a host may be silent before it counts as dead."""
    user: str = ""
    password: str = field(default="", repr=False)
    tls: bool = False
    cacert: str | None = None
    cert: str | None = None
    key: str | None = None


def parse_rendezvous_uri(uri: str) -> RendezvousUri:
    """Raises a `ConfigError` that says what to write instead."""
    shown = redact(uri)
    parts = uri_parts(uri)
    try:
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError as error:
        raise ConfigError(f"The rendezvous {shown} is no URI: {error}.") from error
    scheme = parts.scheme
    if scheme not in ("etcd", "etcds", "file"):
        raise ConfigError(
            f"The rendezvous {shown} has the scheme {scheme!r}: write etcd://HOST:2379/JOB, or file:///DIRECTORY for a "
            "directory that all hosts share."
        )
    known = _OPTIONS | (_ETCD_OPTIONS if scheme != "file" else frozenset())
    if unknown := sorted(set(options) - known):
        raise ConfigError(
            f"The rendezvous {shown} has the unknown option {unknown[0]!r}: use {', '.join(sorted(known))}."
        )
    min_workers = _count(shown, options, "min_workers")
    max_workers = _count(shown, options, "max_workers")
    if min_workers is not None and max_workers is not None and min_workers > max_workers:
        raise ConfigError(f"The rendezvous {shown} has a min_workers above its max_workers.")
    common = {
        "text": shown,
        "min_workers": min_workers,
        "max_workers": max_workers,
        "last_call_timeout_s": _seconds(shown, options, "last_call_timeout", 5.0, 0.0),
        "ttl_s": _seconds(shown, options, "ttl", 10.0, 1.0),
    }
    if scheme == "file":
        if parts.authority not in ("", "localhost") or not parts.path.strip("/"):
            raise ConfigError(f"The rendezvous {shown} names no directory: write file:///DIRECTORY.")
        return RendezvousUri(directory=Path(unquote(parts.path)), **common)  # type: ignore[arg-type]
    return RendezvousUri(**common, **_etcd_fields(shown, scheme, parts.authority, parts.path, options))  # type: ignore[arg-type]


def open_rendezvous(uri: RendezvousUri) -> Rendezvous:
    if uri.endpoints:
        from holdfast.rendezvous.etcd import EtcdRendezvous

        return EtcdRendezvous(uri)
    from holdfast.rendezvous.directory import DirectoryRendezvous

    return DirectoryRendezvous(uri.directory)


def _etcd_fields(shown: str, scheme: str, netloc: str, path: str, options: dict[str, str]) -> dict[str, object]:
    login, _, hosts = netloc.rpartition("@")
    user, _, password = login.partition(":")
    job = unquote(path).strip("/")
    if not job:
        raise ConfigError(f"The rendezvous {shown} names no job: write etcd://HOST:2379/JOB.")
    protocol = options.get("protocol", "https" if scheme == "etcds" else "http")
    if protocol not in ("http", "https"):
        raise ConfigError(f"The rendezvous {shown} has protocol={protocol!r}: write http or https.")
    tls = protocol == "https" or any(name in options for name in ("cacert", "cert", "key"))
    if ("cert" in options) != ("key" in options):
        raise ConfigError(f"The rendezvous {shown} must name both cert and key, or neither.")
    for name in ("cacert", "cert", "key"):
        if name in options and not Path(options[name]).is_file():
            raise ConfigError(f"The rendezvous {shown} has {name}={options[name]}, which is no file.")
    return {
        "endpoints": tuple(_endpoint(shown, one) for one in hosts.split(",")),
        "job": job,
        "user": unquote(user),
        "password": unquote(password) or os.environ.get(PASSWORD_VARIABLE, ""),
        "tls": tls,
        "cacert": options.get("cacert"),
        "cert": options.get("cert"),
        "key": options.get("key"),
    }


def _endpoint(shown: str, text: str) -> tuple[str, int]:
    bracket = text.rfind("]")
    host, colon, port = text.rpartition(":") if text.rfind(":") > bracket else (text, "", "")
    bare = host.removeprefix("[").removesuffix("]")
    if not bare or (colon and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536)):
        raise ConfigError(f"The rendezvous {shown} names no host of etcd: write etcd://HOST:2379/JOB.")
    return bare, int(port) if colon else _DEFAULT_PORT


def _count(shown: str, options: dict[str, str], name: str) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= _WORKERS_MAX):
        raise ConfigError(f"The rendezvous {shown} has {name}={text!r}: write a whole number of 1 or more.")
    return int(text)


def _seconds(shown: str, options: dict[str, str], name: str, default_s: float, least_s: float) -> float:
    text = options.get(name)
    if text is None:
        return default_s
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not least_s <= found < 86400 * 365:
        raise ConfigError(f"The rendezvous {shown} has {name}={text!r}: write seconds, {least_s:g} or more.")
    return found
