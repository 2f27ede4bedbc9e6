"""Simulated swarms: agreement, faults, partitions, newcomers, clocks, liars."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from node.simulator.liar import Lie
from node.simulator.scenario import Fault, Link, Scenario, with_storm
from node.simulator.world import World
from swarm.consensus.forks import YOUNG
from swarm.consensus.log import MoveMode
from swarm.events import MoveEvent, NodeEvent
from tests.support.paths import ROOT
from tests.support.simulated import entries, left_out, simulated

FOUR = Scenario(hosts=4, blocks=1, rounds=30, link=Link(loss=0.02))


def error(world: World) -> float:
    """How far the consensus is from the middle of the goals, as a part of the way to it."""
    work = world.hosts["h0"].work
    assert work is not None
    flat = work.replica.consensus.weights * 2.0**-24
    goal = np.mean([trainer.goal for trainer in world.trainers.values()], axis=0)
    return float(np.abs(flat - goal).mean() / np.abs(goal).mean())


def moves(world: World, name: str) -> list[MoveEvent]:
    return [e for _, who, e in world.story.events if who == name and isinstance(e, MoveEvent)]


def test_one_seed_one_story() -> None:
    """Also with another order of sets, in another process."""
    told = []
    for salt in ("1", "2"):
        line = "simulate --hosts 6 --rounds 8 --loss 0.1 --storm 2 --seed 5 --json"
        command = [sys.executable, "-m", "node.cli", *line.split()]
        environment = {**os.environ, "PYTHONHASHSEED": salt, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False)
        told.append(json.loads(done.stdout))
    for one in told:
        del one["seconds"]
    assert told[0] == told[1]


def test_another_seed_is_another_story(tmp_path: Path) -> None:
    small = Scenario(hosts=2, blocks=1, rounds=3)
    worlds = [simulated(small, tmp_path / str(seed), seed) for seed in (1, 2)]
    assert worlds[0].story.digest != worlds[1].story.digest


def test_four_replicas_agree_over_fifty_rounds(tmp_path: Path) -> None:
    scenario = Scenario(hosts=4, blocks=1, rounds=50, link=Link(loss=0.05))
    world = simulated(scenario, tmp_path)
    assert world.story.troubles(scenario.calm_rounds()) == []
    assert all(entries(world, name)[-1].round == 50 for name in scenario.names)
    assert error(world) < 0.1


@pytest.mark.parametrize("seed", range(2))
def test_killed_and_late_agree_again_within_three_rounds(tmp_path: Path, seed: int) -> None:
    scenario = Scenario(
        hosts=5,
        blocks=1,
        rounds=24,
        link=Link(loss=0.02),
        faults=(
            Fault(10.05, kill=("h0",)),
            Fault(10.1, kill=("h1",)),
            Fault(14.4, start=("h1",)),
        ),
        later={"h4": 12.5},
    )
    world = simulated(scenario, tmp_path, seed)
    at = {look.round: look for look in world.story.looks}
    assert not at[17].apart and at[17].hosts == 4
    assert world.story.troubles(scenario.calm_rounds()) == []
    log = entries(world, "h2")
    senders = {name: world.hosts[name].me for name in ("h1", "h2", "h3", "h4")}
    assert set(senders.values()) <= {c.sender for c in log[-1].contributions} | {
        c.sender for c in log[-2].contributions
    }
    first = min(e.round for e in log if e.contribution_of(senders["h4"]))
    assert first >= 13  # no weight in its first round
    resumed = [e for _, name, e in world.story.events if name == "h1" and isinstance(e, NodeEvent)]
    assert "resumed" in [event.what for event in resumed]


@pytest.mark.parametrize("rounds", [2, 10])
def test_partition_and_merge_keep_both_sides(tmp_path: Path, rounds: int) -> None:
    """Each side learns other weights; after the merge the consensus has learned both."""
    small = ("h0", "h1")
    scenario = Scenario(
        hosts=6,
        blocks=1,
        rounds=rounds + 24,
        learning=0.15,
        faults=(Fault(4.9, cut=small), Fault(4.9 + rounds, heal=True)),
    )
    seen: dict[str, Any] = {}

    async def teach(world: World) -> None:
        await world.until_round(4.89)
        seen["start"] = consensus(world, "h2")
        half = len(seen["start"]) // 2
        for name, trainer in world.trainers.items():
            mine = slice(0, half) if name in small else slice(half, None)
            trainer.goal = trainer.weights.copy()
            trainer.goal[mine] += 1.0
        await world.until_round(4.85 + rounds)
        seen["apart"] = set(world.heads()[0].values())
        for trainer in world.trainers.values():
            trainer.learning = 0.0
        await world.until_round(4.9 + rounds + 3)
        seen["together"] = set(world.heads()[0].values())

    world = simulated(scenario, tmp_path, hand=teach)
    assert (len(seen["apart"]), len(seen["together"])) == (2, 1)
    assert [bool(moves(world, name)) for name in (*small, "h2", "h3")] == [True, True, False, False]
    mode = moves(world, "h0")[0].mode
    assert mode == (MoveMode.MERGE if rounds > 4 else MoveMode.REBASE).value
    gained = consensus(world, "h2") - seen["start"]
    half = len(gained) // 2
    assert gained[:half].mean() > 0.1  # of the two
    assert gained[half:].mean() > 0.2  # of the four


def consensus(world: World, name: str) -> Any:
    work = world.hosts[name].work
    assert work is not None
    return work.replica.consensus.weights * 2.0**-24


@pytest.mark.parametrize(("few", "more"), [(1, 1), (1, 4), (2, 3)])
def test_sides_that_began_a_block_apart_find_together(tmp_path: Path, few: int, more: int) -> None:
    """By its log each side is strangers to the other, until each has taken the other's updates."""
    names = tuple(f"h{number}" for number in range(few))
    scenario = Scenario(
        hosts=few + more,
        blocks=1,
        rounds=46,
        faults=(Fault(-0.3, cut=names), Fault(30.9, heal=True)),
    )
    world = simulated(scenario, tmp_path, few + more)
    at = {look.round: look for look in world.story.looks}
    assert len(set(at[30].heads[0].values())) == 2 and YOUNG < 30
    assert not at[36].apart
    if few < more:
        moved = {name for name in scenario.names if moves(world, name)}
        assert moved == set(names)
    counts = {c.sender for e in entries(world, f"h{few}")[-8:] for c in e.contributions}
    assert len(counts) == few + more


