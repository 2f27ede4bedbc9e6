"""One replica of one block, live: the pure round (`swarm.rounds.round`), real peers and a trainer.

Turns actions into requests, transfers and arithmetic, and what comes back into events. Decides
nothing about a round itself. Events are heard one at a time; whatever takes time runs beside it
and comes back as an event. What touches the running weights goes through one queue, in order.

Known limit: at most 15 others are heard, those that contributed lately before strangers, and a
person is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from node.log.catch_up import consensus_at
from node.log.consensus import Consensus
from node.log.fetch import FetchError, LogFetcher, Peers, Quanta
from node.replica.aggregation import Aggregation
from node.replica.exchange import Exchange, HeldUpdate, ReplicaSettings
from node.replica.own_updates import OwnUpdate
from node.replica.running_weights import Moment, Parts, RunningWeights, Weights
from protocol.digests import weights_digest
from protocol.identity import Identity, peer_text
from protocol.log import Entry, genesis
from protocol.messages import Purpose
from protocol.updates import update_digest
from protocol.votes import SignedVote, UpdateRef, Vote, seal_vote
from swarm.consensus.feedback import Unsent, aside_share, only_ours
from swarm.consensus.fixed_point import FixedUpdate, to_fixed
from swarm.consensus.log import ConsensusLog, MoveMode
from swarm.consensus.step import fitting_update
from swarm.learning.flat import Floats
from swarm.rounds import actions as act
from swarm.rounds.round import announcement, next_wakeup_s, step
from swarm.rounds.state import MAX_GROUP, Phase, RoundState

_log = logging.getLogger(__name__)

EVENTS_WAITING = 4096  # what strangers may make us remember to hear
PREPARE_S = 0.5  # after our own step, before we prepare for the next one
OTHERS_S = 2.0  # after our own step, before we do what is not urgent
ASK_SHARE = 3  # one question of a catch-up may take a third of its time


class Board(Protocol):
    """What is needed of discovery: say what we are."""

    async def publish(
        self, announcement: act.PublishRecord, quiet: Callable[[], Awaitable[None]]
    ) -> None:
        """Show our record to the replicas that we know; when it is `quiet`, also to the DHT."""


class Listener(Protocol):
    """Who hears what happened to a replica."""

    def round_began(self, number: int) -> None: ...

    def reported(self, report: act.RoundReport, update_bytes: int) -> None: ...

    def stepped(self, entry: Entry) -> None: ...

    def moved(self, move: act.MoveTo, before: bytes) -> None: ...

    def excluded(self, peer: str, until_round: int, reason: str) -> None: ...

    def weights_lost(self, why: str) -> None: ...

    def crowded(self) -> None: ...


@dataclass(frozen=True)
class _Prepared:
    """A move that is fetched and proven, from the head `have`."""

    have: bytes
    target: bytes
    consensus: Consensus


class Replica:
    """The state of one replica and the tasks around it."""

    def __init__(
        self,
        settings: ReplicaSettings,
        identity: Identity,
        first_weights: Floats,
        peers: Peers,
        board: Board,
        trainer: Weights,
        run_time_s: Callable[[], float],
        listener: Listener,
    ) -> None:
        self.settings, self.identity = settings, identity
        self.me = peer_text(identity.peer_id)
        self.peers, self.board = peers, board
        self.run_time_s, self.listener = run_time_s, listener
        start = to_fixed(first_weights)
        first = genesis(settings.run_id.hex(), settings.block, weights_digest(start))
        log = ConsensusLog((first,), settings.snapshot_every)
        self.consensus = Consensus(start, settings.codec, settings.block)
        self.consensus.prune(log)
        now = self._round_now()
        self.state = RoundState(self.me, settings.rules, log, warm_until=max(now, 0), round=now)
        self.running = RunningWeights(trainer, listener.weights_lost)
        self.exchange = Exchange(
            settings, identity, peers, run_time_s, self.hear, lambda: self.state.log.inclusions()
        )
        self.muted = False  # over its budget: it hears and trains, and moves no bulk
        self._aggregation = Aggregation()
        self._decided = asyncio.Event()  # the exchange of this round has led to a step
        self._prepared: _Prepared | None = None
        self._heard: dict[str, int] = {}  # the others of this block -> last heard in this round
        self._sent_bytes = 0
        self._events: asyncio.Queue[act.Event] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()

    def _round_now(self) -> int:
        rules = self.settings.rules
        return int((self.run_time_s() - rules.start_s) // rules.period_s)

    # Events.

    def hear(self, event: act.Event) -> None:
        """An event from outside; it is taken in turn."""
        from_others = isinstance(event, act.PeerRecord | act.VoteArrived)
        if from_others and self._events.qsize() >= EVENTS_WAITING:
            return
        if isinstance(event, act.VoteArrived) and self._counted(event.vote):
            return
        self._events.put_nowait(event)

    def _counted(self, vote: Vote) -> bool:
        """Whether this very vote is in the ballot: every peer hands it on."""
        stage = self.state.stage
        return stage is not None and stage.ballot.votes.get(vote.voter) == vote

    async def hear_vote(self, data: bytes, asker: bytes) -> None:
        """A signed vote from anybody; what to answer is there when this returns.

        Raises `WireError` if it is not one of this block.
        """
        await self.exchange.answer_vote(data, self.state.round, asker)

    def votes_of(self, number: int) -> list[SignedVote]:
        return self.exchange.votes_of(number)

    async def run(self) -> None:
        """Take part until cancelled. The tasks are ours but for `running.queue`'s."""
        try:
            if self.state.round >= 0:
                self._carry_out([announcement(self.state)])
            while True:
                self._take(await self._next_event())
        finally:
            for task in [*self._tasks]:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _next_event(self) -> act.Event:
        with contextlib.suppress(asyncio.QueueEmpty):
            return self._events.get_nowait()  # mostly there are several: no timer for each
        now = self.run_time_s()
        wait = next_wakeup_s(self.state, now) - now
        try:
            async with asyncio.timeout(max(wait, 0.001)):
                return await self._events.get()
        except TimeoutError:
            return act.Tick()

    def _take(self, event: act.Event) -> None:
        """One event: the round decides, and what it decides is carried out."""
        before = self.state
        if not self._usable(event):
            return
        self.state, actions = step(before, self._checked(event), self.run_time_s())
        self._carry_out(actions)
        if self.state.trust is not before.trust:
            self._tell_exclusions(before)
        if self.state.round != before.round:
            self._turned()

    def _usable(self, event: act.Event) -> bool:
        """At most 15 others are heard: one group. Contributors come before strangers."""
        match event:
            case act.PeerRecord(peer=peer) | act.VoteArrived(vote=Vote(voter=peer)):
                pass
            case _:
                return True
        now = self.state.round
        if peer not in self._heard and len(self._heard) >= MAX_GROUP - 1:
            known = self.state.log.inclusions()
            idle = min(self._heard, key=lambda p: (known[p] > 0, self._heard[p]))
            if known[idle] > 0 or (self._heard[idle] >= now - 2 and not known[peer]):
                self.listener.crowded()
                return False
            del self._heard[idle]
        self._heard[peer] = now
        return True

    def _checked(self, event: act.Event) -> act.Event:
        """A move was prepared for the head that we had then; if that is gone it is of no use."""
        if isinstance(event, act.ConsensusFetched):
            ready = self._prepared
            here = self.state.log.head.digest
            if ready is None or (ready.target, ready.have) != (event.target, here):
                return act.FetchFailed(event.target)
        return event

    def _tell_exclusions(self, before: RoundState) -> None:
        for peer, standing in self.state.trust.peers.items():
            if standing.excluded_until > before.trust.of(peer).excluded_until:
                self.listener.excluded(peer, standing.excluded_until, standing.reason)

    def _turned(self) -> None:
        """A new round: what belonged to older ones goes."""
        number = self.state.round
        self._decided.clear()
        self.exchange.forget_before(number - 1)
        self.running.own.prune(self.state.log, self.state.in_flight)
        self._heard = {p: seen for p, seen in self._heard.items() if seen >= number - 3}
        self._aggregation.forget(self.state.log.head.digest)
        self.listener.round_began(number)

    # Actions.

    def _carry_out(self, actions: Sequence[act.Action]) -> None:
        parts: Parts = []  # what these add to the running weights
        for action in actions:
            match action:
                case act.Apply(entry):
                    parts.append((self._apply(entry), 1))
                case act.Settle(ref, scale):
                    parts += self.running.own_part(ref, scale, -1)
                case act.ReturnToFeedback(ref, scale):
                    parts += self.running.own_part(ref, scale, 1)
                    self.running.own.returned(ref)
                case act.MoveTo():
                    parts += self._move(action)
                case act.MakeUpdate():
                    self.running.correct(parts)
                    parts = []
                    if not self.muted:
                        self._make_update(action)
                case _ if self.muted and not isinstance(action, act.ComputeStep | act.RoundReport):
                    self._keep_quiet(action)
                case _:
                    self._carry_out_one(action)
        self.running.correct(parts)

    def _keep_quiet(self, action: act.Action) -> None:
        """No record, no vote (an empty one would count against the others), no transfer."""
        match action:
            case act.Pull(ref):
                self.hear(act.PullFailed(ref))
            case act.FetchConsensus(target):
                self.hear(act.FetchFailed(target))

    def _carry_out_one(self, action: act.Action) -> None:
        match action:
            case act.PublishRecord():
                self._sent_bytes = action.size_bytes
                self._spawn(self.board.publish(action, self._decided_or_late))
            case act.Pull():
                self._spawn(self.exchange.pull(action, self.state.round))
            case act.SendVote(vote, to):
                settings = self.settings
                signed = seal_vote(self.identity, settings.run_id, settings.block, vote)
                told = self.exchange.own_vote(signed)
                for peer in (peer for peer in to if peer not in told):
                    self._spawn(self.exchange.exchange_votes(peer, vote.round, signed.blob))
            case act.AskVotes(number, to):
                for peer in to:
                    self._spawn(self.exchange.exchange_votes(peer, number, b""))
            case act.ComputeStep():
                self._spawn(self._aggregate(action))
            case act.FetchConsensus():
                self._spawn(self._fetch(action))
            case act.RoundReport():
                self.listener.reported(action, self._sent_bytes)
                self._sent_bytes = 0

    async def _decided_or_late(self) -> None:
        """Wait until the exchange of this round is over, for the others as well as for us."""
        stage = self.state.stage
        if stage is not None and stage.phase is not Phase.DONE:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(stage.third_s - self.run_time_s(), 0.0)):
                    await self._decided.wait()
                    await asyncio.sleep(OTHERS_S)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a task of the replica failed", exc_info=error)

    # Our update.

    def _make_update(self, action: act.MakeUpdate) -> None:
        log = self.state.log

        async def use(rest: Unsent) -> tuple[UpdateRef, OwnUpdate]:
            payload, update = await asyncio.to_thread(self.encode, rest, log, action.round)
            ref = UpdateRef(update_digest(payload), self.me)
            self.exchange.keep(HeldUpdate(ref, action.round, payload, update))
            self.hear(act.UpdateReady(action.round, ref, len(payload)))
            return ref, OwnUpdate(action.round, update, payload)

        sparse = self.settings.codec.schedule.sparse
        share = aside_share(log.replicas()) if sparse else 0.0
        self.running.make_update(self.consensus, action.in_flight, use, share)

    def encode(self, rest: Unsent, log: ConsensusLog, number: int) -> tuple[bytes, FixedUpdate]:
        """Our update as it is sent, and as all decode it."""
        codec, block, me = self.settings.codec, self.settings.block, self.identity.peer_id
        return fitting_update(codec, rest, log, block, number, me)

    def weights_at(self, number: int) -> Quanta | None:
        """The consensus of a round, as long as it can be had. From any thread: log and consensus
        may change meanwhile, hence the proof."""
        log, consensus = self.state.log, self.consensus.copy()
        entry = next((e for e in reversed(log.entries) if e.round == number), None)
        if entry is None:
            return None
        if entry is log.head and weights_digest(consensus.weights) == entry.weights:
            return consensus.weights
        back = consensus.before([e for e in reversed(log.entries) if e.round > number])
        found = None if back is None else back.astype(np.int32)
        return found if found is not None and weights_digest(found) == entry.weights else None

    async def at_rest(self, work: Callable[[Moment], Awaitable[None]]) -> None:
        """See `RunningWeights.at_rest`."""
        await self.running.at_rest(self.state.log, self.consensus, work)

    def reset_weights(self) -> None:
        """See `RunningWeights.reset`."""
        self.running.reset(self.state.log, self.consensus)

    def restore(self, moment: Moment) -> None:
        """Go on from a saved moment; the trainer has its weights already. Before `run`."""
        in_flight = {ref: made.round for ref, made in moment.in_flight.items()}
        self.consensus = moment.consensus
        self.running.own.restore(moment.in_flight)
        self.state = replace(self.state, log=moment.log, in_flight=in_flight)

    # The consensus.

    async def _aggregate(self, action: act.ComputeStep) -> None:
        log, consensus = self.state.log, self.consensus
        held = [self.exchange.held_as(ref) for ref in action.refs]
        if log.head.digest != action.base or any(h is None for h in held):
            return
        found = {h.ref.digest: h for h in held if h is not None}
        same_text = self.settings.same_text
        entry = await self._aggregation.compute(action, found, log, consensus, same_text)
        self.hear(act.StepReady(entry))

    def _apply(self, entry: Entry) -> FixedUpdate:
        made = self._aggregation.apply(entry, self.state.log, self.consensus)
        self.listener.stepped(entry)
        self._decided.set()
        self._spawn(self._prepare())
        return made

    async def _prepare(self) -> None:
        """For the next round, when this one is over for the others as well."""
        await asyncio.sleep(PREPARE_S)
        await self._aggregation.prepare(self.state.log, self.consensus)

    async def _fetch(self, action: act.FetchConsensus) -> None:
        """Get the chain to another head and all that the move needs, prove it, then say so."""
        left_s = max(action.until_s - self.run_time_s(), 0.01)
        fetcher = LogFetcher(
            self.peers,
            self.settings.run_id,
            self.settings.block,
            self.settings.codec,
            Purpose.CATCH_UP,
            left_s / ASK_SHARE,
        )
        event: act.Event
        try:
            async with asyncio.timeout(left_s):
                event = await self._fetch_all(fetcher, action)
        except FetchError as error:
            event = act.FetchFailed(action.target, error.liars)
        except TimeoutError:
            event = act.FetchFailed(action.target, tuple(fetcher.liars))
        self.hear(event)

    async def _fetch_all(
        self, fetcher: LogFetcher, action: act.FetchConsensus
    ) -> act.ConsensusFetched:
        donors, log, consensus = action.holders, self.state.log, self.consensus.copy()
        remote = await fetcher.log(donors, action.have, action.target)
        by_digest = {entry.digest: entry for entry in remote.entries}
        # The older snapshot: the newer one has too few steps behind it for the trend.
        pins = remote.starts(remote.entries)[:1]
        other = await consensus_at(fetcher, donors, log, consensus, remote.entries, pins)
        self._prepared = _Prepared(log.head.digest, action.target, other)
        pinned = tuple(by_digest[pin.entry] for pin in pins)
        return act.ConsensusFetched(action.target, remote.entries, pinned)

    def _move(self, action: act.MoveTo) -> Parts:
        """Carry out a prepared move; what it adds to the running weights."""
        ready, old = self._prepared, self.consensus
        assert ready is not None and ready.target == action.head.digest
        fork = old.before(action.plan.rollback) if action.plan.fork else None
        self.consensus, self._prepared = ready.consensus, None
        self.listener.moved(action, ready.have)
        before, new = old.weights.astype(np.int64), ready.consensus.weights.astype(np.int64)
        if action.mode is MoveMode.REBASE:
            change = new - before
        elif action.mode is MoveMode.MERGE and fork is not None:
            change = new - before + only_ours(before - fork, new - fork)
        else:
            return []  # keep the weights: the whole difference is unsent
        return [(FixedUpdate(len(change), None, change), 1)]
