"""The WAN between the namespaces: one process that reads all packets and delivers them late.

    python -m benchmarks.wan.forwarder      (started by `bed.Bed`, which talks to it)

Standard input: the topology as a JSON string, then a JSON command per line; standard output: a
JSON answer to each. When the input ends, for whatever reason, everything that was made is removed,
so a bed whose owner was killed leaves nothing. Decides only the order of work; what happens to a
packet is decided in `links` and `nat`.

It shares the machine with what it connects, so it has real-time priority where that is allowed:
otherwise the load of the hosts would look like jitter. When there is much to do it rests half a
millisecond between turns, as network cards do, and so does more per turn.
"""

from __future__ import annotations

import gc
import heapq
import ipaddress
import json
import os
import select
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

from benchmarks.wan import namespaces
from benchmarks.wan.links import Wan
from benchmarks.wan.nat import Nat
from benchmarks.wan.topology import Topology, parse

BATCH = 64  # packets of one host before the others have their turn
LONGEST_WAIT_S = 0.5
WINDOW_S, BUSY_PACKETS = 0.005, 20  # so many packets in a window: busy, 50 Mbit or so
REST_S = 0.0005
DROPS = ("lost", "up_full", "down_full", "cut", "nat", "nowhere")
Entry = tuple[float, int, int, bytes, bool]  # due, order, to whom, packet, still before their line


