"""One host process from its options to its goodbye: settings, display, signals.

Decides how options become settings, what a person sees while it runs, and that Ctrl-C, SIGTERM or
the end of its supervisor make it leave, once. What a host does is `host`'s, what a seed without
training does `seed_peer`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar

from node.console.amounts import duration_words
from node.console.terminal import LiveLine, on_terminal, say
from node.host.home import keep_place, make, port_of_before
from node.host.live_line import HostView, LinePart, RunTimes, fitted, round_line
from node.host.options import HostOptions
from node.machine.event_loop import run_loop
from node.machine.phases import durations, mark
from protocol.errors import BlockswarmError
from swarm.events import LogEvent, NodeEvent, RoundEvent, to_line

if TYPE_CHECKING:
    from node.host.event_log import EventLog
    from node.host.host import Host
    from node.host.settings import HostSettings
    from node.network.client import Guest
    from node.network.network import Network, NetworkSettings
    from swarm.runfile import RunFile

T = TypeVar("T")
REFRESH_S = 0.5


@dataclass(frozen=True)
class Part:
    """What one process does in a run. `worker`: the how-many-th of a supervisor, from 1."""

    text: bytes
    home: Path
    addresses: tuple[str, ...]
    is_seed: bool
    options: HostOptions
    trains: bool = True
    worker: int | None = None
    guest: Guest | None = None  # the p2pd that found the run, to go on with


class Participant(Protocol):
    """What is needed of a host or a seed."""

    network: Network
    events: EventLog

    async def run(self) -> None: ...

    def pause(self, paused: bool) -> None: ...

    def line(self, view: HostView, times: RunTimes, now_s: float) -> list[LinePart]:
        """What the live line says."""


def take_part(arriving: Callable[[], Awaitable[Part]]) -> None:
    """Find the run, then take part until asked to leave. Does not return: the process ends."""
    # Imports of seconds, before the loop: there Ctrl-C would wait for their end.
    import node.host.host
    import node.host.joining
    import node.host.seed_peer  # noqa: F401

    run_loop(_take_part(arriving))
    _end_now(0)  # all is saved, closed and ended


async def _take_part(arriving: Callable[[], Awaitable[Part]]) -> None:
    part = await arriving()
    try:
        await _stay(part)
    finally:
        if part.guest is not None:  # its network has ended it, if it came so far
            await part.guest.daemon.stop()


async def _stay(part: Part) -> None:
    from swarm.runfile import parse

    run_file, options = parse(part.text), part.options
    _log_above(logging.DEBUG if options.verbose else logging.ERROR)
    if part.worker is None and not options.as_json:
        _say_beginning(part, run_file)
    make(part.home)
    settings = network_settings(part)
    member: Participant
    if part.trains:
        from node.host import block_work
        from node.host.host import Host

        parts = replace(block_work.live_parts(), network=_network_maker(part))
        member = Host(_host_settings(part, settings), say, parts)
    else:
        from node.host.seed_peer import SeedPeer

        member = SeedPeer(settings, part.home, say, _network_maker(part))
    await _until_stopped(member, part, run_file)


def _network_maker(part: Part) -> Callable[..., Network]:
    """Makes the host's network, on the p2pd that found the run if there is one."""
    from node.network.network import Network

    guest = part.guest
    if guest is None:
        return Network
    return partial(Network, daemon=guest.daemon, ledger=guest.ledger)


@contextlib.contextmanager
def stoppable_at_once() -> Iterator[None]:
    """Ctrl-C while a host starts: there is nothing to save, so its process ends."""
    try:
        yield
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        _end_now(130)


def _end_now(code: int) -> NoReturn:
    """End the process. Unloading torch and hivemind takes seconds, on a busy machine more than
    ten, and whoever asked us to leave waits for it."""
    from node.trainer import spare_process

    spare_process.leave_none()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# Settings.


def network_settings(part: Part) -> NetworkSettings:
    from node.host.joining import daemon_settings
    from node.network.daemon import ALL_INTERFACES
    from node.network.network import NetworkSettings
    from swarm.runfile import parse, run_id

    options = part.options
    port = options.port or port_of_before(part.home, options.listen or ALL_INTERFACES)
    return NetworkSettings(
        daemon_settings(options, part.home / "identity", port),
        run_id(part.text),
        part.text,
        join=part.addresses,
        announce=options.announce,
        state_folder=part.home,
        up_bytes_per_s=options.up_bytes_per_s,
        down_bytes_per_s=options.down_bytes_per_s,
        blocks=parse(part.text).run.model.blocks,
        ask_reachable=True,
    )


def _host_settings(part: Part, network: NetworkSettings) -> HostSettings:
    from node.host.settings import HostSettings

    options = part.options
    memory = options.memory_bytes
    return HostSettings(
        network=network,
        folder=part.home,
        data_spec=options.data,
        block=options.block,
        first_block=options.first_block,
        device=options.device,
        threads=options.threads,
        memory_bytes=1 << 60 if memory is None else memory,
        seed=part.is_seed,
        bytes_per_day=options.bytes_per_day,
        up_bytes_per_s=network.up_bytes_per_s,
        down_bytes_per_s=network.down_bytes_per_s,
        serve=not options.no_serve,
    )


