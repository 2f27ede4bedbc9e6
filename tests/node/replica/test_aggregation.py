"""The step of a round beside the loop: of the moment it was asked for in, whatever follows."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

import node.log.consensus
from node.replica.aggregation import Aggregation
from node.replica.exchange import HeldUpdate
from protocol.digests import weights_digest
from protocol.identity import peer_text
from protocol.log import Entry
from protocol.updates import update_digest
from protocol.votes import UpdateRef
from swarm.consensus.updates import snapshot_index
from swarm.rounds import actions as act
from tests.support.chains import CODEC, SIZE, Chain, identity, run


def asked(chain: Chain, seed: int) -> tuple[act.ComputeStep, dict[bytes, HeldUpdate]]:
    """An order to aggregate one update upon the chain's head."""
    number, me = chain.log.head.round + 1, chain.identity.peer_id
    wanted = np.random.default_rng(seed).integers(-(2**20), 2**20, SIZE)
    payload, update = CODEC.encode(wanted, 0, number, me)
    ref = UpdateRef(update_digest(payload), peer_text(me))
    order = act.ComputeStep(number, chain.log.head.digest, (ref,), 0.0)
    return order, {ref.digest: HeldUpdate(ref, number, payload, update)}


def test_a_step_is_of_the_weights_it_was_asked_for_and_not_of_later_ones(tmp_path: Path) -> None:
    """It waits for the one before, and meanwhile the consensus makes a step."""
    chain = Chain(identity(tmp_path)).grow(3)
    order, held = asked(chain, 1)
    log, before = chain.log, chain.consensus.weights.copy()

    async def main() -> tuple[Entry, Entry]:
        wanted = await Aggregation().compute(order, held, log, chain.consensus)
        late = Aggregation()
        async with late._lock:
            computing = asyncio.create_task(late.compute(order, held, log, chain.consensus))
            await asyncio.sleep(0)  # it waits for the lock now
            chain.grow(1)
        return wanted, await computing

    wanted, found = run(main())
    assert not np.array_equal(chain.consensus.weights, before)
    assert found == wanted


def test_a_computed_step_is_applied_once_and_only_upon_its_head(tmp_path: Path) -> None:
    chain = Chain(identity(tmp_path)).grow(3)
    order, held = asked(chain, 1)
    aggregation = Aggregation()
    entry = run(aggregation.compute(order, held, chain.log, chain.consensus))
    log = chain.log.appended(entry)
    aggregation.forget(chain.log.head.digest)
    step = aggregation.apply(entry, log, chain.consensus)
    assert weights_digest(chain.consensus.weights) == entry.weights
    assert chain.consensus.steps[entry.digest] is step
    chain.log = log
    aggregation.forget(log.head.digest)
    assert not aggregation._computed


def test_a_snapshot_is_read_and_named_beside_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large block that takes long enough to be late everywhere else."""
    chain = Chain(identity(tmp_path))
    chain.grow(chain.log.snapshot_every - 2 - chain.log.head.round)

    def in_the_loop(weights: object) -> bytes:
        raise AssertionError("it holds up the loop")

    aggregation = Aggregation()
    for pinned in (False, True):
        order, held = asked(chain, 1)
        entry = run(aggregation.compute(order, held, chain.log, chain.consensus))
        chain.log = chain.log.appended(entry)
        with monkeypatch.context() as patch:
            patch.setattr(node.log.consensus, "snapshot_index", in_the_loop)
            aggregation.apply(entry, chain.log, chain.consensus)
        assert (entry.digest in chain.consensus.snapshots) == pinned
    held_as = chain.consensus.snapshots[entry.digest]
    assert held_as.index == snapshot_index(chain.consensus.weights)
