"""One replica of one block, live: the pure round (`swarm.round`), real peers and a trainer.

Turns actions into requests, transfers and arithmetic, and what comes back into events. Decides
nothing about a round itself. Events are heard one at a time; whatever takes time runs beside it
and comes back as an event. What touches the running weights goes through one queue, in order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from node.consensus import Consensus
from node.fetch import FetchError, LogFetcher, Peers, Quanta
from protocol import messages
from protocol.codec.errors import CodecError
from protocol.errors import WireError
from protocol.identity import Identity, peer_from_text, peer_text
from protocol.messages import Purpose
from protocol.payloads import SignedVote, seal_vote, unpack_votes, verify_vote
from protocol.records import SignedRecord
from swarm import actions as act
from swarm.aggregate import (
    QUANTUM_BITS,
    FixedUpdate,
    Ints,
    UpdateError,
    add_into,
    aggregate,
    scaled,
    step_digest,
    to_fixed,
    weights_digest,
)
from swarm.feedback import only_ours, unsent
from swarm.flat import Floats
from swarm.log import ConsensusLog, Contribution, Entry, MoveMode, genesis
from swarm.round import next_wakeup_s, step
from swarm.round_state import RoundRules, RoundState
from swarm.updates import UpdateCodec, from_wire_vote, to_wire_vote, update_digest
from swarm.votes import UpdateRef

_log = logging.getLogger(__name__)

OWN_UPDATES_KEPT = 64
UPDATES_KEPT = 256


class Weights(Protocol):
    """What is needed of the trainer."""

    async def snapshot(self) -> Floats: ...

    async def correct(self, change: Floats) -> None: ...

    async def replace(self, flat: Floats) -> None: ...


class Board(Protocol):
    """What is needed of discovery: say what we are, see who else is there."""

    async def publish(self, announcement: act.Announce) -> None:
        """Put our record into the DHT and show it to the replicas that we know."""


@dataclass(frozen=True)
class ReplicaSettings:
    """What a replica is part of."""

    run_id: bytes
    block: int
    rules: RoundRules
    codec: UpdateCodec
    snapshot_every: int


class Replica:
    """The state of one replica and the tasks around it."""

    def __init__(
        self,
        settings: ReplicaSettings,
        identity: Identity,
        first_weights: Floats,
        peers: Peers,
        board: Board,
        weights: Weights,
        run_time_s: Callable[[], float],
        on_report: Callable[[act.Report], None],
        on_move: Callable[[act.MoveTo, bytes], None],
        on_step: Callable[[Entry], None],
        on_round: Callable[[int], None],
    ) -> None:
        self.settings, self.identity = settings, identity
        self.me = peer_text(identity.peer_id)
        self.peers, self.board, self.trainer = peers, board, weights
        self.run_time_s = run_time_s
        self.on_report, self.on_move, self.on_step = on_report, on_move, on_step
        self.on_round = on_round
        start = to_fixed(first_weights)
        first = genesis(settings.run_id.hex(), settings.block, weights_digest(start))
        log = ConsensusLog((first,), settings.snapshot_every)
        self.consensus = Consensus(start, settings.codec, settings.block)
        self.consensus.prune(log)
        now = self._round_now()
        self.state = RoundState(self.me, settings.rules, log, warm_until=max(now, 0))
        self.state = replace(self.state, round=now)
        self.own: dict[UpdateRef, FixedUpdate] = {}
        self.updates: dict[bytes, bytes] = {}  # encoded, ours and others', by digest
        self.decoded: dict[bytes, FixedUpdate] = {}
        self.votes: dict[tuple[int, int, str], SignedVote] = {}  # (round, stage, voter)
        self.fetched: dict[bytes, tuple[dict[bytes, list[bytes]], Entry | None, Quanta | None]] = {}
        self._events: asyncio.Queue[act.Event] = asyncio.Queue()
        self._weights_work: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()

    def _round_now(self) -> int:
        rules = self.settings.rules
        return int((self.run_time_s() - rules.start_s) // rules.period_s)

    def hear(self, event: act.Event) -> None:
        """An event from outside; it is taken in turn."""
        self._events.put_nowait(event)

    async def run(self) -> None:
        """Take part until cancelled. Leaves no task behind."""
        worker = asyncio.create_task(self._work_on_weights())
        try:
            while True:
                if worker.done():
                    worker.result()  # the trainer is gone: let whoever runs us know
                now = self.run_time_s()
                wait = next_wakeup_s(self.state, now) - now
                try:
                    async with asyncio.timeout(max(wait, 0.001)):
                        event: act.Event = await self._events.get()
                except TimeoutError:
                    event = act.Tick()
                before = self.state.round
                self.state, actions = step(self.state, event, self.run_time_s())
                self._carry_out(actions)
                if self.state.round != before:
                    self.on_round(self.state.round)
        finally:
            worker.cancel()
            for task in [*self._tasks]:
                task.cancel()
            await asyncio.gather(worker, *self._tasks, return_exceptions=True)

    # Actions.

    def _carry_out(self, actions: Sequence[act.Action]) -> None:
        change: Ints | None = None  # what this batch of actions adds to the running weights
        for action in actions:
            match action:
                case act.Apply(entry):
                    change = self._changed(change, self._apply(entry))
                case act.Settle(ref, scale):
                    if ref in self.own:
                        change = self._changed(change, scaled(self.own[ref], scale), -1)
                case act.ReturnToFeedback(ref, scale):
                    if scale and ref in self.own:
                        change = self._changed(change, scaled(self.own[ref], scale))
                case act.MoveTo():
                    moved = self._move(action)
                    change = moved if change is None else change + moved
                case act.MakeUpdate():
                    self._correct(change)
                    change = None
                    self._make_update(action)
                case _:
                    self._carry_out_one(action)
        self._correct(change)

    def _carry_out_one(self, action: act.Action) -> None:
        match action:
            case act.Announce():
                self._spawn(self.board.publish(action))
            case act.Pull():
                self._spawn(self._pull(action))
            case act.SendVote(vote, to):
                signed = seal_vote(
                    self.identity, to_wire_vote(vote, self.settings.run_id, self.settings.block)
                )
                self.votes[vote.round, vote.stage, self.me] = signed
                self._forget_old_votes()
                for peer in to:
                    self._spawn(self._exchange_votes(peer, vote.round, signed.blob))
            case act.AskVotes(number, _, _, to):
                for peer in to:
                    self._spawn(self._exchange_votes(peer, number, b""))
            case act.Aggregate():
                self._spawn(self._aggregate(action))
            case act.FetchConsensus():
                self._spawn(self._fetch(action))
            case act.Report():
                self.on_report(action)
            case _:
                # Groups (Claim, Combine) begin beyond 16 replicas of a block; a vote that is
                # asked for is answered by the handler (SendVotes).
                _log.warning("not carried out: %s", type(action).__name__)

    def _changed(self, change: Ints | None, part: FixedUpdate, times: int = 1) -> Ints:
        if change is None:
            change = np.zeros(part.size, dtype=np.int64)
        add_into(change, part, times)
        return change

    def _correct(self, change: Ints | None) -> None:
        """Queue a correction of the running weights."""
        if change is not None and change.any():
            floats = (change * 2.0**-QUANTUM_BITS).astype(np.float32)
            self._weights_work.put_nowait(lambda: self.trainer.correct(floats))

    async def _work_on_weights(self) -> None:
        while True:
            work = await self._weights_work.get()
            await work()

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a task of the replica failed", exc_info=error)

    # Our own update.

    def _make_update(self, action: act.MakeUpdate) -> None:
        consensus = self.consensus.weights
        in_flight = [self.own[ref] for ref in action.in_flight if ref in self.own]
        settings = self.settings

        async def make() -> None:
            running = await self.trainer.snapshot()
            rest = unsent(running, consensus, in_flight)
            payload, update = await asyncio.to_thread(
                settings.codec.encode,
                rest,
                settings.block,
                action.round,
                self.identity.peer_id,
            )
            ref = UpdateRef(update_digest(payload), self.me)
            self.own[ref] = update
            self._keep_update(ref.digest, payload, update)
            while len(self.own) > OWN_UPDATES_KEPT:
                self.own.pop(next(iter(self.own)))
            self.hear(act.UpdateReady(action.round, ref, len(payload)))

        self._weights_work.put_nowait(make)

    def _keep_update(self, digest: bytes, payload: bytes, update: FixedUpdate) -> None:
        self.updates[digest], self.decoded[digest] = payload, update
        while len(self.updates) > UPDATES_KEPT:
            oldest = next(iter(self.updates))
            del self.updates[oldest], self.decoded[oldest]

    # Others' updates and votes.

    async def _pull(self, action: act.Pull) -> None:
        """Fetch an update from any holder, check it, and say how it ended."""
        ref = action.ref
        sender = peer_from_text(ref.sender)
        number = self.state.round
        if ref.digest in self.decoded:
            self.hear(act.UpdateArrived(ref))
            return
        request = messages.UpdateRequest(
            run=self.settings.run_id,
            block=self.settings.block,
            round=number,
            digest=ref.digest,
            purpose=Purpose.UPDATE if ref.sender in action.holders else Purpose.REPAIR,
        )
        most = self.settings.codec.max_bytes
        for holder in action.holders:
            left_s = action.until_s - self.run_time_s()
            if left_s <= 0:
                break
            try:
                _, payload = await self.peers.ask(
                    holder, request, messages.UpdateReply, left_s, most
                )
                if update_digest(payload) != ref.digest:
                    continue
                update = await asyncio.to_thread(
                    self.settings.codec.decode, payload, self.settings.block, number, sender
                )
            except WireError as error:
                if _is_refusal(error):
                    self.hear(act.UpdateArrived(ref, refused=error.message))
                    return
                continue
            self._keep_update(ref.digest, payload, update)
            self.hear(act.UpdateArrived(ref))
            return
        self.hear(act.PullFailed(ref))

    async def _exchange_votes(self, peer: str, number: int, blob: bytes) -> None:
        request = messages.VoteRequest(
            run=self.settings.run_id, block=self.settings.block, round=number, vote=blob
        )
        rules = self.settings.rules
        try:
            _, payload = await self.peers.ask(
                peer, request, messages.VoteReply, rules.vote_window_s
            )
            for data in unpack_votes(payload):
                self.hear_vote(data)
        except WireError as error:
            _log.debug("votes of %s: %s", peer, error)

    def hear_vote(self, data: bytes) -> None:
        """A signed vote from anybody. Raises `WireError` if it is not one of this block."""
        signed = verify_vote(data)
        if signed.vote.run != self.settings.run_id or signed.vote.block != self.settings.block:
            raise WireError("a vote of another block")
        vote = from_wire_vote(signed)
        if vote.voter == self.me or abs(vote.round - self.state.round) > 1:
            return
        self.votes.setdefault((vote.round, vote.stage, vote.voter), signed)
        self._forget_old_votes()
        self.hear(act.VoteArrived(vote))

    def votes_of(self, number: int) -> list[SignedVote]:
        """The votes of a round that we hold, our own first."""
        found = [(k, v) for k, v in self.votes.items() if k[0] == number]
        return [v for _, v in sorted(found, key=lambda kv: (kv[0][2] != self.me, kv[0]))]

    def _forget_old_votes(self) -> None:
        for key in [k for k in self.votes if k[0] < self.state.round - 2]:
            del self.votes[key]

    # The consensus.

    async def _aggregate(self, action: act.Aggregate) -> None:
        log, consensus = self.state.log, self.consensus
        if log.head.digest != action.base or any(
            ref.digest not in self.decoded for ref in action.refs
        ):
            return
        updates = [self.decoded[ref.digest] for ref in action.refs]
        result = await asyncio.to_thread(
            aggregate,
            updates,
            recent_norms=log.recent_norms(),
            trend=consensus.trend(log),
            past_scores=[log.past_scores(ref.sender) for ref in action.refs],
        )
        scores = result.scores or (0,) * len(updates)
        parts = tuple(
            Contribution(ref.digest, ref.sender, scale, score)
            for ref, scale, score in zip(action.refs, result.scales, scores, strict=True)
        )
        new, made = consensus.step_of(result.delta)
        entry = Entry(
            action.round,
            action.base,
            weights_digest(new),
            step_digest(made),
            result.median_norm,
            tuple(sorted(parts, key=lambda c: c.digest)),
        )
        self._pending = (entry.digest, made)
        self.hear(act.StepReady(entry))

    _pending: tuple[bytes, FixedUpdate] | None = None

    def _apply(self, entry: Entry) -> FixedUpdate:
        assert self._pending is not None and self._pending[0] == entry.digest
        made = self._pending[1]
        included = [self.updates[c.digest] for c in entry.contributions if c.scale > 0]
        self.consensus.advance(entry, made, included)
        self.consensus.prune(self.state.log)
        self.on_step(entry)
        return made

    async def _fetch(self, action: act.FetchConsensus) -> None:
        """Get the chain to another head and all that the move needs, then say so."""
        fetcher = LogFetcher(
            self.peers,
            self.settings.run_id,
            self.settings.block,
            self.settings.codec,
            Purpose.CATCH_UP,
        )
        try:
            async with asyncio.timeout(max(action.until_s - self.run_time_s(), 0.01)):
                event = await self._fetch_all(fetcher, action)
        except FetchError as error:
            self.hear(act.FetchFailed(action.target, error.liars))
        except TimeoutError:
            self.hear(act.FetchFailed(action.target, tuple(fetcher.liars)))
        else:
            self.hear(event)

    async def _fetch_all(
        self, fetcher: LogFetcher, action: act.FetchConsensus
    ) -> act.ConsensusFetched:
        donors, log = action.holders, self.state.log
        remote = await fetcher.log(donors, action.have, action.target)
        by_digest = {entry.digest: entry for entry in remote.entries}
        # From the older snapshot: the newer one has too few steps behind it for the trend.
        pins = [pin for pin in remote.pins if pin.entry in by_digest]
        pinned = (by_digest[pins[0].entry],) if pins else ()
        plan = log.plan_move(remote.entries, pinned)
        start: Quanta | None = None
        if plan.snapshot is not None:
            pin = next((p for p in pins if p.entry == plan.snapshot.digest), None)
            if pin is None:
                raise FetchError("no donor has a snapshot to start from", fetcher.liars)
            start = await fetcher.snapshot(donors, pin, len(self.consensus.weights))
            if weights_digest(start) != plan.snapshot.weights:
                raise FetchError("the snapshot is not the log's", fetcher.liars)
        data: dict[bytes, list[bytes]] = {}
        for entry in plan.forward:
            data[entry.digest] = await fetcher.aggregate(donors, entry)
        self.fetched[action.target] = (data, plan.snapshot, start)
        return act.ConsensusFetched(action.target, remote.entries, pinned)

    def _move(self, action: act.MoveTo) -> Ints:
        """Carry out a planned move; returns what it adds to the running weights."""
        consensus, plan = self.consensus, action.plan
        before = consensus.weights.astype(np.int64)
        data, snapshot, start = self.fetched.pop(action.head.digest)
        fork: Ints | None = None
        if all(entry.digest in consensus.steps for entry in plan.rollback):
            for entry in plan.rollback:
                consensus.roll_back(entry)
            fork = consensus.weights.astype(np.int64)
        if plan.snapshot is not None:
            assert snapshot == plan.snapshot and start is not None
            consensus.restart(plan.snapshot, start)
        for entry in plan.forward:
            consensus.follow(entry, data[entry.digest])
        consensus.prune(self.state.log)
        self.on_move(action, self.state.log.head.digest)
        self.fetched.clear()
        new = consensus.weights.astype(np.int64)
        if action.mode is MoveMode.REBASE:
            return new - before
        if action.mode is MoveMode.MERGE and fork is not None and plan.fork is not None:
            return new - before + only_ours(before - fork, new - fork)
        return np.zeros_like(new)  # keep the weights: the whole difference is unsent


def _is_refusal(error: WireError) -> bool:
    """Whether the sender's own bytes are wrong, rather than the way to them."""

    return isinstance(error, UpdateError | CodecError)


def record_event(signed: SignedRecord) -> act.PeerRecord:
    """A verified record as the round hears it."""
    record, peer = signed.record, peer_text(signed.peer_id)
    update = UpdateRef(record.update, peer) if record.update else None
    return act.PeerRecord(
        peer,
        record.round,
        record.consensus,
        record.head_round - 1,
        update,
        record.update_bytes,
        record.proposal_ms / 1000,
    )
