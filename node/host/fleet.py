"""`join --workers N`: which run, which block for each worker, then the supervisor.

Decides the blocks: different ones as far as possible, the neediest first, those of before for
workers that were here before. That is where a worker begins: it may move to a block that falls in
need, as every host. Looks the run up in a process that ends right after, because the network's
libraries would cost the supervisor 300 MB for nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack

from node.console.amounts import size_words
from node.console.terminal import say
from node.host.home import free_folder, make, remember, state_home
from node.host.live_line import RunTimes
from node.host.options import HostOptions
from node.host.taking_part import say_cost, say_if_over
from node.host.workers import Supervisor, command_of, worker_home
from node.machine.event_loop import run_loop
from protocol.errors import BlockswarmError, UsageError
from protocol.identity import load_or_create
from swarm.assignment import BlockView, HostLimits, several
from swarm.cost import worker_memory_bytes
from swarm.rounds.clock import round_at
from swarm.runfile import RunFile, parse, run_id

if TYPE_CHECKING:
    from node.network.network import Network

MAX_STATE_BYTES = 1 << 20


@dataclass(frozen=True)
class FoundRun:
    """The run behind some addresses, and how many hosts train each block."""

    text: bytes
    replicas: tuple[int, ...]


def join_with_workers(
    addresses: tuple[str, ...], folder: Path | None, count: int, options: HostOptions
) -> None:
    """Run `count` workers until asked to leave."""
    options.check_shared(count)
    found = look_up(addresses, folder)
    run_file = parse(found.text)
    base = state_home() / f"{run_id(found.text).hex()[:16]}-workers"
    home = folder or free_folder(base)
    make(home)
    lock = load_or_create(home / "identity")  # nobody else's workers are in this folder
    try:
        remember(home, found.text, addresses)
        if not options.as_json:
            say(f"run {run_file.name} ({run_id(found.text).hex()[:16]}): {count} workers")
            say_cost(run_file, home, options, count)
            say_if_over(run_file, addresses)
        blocks = blocks_for(home, count, options.memory_bytes, found, run_file)
        commands = _commands(addresses, home, blocks, options, found.text)
        rounds = run_file.rounds
        times = RunTimes(rounds.start_s, rounds.period_s, rounds.count)
        run_loop(
            _until_stopped(
                Supervisor(commands, blocks, times, options.bytes_per_day, options.as_json)
            )
        )
    finally:
        lock.close()
    say("all workers have left; the same command goes on with them")


def _commands(
    addresses: tuple[str, ...],
    home: Path,
    blocks: Sequence[int],
    options: HostOptions,
    text: bytes,
) -> list[list[str]]:
    commands, count = [], len(blocks)
    for index, block in enumerate(blocks):
        own = worker_home(home, index)
        make(own)
        remember(own, text, addresses)
        shared = replace(options.shared(count, index, os.cpu_count() or 1), first_block=block)
        commands.append(command_of(addresses, home, index, shared))
    return commands


def blocks_for(
    home: Path, count: int, memory: int | None, found: FoundRun, run_file: RunFile
) -> list[int]:
    """A block for each worker. Raises `UsageError` if not all of them fit."""
    known = [saved_block(worker_home(home, index)) for index in range(count)]
    kept = [
        block if block is not None and block < run_file.run.model.blocks else None
        for block in known
    ]
    limits = HostLimits(1 << 60 if memory is None else memory // count, 1 << 60)
    views = [
        BlockView(block, replicas, worker_memory_bytes(run_file, block), 0)
        for block, replicas in enumerate(found.replicas)
    ]
    missing = sum(block is None for block in kept)
    taken = [block for block in kept if block is not None]
    new = several(views, limits, taken, missing, random.Random())
    if len(new) < missing:
        least = count * min(view.memory_bytes for view in views)
        raise UsageError(
            f"{count} workers need {size_words(least)} of memory, "
            f"--max-memory allows {size_words(memory or 0)}",
            "raise --max-memory, or start fewer with --workers",
        )
    return [new.pop() if block is None else block for block in kept]


def saved_block(home: Path) -> int | None:
    """The block that a worker trained before, if it was here before."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        with open(home / "state.json", "rb") as file:
            block = json.loads(file.read(MAX_STATE_BYTES))["block"]
        return block if type(block) is int and block >= 0 else None
    return None


async def _until_stopped(supervisor: Supervisor) -> None:
    loop = asyncio.get_running_loop()
    work = asyncio.create_task(supervisor.run())
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, work.cancel)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        loop.add_signal_handler(number, supervisor.signal, number)
    with contextlib.suppress(asyncio.CancelledError):
        await work


# Looking the run up.


def look_up(addresses: Sequence[str], folder: Path | None) -> FoundRun:
    """In a process of its own. Raises what went wrong there."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_look_up_and_send, args=(theirs, tuple(addresses), folder), daemon=True
    )
    process.start()
    theirs.close()
    try:
        answer = msgpack.unpackb(ours.recv_bytes())
    except EOFError:
        raise BlockswarmError("the run could not be looked up", "blockswarm doctor") from None
    finally:
        process.join()
        ours.close()
    if "error" in answer:
        raise BlockswarmError(answer["error"], answer["hint"])
    return FoundRun(answer["text"], tuple(answer["replicas"]))


def _look_up_and_send(
    connection: Connection, addresses: tuple[str, ...], folder: Path | None
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        found = run_loop(_look_up(addresses, folder))
        answer: dict[str, Any] = {"text": found.text, "replicas": list(found.replicas)}
    except BlockswarmError as error:
        answer = {"error": error.message, "hint": error.hint}
    connection.send_bytes(msgpack.packb(answer))


async def _look_up(addresses: tuple[str, ...], folder: Path | None) -> FoundRun:
    from node.host.joining import run_of
    from node.network.client import guest, run_clock
    from node.network.network import NobodyThere
    from protocol.records import Role

    async with guest() as visitor:
        text = await run_of(visitor, addresses, folder)
        run_file = parse(text)
        counts: tuple[int, ...] = (0,) * run_file.run.model.blocks
        with contextlib.suppress(NobodyThere):  # workers that were here before know other peers
            async with visitor.network(text, addresses, lambda _: None, Role(0)) as network:
                now_s = (await run_clock(network)).run_time_s(time.time())
                counts = await _hosts(network, run_file, now_s)
    return FoundRun(text, counts)


async def _hosts(network: Network, run_file: RunFile, now_s: float) -> tuple[int, ...]:
    """How many hosts train each block, by the same rule as a host that chooses for itself."""
    from node.host.block_choice import hosts_of
    from protocol.errors import WireError

    rounds = run_file.rounds
    number = round_at(now_s, rounds.start_s, rounds.period_s)
    counts = [0] * run_file.run.model.blocks
    for block in range(len(counts)):
        with contextlib.suppress(WireError):  # nobody answers for it: then it needs us
            counts[block] = len(await hosts_of(network, block, number))
    return tuple(counts)
