"""Which head wins."""

from __future__ import annotations

from swarm.forks import SignedHead, support, winner

OLD, NEW = b"b" * 32, b"a" * 32


def head(digest: bytes, number: int = 9, senior: bool = True) -> SignedHead:
    return SignedHead(digest, number, senior)


def test_more_peers_win_and_ties_go_to_the_lower_digest() -> None:
    assert winner(support({"1": head(OLD), "2": head(OLD), "3": head(NEW)}, 10)) == OLD
    assert winner(support({"1": head(OLD), "2": head(NEW)}, 10)) == NEW
    assert winner(support({}, 10)) is None


def test_strangers_do_not_outvote_the_known() -> None:
    crowd = {f"s{i}": head(NEW, senior=False) for i in range(100)}
    assert winner(support({**crowd, "1": head(OLD)}, 10)) == OLD
    assert winner(support(crowd, 10)) == NEW  # nobody is known: a young swarm


def test_who_slept_is_not_a_side() -> None:
    assert winner(support({"me": head(NEW, 3), "other": head(OLD, 9)}, 10)) == OLD


def test_heads_from_the_future_are_ignored() -> None:
    assert winner(support({"me": head(OLD, 9), "liar": head(NEW, 10**6)}, 10)) == OLD
