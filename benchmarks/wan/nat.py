"""A home router in front of a host: addresses and ports of IPv4 packets are rewritten.

Mappings are endpoint-independent, filtering is by address and port (RFC 4787): what came in from
somebody whom the host has not written to is dropped. TCP and UDP only. Knows nothing of links.
"""

from __future__ import annotations

import struct

IDLE_S = 300.0
FIRST_PORT, LAST_PORT = 20_000, 60_000
TCP, UDP = 6, 17
_CHECKSUM_AT = {TCP: 16, UDP: 6}  # from the start of the transport's header

Inside = tuple[int, bytes, int]  # protocol, address, port
Outside = tuple[int, int]  # protocol, port
Remote = tuple[bytes, int]


class Nat:
    """One router. `outward` and `inward` give the packet to forward, or None."""

    def __init__(self, public: bytes) -> None:
        self.public = public
        self._ports: dict[Inside, int] = {}
        self._insides: dict[Outside, Inside] = {}
        self._remotes: dict[Outside, dict[Remote, float]] = {}  # who may answer, last heard
        self._next = FIRST_PORT
        self._swept_s = 0.0

    def outward(self, packet: bytes, now_s: float) -> bytes | None:
        ports = _ports(packet)
        if ports is None:
            return None
        protocol, at = packet[9], (packet[0] & 15) * 4
        inside = (protocol, packet[12:16], ports[0])
        port = self._ports.get(inside)
        if port is None:
            port = self._new_port(protocol, now_s)
            if port is None:
                return None
            self._ports[inside] = port
            self._insides[protocol, port] = inside
            self._remotes[protocol, port] = {}
        self._remotes[protocol, port][packet[16:20], ports[1]] = now_s
        return rewritten(packet, 12, self.public, at, port)

    def inward(self, packet: bytes, now_s: float) -> bytes | None:
        ports = _ports(packet)
        if ports is None:
            return None
        protocol, at = packet[9], (packet[0] & 15) * 4
        remotes = self._remotes.get((protocol, ports[1]))
        remote = (packet[12:16], ports[0])
        if remotes is None or now_s - remotes.get(remote, -IDLE_S) >= IDLE_S:
            return None
        remotes[remote] = now_s
        _, address, port = self._insides[protocol, ports[1]]
        return rewritten(packet, 16, address, at + 2, port)

    def _new_port(self, protocol: int, now_s: float) -> int | None:
        if now_s - self._swept_s > IDLE_S / 4:
            self._forget(now_s)
        for _ in range(FIRST_PORT, LAST_PORT):
            port, self._next = self._next, self._next + 1
            if self._next == LAST_PORT:
                self._next = FIRST_PORT
            if (protocol, port) not in self._insides:
                return port
        return None

    def _forget(self, now_s: float) -> None:
        self._swept_s = now_s
        for outside, remotes in list(self._remotes.items()):
            for remote in [r for r, heard_s in remotes.items() if now_s - heard_s >= IDLE_S]:
                del remotes[remote]
            if not remotes:
                del self._remotes[outside]
                del self._ports[self._insides.pop(outside)]


def _ports(packet: bytes) -> tuple[int, int] | None:
    """Source and destination port; None for whatever is not a first fragment of TCP or UDP."""
    at = (packet[0] & 15) * 4
    if packet[9] not in _CHECKSUM_AT or len(packet) < at + 8 or (packet[6] & 0x1F) or packet[7]:
        return None
    source, destination = struct.unpack_from("!HH", packet, at)
    return source, destination


def rewritten(packet: bytes, address_at: int, address: bytes, port_at: int, port: int) -> bytes:
    """The packet with another address and port, its checksums corrected (RFC 1624)."""
    out = bytearray(packet)
    old = packet[address_at : address_at + 4]
    addresses = _difference(old, address)
    before = struct.unpack_from("!H", packet, port_at)[0]
    out[address_at : address_at + 4] = address
    struct.pack_into("!H", out, port_at, port)
    _correct(out, 10, addresses)
    transport = (packet[0] & 15) * 4
    at = transport + _CHECKSUM_AT[packet[9]]
    if len(packet) >= at + 2 and not (packet[9] == UDP and packet[at : at + 2] == b"\0\0"):
        _correct(out, at, addresses + (~before & 0xFFFF) + port)
        if packet[9] == UDP and out[at : at + 2] == b"\0\0":
            out[at : at + 2] = b"\xff\xff"  # 0 would say that there is none
    return bytes(out)


def _difference(old: bytes, new: bytes) -> int:
    words = (*struct.unpack("!HH", old), *struct.unpack("!HH", new))
    a, b, c, d = (int(word) for word in words)
    return (~a & 0xFFFF) + (~b & 0xFFFF) + c + d


def _correct(packet: bytearray, at: int, difference: int) -> None:
    total = (~struct.unpack_from("!H", packet, at)[0] & 0xFFFF) + difference
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    struct.pack_into("!H", packet, at, ~total & 0xFFFF)
