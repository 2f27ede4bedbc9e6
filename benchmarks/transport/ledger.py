"""The ledger's count of a transfer beside that of the kernel, across two network namespaces.

python -m benchmarks.transport.ledger ARGUMENTS     (counts, a process in the second namespace)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.link_model import LinkModel
from benchmarks.transport.p2pd import MB, open_network, receive_framed, run_loop, sender_process

NAMESPACES = ("bsbench-a", "bsbench-b")
HOSTS = ("10.213.7.1", "10.213.7.2")


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
                    *inside[1], sys.executable, "-m", "benchmarks.transport.ledger", arguments,
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


if __name__ == "__main__":
    folder, sizes, join, peer = json.loads(sys.argv[1])
    run_loop(count_in_namespace(Path(folder), sizes, join, peer))
