"""The peer book: bounded, kept over restarts, and not displaced by hearsay."""

from __future__ import annotations

from pathlib import Path

from node.network.discovery import PeerBook
from protocol.identity import Identity, new_identity
from tests.support.strangers import log_of, many, standings_with


def test_the_peer_book_is_bounded_kept_and_never_in_the_way(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    book = PeerBook(path)
    peers = [new_identity().peer_id for _ in range(300)]
    for number, peer in enumerate(peers):
        book.remember(peer, [f"/ip4/10.0.{number // 250}.1/tcp/{number + 1}", "nonsense"])
    book.remember(peers[100], ["/ip4/10.9.9.9/tcp/1"])
    book.remember(peers[0], [])  # nothing to remember
    assert len(book) == 256
    assert book.latest(1) == [(peers[100], ("/ip4/10.9.9.9/tcp/1",))]
    path.write_bytes(book.to_bytes())
    again = PeerBook(path)
    assert len(again) == 256 and again.latest(5) == book.latest(5)
    for damaged in (b"", b"[", b"[[1]]", b'[["/ip4/x"]]', b"[[]]", b"7", b"[" * 9999):
        path.write_bytes(damaged)
        assert len(PeerBook(path)) == 0
    assert len(PeerBook(tmp_path / "none")) == 0


def fill(book: PeerBook, peers: list[Identity]) -> None:
    for peer in peers:
        book.remember(peer.peer_id, ["/ip4/10.0.0.1/tcp/1"])


def ids(peers: list[Identity]) -> list[bytes]:
    return [peer.peer_id for peer in peers]


def test_hearsay_displaces_nobody_from_the_peer_book(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    workers, met = many(3), many(3)
    book = PeerBook(path, standings_with(workers))
    for peer in met:
        book.standings.spoke(peer.peer_id)
    fill(book, workers + met)
    fill(book, many(600))
    assert [peer for peer, _ in book.latest(6)] == ids(workers)[::-1] + ids(met)[::-1]
    assert len(book) == 256
    # Neither do speakers displace contributors,
    flood = many(300)
    for peer in flood:
        book.standings.spoke(peer.peer_id)
    fill(book, flood)
    assert [peer for peer, _ in book.latest(3)] == ids(workers)[::-1]
    # and after a restart those that were met are still known as such.
    path.write_bytes(book.to_bytes())
    again = PeerBook(path)
    fill(again, many(600))
    assert all(again.addresses(peer) for peer in ids(workers))


def test_whose_word_counts() -> None:
    book = PeerBook()
    named, met, workers = many(20), many(20), many(2)
    fill(book, named)
    assert book.trusted(8) == ids(named)[:-9:-1]  # there is nobody else
    for peer in met:
        book.standings.spoke(peer.peer_id)
    fill(book, met)
    fill(book, many(20))
    assert book.trusted(8) == ids(met)[:-9:-1]
    fill(book, workers)
    book.standings.works_on(0, lambda block: log_of(workers))
    assert book.trusted(8) == [*ids(workers)[::-1], *ids(met)[:-3:-1]]
