"""Groups of at most 16, nearly the same whoever computes them."""

from __future__ import annotations

from swarm.rounds.groups import (
    COMMITTEE,
    MAX_GROUP,
    SPEAKERS,
    committee,
    group_count,
    group_of,
    members_of,
    speakers_of,
)

PEERS = [f"peer{i}" for i in range(300)]


def test_one_group_up_to_sixteen() -> None:
    assert [group_count(n) for n in (1, 16, 17, 40, 300)] == [1, 1, 2, 4, 32]


def test_groups_cover_nearly_everybody_and_mix() -> None:
    groups = group_count(len(PEERS))
    for number in range(5):
        seats = [members_of(g, PEERS, number, groups) for g in range(groups)]
        assert max(map(len, seats)) <= MAX_GROUP
        assert sum(map(len, seats)) >= 0.95 * len(PEERS)
    assert group_of("peer1", 1, groups) != group_of("peer1", 2, groups)


def test_one_unknown_peer_changes_one_group_only() -> None:
    groups = group_count(len(PEERS))
    changed = [
        g
        for g in range(groups)
        if members_of(g, PEERS, 7, groups) != members_of(g, PEERS[:-1], 7, groups)
    ]
    assert changed in ([], [group_of(PEERS[-1], 7, groups)])


def test_speakers_and_committee() -> None:
    members = members_of(0, PEERS, 3, 32)
    assert len(speakers_of(members, 3)) == SPEAKERS
    assert len(set(committee(PEERS, 3))) == COMMITTEE
    assert committee(PEERS, 3) == committee(PEERS[::-1], 3)
    assert committee(PEERS, 3) != committee(PEERS, 4)
