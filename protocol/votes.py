"""Votes: which updates of a round a replica holds and accepts, signed, so that any peer can pass
them on.

Counting them is `swarm.consensus.votes`'s part.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from protocol import identity as identities
from protocol.errors import WireError
from protocol.frames import BytesLike
from protocol.identity import Identity, known_text, peer_from_text, peer_text
from protocol.limits import (
    DECLINED_BYTES,
    DECLINED_PER_VOTE,
    DIGEST_BYTES,
    LISTED_BYTES,
    LISTED_PER_VOTE,
    PAYLOAD_MAX_BYTES,
    PEER_ID_BYTES,
    ROUND_MAX,
    SIGNATURE_BYTES,
    VOTE_BLOB_MAX_BYTES,
    VOTES_PER_REPLY,
    Kind,
)
from protocol.packing import (
    Malformed,
    blob,
    block_id,
    bounded,
    digest,
    from_map,
    list_of,
    pack,
    round_or_genesis,
    to_map,
    uint,
    unpack_map,
    unpack_rows,
    wire,
)

_PREFIX = b"blockswarm vote\0"  # a signature on anything else is never a vote


class VoteError(WireError):
    """A vote that no honest replica sends."""


@dataclass(frozen=True, order=True)
class UpdateRef:
    """An update's digest and its sender. Ordered by digest."""

    digest: bytes
    sender: str


class Reason(enum.IntEnum):
    """Why a voter does not accept a sender's update.

    It is part of the vote, so that a sender that is left out learns why. A sender that is neither
    listed nor declined was not known to the voter in time. Unknown reasons of newer versions are
    read as OTHER.
    """

    OTHER = 0
    REFUSED = 1  # not a valid update of this round
    FAULT = 2  # earlier updates were invalid, or votes differed: left out for some rounds
    HARM = 3  # earlier updates worsened the voter's held-out CE: left out for some rounds


@dataclass(frozen=True)
class Vote:
    """The updates that `voter` holds and accepts in a round, on top of the log entry `base`."""

    voter: str
    round: int
    base: bytes
    base_round: int
    listed: tuple[UpdateRef, ...]
    declined: tuple[tuple[str, Reason], ...] = ()  # by sender


@dataclass(frozen=True)
class SignedVote:
    """A vote with its run and block, and the bytes that the voter signed."""

    run: bytes
    block: int
    vote: Vote
    blob: bytes


@dataclass(frozen=True, kw_only=True)
class _Body:
    """A vote as a map, with peers as ids; the voter is the signer."""

    run: bytes = wire("run", digest())
    block: int = wire("block", block_id)
    round: int = wire("round", uint(ROUND_MAX))
    base: bytes = wire("consensus", digest())
    base_round: int = round_or_genesis("base_round", -1)
    listed: tuple[bytes, ...] = wire(
        "listed", list_of(blob(LISTED_BYTES, LISTED_BYTES), LISTED_PER_VOTE), ()
    )
    declined: tuple[bytes, ...] = wire(
        "declined", list_of(blob(DECLINED_BYTES, DECLINED_BYTES), DECLINED_PER_VOTE), ()
    )


def seal_vote(identity: Identity, run: bytes, block: int, vote: Vote) -> SignedVote:
    """Sign our own vote. The blob is peer id, signature, msgpack map."""
    body = _Body(
        run=run,
        block=block,
        round=vote.round,
        base=vote.base,
        base_round=vote.base_round,
        listed=tuple(ref.digest + peer_from_text(ref.sender) for ref in vote.listed),
        declined=tuple(peer_from_text(peer) + bytes([why]) for peer, why in vote.declined),
    )
    data = pack(to_map(body))
    signature = identity.sign(_PREFIX + data)
    return SignedVote(run, block, vote, identity.peer_id + signature + data)


def verify_vote(data: bytes) -> SignedVote:
    """The vote in a blob, its signature verified. Raises `Malformed` or `VoteError`."""
    start = PEER_ID_BYTES + SIGNATURE_BYTES
    if not start < len(data) <= VOTE_BLOB_MAX_BYTES:
        raise Malformed("not a signed vote")
    voter, signature, packed = data[:PEER_ID_BYTES], data[PEER_ID_BYTES:start], data[start:]
    body = from_map(_Body, unpack_map(packed, VOTE_BLOB_MAX_BYTES))
    if not identities.verify(voter, signature, _PREFIX + packed):
        raise Malformed("the voter did not sign this vote")
    listed = (UpdateRef(x[:DIGEST_BYTES], known_text(x[DIGEST_BYTES:])) for x in body.listed)
    declined = ((known_text(x[:-1]), _reason(x[-1])) for x in body.declined)
    vote = Vote(
        peer_text(voter), body.round, body.base, body.base_round, tuple(listed), tuple(declined)
    )
    _check(vote)
    return SignedVote(body.run, body.block, vote, data)


def _reason(code: int) -> Reason:
    return Reason(code) if code <= max(Reason) else Reason.OTHER


def _check(vote: Vote) -> None:
    if list(vote.listed) != sorted(set(vote.listed)):
        raise VoteError("vote lists an update twice or out of order")
    if len({ref.sender for ref in vote.listed}) != len(vote.listed):
        raise VoteError("vote lists two updates of one sender")
    declined = [sender for sender, _ in vote.declined]
    if declined != sorted(set(declined)):
        raise VoteError("vote declines a sender twice, or out of order")
    if vote.base_round > vote.round:
        raise VoteError("vote on a consensus of a later round")


def pack_votes(votes: Iterable[SignedVote]) -> bytes:
    return pack([[signed.blob] for signed in votes])


def unpack_votes(payload: BytesLike) -> list[bytes]:
    """Vote blobs, not verified yet: pass each to `verify_vote`."""
    limit = bounded(payload, PAYLOAD_MAX_BYTES[Kind.VOTE_REPLY])
    rows = unpack_rows(payload, limit, VOTES_PER_REPLY, blob(1, VOTE_BLOB_MAX_BYTES))
    return [row[0] for row in rows]
