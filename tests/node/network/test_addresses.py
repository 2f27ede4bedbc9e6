"""Addresses: what people type, what is announced, what is tried first."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.network.addresses import (
    AddressError,
    Scope,
    direct,
    from_option,
    in_order,
    listening_on,
    parse_address,
    relayed,
    split_peer,
    through_relay,
    to_announce,
    with_peer,
)
from protocol.identity import Identity, new_identity
from protocol.limits import ADDRESSES_PER_RECORD

PEER = Identity(bytes(range(32)))  # a fixed one: it stands in the tests' names
PUBLIC = "/ip4/203.0.114.7/tcp/4001"
PUBLIC6 = "/ip6/2a01:4f8::1/tcp/4001"
PRIVATE = "/ip4/192.168.1.5/tcp/4001"
LOOPBACK = "/ip4/127.0.0.1/tcp/4001"
NAME = "/dns/host.example/tcp/4001"
RELAYED = through_relay(PUBLIC, PEER.peer_id)


@pytest.mark.parametrize(
    ("text", "scope", "is_relayed", "ipv6"),
    [
        (PUBLIC, Scope.PUBLIC, False, False),
        (PUBLIC6, Scope.PUBLIC, False, True),
        (PRIVATE, Scope.PRIVATE, False, False),
        ("/ip4/100.64.0.1/tcp/1", Scope.PRIVATE, False, False),
        ("/ip6/fd00::1/tcp/1", Scope.PRIVATE, False, True),
        (LOOPBACK, Scope.LOOPBACK, False, False),
        ("/ip6/::1/udp/1/quic-v1", Scope.LOOPBACK, False, True),
        (NAME, Scope.PUBLIC, False, False),
        (RELAYED, Scope.PUBLIC, True, False),
    ],
)
def test_parse(text: str, scope: Scope, is_relayed: bool, ipv6: bool) -> None:
    address = parse_address(text)
    assert (address.scope, address.relayed, address.ipv6) == (scope, is_relayed, ipv6)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        "/ip4/1.2.3/tcp/1",
        "/ip4/1.2.3.4/tcp/0",
        "/ip4/1.2.3.4/tcp/65536",
        "/ip4/0.0.0.0/tcp/1",
        "/ip4/224.0.0.1/tcp/1",
        "/ip4/::1/tcp/1",
        "/ip6/1.2.3.4/tcp/1",
        "/ip4/1.2.3.4",
        "/ip4/1.2.3.4/tcp/1/\x1b[31m",
        "/ip4/1.2.3.4/tcp/1/" + "x" * 200,
        "/dns/a..b/tcp/1",
        "/dns/" + "x" * 64 + "/tcp/1",
    ],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(AddressError) as error:
        parse_address(text)
    assert "\x1b" not in str(error.value)
    assert in_order([text, PUBLIC]) == [PUBLIC]


@given(st.text(max_size=80))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    for function in (parse_address, split_peer, lambda t: from_option(t, 4001)):
        with contextlib.suppress(AddressError):
            function(text)


def test_whom_to_dial_is_part_of_an_invitation() -> None:
    assert split_peer(f" {with_peer(PUBLIC, PEER.peer_id)}\n") == (PEER.peer_id, PUBLIC)
    other = new_identity()
    assert split_peer(with_peer(RELAYED, other.peer_id)) == (other.peer_id, RELAYED)
    for text in (PUBLIC, f"{PUBLIC}/p2p/", f"{PUBLIC}/p2p/QmRSA", f"/p2p/{PEER.text}", RELAYED):
        with pytest.raises(AddressError) as error:
            split_peer(text)
        assert error.value.message


def test_direct_before_relayed_public_before_private() -> None:
    mixed = [RELAYED, LOOPBACK, PRIVATE, PUBLIC6, PUBLIC, NAME, PUBLIC, "junk"]
    assert in_order(mixed) == [PUBLIC, NAME, PUBLIC6, PRIVATE, LOOPBACK, RELAYED]
    assert relayed(mixed) == [RELAYED]
    assert direct(mixed) == in_order(mixed)[:-1]


@pytest.mark.parametrize(
    ("typed", "address"),
    [
        ("203.0.114.7", "/ip4/203.0.114.7/tcp/4001"),
        ("203.0.114.7:5", "/ip4/203.0.114.7/tcp/5"),
        ("2a01:4f8::1", "/ip6/2a01:4f8::1/tcp/4001"),
        ("[2a01:4f8::1]:5", "/ip6/2a01:4f8::1/tcp/5"),
        ("[2a01:4f8::1]", "/ip6/2a01:4f8::1/tcp/4001"),
        ("host.example", "/dns/host.example/tcp/4001"),
        ("host.example:5", "/dns/host.example/tcp/5"),
        ("/dns4/host.example/tcp/5", "/dns4/host.example/tcp/5"),
        (with_peer(PUBLIC, PEER.peer_id), PUBLIC),
    ],
)
def test_announce_option(typed: str, address: str) -> None:
    assert from_option(typed, 4001) == address


@pytest.mark.parametrize(
    "typed", ["", "1.2.3", "1.2.3.4:99999", "a b", "host:port", "http://host", "0.0.0.0", "-x"]
)
def test_announce_option_refused(typed: str) -> None:
    with pytest.raises(AddressError) as error:
        from_option(typed, 4001)
    assert error.value.message


def test_listening() -> None:
    assert listening_on(("0.0.0.0", "::"), 7) == ["/ip4/0.0.0.0/tcp/7", "/ip6/::/tcp/7"]
    assert listening_on((), 7) == []
    with pytest.raises(AddressError):
        listening_on(("localhost",), 7)


def test_what_goes_into_a_record() -> None:
    # what the operator says, and nothing else
    assert to_announce([PUBLIC, LOOPBACK], [NAME]) == (NAME,)
    # all interfaces: loopback and link-local are of no use to others
    found = [LOOPBACK, PRIVATE, PUBLIC6, PUBLIC, "/ip6/fe80::1/tcp/1", "/ip4/169.254.1.1/tcp/1"]
    assert to_announce(found) == (PUBLIC, PUBLIC6, PRIVATE)
    # a swarm on one machine
    assert to_announce([LOOPBACK]) == (LOOPBACK,)
    # behind NAT: the relays keep their places among many interfaces
    homes = [f"/ip4/192.168.{n}.5/tcp/1" for n in range(6)]
    chosen = to_announce([*homes, RELAYED, LOOPBACK])
    assert chosen == (*homes[:3], RELAYED) and len(chosen) == ADDRESSES_PER_RECORD
    # with a public address a relay is dead weight
    assert to_announce([PUBLIC, RELAYED]) == (PUBLIC,)
    assert to_announce([RELAYED]) == (RELAYED,)
    assert to_announce([]) == ()
