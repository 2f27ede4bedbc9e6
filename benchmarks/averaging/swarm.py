"""Processes that average with each other, told what to do in JSON: for `benchmarks.averaging`.

Decides how they are started (one network namespace for all, so that its loopback device counts
their bytes and nobody else's) and that none is left. Knows nothing of what is averaged.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness

LIMIT_S = 400.0  # for one order, on a machine that others keep busy
START_S = 0.3  # from the order to begin until all begin


class Peers:
    """The processes of one system. Orders go to all of them, or to those that are named."""

    def __init__(self, name: str, module: str, folder: Path, prefix: Sequence[str]) -> None:
        self.name, self.module, self.folder, self.prefix = name, module, folder, tuple(prefix)
        self.processes: list[asyncio.subprocess.Process] = []

    async def start(self, count: int, facts: dict[str, Any]) -> None:
        """The first one alone: the others join through it."""
        first = await self._spawn({**facts, "index": 0, "peers": count, "join": []})
        rest = [
            self._spawn({**facts, "index": index, "peers": count, "join": first["join"]})
            for index in range(1, count)
        ]
        await asyncio.gather(*rest)

    async def _spawn(self, told: dict[str, Any]) -> dict[str, Any]:
        with (self.folder / f"{self.name}{told['index']}.err").open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *self.prefix,
                *(sys.executable, "-W", "ignore", "-m", self.module),
                json.dumps({"folder": str(self.folder), **told}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=harness.ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
                start_new_session=True,
            )
        self.processes.append(process)
        return await self._answer(process)

    async def _answer(self, process: asyncio.subprocess.Process) -> dict[str, Any]:
        assert process.stdout is not None
        async with asyncio.timeout(LIMIT_S):
            line = await process.stdout.readline()
        if not line:
            raise RuntimeError(f"a peer of {self.name} has ended: see {self.tail()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def tail(self) -> str:
        texts = [path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.err")]
        return "\n".join(text for text in texts if text)

    async def tell(self, index: int, order: dict[str, Any]) -> dict[str, Any]:
        process = self.processes[index]
        assert process.stdin is not None
        process.stdin.write(json.dumps(order).encode() + b"\n")
        await process.stdin.drain()
        return await self._answer(process)

    async def tell_all(
        self, order: dict[str, Any], among: Sequence[int] | None = None
    ) -> list[dict[str, Any]]:
        chosen = range(len(self.processes)) if among is None else among
        return await asyncio.gather(*(self.tell(index, order) for index in chosen))

    async def load(self, codec: str, vectors: Sequence[Path]) -> None:
        orders = [{"op": "load", "codec": codec, "path": str(path)} for path in vectors]
        await asyncio.gather(*(self.tell(index, order) for index, order in enumerate(orders)))

    def cpu_s(self) -> float:
        """CPU seconds of all peers until now, each with its children (p2pd and what it forked)."""
        parents, ticks = {}, {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                pid = int(entry.name)
                parents[pid], ticks[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
        ours = {process.pid for process in self.processes}
        while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
            ours |= more
        return sum(ticks.get(pid, 0) for pid in ours) / os.sysconf("SC_CLK_TCK")

    def kill(self, index: int) -> None:
        """kill -9 of a peer and of all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.processes[index].pid, signal.SIGKILL)

    async def stop(self) -> None:
        for process in self.processes:
            if process.stdin is not None:
                process.stdin.close()
        for index, process in enumerate(self.processes):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(10):
                    await process.wait()
            self.kill(index)
            await process.wait()


@contextlib.asynccontextmanager
async def peers(
    name: str, count: int, folder: Path, prefix: Sequence[str], facts: dict[str, Any]
) -> AsyncIterator[Peers]:
    """`name` is `ours` or `hivemind`."""
    module = {"ours": "peer", "hivemind": "hivemind_peer"}[name]
    swarm = Peers(name, f"benchmarks.averaging.{module}", folder, prefix)
    try:
        await swarm.start(count, facts)
        yield swarm
    finally:
        await swarm.stop()


@contextlib.contextmanager
def namespace() -> Iterator[tuple[str, ...]]:
    """How to start a process in a network of its own: nothing but loopback. () if we may not."""
    name = f"bsavg{os.getpid()}"
    try:
        subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        print("no network namespaces here: others' bytes on loopback are counted too", flush=True)
        yield ()
        return
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        yield ("ip", "netns", "exec", name)
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def hold_to(prefix: Sequence[str], mbit_per_s: int | None) -> bool:
    """Limit what the loopback device of the namespace carries in all, or lift the limit."""
    if not prefix:
        return mbit_per_s is None
    device = ["tc", "-n", prefix[-1], "qdisc"]
    subprocess.run([*device, "del", "dev", "lo", "root"], capture_output=True, check=False)
    if mbit_per_s is None:
        return True
    # Room for 20 ms: enough for a full rate, too little to hide it.
    burst = max(mbit_per_s * 1_000_000 // 8 // 50, 256 * 1024)
    limit = ["tbf", "rate", f"{mbit_per_s}mbit", "burst", f"{burst}b", "latency", "100ms"]
    done = subprocess.run(
        [*device, "add", "dev", "lo", "root", *limit], capture_output=True, check=False
    )
    return done.returncode == 0


def lo_bytes() -> int:
    """What was sent over the loopback device of this network namespace, with all headers."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == "lo":
            return int(rest.split()[8])
    raise KeyError("lo")


def available_bytes() -> int:
    """The memory that can be had now. Whoever is out of it may be somebody else's process."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise KeyError("MemAvailable")


def soon_s() -> float:
    """When all begin: late enough that each has heard of it."""
    return time.monotonic() + START_S
