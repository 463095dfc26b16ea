"""Join strings and addresses: what an agent is given to find a hub."""

from __future__ import annotations

import pytest

from holdfast.errors import ConfigError
from holdfast.wire.join_string import make_join_string, parse_address, parse_join_string


@pytest.mark.parametrize("host", ["10.0.0.1", "head.example", "fe80::1", "::1"])
def test_what_is_made_is_understood(host: str) -> None:
    text = make_join_string(host, 7077)
    assert text.startswith("holdfast://")
    assert parse_address(parse_join_string(text), "It") == (host, 7077)
    assert parse_join_string(text.removeprefix("holdfast://")) == parse_join_string(f" {text}/\n")


@pytest.mark.parametrize(
    "text", ["", "host", ":7077", "host:", "host:x", "host:70777", "::1:7077", "[a]:1", "h:\u0664"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="It must be of the form HOST:PORT"):
        parse_address(text, "It")


def test_a_join_string_needs_a_port() -> None:
    with pytest.raises(ConfigError, match="names no port"):
        parse_join_string("holdfast://10.0.0.1:0")
