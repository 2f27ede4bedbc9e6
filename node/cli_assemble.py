"""Commands that look at a run from outside: assemble, status.

Imports of torch and hivemind happen inside the commands: `blockswarm --help` answers at once.
"""

from __future__ import annotations

import asyncio
import shlex
import signal
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from node.cli_light import short_peer
from node.cli_report import Facts, print_evaluation, print_json
from node.cli_swarm import _run_loop
from node.terminal import DownloadDisplay, say

if TYPE_CHECKING:
    from node.status import BlockStatus, RunStatus

T = TypeVar("T")

STATUS_EVERY_S = 5.0
JSON_HELP = "One JSON object on stdout; with --watch one in every line."


@click.command(short_help="Put the blocks of a run together into one model.")
@click.argument("address", nargs=-1, required=True)
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), required=True, help="Model folder to write."
)
@click.option("--watch", is_flag=True, help="Go on every round; keep the best by held-out CE.")
@click.option("--fit", is_flag=True, help="Fit the blocks' weights on held-out bytes.")
@click.option("--without", type=int, multiple=True, help="Leave this block out (repeatable).")
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

    Trains nothing and need not be reachable. Every block is checked against what its replicas have
    signed. The folder then works offline with `eval` and `generate`. The same command again pulls
    only what is new; Ctrl-C leaves a whole folder, with --watch that of the best model so far.
    """
    from node.assemble_job import AssembleOptions
    from node.assemble_job import assemble as run

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
        facts = _run_loop(_until_stopped(run(chosen, say, done.add, show)))
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
    print(f"{received / 1e6:.2f} MB received")
    print(f"model folder: {facts['model']}")
    print(f'let it write: blockswarm generate {shlex.quote(facts["model"])} --prompt "..."')


# Status.


@click.command(short_help="How a run stands: coverage, agreement, who is behind.")
@click.argument("address", nargs=-1, required=True)
@click.option("--watch", is_flag=True, help="Go on until Ctrl-C, once a round or every 5 s.")
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
def status(address: tuple[str, ...], watch: bool, as_json: bool) -> None:
    """Show the run at ADDRESS: the replicas of every block, from their own signed records.

    Warns of blocks with fewer live replicas than the run wants. Takes no part in training. A host
    that died is shown, as behind, until its record expires.
    """

    def show(found: RunStatus) -> None:
        if as_json:
            print_json(found.facts())
        else:
            print_status(found)

    if _run_loop(_until_stopped(_watch_status(address, watch, show))) is None and not watch:
        raise KeyboardInterrupt


async def _watch_status(
    addresses: tuple[str, ...], watch: bool, show: Callable[[RunStatus], None]
) -> bool:
    from node.client import client_network, replicas_of, run_clock
    from node.invitation import fetch_run
    from node.network import NetworkPeers
    from node.status import look
    from protocol.records import Role
    from swarm.runfile import parse, run_id

    text = await fetch_run(addresses)
    run_file = parse(text)
    async with client_network(text, addresses, say, Role(0)) as network:
        while True:
            now_s = (await run_clock(network)).run_time_s(time.time())
            records, peers = replicas_of(network), NetworkPeers(network)
            show(await look(run_file, run_id(text), records, peers, now_s))
            if not watch:
                return True
            await asyncio.sleep(max(STATUS_EVERY_S, run_file.rounds.period_s))


def print_status(found: RunStatus) -> None:
    facts = found.facts()
    print(f"run {found.name} ({found.run[:16]})  round {found.round} of {found.rounds}")
    print(f"{facts['live']} live replicas of {len(found.blocks)} blocks, {facts['peers']} known")
    print()
    print("block  live  round  consensus     agree  behind")
    for block in found.blocks:
        print(_block_line(block))
    print()
    for warning in found.warnings:
        print(f"warning: {warning}")


def _block_line(block: BlockStatus) -> str:
    behind = [f"{short_peer(r.peer)} ({r.behind_rounds})" for r in block.replicas if not r.live]
    line = (
        f"{block.block:>5}  {block.live:>4}  {block.consensus_round:>5}  "
        f"{block.consensus[:12] or '-':<12}  {f'{block.agree}/{len(block.replicas)}':>5}  "
        f"{', '.join(behind) or '-'}"
    )
    if block.last is not None and block.last.left_out:
        left_out = ", ".join(map(short_peer, block.last.left_out))
        line += f"\n       round {block.last.round} left out {left_out}"
    return line


assemble_commands = (assemble, status)
