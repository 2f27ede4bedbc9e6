"""What a replica knows about the exchange of a round, and who takes part in it.

Decides the form of the state and reads membership from it. Knows nothing of what follows from an
event: that is `swarm.rounds.round`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from protocol.votes import UpdateRef
from swarm.consensus.log import ConsensusLog
from swarm.consensus.trust import TrustBook
from swarm.consensus.votes import Ballot
from swarm.rounds import actions as act
from swarm.rounds.deadline import DeadlineRules

MAX_GROUP = 16  # replicas of a block that exchange with each other
MAX_EARLY = 256
MAX_KNOWN = 1024


@dataclass(frozen=True)
class RoundRules:
    """The run's timing. An exchange must fit into a period: checked here, once."""

    start_s: float
    period_s: float
    deadline: DeadlineRules
    vote_window_s: float
    repair_window_s: float
    last: int | None = None  # the last exchange of the run; None: it has no end

    def ended(self, number: int) -> bool:
        return self.last is not None and number > self.last

    def __post_init__(self) -> None:
        windows = self.deadline.ceiling_s + 2 * self.vote_window_s + 3 * self.repair_window_s
        if windows > self.period_s:
            raise ValueError(f"an exchange of {windows} s does not fit into {self.period_s} s")


class Phase(enum.IntEnum):
    COLLECT = 0
    VOTE = 1
    REPAIR = 2
    AGGREGATE = 3
    DONE = 4


@dataclass(frozen=True)
class Stage:
    """The passage of a round from COLLECT to DONE."""

    opens_s: float
    first_s: float
    second_s: float
    third_s: float
    phase: Phase = Phase.COLLECT
    offers: Mapping[UpdateRef, tuple[str, ...]] = field(default_factory=dict)  # -> holders
    pulling: frozenset[UpdateRef] = frozenset()
    held: Mapping[UpdateRef, float] = field(default_factory=dict)  # -> arrived after, seconds
    refused: Mapping[UpdateRef, str] = field(default_factory=dict)
    ballot: Ballot = field(default_factory=Ballot)
    asked: bool = False
    agreed: tuple[UpdateRef, ...] | None = None


@dataclass(frozen=True)
class Sync:
    """We know that we stand on the wrong head and are fetching the right one."""

    target: bytes
    until_s: float


@dataclass(frozen=True)
class PeerView:
    """The newest record or vote of a peer."""

    round: int
    head: bytes
    head_round: int
    proposal_s: float


@dataclass(frozen=True)
class RoundState:
    """Everything that a replica knows about the exchange. Immutable; plain data."""

    me: str
    rules: RoundRules
    log: ConsensusLog
    trust: TrustBook = field(default_factory=TrustBook)
    warm_until: int = 0  # a newcomer sends no update up to this round
    round: int = 0
    stage: Stage | None = None
    own: UpdateRef | None = None
    own_size_bytes: int = 0
    in_flight: Mapping[UpdateRef, int] = field(default_factory=dict)  # -> its round
    peers: Mapping[str, PeerView] = field(default_factory=dict)
    arrivals_s: tuple[float, ...] = ()
    sync: Sync | None = None
    early: tuple[act.Event, ...] = ()  # of the next round
    outcome: str = "missed"


def with_stage(state: RoundState, **changes: object) -> RoundState:
    if state.stage is None:
        return state
    return replace(state, stage=replace(state.stage, **changes))  # type: ignore[arg-type]


def opened(rules: RoundRules, opens_s: float, first_s: float) -> Stage:
    second = first_s + rules.vote_window_s
    return Stage(opens_s, first_s, second, second + rules.repair_window_s)


def members(state: RoundState) -> tuple[str, ...]:
    """All replicas of the block that we know, with us."""
    return (*state.peers, state.me)


def active(state: RoundState, peer: str) -> bool:
    """Seen in this round or the one before, and not excluded."""
    view = state.peers.get(peer)
    fresh = view is not None and view.round >= state.round - 1
    return fresh and not state.trust.excluded(peer, state.round)


def kept_for_later(waiting: tuple[act.Event, ...], event: act.Event) -> tuple[act.Event, ...]:
    """What waits to be heard, with one more event: bounded, and fair.

    Of each peer the newest of a kind, so that one who talks much leaves room for the others. Of its
    votes the first two that differ: they are what shows that it is two-faced. Identities are free:
    that only a few of them are heard at all is the caller's business.
    """
    of_it = tuple(e for e in waiting if _said_by(e) == _said_by(event))
    others = tuple(e for e in waiting if _said_by(e) != _said_by(event))
    if isinstance(event, act.VoteArrived):
        if event in of_it or len(of_it) == 2:
            return waiting
        others = waiting
    return waiting if len(others) >= MAX_EARLY else (*others, event)


def _said_by(event: act.Event) -> tuple[str, str]:
    match event:
        case act.PeerRecord(peer=peer):
            return ("record", peer)
        case act.VoteArrived(vote):
            return ("vote", vote.voter)
    return ("", "")
