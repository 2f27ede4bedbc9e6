"""The arithmetic of the emulated WAN: lines and ways that carry packets, and NAT."""

from __future__ import annotations

import socket
import struct
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.wan import topology
from benchmarks.wan.links import Line, Wan, Way
from benchmarks.wan.nat import IDLE_S, TCP, UDP, Nat

# --- links ----------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(40, 1500), st.floats(0, 0.01)), max_size=100))
def test_a_line_is_never_faster_than_its_rate_nor_its_queue_longer(
    packets: list[tuple[int, float]],
) -> None:
    line = Line(mbit=8, queue_ms=10)  # 1e6 bytes a second
    now_s, last_s, accepted = 1.0, 1.0, 0
    for size, gap_s in packets:
        now_s += gap_s
        through_s = line.through_s(size, now_s)
        if through_s is None:
            continue
        accepted += size
        assert through_s >= last_s + size / 1e6 - 1e-9
        assert through_s - now_s <= 0.010 + size / 1e6 + 1e-9
        last_s = through_s
    assert accepted <= (last_s - 1.0) * 1e6 + 1e-3


@given(st.lists(st.tuples(st.floats(0, 0.01), st.floats(0, 1)), max_size=50))
def test_packets_of_a_way_keep_their_order(steps: list[tuple[float, float]]) -> None:
    way = Way(delay_s=0.02, jitter_s=0.05, loss=0.0)
    now_s, last_s = 0.0, 0.0
    for gap_s, luck in steps:
        now_s += gap_s
        arrival_s = way.arrives_s(now_s, luck)
        assert arrival_s >= max(last_s, now_s + 0.02 - 1e-12)
        last_s = arrival_s


def test_a_partition_is_between_the_sides_only_and_heals() -> None:
    hosts = "".join(f'[[hosts]]\nname = "h{i}"\naddress = "11.{i}.0.1"\n' for i in range(1, 5))
    wan = Wan(topology.parse(hosts.encode()), Random(0))
    wan.cut([0, 1])
    cut = {(i, j) for i in range(4) for j in range(4) if wan.ways[i][j].cut}
    assert cut == {(i, j) for i in range(4) for j in range(4) if (i < 2) != (j < 2)}
    wan.heal()
    assert not any(way.cut for row in wan.ways for way in row)


# --- NAT ------------------------------------------------------------------------------------------


def _packet(
    protocol: int, source: str, sport: int, to: str, port: int, data: bytes = b"x"
) -> bytes:
    addresses = socket.inet_aton(source) + socket.inet_aton(to)
    if protocol == TCP:
        body = struct.pack("!HHIIHHHH", sport, port, 1, 2, 0x5010, 100, 0, 0) + data
        at = 16
    else:
        body = struct.pack("!HHHH", sport, port, 8 + len(data), 0) + data
        at = 6
    pseudo = addresses + struct.pack("!HH", protocol, len(body))
    body = body[:at] + struct.pack("!H", _checksum(pseudo + body) or 0xFFFF) + body[at + 2 :]
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(body), 7, 0x4000, 64, protocol, 0) + addresses
    return head[:10] + struct.pack("!H", _checksum(head)) + head[12:] + body


def _checksum(data: bytes) -> int:
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _intact(packet: bytes) -> bool:
    pseudo = packet[12:20] + struct.pack("!HH", packet[9], len(packet) - 20)
    return _checksum(packet[:20]) == 0 and _checksum(pseudo + packet[20:]) in (0, 0xFFFF)


PORTS = st.integers(1, 65535)


@given(st.sampled_from([TCP, UDP]), PORTS, PORTS, st.binary(max_size=40))
def test_a_conversation_through_nat_keeps_checksums_and_finds_back(
    protocol: int, sport: int, port: int, data: bytes
) -> None:
    nat = Nat(socket.inet_aton("11.9.0.1"))
    out = nat.outward(_packet(protocol, "192.168.1.2", sport, "11.1.0.1", port, data), 1.0)
    assert out is not None and _intact(out)
    assert socket.inet_ntoa(out[12:16]) == "11.9.0.1"
    mapped = struct.unpack_from("!H", out, 20)[0]
    back = nat.inward(_packet(protocol, "11.1.0.1", port, "11.9.0.1", mapped, data), 2.0)
    assert back is not None and _intact(back)
    assert socket.inet_ntoa(back[16:20]) == "192.168.1.2"
    assert struct.unpack_from("!H", back, 22)[0] == sport


def test_strangers_do_not_come_through_nat_and_mappings_end() -> None:
    nat = Nat(socket.inet_aton("11.9.0.1"))
    out = nat.outward(_packet(UDP, "192.168.1.2", 5, "11.1.0.1", 7), 0.0)
    again = nat.outward(_packet(UDP, "192.168.1.2", 5, "11.2.0.1", 8), 0.0)
    assert out is not None and again is not None
    mapped = struct.unpack_from("!H", out, 20)[0]
    assert mapped == struct.unpack_from("!H", again, 20)[0]  # one mapping for all
    for address, port in (("11.1.0.1", 9), ("11.3.0.1", 7)):
        assert nat.inward(_packet(UDP, address, port, "11.9.0.1", mapped), 1.0) is None
    assert nat.inward(_packet(TCP, "11.1.0.1", 7, "11.9.0.1", mapped), 1.0) is None
    assert nat.inward(_packet(UDP, "11.1.0.1", 7, "11.9.0.1", mapped), 1.0) is not None
    assert nat.inward(_packet(UDP, "11.1.0.1", 7, "11.9.0.1", mapped), 2 + IDLE_S) is None
    icmp = _packet(UDP, "192.168.1.2", 5, "11.1.0.1", 7)
    assert nat.outward(icmp[:9] + b"\x01" + icmp[10:], 0.0) is None


@given(st.binary(min_size=20, max_size=60))
def test_nat_takes_any_bytes(packet: bytes) -> None:
    nat = Nat(b"\x0b\x09\x00\x01")
    nat.outward(packet, 0.0)
    nat.inward(packet, 0.0)
