"""Which head wins."""

from __future__ import annotations

import pytest

from swarm.consensus.forks import AWAY, SignedHead, Word, support, winner

OLD, NEW = b"b" * 32, b"a" * 32


def head(digest: bytes, number: int = 9, word: Word = Word.CONTRIBUTOR) -> SignedHead:
    return SignedHead(digest, number, word)


def test_more_peers_win_and_ties_go_to_the_lower_digest() -> None:
    assert winner(support({"1": head(OLD), "2": head(OLD), "3": head(NEW)}, 10)) == OLD
    assert winner(support({"1": head(OLD), "2": head(NEW)}, 10)) == NEW
    assert winner(support({}, 10)) is None


@pytest.mark.parametrize("word", [Word.STRANGER, Word.SENIOR])
@pytest.mark.parametrize("number", [7, 9])
def test_strangers_do_not_outvote_the_known(word: Word, number: int) -> None:
    """Nor do they make them stale: a head may be claimed for any round."""
    crowd = {f"s{i}": head(NEW, 99, word) for i in range(100)}
    known = {"1": head(OLD, 90 + number, Word(word + 1))}
    assert winner(support({**crowd, **known}, 100)) == OLD
    assert winner(support(crowd, 100)) == NEW  # nobody is known: a young swarm


def test_contributors_who_stood_still_for_long_no_longer_speak_for_the_block() -> None:
    others = {"1": head(NEW, 99, Word.STRANGER)}
    assert winner(support({"me": head(OLD, 100 - AWAY), **others}, 100)) == OLD
    assert winner(support({"me": head(OLD, 99 - AWAY), **others}, 100)) == NEW
    both = {"me": head(OLD, 40), "mate": head(OLD, 40), "new": head(NEW, 41, Word.STRANGER)}
    assert winner(support(both, 100)) == OLD  # nobody has moved: those who know each other stay


def test_who_slept_is_not_a_side() -> None:
    assert winner(support({"me": head(NEW, 3), "other": head(OLD, 9)}, 10)) == OLD


def test_heads_from_the_future_are_ignored() -> None:
    assert winner(support({"me": head(OLD, 9), "liar": head(NEW, 10**6)}, 10)) == OLD
