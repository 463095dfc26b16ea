"""URIs and environment variables of object stores."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from holdfast.errors import InvalidURI
from holdfast.storage.objects.aws_profile import ProfileCredentials
from holdfast.storage.objects.location import Location, parse

NOWHERE = {"AWS_SHARED_CREDENTIALS_FILE": "/nonexistent", "AWS_CONFIG_FILE": "/nonexistent"}
AZURE = {"AZURE_STORAGE_ACCOUNT_NAME": "acc"}


def read(uri: str, environment: Mapping[str, str] | None = None) -> Location:
    return parse(uri, {**NOWHERE, **(environment or {})})


@pytest.mark.parametrize(
    ("uri", "bucket", "prefix", "shown"),
    [
        ("s3://b", "b", "", "s3://b"),
        ("s3://b/", "b", "", "s3://b"),
        ("s3://b/a//c/", "b", "a/c", "s3://b/a/c"),
        ("s3://b/a%20b%3F", "b", "a b?", "s3://b/a b%3F"),
        ("s3://key:sec%2Fret@b/p", "b", "p", "s3://b/p"),
        ("gs://b/p", "b", "p", "gs://b/p"),
        ("gcs://b/p", "b", "p", "gs://b/p"),
        ("gs://anonymous@b/p", "b", "p", "gs://anonymous@b/p"),
        ("az://c/p", "c", "p", "az://c/p"),
        ("abfs://c@acc.dfs.core.windows.net/p", "c", "p", "abfs://c@acc.dfs.core.windows.net/p"),
        ("abfss://acc.blob.core.windows.net/c/p", "c", "p", "abfs://acc.blob.core.windows.net/c/p"),
    ],
)
def test_bucket_and_prefix_of_a_uri(uri: str, bucket: str, prefix: str, shown: str) -> None:
    found = read(uri, AZURE)
    assert (found.bucket, found.prefix, found.uri(found.prefix)) == (bucket, prefix, shown)
    again = read(found.uri(found.prefix), AZURE)
    assert (again.bucket, again.prefix) == (bucket, prefix)


def test_s3_uses_aws_by_default() -> None:
    found = read("s3://b")
    assert found.config == {"region": "us-east-1", "unsigned_payload": True}
    assert (found.own_endpoint, found.allow_http) == (False, False)


@pytest.mark.parametrize(
    ("query", "environment", "endpoint"),
    [
        ("?endpoint_override=http://h:9000", {}, "http://h:9000"),
        ("?endpoint_override=http%3A%2F%2Fh%3A9000/", {}, "http://h:9000"),
        ("?endpoint_override=h:9000&scheme=http", {}, "http://h:9000"),
        ("?endpoint_override=h:9000", {}, "https://h:9000"),
        ("", {"AWS_ENDPOINT_URL": "http://e:1"}, "http://e:1"),
        ("", {"AWS_ENDPOINT_URL": "http://e:1", "AWS_ENDPOINT_URL_S3": "https://f"}, "https://f"),
        ("?endpoint_override=http://h", {"AWS_ENDPOINT_URL": "http://e:1"}, "http://h"),
    ],
)
def test_s3_endpoints(query: str, environment: dict[str, str], endpoint: str) -> None:
    found = read("s3://b/p" + query, environment)
    assert found.config["endpoint"] == endpoint
    assert found.own_endpoint
    assert found.allow_http is endpoint.startswith("http://")
    assert "virtual_hosted_style_request" not in found.config


def test_s3_region_and_addressing() -> None:
    assert read("s3://b", {"AWS_DEFAULT_REGION": "eu-west-1"}).config["region"] == "eu-west-1"
    assert read("s3://b?region=x", {"AWS_REGION": "eu-west-1"}).config["region"] == "x"
    found = read("s3://b?endpoint_override=https://h&force_virtual_addressing=true&allow_bucket_creation=true")
    assert found.config["endpoint"] == "https://b.h"
    assert found.config["virtual_hosted_style_request"] is True
    assert found.query == "?allow_bucket_creation=true&endpoint_override=https://h&force_virtual_addressing=true"


def test_environment_variables_override_an_aws_profile(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("[default]\naws_access_key_id=K\naws_secret_access_key=S%x\naws_session_token=T\n")
    (tmp_path / "f").write_text("[default]\nregion=eu-north-1\n")
    files = {"AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "c"), "AWS_CONFIG_FILE": str(tmp_path / "f")}
    found = read("s3://b", files)
    assert found.config["region"] == "eu-north-1"
    assert found.credentials is not None and "S%x" not in repr(found)
    told = found.credentials()
    assert (told["access_key_id"], told["secret_access_key"], told["token"]) == ("K", "S%x", "T")
    (tmp_path / "c").write_text("[default]\naws_access_key_id=K2\naws_secret_access_key=S2\n")
    told = found.credentials()
    assert (told["access_key_id"], told["secret_access_key"], told["token"]) == ("K2", "S2", None)
    assert read("s3://b", {**files, "AWS_ACCESS_KEY_ID": "E"}).credentials is None
    (tmp_path / "c").write_text("no profile at all")
    assert read("s3://b", files).credentials is None
    with pytest.raises(ValueError, match="MissingCredential"):
        found.credentials()


def test_a_credential_process_is_run_again_before_its_answer_expires(tmp_path: Path) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    count, later = tmp_path / "count", (now + timedelta(hours=1)).isoformat()
    answer = f'{{"Version": 1, "AccessKeyId": "K", "SecretAccessKey": "S", "Expiration": "{later}"}}'
    (tmp_path / "print").write_text(f"echo run >> '{count}'\necho '{answer}'\n")
    (tmp_path / "f").write_text(f"[profile mine]\ncredential_process = sh '{tmp_path / 'print'}'\n")
    environment = {"AWS_PROFILE": "mine", "AWS_CONFIG_FILE": str(tmp_path / "f")}
    credentials = ProfileCredentials({**environment, "AWS_SHARED_CREDENTIALS_FILE": "/absent"}, lambda: now)
    assert [credentials()["access_key_id"] for _ in range(3)] == ["K"] * 3
    assert count.read_text().count("run") == 1
    now += timedelta(minutes=59, seconds=30)
    credentials()
    assert count.read_text().count("run") == 2
    (tmp_path / "print").write_text("echo secret >&2; exit 3\n")
    with pytest.raises(ValueError, match="credential_process ended with code 3"):
        credentials()


def test_google_emulators_and_anonymous_readers() -> None:
    found = read("gs://b", {"STORAGE_EMULATOR_HOST": "localhost:9023"})
    assert found.config == {"base_url": "http://localhost:9023", "bearer_token": "anonymous"}
    assert found.allow_http
    assert read("gs://b").config == {}
    assert read("gs://anonymous@b").config["skip_signature"] is True


def test_azure_accounts() -> None:
    assert read("az://c/p", AZURE).config == {"account_name": "acc"}
    assert read("az://c/p?account=other", AZURE).config == {"account_name": "other"}
    assert read("abfs://c@x.dfs.core.windows.net").config == {"account_name": "x"}
    china = read("abfs://c@x.dfs.core.chinacloudapi.cn")
    assert china.config["endpoint"] == "https://x.blob.core.chinacloudapi.cn"
    text = "DefaultEndpointsProtocol=http;AccountName=n;AccountKey=a2V5==;BlobEndpoint=http://127.0.0.1:1/n"
    found = read("az://c", {"AZURE_STORAGE_CONNECTION_STRING": text})
    assert found.config == {"account_name": "n", "account_key": "a2V5==", "endpoint": "http://127.0.0.1:1/n"}
    with pytest.raises(InvalidURI, match=r"names no account.*AZURE_STORAGE_ACCOUNT_NAME"):
        read("az://c/p")


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("s3://b/p?acess_key=1", "unknown parameter acess_key"),
        ("gs://b?region=x", "unknown parameter region"),
        ("s3://b/a/../c", "'.' or '..'"),
        ("s3://b/p#x", "#"),
        ("s3://b?endpoint_override=ftp://h", "endpoint"),
        ("s3://b?endpoint_override=http://", "endpoint"),
        ("s3://b?endpoint_override=http://u:p@h", "endpoint"),
        ("s3://b?tls_ca_file_path=/nonexistent/ca.pem", "/nonexistent/ca.pem"),
    ],
)
def test_invalid_uris_are_refused(uri: str, said: str) -> None:
    with pytest.raises(InvalidURI) as caught:
        read(uri, AZURE)
    assert said in str(caught.value)


def test_credentials_are_not_shown() -> None:
    found = read("s3://walrus:oyster@b/p?region=r")
    assert found.config["access_key_id"] == "walrus"
    assert found.config["secret_access_key"] == "oyster"
    with pytest.raises(InvalidURI) as caught:
        read("s3://walrus:oyster@b/p?nonsense=oyster")
    for shown in (repr(found), found.uri("p"), str(caught.value)):
        assert "walrus" not in shown and "oyster" not in shown
