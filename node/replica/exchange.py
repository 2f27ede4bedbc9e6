"""The bulk and the votes of a round: pulls with their checks, votes with their signatures.

Decides when a pull ended well, in something that is no valid update of its sender, or in nothing;
and which updates and votes are kept for others who ask. Knows nothing of what a round makes of it:
results are handed on as events.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

from node.log.fetch import Peers
from node.replica.held_answers import HeldAnswers
from protocol import messages
from protocol.errors import WireError
from protocol.frames import Oversize
from protocol.identity import Identity, peer_from_text, peer_text
from protocol.limits import VOTES_PER_REPLY
from protocol.messages import Purpose
from protocol.updates import update_digest
from protocol.votes import SignedVote, UpdateRef, Vote, unpack_votes, verify_vote
from swarm.consensus.fixed_point import FixedUpdate
from swarm.consensus.updates import UpdateCodec
from swarm.rounds import actions as act
from swarm.rounds.state import RoundRules

_log = logging.getLogger(__name__)

HOLD_S = 2.0  # an answer waits for our own vote
VOTES_KEPT = 4 * VOTES_PER_REPLY  # identities are free: not one vote for each of them


@dataclass(frozen=True)
class ReplicaSettings:
    """What a replica is part of."""

    run_id: bytes
    block: int
    rules: RoundRules
    codec: UpdateCodec
    snapshot_every: int
    same_text: bool = True  # all hosts are known to have the same


@dataclass(frozen=True)
class HeldUpdate:
    """An update that was checked: whose, of which round, as bytes and decoded."""

    ref: UpdateRef
    round: int
    payload: bytes
    update: FixedUpdate


class Exchange:
    """What one replica has of the current rounds, and how it gets more."""

    def __init__(
        self,
        settings: ReplicaSettings,
        identity: Identity,
        peers: Peers,
        run_time_s: Callable[[], float],
        hear: Callable[[act.Event], None],
        contributors: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self.settings, self.peers, self.run_time_s, self.hear = settings, peers, run_time_s, hear
        self.contributors = contributors  # of the last rounds: those whose votes may count
        self.me = peer_text(identity.peer_id)
        self._held: dict[bytes, HeldUpdate] = {}  # by digest
        self._votes: dict[tuple[int, str], SignedVote] = {}  # (round, voter)
        # Everybody hands on everybody's votes: a signature is checked once, not once per peer.
        self._checked: dict[bytes, SignedVote] = {}
        # Half of the window: the answer has to be there before it ends.
        self._answers = HeldAnswers(min(settings.rules.vote_window_s / 2, HOLD_S))

    # Updates.

    def keep(self, held: HeldUpdate) -> None:
        self._held[held.ref.digest] = held

    def payload(self, digest: bytes) -> bytes | None:
        held = self._held.get(digest)
        return held.payload if held else None

    def held_as(self, ref: UpdateRef) -> HeldUpdate | None:
        """The update of this name, if it is this sender's."""
        held = self._held.get(ref.digest)
        return held if held is not None and held.ref == ref else None

    def forget_before(self, number: int) -> None:
        """Rounds are over: their updates live on in the log's aggregates only."""
        self._held = {d: h for d, h in self._held.items() if h.round >= number}
        self._votes = {key: v for key, v in self._votes.items() if key[0] >= number}
        self._checked = {d: v for d, v in self._checked.items() if v.vote.round >= number}

    async def pull(self, action: act.Pull, number: int) -> None:
        """Fetch an update from any holder, check it, and say how it ended."""
        ref = action.ref
        held = self._held.get(ref.digest)
        if held is not None:
            mine = held.ref == ref and held.round == number
            why = "" if mine else "an update of another peer or round"
            self.hear(act.UpdateArrived(ref, refused=why))
            return
        request = messages.UpdateRequest(
            run=self.settings.run_id,
            block=self.settings.block,
            round=number,
            digest=ref.digest,
            purpose=Purpose.UPDATE if ref.sender in action.holders else Purpose.REPAIR,
        )
        for holder in action.holders:
            left_s = action.until_s - self.run_time_s()
            if left_s <= 0:
                break
            payload = await self._ask(holder, ref, request, left_s)
            if isinstance(payload, act.UpdateArrived):
                self.hear(payload)
                return
            if payload is not None:
                self.hear(await self._check(ref, number, payload))
                return
        self.hear(act.PullFailed(ref))

    async def _ask(
        self, holder: str, ref: UpdateRef, request: messages.UpdateRequest, left_s: float
    ) -> bytes | act.UpdateArrived | None:
        """The bytes of this name, or None; a sender's own oversized answer is a refusal."""
        most = self.settings.codec.max_bytes_at(request.round)
        try:
            _, payload = await self.peers.ask(holder, request, messages.UpdateReply, left_s, most)
        except Oversize as error:
            if holder == ref.sender:
                return act.UpdateArrived(ref, refused=error.message)
            return None
        except WireError as error:
            _log.debug("update of %s from %s: %s", ref.sender, holder, error)
            return None
        return payload if update_digest(payload) == ref.digest else None

    async def _check(self, ref: UpdateRef, number: int, payload: bytes) -> act.UpdateArrived:
        """The bytes are those that the digest names: what is wrong with them is the sender's."""
        sender = peer_from_text(ref.sender)
        codec, block = self.settings.codec, self.settings.block
        try:
            update = await asyncio.to_thread(codec.decode, payload, block, number, sender)
        except WireError as error:
            return act.UpdateArrived(ref, refused=error.message)
        self.keep(HeldUpdate(ref, number, payload, update))
        return act.UpdateArrived(ref)

    # Votes.

    def keep_vote(self, signed: SignedVote) -> None:
        """For others to ask for. Where there is no room, one who counts displaces a stranger."""
        vote = signed.vote
        key = (vote.round, vote.voter)
        if key not in self._votes and vote.voter != self.me and len(self._votes) >= VOTES_KEPT:
            counts = {self.me, *self.contributors()}
            stranger = next((k for k in self._votes if k[1] not in counts), None)
            if stranger is None or vote.voter not in counts:
                return
            del self._votes[stranger]
        self._votes.setdefault(key, signed)

    def votes_of(self, number: int) -> list[SignedVote]:
        """The votes of a round that we hold: our own first, then of those whose votes count."""
        counts = frozenset(self.contributors())
        found = [(k, v) for k, v in self._votes.items() if k[0] == number]

        def place(held: tuple[tuple[int, str], SignedVote]) -> tuple[bool, bool, str]:
            (_, voter), _ = held
            return voter != self.me, voter not in counts, voter

        return [vote for _, vote in sorted(found, key=place)]

    def own_vote(self, signed: SignedVote) -> frozenset[str]:
        """Keep our own vote; who hears it already, in an answer that waited for it."""
        self.keep_vote(signed)
        return self._answers.say(signed.vote.round)

    async def answer_vote(self, data: bytes, number: int, asker: bytes) -> None:
        """A vote that comes with the question for ours, which the answer waits for a little."""
        vote = self.hear_vote(data, number)
        if vote.round == number and vote.voter == peer_text(asker):
            await self._answers.until_said(vote.voter, number)

    def hear_vote(self, data: bytes, number: int) -> Vote:
        """A signed vote from anybody. Raises `WireError` if it is not one of this block."""
        signed = self._checked.get(data) or self._check_vote(data)
        vote = signed.vote
        if abs(vote.round - number) > 1:
            return vote
        if len(self._checked) < VOTES_KEPT:
            self._checked[signed.blob] = signed
        if vote.voter != self.me:
            self.keep_vote(signed)
            self.hear(act.VoteArrived(vote))
        return vote

    def _check_vote(self, data: bytes) -> SignedVote:
        signed = verify_vote(data)
        if (signed.run, signed.block) != (self.settings.run_id, self.settings.block):
            raise WireError("a vote of another block")
        return signed

    async def exchange_votes(self, peer: str, number: int, blob: bytes) -> None:
        """Show a peer our vote (if there is one) and hear all that it has."""
        request = messages.VoteRequest(
            run=self.settings.run_id, block=self.settings.block, round=number, vote=blob
        )
        window_s = self.settings.rules.vote_window_s
        try:
            _, payload = await self.peers.ask(peer, request, messages.VoteReply, window_s)
            for data in unpack_votes(payload):
                self.hear_vote(data, number)
        except WireError as error:
            _log.debug("votes of %s: %s", peer, error)