def test_a_host_alone_trains_on(tmp_path: Path) -> None:
    world = simulated(Scenario(hosts=1, blocks=1, rounds=30), tmp_path)
    assert entries(world, "h0")[-1].round == 30
    assert error(world) < 0.15


def test_skewed_clocks(tmp_path: Path) -> None:
    skews_s = {"h0": -2.0, "h1": 2.0, "h3": 1.5, "h4": -1.0, "h5": 0.3}
    scenario = Scenario(hosts=6, blocks=1, rounds=16, skews_s=skews_s, link=Link(loss=0.02))
    world = simulated(scenario, tmp_path)
    assert world.story.troubles(scenario.calm_rounds()) == []
    assert len({c.sender for e in entries(world, "h0")[-4:] for c in e.contributions}) == 6


CAUGHT = (Lie.SIGN_FLIP, Lie.SCALE, Lie.MALFORMED, Lie.SILENT, Lie.REPLAY, Lie.NAN, Lie.COPY)


@pytest.mark.parametrize(
    "lie", [*CAUGHT, Lie.NOISE, Lie.STALE, Lie.TWO_FACED, Lie.OTHER_BLOCK, Lie.OVERSIZED]
)
def test_one_of_four_lies(tmp_path: Path, lie: Lie) -> None:
    scenario = replace(FOUR, rounds=24, lies={"h3": lie}, same_text=lie is Lie.NOISE)
    world = simulated(scenario, tmp_path)
    log = entries(world, "h0")
    liar = world.hosts["h3"].me
    learning = [e.contribution_of(liar) for e in log if e.round <= 20]
    went_in = sum(part is not None and part.scale > 0 for part in learning)
    assert log[-1].round >= 23
    if lie in (*CAUGHT, Lie.OTHER_BLOCK, Lie.OVERSIZED):
        assert went_in <= 2
    if lie is Lie.NOISE:
        assert went_in <= 12
    assert not any(left_out(world, world.hosts[f"h{i}"].me) for i in range(3))
    assert error(world) < (0.4 if lie is Lie.STALE else 0.2)
    if lie in (Lie.MALFORMED, Lie.REPLAY):
        work = world.hosts["h0"].work
        assert work is not None and work.replica.state.trust.of(liar).exclusions >= 1


@pytest.mark.parametrize("noise", [0.0005, 0.05])
def test_honest_replicas_that_have_converged_are_not_left_out(tmp_path: Path, noise: float) -> None:
    """In the end each pulls toward its own goal, and their updates cancel."""
    scenario = Scenario(hosts=4, blocks=1, rounds=70, noise=noise, link=Link(loss=0.02))
    world = simulated(scenario, tmp_path)
    rounds = [left_out(world, world.hosts[name].me) for name in scenario.names]
    assert sum(map(len, rounds)) <= (4 if noise > 0.01 else 0), rounds


def test_blocks_that_read_each_other(tmp_path: Path) -> None:
    """Relay and look-ahead: every host follows the logs of the blocks that its own reads."""
    scenario = with_storm(Scenario(hosts=9, blocks=3, rounds=14, link=Link(loss=0.01)), 2, 3)
    world = simulated(scenario, tmp_path)
    assert world.story.troubles(scenario.calm_rounds()) == []
    followed = {name: set(world.trainers[name].copies) for name in ("h0", "h1", "h2")}
    assert followed == {"h0": {1}, "h1": {0, 2}, "h2": {0, 1}}
    work = world.hosts["h1"].work
    assert work is not None
    assert max(work.copies.ages(14)) <= 3
