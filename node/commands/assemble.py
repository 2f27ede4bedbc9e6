"""Commands that look at a run from outside: assemble, status.

Imports of torch and hivemind happen inside the commands: `blockswarm --help` answers at once.
"""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from node.commands.light import short_peer
from node.commands.options import PathOption
from node.console.amounts import size_words
from node.console.results import Facts, print_evaluation, print_json, table_lines
from node.console.terminal import DownloadDisplay, say
from node.machine.event_loop import run_loop
from node.network.addresses import check_addresses
from protocol.errors import UsageError

if TYPE_CHECKING:
    from node.report.status import BlockStatus, RunStatus

T = TypeVar("T")

STATUS_EVERY_S = 5.0
JSON_HELP = "One JSON object on stdout; with --watch one in every line."


@click.command(short_help="Put the blocks of a run together into one model.")
@click.argument("address", nargs=-1, required=True)
@click.option("-o", "--out", type=PathOption(), required=True, help="Model folder to write.")
@click.option("--watch", is_flag=True, help="Go on every round; keep the best by held-out CE.")
@click.option("--fit", is_flag=True, help="Fit the blocks' weights on held-out bytes.")
@click.option(
    "--without",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="BLOCK",
    help="Leave this block out (repeatable).",
)
@click.option("--allow-missing", is_flag=True, help="Leave out whatever block has no replica.")
@click.option(
    "--evaluate-bytes",
    type=click.IntRange(min=0),
    default=65536,
    show_default=True,
    help="Held-out bytes, of each split, for the CE; 0: none, and no text is needed.",
)
@click.option("--data", help="Text to evaluate on (default: what the run is trained on).")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1, mps.")
@click.option("--threads", type=int, help="CPU threads (default: torch's choice).")
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
def assemble(address: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Pull the latest consensus of every block of the run at ADDRESS into a model folder.

    \b
      blockswarm assemble /ip4/203.0.113.7/tcp/4001/p2p/12D3Koo... -o model/

    ADDRESS is what `seed` and every host print; several are better than one.
    Trains nothing and need not be reachable. Every block is checked against what its replicas have
    signed. The folder then works offline with `eval` and `generate`. The same command again pulls
    only what is new; Ctrl-C leaves a whole folder, with --watch that of the best model so far.
    """
    check_addresses(address)
    from node.assembly.job import AssembleOptions
    from node.assembly.job import assemble_model as run

    chosen = AssembleOptions(addresses=address, **options)
    shown: list[Facts] = []

    def show(facts: Facts) -> None:
        if facts["kept"] is not False:
            shown.append(facts)
        if not chosen.watch:
            return
        (print_json if as_json else _say_watched)(facts)

    with DownloadDisplay() as display:
        done = _Bytes(display)
        facts = run_loop(_until_stopped(run(chosen, say, done.add, show)))
    if facts is None and not (chosen.watch and shown):
        raise KeyboardInterrupt  # stopped before there was a model
    if facts is None:
        facts = {key: value for key, value in shown[-1].items() if key != "kept"}
    if as_json and not chosen.watch:
        print_json(facts)
    elif not as_json:
        print_assembly(facts)


class _Bytes:
    """Adds up what is pulled, over all blocks, for the display."""

    def __init__(self, display: Callable[[str, int, int], None]) -> None:
        self.display, self.total = display, 0

    def add(self, _: int, size_bytes: int) -> None:
        self.total += size_bytes
        self.display("pulling blocks", self.total, 0)


async def _until_stopped(work: Coroutine[Any, Any, T]) -> T | None:
    """The result, or None if Ctrl-C or SIGTERM came first; either way all is cleaned up."""
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(work)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    with suppress(asyncio.CancelledError):
        return await task
    return None


def _say_watched(facts: Facts) -> None:
    ce = facts["held_out_ce_nats"]
    judged = "not judged" if ce is None else f"held-out CE {ce:.4f}"
    if facts["kept"]:
        say(f"round {facts['round']}  {judged}  the best so far, written")
    elif facts["kept"] is None:
        say(f"round {facts['round']}  {judged}  is there from before")
    else:
        best = f"{facts['best_held_out_ce_nats']:.4f} of round {facts['best_round']}"
        say(f"round {facts['round']}  {judged}  not kept: the best is {best}")


def print_assembly(facts: Facts) -> None:
    """A short summary on standard output."""
    print(f"run {facts['name']} ({facts['run'][:16]}), as of round {facts['round']}")
    for block in facts["blocks"]:
        print(
            f"  block {block['block']:<3}  round {block['round']}  {block['consensus'][:12]}"
            f"  signed by {len(block['signers'])}, from {block['contributors_total']} contributors"
        )
    for block in facts["missing"]:
        print(f"  block {block:<3}  left out")
    if "ce_nats" in facts:
        print_evaluation(facts)
    received = facts["traffic"]["received_bytes"]
    print(f"{size_words(received)} received")
    print(f"model folder: {facts['model']}")
    print(f'let it write: blockswarm generate {shlex.quote(facts["model"])} --prompt "..."')


# Status.


@click.command(short_help="How a run stands: coverage, CE, agreement, who is late or left out.")
@click.argument("address", nargs=-1)
@click.option(
    "--folder",
    type=PathOption(),
    help="Without ADDRESS: of the run of this host's folder (default: the one used last).",
)
@click.option(
    "--k",
    "needed",
    type=click.IntRange(min=1),
    help="Warn of blocks with fewer live replicas (default: what the run says).",
)
@click.option("--watch", is_flag=True, help="Go on until Ctrl-C, once a round or every 5 s.")
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
def status(
    address: tuple[str, ...], folder: Path | None, needed: int | None, watch: bool, as_json: bool
) -> None:
    """Show the run at ADDRESS: the replicas of every block, from their own signed records.

    \b
      blockswarm status                 the run that this machine took part in last
      blockswarm status /ip4/203.0.113.7/tcp/4001/p2p/12D3Koo...

    Takes no part in training. CE is what replicas measured themselves, each on its own held-out
    bytes. A host that died is shown, as behind, until its record expires after 5 minutes.
    """
    check_addresses(address)
    known = None if address else _local_run(folder)

    def show(found: RunStatus) -> None:
        if as_json:
            print_json(found.facts())
        else:
            if watch and sys.stdout.isatty():
                print("\x1b[H\x1b[J", end="")
            print_status(found)

    work = _watch_status(address, known, needed, watch, show)
    if run_loop(_until_stopped(work)) is None and not watch:
        raise KeyboardInterrupt


def _local_run(folder: Path | None) -> tuple[bytes, tuple[str, ...]]:
    """The run of a host's folder on this machine, and the peers that it knew."""
    from node.host.home import known_addresses, latest_home, run_in

    home = folder or latest_home()
    text = run_in(home) if home else None
    if home is None or text is None:
        where = f"{folder} is not the folder of a host" if folder else "no host was here yet"
        raise UsageError(
            f"{where}, so there is no run to show",
            "give the address of a peer: blockswarm status ADDRESS",
        )
    addresses = known_addresses(home)
    if not addresses:
        raise UsageError(
            f"the host in {home} has met no peer yet", "give an address: blockswarm status ADDRESS"
        )
    return text, addresses


async def _watch_status(
    addresses: tuple[str, ...],
    known: tuple[bytes, tuple[str, ...]] | None,
    needed: int | None,
    watch: bool,
    show: Callable[[RunStatus], None],
) -> bool:
    from node.network.client import replicas_of, run_clock, visit
    from node.network.peers import NetworkPeers
    from node.report.status import look
    from swarm.runfile import parse, run_id

    known_text, through = known or (None, addresses)
    async with visit(through, say, known=known_text) as (text, network):
        run_file = parse(text)
        while True:
            now_s = (await run_clock(network)).run_time_s(time.time())
            records, peers = replicas_of(network), NetworkPeers(network)
            show(await look(run_file, run_id(text), records, peers, now_s, needed))
            if not watch:
                return True
            await asyncio.sleep(max(STATUS_EVERY_S, run_file.rounds.period_s))


def print_status(found: RunStatus) -> None:
    facts = found.facts()
    over = ", the run is over" if found.round >= found.rounds else ""
    number = min(found.round, found.rounds)
    print(f"run {found.name} ({found.run[:16]})  round {number} of {found.rounds}{over}")
    print(
        f"{facts['live']} live replicas of {len(found.blocks)} blocks, {facts['peers']} known; "
        f"their updates of this round: {size_words(facts['update_bytes'])}"
    )
    head = ("block", "live", "round", "CE", "own CE", "consensus", "agree", "update", "behind by")
    rows = [_block_row(block) for block in found.blocks]
    print("", *table_lines(head, rows, left=("consensus", "behind by")), "", sep="\n")
    for block in found.blocks:
        for words, peers in _out_of_the_last_round(block):
            print(f"block {block.block}, {words} {', '.join(map(short_peer, peers))}")
    for warning in found.warnings:
        print(f"warning: {warning}")


def _block_row(block: BlockStatus) -> tuple[str, ...]:
    behind = [
        f"{short_peer(r.peer)} ({r.behind_rounds} rounds)" for r in block.replicas if not r.live
    ]
    sizes = [r.update_bytes for r in block.replicas if r.live and r.update_bytes]
    return (
        str(block.block),
        str(block.live),
        str(block.consensus_round) if block.consensus_round >= 0 else "-",
        *("-" if nats is None else f"{nats:.3f}" for nats in (block.ce_nats, block.own_ce_nats)),
        block.consensus[:12] or "-",
        f"{block.agree}/{len(block.replicas)}" if block.replicas else "-",
        size_words(sum(sizes) / len(sizes)) if sizes else "-",
        ", ".join(behind) or "-",
    )


def _out_of_the_last_round(block: BlockStatus) -> list[tuple[str, tuple[str, ...]]]:
    last = block.last
    if last is None:
        return []
    round_ = f"round {last.round}"
    found = [(f"{round_} left out", last.left_out), (f"{round_} without an update of", last.absent)]
    return [(words, peers) for words, peers in found if peers]


assemble_commands = (assemble, status)
