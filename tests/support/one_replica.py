"""One replica's round by itself, for tests: its rules, its updates and those of made-up peers."""

from __future__ import annotations

from protocol.log import genesis
from protocol.votes import UpdateRef
from swarm.consensus.log import ConsensusLog
from swarm.rounds.deadline import DeadlineRules
from swarm.rounds.state import RoundRules, RoundState

RULES = RoundRules(0.0, 20.0, DeadlineRules(1.0, 6.0), 1.5, 1.5)
START = genesis("run", 0, bytes(32))


def fresh(me: str = "me") -> RoundState:
    return RoundState(me, RULES, ConsensusLog((START,)))


def own(number: int) -> UpdateRef:
    return UpdateRef(number.to_bytes(32, "big"), "me")


def theirs(peer: int, number: int) -> UpdateRef:
    return UpdateRef(bytes([peer + 1]) * 28 + number.to_bytes(4, "big"), f"p{peer}")
