"""Commands that take part in a swarm: seed, join.

Decides what can be typed and what it means; what happens then is `node.host.taking_part`'s, for
several workers `node.host.fleet`'s. Imports of torch and hivemind happen inside the commands:
`blockswarm --help` answers at once.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from node.commands.options import (
    FiniteRange,
    PathOption,
    meant_as_address,
)
from node.console.terminal import say
from node.host import home as homes
from node.host.options import HostOptions
from node.host.taking_part import Part, stoppable_at_once, take_part
from node.machine.phases import mark
from node.network.addresses import check_addresses
from protocol.errors import UsageError

C = TypeVar("C", bound=Any)

STATE = "~/.local/state/blockswarm"
RATE = FiniteRange(min=0, min_open=True)


def _host_options(command: C) -> C:
    """Options of every host. Their order here is that of --help."""
    options = (
        click.option(
            "--port",
            type=click.IntRange(0, 65535),
            default=0,
            help="TCP port to listen on (default: any free one, kept over restarts).",
        ),
        click.option(
            "--announce",
            multiple=True,
            metavar="IP",
            help="Public IP, name or multiaddress under which others reach this host, where it "
            "cannot know that by itself; needs --port (repeatable).",
        ),
        click.option(
            "--listen", multiple=True, metavar="IP", help="IP to listen on (default: all)."
        ),
        click.option(
            "--relay",
            multiple=True,
            metavar="ADDRESS",
            help="Behind NAT: address of a peer that forwards for you (repeatable).",
        ),
        click.option(
            "--block",
            type=click.IntRange(min=0),
            help="Train this block (default: the neediest that fits).",
        ),
        click.option("--data", help="Your own text instead of the run's: a file or folder."),
        click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, mps."),
        click.option(
            "--threads",
            type=click.IntRange(1, 1024),
            help="CPU threads of the training (default: torch's choice, usually all cores).",
        ),
        click.option(
            "--max-memory",
            type=RATE,
            metavar="GB",
            help="Take only a block that fits into so much (default: no limit).",
        ),
        click.option(
            "--max-gb-per-day",
            type=FiniteRange(min=0),
            metavar="GB",
            help="Moved per day, both ways together; beyond it, it trains on and exchanges "
            "nothing (default: no limit).",
        ),
        click.option(
            "--up-mbps",
            type=RATE,
            metavar="MBIT",
            help="Send at most so many Mbit/s (default: no limit).",
        ),
        click.option(
            "--down-mbps",
            type=RATE,
            metavar="MBIT",
            help="Receive at most so many Mbit/s (default: no limit).",
        ),
        click.option(
            "--no-serve",
            is_flag=True,
            help="Only train: do not answer `blockswarm generate ADDRESS` with this block.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Events as JSON lines on stdout."),
        click.option("--verbose", is_flag=True, help="Say what happens inside."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command(short_help="Start a run, or be one more peer to join it through.")
@click.argument("run", nargs=-1, metavar="[RUN]")
@click.option(
    "--folder",
    type=PathOption(),
    help=f"Where its state is kept (default: {STATE}/seed-NAME).",
)
@click.option("--no-train", is_flag=True, help="Hold no block: only let others find the run.")
@_host_options
def seed(run: tuple[str, ...], folder: Path | None, no_train: bool, **options: Any) -> None:
    """Start a run as its seed peer, or be a further seed of one. Prints the line to join with.

    \b
    RUN is what there is of the run:
      run.toml     its file: starts it, or goes on with it (same identity, same run)
      ADDRESS...   a peer of a run that is under way: a further seed of it
      FOLDER       the folder of a host that took part: goes on as a seed
    Without RUN, --folder says it.

    A seed trains a block like every host unless told not to. The run needs none of its seeds:
    every host can be joined through, and `blockswarm seed FOLDER` prints how.
    """
    typed = HostOptions(**options)
    typed.check()
    with stoppable_at_once():
        if any(map(meant_as_address, run)):
            check_addresses(run)
            if not no_train:
                _prepare()
            take_part(partial(_seed_behind, run, folder, typed, not no_train))
        text, home, addresses = _seed_source(run, folder)
        known = homes.invitations_in(home)
        if known and homes.in_use(home):
            say(f"a host runs in {home}, and every host can be joined through; this one with:")
            for line in known:
                print(f"blockswarm join {line}")
            return
        if not no_train:
            _prepare()
        take_part(partial(_at_hand, Part(text, home, addresses, True, typed, not no_train)))


async def _at_hand(part: Part) -> Part:
    return part


async def _seed_behind(
    addresses: tuple[str, ...], folder: Path | None, options: HostOptions, trains: bool
) -> Part:
    from node.host.joining import arrive

    here = await arrive(addresses, folder, options)
    return Part(here.text, here.home, addresses, True, options, trains, guest=here.guest)


def _prepare() -> None:
    """Start the process that will train: it imports torch while we look for the run."""
    from node.trainer import spare_process

    mark("python")
    spare_process.prepare()


def _seed_source(run: tuple[str, ...], folder: Path | None) -> tuple[bytes, Path, tuple[str, ...]]:
    """The run file, the seed's folder, and through whom it joins."""
    from swarm.runfile import parse

    if len(run) > 1:
        raise UsageError("RUN is one run file, one folder, or addresses", "blockswarm seed --help")
    if not run and folder is None:
        raise UsageError(
            "say which run: a run file, the folder of a host, or the address of a peer",
            "blockswarm init writes a run file; then: blockswarm seed run.toml",
        )
    path = Path(run[0]) if run else folder
    assert path is not None
    if path.is_dir() or not run:
        known = homes.run_in(path)
        if known is None:
            raise UsageError(
                f"{path} is not the folder of a host: there is no run.toml in it",
                "blockswarm seed run.toml starts a run",
            )
        home = folder or path
        if home != path:
            homes.make(home)
            homes.remember(home, known, homes.known_addresses(path))
        return known, home, homes.joined_through(home)
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror}", "blockswarm init writes a run file"
        ) from error
    home = folder or homes.seed_home(parse(text).name)
    return homes.started(text, home), home, ()


