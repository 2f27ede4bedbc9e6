"""What a round hears and what it asks for: the events and actions of `swarm.rounds.round`.

Decides only their form. The replica turns actions into messages, transfers and arithmetic, and what
comes back into events. Every action that may take time carries `until_s`, the
run time after which its result is of no use: nothing waits longer.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.log import Entry
from protocol.votes import UpdateRef, Vote
from swarm.consensus.log import MoveMode, MovePlan

# Events


@dataclass(frozen=True)
class Tick:
    """Time has passed. Due at `next_wakeup_s(state)` at the latest."""


@dataclass(frozen=True)
class UpdateReady:
    """Our own update of a round is compressed and can be served."""

    round: int
    ref: UpdateRef
    size_bytes: int


@dataclass(frozen=True)
class PeerRecord:
    """A signed record of another replica of the block, from the DHT or from itself."""

    peer: str
    round: int
    head: bytes
    head_round: int
    update: UpdateRef | None
    size_bytes: int
    proposal_s: float


@dataclass(frozen=True)
class UpdateArrived:
    """A pull ended well, or (with `refused`) in something that is no valid update."""

    ref: UpdateRef
    refused: str = ""


@dataclass(frozen=True)
class PullFailed:
    """A pull ended with nothing: no holder answered in time."""

    ref: UpdateRef


@dataclass(frozen=True)
class VoteArrived:
    vote: Vote


@dataclass(frozen=True)
class StepReady:
    """The agreed set is aggregated: this entry would follow our head. Nothing is applied yet."""

    entry: Entry


@dataclass(frozen=True)
class ConsensusFetched:
    """The chain to `target` and all data of the move are here, and the digests are right."""

    target: bytes
    entries: tuple[Entry, ...]
    pinned: tuple[Entry, ...] = ()


@dataclass(frozen=True)
class FetchFailed:
    """No holder gave `target`; `liars` gave something that does not fit its digest."""

    target: bytes
    liars: tuple[str, ...] = ()


@dataclass(frozen=True)
class CanaryVerdict:
    """The canary tested the updates of a round: these senders' updates do harm."""

    round: int
    harmful: tuple[str, ...]


Event = (
    Tick
    | UpdateReady
    | PeerRecord
    | UpdateArrived
    | PullFailed
    | VoteArrived
    | StepReady
    | ConsensusFetched
    | FetchFailed
    | CanaryVerdict
)

# Actions


@dataclass(frozen=True)
class MakeUpdate:
    """Compress what is unsent, without `in_flight`: updates whose fate is not known yet."""

    round: int
    in_flight: tuple[UpdateRef, ...]


@dataclass(frozen=True)
class Announce:
    """Publish our signed record."""

    round: int
    head: bytes
    head_round: int
    update: UpdateRef | None
    size_bytes: int
    proposal_s: float


@dataclass(frozen=True)
class Pull:
    """Fetch and check an update from any of the holders."""

    ref: UpdateRef
    holders: tuple[str, ...]
    until_s: float


@dataclass(frozen=True)
class SendVote:
    vote: Vote
    to: tuple[str, ...]


@dataclass(frozen=True)
class AskVotes:
    """Ask these peers for the votes that they have."""

    round: int
    to: tuple[str, ...]


@dataclass(frozen=True)
class Aggregate:
    """Aggregate these updates on top of `base`; answer StepReady."""

    round: int
    base: bytes
    refs: tuple[UpdateRef, ...]
    until_s: float


@dataclass(frozen=True)
class Apply:
    """The consensus makes this step; correct the running weights."""

    entry: Entry


@dataclass(frozen=True)
class Settle:
    """Our update is in the consensus: the part `scale`/65536 of it is no longer unsent."""

    ref: UpdateRef
    scale: int


@dataclass(frozen=True)
class ReturnToFeedback:
    """Our update is not in the consensus: it is unsent, and may be sent again.

    `scale` is the part that had been settled before a branch was given up; mostly 0.
    """

    ref: UpdateRef
    scale: int = 0


@dataclass(frozen=True)
class FetchConsensus:
    """Get the chain from our head to `target` and what it needs, from any of the holders."""

    target: bytes
    have: bytes
    holders: tuple[str, ...]
    until_s: float


@dataclass(frozen=True)
class MoveTo:
    """Move onto another consensus.

    REBASE: weights = new consensus + unsent; unsent changes only by the Settle and ReturnToFeedback
    after this. MERGE: the same, and what only our branch learned becomes unsent
    (`swarm.consensus.feedback.only_ours`); if nobody has the weights at `plan.fork`, do KEEP. KEEP:
    the weights stay, so the whole difference is unsent from now on.
    """

    head: Entry
    plan: MovePlan
    mode: MoveMode


@dataclass(frozen=True)
class Report:
    """How the exchange of a round ended, for the event log."""

    round: int
    outcome: str  # decided | empty | undecided | syncing | missed
    in_time: tuple[str, ...]
    late: tuple[str, ...]
    missing: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]
    agreed: tuple[str, ...]
    included: bool | None  # ours; None if we sent nothing or do not know yet
    voters: int
    first_deadline_s: float
    declined: tuple[tuple[str, str], ...] = ()  # who did not accept our update, and why


Action = (
    MakeUpdate
    | Announce
    | Pull
    | SendVote
    | AskVotes
    | Aggregate
    | Apply
    | Settle
    | ReturnToFeedback
    | FetchConsensus
    | MoveTo
    | Report
)
