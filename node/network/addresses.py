"""Multiaddresses: what a person types, what a node listens on, what it announces, whom to dial how.

Decides the order in which addresses are tried (direct before relayed, public before private) and
which of a node's own addresses are worth a place in its record. Knows nothing of sockets: whether
an address answers is the transport's business.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

from protocol.errors import UsageError
from protocol.identity import peer_from_text, peer_text
from protocol.limits import ADDRESS_MAX_BYTES, ADDRESSES_PER_RECORD
from protocol.packing import Malformed
from protocol.records import HOST_PATTERN, is_host_name

_CIRCUIT = "/p2p-circuit"
_HOST_AND_PORT = re.compile(r"\[([0-9A-Fa-f:.%]+)\]:([0-9]+)|([^:/\[\]]+):([0-9]+)")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252}[A-Za-z0-9])?")


class AddressError(UsageError):
    """A person typed something that is no address."""


class Scope(IntEnum):
    """From where an address can be reached; the smaller is tried first."""

    PUBLIC = 0  # a global IP, or a name
    PRIVATE = 1  # this local network
    LOOPBACK = 2  # this machine


@dataclass(frozen=True)
class Address:
    """A multiaddress without the peer's own `/p2p/` part."""

    text: str
    scope: Scope
    relayed: bool
    ipv6: bool

    @property
    def preference(self) -> tuple[bool, int, bool]:
        """Direct before relayed, near to the open internet first, IPv4 before IPv6.

        IPv4 first because a host with a broken IPv6 is common and one without IPv4 is rare.
        """
        return self.relayed, self.scope, self.ipv6


@lru_cache(1024)  # the same few, in every round's records
def parse_address(text: str) -> Address:
    """An address as it stands in records. Raises `AddressError`."""
    match = HOST_PATTERN.fullmatch(text) if len(text) <= ADDRESS_MAX_BYTES else None
    if match is None or not text.isprintable() or not 0 < int(match[4]) < 65536:
        raise AddressError(
            f"{_shown(text)} is not an address", "write it like /ip4/203.0.113.7/tcp/4001"
        )
    kind, host = match[1], match[2]
    scope = Scope.PUBLIC
    if kind.startswith("dns") and not is_host_name(host):
        raise AddressError(f"{_shown(host)} is not a name that can be looked up")
    if kind in ("ip4", "ip6"):
        try:
            ip = ipaddress.ip_address(host)
        except ValueError:
            ip = None
        if ip is None or ip.version != int(kind[2]) or ip.is_multicast or ip.is_unspecified:
            raise AddressError(f"{_shown(host)} is not an {kind} host that can be dialled")
        if ip.is_loopback:
            scope = Scope.LOOPBACK
        elif not ip.is_global:
            scope = Scope.PRIVATE
    return Address(text, scope, _CIRCUIT in text, kind in ("ip6", "dns6"))


def split_peer(text: str) -> tuple[bytes, str]:
    """Peer id and address of `/ip4/.../tcp/.../p2p/12D3Koo...`, as people pass it on."""
    address, mark, peer = text.strip().rpartition("/p2p/")
    if not mark or "/" in peer:
        raise AddressError(
            f"{_shown(text)} does not say whom to dial",
            "copy the whole address, it ends in /p2p/12D3Koo...",
        )
    try:
        return peer_from_text(peer), parse_address(address).text
    except Malformed as error:
        raise AddressError(
            f"{_shown(peer)} is not a peer id ({error})", "copy the whole address"
        ) from None


def with_peer(address: str, peer_id: bytes) -> str:
    """The form that people pass on."""
    return f"{address}/p2p/{peer_text(peer_id)}"


def through_relay(address: str, relay_id: bytes) -> str:
    """Our own address over a relay that can be dialled at `address`."""
    return f"{with_peer(address, relay_id)}{_CIRCUIT}"


def in_order(addresses: Iterable[str]) -> list[str]:
    """Each once, the most promising first; whatever is no address is left out."""
    found: dict[str, Address] = {}
    for text in addresses:
        try:
            found.setdefault(text, parse_address(text))
        except AddressError:
            continue
    return [a.text for a in sorted(found.values(), key=lambda a: a.preference)]


