"""Make obstore's clients from a `Location`: one kind of client per cloud, with our retries instead of obstore's."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from obstore.store import AzureStore, GCSStore, S3Store

from holdfast.errors import InvalidURI
from holdfast.storage.objects.failures import RAISED
from holdfast.storage.objects.location import Location

__all__ = ["connect"]

_CLASSES: dict[str, Any] = {"s3": S3Store, "gcs": GCSStore, "azure": AzureStore}


def connect(location: Location, max_retries: int, timeout_s: int, idle_timeout_s: int) -> Any:
    """A client; nothing is sent yet. `idle_timeout_s` is how long the server may send nothing."""
    options: dict[str, Any] = {
        "allow_http": location.allow_http,
        "connect_timeout": timedelta(seconds=3),
        "timeout": timedelta(seconds=timeout_s),
        "read_timeout": timedelta(seconds=idle_timeout_s),
    }
    if location.certificates is not None:
        options["root_certificate"] = location.certificates
    retry = {
        "max_retries": max_retries,
        "retry_timeout": timedelta(seconds=60),
        "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5), "base": 2},
    }
    more: dict[str, Any] = {} if location.credentials is None else {"credential_provider": location.credentials}
    try:
        return _CLASSES[location.kind](
            location.bucket, config=location.config, client_options=options, retry_config=retry, **more
        )
    except RAISED as error:
        # The message may quote a setting, so the reader is pointed to the settings instead.
        raise InvalidURI(
            f"The storage path {location.uri(location.prefix)} cannot be opened ({type(error).__name__}): check its"
            f" parameters and {location.variables}."
        ) from None
