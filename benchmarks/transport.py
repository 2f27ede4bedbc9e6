"""Frames, digests and the ledger on a p2pd stream, against the same stream with nothing on it.

Two processes, each with its p2pd, on loopback. Three ways to move the same bytes take turns within
each round, so that a slow moment of a shared machine hits all of them. A way's speed is its best
round; a ratio is the median of the rounds' ratios, in the figures of those of 100 MB and more.

    framed      a request and its answer as nodes exchange them: frames, digests, limits, ledger
    bare        the same stream object, raw bytes
    hivemind    hivemind's own binary stream (asyncio's StreamReader and StreamWriter), raw bytes

Peak memory is what the kernel says a process held at most during a transfer, above what it held
when it had just started. The ledger is compared with the kernel's interface counters across two
network namespaces after the documented overhead (`benchmarks.link_model`); that needs root and
is skipped else.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from blake3 import blake3

from benchmarks import harness
from benchmarks.link_model import LinkModel
from benchmarks.transport_light import light_row
from node.network.daemon import DaemonSettings
from node.network.hivemind_parts import PeerID
from node.network.network import Network, NetworkSettings
from node.network.p2pd_stream import P2pdStream
from node.network.service import Reply, Status
from node.network.transport import Caller, Transport
from protocol import messages
from protocol.frames import Chunks, Deadline, content_digest
from protocol.limits import CHUNK_BYTES

MB = 1_000_000
RUN_FILE = b"benchmark"
RUN_ID = content_digest(RUN_FILE)
BARE = "/blockswarm-benchmark/bare"
HIVEMIND = "/blockswarm-benchmark/hivemind"
WAYS = ("framed", "bare", "hivemind")
PART = random.Random(0).randbytes(CHUNK_BYTES)
DEADLINE_S = 120.0
NAMESPACES = ("bsbench-a", "bsbench-b")
HOSTS = ("10.213.7.1", "10.213.7.2")


def parts(size_bytes: int) -> Iterator[memoryview]:
    view = memoryview(PART)
    for start in range(0, size_bytes, CHUNK_BYTES):
        yield view[: min(CHUNK_BYTES, size_bytes - start)]


def open_network(folder: Path, name: str, host: str, join: tuple[str, ...] = ()) -> Network:
    daemon = DaemonSettings(folder / f"{name}.key", hosts=(host,), map_port=False)
    settings = NetworkSettings(daemon, RUN_ID, RUN_FILE, join)
    return Network(settings, lambda: Status(1, 0))


# --- the sender: a process of its own -----------------------------------------------------------


async def send_until_killed(folder: Path, host: str) -> None:
    async with open_network(folder, "sender", host) as network:

        async def update(request: messages.UpdateRequest, _: bytes) -> Reply:
            size_bytes = request.round  # the benchmark's way to say how much
            reply = messages.UpdateReply(block=request.block, round=request.round)
            # As a node does: content is asked for by its digest, so its holder knows it.
            return Reply(reply, Chunks(size_bytes, parts(size_bytes), request.digest))

        async def bare(stream: P2pdStream, _: Caller) -> None:
            size_bytes = int.from_bytes(await stream.read(8, DEADLINE_S), "big")
            for part in parts(size_bytes):
                await stream.write(part, DEADLINE_S)
            await stream.read(1, DEADLINE_S)  # the receiver closes

        async def hivemind(_: Any, reader: Any, writer: Any) -> None:
            size_bytes = int.from_bytes(await reader.readexactly(8), "big")
            for part in parts(size_bytes):
                writer.write(part)
                await writer.drain()
            await reader.read(1)
            writer.close()

        network.serve(messages.UpdateRequest, update, bulk=True)
        folder_of_daemon = network.daemon._folder
        raw = Transport(folder_of_daemon / "control", folder_of_daemon / "bare")
        await raw.serve(bare, BARE)
        await network.daemon.p2p.add_binary_stream_handler(HIVEMIND, hivemind)
        told = {
            "peer": network.peer_id.hex(),
            "p2pd": network.daemon.pid,
            "join": await network.invitations(),
        }
        print(json.dumps(told), flush=True)
        await asyncio.Future()


async def until_terminated(main: Coroutine[Any, Any, None]) -> None:
    """Stop in an orderly way when told to: the daemon goes with us."""
    task = asyncio.ensure_future(main)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


# --- the receiver -------------------------------------------------------------------------------


@functools.cache
def digest_of(size_bytes: int) -> bytes:
    hasher = blake3()
    for part in parts(size_bytes):
        hasher.update(part)
    return hasher.digest()


async def receive_framed(network: Network, peer_id: bytes, size_bytes: int) -> None:
    digest = digest_of(size_bytes)
    request = messages.UpdateRequest(run=RUN_ID, block=0, round=size_bytes, digest=digest)
    arrived = 0

    def sink(data: bytes) -> None:
        nonlocal arrived
        arrived += len(data)

    await network.request(
        peer_id,
        request,
        messages.UpdateReply,
        deadline_s=DEADLINE_S,
        expected=digest,
        sink=sink,
    )
    assert arrived == size_bytes


async def receive_bare(network: Network, peer_id: bytes, size_bytes: int) -> None:
    known = network.discovery.book.addresses(peer_id)
    stream = await network.transport.dial(peer_id, known, Deadline.after(DEADLINE_S), BARE)
    await stream.write(size_bytes.to_bytes(8, "big"), DEADLINE_S)
    left = size_bytes
    while left:
        data = await stream.read(min(left, CHUNK_BYTES), DEADLINE_S)
        assert data
        left -= len(data)
    await stream.close()


async def receive_hivemind(network: Network, peer_id: bytes, size_bytes: int) -> None:
    p2p = network.daemon.p2p
    _, reader, writer = await p2p.call_binary_stream_handler(PeerID(peer_id), HIVEMIND)
    writer.write(size_bytes.to_bytes(8, "big"))
    left = size_bytes
    while left:
        data = await reader.read(min(left, CHUNK_BYTES))
        assert data
        left -= len(data)
    writer.close()
    await writer.wait_closed()


RECEIVE = {"framed": receive_framed, "bare": receive_bare, "hivemind": receive_hivemind}


def forget_peak(pid: int) -> None:
    """Start the kernel's peak of a process again."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def memory(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


