"""Swarms on a network that loses, delays and splits as hypothesis likes, every action watched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from node.replica.replica import Replica
from node.simulator.scenario import Fault, Link, Scenario
from node.simulator.world import World
from swarm.consensus.fixed_point import QUANTUM_BITS, add_into, scaled
from swarm.consensus.log import MoveMode
from swarm.rounds import actions as act
from tests.support.bookkeeping import Books, check_time
from tests.support.simulated import simulated


class Watched(Replica):
    """Checks all that it is told to do, against itself and against the others."""

    sets: dict[object, object]
    made: dict[object, bytes]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.books: Books | None = Books(self.me)
        self.sent = np.zeros(self.consensus.codec.size, dtype=np.int64)

    def _take(self, event: act.Event) -> None:
        if isinstance(event, act.UpdateReady) and self.books is not None:
            self.books.offered.add(event.ref)
        super()._take(event)
        check_time(self.state, self.run_time_s())
        if self.books is not None:
            self.books.check(self.state)

    def _carry_out(self, actions: Sequence[act.Action]) -> None:
        for action in actions:
            self._look_at(action)
        super()._carry_out(actions)

    def _look_at(self, action: act.Action) -> None:
        if isinstance(action, act.MoveTo) and action.mode is not MoveMode.REBASE:
            self.books = None  # all that was learned is measured anew
        if self.books is not None:
            self.books.see(action)
            if isinstance(action, act.Settle | act.ReturnToFeedback):
                own, sign = self.running.own.get(action.ref), isinstance(action, act.Settle)
                if own is not None and action.scale:
                    add_into(self.sent, scaled(own.update, action.scale), 1 if sign else -1)
        if isinstance(action, act.ComputeStep):
            stage = self.state.stage
            assert stage is not None
            votes = stage.ballot.counted(action.base, self.state.log.eligible_voters())
            key = (action.round, action.base, frozenset(votes))
            assert self.sets.setdefault(key, action.refs) == action.refs
        if isinstance(action, act.Apply):
            parts = tuple(c.digest for c in action.entry.contributions)
            key = (action.entry.round, action.entry.parent, parts)
            assert self.made.setdefault(key, action.entry.digest) == action.entry.digest


def check_ledger(world: World, name: str) -> None:
    """Unsent is exactly what was learned here minus what the chain has of it."""
    work = world.hosts[name].work
    assert work is not None
    replica, toy = work.replica, world.trainers[name]
    assert isinstance(replica, Watched)
    if replica.books is None:
        return
    aside = replica.running.aside
    unsent = toy.weights.astype(np.float64) - replica.consensus.weights * 2.0**-QUANTUM_BITS
    unsent += 0.0 if aside is None else aside.astype(np.float64)
    expected = toy.learned - replica.sent * 2.0**-QUANTUM_BITS
    assert np.abs(expected - unsent).max() < 2e-3


def check_chain_counts_once(world: World, name: str) -> None:
    work = world.hosts[name].work
    assert work is not None
    used = [c.digest for e in work.replica.state.log.entries for c in e.contributions]
    assert len(used) == len(set(used))


@given(
    seed=st.integers(0, 10**6),
    hosts=st.integers(1, 5),
    loss=st.sampled_from([0.0, 0.1, 0.3, 0.6]),
    latency_s=st.sampled_from([0.02, 0.3, 1.5]),
    alone=st.lists(st.tuples(st.integers(0, 4), st.floats(1, 7), st.floats(0.1, 4)), max_size=2),
    split=st.floats(1, 7) | st.none(),
)
@settings(max_examples=12, phases=(Phase.explicit, Phase.generate))  # shrinking takes hours
def test_swarms_under_any_weather(
    tmp_path_factory: Any,
    seed: int,
    hosts: int,
    loss: float,
    latency_s: float,
    alone: list[tuple[int, float, float]],
    split: float | None,
) -> None:
    faults = []
    for who, start, length in alone:
        faults += [Fault(start, cut=(f"h{who % hosts}",)), Fault(start + length, heal=True)]
    if split is not None:
        faults += [Fault(split, cut=("h0",)), Fault(split + 2, heal=True)]
    scenario = Scenario(
        hosts=hosts,
        blocks=1,
        rounds=9,
        link=Link(latency_s=latency_s, loss=loss),
        skews_s={f"h{i}": 0.2 * (i % 3) for i in range(hosts)},
        faults=tuple(faults),
    )
    watched = type("WatchedHere", (Watched,), {"sets": {}, "made": {}})
    folder: Path = tmp_path_factory.mktemp("weather")
    world = simulated(scenario, folder, seed, replica=watched)
    for name in scenario.names:
        check_ledger(world, name)
        check_chain_counts_once(world, name)
