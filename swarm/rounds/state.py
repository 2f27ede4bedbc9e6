"""The state of a replica in the exchange of a round, and who takes part in it.

Transitions are `swarm.rounds.round`'s.
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
    """The run's timing. Raises ValueError if an exchange does not fit into a period."""

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
    """The progress of one round from COLLECT to DONE."""

    opens_s: float
    first_s: float
    second_s: float
    third_s: float
    phase: Phase = Phase.COLLECT
    offers: Mapping[UpdateRef, tuple[str, ...]] = field(default_factory=dict)  # -> holders
    pulling: frozenset[UpdateRef] = frozenset()
    held: Mapping[UpdateRef, float] = field(default_factory=dict)  # -> seconds from opening
    refused: Mapping[UpdateRef, str] = field(default_factory=dict)
    ballot: Ballot = field(default_factory=Ballot)
    asked: bool = False
    agreed: tuple[UpdateRef, ...] | None = None


@dataclass(frozen=True)
class Sync:
    """A fetch of another head, to which we move when it is complete."""

    target: bytes
    until_s: float


@dataclass(frozen=True)
class PeerView:
    """What the newest record or vote of a peer says."""

    round: int
    head: bytes
    head_round: int
    proposal_s: float


@dataclass(frozen=True)
class RoundState:
    """The whole state of a replica in the exchange. Immutable, plain data."""

    me: str
    rules: RoundRules
    log: ConsensusLog
    trust: TrustBook = field(default_factory=TrustBook)
    warm_until: int = 0  # a newcomer sends no update up to and including this round
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
    """All known replicas of the block, ourselves included."""
    return (*state.peers, state.me)


def active(state: RoundState, peer: str) -> bool:
    """Whether a peer was seen in this round or the one before, and is not excluded."""
    view = state.peers.get(peer)
    fresh = view is not None and view.round >= state.round - 1
    return fresh and not state.trust.excluded(peer, state.round)


def kept_for_later(waiting: tuple[act.Event, ...], event: act.Event) -> tuple[act.Event, ...]:
    """The waiting events with one more, at most MAX_EARLY.

    Per peer only the newest record, so that one peer cannot crowd out the others, and the first two
    different votes, which prove a fault. Identities are free: the caller must limit how many peers
    it accepts events from.
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
