"""Measures a bed from inside: round-trip time, loss, TCP throughput between two hosts.

    python -m benchmarks.wan.probe echo|sink|rtt|loss|push ...     (one side, on a host)

Decides how each is measured; `rtt_ms`, `loss_share` and `throughput_mbit` start both sides on a
bed. What the figures should be is the topology's business.
"""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.wan.bed import Bed

PORT = 7007
CHUNK = bytes(1 << 17)
WAIT_S = 3.0
SO_RCVBUFFORCE = 33


def rtt_ms(bed: Bed, client: str, server: str, count: int = 10) -> float:
    """The shortest time of small UDP packets there and back: a busy machine makes others longer."""
    return float(_between(bed, client, server, "echo", ["rtt", str(count)])["min_ms"])


def loss_share(bed: Bed, client: str, server: str, count: int = 2000) -> float:
    """The share of UDP packets that do not come back: lost on the way there or back."""
    return float(_between(bed, client, server, "echo", ["loss", str(count)])["lost"])


def throughput_mbit(bed: Bed, client: str, server: str, seconds: float = 4.0) -> dict[str, Any]:
    """TCP payload from client to server.

    `mbit`: after the first third of the time, as the receiver reads. `mbit_whole`: all bytes in
    all of the time, connecting included: that is never more than the line carries.
    """
    return _between(bed, client, server, "sink", ["push", str(seconds)])


def _between(bed: Bed, client: str, server: str, serve: str, ask: list[str]) -> dict[str, Any]:
    program = [sys.executable, "-m", "benchmarks.wan.probe"]
    serving = bed.start(server, [*program, serve], stdout=subprocess.PIPE)
    assert serving.stdout is not None
    try:
        serving.stdout.readline()  # it listens
        address = bed.topology.host(server).address
        asking = bed.start(client, [*program, ask[0], address, *ask[1:]], stdout=subprocess.PIPE)
        answer = asking.communicate()[0]
        if asking.returncode:
            raise OSError(f"the probe {ask[0]} failed")
        result: dict[str, Any] = json.loads(answer)
        return result
    finally:
        serving.kill()
        serving.wait()
        serving.stdout.close()


# --- one side -------------------------------------------------------------------------------------


def echo() -> None:
    with _udp() as udp:
        udp.bind(("0.0.0.0", PORT))
        print("ready", flush=True)
        while True:
            data, sender = udp.recvfrom(2048)
            udp.sendto(data, sender)


def _udp() -> socket.socket:
    """With room for all packets of a probe: a busy reader must not look like a lossy line."""
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with contextlib.suppress(OSError):  # only root may have more than the machine's limit
        udp.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 8 << 20)
    return udp


def rtt(address: str, count: int) -> dict[str, Any]:
    times = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.settimeout(WAIT_S)
        udp.connect((address, PORT))
        for number in range(count):
            began_s = time.monotonic()
            udp.send(number.to_bytes(8, "big"))
            udp.recv(2048)
            times.append((time.monotonic() - began_s) * 1e3)
    return {"median_ms": statistics.median(times), "min_ms": min(times), "max_ms": max(times)}


def loss(address: str, count: int) -> dict[str, Any]:
    """Sent at a pace that no line drops: what is missing is the loss."""
    back: set[bytes] = set()
    with _udp() as udp:
        udp.connect((address, PORT))
        for number in range(count):
            udp.send(number.to_bytes(8, "big"))
            _collect(udp, back, 0.001)
        while len(back) < count and _collect(udp, back, 2.0):
            pass
    return {"sent": count, "back": len(back), "lost": 1 - len(back) / count}


def _collect(udp: socket.socket, back: set[bytes], wait_s: float) -> bool:
    udp.settimeout(wait_s)
    try:
        back.add(udp.recv(2048))
    except TimeoutError:
        return False
    return True


def sink() -> None:
    """Read what is sent; tell at its end how much came after the first third."""
    with socket.create_server(("0.0.0.0", PORT)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
        with connection:
            warm_s = float(connection.recv(16).decode().strip()) / 3
            began_s, size, start_s = time.monotonic(), 0, 0.0
            while data := connection.recv(1 << 18):
                now_s = time.monotonic()
                if not start_s and now_s - began_s > warm_s:
                    start_s, size = now_s, 0
                size += len(data)
            spent_s = time.monotonic() - (start_s or began_s)
            connection.sendall(json.dumps({"mbit": size * 8 / spent_s / 1e6}).encode())


def push(address: str, seconds: float) -> dict[str, Any]:
    began_s, sent = time.monotonic(), 0
    with socket.create_connection((address, PORT), WAIT_S) as tcp:
        tcp.settimeout(30.0)
        tcp.sendall(f"{seconds:<16g}".encode())
        control = tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            tcp.sendall(CHUNK)
            sent += len(CHUNK)
        tcp.shutdown(socket.SHUT_WR)
        answer: dict[str, Any] = json.loads(tcp.recv(4096))
    whole = sent * 8 / (time.monotonic() - began_s) / 1e6
    return {**answer, "mbit_whole": whole, "control": control.rstrip(b"\0").decode()}


def main() -> None:
    what, *arguments = sys.argv[1:]
    if what == "echo":
        echo()
    elif what == "sink":
        sink()
    else:
        ways = {"rtt": rtt, "loss": loss}
        if what == "push":
            print(json.dumps(push(arguments[0], float(arguments[1]))))
        else:
            print(json.dumps(ways[what](arguments[0], int(arguments[1]))))


if __name__ == "__main__":
    main()
