"""Commands around serving: `serve`, and what `generate` does when it is given an address.

Imports of torch and hivemind happen inside the commands: `blockswarm --help` answers at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from node.commands.options import PathOption
from node.console.results import Facts, print_json
from node.console.terminal import ByteWriter, say
from node.host import home as homes
from node.host.options import names_a_port
from node.machine.event_loop import run_loop
from node.network.addresses import check_addresses, check_own_addresses
from protocol.errors import UsageError

if TYPE_CHECKING:
    from node.serving.host import ServingHost
    from node.serving.output import Output
    from swarm.writing.generate import Sampling

C = TypeVar("C", bound=Any)

MODES = ("one-sweep", "exact", "autoregressive", "denoise")
DRAFTS, DRAFT_LENGTH = 8, 32


def sweep_options(command: C) -> C:
    """Options of `generate` for a swarm that serves."""
    for option in (
        click.option("--scores", is_flag=True, help="Print the output's log-probability, too."),
        click.option(
            "--draft-length",
            type=click.IntRange(1, 4096),
            default=DRAFT_LENGTH,
            show_default=True,
            help="Bytes drafted for a traversal (exact).",
        ),
        click.option(
            "--drafts",
            type=click.IntRange(1, 32),
            default=DRAFTS,
            show_default=True,
            help="Whole drafts to choose from (one-sweep).",
        ),
        click.option(
            "--mode",
            type=click.Choice(MODES),
            default="one-sweep",
            show_default=True,
            help="A whole output, verified pieces, a byte per traversal, or all bytes from noise.",
        ),
    ):
        command = option(command)
    return command


def is_address(text: str) -> bool:
    """Whether an argument is a peer's multiaddress rather than a folder."""
    return text.startswith(("/ip4/", "/ip6/", "/dns")) and "/p2p/" in text


@click.command(short_help="Serve blocks of a run or of a model folder, without training.")
@click.argument("address", nargs=-1)
@click.option("--model", type=PathOption(), help="Serve from this model folder.")
@click.option("--block", type=int, multiple=True, help="Which block (repeatable; default: all).")
@click.option("--folder", type=PathOption(), help="Where its identity is kept.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="TCP port (default: any free one)."
)
@click.option("--announce", multiple=True, help="Public IP or multiaddress (repeatable).")
@click.option("--listen", multiple=True, help="IP to listen on (default: all).")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, mps.")
@click.option("--threads", type=int, help="CPU threads.")
def serve(address: tuple[str, ...], **options: Any) -> None:
    """Serve blocks: answer sweeps of `blockswarm generate ADDRESS`.

    With the ADDRESS of a run's peer it serves a block of that run and follows its training. With
    --model it serves from a model folder: the first host needs no ADDRESS and prints its own, the
    others are given it. All of them must have the same folder.
    """
    check_addresses(address)
    check_own_addresses(options["listen"], options["port"])
    for text in options["announce"]:
        names_a_port(text)  # refuses what is no address
    host = run_loop(_prepared(address, options))
    run_loop(until_stopped(host))


async def _prepared(addresses: tuple[str, ...], options: Mapping[str, Any]) -> ServingHost:
    from node.machine.device import choose_device, make_deterministic
    from node.network.daemon import ALL_INTERFACES, DaemonSettings
    from node.network.network import NetworkSettings
    from node.serving.host import ServeSettings, ServingHost, open_folder
    from node.serving.server import check_servable
    from swarm.runfile import parse, run_id

    if not addresses and options["model"] is None:
        raise UsageError(
            "there is nothing to serve", "give the ADDRESS of a run's peer, or --model FOLDER"
        )
    make_deterministic(options["threads"])
    device = choose_device(options["device"])
    folder = open_folder(options["model"], device) if options["model"] else None
    text = await _run_behind(addresses) if addresses else folder.run_file if folder else b""
    run = parse(text).run
    check_servable(run)
    if folder is not None and folder.model.run.model != run.model:
        raise UsageError(
            "the run at this address has another model than the folder",
            "serve the folder without ADDRESS, or assemble that run",
        )
    own = homes.state_home() / f"serve-{run_id(text).hex()[:16]}"
    home = options["folder"] or homes.free_folder(own)
    homes.make(home)
    hosts = tuple(options["listen"]) or ALL_INTERFACES
    daemon = DaemonSettings(home / "identity", port=options["port"], hosts=hosts)
    network = NetworkSettings(
        daemon,
        run_id(text),
        text,
        join=addresses,
        announce=tuple(options["announce"]),
        blocks=run.model.blocks,
    )
    blocks = tuple(sorted(set(options["block"]))) or tuple(range(run.model.blocks))
    return ServingHost(ServeSettings(network, blocks, device, folder), say)


