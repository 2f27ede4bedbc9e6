"""What the exchanges of a round put on the wire, from the frames that a live node would send.

Updates, and what a follower fetches of another block's log, are exact given the updates: the same
messages, packed and framed by the same code. Votes and records are an estimate: whom a record is
shown to is known, but the DHT's own traffic is assumed (`DHT_COPIES`). Counts a byte once, though
one host sends it and another one receives it. Knows nothing of weights or training.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from node.log.follow import DONORS_ASKED
from protocol import identity, messages, payloads, records
from protocol.frames import encode_head
from protocol.limits import DIGEST_BYTES, PIN_BYTES, WORK_ONE
from protocol.log import Contribution, Entry, pack_log
from protocol.votes import UpdateRef, Vote, pack_votes, seal_vote

DHT_COPIES = 5  # nodes that a record is stored at, and that a look-up reads it from
LATE = 1000  # a round number; small ones pack into a byte or two less

_NAME = bytes(DIGEST_BYTES)


def frame_bytes(message: messages.Message, payload_bytes: int = 0) -> int:
    """One frame: head, header, check, and a payload with its digest."""
    head = len(encode_head(message.KIND, message.to_header(), payload_bytes))
    return head + (payload_bytes + DIGEST_BYTES if payload_bytes else 0)


def pull_bytes(update_bytes: int) -> int:
    """One replica gets one update of another one."""
    request = messages.UpdateRequest(run=_NAME, block=0, round=LATE, digest=_NAME)
    reply = messages.UpdateReply(block=0, round=LATE)
    return frame_bytes(request) + frame_bytes(reply, update_bytes)


def follow_bytes(included: Sequence[int], agreed: int, replicas: int) -> int:
    """One worker of another block follows one round: entries from several donors, one aggregate.

    `included` are the lengths of the updates that count in it, `agreed` how many it names.
    """
    log_request = messages.LogRequest(run=_NAME, block=0, since=_NAME)
    log_reply = messages.LogReply(
        block=0, head_round=LATE, consensus=_NAME, count=2, pins=(bytes(PIN_BYTES),) * 2
    )
    asked = min(DONORS_ASKED, replicas)
    total = asked * (frame_bytes(log_request) + frame_bytes(log_reply, _entries_bytes(agreed)))
    if included:
        request = messages.AggregateRequest(run=_NAME, block=0, round=LATE, digest=_NAME)
        reply = messages.AggregateReply(block=0, round=LATE)
        lengths = 4 * (1 + len(included))  # before the updates: their number and lengths
        total += frame_bytes(request) + frame_bytes(reply, lengths + sum(included))
    return total


@cache
def _entries_bytes(agreed: int) -> int:
    """The entry that a follower has, and the next one."""
    names = (
        number.to_bytes(len(_NAME), "big") for number in range(agreed)
    )  # in order, as they are
    parts = tuple(Contribution(name, identity.new_identity().text, 1 << 16, -100) for name in names)
    entry = Entry(LATE, _NAME, _NAME, _NAME, 1 << 30, parts, WORK_ONE * len(parts))
    return len(pack_log([entry, entry]))


@cache
def control_bytes(replicas: int) -> int:
    """Votes and records of one block in one round: an estimate (see above)."""
    who = identity.new_identity()
    listed = (UpdateRef(_NAME, who.text),) * replicas
    signed = seal_vote(who, _NAME, 0, Vote(who.text, LATE, _NAME, -1, listed))
    request = messages.VoteRequest(run=_NAME, block=0, round=LATE, vote=signed.blob)
    reply = messages.VoteReply(count=replicas)
    votes = frame_bytes(request)
    votes += frame_bytes(reply, len(pack_votes([signed] * replicas)))
    record = records.Record(
        run=_NAME,
        role=1,
        block=0,
        round=LATE,
        sequence=LATE,
        consensus=_NAME,
        head_round=LATE,
        update=_NAME,
        update_bytes=100_000,
        proposal_ms=1000,
        addresses=("/ip4/203.0.113.10/tcp/31337",),
    )
    own = records.seal(who, record, 1.0)
    known = payloads.pack_records([own] * replicas)
    shown = frame_bytes(payloads.announce_of(own))
    shown += frame_bytes(messages.AnnounceReply(count=replicas), len(known))
    in_dht = 2 * DHT_COPIES * len(own.value)  # stored, and read by somebody
    return replicas * ((replicas - 1) * (votes + shown) + in_dht)
