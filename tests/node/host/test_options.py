"""Options of a host: checked, shared among workers, and typed again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from node.host.options import HostOptions, names_a_port
from node.network.addresses import AddressError
from protocol.errors import UsageError

OPTIONS = HostOptions(
    port=4001,
    announce=("203.0.113.7",),
    threads=8,
    max_memory=8.0,
    max_gb_per_day=10.0,
    up_mbps=100.0,
    as_json=True,
)


def test_an_announced_address_needs_a_port() -> None:
    assert names_a_port("203.0.113.7:4001") and names_a_port("/dns/host.example/tcp/4001")
    assert names_a_port("[2001:db8::1]:4001") and not names_a_port("2001:db8::1")
    HostOptions(announce=("203.0.113.7:4001",)).check()
    HostOptions(announce=("203.0.113.7",), port=4001).check()
    with pytest.raises(UsageError, match="needs a port") as caught:
        HostOptions(announce=("203.0.113.7",)).check()
    assert "--port" in caught.value.hint
    for wrong in ({"announce": ("not an address",)}, {"listen": ("nowhere",)}, {"relay": ("x",)}):
        with pytest.raises(AddressError):
            replace(OPTIONS, **wrong).check()  # type: ignore[arg-type]  # a field of any type


def test_units() -> None:
    assert (OPTIONS.memory_bytes, OPTIONS.bytes_per_day) == (8 * 10**9, 10**10)
    assert (OPTIONS.up_bytes_per_s, OPTIONS.down_bytes_per_s) == (12_500_000.0, None)


def test_limits_are_shared_and_ports_differ() -> None:
    third = OPTIONS.shared(4, 2, cores=16)
    assert (third.max_memory, third.max_gb_per_day, third.up_mbps) == (2.0, 2.5, 25.0)
    assert third.down_mbps is None and third.threads == 2 and third.port == 4003
    assert replace(OPTIONS, port=0, threads=1).shared(4, 2, cores=16).port == 0
    assert replace(OPTIONS, threads=None).shared(4096, 0, cores=16).threads == 1
    with pytest.raises(UsageError, match="no room"):
        replace(OPTIONS, port=65535).shared(4, 2, cores=16)


def test_what_makes_no_sense_for_several() -> None:
    OPTIONS.check_shared(2)
    with pytest.raises(UsageError, match="--block"):
        replace(OPTIONS, block=0).check_shared(2)
    for text in ("/ip4/203.0.113.7/tcp/4001", "203.0.113.7:4001", "[2001:db8::1]:4001"):
        with pytest.raises(UsageError, match="names a port"):
            replace(OPTIONS, announce=(text,)).check_shared(2)
    replace(OPTIONS, announce=("2001:db8::1",)).check_shared(2)


def test_what_is_as_by_default_is_not_typed_again() -> None:
    assert HostOptions(as_json=True).arguments() == []
    assert replace(OPTIONS, verbose=True, block=0).arguments() == [
        *("--port", "4001", "--announce", "203.0.113.7", "--block", "0", "--threads", "8"),
        *("--max-memory", "8.0", "--max-gb-per-day", "10.0", "--up-mbps", "100.0", "--verbose"),
    ]
