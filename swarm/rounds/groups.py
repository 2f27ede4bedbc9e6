"""More than 16 replicas of a block: groups, their speakers, and the committee of a round.

Decides who exchanges with whom. Knows nothing of the exchange itself.

A peer's group comes from its own hash and the number of groups alone. Cutting a sorted list of
members into equal pieces would fill groups better, but two replicas that know of one peer more or
less would cut differently everywhere; here they differ by that one peer. The hash changes every
round, so groups are mixed and nobody stays in an overfull one. The number of groups is a power of
two that follows the number of members in the log (the same for all), in wide steps.

In the second stage everybody applies the aggregates of all groups. A group's aggregate is claimed
by a few speakers of the group, and a committee of the round, drawn by hash, votes on which groups
made it in time: 15 votes to read instead of one per replica. Nobody is in charge: both are sets
that everybody computes, they change every round, and if all of them are gone that round gives no
step and all updates go back to their senders.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from functools import lru_cache

MAX_GROUP = 16
FILL = 10  # average members per group; few groups then exceed MAX_GROUP
SPEAKERS = 3
COMMITTEE = 15


def group_count(members: int) -> int:
    """1 up to 16 members; beyond that the least power of two with FILL members per group."""
    count = 1
    while members > MAX_GROUP and members > count * FILL:
        count *= 2
    return count


@lru_cache(maxsize=1 << 12)  # of this round and the last, with hundreds of replicas
def _rank(purpose: str, number: int, peer: str) -> int:
    text = f"{purpose}/{number}/{peer}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def group_of(peer: str, number: int, groups: int) -> int:
    """The group of a peer in round `number`."""
    return _rank("group", number, peer) % groups


def members_of(
    group: int, peers: Collection[str], number: int, groups: int, most: int = MAX_GROUP
) -> tuple[str, ...]:
    """The members of a group, at most `most`: in an overfull one the lowest ranks."""
    inside = [peer for peer in peers if group_of(peer, number, groups) == group]
    return tuple(sorted(inside, key=lambda peer: _rank("seat", number, peer))[:most])


def speakers_of(members: Collection[str], number: int) -> tuple[str, ...]:
    """Who tells the other groups about this one's aggregate."""
    return tuple(sorted(members, key=lambda peer: _rank("speaker", number, peer))[:SPEAKERS])


def committee(peers: Collection[str], number: int) -> tuple[str, ...]:
    """Whose votes decide the second stage."""
    return tuple(sorted(peers, key=lambda peer: _rank("committee", number, peer))[:COMMITTEE])
