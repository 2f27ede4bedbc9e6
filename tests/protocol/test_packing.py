"""msgpack of strangers: memory is bounded by limits, not by what a length claims."""

from __future__ import annotations

import tracemalloc

import pytest

from protocol import limits
from protocol.limits import HEADER_MAX_BYTES, LIST_MAX_ITEMS, MAP_MAX_FIELDS, RECORD_MAX_BYTES
from protocol.packing import Malformed, pack, unpack, unpack_map


def peak_bytes_of_refusing(data: bytes, max_bytes: int) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(Malformed):
            unpack_map(data, max_bytes)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def nested(mark: bytes, length: int, size: int) -> bytes:
    """A map with one field, in it a list in a list in a list, each of them said to be long."""
    return (b"\x81\xa1x" + (mark + length.to_bytes(2, "big")) * size)[:size]


@pytest.mark.parametrize("size", [RECORD_MAX_BYTES, HEADER_MAX_BYTES])
@pytest.mark.parametrize("length", [LIST_MAX_ITEMS, LIST_MAX_ITEMS + 1, 300, 7900])
def test_nested_lists_that_claim_to_be_long_take_little_memory(size: int, length: int) -> None:
    """1024 of them took 65 MB and 0.2 s of the event loop: a list is allocated by its length."""
    assert peak_bytes_of_refusing(nested(b"\xdc", length, size), size) < 2 << 20


@pytest.mark.parametrize("length", [MAP_MAX_FIELDS, 7900])
def test_nested_maps_that_claim_to_be_long_take_little_memory(length: int) -> None:
    data = (b"\x81\xa1x" + (b"\xde" + length.to_bytes(2, "big") + b"\xa1y") * HEADER_MAX_BYTES)[
        :HEADER_MAX_BYTES
    ]
    assert peak_bytes_of_refusing(data, HEADER_MAX_BYTES) < 2 << 20


@pytest.mark.parametrize("mark", [b"\xc6", b"\xdb", b"\xc9", b"\xdd", b"\xdf"])
def test_one_length_of_four_billion(mark: bytes) -> None:
    """bin, str, ext, array and map of 32-bit lengths."""
    data = b"\x81\xa1x" + mark + b"\xff" * 5
    assert peak_bytes_of_refusing(data, HEADER_MAX_BYTES) < 1 << 20


def test_every_list_of_a_header_is_within_the_limit() -> None:
    """The larger ones are payloads and are read row by row."""
    known = (
        limits.ADDRESSES_PER_RECORD,
        limits.BLOCKS_PER_HELLO,
        limits.LISTED_PER_VOTE,
        limits.PINS_PER_LOG,
        limits.SWEEP_HOPS_MAX,
        limits.SWEEP_VERSIONS_PER_REPLY,
    )
    assert max(known) <= LIST_MAX_ITEMS
    longest = pack({"x": [0] * LIST_MAX_ITEMS})
    assert unpack_map(longest, HEADER_MAX_BYTES) == {"x": [0] * LIST_MAX_ITEMS}


def test_who_reads_its_own_file_may_allow_more() -> None:
    data = pack([0] * 1000)
    with pytest.raises(Malformed):
        unpack(data, len(data))
    assert unpack(data, len(data), 1000) == [0] * 1000
