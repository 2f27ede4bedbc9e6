"""Version numbers: every copy reads exactly the version it was trained against."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarm.learning.coupling import (
    composed_versions,
    followed_blocks,
    oldest_needed,
    upstream_versions,
)
from swarm.run import ModelShape

blocks_and_rounds = st.tuples(st.integers(1, 12), st.integers(0, 40))


def trained_against(block: int, version: int) -> list[int]:
    """What the worker read in the round that made this version; version v is made in round v-1."""
    return upstream_versions(block, version - 1, staggered=True)


@given(blocks_and_rounds)
def test_every_staggered_copy_reads_what_it_was_trained_against(case: tuple[int, int]) -> None:
    block, round_ = case
    chain = upstream_versions(block, round_, staggered=True)
    assert len(chain) == block
    for before, version in enumerate(chain):
        if version > 0:  # version 0 was not trained against anything
            assert chain[:before] == trained_against(before, version)


@given(blocks_and_rounds)
def test_a_staggered_assembly_reads_what_its_blocks_were_trained_against(
    case: tuple[int, int],
) -> None:
    blocks, newest = case
    chain = composed_versions(blocks, newest, staggered=True)
    assert len(chain) == blocks and chain[-1] == newest
    for block, version in enumerate(chain):
        if version > 0:
            assert chain[:block] == trained_against(block, version)


@given(blocks_and_rounds)
def test_the_newest_upstream_copy_is_this_rounds(case: tuple[int, int]) -> None:
    block, round_ = case
    for staggered in (True, False):
        chain = upstream_versions(block, round_, staggered)
        assert all(0 <= version <= round_ for version in chain)
        assert chain == sorted(chain)
        if block:
            assert chain[-1] == round_


@given(blocks_and_rounds)
def test_not_staggered_all_are_the_newest(case: tuple[int, int]) -> None:
    blocks, round_ = case
    assert upstream_versions(blocks, round_, staggered=False) == [round_] * blocks
    assert composed_versions(blocks, round_, staggered=False) == [round_] * blocks


@given(blocks_and_rounds, st.booleans())
def test_nothing_that_is_still_read_is_dropped(case: tuple[int, int], staggered: bool) -> None:
    blocks, round_ = case
    oldest = oldest_needed(blocks, round_, staggered)
    read = [v for block in range(blocks) for v in upstream_versions(block, round_, staggered)]
    read += composed_versions(blocks, round_, staggered)
    assert all(version >= oldest for version in read)
    assert oldest >= oldest_needed(blocks, max(0, round_ - 1), staggered)  # never asked for again


def test_newest_versions_would_not_do() -> None:
    """The example of the module: block 1 at round 5 learnt on block 0 at 4, not at 5."""
    assert upstream_versions(3, 5, staggered=True) == [3, 4, 5]
    assert composed_versions(4, 6, staggered=True) == [3, 4, 5, 6]
    assert upstream_versions(3, 1, staggered=True) == [0, 0, 1]
    assert oldest_needed(4, 6, staggered=True) == 3


def test_followed_blocks() -> None:
    ahead, relay = ModelShape(coupling="look_ahead"), ModelShape(coupling="relay")
    assert followed_blocks(ahead, 0) == (1,) and followed_blocks(ahead, 2) == (0, 1, 3)
    assert followed_blocks(ahead, 3) == (0, 1, 2) == followed_blocks(relay, 3)
    assert followed_blocks(ModelShape(coupling="independent"), 3) == ()
