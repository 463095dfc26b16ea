"""Parse the URIs of object stores, with credentials and endpoints from the environment.

`parse` turns `s3://`, `gs://`, `az://` and `abfs://` URIs into a `Location`, from which `objects` makes its clients.
The names of query parameters are pyarrow's, so that URIs written for it work here. `aws_profile` reads ~/.aws.

s3://bucket/prefix
    AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION or AWS_DEFAULT_REGION, AWS_ENDPOINT_URL_S3
    or AWS_ENDPOINT_URL, AWS_PROFILE with ~/.aws; roles of containers and machines. `?endpoint_override= region= scheme=
    force_virtual_addressing= tls_ca_file_path=`; `allow_bucket_creation=` and its like are accepted, but buckets are
    never made or deleted here.
gs://bucket/prefix
    GOOGLE_APPLICATION_CREDENTIALS, GOOGLE_SERVICE_ACCOUNT_KEY, gcloud's login, accounts of machines, and
    STORAGE_EMULATOR_HOST; `gs://anonymous@bucket` signs nothing. `?endpoint_override= scheme=`
az://container/prefix, abfs://container@account.dfs.core.windows.net/prefix
    AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN, AZURE_STORAGE_CONNECTION_STRING,
    AZURE_CLIENT_ID and its like. `?endpoint_override= account= scheme=`
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from holdfast.errors import InvalidURI
from holdfast.storage.keys import check_prefix
from holdfast.storage.objects.aws_profile import ProfileCredentials, read_profile

__all__ = ["Kind", "Location", "parse"]

Kind = Literal["s3", "gcs", "azure"]

_KINDS: dict[str, Kind] = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
_PARAMETERS: dict[Kind, frozenset[str]] = {
    "s3": frozenset(
        {
            *("endpoint_override", "region", "scheme", "force_virtual_addressing", "tls_ca_file_path"),
            *("allow_bucket_creation", "allow_bucket_deletion", "allow_delayed_open", "background_writes"),
            *("check_directory_existence_before_creation", "smart_defaults"),
        }
    ),
    "gcs": frozenset({"endpoint_override", "scheme", "retry_limit_seconds", "project_id"}),
    "azure": frozenset({"endpoint_override", "account", "scheme"}),
}
_VARIABLES: dict[Kind, str] = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN",
    "gcs": "GOOGLE_APPLICATION_CREDENTIALS",
    "azure": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_AZURE_HOST = re.compile(r"([a-z0-9]+)\.(?:dfs|blob)\.core\.(windows\.net|chinacloudapi\.cn|usgovcloudapi\.net)")
_TRUE = frozenset({"1", "true", "yes", "on"})


@dataclass(frozen=True, slots=True)
class Location:
    """Where a store is. `config` may hold credentials, so it is never shown."""

    kind: Kind
    bucket: str
    prefix: str
    base: str
    """The URI up to the prefix, as the user wrote it, without credentials."""
    query: str
    own_endpoint: bool
    """Whether the user named an endpoint, so that it is not the cloud's own."""
    config: dict[str, str | bool] = field(repr=False)
    allow_http: bool
    certificates: str | None = None
    credentials: ProfileCredentials | None = field(default=None, repr=False)
    """Called for the credentials again and again, where they may be renewed; None: `config` or the environment has
    them."""

    def uri(self, prefix: str) -> str:
        """The URI of a prefix of this bucket."""
        return self.base + ("/" + quote(prefix, safe="/ +=,@~!$&'()*;:") if prefix else "") + self.query

    @property
    def variables(self) -> str:
        """The names of the variables in which credentials are looked for first."""
        return _VARIABLES[self.kind]