async def _run_behind(addresses: tuple[str, ...]) -> bytes:
    from node.network.client import guest

    async with guest() as visitor:
        return await visitor.fetch_run(addresses)


async def until_stopped(host: ServingHost) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    loop = asyncio.get_running_loop()
    work = asyncio.create_task(host.run())
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, work.cancel)
    telling = asyncio.create_task(_tell(host))
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await work
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


async def _tell(host: ServingHost) -> None:
    """What it serves, as soon as it holds it; until then, what it waits for."""
    await host.announced.wait()
    left = set(host.settings.blocks)
    if host.new_blocks.empty():
        say(
            f"waiting for the weights of block {_listed(left)} from the hosts that train it "
            "(a new run has none before its first round is over)"
        )
    while left:
        new = {await host.new_blocks.get()}
        while not host.new_blocks.empty():
            new.add(host.new_blocks.get_nowait())
        if left == set(host.settings.blocks):
            say(f"serving block {_listed(new)}; let it write with:")
            for line in await host.network.invitations():
                say(f"  blockswarm generate {line}")
        else:
            say(f"serving block {_listed(new)}, too")
        left -= new


def _listed(blocks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(blocks)))


# Generating.


def generate_from_swarm(
    address: str,
    prompt: str,
    length: int,
    sampling: Sampling,
    as_json: bool,
    options: Mapping[str, Any],
) -> None:
    """What `generate ADDRESS` does: bytes to standard output as they are verified.

    The prompt goes with the first of them: an output that fails before has written nothing.
    """
    out = None if as_json else ByteWriter()
    start = os.fsencode(prompt)
    facts = run_loop(_generate(address, start, length, sampling, options, out))
    if as_json:
        print_json(facts)
        return
    rate = facts["length_bytes"] / max(facts["seconds"], 1e-9)
    line = f"{facts['traversals']} traversals, {facts['seconds']:.2f} s, {rate:.0f} bytes/s"
    say(f"{line}, {facts['wire_bytes']} bytes on our wire")
    if options["scores"]:
        nats = facts["score_nats"]
        say(f"log-probability {nats:.2f} nats, {nats / facts['length_bytes']:.3f} per byte")


async def _generate(
    address: str,
    prompt: bytes,
    length: int,
    sampling: Sampling,
    options: Mapping[str, Any],
    out: ByteWriter | None,
) -> Facts:
    from node.network.client import NO_ROLE, guest
    from node.serving.client import SweepClient
    from node.serving.output import Order, Output, check_without
    from node.serving.server import check_servable
    from swarm.runfile import parse, run_id
    from swarm.writing.denoise import require_denoising

    mode, joint = options["mode"], options["mode"] == "denoise"
    draft_length = {"exact": options["draft_length"], "autoregressive": 0}.get(mode)
    without = tuple(options["without"])
    order = Order(
        prompt, length, sampling, options["drafts"], draft_length, joint=joint, without=without
    )
    async with guest() as visitor:
        text = await visitor.fetch_run([address])
        run = parse(text).run
        check_servable(run)
        check_without(run, without)
        if joint:
            require_denoising(run)
        async with visitor.network(text, [address], say, NO_ROLE) as network:
            client = SweepClient(network, run_id(text), run, say)
            try:
                output = Output(client, order)
                written = await _write(output, prompt, out)
            finally:
                await client.close()
            facts = _facts(output, written, prompt, mode)
            facts["wire_bytes"] = _serving_bytes(network)
    return facts


async def _write(output: Output, prompt: bytes, out: ByteWriter | None) -> bytes:
    """Hand the pieces on as they come; all of them."""
    written = bytearray()
    async for piece in output.write():
        if out is not None:
            out.write(piece if written else prompt + piece)
        written += piece
    if out is not None:
        out.close()
    return bytes(written)


def _serving_bytes(network: Any) -> int:
    from protocol.messages import Purpose

    count = network.ledger.by_purpose().get(Purpose.SERVING)
    return 0 if count is None else int(count.bytes_in + count.bytes_out)


def _facts(output: Output, written: bytes, prompt: bytes, mode: str) -> Facts:
    figures = output.figures
    return {
        "prompt": prompt.decode(errors="replace"),
        "text": written.decode(errors="replace"),
        "hex": written.hex(),
        "length_bytes": len(written),
        "mode": mode,
        "traversals": figures.traversals,
        "failures": figures.failures,
        "troubles": figures.troubles,
        "seconds": figures.seconds,
        "first_s": figures.first_s,
        "score_nats": figures.score_nats,
        "missing_blocks": list(figures.missing),
    }


serve_commands = (serve,)
