"""Floods: storing nodes and readers stay bounded and keep many networks in view."""

from __future__ import annotations

import dataclasses
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator

import pytest

from protocol import admission
from protocol.admission import RecordTable, address_group, read_entries, select
from protocol.identity import Identity, peer_id_of
from protocol.limits import (
    BLOCK_NONE,
    KEYS_PER_NODE,
    RECORDS_CONSIDERED,
    RECORDS_PER_KEY,
    SIGNATURES_PER_LOOKUP,
)
from protocol.records import Record, SignedRecord, body_of, seal, subkey_of

NOW_S = 1_800_000_000.0
RUN = bytes(32)
SYBILS = 10_000


def signed(
    seed: int,
    address: str,
    sequence: int = 1,
    expiration_s: float = NOW_S + 300,
    run: bytes = RUN,
    block: int = 0,
) -> SignedRecord:
    addresses = (address,) if address else ()
    record = Record(run=run, role=1, block=block, round=1, sequence=sequence, addresses=addresses)
    return seal(Identity(seed.to_bytes(32, "big")), record, expiration_s)


def sybils(network: str = "/ip4/198.51.{}.{}/tcp/1") -> Iterator[SignedRecord]:
    """10,000 under one block. Made from one real record: their signatures are not the point."""
    model = signed(0, "/ip4/198.51.100.1/tcp/1")
    for number in range(SYBILS):
        peer_id = peer_id_of(number.to_bytes(32, "little"))
        address = network.format(number >> 8, number & 255)
        record = dataclasses.replace(model.record, addresses=(address,))
        yield dataclasses.replace(model, peer_id=peer_id, subkey=subkey_of(peer_id), record=record)


def honest(count: int) -> list[SignedRecord]:
    found = (signed(seed, f"/ip4/{seed}.{seed}.0.9/tcp/1") for seed in range(20, 120))
    key = signed(0, "/ip4/198.51.100.1/tcp/1").key
    return [s for s in found if s.key == key][:count]


@pytest.mark.parametrize(
    ("address", "group"),
    [
        ("/ip4/203.0.113.7/tcp/1", "203.0.0.0/16"),
        ("/ip6/2001:db8:1::7/tcp/1", "2001:db8::/32"),
        ("/ip6/fe80::1%eth0/tcp/1", "fe80::/32"),
        ("/dns4/a.example.org/tcp/1", "name"),
        ("/ip4/203.0.113.7/tcp/1/p2p/X/p2p-circuit", "relay 203.0.0.0/16"),
    ],
)
def test_address_groups(address: str, group: str) -> None:
    assert address_group((address,)) == group
    assert address_group(()) == "none"


# --- storing nodes ------------------------------------------------------------------------------


def test_table_keeps_and_renews() -> None:
    table = RecordTable()
    first = signed(1, "/ip4/1.1.1.1/tcp/1", sequence=5)
    assert table.offer(first, NOW_S).kept
    newer = signed(1, "/ip4/1.1.1.1/tcp/1", sequence=6, expiration_s=NOW_S + 200)
    assert table.offer(newer, NOW_S).kept
    assert table.entries(first.key, NOW_S) == [newer]
    assert table.entries(first.key, NOW_S + 200) == []


def test_table_refuses_a_replayed_older_record() -> None:
    table = RecordTable()
    newer = signed(1, "/ip4/1.1.1.1/tcp/1", sequence=6)
    assert table.offer(newer, NOW_S).kept
    # It lives longer, so hivemind's own rule (later expiration wins) would take it.
    older = signed(1, "/ip4/1.1.1.1/tcp/1", sequence=5, expiration_s=NOW_S + 800)
    assert table.offer(older, NOW_S).reason == "older than the record held"
    assert not table.offer(newer, NOW_S).kept
    assert table.entries(newer.key, NOW_S) == [newer]


def test_sybils_after_honest_peers_displace_only_themselves() -> None:
    table, peers = RecordTable(), honest(10)
    for peer in peers:
        assert table.offer(peer, NOW_S).kept
    kept = 0
    tracemalloc.start()
    started = time.perf_counter()
    for sybil in sybils():
        kept += table.offer(sybil, NOW_S).kept
    elapsed_s = time.perf_counter() - started
    grown = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(table) == RECORDS_PER_KEY
    assert kept == RECORDS_PER_KEY - len(peers)
    held = table.entries(peers[0].key, NOW_S)
    assert set(peers) <= set(held)
    assert elapsed_s < 20  # about 2 s under tracemalloc, which slows it down much
    assert grown < 1_000_000


