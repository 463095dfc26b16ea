"""Which parts of a configuration look like secrets, and the same configuration without them.

Configurations are shown in warnings and kept in params.json and in the journal, where a password or an API key must not
stand. What counts as a secret is decided by the name under which a value is kept and by the look of the value itself;
`masked` replaces it by `***`. A guess: what neither name nor look gives away stays as it is.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

__all__ = ["MASK", "masked"]

MASK = "***"
_DEPTH_MAX = 32
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRET_WORDS = frozenset(
    {
        *("password", "passwd", "passphrase", "passwords", "pwd", "secret", "secrets", "credential", "credentials"),
        *("apikey", "apikeys", "accesskey", "secretkey", "privatekey", "authorization", "bearer"),
    }
)
_KEY_PREFIXES = frozenset({"api", "access", "account", "auth", "encryption", "license", "private", "secret", "signing"})
_TEXT_TOKENS = frozenset(
    # What language models call a token is no secret.
    {
        *(
            "additional",
            "begin",
            "blank",
            "bos",
            "class",
            "cls",
            "decoder",
            "end",
            "eos",
            "first",
            "image",
            "last",
            "mask",
        ),
        *("next", "pad", "padding", "per", "prompt", "sep", "special", "start", "stop", "trigger", "unk", "word"),
    }
)
_SECRET_TEXT = re.compile(
    r"\b(?:"
    r"sk-[A-Za-z0-9_-]{16,}"  # OpenAI, Anthropic and their like
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}"  # AWS
    r"|AIza[0-9A-Za-z_-]{30,}"  # Google
    r"|hf_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|gh[oprsu]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{16,}|glpat-[A-Za-z0-9_-]{16,}"
    r"|xox[abeprs]-[A-Za-z0-9-]{8,}"  # Slack
    r"|eyJ[A-Za-z0-9_-]{6,}\.[A-Za-z0-9_-]{6,}\.[A-Za-z0-9_-]*"  # JSON web tokens
    r")|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*"
)
_URL_PASSWORD = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://[^/\s:@]*:)[^/\s@]+(?=@)")
_QUERY_SECRET = re.compile(
    r"([?&;](?:[\w.-]*(?:signature|secret|password|token|credential)[\w.-]*|sig|key|api_?key)=)[^&\s]+", re.I
)
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9._~+/=-]{8,}")


def masked(name: str, value: Any) -> Any:
    """`value` as it may be shown: secrets are replaced by `***`, in dicts, lists and tuples too. What holds no secret
    is returned itself."""
    return _masked(value, _is_secret_name(name), 0)


def _masked(value: Any, secret: bool, depth: int) -> Any:
    if isinstance(value, str):
        shown = MASK if secret and value else _without_secrets(value)
        return value if shown == value else shown
    if isinstance(value, bytes | bytearray):
        return MASK if secret and value else value
    if isinstance(value, bool) or value is None or depth > _DEPTH_MAX:
        return value
    if isinstance(value, int | float):
        return MASK if secret else value
    if isinstance(value, dict):
        items = {key: _masked(item, secret or _is_secret_name(key), depth + 1) for key, item in value.items()}
        return value if all(items[key] is item for key, item in value.items()) else items
    if isinstance(value, list | tuple):
        parts = [_masked(item, secret, depth + 1) for item in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return parts if isinstance(value, list) else tuple(parts)
    return value


def _is_secret_name(name: object) -> bool:
    if not isinstance(name, str):
        return False
    words = [word.lower() for word in _WORD.findall(name)]
    if not _SECRET_WORDS.isdisjoint(words):
        return True
    if any(first in _KEY_PREFIXES and second in ("key", "keys") for first, second in pairwise(words)):
        return True
    # max_tokens and tokenizer are no secrets, hf_token and access_token_2 are.
    places = [at for at, word in enumerate(words) if word == "token"]
    return any(
        (at == 0 or words[at - 1] not in _TEXT_TOKENS) and all(word.isdigit() for word in words[at + 1 :])
        for at in places
    )


def _without_secrets(text: str) -> str:
    if "://" in text:
        text = _URL_PASSWORD.sub(rf"\g<1>{MASK}", text)
        text = _QUERY_SECRET.sub(rf"\g<1>{MASK}", text)
    return _BEARER.sub(rf"\g<1> {MASK}", _SECRET_TEXT.sub(MASK, text))
