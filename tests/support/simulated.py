"""A simulated swarm under the hands of a test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from node.replica.replica import Replica
from node.simulator.scenario import Scenario
from node.simulator.virtual_time import run_virtually
from node.simulator.world import World
from protocol.log import Entry

Hand = Callable[[World], Coroutine[Any, Any, None]]


async def no_hand(world: World) -> None:
    """Nothing is done to it."""


def simulated(
    scenario: Scenario,
    folder: Path,
    seed: int = 0,
    hand: Hand = no_hand,
    replica: type[Replica] = Replica,
) -> World:
    """The world after its end. `hand` acts in it meanwhile."""

    async def life() -> World:
        world = World(scenario, seed, folder, replica=replica)
        acting = asyncio.create_task(hand(world))
        await world.run()
        await acting
        assert world.story.errors == []
        return world

    return run_virtually(life())


def entries(world: World, name: str) -> tuple[Entry, ...]:
    """The log of a host."""
    work = world.hosts[name].work
    assert work is not None
    return work.replica.state.log.entries


def left_out(world: World, name: str, by: str = "h0") -> list[int]:
    """The rounds in which the rule left an update out of the agreed set."""
    parts = [(entry.round, entry.contribution_of(name)) for entry in entries(world, by)]
    return [number for number, part in parts if part is not None and part.scale == 0]
