"""The records on a board in a flood: whose stay, who is shown ours, what is passed on."""

from __future__ import annotations

import time

import pytest

from node.network.standing import Standings
from node.replica.notices import DHT, PEERS_SHOWN, TOLD_BY_DHT, TOLD_BY_ONE, UNPROVEN_SHOWN, Notices
from protocol.identity import Identity
from tests.support.strangers import many, record_of, standings_with


def board(contributors: list[Identity]) -> tuple[Notices, Standings]:
    standings = standings_with(contributors)
    return Notices(standings, time.time), standings


def speak(notices: Notices, standings: Standings, owner: Identity, life_s: float = 300.0) -> bool:
    standings.spoke(owner.peer_id)
    return notices.hear(record_of(owner, life_s), owner.peer_id)


def test_a_long_expiry_does_not_bring_strangers_to_the_front() -> None:
    honest, strangers = many(8), many(100)
    notices, standings = board(honest)
    for owner in honest:
        assert notices.hear(record_of(owner, 300.0), owner.peer_id)
    for owner in strangers:
        speak(notices, standings, owner, life_s=900.0)
    ids = {owner.peer_id for owner in honest}
    assert {signed.peer_id for signed in notices.best_first()[:8]} == ids
    shown = notices.to_show()
    assert ids <= set(shown) and len(shown) == PEERS_SHOWN


def test_one_teller_fills_a_few_places_and_the_dht_some_more() -> None:
    notices, _ = board([])
    teller = many(1)[0].peer_id
    kept = [notices.hear(record_of(owner, 900.0), teller) for owner in many(TOLD_BY_ONE + 9)]
    assert sum(kept) == TOLD_BY_ONE
    kept = [notices.hear(record_of(owner, 900.0), DHT) for owner in many(TOLD_BY_DHT + 9)]
    assert sum(kept) == TOLD_BY_DHT
    # What led nowhere makes room for what may not.
    notices.shown(notices.to_show()[0], answered=False)
    assert notices.hear(record_of(many(1)[0]), teller)
    assert not notices.hear(record_of(many(1)[0]), teller)


def test_in_a_full_board_who_speaks_takes_the_place_of_hearsay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("node.replica.notices.PEERS_MET", 4)
    worker, one, two, *others = many(8)
    notices, standings = board([worker])
    assert notices.hear(record_of(worker), worker.peer_id)
    assert speak(notices, standings, one)
    assert [notices.hear(record_of(o, 900.0), DHT) for o in others[:3]] == [True, True, False]
    assert speak(notices, standings, two)
    assert speak(notices, standings, others[3])
    left = [signed.peer_id for signed in notices.best_first()]
    assert left == [worker.peer_id, others[3].peer_id, two.peer_id, one.peer_id]
    # Among those who spoke the one that was silent longest goes; a contributor never.
    assert speak(notices, standings, others[4])
    assert one.peer_id not in notices and worker.peer_id in notices


def test_only_some_of_those_that_never_answered_are_dialled_each_in_its_turn() -> None:
    notices, standings = board([])
    named = many(3 * UNPROVEN_SHOWN)
    assert all(notices.hear(record_of(owner, 900.0), DHT) for owner in named)
    hearsay = [owner.peer_id for owner in named]
    tried: list[bytes] = []
    for _ in range(3):
        now = notices.to_show()
        assert len(now) == UNPROVEN_SHOWN
        for peer in now:
            notices.shown(peer, answered=False)
        tried += now
    assert tried == hearsay
    # Who came to us and names an address where nobody answers is one of them.
    for owner in many(UNPROVEN_SHOWN + 5):
        speak(notices, standings, owner)
        notices.shown(owner.peer_id, answered=False)
    assert len(notices.to_show()) == UNPROVEN_SHOWN
    # and who answers is shown every round.
    standings.spoke(hearsay[5])
    notices.shown(hearsay[5], answered=True)
    assert hearsay[5] == notices.to_show()[0]


def test_hearsay_is_no_company_and_what_is_old_or_dead_is_no_news() -> None:
    notices, standings = board([])
    owner = many(1)[0]
    assert notices.hear(record_of(owner, sequence=2), DHT) and not notices.has_company
    assert not notices.hear(record_of(owner, sequence=1), owner.peer_id)
    assert not notices.hear(record_of(many(1)[0], -1.0), DHT)
    standings.spoke(owner.peer_id)
    assert notices.has_company
    assert notices.hear(record_of(owner, sequence=3), DHT)
    later = Notices(standings, lambda: time.time() + 301)
    later._met = notices._met
    assert not later.has_company and later.best_first() == []