def test_honest_peers_enter_a_key_that_sybils_filled() -> None:
    table, peers = RecordTable(), honest(10)
    for _, sybil in zip(range(1000), sybils(), strict=False):
        table.offer(sybil, NOW_S)
    for peer in peers:
        verdict = table.offer(peer, NOW_S)
        assert verdict.kept
        assert len(verdict.evicted) == 1
    held = table.entries(peers[0].key, NOW_S)
    groups = Counter(address_group(s.record.addresses) for s in held)
    assert len(held) == RECORDS_PER_KEY
    assert len(groups) == len(peers) + 1


def test_who_is_here_stays_when_every_sybil_claims_its_own_network() -> None:
    # Addresses are claims: this flood cannot be told from honest peers, so nobody is displaced.
    table, peers = RecordTable(), honest(10)
    for peer in peers:
        table.offer(peer, NOW_S)
    for number, sybil in enumerate(sybils("/ip6/2001:{:x}{:02x}::1/tcp/1")):
        table.offer(sybil, NOW_S)
        if number > 2000:
            break
    assert set(peers) <= set(table.entries(peers[0].key, NOW_S))
    assert len(table) == RECORDS_PER_KEY


def test_the_dead_go_first() -> None:
    table = RecordTable(records_per_key=2)
    first, second, third = honest(3)
    short = dataclasses.replace(second, expiration_s=NOW_S + 1)
    table.offer(first, NOW_S)
    table.offer(short, NOW_S)
    verdict = table.offer(third, NOW_S + 2)
    assert verdict.evicted == (short.subkey,)


def test_one_peer_cannot_take_all_keys() -> None:
    """Blocks are numbers that anybody can make up: it displaces its own keys, not others'."""
    table = RecordTable(keys=20)
    early = signed(2, "/ip4/2.2.2.2/tcp/1", block=1000)
    assert table.offer(early, NOW_S).kept
    for block in range(50):
        table.offer(signed(1, "", block=block), NOW_S)
    assert len(table) == 20
    for number in range(3, 13):  # honest ones come later, each under a key of its own
        late = signed(number, "", block=number + 100)
        verdict = table.offer(late, NOW_S)
        assert verdict.kept and verdict.evicted == (signed(1, "").subkey,)
        assert table.entries(late.key, NOW_S) == [late]
    assert table.entries(early.key, NOW_S) == [early]
    assert not table.offer(signed(1, "", block=99), NOW_S).kept
    assert len(table) == 20 == sum(table._breadth.values())


def test_a_key_that_others_use_too_is_not_displaced() -> None:
    table = RecordTable(keys=4)
    both = next(s for seed in range(2, 99) if (s := signed(seed, "")).key == signed(1, "").key)
    table.offer(signed(1, ""), NOW_S)
    table.offer(both, NOW_S)
    for block in (1, 2, 3):
        table.offer(signed(1, "", block=block), NOW_S)
    for number in range(200, 203):
        assert table.offer(signed(number, "", block=number), NOW_S).kept
    assert len(table.entries(both.key, NOW_S)) == 2
    assert table.offer(signed(204, "", block=204), NOW_S).reason == "too many keys"


def test_blocks_that_the_run_does_not_have_are_not_stored() -> None:
    table = RecordTable(blocks=3)
    for block in (0, 2, BLOCK_NONE):
        assert table.offer(signed(1, "", block=block), NOW_S).kept
    for block in (3, 4095):
        assert "does not have" in table.offer(signed(1, "", block=block), NOW_S).reason
    assert len(table) == 3


def test_a_flood_of_made_up_blocks_is_answered_quickly() -> None:
    """Whoever asks for a new key in a full table must not cost much; nobody wider is found."""
    table = RecordTable(keys=KEYS_PER_NODE)
    model = signed(0, "")
    for number in range(KEYS_PER_NODE * 16):
        subkey = subkey_of(peer_id_of((number % (KEYS_PER_NODE * 4)).to_bytes(32, "little")))
        key = (number % KEYS_PER_NODE).to_bytes(20, "big")
        table.offer(dataclasses.replace(model, key=key, subkey=subkey), NOW_S)
    started = time.perf_counter()
    for _ in range(20):
        table.offer(signed(1, "", block=7), NOW_S)
    assert time.perf_counter() - started < 5


