"""What `--rdzv` may be given, and the sentence where it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.rendezvous.uri import parse_rendezvous_uri


def test_the_uri_of_torchelastics_walkthrough() -> None:
    found = parse_rendezvous_uri("etcd://etcd:2379/imagenet?min_workers=1&max_workers=3&last_call_timeout=5")
    assert found.endpoints == (("etcd", 2379),) and found.job == "imagenet"
    assert (found.min_workers, found.max_workers, found.last_call_timeout_s) == (1, 3, 5.0)
    assert not found.tls


def test_user_password_several_hosts_and_ipv6() -> None:
    found = parse_rendezvous_uri("etcds://me:s%40crt@a,b:1234,[::1]:99/a/b")
    assert found.endpoints == (("a", 2379), ("b", 1234), ("::1", 99)) and found.job == "a/b"
    assert (found.user, found.password, found.tls) == ("me", "s@crt", True)
    assert found.text == "etcds://a,b:1234,[::1]:99/a/b" and "crt" not in repr(found)


def test_the_password_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_ETCD_PASSWORD", "word")
    assert parse_rendezvous_uri("etcd://me@a/job").password == "word"


def test_a_directory() -> None:
    found = parse_rendezvous_uri("file:///shared/my%20dir?max_workers=2")
    assert found.directory == Path("/shared/my dir") and not found.endpoints
    assert found.max_workers == 2


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("http://a/b", "scheme 'http'"),
        ("imagenet", "scheme ''"),
        ("etcd://a:2379", "names no job"),
        ("etcd:///job", "names no host"),
        ("etcd://a:x/job", "names no host"),
        ("file://host/dir", "names no directory"),
        ("file:///", "names no directory"),
        ("etcd://a/job?min_workers=0", "min_workers='0'"),
        ("etcd://a/job?max_workers=many", "max_workers='many'"),
        ("etcd://a/job?min_workers=3&max_workers=2", "min_workers above"),
        ("etcd://a/job?last_call_timeout=-1", "last_call_timeout='-1'"),
        ("etcd://a/job?ttl=nan", "ttl='nan'"),
        ("etcd://a/job?colour=red", "unknown option 'colour'"),
        ("file:///dir?cacert=x", "unknown option 'cacert'"),
        ("etcd://a/job?cert=/nowhere", "both cert and key"),
        ("etcd://a/job?cacert=/nowhere", "no file"),
        ("etcd://a/job?protocol=ftp", "protocol='ftp'"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(uri: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_rendezvous_uri(uri)
