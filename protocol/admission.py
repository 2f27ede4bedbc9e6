"""Which records a reader considers, and which a storing node keeps when a key is flooded.

Time and memory are bounded, however many records there are.

Known limit: addresses are only claims. Diversity of claimed networks costs an attacker little more
than diversity of identities; it stops accidents and lazy floods. What protects in the end is
`seen_rounds`: peers whose updates were exchanged for some rounds come first.
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
    """The network of a peer, as a guess at its operator: /16 for IPv4, /32 for IPv6.

    Hosts behind one relay share the relay's network. All DNS names are one group, since the owner
    of a domain can make any number of them.
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
    """The newest records of at most `cap` live peers, known peers first, spread over networks.

    Work is bounded by RECORDS_CONSIDERED. A quarter of the places is for unknown peers, so that
    newcomers can enter. `salt`, a secret of this reader, orders peers within a network: identities
    cannot be ground to come first, and readers do not all pick the same ones.
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
    """Records ordered round robin over networks; within one by rounds seen, then by salted hash."""

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
    """Verify (key, subkey, value, expiration) from an untrusted source, then `select`.

    Parses at most RECORDS_CONSIDERED, checks at most SIGNATURES_PER_LOOKUP signatures, in the same
    order of preference. Invalid records are left out.
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
class Admission:
    """Whether an offered record is kept, which records it displaced, or why it was refused."""

    kept: bool
    evicted: tuple[bytes, ...] = ()  # subkeys
    reason: str = ""


class _Key:
    """The records of one key, in the order of arrival (a renewal keeps its place).

    Their networks are kept: computing them again for each newcomer made a flood of 10,000 records
    take 15 s instead of 0.1 s.
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
        """Which record to drop: the latest of the largest network; in a tie the newcomer."""
        most = max(self.crowd.values())
        if self.crowd[self.groups[newcomer]] == most:
            return newcomer
        crowded = next(group for group, count in self.crowd.items() if count == most)
        return next(k for k in reversed(self.records) if self.groups[k] == crowded)


class RecordTable:
    """The records of one storing node, with a limit on keys and on records per key.

    A full key drops the latest record of the network (address group) with most records: a flood
    from one network displaces itself, and earlier peers stay. With `runs`, records of other runs
    are refused; with `blocks`, those of blocks that the run does not have, with which one identity
    could take all keys.
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

    def offer(self, signed: SignedRecord, now_s: float) -> Admission:
        """Keep or refuse a *verified* record. Time is bounded by records_per_key."""
        if self._runs and signed.record.run not in self._runs:
            return Admission(False, reason="another run")
        if self._blocks is not None and self._blocks <= signed.record.block != BLOCK_NONE:
            return Admission(False, reason="a block that the run does not have")
        held = self._keys.get(signed.key)
        if held is None:
            return self._begin_key(signed, now_s)
        previous = held.records.get(signed.subkey)
        if previous is not None and signed.freshness <= previous.freshness:
            return Admission(False, reason="older than the record held")
        self._breadth[signed.subkey] += previous is None
        held.put(signed)
        if len(held.records) <= self._records_per_key:
            return Admission(True)
        evicted = held.dead(now_s) or (held.superfluous(signed.subkey),)
        for subkey in evicted:
            held.drop(subkey)
        self._narrow(evicted)
        if signed.subkey in evicted:
            return Admission(False, reason="its network has its share of this key already")
        return Admission(True, evicted)

    def _begin_key(self, signed: SignedRecord, now_s: float) -> Admission:
        evicted: tuple[bytes, ...] = ()
        if len(self._keys) >= self._max_keys:
            key = self._dead_key(now_s) or self._widest_key(self._breadth.get(signed.subkey, 0) + 1)
            if key is None:
                return Admission(False, reason="too many keys")
            evicted = tuple(self._keys.pop(key).records)
            self._narrow(evicted)
        held = self._keys[signed.key] = _Key()
        held.put(signed)
        self._breadth[signed.subkey] += 1
        return Admission(True, evicted)

    def _dead_key(self, now_s: float) -> bytes | None:
        for key, held in self._keys.items():
            if len(held.dead(now_s)) == len(held.records):
                return key
        return None

    def _widest_key(self, breadth: int) -> bytes | None:
        """The key whose peers have records under most keys; None if none exceeds `breadth`.

        A key counts as its peer with the fewest keys, so that a peer that writes to many keys does
        not endanger those that others use as well.
        """
        widest: bytes | None = None
        for key, held in self._keys.items():
            if all(self._breadth[subkey] > breadth for subkey in held.records):
                breadth = min(self._breadth[subkey] for subkey in held.records)
                widest = key
        return widest

    def _narrow(self, subkeys: Iterable[bytes]) -> None:
        """Count one key less for each of these subkeys."""
        for subkey in subkeys:
            self._breadth[subkey] -= 1
            if not self._breadth[subkey]:
                del self._breadth[subkey]