@click.command(short_help="Take part in a run: train a block of it.")
@click.argument("address", nargs=-1, required=True)
@click.option(
    "--folder",
    type=PathOption(),
    help=f"Where its state is kept (default: {STATE}/ID, ID of the run).",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Train so many blocks, a process each; limits and threads are shared among them.",
)
@click.option("--as-worker", type=int, hidden=True)
@click.option("--first-block", type=int, hidden=True)  # unlike --block it does not stay there
@_host_options
def join(
    address: tuple[str, ...],
    folder: Path | None,
    workers: int,
    as_worker: int | None,
    first_block: int | None,
    **options: Any,
) -> None:
    """Join a run through the ADDRESS of any of its peers (several are better than one).

    \b
    An ADDRESS is what `seed` and every host print, for example
      blockswarm join /ip4/203.0.113.7/tcp/4001/p2p/12D3Koo...

    Nothing else is needed: the run says what to train on. What it costs is said first. Ctrl-C
    leaves; the same command goes on. SIGUSR1 pauses the training, SIGUSR2 lets it go on.
    """
    check_addresses(address)
    typed = HostOptions(first_block=first_block, **options)
    typed.check()
    if workers > 1:
        from node.host.fleet import join_with_workers

        join_with_workers(address, folder, workers, typed)
        return
    with stoppable_at_once():
        _prepare()
        take_part(partial(_join, address, folder, as_worker, typed))


async def _join(
    addresses: tuple[str, ...], folder: Path | None, as_worker: int | None, options: HostOptions
) -> Part:
    """The run and the host's folder, with both remembered for the next time."""
    from node.host.joining import arrive

    known = homes.run_in(folder) if as_worker is not None and folder is not None else None
    if known is not None and folder is not None:  # its supervisor has asked already
        return Part(known, folder, addresses, False, options, worker=as_worker)
    here = await arrive(addresses, folder, options)
    return Part(here.text, here.home, addresses, False, options, worker=as_worker, guest=here.guest)


swarm_commands = (seed, join)
