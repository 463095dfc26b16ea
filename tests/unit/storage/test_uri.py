"""No credential is ever shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.storage.uri import redact


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("/plain/path?secret=1", "/plain/path?secret=1"),
        ("s3://bucket/a b/%20#x", "s3://bucket/a b/%20#x"),
        ("s3://bucket", "s3://bucket"),
        ("s3://AKIA:hidden@bucket/x", "s3://bucket/x"),
        ("s3://AKIA:hid/den+x=@bucket/x", "s3://bucket/x"),
        ("s3://AKIA:hid@den:too@bucket/x", "s3://bucket/x"),
        ("s3://AKIA:hid?den#x@bucket/x", "s3://bucket/x"),
        ("s3://hidden@bucket/me@home", "s3://bucket/me@home"),
        ("s3://bucket/me@home:8/x", "s3://bucket/me@home:8/x"),
        ("hdfs://host:8020/user/me@corp", "hdfs://host:8020/user/me@corp"),
        ("hdfs://me:hidden@host:8020/x", "hdfs://host:8020/x"),
        (
            "s3://b/p?region=eu-1&access_key=hidden&secret_key=hidden&session_token=hidden&endpoint_override=http://h:9",
            "s3://b/p?region=eu-1&endpoint_override=http://h:9",
        ),
        ("s3://b?endpoint_override=http%3A//u%3Ahidden%40h%3A9", "s3://b?endpoint_override=http://h:9"),
        ("s3://b?aws_secret_access_key=hidden", "s3://b"),
        ("https://acct.blob.core.windows.net/c?sv=1&sig=hidden", "https://acct.blob.core.windows.net/c?sv=1"),
        ("abfss://container@acct.dfs.core.windows.net/x", "abfss://container@acct.dfs.core.windows.net/x"),
        ("abfss://container:hidden@acct.dfs.core.windows.net/x", "abfss://container@acct.dfs.core.windows.net/x"),
        ("az://c/x?account_name=acct&account_key=hidden&sas_token=hidden", "az://c/x?account_name=acct"),
        ("s3://me:hidden@[bad/x", "s3://[bad/x"),
        ("etcd://me:hidden@a,[::1]:99/x", "etcd://a,[::1]:99/x"),
    ],
)
def test_redaction_of_credentials(uri: str, shown: str) -> None:
    assert redact(uri) == shown
    assert redact(shown) == shown


_secrets = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="@&"), min_size=12).map(
    lambda text: f"SeKrEt{text}"
)


@given(_secrets, st.sampled_from(["s3", "gs", "az", "abfss", "hdfs"]))
def test_no_password_gets_through(secret: str, scheme: str) -> None:
    assert "SeKrEt" not in redact(f"{scheme}://user:{secret}@bucket/path")
    assert "SeKrEt" not in redact(f"{scheme}://bucket/path?secret_key={secret.replace('#', '')}&region=x")
