"""Hosts spread over blocks, stay there, and take over what lost its replicas."""

from __future__ import annotations

import random

import pytest

from swarm.assignment import (
    BlockView,
    HostLimits,
    first_choice,
    move,
    must_stay,
    needy_rounds_after,
    several,
)

ROOMY = HostLimits(10**9, 10**9)


class Town:
    """Hosts on blocks, all deciding at the same moment in each round."""

    def __init__(
        self, hosts: int, blocks: int, seed: int, minimum: int = 1, batch: int = 1
    ) -> None:
        self.rng, self.blocks, self.minimum = random.Random(seed), blocks, minimum
        self.place: dict[str, int] = {}
        self.since: dict[str, int] = {}
        self.needy: dict[int, int] = {}
        self.round, self.moves = 0, 0
        for start in range(0, hosts, batch):
            view = self.view()
            for i in range(start, min(start + batch, hosts)):
                choice = first_choice(view, ROOMY, self.rng)
                assert choice is not None
                self.place[f"h{i}"], self.since[f"h{i}"] = choice, 0

    def view(self) -> list[BlockView]:
        counts = list(self.place.values())
        return [BlockView(b, counts.count(b), 1, 1, self.minimum) for b in range(self.blocks)]

    def turn(self) -> None:
        self.round += 1
        view, before = self.view(), dict(self.place)
        self.needy = needy_rounds_after(self.needy, view)
        for host, own in before.items():
            mates = [h for h, b in before.items() if b == own]
            target = move(
                own,
                view,
                ROOMY,
                self.round - self.since[host],
                self.needy,
                self.rng,
                stays=must_stay(host, mates, self.minimum),
            )
            if target is not None:
                self.place[host], self.since[host] = target, self.round
                self.moves += 1


@pytest.mark.parametrize("seed", range(10))
def test_six_hosts_settle_on_four_blocks(seed: int) -> None:
    town = Town(6, 4, seed, batch=6)  # all at once: nobody sees the others' choice
    for _ in range(40):
        town.turn()
    assert all(view.replicas >= 1 for view in town.view())
    settled = town.moves
    for _ in range(40):
        town.turn()
    assert town.moves == settled <= 6


@pytest.mark.parametrize("seed", range(3))
def test_two_hundred_hosts_settle_and_take_over(seed: int) -> None:
    town = Town(200, 12, seed, minimum=4, batch=20)
    for _ in range(20):
        town.turn()
    assert town.moves <= 10
    assert min(view.replicas for view in town.view()) >= 4
    town.place = {h: b for h, b in town.place.items() if b != 5}  # block 5 is gone
    before = town.moves
    for _ in range(25):
        town.turn()
    assert all(view.replicas >= 4 for view in town.view())
    assert town.moves - before <= 16
    settled = town.moves
    for _ in range(30):
        town.turn()
    assert town.moves == settled


def test_limits() -> None:
    rng = random.Random(0)
    views = [BlockView(0, 0, 100, 1), BlockView(1, 5, 1, 1), BlockView(2, 3, 1, 100)]
    assert first_choice(views, HostLimits(10, 10), rng) == 1
    assert first_choice(views, HostLimits(0, 0), rng) is None
    assert move(1, views, HostLimits(10, 10), 99, {0: 99}, rng, stays=False) is None


def test_not_all_of_a_block_leave() -> None:
    mates = ["a", "b", "c", "d"]
    assert sum(must_stay(me, mates, 2) for me in mates) == 2


def test_several_workers_of_a_host_take_different_blocks() -> None:
    views = [BlockView(b, replicas, 100, 0) for b, replicas in enumerate((3, 0, 1, 0))]
    limits, rng = HostLimits(100, 0), random.Random(1)
    assert sorted(several(views, limits, [], 2, rng)) == [1, 3]
    assert several(views, limits, [1, 3], 1, rng) == [2]
    assert sorted(several(views, limits, [], 4, rng)) == [0, 1, 2, 3]
    # Only when every block has one of ours does one get a second, the neediest first.
    assert sorted(several(views, limits, [0, 1, 2, 3], 2, rng)) == [1, 3]


def test_several_leaves_out_what_does_not_fit() -> None:
    views = [BlockView(0, 0, 500, 0), BlockView(1, 9, 100, 0)]
    assert several(views, HostLimits(100, 0), [], 3, random.Random(1)) == [1, 1, 1]
    assert several(views, HostLimits(50, 0), [], 3, random.Random(1)) == []
