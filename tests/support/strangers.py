"""Peers of a run for tests of whom a node prefers: their records, and logs that name some."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from node.network.standing import Standings
from protocol.identity import Identity, new_identity
from protocol.log import Contribution, Entry, genesis
from protocol.records import Record, Role, SignedRecord, seal
from swarm.consensus.log import ConsensusLog
from tests.support.loopback import RUN_ID


def many(count: int) -> list[Identity]:
    return [new_identity() for _ in range(count)]


def record_of(
    owner: Identity, life_s: float = 300.0, sequence: int = 1, **more: Any
) -> SignedRecord:
    """A stranger may let it live three times as long as an honest peer does."""
    values: dict[str, Any] = {
        "role": int(Role.REPLICA),
        "block": 0,
        "round": 5,
        "consensus": bytes(32),
        "addresses": ("/ip4/203.0.113.7/tcp/4001",),
        **more,
    }
    return seal(owner, Record(run=RUN_ID, sequence=sequence, **values), time.time() + life_s)


def log_of(contributors: Sequence[Identity], rounds: int = 4) -> ConsensusLog:
    """A log to whose last rounds all of these contributed."""
    log = ConsensusLog((genesis("run", 0, bytes(32)),))
    for number in range(rounds):
        parts = tuple(
            Contribution(bytes([number, place]) * 16, owner.text, 65536)
            for place, owner in enumerate(contributors)
        )
        log = log.appended(Entry(number, log.head.digest, bytes(32), bytes(32), 1, parts))
    return log


def standings_with(contributors: Sequence[Identity], block: int = 0) -> Standings:
    standings, log = Standings(), log_of(contributors)
    standings.works_on(block, {block: log}.get)
    return standings
