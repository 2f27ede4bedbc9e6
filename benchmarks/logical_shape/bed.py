"""Three hosts with a logical shape and a client, on the emulated WAN: up, asked, taken down.

Decides how the processes are started, and reads how long the hosts' blocks computed. Knows nothing
of what is compared.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.logical_shape.matmul import Ways
from benchmarks.logical_shape.model import SPENT
from benchmarks.sweep.hosts import HOSTS, PORT, TOPOLOGY, hear, tell
from benchmarks.wan.bed import Bed
from benchmarks.wan.namespaces import BedFailed
from benchmarks.wan.processes import Command

RTT_MS = 100
LINE_MBIT = 100
HOPS = len(HOSTS) + 1  # client, three hosts, client
PROGRAM = ("-m", "benchmarks.logical_shape.process")


@dataclass(frozen=True)
class Pass:
    """One pass of some positions through one host's block."""

    positions: int
    seconds: float
    cpu_s: float


@dataclass(frozen=True)
class Written:
    """One output: when its pieces were there, and what every host computed for it."""

    seconds: float
    pieces_s: tuple[float, ...]
    passes: tuple[tuple[Pass, ...], ...]  # of each host
    wire_bytes: int
    retries: int

    @property
    def compute_s(self) -> float:
        return sum(one.seconds for host in self.passes for one in host)

    @property
    def waited(self) -> float:
        """How many times longer the blocks took than they computed: 1 on a quiet machine."""
        return self.compute_s / sum(one.cpu_s for host in self.passes for one in host)


class LogicalBed:
    """The bed with its hosts up."""

    def __init__(self, bed: Bed, folders: list[Path], client: subprocess.Popen[bytes]) -> None:
        self.bed, self._client = bed, client
        self._files = [folder / SPENT for folder in folders]

    def write(self, mode: str, prompt: bytes, length: int, seed: int) -> Written:
        """One output. Raises `BedFailed` if it did not come back whole, with all blocks."""
        before, sent = self._passes(), self._sent()
        order = {"mode": mode, "prompt": prompt.hex(), "length": length, "seed": seed}
        done = tell(self._client, order)
        if done["error"] or done["bytes"] != length or done["missing"]:
            raise BedFailed(f"{mode}: {done['bytes']} of {length} bytes", done["error"])
        made = tuple(all_of[len(old) :] for all_of, old in zip(self._passes(), before, strict=True))
        return Written(
            done["seconds"], tuple(done["pieces_s"]), made, self._sent() - sent, done["retries"]
        )

    def _sent(self) -> int:
        """All that the kernels of all hosts have sent so far, headers included."""
        return sum(counts["tx_bytes"] for counts in self.bed.counters().values())

    def _passes(self) -> list[tuple[Pass, ...]]:
        return [
            tuple(Pass(**_facts(line)) for line in path.read_text().splitlines())
            if path.exists()
            else ()
            for path in self._files
        ]


def _facts(line: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(line)
    return facts


@contextlib.contextmanager
def logical_bed(label: str, ways: Ways, scratch: Path) -> Iterator[LogicalBed]:
    """Each host one block of the shape; the client on a host of its own."""
    with Bed(TOPOLOGY) as bed:
        bed.set_rtt(RTT_MS)
        commands: list[Command] = []
        folders = [scratch / host for host in HOSTS]
        for block, (host, folder) in enumerate(zip(HOSTS, folders, strict=True)):
            # The first must be there to be joined; then it is the weights that take long.
            known = [commands[0].address(bed.topology.host(HOSTS[0]).address)] if commands else []
            arguments: list[object] = ["host", label, block, folder, PORT, ways.few, ways.many]
            for address in known:
                arguments += ["--join", address]
            commands.append(Command(bed, host, folder, arguments, PROGRAM))
        addresses = [
            command.address(bed.topology.host(host).address)
            for host, command in zip(HOSTS, commands, strict=True)
        ]
        client = bed.start(
            "client",
            [sys.executable, *PROGRAM, "client", addresses[0]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        )
        assert client.stdin is not None and client.stdout is not None
        with client.stdin, client.stdout:
            hear(client)
            yield LogicalBed(bed, folders, client)
