"""Several workers of one host: one process each, looked after by one that trains nothing.

Decides how the host's limits are shared among them, that a worker which ends is started again after
a growing wait while the others go on, and that one Ctrl-C ends them all within seconds. Every
worker is an ordinary host with its own identity, folder and port; which block it begins with is
decided in `node.host.fleet` before it starts. Holds no network and no torch: it costs 40 MB.

A worker leaves when its standard input ends, so that none is left behind by a supervisor that was
killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from node.console.terminal import LiveLine, on_terminal, say
from node.host.live_line import HostView, RunTimes, fitted, fleet_line, round_line
from node.host.options import HostOptions
from node.network.gate import Backoff
from protocol.errors import BlockswarmError
from swarm.events import EventError, LogEvent, NodeEvent, RoundEvent, from_line

LEAVE_S = 4.5  # a host leaves within 5 s; whoever takes longer is ended
STABLE_S = 60.0  # a worker that lived so long is started again at once
RESTARTS = Backoff(first_s=1.0, most_s=60.0)
REFRESH_S = 0.5
USAGE = 2  # the exit code of a foreseeable mistake
MAX_LINE_BYTES = 1 << 20


class WorkersError(BlockswarmError):
    """No worker could be started."""


def command_of(addresses: Sequence[str], home: Path, index: int, options: HostOptions) -> list[str]:
    """How a worker is started."""
    base = [sys.executable, "-m", "node.cli", "join", *addresses]
    own = ["--as-worker", str(index + 1), "--folder", str(worker_home(home, index)), "--json"]
    return [*base, *own, *options.arguments()]


def worker_home(home: Path, index: int) -> Path:
    return home / f"worker-{index + 1}"


# Looking after them.


@dataclass
class Worker:
    """One child process and what it said."""

    index: int
    command: list[str]
    view: HostView = field(default_factory=HostView)
    process: asyncio.subprocess.Process | None = None
    began: bool = False  # it trained at least once
    said: deque[str] = field(default_factory=lambda: deque(maxlen=8))
    refused: bool = False  # it ended by a foreseeable mistake, before it ever trained

    @property
    def name(self) -> str:
        return f"worker {self.index + 1}"


class Supervisor:
    """Keeps the workers running until `run` is cancelled."""

    def __init__(
        self,
        commands: Sequence[list[str]],
        blocks: Sequence[int],
        times: RunTimes,
        budget_bytes: int | None = None,
        as_json: bool = False,
        backoff: Backoff = RESTARTS,
    ) -> None:
        self.workers = [
            Worker(index, command, HostView(block=block))
            for index, (command, block) in enumerate(zip(commands, blocks, strict=True))
        ]
        self.times, self.budget_bytes, self.as_json = times, budget_bytes, as_json
        self.backoff = backoff
        self._live = on_terminal() and not as_json
        self._rng = random.Random()

    async def run(self) -> None:
        """Until cancelled. Raises `WorkersError` if no worker can be started at all."""
        keepers = [asyncio.create_task(self._keep(worker)) for worker in self.workers]
        line = LiveLine(self._draw) if self._live else None
        with line if line else contextlib.nullcontext():
            drawing = asyncio.create_task(_refresh(line)) if line else None
            try:
                await asyncio.gather(*keepers)
            finally:
                for task in (*keepers, *([drawing] if drawing else [])):
                    task.cancel()
                await asyncio.gather(*keepers, return_exceptions=True)
                await self._end_all()

    def signal(self, number: int) -> None:
        """Pass a signal on to all."""
        for worker in self.workers:
            _signal(worker.process, number)

    def _draw(self, width: int) -> str:
        views = [worker.view for worker in self.workers]
        return fitted(fleet_line(views, self.times, self.budget_bytes, time.time()), width)

    async def _keep(self, worker: Worker) -> None:
        """Start it, and again whenever it has ended."""
        attempt = 0
        while True:
            began_s = time.monotonic()
            code = await self._once(worker)
            worker.refused = code == USAGE and not worker.began
            if all(other.refused for other in self.workers):
                raise WorkersError(*_why(worker))
            attempt = 0 if time.monotonic() - began_s > STABLE_S else attempt + 1
            wait_s = self.backoff.wait_s(attempt, self._rng)
            worker.view.state = "starting again"
            say(f"{worker.name} has ended (code {code}); starting it again in {wait_s:.0f} s")
            await asyncio.sleep(wait_s)

    async def _once(self, worker: Worker) -> int:
        """One life of a worker; its exit code."""
        worker.said.clear()
        process = await asyncio.create_subprocess_exec(
            *worker.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=MAX_LINE_BYTES,
            start_new_session=True,  # Ctrl-C reaches us alone; we tell them
        )
        worker.process = process
        readers = [
            asyncio.create_task(_read(process.stdout, lambda line: self._heard(worker, line))),
            asyncio.create_task(_read(process.stderr, lambda line: self._said(worker, line))),
        ]
        try:
            code = await process.wait()
            await asyncio.gather(*readers)
            return code
        finally:
            for reader in readers:
                reader.cancel()

    def _heard(self, worker: Worker, line: str) -> None:
        try:
            event: LogEvent = from_line(line)
        except EventError:
            return
        worker.view.hear(event)
        if isinstance(event, NodeEvent) and event.what in ("started", "resumed"):
            worker.began = True
        if self.as_json:
            with contextlib.suppress(OSError):
                print(line, flush=True)
        elif isinstance(event, RoundEvent) and not self._live:
            say(f"[{worker.index + 1}] {round_line(event)}")

    def _said(self, worker: Worker, line: str) -> None:
        worker.said.append(line)
        say(f"[{worker.index + 1}] {line}")

    async def _end_all(self) -> None:
        """All at once: kindly, then by force. Never takes longer than 5 s."""
        running = [w for w in self.workers if w.process and w.process.returncode is None]
        drains = []
        for worker in running:
            process = worker.process
            assert process is not None
            drains += [asyncio.create_task(_read(s, lambda _: None)) for s in _outputs(process)]
            if process.stdin is not None:
                process.stdin.close()
            _signal(process, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await asyncio.gather(*(w.process.wait() for w in running if w.process))
        for worker in running:
            if worker.process is not None and worker.process.returncode is None:
                say(f"{worker.name} does not leave; it is ended")
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.process.pid, signal.SIGKILL)
                await worker.process.wait()
        for drain in drains:
            drain.cancel()
        await asyncio.gather(*drains, return_exceptions=True)


def _outputs(process: asyncio.subprocess.Process) -> list[asyncio.StreamReader]:
    """A child whose output nobody reads stops when the pipe is full."""
    return [stream for stream in (process.stdout, process.stderr) if stream is not None]


async def _read(stream: asyncio.StreamReader | None, hear: Callable[[str], None]) -> None:
    assert stream is not None
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # a line longer than the limit
            continue
        if not line:
            return
        hear(line.decode(errors="replace").rstrip("\n"))


def _signal(process: asyncio.subprocess.Process | None, number: int) -> None:
    if process is not None and process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)


def _why(worker: Worker) -> tuple[str, str]:
    """The error that a worker printed, as ours."""
    lines = list(worker.said)
    error = next((t.removeprefix("error: ") for t in lines if t.startswith("error: ")), "")
    hint = next((t.removeprefix("  try: ") for t in lines if t.startswith("  try: ")), "")
    return f"no worker can be started: {error or 'see above'}", hint


async def _refresh(line: LiveLine) -> None:
    while True:
        await asyncio.sleep(REFRESH_S)
        line.refresh()
