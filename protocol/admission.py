"""Whom a reader believes first, and what a storing node keeps when strangers flood a key.

Decides with bounded time and memory, however many records there are. Knows only verified records
and (in `read_entries`) claims that it verifies itself; nothing of hivemind or the network.

Addresses are claims. Diversity by claimed network costs an attacker little more than diversity by
identity would; it stops accidents and lazy floods. What counts in the end is `seen_rounds`: peers
whose updates were exchanged for some rounds.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from protocol.errors import WireError
from protocol.frames import content_digest
from protocol.limits import (
    BLOCK_NONE,
    CLOCK_SKEW_S,
    KEYS_PER_NODE,
    RECORDS_CONSIDERED,
    RECORDS_PER_KEY,
    SEEN_ROUNDS,
    SIGNATURES_PER_LOOKUP,
)
from protocol.records import HOST_PATTERN, SignedRecord, check_signature, parse_claim

# --- what a reader looks at ---------------------------------------------------------------------


def address_group(addresses: tuple[str, ...]) -> str:
    """Who is likely to be one and the same operator: /16 for IPv4, /32 for IPv6.

    Hosts behind one relay share the relay's network; all names are one group, since a domain
    yields as many as one likes.
    """
    if not addresses:
        return "none"
    match = HOST_PATTERN.fullmatch(addresses[0])
    if match is None or not match[1].startswith("ip"):
        return "name"
    prefix = 16 if match[1] == "ip4" else 32
    network = ipaddress.ip_network(f"{match[2].split('%')[0]}/{prefix}", strict=False)
    return f"relay {network}" if "/p2p-circuit" in addresses[0] else str(network)


def select(
    records: Iterable[SignedRecord],
    now_s: float,
    cap: int,
    seen_rounds: Mapping[bytes, int],
    salt: bytes = b"",
) -> list[SignedRecord]:
    """At most `cap` live peers, the newest record of each, known ones and many networks first.

    Work is bounded by RECORDS_CONSIDERED. A quarter of the places stays open for strangers, so
    that newcomers can enter. `salt` (secret, of this reader) orders strangers within a network:
    nobody can grind identities that come first, and readers do not all pick the same ones.
    """
    newest: dict[bytes, SignedRecord] = {}
    for _, signed in zip(range(RECORDS_CONSIDERED), records, strict=False):
        held = newest.get(signed.peer_id)
        if signed.expiration_s > now_s - CLOCK_SKEW_S and (
            held is None or signed.freshness > held.freshness
        ):
            newest[signed.peer_id] = signed
    known = [s for s in newest.values() if seen_rounds.get(s.peer_id, 0) >= SEEN_ROUNDS]
    strangers = [s for s in newest.values() if seen_rounds.get(s.peer_id, 0) < SEEN_ROUNDS]
    for_strangers = min(len(strangers), cap // 4)
    chosen = _spread(known, seen_rounds, salt)[: max(cap - for_strangers, 0)]
    return chosen + _spread(strangers, seen_rounds, salt)[: max(cap - len(chosen), 0)]


def _spread(
    records: list[SignedRecord], seen_rounds: Mapping[bytes, int], salt: bytes
) -> list[SignedRecord]:
    """In turns over the networks; within one by rounds seen, then by a salted hash."""

    def rank(signed: SignedRecord) -> tuple[int, bytes]:
        return -seen_rounds.get(signed.peer_id, 0), content_digest(salt + signed.peer_id)

    turn_of_group: Counter[str] = Counter()
    turns: list[tuple[int, SignedRecord]] = []
    for signed in sorted(records, key=rank):
        group = address_group(signed.record.addresses)
        turns.append((turn_of_group[group], signed))
        turn_of_group[group] += 1
    return [signed for _, signed in sorted(turns, key=lambda turn: turn[0])]


def read_entries(
    entries: Iterable[tuple[bytes, bytes, bytes, float]],
    now_s: float,
    cap: int,
    seen_rounds: Mapping[bytes, int],
    salt: bytes = b"",
) -> list[SignedRecord]:
    """`select` over (key, subkey, value, expiration) from an untrusted source.

    Parses at most RECORDS_CONSIDERED, checks at most SIGNATURES_PER_LOOKUP signatures; known
    peers and many networks come first there too. Whatever is invalid is left out.
    """
    claims: list[SignedRecord] = []
    for _, entry in zip(range(RECORDS_CONSIDERED), entries, strict=False):
        try:
            claims.append(parse_claim(*entry, now_s=now_s))
        except WireError:
            continue
    # Not the newest per peer yet: a forged claim must not hide a true one.
    verified: list[SignedRecord] = []
    for claim in _spread(claims, seen_rounds, salt)[:SIGNATURES_PER_LOOKUP]:
        try:
            check_signature(claim)
        except WireError:
            continue
        verified.append(claim)
    return select(verified, now_s, cap, seen_rounds, salt)


# --- what a storing node keeps ------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """Whether an offered record is kept, whose record had to go for it, and why not."""

    kept: bool
    evicted: tuple[bytes, ...] = ()  # subkeys
    reason: str = ""


class _Key:
    """The records of one key, in the order of arrival (a renewal keeps its place).

    Networks are remembered: working them out again for each newcomer took a flood of 10,000 from
    0.1 s to 15 s.
    """

    def __init__(self) -> None:
        self.records: dict[bytes, SignedRecord] = {}
        self.groups: dict[bytes, str] = {}
        self.crowd: Counter[str] = Counter()

    def put(self, signed: SignedRecord) -> None:
        if signed.subkey in self.groups:
            self._leave_group(signed.subkey)
        self.records[signed.subkey] = signed
        group = self.groups[signed.subkey] = address_group(signed.record.addresses)
        self.crowd[group] += 1

    def drop(self, subkey: bytes) -> None:
        self._leave_group(subkey)
        del self.records[subkey], self.groups[subkey]

    def _leave_group(self, subkey: bytes) -> None:
        group = self.groups[subkey]
        self.crowd[group] -= 1
        if not self.crowd[group]:
            del self.crowd[group]

    def dead(self, now_s: float) -> tuple[bytes, ...]:
        return tuple(k for k, signed in self.records.items() if signed.expiration_s <= now_s)

    def superfluous(self, newcomer: bytes) -> bytes:
        """The latest comer of the most crowded network; in a tie the newcomer goes."""
        most = max(self.crowd.values())
        if self.crowd[self.groups[newcomer]] == most:
            return newcomer
        crowded = next(group for group, count in self.crowd.items() if count == most)
        return next(k for k in reversed(self.records) if self.groups[k] == crowded)


class RecordTable:
    """The records of one storing node, bounded per key and in keys.

    A full key drops from the network (address group) that holds most of it, the latest comer
    first: a flood from one place displaces itself, and peers that were here before it stay. With
    `runs` given, other runs' records are not kept at all; with `blocks`, none of blocks that the
    run does not have, which would cost one identity nothing and take all of the keys.
    """

    def __init__(
        self,
        runs: frozenset[bytes] = frozenset(),
        records_per_key: int = RECORDS_PER_KEY,
        keys: int = KEYS_PER_NODE,
        blocks: int | None = None,
    ) -> None:
        self._runs = runs
        self._blocks = blocks
        self._records_per_key = records_per_key
        self._max_keys = keys
        self._keys: dict[bytes, _Key] = {}
        self._breadth: Counter[bytes] = Counter()  # subkey -> under how many keys it stands

    def __len__(self) -> int:
        return sum(len(held.records) for held in self._keys.values())

    def entries(self, key: bytes, now_s: float) -> list[SignedRecord]:
        """The live records of a key."""
        held = self._keys.get(key)
        if held is None:
            return []
        return [signed for signed in held.records.values() if signed.expiration_s > now_s]

    def offer(self, signed: SignedRecord, now_s: float) -> Verdict:
        """Decide about a *verified* record. Time is bounded by records_per_key."""
        if self._runs and signed.record.run not in self._runs:
            return Verdict(False, reason="another run")
        if self._blocks is not None and self._blocks <= signed.record.block != BLOCK_NONE:
            return Verdict(False, reason="a block that the run does not have")
        held = self._keys.get(signed.key)
        if held is None:
            return self._begin_key(signed, now_s)
        previous = held.records.get(signed.subkey)
        if previous is not None and signed.freshness <= previous.freshness:
            return Verdict(False, reason="older than the record held")
        self._breadth[signed.subkey] += previous is None
        held.put(signed)
        if len(held.records) <= self._records_per_key:
            return Verdict(True)
        evicted = held.dead(now_s) or (held.superfluous(signed.subkey),)
        for subkey in evicted:
            held.drop(subkey)
        self._narrow(evicted)
        if signed.subkey in evicted:
            return Verdict(False, reason="its network has its share of this key already")
        return Verdict(True, evicted)

    def _begin_key(self, signed: SignedRecord, now_s: float) -> Verdict:
        evicted: tuple[bytes, ...] = ()
        if len(self._keys) >= self._max_keys:
            key = self._dead_key(now_s) or self._widest_key(self._breadth.get(signed.subkey, 0) + 1)
            if key is None:
                return Verdict(False, reason="too many keys")
            evicted = tuple(self._keys.pop(key).records)
            self._narrow(evicted)
        held = self._keys[signed.key] = _Key()
        held.put(signed)
        self._breadth[signed.subkey] += 1
        return Verdict(True, evicted)

    def _dead_key(self, now_s: float) -> bytes | None:
        for key, held in self._keys.items():
            if len(held.dead(now_s)) == len(held.records):
                return key
        return None

    def _widest_key(self, breadth: int) -> bytes | None:
        """The key of those who stand under most keys; None if nobody has more than `breadth`.

        A key counts as its most modest owner does: whoever spreads over keys that others use as
        well cannot take those along.
        """
        widest: bytes | None = None
        for key, held in self._keys.items():
            if all(self._breadth[subkey] > breadth for subkey in held.records):
                breadth = min(self._breadth[subkey] for subkey in held.records)
                widest = key
        return widest

    def _narrow(self, subkeys: Iterable[bytes]) -> None:
        """Their records under one key are gone."""
        for subkey in subkeys:
            self._breadth[subkey] -= 1
            if not self._breadth[subkey]:
                del self._breadth[subkey]
