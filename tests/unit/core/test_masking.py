"""Secrets in a configuration are masked by key and by pattern; ordinary values stay readable."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core.masking import masked


@pytest.mark.parametrize(
    "name",
    [
        *("password", "db_password", "DB_PASSWD", "wandb_api_key", "apiKey", "OPENAI_API_KEY", "hf_token", "token"),
        *(
            "access_token",
            "aws_secret_access_key",
            "clientSecret",
            "credentials",
            "private_key",
            "auth_token",
            "token2",
        ),
    ],
)
def test_a_value_with_a_secrets_key_is_masked(name: str) -> None:
    assert masked(name, "hunter2") == "***"
    assert masked("", {name: ["hunter2", {"inner": "hunter3"}]}) == {name: ["***", {"inner": "***"}]}
    assert masked(name, "") == "" and masked(name, None) is None


@pytest.mark.parametrize(
    "name",
    [
        *(
            "max_tokens",
            "tokenizer",
            "num_tokens",
            "pad_token",
            "eos_token",
            "token_dim",
            "tokens_per_step",
            "key",
            "keys",
        ),
        *(
            "author",
            "keyboard",
            "monkey",
            "passes",
            "sort_key",
            "secretary",
            "learning_rate",
            "per_token",
            "mask_token",
        ),
    ],
)
def test_ordinary_training_keys_are_not_masked(name: str) -> None:
    assert masked(name, "gpt2") == "gpt2"
    assert masked(name, 5) == 5


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("sk-proj-abcdefghijklmnop1234", "***"),
        ("key is AKIAIOSFODNN7EXAMPLE.", "key is ***."),
        ("hf_abcdefghijklmnopqrstuvwx", "***"),
        ("ghp_abcdefghijklmnopqrstuvwx", "***"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc-def", "***"),
        ("postgres://me:hunter2@host/db", "postgres://me:***@host/db"),
        ("https://h/x?sig=abc%2F&n=1", "https://h/x?sig=***&n=1"),
        ("Bearer abcdefghijk", "Bearer ***"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY-----", "***"),
    ],
)
def test_a_value_that_looks_like_a_secret_is_masked(value: str, shown: str) -> None:
    assert masked("anything", value) == shown
    assert masked("", {"list": [value]}) == {"list": [shown]}


@pytest.mark.parametrize(
    "value",
    [
        *(
            "resnet50",
            "s3://bucket/run",
            "http://127.0.0.1:8080/x",
            "sk-learn",
            "2026-11-15T12:00:00",
            "/data/hf_cache",
        ),
        *(3, 0.5, None, True, [1, "a"], {"lr": 0.1}, "checkpoint_000003", "da39a3ee5e6b4b0d3255bfef95601890afd80709"),
    ],
)
def test_ordinary_values_are_not_masked(value: Any) -> None:
    assert masked("value", value) == value
