"""The events and actions of a round: input and output of `swarm.rounds.round`.

The replica turns actions into messages, transfers and arithmetic, and their results into events.
Every action that may take time carries `until_s`, the run time after which its result is useless.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.log import Entry
from protocol.votes import UpdateRef, Vote
from swarm.consensus.log import MoveMode, MovePlan

# Events


@dataclass(frozen=True)
class Tick:
    """Time has passed. Due at `next_wakeup_s` at the latest."""


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
    """A pull has ended, with a valid update or (`refused`: why not) with an invalid one."""

    ref: UpdateRef
    refused: str = ""


@dataclass(frozen=True)
class PullFailed:
    """A pull has failed: no holder answered in time."""

    ref: UpdateRef


@dataclass(frozen=True)
class VoteArrived:
    vote: Vote


@dataclass(frozen=True)
class StepReady:
    """The agreed set is aggregated: the entry that would follow our head. Not applied yet."""

    entry: Entry


@dataclass(frozen=True)
class ConsensusFetched:
    """The chain to `target` and all data for the move are here, with their digests checked."""

    target: bytes
    entries: tuple[Entry, ...]
    pinned: tuple[Entry, ...] = ()


@dataclass(frozen=True)
class FetchFailed:
    """No holder sent `target`; `liars` sent data with a wrong digest."""

    target: bytes
    liars: tuple[str, ...] = ()


@dataclass(frozen=True)
class CanaryVerdict:
    """The canary's result in a round: the senders whose updates do harm."""

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
    """Compress what is unsent, without the updates in `in_flight`, whose rounds are undecided."""

    round: int
    in_flight: tuple[UpdateRef, ...]


@dataclass(frozen=True)
class PublishRecord:
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
    """Ask these peers for the votes that they hold."""

    round: int
    to: tuple[str, ...]


@dataclass(frozen=True)
class ComputeStep:
    """Aggregate these updates on top of `base`; the result is a StepReady."""

    round: int
    base: bytes
    refs: tuple[UpdateRef, ...]
    until_s: float


@dataclass(frozen=True)
class Apply:
    """Append this entry to the consensus and correct the running weights."""

    entry: Entry


@dataclass(frozen=True)
class Settle:
    """Our update is in the consensus: `scale`/65536 of it is no longer unsent."""

    ref: UpdateRef
    scale: int


@dataclass(frozen=True)
class ReturnToFeedback:
    """Our update is not in the consensus: it is unsent and may be sent again.

    `scale`: the part that was settled on a branch that is given up; otherwise 0.
    """

    ref: UpdateRef
    scale: int = 0


@dataclass(frozen=True)
class FetchConsensus:
    """Fetch the chain from our head to `target`, and the data it needs, from any holder."""

    target: bytes
    have: bytes
    holders: tuple[str, ...]
    until_s: float


@dataclass(frozen=True)
class MoveTo:
    """Move onto another consensus.

    REBASE: weights = new consensus + unsent; unsent changes only by the Settle and ReturnToFeedback
    that follow. MERGE: the same, and what only our branch learned becomes unsent
    (`swarm.consensus.feedback.only_ours`); if nobody has the weights at `plan.fork`, do KEEP. KEEP:
    the weights stay, so the whole difference is unsent.
    """

    head: Entry
    plan: MovePlan
    mode: MoveMode


@dataclass(frozen=True)
class RoundReport:
    """How the exchange of a round ended, for the event log."""

    round: int
    outcome: str  # decided | empty | undecided | syncing | missed
    in_time: tuple[str, ...]
    late: tuple[str, ...]
    missing: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]
    agreed: tuple[str, ...]
    included: bool | None  # our update; None if we sent none or do not know yet
    voters: int
    first_deadline_s: float
    declined: tuple[tuple[str, str], ...] = ()  # voters that did not accept our update, and why


Action = (
    MakeUpdate
    | PublishRecord
    | Pull
    | SendVote
    | AskVotes
    | ComputeStep
    | Apply
    | Settle
    | ReturnToFeedback
    | FetchConsensus
    | MoveTo
    | RoundReport
)
