"""The ledger: sums are exact, peers are bounded, a restart loses nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.frames import Tally
from protocol.ledger import OTHERS, Count, Ledger, LedgerDamaged
from protocol.limits import BLOCK_NONE, LEDGER_CELLS_PER_PEER
from protocol.messages import Purpose


def test_books_by_purpose_peer_and_block() -> None:
    ledger = Ledger()
    tally = Tally(10, 20, 1, 2)
    ledger.book(tally, "alice", Purpose.UPDATE, 3)
    assert tally == Tally()  # moved, not copied: booking twice counts once
    ledger.book(tally, "alice", Purpose.UPDATE, 3)
    ledger.book(Tally(1, 2, 1, 1), "bob", Purpose.VOTE, 3)
    ledger.book(Tally(5, 5, 1, 1), "bob", Purpose.UPDATE, 4)
    ledger.book(Tally(7, 0, 1, 0), "bob", 200)  # an unknown purpose
    assert ledger.total() == Count(23, 27, 4, 4)
    assert ledger.by_purpose()[Purpose.UPDATE] == Count(15, 25, 2, 3)
    assert ledger.by_purpose()[Purpose.CONTROL] == Count(7, 0, 1, 0)
    assert ledger.by_peer()["bob"] == Count(13, 7, 3, 2)
    assert ledger.of_peer("bob")[Purpose.CONTROL, BLOCK_NONE].bytes_in == 7


def test_strangers_are_folded_and_sums_stay() -> None:
    ledger = Ledger(max_peers=10)
    for number in range(10):
        ledger.book(Tally(10_000 + number, 0, 1, 0), f"friend{number}", Purpose.UPDATE, 1)
    for number in range(5000):
        ledger.book(Tally(1, 1, 1, 1), f"stranger{number}", Purpose.CONTROL)
    assert len(ledger.by_peer()) <= 10 + 64 + 1
    assert all(f"friend{number}" in ledger.by_peer() for number in range(10))
    assert ledger.total() == Count(100_045 + 5000, 5000, 5010, 5000)
    assert ledger.by_peer()[OTHERS].bytes_in > 4900


def test_a_peer_that_names_ever_new_blocks() -> None:
    ledger = Ledger()
    for block in range(2000):
        ledger.book(Tally(1, 0, 1, 0), "peer", Purpose.UPDATE, block)
    assert len(ledger.of_peer("peer")) <= LEDGER_CELLS_PER_PEER + 1
    assert ledger.total().bytes_in == 2000


bookings = st.lists(
    st.tuples(
        st.integers(0, 2**40),
        st.integers(0, 2**40),
        st.sampled_from(["a", "b", "c", "d"]),
        st.sampled_from(Purpose),
        st.integers(0, 5),
    ),
    max_size=30,
)


@given(bookings)
def test_survives_a_restart(entries: list[tuple[int, int, str, Purpose, int]]) -> None:
    ledger = Ledger()
    for bytes_in, bytes_out, peer, purpose, block in entries:
        ledger.book(Tally(bytes_in, bytes_out, 1, 1), peer, purpose, block)
    ledger.book_estimate("dht", 5, 6)
    again = Ledger.from_bytes(ledger.to_bytes())
    assert again.to_bytes() == ledger.to_bytes()
    assert again.total() == ledger.total() == sum(again.by_peer().values(), Count())
    assert again.total() == sum(again.by_purpose().values(), Count())


def test_estimates_stay_apart() -> None:
    ledger = Ledger()
    ledger.book_estimate("dht", 100, 200)
    ledger.book_estimate("dht", 1, 2)
    assert ledger.total() == Count()
    assert ledger.estimates() == {"dht": Count(101, 202)}
    assert b'"estimated":{"dht"' in ledger.to_bytes()


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    assert Ledger.load(path).total() == Count()
    ledger = Ledger()
    ledger.book(Tally(1, 2, 3, 4), "peer", Purpose.RELAY, 1)
    path.write_bytes(ledger.to_bytes())
    assert Ledger.load(path).total() == Count(1, 2, 3, 4)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b'{"format":2,"counted":[],"estimated":{}}',
        b'{"format":1,"counted":[["p","update",1,1,1,1]],"estimated":{}}',
        b'{"format":1,"counted":[["p","update",1,-1,1,1,1]],"estimated":{}}',
        b'{"format":1,"counted":[["p","update",1,1.5,1,1,1]],"estimated":{}}',
        b'{"format":1,"counted":[["p","nonsense",1,1,1,1,1]],"estimated":{}}',
        b'{"format":1,"counted":[7],"estimated":{}}',
        b'{"format":1,"counted":[],"estimated":[]}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_damaged_files(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "ledger.json"
    path.write_bytes(data)
    with pytest.raises(LedgerDamaged):
        Ledger.load(path)
