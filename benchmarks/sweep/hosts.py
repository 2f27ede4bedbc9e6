"""Three hosts that serve a model folder and a client, on a bed: brought up, asked, taken down.

Decides the topology of the serving benchmark and how its client is talked to. Knows nothing of what
is measured.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.wan.bed import Bed
from benchmarks.wan.namespaces import BedFailed
from benchmarks.wan.processes import Command

BLOCKS = 3
PORT = 4001
TOPOLOGY = """
name = "three that serve, and a client"
[wan]
rtt_ms = 20
up_mbit = 100
down_mbit = 100
queue_ms = 200
""" + "".join(
    f'[[hosts]]\nname = "{name}"\naddress = "11.{place}.0.1"\nrole = "none"\n'
    for place, name in enumerate(("one", "two", "three", "client"), start=1)
)
HOSTS = ("one", "two", "three")


class ServedModel:
    """The bed with its hosts up."""

    def __init__(self, bed: Bed, client: subprocess.Popen[bytes]) -> None:
        self.bed, self._client = bed, client

    def ask(
        self, orders: Sequence[dict[str, Any]], at_once: int = 1, look_again: bool = False
    ) -> tuple[list[dict[str, Any]], float]:
        """What became of the orders, and how long all of them took. `look_again`: the client
        measures the hosts' latencies anew, which the first order waits for."""
        asked = {"orders": list(orders), "at_once": at_once, "look_again": look_again}
        answer = tell(self._client, asked)
        return answer["outputs"], answer["seconds"]

    def wire_bytes(self) -> int:
        """All that the kernels of all hosts have sent so far, headers included."""
        return sum(counts["tx_bytes"] for counts in self.bed.counters().values())


def tell(client: subprocess.Popen[bytes], message: Any) -> dict[str, Any]:
    assert client.stdin is not None and client.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        client.stdin.write(json.dumps(message).encode() + b"\n")
        client.stdin.flush()
    return hear(client)


def hear(client: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert client.stdout is not None
    line = client.stdout.readline()
    if not line:
        raise BedFailed("the client has ended", "its last lines say why")
    answer: dict[str, Any] = json.loads(line)
    return answer


@contextlib.contextmanager
def served_model(model: Path, scratch: Path) -> Iterator[ServedModel]:
    """Each host one block of the model folder; the client on a host of its own."""
    with Bed(TOPOLOGY) as bed:
        commands: list[Command] = []
        for block, host in enumerate(HOSTS):
            known = [commands[0].address(bed.topology.host(HOSTS[0]).address)] if commands else []
            options = ["--model", model, "--block", block, "--port", PORT, "--threads", 1]
            folder = scratch / host
            arguments = ["serve", *known, *options, "--folder", folder / "state"]
            commands.append(Command(bed, host, folder, arguments))
        addresses = [
            command.address(bed.topology.host(host).address)
            for host, command in zip(HOSTS, commands, strict=True)
        ]
        one = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        client = bed.start(
            "client",
            [sys.executable, "-m", "benchmarks.sweep.client", addresses[0]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=one,
        )
        assert client.stdin is not None and client.stdout is not None
        with client.stdin, client.stdout:
            hear(client)
            yield ServedModel(bed, client)
