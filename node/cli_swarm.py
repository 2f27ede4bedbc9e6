"""Commands that take part in a swarm: seed, join.

Imports of torch and hivemind happen inside the commands: `blockswarm --help` answers at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from node.terminal import say
from protocol.errors import BlockswarmError, UsageError

if TYPE_CHECKING:
    from node.host import Host

C = TypeVar("C", bound=Any)

RUN, JOINED, PORT = "run.toml", "joined.txt", "port"
START_DELAY_S = 2  # from `seed` to the first round


def _host_options(command: C) -> C:
    options = (
        click.option("--folder", type=click.Path(path_type=Path), help="Where its state is kept."),
        click.option("--port", type=int, default=0, help="TCP port (default: any free one)."),
        click.option("--announce", multiple=True, help="Public IP or multiaddress (repeatable)."),
        click.option("--listen", multiple=True, help="IP to listen on (default: all)."),
        click.option(
            "--relay",
            multiple=True,
            help="Behind NAT: address of a peer that forwards for you (repeatable).",
        ),
        click.option("--block", type=int, help="Train this block (default: the neediest)."),
        click.option("--data", help="Your own text instead of the run's: a file or folder."),
        click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, mps."),
        click.option("--threads", type=int, help="CPU threads of the training process."),
        click.option("--max-memory", type=float, help="GB that the training may take."),
        click.option("--max-gb-per-day", type=float, help="GB moved per day, both ways together."),
        click.option("--json", "as_json", is_flag=True, help="Events as JSON lines on stdout."),
        click.option("--verbose", is_flag=True, help="Say what happens inside."),
    )
    for option in reversed(options):  # decorators apply from the inside: --help shows this order
        command = option(command)
    return command


@click.command()
@click.argument("run_file", type=click.Path(path_type=Path))
@_host_options
def seed(run_file: Path, folder: Path | None, **options: Any) -> None:
    """Start a run, or go on with it, as its seed peer. It trains a block too.

    Prints the line that others paste to join. A restarted seed keeps its identity and its run.
    """
    from swarm.runfile import parse

    try:
        text = run_file.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {run_file}: {error.strerror}", "blockswarm init") from error
    home = folder or _state_home() / f"seed-{_safe(parse(text).name)}"
    _take_part(_started(text, home), home, (), True, options)


@click.command()
@click.argument("address", nargs=-1, required=True)
@_host_options
def join(address: tuple[str, ...], folder: Path | None, **options: Any) -> None:
    """Join a run through the ADDRESS of any of its peers (several are better than one).

    Nothing else is needed: the run says what to train on. Ctrl-C leaves; the same command goes on.
    SIGUSR1 pauses its training, SIGUSR2 lets it go on.
    """
    from swarm.runfile import run_id

    text = _run_of(address, folder)
    home = folder or _free_folder(_state_home() / run_id(text).hex()[:16])
    _make(home)
    _remember(home, text, address)
    _take_part(text, home, address, False, options)


swarm_commands = (seed, join)


def _take_part(
    text: bytes, home: Path, addresses: tuple[str, ...], is_seed: bool, options: dict[str, Any]
) -> None:
    from node.addresses import split_peer
    from node.daemon import ALL_INTERFACES, DaemonSettings
    from node.host import Host, HostSettings
    from node.network import NetworkSettings
    from swarm.runfile import expected_gb_per_day, parse, run_id, worker_memory_bytes

    level = logging.DEBUG if options["verbose"] else logging.ERROR
    logging.basicConfig(level=level, format="%(name)s: %(message)s")
    run = parse(text)
    if not options["as_json"]:
        memory, traffic = worker_memory_bytes(run), expected_gb_per_day(run, 2)
        say(f"run {run.name} ({run_id(text).hex()[:16]}): {run.run.model.blocks} blocks")
        say(f"this will take about {memory / 1e9:.1f} GB of memory and {traffic:.1f} GB a day")
    _make(home)
    hosts = tuple(options["listen"]) or ALL_INTERFACES
    port = options["port"] or _port_of_before(home, hosts)
    relays = tuple(options["relay"])
    for relay in relays:
        split_peer(relay)  # refuses what is no whole address, before p2pd does it in its own words
    reachability: Literal["auto", "private"] = "private" if relays else "auto"
    daemon = DaemonSettings(
        home / "identity", port=port, hosts=hosts, relays=relays, reachability=reachability
    )
    network = NetworkSettings(
        daemon,
        run_id(text),
        text,
        join=addresses,
        announce=tuple(options["announce"]),
        state_folder=home,
    )
    limit = options["max_memory"]
    settings = HostSettings(
        network,
        home,
        options["data"],
        options["block"],
        options["device"],
        options["threads"],
        int(limit * 1e9) if limit else 1 << 60,
        is_seed,
        None if options["max_gb_per_day"] is None else int(options["max_gb_per_day"] * 1e9),
    )
    host = Host(settings, say)
    _run_loop(_until_stopped(host, options["as_json"]))
    # All is saved, closed and ended. Unloading torch and hivemind takes seconds on a busy machine,
    # and whoever asked us to leave waits for it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


async def _until_stopped(host: Host, as_json: bool) -> None:
    """Run a host until Ctrl-C or SIGTERM; then let it leave, which takes seconds at most."""
    from swarm.events import RoundEvent, to_line

    loop = asyncio.get_running_loop()
    work = asyncio.create_task(host.run())
    asked: list[int] = []

    def stop(number: int) -> None:
        asked.append(number)
        if len(asked) == 1:  # a second one must not cut off the goodbye
            work.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    loop.add_signal_handler(signal.SIGUSR1, host.pause, True)
    loop.add_signal_handler(signal.SIGUSR2, host.pause, False)

    def show(event: Any) -> None:
        if as_json:
            with contextlib.suppress(OSError):  # nobody reads any more: the log file has it too
                print(to_line(event), flush=True)
        elif isinstance(event, RoundEvent):
            say(_line(event))

    host.events.listeners.append(show)
    invite = asyncio.create_task(_invite(host, as_json))
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await work
    finally:
        invite.cancel()
    say("left the run; the same command goes on with it")


async def _invite(host: Host, as_json: bool) -> None:
    """Print the addresses once the network is up."""
    while True:
        await asyncio.sleep(0.2)
        with contextlib.suppress(BlockswarmError):
            lines = await host.network.invitations()
            if lines:
                _keep_port(host)
                say("others join with:")
                for line in lines:
                    say(f"  blockswarm join {line}")
                return


def _keep_port(host: Host) -> None:
    """The addresses that others know of us stay right over a restart."""
    from node.atomic import StorageError, write_atomically

    text = str(host.network.daemon.port).encode()
    with contextlib.suppress(StorageError):
        write_atomically(host.settings.folder / PORT, lambda half: _write(half, text))


def _port_of_before(home: Path, hosts: tuple[str, ...]) -> int:
    """The port that this host had, if it is free; after a crash its p2pd holds it for a while."""
    from node.daemon import ORPHAN_S, DaemonError, PortInUse, free_port

    try:
        port = int((home / PORT).read_text())
    except (OSError, ValueError):
        return 0
    end_s = time.monotonic() + ORPHAN_S + 2.0
    while True:
        try:
            return free_port(hosts, port)[1]
        except PortInUse:
            if time.monotonic() > end_s:
                return 0
            time.sleep(0.2)
        except (DaemonError, OverflowError):
            return 0


def _line(event: Any) -> str:
    """A round in one line."""
    traffic = sum(t.sent_bytes + t.received_bytes for t in event.traffic)
    included = {True: "included", False: "left out", None: "not sent"}[event.included]
    ce = "" if event.consensus_ce_nats is None else f"  CE {event.consensus_ce_nats:.3f}"
    return (
        f"block {event.block}  round {event.round}  {event.outcome}, {included}"
        f"  peers {len(event.in_time)}+{len(event.late)} late{ce}  {traffic / 1e3:.0f} kB"
        f"  {event.consensus[:8]}"
    )


def _run_of(addresses: tuple[str, ...], folder: Path | None) -> bytes:
    """The run behind these addresses; if nobody is there, the one that was joined by them before.

    The peer that one joined through may be gone for ever; the folder knows others.
    """
    from node.invitation import NobodyAnswers, fetch_run

    try:
        return _run_loop(fetch_run(addresses))
    except NobodyAnswers:
        homes = [folder] if folder else sorted(_state_home().glob("*"))
        for home in homes:
            with contextlib.suppress(OSError):
                known = (home / JOINED).read_text().split()
                if folder or set(known) & set(addresses):
                    return (home / RUN).read_bytes()
        raise


def _remember(home: Path, text: bytes, addresses: tuple[str, ...]) -> None:
    from node.atomic import StorageError, write_atomically

    with contextlib.suppress(StorageError):  # the state cannot be saved either, and that is said
        write_atomically(home / RUN, lambda half: _write(half, text))
        joined = "\n".join(addresses).encode()
        write_atomically(home / JOINED, lambda half: _write(half, joined))


def _make(home: Path) -> None:
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot make the folder {home}: {error.strerror}", "choose another with --folder"
        ) from error


def _started(text: bytes, home: Path) -> bytes:
    """The run file with its start: the one of before if this seed was started before."""
    from node.atomic import write_atomically
    from swarm.runfile import parse, with_start

    kept = home / RUN
    if kept.exists():
        started = kept.read_bytes()
        start = parse(started).rounds.start_s
        if text == started or (not parse(text).started and with_start(text, start) == started):
            return started
        raise UsageError(
            f"{home} holds another run than this file", "give the new run a folder with --folder"
        )
    if not parse(text).started:
        text = with_start(text, int(time.time()) + START_DELAY_S)
    _make(home)
    write_atomically(kept, lambda half: _write(half, text))
    return text


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _state_home() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "blockswarm"


def _safe(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name).lower()


def _free_folder(base: Path) -> Path:
    """The first folder of this run whose identity no other process uses."""
    from protocol.identity import IdentityInUse, load_or_create

    for number in range(1, 65):
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            load_or_create(folder / "identity").close()
        except IdentityInUse:
            continue
        return folder
    raise UsageError("64 hosts of this run are on this machine already", "give --folder")


T = TypeVar("T")


def _run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run on uvloop where it exists."""
    factory = None
    if sys.platform != "win32":
        with contextlib.suppress(ImportError):
            import uvloop

            factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)
