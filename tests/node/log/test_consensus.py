"""A block's consensus in memory: steps forward and back, what is kept, what can be served."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from node.log.consensus import TREND_ROUNDS, Consensus
from protocol.digests import weights_digest
from protocol.log import LogError
from swarm.consensus.fixed_point import to_fixed
from swarm.consensus.updates import from_shards, replayed_step
from tests.support.chains import CODEC, EVERY, FIRST, Chain, identity, trend_of
from tests.support.fixed_updates import same


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return Chain(identity(tmp_path))


def test_following_gives_the_same_bits_and_rolling_back_undoes_them(chain: Chain) -> None:
    chain.grow(EVERY - 1)
    follower = Consensus(to_fixed(FIRST), CODEC, 0)
    versions = [follower.weights]
    for entry in chain.log.entries[1:]:
        follower.follow(entry, chain.consensus.updates[entry.digest])
        versions.append(follower.weights)
        assert weights_digest(follower.weights) == entry.weights
    newest_first = chain.log.entries[:0:-1]
    there = follower.before(newest_first)
    assert there is not None and np.array_equal(there, versions[0])
    for entry, version in zip(newest_first, versions[-2::-1], strict=True):
        assert follower.roll_back([entry])
        assert np.array_equal(follower.weights, version)
    # The steps are gone, and what cannot be undone stays as it is.
    assert follower.before(newest_first) is None
    assert not follower.roll_back(newest_first)
    assert np.array_equal(follower.weights, versions[0])


def test_a_step_that_does_not_lead_to_its_entry_is_refused(chain: Chain) -> None:
    chain.grow(2)
    follower = Consensus(to_fixed(FIRST), CODEC, 0)
    second = chain.log.entries[2]
    with pytest.raises(LogError):
        follower.follow(second, chain.consensus.updates[second.digest])
    with pytest.raises(LogError):
        follower.restart(second, follower.weights)
    assert weights_digest(follower.weights) == chain.log.entries[0].weights


def test_memory_is_bounded_and_all_since_the_older_snapshot_is_there(chain: Chain) -> None:
    for _ in range(30):
        chain.grow(1)
        consensus, log = chain.consensus, chain.log
        assert len(consensus.snapshots) <= 2
        assert len(consensus.steps) <= TREND_ROUNDS and len(consensus.updates) <= 2 * EVERY
        found = consensus.oldest_start(log)
        assert found is not None
        start, snapshot = found
        assert start == log.pinned()[0]
        again = Consensus(to_fixed(FIRST), CODEC, 0)
        again.restart(start, from_shards([bytes(s) for s in snapshot.shards], CODEC.size))
        again.go_on(log, start, consensus.updates)
        assert np.array_equal(again.weights, consensus.weights)
        # Whoever starts from there judges the next updates alike, and can be a donor in turn.
        ours, theirs = trend_of(consensus, log), trend_of(again, log)
        assert ours is not None and theirs is not None and same(ours, theirs)
        assert set(again.snapshots) == set(consensus.snapshots)
        assert again.oldest_start(log) is not None


def test_a_copy_stays_as_it_was(chain: Chain) -> None:
    chain.grow(3)
    then, weights = chain.consensus.copy(), chain.consensus.weights
    steps = set(then.steps)
    chain.grow(9)
    assert then.weights is weights and set(then.steps) == steps


def test_a_light_copy_makes_steps_and_snapshots_again_when_they_are_asked_for(
    chain: Chain,
) -> None:
    """It holds the weights and the updates, and can still do all that the replicas can."""
    for _ in range(3 * EVERY + 2):
        chain.grow(1)
    log, theirs = chain.log, chain.consensus
    start, snapshot = log.pinned()[0], theirs.snapshots[log.pinned()[0].digest]
    light = Consensus(to_fixed(FIRST), CODEC, 0, light=True)
    light.restart(start, from_shards([bytes(s) for s in snapshot.shards], CODEC.size))
    light.go_on(log, start, theirs.updates)
    assert light.steps == {} and all(s.weights is None for s in light.snapshots.values())

    assert {s.pin.snapshot for s in light.snapshots.values()} == {
        s.pin.snapshot for s in theirs.snapshots.values()
    }
    for digest, held in light.snapshots.items():
        made = light.snapshot_weights(log, held)
        assert made is not None and np.array_equal(made, theirs.snapshots[digest].weights)
        assert light.snapshot_weights(log, held) is made  # once for all shards
    light.prune(log)
    held = next(iter(light.snapshots.values()))
    made = light.snapshot_weights(log, held)
    light.prune(log)
    assert light.snapshot_weights(log, held) is made  # somebody has asked since the last round
    light.prune(log)
    light.prune(log)
    assert light.snapshot_weights(log, held) is not made

    ours, trend = trend_of(theirs, log), trend_of(light, log)
    assert ours is not None and trend is not None and same(ours, trend)
    whole = light.whole(log)
    assert set(whole.steps) == set(theirs.steps) and not light.steps
    assert all(s.weights is not None for s in whole.snapshots.values())
    assert whole.oldest_start(log) is not None

    light.updates.pop(log.head.digest)  # nothing can be made again without them
    light.prune(log)
    light.prune(log)
    assert light.snapshot_weights(log, held) is None and light.whole(log).snapshots == {}


def test_a_step_that_stopped_at_the_edge_is_not_made_again_wrongly(chain: Chain) -> None:
    chain.grow(2)
    entry = chain.log.head
    chain.consensus.steps.clear()
    made = chain.consensus.step_of(entry)
    assert made is not None and made.digest == entry.step
    stopped = dataclasses.replace(entry, step=bytes(32))  # its updates say more than it did
    assert replayed_step(stopped, chain.consensus.updates[entry.digest], CODEC, 0) is None
