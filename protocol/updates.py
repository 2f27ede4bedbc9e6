"""Updates: their header, their digests, and several of them in one payload.

The header (block, round, sender) is covered by the update's digest: an update that is replayed in
a later round, sent to another block, or claimed by another peer is refused. After the header come
the bytes of `protocol.codec`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from protocol.errors import WireError
from protocol.frames import BytesLike, Oversize, content_digest
from protocol.limits import PAYLOAD_MAX_BYTES, PEER_ID_BYTES, UPDATES_PER_ENTRY, Kind
from protocol.packing import Malformed

_HEADER = struct.Struct(f">HQ{PEER_ID_BYTES}s")  # block, round, sender
_COUNT = struct.Struct(">I")

UPDATE_HEADER_BYTES = _HEADER.size


class UpdateError(WireError):
    """An update that no honest sender makes."""


class WrongBlock(UpdateError):
    """An update of another block."""


class WrongRound(UpdateError):
    """An update of another round: a replay, or a wrong clock."""


class WrongSender(UpdateError):
    """An update that another peer made."""


def update_digest(payload: BytesLike) -> bytes:
    """The digest that names an update."""
    return content_digest(payload)


def pack_update(block: int, number: int, sender: bytes, body: bytes) -> bytes:
    return _HEADER.pack(block, number, sender) + body


def update_body(payload: bytes, block: int, number: int, sender: bytes) -> bytes:
    """The codec's bytes, after a check that the header has this block, round and sender."""
    if len(payload) < _HEADER.size:
        raise Malformed("too short for an update")
    named_block, named_round, named_sender = _HEADER.unpack_from(payload)
    if named_block != block:
        raise WrongBlock(f"update of block {named_block}, not of block {block}")
    if named_round != number:
        raise WrongRound(f"update of round {named_round}, not of round {number}")
    if named_sender != sender:
        raise WrongSender("update that another peer made")
    return payload[_HEADER.size :]


def pack_updates(updates: Sequence[bytes]) -> bytes:
    """Encoded updates as one payload: their number, their lengths, then their bytes.

    Not msgpack, since they are the bulk of what a follower reads and should be copied only once.
    """
    lengths = [len(update) for update in updates]
    head = _COUNT.pack(len(updates)) + b"".join(map(_COUNT.pack, lengths))
    if len(updates) > UPDATES_PER_ENTRY or 0 in lengths:
        raise Malformed("a list of updates that nobody would accept")
    if len(head) + sum(lengths) > PAYLOAD_MAX_BYTES[Kind.AGGREGATE_REPLY]:
        raise Oversize("more updates than fit into a frame", "ask for them one by one")
    return b"".join([head, *updates])


def unpack_updates(
    payload: BytesLike, max_each_bytes: int, max_count: int = UPDATES_PER_ENTRY
) -> list[bytes]:
    """The updates in a payload. The caller compares their digests with those of the log entry."""
    data = memoryview(payload)
    if len(data) < _COUNT.size:
        raise Malformed("not a list of updates")
    (count,) = _COUNT.unpack_from(data)
    start = _COUNT.size * (count + 1)
    if count > max_count or start > len(data):
        raise Malformed(f"a list of {count} updates, the limit is {max_count}")
    lengths = struct.unpack_from(f">{count}I", data, _COUNT.size)
    if any(not 0 < length <= max_each_bytes for length in lengths):
        raise Malformed(f"an update that is empty or longer than {max_each_bytes} bytes")
    if start + sum(lengths) != len(data):
        raise Malformed("a list of updates that is cut off, or has bytes after its end")
    updates = []
    for length in lengths:
        updates.append(bytes(data[start : start + length]))
        start += length
    return updates
