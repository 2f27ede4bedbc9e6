"""Catching up from donors: snapshots in shards, aggregates, and what happens to donors that lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import node.log.fetch
import swarm.consensus.updates
from node.log.catch_up import consensus_at
from node.log.consensus import Consensus, Snapshot
from node.log.fetch import FetchError, LogFetcher
from protocol.frames import content_digest
from protocol.messages import Message, Purpose
from protocol.updates import pack_updates, unpack_updates
from swarm.consensus.log import ConsensusLog
from tests.support.chains import CODEC, FIRST, RUN, SIZE, Chain, Donors, identity, run, trend_of
from tests.support.fixed_updates import same


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return Chain(identity(tmp_path))


def fetcher_of(donors: Donors) -> LogFetcher:
    return LogFetcher(donors, RUN, 0, CODEC, Purpose.CATCH_UP, 1.0)


async def catch_up(donors: Donors, names: list[str], mine: Chain, target: bytes) -> Consensus:
    fetcher = fetcher_of(donors)
    remote = await fetcher.log(names, mine.log.head.digest, target)
    pins = [pin for pin in remote.pins if pin.entry in {e.digest for e in remote.entries}][:1]
    return await consensus_at(fetcher, names, mine.log, mine.consensus, remote.entries, pins)


def spoiled(kind: str) -> dict[str, Callable[[Message, bytes], bytes]]:
    def spoil(request: Message, payload: bytes) -> bytes:
        if type(request).__name__ != kind or not payload:
            return payload
        return payload[:-1] + bytes([payload[-1] ^ 1])

    return {"bad": spoil}


def test_a_few_rounds_cost_only_their_aggregates(chain: Chain, tmp_path: Path) -> None:
    chain.grow(5)
    mine = chain.fork(1)
    chain.grow(2)
    donors = Donors(a=chain)
    result = run(catch_up(donors, ["a"], mine, chain.log.head.digest))
    assert np.array_equal(result.weights, chain.consensus.weights)
    assert [kind for _, kind in donors.asked] == ["LogRequest", *["AggregateRequest"] * 2]


def test_a_newcomer_takes_the_older_snapshot_and_can_be_a_donor(chain: Chain) -> None:
    first = chain.fork(1)
    chain.grow(14)
    donors = Donors(a=chain)
    result = run(catch_up(donors, ["a"], first, chain.log.head.digest))
    assert np.array_equal(result.weights, chain.consensus.weights)
    assert "ShardRequest" in {kind for _, kind in donors.asked}
    trend, theirs = trend_of(result, chain.log), trend_of(chain.consensus, chain.log)
    assert trend is not None and theirs is not None and same(trend, theirs)
    assert result.oldest_start(chain.log) is not None


def test_another_branch_is_reached_by_going_back(chain: Chain) -> None:
    chain.grow(6)
    mine = chain.fork(1).grow(2)
    before = mine.consensus.weights
    chain.grow(2)
    result = run(catch_up(Donors(a=chain), ["a"], mine, chain.log.head.digest))
    assert np.array_equal(result.weights, chain.consensus.weights)
    assert mine.consensus.weights is before  # ours is as it was, until the move


def test_without_the_steps_back_a_snapshot_serves(chain: Chain) -> None:
    chain.grow(6)
    mine = chain.fork(1).grow(2)
    mine.consensus.steps.clear()
    mine.consensus.updates.clear()
    chain.grow(2)
    donors = Donors(a=chain)
    result = run(catch_up(donors, ["a"], mine, chain.log.head.digest))
    assert np.array_equal(result.weights, chain.consensus.weights)
    assert "ShardRequest" in {kind for _, kind in donors.asked}


@pytest.mark.parametrize("kind", ["AggregateRequest", "ShardRequest", "IndexRequest"])
def test_a_poisoned_donor_is_dropped_and_the_next_one_asked(chain: Chain, kind: str) -> None:
    first = chain.fork(1)
    chain.grow(14)
    donors = Donors(bad=chain, good=chain)
    donors.spoil = spoiled(kind)
    result = run(catch_up(donors, ["bad", "good"], first, chain.log.head.digest))
    assert np.array_equal(result.weights, chain.consensus.weights)


def test_nobody_but_a_poisoned_donor_is_an_error_that_names_it(chain: Chain) -> None:
    first = chain.fork(1)
    chain.grow(3)
    donors = Donors(bad=chain)

    def other_update(request: Message, payload: bytes) -> bytes:
        return payload if type(request).__name__ != "AggregateRequest" else _other(payload)

    donors.spoil = {"bad": other_update}
    with pytest.raises(FetchError) as caught:
        run(catch_up(donors, ["bad"], first, chain.log.head.digest))
    assert caught.value.liars == ("bad",)


def _other(payload: bytes) -> bytes:
    updates = unpack_updates(payload, CODEC.max_bytes_at(1))
    return pack_updates([bytes(reversed(update)) for update in updates])


def test_a_made_up_chain_is_found_out_before_anything_moves(chain: Chain, tmp_path: Path) -> None:
    """Linked entries with right digests whose step is not what the updates give."""
    first = chain.fork(1)
    chain.grow(2)
    head = replace(chain.log.head, weights=bytes(32))
    chain.log = ConsensusLog((*chain.log.entries[:-1], head), chain.log.snapshot_every)
    chain.consensus.updates[head.digest] = list(chain.consensus.updates.values())[-1]
    weights = first.consensus.weights
    with pytest.raises(FetchError) as caught:
        run(catch_up(Donors(bad=chain), ["bad"], first, head.digest))
    assert caught.value.liars == ("bad",)
    assert first.consensus.weights is weights


def test_who_names_a_false_snapshot_is_blamed_alone(chain: Chain) -> None:
    """It stands on the right head; those who stand there with it did nothing."""
    first = chain.fork(1)
    chain.grow(14)
    liar = chain.fork(2)
    for digest, held in liar.consensus.snapshots.items():
        weights = np.ones(SIZE, dtype=np.int32)
        index = swarm.consensus.updates.snapshot_index(weights)
        pin = replace(held.pin, snapshot=content_digest(index))
        liar.consensus.snapshots[digest] = Snapshot(pin, index, weights)
    donors = Donors(liar=liar, good=chain, fine=chain)
    head = chain.log.head.digest
    with pytest.raises(FetchError, match="is not its consensus") as caught:
        run(catch_up(donors, ["liar", "good", "fine"], first, head))
    assert caught.value.liars == ("liar",)
    result = run(catch_up(donors, ["good", "fine"], first, head))
    assert np.array_equal(result.weights, chain.consensus.weights)


def test_a_log_without_its_history_is_not_taken(chain: Chain) -> None:
    """Replicas judge updates by the last entries; with fewer of them one would judge otherwise."""
    first, whole = chain.fork(1), chain.grow(40)
    short = whole.fork(2)
    for kept, taken in ((1, False), (31, False), (32, True)):
        short.log = replace(whole.log, entries=whole.log.entries[-kept:])
        fetcher = fetcher_of(Donors(short=short))
        have = first.log.head.digest
        if taken:
            assert len(run(fetcher.log(["short"], have, None)).entries) == kept
        else:
            with pytest.raises(FetchError, match="gave its log"):
                run(fetcher.log(["short"], have, None))
    remote = run(fetcher_of(Donors(short=short, whole=whole)).log(["short", "whole"], have, None))
    assert remote.entries[-1] == whole.log.head
    # What goes on where we are may be as short as it is.
    there = whole.log.entries[-3].digest
    assert len(run(fetcher_of(Donors(a=whole)).log(["a"], there, None)).entries) == 3


def test_shards_come_from_all_donors_and_a_silent_one_costs_its_place(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (node.log.fetch, swarm.consensus.updates):
        monkeypatch.setattr(module, "SHARD_BYTES", 128)  # 1200 bytes are ten shards
    first = chain.fork(1)
    chain = Chain(chain.identity).grow(10)
    donors = Donors(a=chain, b=chain, dead=chain)
    donors.down = {"dead"}
    result = run(catch_up(donors, ["dead", "a", "b"], first, chain.log.head.digest))
    assert np.array_equal(result.weights, chain.consensus.weights)
    shards = [peer for peer, kind in donors.asked if kind == "ShardRequest"]
    assert shards.count("dead") == 1 and {"a", "b"} <= set(shards)
    assert len(shards) == -(-4 * SIZE // 128) + 1


def test_nobody_there(chain: Chain) -> None:
    donors = Donors(a=chain)
    donors.down = {"a"}
    with pytest.raises(FetchError):
        run(catch_up(donors, ["a", "unknown"], chain.fork(1), bytes(32)))
    assert FIRST.shape == (SIZE,)
