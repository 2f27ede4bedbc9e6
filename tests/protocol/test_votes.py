"""Votes: signed, bounded, and of one form only."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.identity import Identity
from protocol.limits import (
    DECLINED_PER_VOTE,
    LISTED_PER_VOTE,
    PAYLOAD_MAX_BYTES,
    ROUND_MAX,
    VOTE_BLOB_MAX_BYTES,
    VOTES_PER_REPLY,
    Kind,
)
from protocol.packing import Malformed, pack, unpack_map
from protocol.votes import (
    Reason,
    UpdateRef,
    Vote,
    VoteError,
    pack_votes,
    seal_vote,
    unpack_votes,
    verify_vote,
)

RUN = b"r" * 32
VOTER, OTHER = Identity(b"v" * 32), Identity(b"o" * 32)
PEERS = sorted((Identity(bytes([n]) * 32) for n in range(40)), key=lambda peer: peer.text)
LISTED = (UpdateRef(b"a" * 32, OTHER.text), UpdateRef(b"b" * 32, VOTER.text))
VOTE = Vote(VOTER.text, 8, b"c" * 32, 7, LISTED, ((PEERS[0].text, Reason.HARM),))


def refs(count: int) -> tuple[UpdateRef, ...]:
    return tuple(UpdateRef(bytes([n]) * 32, PEERS[n].text) for n in range(count))


def declining(count: int) -> tuple[tuple[str, Reason], ...]:
    return tuple((peer.text, Reason.FAULT) for peer in PEERS[:count])


@pytest.mark.parametrize(
    "vote",
    [
        VOTE,
        replace(VOTE, listed=(), declined=()),
        replace(VOTE, round=0, base_round=-1),
        replace(VOTE, listed=refs(LISTED_PER_VOTE), declined=declining(DECLINED_PER_VOTE)),
    ],
)
def test_votes_survive_the_wire(vote: Vote) -> None:
    signed = seal_vote(VOTER, RUN, 2, vote)
    [blob] = unpack_votes(pack_votes([signed]))
    assert verify_vote(blob) == signed
    assert (signed.run, signed.block, signed.vote) == (RUN, 2, vote)


def test_a_changed_vote_is_refused() -> None:
    blob = seal_vote(VOTER, RUN, 2, VOTE).blob
    for position in range(len(blob)):
        changed = bytearray(blob)
        changed[position] ^= 1
        with pytest.raises(Malformed):
            verify_vote(bytes(changed))
    for cut in (b"", blob[:50], blob[:-1], blob + b"\0", bytes(VOTE_BLOB_MAX_BYTES + 1)):
        with pytest.raises(Malformed):
            verify_vote(cut)


def test_a_vote_belongs_to_whoever_signed_it() -> None:
    assert verify_vote(seal_vote(OTHER, RUN, 2, VOTE).blob).vote.voter == OTHER.text
    stolen = OTHER.peer_id + seal_vote(VOTER, RUN, 2, VOTE).blob[38:]
    with pytest.raises(Malformed, match="did not sign"):
        verify_vote(stolen)


@pytest.mark.parametrize(
    "changes",
    [
        {"listed": LISTED[::-1]},
        {"listed": LISTED[:1] * 2},
        {"listed": (LISTED[0], replace(LISTED[1], sender=OTHER.text))},
        {"declined": declining(3)[::-1]},
        {"declined": (declining(1)[0], (PEERS[0].text, Reason.HARM))},
        {"base_round": 9},
    ],
)
def test_votes_that_no_honest_replica_sends(changes: dict[str, object]) -> None:
    with pytest.raises(VoteError):
        verify_vote(seal_vote(VOTER, RUN, 2, replace(VOTE, **changes)).blob)


@pytest.mark.parametrize(
    "changes",
    [
        {"listed": refs(LISTED_PER_VOTE + 1)},
        {"declined": declining(DECLINED_PER_VOTE + 1)},
        {"listed": (UpdateRef(b"short", OTHER.text),)},
        {"base": b""},
        {"round": -1},
        {"round": ROUND_MAX + 1},
        {"base_round": -2},
        {"listed": (UpdateRef(b"a" * 32, "nobody"),)},
    ],
)
def test_no_vote_is_made_that_would_be_refused(changes: dict[str, object]) -> None:
    with pytest.raises(Malformed):
        seal_vote(VOTER, RUN, 2, replace(VOTE, **changes))


def test_items_of_a_vote_have_one_length_and_name_peers() -> None:
    start = 38 + 64
    fields = unpack_map(seal_vote(VOTER, RUN, 2, VOTE).blob[start:], 8192)
    no_peer = b"a" * 32 + b"x" * 38
    for listed in ([b"a" * 69], [b"a" * 71], [b"a" * 32], [no_peer]):
        body = pack({**fields, "listed": listed})
        signature = VOTER.sign(b"blockswarm vote\0" + body)
        with pytest.raises(Malformed):
            verify_vote(VOTER.peer_id + signature + body)


def test_a_newer_voters_reason_is_one_that_we_do_not_know() -> None:
    start = 38 + 64
    fields = unpack_map(seal_vote(VOTER, RUN, 2, VOTE).blob[start:], 8192)
    body = pack({**fields, "declined": [PEERS[0].peer_id + b"\x77"]})
    blob = VOTER.peer_id + VOTER.sign(b"blockswarm vote\0" + body) + body
    assert verify_vote(blob).vote.declined == ((PEERS[0].text, Reason.OTHER),)


def test_the_longest_votes_fit_their_limits() -> None:
    long = Vote(
        VOTER.text,
        ROUND_MAX,
        b"c" * 32,
        ROUND_MAX,
        refs(LISTED_PER_VOTE),
        declining(DECLINED_PER_VOTE),
    )
    signed = seal_vote(VOTER, RUN, 4095, long)
    assert len(signed.blob) <= VOTE_BLOB_MAX_BYTES
    assert len(pack_votes([signed] * VOTES_PER_REPLY)) <= PAYLOAD_MAX_BYTES[Kind.VOTE_REPLY]