@dataclass(frozen=True, slots=True, repr=False)
class _Parts:
    """The parts of a URI, with its parameters checked."""

    shown: str
    kind: Kind
    user: str | None
    password: str | None
    host: str
    path: str
    parameters: Mapping[str, str]
    environment: Mapping[str, str]

    def first(self, *names: str) -> str | None:
        """The first of these variables that is set."""
        return next((self.environment[name] for name in names if self.environment.get(name)), None)

    def endpoint(self, *names: str) -> str | None:
        """The server that the query or else one of these variables names, with its scheme."""
        given = self.parameters.get("endpoint_override") or self.first(*names)
        if given is None:
            return None
        given = given.rstrip("/") if "://" in given else f"{self.parameters.get('scheme', 'https')}://{given}"
        try:
            ok = urlsplit(given).scheme in ("http", "https") and bool(urlsplit(given).hostname)
        except ValueError:
            ok = False
        if not ok or "@" in given:
            raise InvalidURI(
                f"The endpoint of {self.shown} is no server's address: write endpoint_override=http://host:port."
            )
        return given


def parse(uri: str, environment: Mapping[str, str]) -> Location:
    """The location that `uri` names; `InvalidURI` says what is wrong with it."""
    parts = _split_uri(uri, environment)
    if parts.kind == "s3":
        return _s3(parts)
    return _gcs(parts) if parts.kind == "gcs" else _azure(parts)


def _split_uri(uri: str, environment: Mapping[str, str]) -> _Parts:
    # What is shown from here on never holds more than the part before the query, without user and password.
    scheme, _, rest = uri.partition("://")
    shown = f"{scheme}://{rest.partition('?')[0].rpartition('@')[2]}"
    try:
        url = urlsplit(uri)
        host, user, password = url.netloc.rpartition("@")[2], url.username, url.password
    except ValueError:
        raise InvalidURI(f"The storage path {shown} is no URI: write {scheme}://bucket/prefix.") from None
    kind = _KINDS[url.scheme]
    if not host or url.fragment:
        raise InvalidURI(f"The storage path {shown} names no bucket, or holds a '#': write {scheme}://bucket/prefix.")
    parameters = dict(parse_qsl(url.query, keep_blank_values=True))
    for name in parameters:
        if name not in _PARAMETERS[kind]:
            known = ", ".join(sorted(_PARAMETERS[kind]))
            raise InvalidURI(
                f"The storage path {shown} has the unknown parameter {name}: known are {known};"
                f" credentials belong in {_VARIABLES[kind]}."
            )
    user, password = (unquote(text) if text is not None else None for text in (user, password))
    return _Parts(shown, kind, user, password, host, unquote(url.path), parameters, environment)


def _prefix(parts: _Parts, path: str) -> str:
    prefix = "/".join(part for part in path.split("/") if part)
    try:
        return check_prefix(prefix)
    except InvalidURI:
        raise InvalidURI(f"The storage path {parts.shown} holds '.' or '..' parts: write it without them.") from None


def _query(parts: _Parts) -> str:
    kept = urlencode(sorted(parts.parameters.items()), safe=":/")
    return f"?{kept}" if kept else ""


def _s3(parts: _Parts) -> Location:
    profile = read_profile(parts.environment)
    endpoint = parts.endpoint("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT") or profile.endpoint_url
    region = parts.parameters.get("region") or parts.first("AWS_REGION", "AWS_DEFAULT_REGION") or profile.region
    config: dict[str, str | bool] = {"region": region or "us-east-1"}
    virtual = parts.parameters.get("force_virtual_addressing", "").lower() in _TRUE
    if endpoint is not None:
        scheme, _, server = endpoint.partition("://")
        config["endpoint"] = f"{scheme}://{parts.host}.{server}" if virtual else endpoint
    if virtual:
        config["virtual_hosted_style_request"] = True
    if parts.first("AWS_UNSIGNED_PAYLOAD") is None:
        # Hashing every body with SHA-256 costs more than all the rest; TLS protects the bytes, BLAKE3 tells of damage.
        config["unsigned_payload"] = True
    credentials: ProfileCredentials | None = None
    if parts.user and parts.password:
        config |= {"access_key_id": parts.user, "secret_access_key": parts.password}
    elif parts.first("AWS_ACCESS_KEY_ID") is None and (
        (profile.access_key_id and profile.secret_access_key) or profile.credential_process
    ):
        credentials = ProfileCredentials(parts.environment)
    return Location(
        kind="s3",
        bucket=parts.host,
        prefix=_prefix(parts, parts.path),
        base=f"s3://{parts.host}",
        query=_query(parts),
        own_endpoint=endpoint is not None,
        config=config,
        allow_http=endpoint is not None and endpoint.startswith("http://"),
        certificates=_read_certificates(parts),
        credentials=credentials,
    )