class Forwarder:
    """All hosts' devices, and the packets under way."""

    def __init__(self, topology: Topology, fds: list[int]) -> None:
        self.topology, self.fds = topology, fds
        self.wan = Wan(topology, Random(topology.seed))
        self.names = [host.name for host in topology.hosts]
        addresses = [ipaddress.IPv4Address(host.address).packed for host in topology.hosts]
        self.places = {address: place for place, address in enumerate(addresses)}
        self.nats = [
            Nat(address) if host.nat else None
            for host, address in zip(topology.hosts, addresses, strict=True)
        ]
        self.counts = [
            dict.fromkeys(("packets", "bytes", *DROPS), 0) for _ in topology.hosts
        ]  # of packets that a host sent
        self._under_way: list[Entry] = []
        self._order = 0

    def run(self, control: int, command: Callable[[], bool]) -> None:
        """Until `command`, which is called when `control` can be read, says False."""
        places = {fd: place for place, fd in enumerate(self.fds)}
        watched = [*self.fds, control]
        window_s, before, busy = time.monotonic(), 0, False
        while True:
            wait_s = self._deliver()
            now_s = time.monotonic()
            if now_s - window_s > WINDOW_S:
                busy = self._order - before >= BUSY_PACKETS
                window_s, before = now_s, self._order
            if busy:
                # Packets gather, and one wake-up carries many.
                time.sleep(REST_S)
                wait_s = max(0.0, wait_s - REST_S)
            ready, _, _ = select.select(watched, [], [], wait_s)
            for fd in ready:
                if fd != control:
                    self._read(fd, places[fd])
                elif not command():
                    return

    def _read(self, fd: int, source: int) -> None:
        read, now_s = os.read, time.monotonic
        for _ in range(BATCH):
            try:
                packet = read(fd, 65536)
            except BlockingIOError:
                return
            self._send(source, packet, now_s())

    def _send(self, source: int, packet: bytes, now_s: float) -> None:
        """One packet from a host: onto its line and on its way, or dropped."""
        counts = self.counts[source]
        place = self.places.get(packet[16:20]) if packet[0] >> 4 == 4 else None
        if place is None or place == source:
            counts["nowhere"] += 1
            return
        nat = self.nats[source]
        if nat is not None:
            translated = nat.outward(packet, now_s)
            if translated is None:
                counts["nat"] += 1
                return
            packet = translated
        wan, size = self.wan, len(packet)
        way = wan.ways[source][place]
        if way.cut:
            counts["cut"] += 1
            return
        left_s = wan.up[source].through_s(size, now_s)
        if left_s is None:
            counts["up_full"] += 1
            return
        if way.loss and wan.random.random() < way.loss:  # it has used the line, as a real one
            counts["lost"] += 1
            return
        luck = wan.random.random() if way.jitter_s else 0.0
        counts["packets"] += 1
        counts["bytes"] += size
        self._order += 1
        entry = (way.arrives_s(left_s, luck), self._order, place, packet, True)
        heapq.heappush(self._under_way, entry)

    def _deliver(self) -> float:
        """Deliver what is due; how long until the next is."""
        under_way, now_s = self._under_way, time.monotonic()
        while under_way and under_way[0][0] <= now_s:
            due_s, order, place, packet, before_line = heapq.heappop(under_way)
            if before_line:
                self._onto_line(due_s, order, place, packet)
            else:
                with suppress(OSError):  # a device that is down: the host is gone
                    os.write(self.fds[place], packet)
                now_s = time.monotonic()
        return (
            min(LONGEST_WAIT_S, max(0.0, under_way[0][0] - now_s)) if under_way else LONGEST_WAIT_S
        )

    def _onto_line(self, due_s: float, order: int, place: int, packet: bytes) -> None:
        """Arrived at the receiver's end: through its router and its line."""
        nat = self.nats[place]
        counts = self.counts[place]
        inner: bytes | None = packet
        if nat is not None:
            inner = nat.inward(packet, due_s)
        if inner is None:
            counts["nat"] += 1
            return
        through_s = self.wan.down[place].through_s(len(packet), due_s)
        if through_s is None:
            counts["down_full"] += 1
            return
        heapq.heappush(self._under_way, (through_s, order, place, inner, False))

    # --- what the bed asks for ------------------------------------------------------------------

    def obey(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Carry out a command; its answer."""
        what = asked.get("do")
        if what == "cut":
            self.wan.cut([self.names.index(name) for name in asked["apart"]])
        elif what == "heal":
            self.wan.heal()
        elif what == "delay":
            self._set_delay(float(asked["rtt_ms"]), asked.get("between"))
        elif what == "counters":
            return {
                name: dict(counts) for name, counts in zip(self.names, self.counts, strict=True)
            }
        elif what != "ping":
            return {"error": f"no command {what}"}
        return {}

    def _set_delay(self, rtt_ms: float, between: list[str] | None) -> None:
        for one, row in zip(self.names, self.wan.ways, strict=True):
            for other, way in zip(self.names, row, strict=True):
                if between is None or {one, other} == set(between):
                    way.delay_s = rtt_ms / 2e3


def inner_address(host_place: int) -> str:
    """What a host behind NAT believes to be."""
    return f"192.168.{host_place}.2"


def build_all(topology: Topology) -> list[int]:
    """Namespaces and devices of all hosts. What was made is removed if one fails."""
    fds: list[int] = []
    try:
        for place, host in enumerate(topology.hosts):
            device = f"bsw{os.getpid()}x{place}"
            fds.append(namespaces.open_tun(device))
            address = inner_address(place) if host.nat else host.address
            name = namespace_of(os.getpid(), host.name)
            namespaces.build(name, device, address, topology.mtu)
    except BaseException:
        # Also Ctrl-C: no half-made namespace may be left.
        remove_all(topology)
        raise
    return fds


def namespace_of(pid: int, host: str) -> str:
    return f"{namespaces.PREFIX}{pid}-{host}"


def remove_all(topology: Topology) -> None:
    for host in topology.hosts:
        namespaces.remove(namespace_of(os.getpid(), host.name))


def main() -> None:
    topology = parse(json.loads(sys.stdin.buffer.readline()).encode())
    namespaces.clean_stale()
    fds = build_all(topology)
    with suppress(OSError):  # no right to it: more jitter under load
        priority = os.sched_param(1)
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, priority)
    forwarder = Forwarder(topology, fds)
    pending = bytearray()

    def command() -> bool:
        """Read without blocking: packets must not wait for half of a line."""
        data = os.read(0, 65536)
        pending.extend(data)
        while b"\n" in pending:
            line, _, rest = bytes(pending).partition(b"\n")
            pending[:] = rest
            _answer(forwarder.obey(json.loads(line)))
        return bool(data)

    gc.collect()
    gc.disable()  # nothing here makes cycles
    try:
        _answer({})
        forwarder.run(0, command)
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        remove_all(topology)


def _answer(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