async def measure(sizes_mb: list[int], rounds: dict[int, int]) -> harness.Rows:
    rows = []
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        async with (
            sender_process(folder, "127.0.0.1") as (told, sender_pid),
            open_network(folder, "receiver", "127.0.0.1", tuple(told["join"])) as network,
        ):
            peer_id = bytes.fromhex(told["peer"])
            watched = {"receiver": os.getpid(), "sender": sender_pid}
            cold = {who: memory(pid, "VmRSS") for who, pid in watched.items()}
            for way in WAYS:  # connections, code and buffers are warm
                await RECEIVE[way](network, peer_id, 20 * MB)
            for size_mb in sizes_mb:
                size_bytes = size_mb * MB
                digest_of(size_bytes)  # a record would have told it
                seconds: dict[str, list[float]] = {way: [] for way in WAYS}
                peaks = dict.fromkeys(watched, 0)
                for number in range(rounds[size_mb]):
                    for way in WAYS[number % 3 :] + WAYS[: number % 3]:
                        for pid in watched.values():
                            forget_peak(pid)
                        began_s = time.perf_counter()
                        await RECEIVE[way](network, peer_id, size_bytes)
                        seconds[way].append(time.perf_counter() - began_s)
                        if way == "framed":
                            for who, pid in watched.items():
                                peak = memory(pid, "VmHWM") - cold[who]
                                peaks[who] = max(peaks[who], peak)
                rows.append(_row(size_mb, seconds, peaks))
                print(json.dumps(rows[-1]), flush=True)
    return rows


def _row(size_mb: int, seconds: dict[str, list[float]], peaks: dict[str, int]) -> dict[str, Any]:
    speed = {way: size_mb / min(times) for way, times in seconds.items()}
    ratios = {
        way: [round(b / f, 3) for b, f in zip(seconds[way], seconds["framed"], strict=True)]
        for way in ("bare", "hivemind")
    }
    return {
        "name": f"{size_mb} MB",
        "size_mb": size_mb,
        "rounds": len(seconds["framed"]),
        **{f"{way}_mb_per_s": round(value, 1) for way, value in speed.items()},
        **{f"framed_vs_{way}": median(values) for way, values in ratios.items()},
        **{f"framed_vs_{way}_rounds": values for way, values in ratios.items()},
        **{f"{who}_peak_mb": round(peak / MB, 2) for who, peak in peaks.items()},
    }


@contextlib.asynccontextmanager
async def sender_process(
    folder: Path, host: str, prefix: tuple[str, ...] = ()
) -> AsyncIterator[tuple[dict[str, Any], int]]:
    command = [*prefix, sys.executable, "-m", "benchmarks.transport", "sender", str(folder), host]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, cwd=harness.ROOT
    )
    try:
        assert process.stdout is not None
        yield json.loads(await process.stdout.readline()), process.pid
    finally:
        process.terminate()
        await process.wait()


# --- the ledger against the kernel --------------------------------------------------------------


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def two_namespaces() -> Iterator[None]:
    """Two hosts and a cable between them. Segments as on a real cable: no offloading."""
    try:
        for name in NAMESPACES:
            _ip("netns", "add", name)
        _ip("link", "add", "bsb0", "netns", NAMESPACES[0], "type", "veth",
            "peer", "name", "bsb1", "netns", NAMESPACES[1])  # fmt: skip
        for number, (name, host) in enumerate(zip(NAMESPACES, HOSTS, strict=True)):
            link = f"bsb{number}"
            _ip("-n", name, "addr", "add", f"{host}/24", "dev", link)
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("-n", name, "link", "set", link, "gso_max_segs", "1", "gso_max_size", "1514")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", link, "up")
        yield
    finally:
        for name in NAMESPACES:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def interface_counters(link: str) -> dict[str, int]:
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == link:
            n = [int(word) for word in rest.split()]
            return {"rx_bytes": n[0], "rx_packets": n[1], "tx_bytes": n[8], "tx_packets": n[9]}
    raise KeyError(link)