def direct(addresses: Iterable[str]) -> list[str]:
    return [address for address in in_order(addresses) if _CIRCUIT not in address]


def relayed(addresses: Iterable[str]) -> list[str]:
    return [address for address in in_order(addresses) if _CIRCUIT in address]


def host_port(address: str) -> tuple[str, int]:
    """IP or name, and port, of an address; of a relayed one those of its relay."""
    match = HOST_PATTERN.fullmatch(parse_address(address).text)
    assert match is not None
    return match[2], int(match[4])


def is_relayed(address: str) -> bool:
    return _CIRCUIT in address


def from_option(text: str, port: int) -> str:
    """`--announce`: a multiaddress, an IP, a name, or one of these with `:PORT`."""
    text = text.strip()
    if text.startswith("/"):
        # a person may paste the whole thing, with the peer id that everybody knows anyway
        return parse_address(text.rpartition("/p2p/")[0] if "/p2p/" in text else text).text
    match = _HOST_AND_PORT.fullmatch(text)
    host, number = text.strip("[]"), port
    if match:
        host, number = match[1] or match[3], int(match[2] or match[4])
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        if not _NAME.fullmatch(host) or re.fullmatch(r"[0-9.]+", host):
            raise AddressError(
                f"{_shown(text)} is neither an IP, a name nor a multiaddress",
                "for example --announce 203.0.113.7 or --announce /dns/host.example/tcp/4001",
            ) from None
        return parse_address(f"/dns/{host}/tcp/{number}").text
    return parse_address(f"/ip{ip.version}/{host}/tcp/{number}").text


def listening_on(hosts: Iterable[str], port: int) -> list[str]:
    """What p2pd is told to listen on. `0.0.0.0` and `::` are all interfaces."""
    addresses = []
    for host in hosts:
        try:
            ip = ipaddress.ip_address(host)
        except ValueError:
            raise AddressError(f"{_shown(host)} is not an IP to listen on") from None
        addresses.append(f"/ip{ip.version}/{ip}/tcp/{port}")
    return addresses


def to_announce(own: Iterable[str], announced: Iterable[str] = ()) -> tuple[str, ...]:
    """What goes into the record: what the operator said, else what the daemon found out.

    Loopback only where there is nothing else (a swarm on one machine), link-local never: nobody
    else can dial them. If there is a direct public address, relayed ones would be dead weight.
    """
    chosen = in_order(announced)
    relays = relayed(own)
    if not chosen:
        chosen = [a for a in direct(own) if not _link_local(a)]
        wide = [a for a in chosen if parse_address(a).scope is not Scope.LOOPBACK]
        chosen = wide or chosen
        if not any(parse_address(a).scope is Scope.PUBLIC for a in chosen):
            # Keep a place for each of two relays: behind NAT they are all that strangers can use.
            chosen = chosen[: ADDRESSES_PER_RECORD - min(len(relays), 2)] + relays
    return tuple(chosen[:ADDRESSES_PER_RECORD])


def _link_local(address: str) -> bool:
    match = HOST_PATTERN.fullmatch(address)
    assert match is not None
    return match[1].startswith("ip") and ipaddress.ip_address(match[2]).is_link_local


def _shown(text: str) -> str:
    """A stranger's or a person's text, short and harmless."""
    clean = "".join(c if c.isprintable() else "?" for c in text[:80])
    return f"'{clean}'"


def check_addresses(addresses: Iterable[str]) -> None:
    """Whole addresses of peers. Raises `AddressError`."""
    for text in addresses:
        split_peer(text)


def check_own_addresses(listen: Iterable[str], port: int, relays: Iterable[str] = ()) -> None:
    """--listen and --relay. Raises `AddressError`."""
    try:
        listening_on(tuple(listen), port)
    except AddressError as error:
        hint = "--listen takes an IP of this machine, for example 127.0.0.1 or 0.0.0.0"
        raise AddressError(error.message, hint) from None
    check_addresses(relays)
