"""From what a user wrote to a store: paths, URIs, and the environment's defaults.

The one place that knows every backend; `objects` and `arrow`, and the libraries below them, are imported only when a
path asks for them. `redact` keeps credentials out of everything that is shown.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from holdfast.errors import InvalidURI, MissingExtra
from holdfast.storage.files import mount_kind
from holdfast.storage.posix import PosixStore
from holdfast.storage.private_directory import claim_private_directory
from holdfast.storage.retry import RetryingStore
from holdfast.storage.store import Store

__all__ = ["default_storage_path", "is_uri", "join", "local_cache_dir", "open_store", "redact", "split"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_NEARLY = re.compile(r"(s3|gs|gcs|az|abfs|abfss|hdfs|file):", re.IGNORECASE)
_BAD_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_SECRET = re.compile(
    r"secret|token|passw|credential|signature|\bsig\b|sas|auth|access_?key|account_?key|api_?key|^key$", re.I
)
_RAW_PASSWORD = re.compile(r"[^/@?#]*:(?!\d*(?:[/?#]|$))[^@]*@")
_OBJECT_EXTRAS = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
_NETWORK_MOUNTS = ("fuse", "nfs", "cifs", "smb", "ceph", "lustre", "gpfs", "beegfs", "glusterfs")
_AZURE = {"az", "abfs", "abfss"}


def open_store(path: str | os.PathLike[str], filesystem: object | None = None) -> Store:
    """The store that `path` names. Opening writes nothing, and creates nothing."""
    text = os.fspath(path)
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise InvalidURI(
            f"The storage path {text!r} is empty or not text: write a directory or a URI such as s3://bucket/runs."
        )
    match = _SCHEME.match(text)
    if filesystem is not None:
        if match:
            raise InvalidURI(
                f"The storage path {redact(text)} has a scheme beside a filesystem: write it without {match[0]}."
            )
        return _open_arrow(text, filesystem)
    if match is None:
        return _open_directory(_local_path(text))
    scheme = match[1].lower()
    _check_encoding(text)
    if scheme == "file":
        return _open_directory(_file_path(text))
    if scheme in _OBJECT_EXTRAS:
        _check_bucket(text, scheme)
        return _open_objects(text, scheme)
    if scheme == "hdfs":
        return _open_arrow(text, None)
    raise InvalidURI(
        f"The storage path {redact(text)} has the unknown scheme {scheme}://: use a directory, file://, s3://, gs://, az://,"
        " abfs:// or hdfs://, or give a filesystem."
    )


def is_uri(path: str) -> bool:
    """Whether `path` has a scheme: its parts are then percent-encoded, and a query may follow."""
    return _SCHEME.match(path) is not None


def join(path: str, name: str) -> str:
    """The path or URI of `name` below `path`. Below a URI the name is percent-encoded, and the query stays last."""
    scheme, rest, query = _take_apart(path)
    return f"{scheme}{rest.rstrip('/')}/{quote(name) if scheme else name}{query}"


def split(path: str) -> tuple[str, str]:
    """The opposite of `join`: what holds the directory `path`, with a URI's query, and its name. The name is empty
    where there is none, as in `s3://bucket` or `/`."""
    scheme, rest, query = _take_apart(path)
    rest = rest.rstrip("/")
    parent, slash, name = rest.rpartition("/")
    if scheme and scheme.lower() != "file://" and not parent:
        return scheme + rest + query, ""
    if not scheme and not slash:
        return ".", name
    return f"{scheme}{parent or '/'}{query}", unquote(name) if scheme else name


def _take_apart(path: str) -> tuple[str, str, str]:
    """A URI's scheme with its `://`, what follows it, and its query with its `?`; a plain path has only the middle."""
    if not (match := _SCHEME.match(path)):
        return "", path, ""
    rest, mark, query = path[match.end() :].partition("?")
    return match[0], rest, mark + query


def default_storage_path() -> str:
    """Where runs go when nobody says: HOLDFAST_STORAGE, RAY_STORAGE, or ~/holdfast_results."""
    for name in ("HOLDFAST_STORAGE", "RAY_STORAGE"):
        if value := os.environ.get(name, "").strip():
            return value
    return os.path.expanduser("~/holdfast_results")  # noqa: PTH111  does not fail without a home


def local_cache_dir() -> Path:
    """This node's cache: HOLDFAST_LOCAL_CACHE_DIR, RAY_AIR_LOCAL_CACHE_DIR, ~/.cache/holdfast, or, without a
    home that may be written, a directory of this user's below the system's temporary one, which is made at once."""
    for name in ("HOLDFAST_LOCAL_CACHE_DIR", "RAY_AIR_LOCAL_CACHE_DIR"):
        if value := os.environ.get(name, "").strip():
            return Path(os.path.abspath(os.path.expanduser(value)))  # noqa: PTH100, PTH111
    home = os.path.expanduser("~")  # noqa: PTH111
    if os.path.isabs(home) and _may_write(Path(home, ".cache", "holdfast")):  # noqa: PTH117
        return Path(home, ".cache", "holdfast")
    import tempfile  # seldom needed, and a tenth of what `import holdfast.train` may cost

    return claim_private_directory(Path(tempfile.gettempdir(), f"holdfast-{os.getuid()}"))