async def count_in_namespace(folder: Path, sizes_mb: list[int], join: list[str], peer: str) -> None:
    """Runs inside the second namespace: transfers, then both countings, as JSON on stdout."""
    async with open_network(folder, "counting", HOSTS[1], tuple(join)) as network:
        peer_id = bytes.fromhex(peer)
        await receive_framed(network, peer_id, MB)
        ledger, kernel = network.ledger.total(), interface_counters("bsb1")
        for size_mb in sizes_mb:
            await receive_framed(network, peer_id, size_mb * MB)
        total, after = network.ledger.total(), interface_counters("bsb1")
    told = {key: after[key] - kernel[key] for key in kernel}
    told["ledger_in"] = total.bytes_in - ledger.bytes_in
    told["ledger_out"] = total.bytes_out - ledger.bytes_out
    print(json.dumps(told), flush=True)


async def measure_ledger(sizes_mb: list[int]) -> dict[str, Any] | None:
    """The ledger's count, with the model's overhead, beside the kernel's."""
    try:
        with two_namespaces(), tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            inside = [("ip", "netns", "exec", name) for name in NAMESPACES]
            async with sender_process(folder, HOSTS[0], inside[0]) as (told, _):
                arguments = json.dumps([str(folder), sizes_mb, told["join"], told["peer"]])
                process = await asyncio.create_subprocess_exec(
                    *inside[1], sys.executable, "-m", "benchmarks.transport", "count", arguments,
                    stdout=subprocess.PIPE, cwd=harness.ROOT,
                )  # fmt: skip
                output, _ = await process.communicate()
            counted = json.loads(output)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"skipped: ledger against the kernel needs network namespaces ({error})", flush=True)
        return None
    segment_bytes = round(counted["rx_bytes"] / counted["rx_packets"]) - 66
    # More than 1448 where offloading could not be switched off: then what was counted.
    model = LinkModel(segment_bytes=max(1448, segment_bytes))
    expected = (
        model.on_the_wire_bytes(counted["ledger_in"])
        + model.acknowledgement_bytes(counted["ledger_in"])
        + model.on_the_wire_bytes(counted["ledger_out"])
    )
    kernel = counted["rx_bytes"] + counted["tx_bytes"]
    return {
        "name": "ledger against the kernel",
        "moved_mb": sum(sizes_mb),
        **counted,
        "segment_bytes": model.segment_bytes,
        "expected_bytes": expected,
        "kernel_bytes": kernel,
        "uncorrected_percent": round(
            100 * (1 - (counted["ledger_in"] + counted["ledger_out"]) / kernel), 3
        ),
        "error_percent": round(100 * abs(expected / kernel - 1), 3),
    }


def run(quick: bool) -> tuple[harness.Figures, harness.Rows]:
    sizes = [1, 10, 100] if quick else [1, 10, 100, 500]
    rounds = {1: 15, 10: 9, 100: 5} if quick else {1: 45, 10: 24, 100: 15, 500: 6}
    rows = _run_loop(measure(sizes, rounds))
    large = [row for row in rows if row["size_mb"] >= 100]
    figures = {
        # Of neighbours in time, then the middle one: a busy moment spoils a pair, not the figure.
        **{
            name: median(value for row in large for value in row[f"{name}_rounds"])
            for name in ("framed_vs_bare", "framed_vs_hivemind")
        },
        "framed_mb_per_s": max(row["framed_mb_per_s"] for row in large),
        "receiver_peak_mb": max(row["receiver_peak_mb"] for row in rows),
        "sender_peak_mb": max(row["sender_peak_mb"] for row in rows),
    }
    ledger = _run_loop(measure_ledger([10, 10] if quick else [10, 50, 100]))
    if ledger is not None:
        rows.append(ledger)
        figures["ledger_error_percent"] = ledger["error_percent"]
    rows += [light_row(size, 2) for size in sizes[1:3]]  # py-libp2p beside it
    return figures, rows


def _run_loop(main: Any) -> Any:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


if __name__ == "__main__":
    if sys.argv[1:2] == ["sender"]:
        _run_loop(until_terminated(send_until_killed(Path(sys.argv[2]), sys.argv[3])))
    elif sys.argv[1:2] == ["count"]:
        folder, sizes, join, peer = json.loads(sys.argv[2])
        _run_loop(count_in_namespace(Path(folder), sizes, join, peer))
    else:
        harness.main("transport", run)
