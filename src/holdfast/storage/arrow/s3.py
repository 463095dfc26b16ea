"""Open pyarrow's S3FileSystem through obstore, where its settings allow that.

pyarrow has no conditional write, marks directories by objects that some servers trip over, and sends less per second;
so a bucket that a user names by an `S3FileSystem` with ordinary settings is opened like its `s3://` URI. Roles,
proxies, session tokens and the like stay with pyarrow (`ArrowStore`), and so does all where obstore is missing.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlencode

from holdfast.storage.store import Store

__all__ = ["through_objects"]

_ONLY_PYARROW = ("session_token", "anonymous", "role_arn", "default_metadata")


def through_objects(filesystem: Any, root: str) -> Store | None:
    """The store at `bucket/prefix` of this S3FileSystem, or None if only pyarrow can open it."""
    options = filesystem.__reduce__()[1][0]
    if any(options.get(name) for name in _ONLY_PYARROW) or options.get("proxy_options", {}).get("host"):
        return None
    try:
        from holdfast.storage.objects.store import open_objects
    except ImportError:
        return None
    keys = ""
    if options.get("access_key") and options.get("secret_key"):
        keys = f"{quote(options['access_key'], safe='')}:{quote(options['secret_key'], safe='')}@"
    wanted = ("region", "endpoint_override", "scheme", "tls_ca_file_path")
    query = {name: options[name] for name in wanted if options.get(name)}
    if options.get("force_virtual_addressing"):
        query["force_virtual_addressing"] = "true"
    bucket, _, prefix = root.lstrip("/").partition("/")
    return open_objects(f"s3://{keys}{bucket}/{quote(prefix)}?{urlencode(query)}")