def test_keys_are_bounded_too() -> None:
    table = RecordTable(keys=3)
    for block in range(5):
        table.offer(signed(1, "", block=block), NOW_S)
    assert len(table) == 3
    assert table.offer(signed(1, "", block=9), NOW_S).reason == "too many keys"
    later = signed(1, "", block=9, expiration_s=NOW_S + 900)
    assert table.offer(later, NOW_S + 400).kept  # a dead key made room


def test_other_runs_are_not_stored() -> None:
    table = RecordTable(runs=frozenset({RUN}))
    assert table.offer(signed(1, ""), NOW_S).kept
    assert table.offer(signed(1, "", run=b"x" * 32), NOW_S).reason == "another run"


# --- readers ------------------------------------------------------------------------------------


def test_select_prefers_networks_and_known_peers() -> None:
    peers = honest(5)
    crowd = [s for _, s in zip(range(100), sybils(), strict=False)]
    chosen = select(crowd + peers, NOW_S, 6, {})
    assert set(peers) < set(chosen)  # 5 networks, and one of the crowd
    known = {crowd[7].peer_id: 3, crowd[9].peer_id: 50}
    chosen = select(crowd + peers, NOW_S, 4, known)
    assert chosen[:2] == [crowd[9], crowd[7]]


def test_select_leaves_room_for_newcomers() -> None:
    peers = honest(20)
    known = {peer.peer_id: 10 for peer in peers[:16]}
    chosen = select(peers, NOW_S, 16, known)
    assert len(chosen) == 16
    assert sum(peer.peer_id in known for peer in chosen) == 12
    assert len(select(peers[:16], NOW_S, 16, known)) == 16  # no newcomer: no empty place


def test_select_takes_the_newest_and_the_living() -> None:
    old = signed(1, "/ip4/1.1.1.1/tcp/1", sequence=1, expiration_s=NOW_S + 800)
    new = signed(1, "/ip4/1.1.1.1/tcp/1", sequence=2)
    dead = signed(2, "/ip4/2.2.2.2/tcp/1", expiration_s=NOW_S - 60)
    assert select([new, old, dead], NOW_S, 10, {}) == [new]
    assert select([old, new], NOW_S, 10, {}) == [new]
    assert select([old], NOW_S, 0, {}) == []


def test_the_salt_decides_among_strangers() -> None:
    crowd = [s for _, s in zip(range(200), sybils(), strict=False)]
    picks = {tuple(s.peer_id for s in select(crowd, NOW_S, 3, {}, bytes([i]))) for i in range(8)}
    assert len(picks) == 8


def test_select_is_bounded() -> None:
    taken = 0

    def endless() -> Iterator[SignedRecord]:
        nonlocal taken
        while True:
            for sybil in sybils():
                taken += 1
                yield sybil

    started = time.perf_counter()
    assert len(select(endless(), NOW_S, 32, {})) == 32
    assert taken <= RECORDS_CONSIDERED + 1
    assert time.perf_counter() - started < 5


def entry(s: SignedRecord) -> tuple[bytes, bytes, bytes, float]:
    return s.key, s.subkey, s.value, s.expiration_s


def test_read_entries_verifies_within_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = 0
    real = admission.check_signature

    def counting(claim: SignedRecord) -> None:
        nonlocal checked
        checked += 1
        real(claim)

    monkeypatch.setattr(admission, "check_signature", counting)
    peers = honest(8)
    # A quarter of them fall into the key's bucket and parse; the signature is not theirs.
    flood = [(peers[0].key, s.subkey, peers[0].value, s.expiration_s) for s in sybils()]
    entries = [entry(p) for p in peers] + flood
    started = time.perf_counter()
    found = read_entries(entries, NOW_S, 32, {})
    assert set(found) == set(peers)
    assert 0 < checked <= SIGNATURES_PER_LOOKUP
    assert time.perf_counter() - started < 5


def test_a_forged_newer_claim_does_not_hide_the_true_record() -> None:
    true = signed(1, "/ip4/1.1.1.1/tcp/1", sequence=1)
    newer = signed(1, "/ip4/1.1.1.1/tcp/1", sequence=9)
    forged = (newer.key, newer.subkey, body_of(newer.value) + bytes(64), newer.expiration_s)
    assert read_entries([forged, entry(true)], NOW_S, 5, {}) == [true]


def test_read_entries_skips_junk() -> None:
    good = signed(1, "/ip4/1.1.1.1/tcp/1")
    junk = [(b"", b"", b"", 0.0), (good.key, good.subkey, b"x" * 600, good.expiration_s)]
    assert read_entries([*junk, entry(good)], NOW_S, 5, {}) == [good]
