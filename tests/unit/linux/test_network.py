"""Which interface has an address."""

from __future__ import annotations

import ipaddress

import pytest

from holdfast.linux.network import interface_of, outward_address


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.9.1", "localhost"])
def test_loopback_is_the_interface_lo(address: str) -> None:
    assert interface_of(address) == "lo"


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1", "no.such.name.invalid"])
def test_an_address_of_no_interface_has_none(address: str) -> None:
    assert interface_of(address) is None


def test_the_outward_address_is_one_of_an_interface() -> None:
    address = outward_address()
    try:
        ipaddress.ip_address(address)
    except ValueError:
        pytest.skip("this machine has no route to anywhere")
    assert interface_of(address) is not None