def _read_certificates(parts: _Parts) -> str | None:
    path = parts.parameters.get("tls_ca_file_path") or parts.first("AWS_CA_BUNDLE")
    if path is None:
        return None
    try:
        return Path(path).read_text()
    except OSError as error:
        raise InvalidURI(f"The certificates {path} of {parts.shown} cannot be read: {error.strerror}.") from error


def _gcs(parts: _Parts) -> Location:
    emulator = parts.first("STORAGE_EMULATOR_HOST")
    endpoint = parts.endpoint("GOOGLE_BASE_URL")
    if endpoint is None and emulator is not None:
        endpoint = (emulator if "://" in emulator else f"http://{emulator}").rstrip("/")
    config: dict[str, str | bool] = {}
    if endpoint is not None:
        config["base_url"] = endpoint
    anonymous = parts.user == "anonymous"
    if anonymous:
        config["skip_signature"] = True
    if anonymous or (emulator is not None and parts.first("GOOGLE_APPLICATION_CREDENTIALS") is None):
        # Writes insist on some token even where nobody looks at it.
        config["bearer_token"] = "anonymous"
    return Location(
        kind="gcs",
        bucket=parts.host,
        prefix=_prefix(parts, parts.path),
        base=f"gs://{'anonymous@' if anonymous else ''}{parts.host}",
        query=_query(parts),
        own_endpoint=endpoint is not None,
        config=config,
        allow_http=endpoint is not None and endpoint.startswith("http://"),
    )


def _azure(parts: _Parts) -> Location:
    connection = _connection_string(parts.environment.get("AZURE_STORAGE_CONNECTION_STRING", ""))
    account = parts.parameters.get("account") or parts.first("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT")
    account, endpoint = (
        account or connection.get("AccountName"),
        parts.endpoint("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    )
    container, path, base = parts.host, parts.path, f"az://{parts.host}"
    if host := _AZURE_HOST.fullmatch(parts.host):
        account, container = host[1], parts.user or ""
        base = f"abfs://{container}@{parts.host}"
        if not container:
            container, _, path = path.strip("/").partition("/")
            base = f"abfs://{parts.host}/{container}"
        if host[2] != "windows.net" and endpoint is None:
            endpoint = f"https://{account}.blob.core.{host[2]}"
    endpoint = endpoint or connection.get("BlobEndpoint")
    if not account or not container:
        raise InvalidURI(
            f"The storage path {parts.shown} names no {'container' if account else 'account'}: write"
            " abfs://container@account.dfs.core.windows.net/prefix, or set AZURE_STORAGE_ACCOUNT_NAME."
        )
    config: dict[str, str | bool] = {"account_name": account}
    if endpoint is not None:
        config["endpoint"] = endpoint
    if parts.password:
        config["account_key"] = parts.password
    elif account == connection.get("AccountName") and "AccountKey" in connection:
        config["account_key"] = connection["AccountKey"]
    elif "SharedAccessSignature" in connection:
        config["sas_key"] = connection["SharedAccessSignature"]
    return Location(
        kind="azure",
        bucket=container,
        prefix=_prefix(parts, path),
        base=base,
        query=_query(parts),
        own_endpoint=endpoint is not None,
        config=config,
        allow_http=endpoint is not None and endpoint.startswith("http://"),
    )


def _connection_string(text: str) -> dict[str, str]:
    pairs = (item.partition("=") for item in text.split(";") if "=" in item)
    return {name: value for name, _, value in pairs}