def redact(uri: str) -> str:
    """The URI without user, password and secret query values; anything else as it is."""
    if not (match := _SCHEME.match(uri)):
        return uri
    scheme, rest = match[1].lower(), uri[match.end() :]
    # In Azure's URIs what stands before the @ is the container, unless a password follows it.
    container = f"{rest.partition('@')[0].partition(':')[0]}@" if scheme in _AZURE and "@" in rest else ""
    # A password that was not percent-encoded may hold a slash, which hides it from urlsplit.
    while password := _RAW_PASSWORD.match(rest):
        rest = rest[password.end() :]
    try:
        parts = urlsplit(f"{scheme}://{rest}")
    except ValueError:
        return f"{scheme}://..."
    host = container + parts.netloc.rpartition("@")[2]
    pairs = [(k, redact(v)) for k, v in parse_qsl(parts.query, keep_blank_values=True) if not _SECRET.search(k)]
    query = "?" + urlencode(pairs, safe=":/") if pairs else ""
    return f"{scheme}://{host}{parts.path}{query}" + (f"#{parts.fragment}" if parts.fragment else "")


def _open_directory(path: Path) -> Store:
    store = PosixStore(path)
    # A disk that fails will fail again; a mount over a network may not.
    return RetryingStore(store) if mount_kind(Path(store.uri)).startswith(_NETWORK_MOUNTS) else store


def _open_objects(uri: str, scheme: str) -> Store:
    try:
        from holdfast.storage.objects import open_objects

        store: Store = open_objects(uri)
    except ImportError as error:
        _only_missing("obstore", error)
        raise MissingExtra(
            f"{scheme}:// needs the object-store client; run: pip install 'holdfast[{_OBJECT_EXTRAS[scheme]}]'"
        ) from error
    return RetryingStore(store)


def _open_arrow(path: str, filesystem: object | None) -> Store:
    try:
        from holdfast.storage.arrow import open_arrow

        store: Store = open_arrow(path, filesystem)
    except ImportError as error:
        _only_missing("pyarrow", error)
        what = "hdfs://" if filesystem is None else "A filesystem"
        raise MissingExtra(f"{what} needs pyarrow; run: pip install 'holdfast[arrow]'") from error
    return RetryingStore(store)


def _only_missing(package: str, error: ImportError) -> None:
    """Raise `error` itself unless it says that this very package is not installed."""
    if isinstance(error, MissingExtra) or (error.name or "").partition(".")[0] != package:
        raise error


def _local_path(text: str) -> Path:
    if (nearly := _NEARLY.match(text)) and not os.path.exists(text):  # noqa: PTH110
        raise InvalidURI(
            f"The storage path {text} is no URI: write {nearly[1]}://..., or ./{text} for a directory of that name."
        )
    expanded = os.path.expanduser(text)  # noqa: PTH111  pathlib's raises without naming the path
    if expanded.startswith("~"):
        raise InvalidURI(
            f"The storage path {text} names no user's home: write the whole path, or ./{text} for a directory."
        )
    return Path(expanded)


def _file_path(uri: str) -> Path:
    parts = urlsplit(uri)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or parts.query or parts.fragment:
        raise InvalidURI(
            f"The storage path {redact(uri)} is no file URI: write file:///directory, and %3F for ? or %23 for #."
        )
    return Path(unquote(parts.path, errors="strict"))


def _check_encoding(uri: str) -> None:
    if _BAD_PERCENT.search(uri):
        raise InvalidURI(
            f"The storage path {redact(uri)} has a % without two hexadecimal digits: write %25 for a % of its own."
        )
    try:
        unquote(uri, errors="strict")
    except UnicodeDecodeError:
        raise InvalidURI(f"The storage path {redact(uri)} holds percent-encoded bytes that are not UTF-8.") from None


def _check_bucket(uri: str, scheme: str) -> None:
    try:
        bucket = urlsplit(uri).netloc.rpartition("@")[2]
    except ValueError:
        bucket = ""
    if not bucket:
        raise InvalidURI(f"The storage path {redact(uri)} names no bucket: write {scheme}://bucket/prefix.")


def _may_write(directory: Path) -> bool:
    while not os.path.exists(directory) and directory != directory.parent:  # noqa: PTH110  pathlib raises EACCES
        directory = directory.parent
    return os.access(directory, os.W_OK | os.X_OK)