# What is said before.


def _say_beginning(part: Part, run_file: RunFile) -> None:
    from node.host.cost_words import seed_cost_line
    from swarm.runfile import run_id

    say(f"run {run_file.name} ({run_id(part.text).hex()[:16]}): {run_file.run.model.blocks} blocks")
    if part.trains:
        say_cost(run_file, part.home, part.options, 1)
    else:
        say(seed_cost_line())
    say_if_over(run_file, part.addresses)


def say_cost(run_file: RunFile, home: Path, options: HostOptions, workers: int) -> None:
    from node.host.cost_words import cost_lines

    for line in cost_lines(run_file, home, options, workers):
        say(line)


def say_if_over(run_file: RunFile, addresses: tuple[str, ...]) -> None:
    """A run that has ended trains nobody; its hosts keep it for whoever assembles."""
    rounds = run_file.rounds
    over_s = time.time() - rounds.start_s - rounds.count * rounds.period_s
    if run_file.started and over_s > 0:
        ago = duration_words(over_s)
        say(f"this run ended {ago} ago: all of its {rounds.count} rounds are over")
        say("  staying only keeps its blocks there for others; to get the model:")
        say(f"  blockswarm assemble {addresses[0] if addresses else 'ADDRESS'} -o model/")


# While it runs.


async def _until_stopped(member: Participant, part: Part, run_file: RunFile) -> None:
    """Run a host until it is asked to leave; then let it, which takes seconds at most."""
    from node.host.host import Host

    work, view = asyncio.create_task(member.run()), HostView()
    _leave_when_asked(work, view, with_stdin=part.worker is not None)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, member.pause, True)
    loop.add_signal_handler(signal.SIGUSR2, member.pause, False)
    as_json = part.options.as_json
    helpers = [
        asyncio.create_task(_invite(member, part)),
        *([asyncio.create_task(_note_first_step(member))] if isinstance(member, Host) else []),
    ]
    live = on_terminal() and not as_json and part.worker is None
    if live:
        view.remember(member.events.lately())

    def show(event: LogEvent) -> None:
        view.hear(event)
        if as_json:
            with contextlib.suppress(OSError):  # nobody reads any more: the log file has it too
                print(to_line(event), flush=True)
        elif isinstance(event, RoundEvent) and not live:
            say(round_line(event))

    member.events.listeners.append(show)
    try:
        with _live_line(member, part, run_file, view) if live else contextlib.nullcontext() as line:
            if line is not None:
                helpers.append(asyncio.create_task(_refresh(line)))
            with contextlib.suppress(asyncio.CancelledError):
                await work
    finally:
        for helper in helpers:
            helper.cancel()
    say("left the run; the same command goes on with it")


def _leave_when_asked(work: asyncio.Task[None], view: HostView, with_stdin: bool) -> None:
    """Ctrl-C, SIGTERM; for a worker also the end of its standard input: its supervisor is gone."""
    loop = asyncio.get_running_loop()
    asked = False

    def stop() -> None:
        nonlocal asked
        if not asked:  # a second time must not cut off the goodbye
            asked, view.state = True, "leaving"
            work.cancel()

    def read() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    if with_stdin:
        loop.add_reader(0, read)


@contextlib.contextmanager
def _live_line(
    member: Participant, part: Part, run_file: RunFile, view: HostView
) -> Iterator[LiveLine | None]:
    rounds = run_file.rounds
    times = RunTimes(rounds.start_s, rounds.period_s, rounds.count)

    def draw(width: int) -> str:
        now_s = time.time()
        return fitted(member.line(view, times, now_s), width)

    with LiveLine(draw) as line:
        yield line


async def _refresh(line: LiveLine) -> None:
    while True:
        await asyncio.sleep(REFRESH_S)
        line.refresh()


async def _invite(member: Participant, part: Part) -> None:
    """Print the addresses once the network is up."""
    while True:
        await asyncio.sleep(0.2)
        with contextlib.suppress(BlockswarmError):
            lines = await member.network.invitations()
            if lines:
                keep_place(part.home, member.network.daemon.port, lines)
                if part.worker is None or part.worker == 1:
                    say("others join with:")
                    for line in lines:
                        say(f"  blockswarm join {line}")
                return


async def _note_first_step(host: Host) -> None:
    """Write down how long it took to the first step of training, and what took it."""
    while True:
        await asyncio.sleep(0.02)
        if host.writer.measured.steps > 0:
            mark("first_step")
            facts = {name: f"{seconds:.3f}" for name, seconds in durations().items()}
            host.events.write(NodeEvent(time.time(), host.me, "first_step", facts=facts))
            return


class _AboveTheLine(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


def _log_above(level: int) -> None:
    """Log lines go where remarks go: above the live line."""
    handler = _AboveTheLine()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
