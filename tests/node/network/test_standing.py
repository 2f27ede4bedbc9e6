"""How well a peer is known: hearsay, one that spoke, a contributor of our own block."""

from __future__ import annotations

import pytest

from node.network.standing import Standing, Standings, voters_first
from tests.support.strangers import log_of, many, standings_with


def test_work_stands_above_words_and_words_above_hearsay() -> None:
    worker, speaker, named = many(3)
    standings = standings_with([worker])
    standings.spoke(speaker.peer_id)
    found = [standings.of(peer.peer_id) for peer in (worker, speaker, named)]
    assert found == [Standing.CONTRIBUTOR, Standing.SPOKE, Standing.HEARSAY]
    ranked = sorted((named, speaker, worker), key=lambda p: standings.rank(p.peer_id))
    assert ranked == [named, speaker, worker]


def test_it_follows_the_log_and_the_block_that_is_worked_on() -> None:
    old, new, other = many(3)
    logs = {0: log_of([old]), 1: log_of([other])}
    standings = Standings()
    standings.works_on(0, lambda block: logs.get(block))
    assert standings.of(old.peer_id) is Standing.CONTRIBUTOR
    assert standings.of(other.peer_id) is Standing.HEARSAY  # of a copy: its donors' word
    assert standings.seen_rounds(1) == {other.peer_id: 4} and standings.seen_rounds(2) == {}
    logs[0] = log_of([new])
    assert standings.of(old.peer_id) is Standing.HEARSAY
    assert standings.of(new.peer_id) is Standing.CONTRIBUTOR
    standings.works_on(1, lambda block: logs.get(block))
    assert standings.of(other.peer_id) is Standing.CONTRIBUTOR


def test_who_spoke_last_stands_first_and_they_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.network.standing.SPOKE_KEPT", 2)
    now = iter(range(1, 9))
    a, b, c = (peer.peer_id for peer in many(3))
    standings = Standings(lambda: float(next(now)))
    standings.spoke(a)
    standings.spoke(b)
    standings.spoke(a)
    assert standings.rank(a) > standings.rank(b)
    standings.spoke(c)
    assert [standings.of(peer) for peer in (a, b, c)] == [1, 0, 1]


def test_voters_of_a_log_come_first_in_their_order() -> None:
    a, b, c, d = (peer for peer in many(4))
    assert voters_first([a.text, b.text, c.text, d.text], log_of([d, b])) == [
        b.text,
        d.text,
        a.text,
        c.text,
    ]
