"""The exchange of a block's replicas in a round, as a pure function:
`step(state, event, now_s) -> (state, actions)`.

Live and simulated hosts run this same code. `now_s` is run time (see swarm/rounds/clock.py).

The exchange of round r opens at start + r * period and passes through

    COLLECT   our update is made and announced, those of the others are pulled
    VOTE      from the first deadline on: votes are sent; half way, missing ones are asked for
    REPAIR    from the second deadline on: missing updates of the agreed set are pulled
    AGGREGATE the agreed set is complete, the step is computed
    DONE      applied, or given up at the third deadline

After the last exchange of a run (`RoundRules.last`) replicas only announce their heads and move to
each other's as before, so that all end on one consensus and serve it.

Every phase ends at its deadline or when nothing more is expected: a swarm without faults is as fast
as its slowest link, and one with faults loses a deadline.

Invariants:
- An update is counted once: it belongs to one round, the aggregate is of a set of digests, and the
  sender keeps it in flight, out of its next update, until an entry of that round is on its chain.
- No update is lost: in flight it is still part of unsent (swarm/consensus/feedback.py), and if the
  entry does not include it, it may be sent again.
- The same votes on the same base give the same set. A replica that cannot complete the agreed set
  never aggregates a part of it but waits for the others' result.
- Replicas that differ nevertheless notice it in the heads of the next records and votes: the
  minority moves (swarm/consensus/forks.py), in time to vote if the data arrives before the first
  deadline.
"""

from __future__ import annotations

from dataclasses import replace

from protocol.limits import LISTED_PER_VOTE
from protocol.votes import UpdateRef, Vote
from swarm.rounds import actions as act
from swarm.rounds.clock import MAX_OFFSET_S, exchange_opens_s, round_at
from swarm.rounds.deadline import agreed_s, proposal_s
from swarm.rounds.heads import apply_entry, choose_head, fetch_failed, fetched, give_up_waiting
from swarm.rounds.phases import end_collect, end_repair, end_vote
from swarm.rounds.report import remember_arrivals, report_of
from swarm.rounds.state import (
    MAX_KNOWN,
    PeerView,
    Phase,
    RoundState,
    Stage,
    kept_for_later,
    opened,
    with_stage,
)

Result = tuple[RoundState, list[act.Action]]


def step(state: RoundState, event: act.Event, now_s: float) -> Result:
    """Open a new round if it is time, handle the event, end phases that are due."""
    actions: list[act.Action] = []
    state = _turn(state, now_s, actions)
    # Deadlines before this event come first, even if their Tick was late.
    state = _pass_deadlines(state, now_s, actions)
    state = _hear(state, event, now_s, actions)
    if _says_where_a_peer_stands(state, event):
        state = choose_head(state, now_s, actions)
    return _pass_deadlines(state, now_s, actions), actions


def _says_where_a_peer_stands(state: RoundState, event: act.Event) -> bool:
    if isinstance(event, act.VoteArrived):
        return event.vote.base != state.log.head.digest
    return isinstance(event, act.PeerRecord | act.FetchFailed)


def next_wakeup_s(state: RoundState, now_s: float) -> float:
    """When the next Tick is due if no event comes before."""
    rules, stage = state.rules, state.stage
    times = [exchange_opens_s(state.round + 1, rules.start_s, rules.period_s)]
    if stage and stage.phase < Phase.AGGREGATE:
        asking = (stage.first_s + stage.second_s) / 2
        times += [stage.first_s, asking, stage.second_s, stage.third_s]
    return min((time for time in times if time > now_s), default=now_s + rules.period_s)


def _turn(state: RoundState, now_s: float, out: list[act.Action]) -> RoundState:
    number = round_at(now_s, state.rules.start_s, state.rules.period_s)
    was_set_back = _was_set_back(state, now_s)
    if number <= state.round and not was_set_back:
        return state
    if number < 0:  # the run has not begun: nothing to exchange, and no round of such a number
        return replace(state, round=number)
    state = _close(state, out)
    opens = exchange_opens_s(number, state.rules.start_s, state.rules.period_s)
    seen = [v.proposal_s for v in state.peers.values() if v.round >= state.round]
    mine = proposal_s(state.arrivals_s, state.rules.deadline)
    first = opens + agreed_s([*seen, mine], state.rules.deadline)
    peers = {p: v for p, v in state.peers.items() if v.round >= number - 3}
    state = replace(
        state,
        round=number,
        warm_until=min(state.warm_until, number) if was_set_back else state.warm_until,
        stage=opened(state.rules, opens, first),
        own=None,
        own_size_bytes=0,
        peers=peers,
        sync=None,
        early=tuple(event for event in state.early if _round_of(event) == number),
        outcome="undecided",
    )
    state = give_up_waiting(state, out)
    if state.rules.ended(number):  # only heads are announced
        state = replace(state, outcome="ended")
        out.append(announcement(state))
    elif now_s >= first:  # too late for this round: take part in the next one
        state = replace(with_stage(state, phase=Phase.DONE), outcome="missed")
    elif number > state.warm_until:
        out.append(act.MakeUpdate(number, tuple(sorted(state.in_flight))))
    else:
        out.append(announcement(state))
    return state


def _was_set_back(state: RoundState, now_s: float) -> bool:
    """Whether the clock went back by so much that our rounds were those of a wrong clock.

    After a smaller correction we wait until the next new round: to vote twice in a round would be a
    fault.
    """
    opened_s = exchange_opens_s(state.round, state.rules.start_s, state.rules.period_s)
    return opened_s - now_s > 2 * MAX_OFFSET_S


def announcement(state: RoundState) -> act.PublishRecord:
    """Our record of this round. A newcomer announces it at once, before its first round opens,
    since until then no peer would send it anything."""
    head = state.log.head
    proposal = proposal_s(state.arrivals_s, state.rules.deadline)
    return act.PublishRecord(
        state.round, head.digest, head.round, state.own, state.own_size_bytes, proposal
    )


def _close(state: RoundState, out: list[act.Action]) -> RoundState:
    """Report, and remember arrival times."""
    stage = state.stage
    if stage is None or state.outcome == "ended":
        return state
    out.append(report_of(state, stage))
    return remember_arrivals(state, stage)


def _hear(state: RoundState, event: act.Event, now_s: float, out: list[act.Action]) -> RoundState:
    match event:
        case act.PeerRecord():
            return _record(state, event, out)
        case act.VoteArrived(vote) if vote.round == state.round + 1:
            return _keep_early(state, event)
        case act.UpdateReady():
            return _own_ready(state, event, now_s, out)
        case act.UpdateArrived(ref, refused):
            return _arrived(state, ref, refused, now_s)
        case act.PullFailed(ref):
            return with_stage(state, pulling=_pulling(state) - {ref})
        case act.VoteArrived(vote):
            return _vote(state, vote, out)
        case act.StepReady(entry):
            return apply_entry(state, entry, out)
        case act.ConsensusFetched():
            return fetched(state, event, out)
        case act.FetchFailed(target, liars):
            return fetch_failed(state, target, liars)
        case act.CanaryVerdict(number, harmful):
            trust = state.trust
            for peer in harmful:
                why = "the canary: its updates made the consensus worse on held-out text"
                if peer != state.me:
                    trust = trust.exclude(peer, number, why, harmed=True)
            return replace(state, trust=trust)
    return state


def _pulling(state: RoundState) -> frozenset[UpdateRef]:
    return state.stage.pulling if state.stage else frozenset()


def _keep_early(state: RoundState, event: act.Event) -> RoundState:
    """Keep an event of the next round, from a peer whose clock is a little ahead of ours."""
    return replace(state, early=kept_for_later(state.early, event))


def _own_ready(
    state: RoundState, event: act.UpdateReady, now_s: float, out: list[act.Action]
) -> RoundState:
    stage = state.stage
    if event.ref in state.in_flight or any(
        entry.included(event.ref.digest) for entry in state.log.entries[-4:]
    ):
        return state
    open_now = stage and stage.phase is Phase.COLLECT and now_s < stage.first_s
    if stage is None or not open_now or event.round != state.round or state.own is not None:
        out.append(act.ReturnToFeedback(event.ref))
        return state
    state = replace(
        state,
        own=event.ref,
        own_size_bytes=event.size_bytes,
        in_flight={**state.in_flight, event.ref: state.round},
        stage=replace(stage, held={**stage.held, event.ref: now_s - stage.opens_s}),
    )
    out.append(announcement(state))
    return state


def _see(state: RoundState, peer: str, view: PeerView) -> RoundState:
    """Remember the newest view of a peer, for at most MAX_KNOWN peers."""
    peers, known = state.peers, state.peers.get(peer)
    room = peer != state.me and (known is not None or len(peers) < MAX_KNOWN)
    newer = known is None or (view.round, view.head_round) >= (known.round, known.head_round)
    if room and newer:
        peers = {**peers, peer: view}
    return replace(state, peers=peers, trust=state.trust.seen((peer,), state.round))


def _record(state: RoundState, record: act.PeerRecord, out: list[act.Action]) -> RoundState:
    if record.round == state.round + 1:
        return _keep_early(state, record)
    # A record of the round before only shows that its owner is there.
    if record.peer == state.me or record.round not in (state.round - 1, state.round):
        return state
    view = PeerView(record.round, record.head, record.head_round, record.proposal_s)
    state = _see(state, record.peer, view)
    ref, stage = record.update, state.stage
    if record.round == state.round and ref is not None and stage and ref.sender == record.peer:
        state = _offer(state, stage, ref, (record.peer,), out)
    return state


def _offer(
    state: RoundState,
    stage: Stage,
    ref: UpdateRef,
    holders: tuple[str, ...],
    out: list[act.Action],
) -> RoundState:
    """A peer offers an update: pull it, if in time, one per sender, at most LISTED_PER_VOTE."""
    if ref.sender == state.me or state.trust.excluded(ref.sender, state.round):
        return state
    if state.rules.ended(state.round) or state.log.head.round >= state.round:
        return state  # this round is decided, by us or by the others
    if stage.phase is not Phase.COLLECT:
        return state
    if any(offer.sender == ref.sender for offer in stage.offers):
        return state
    offers = {**stage.offers, ref: holders}
    if state.log.has_update(ref.digest):
        why = "replay"
        state = replace(state, trust=state.trust.fault(ref.sender, state.round, why))
        return with_stage(state, offers=offers, refused={**stage.refused, ref: why})
    if len(stage.pulling) + len(stage.held) >= LISTED_PER_VOTE:
        return with_stage(state, offers=offers)
    out.append(act.Pull(ref, holders, stage.third_s))
    return with_stage(state, offers=offers, pulling=stage.pulling | {ref})


def _arrived(state: RoundState, ref: UpdateRef, refused: str, now_s: float) -> RoundState:
    stage = state.stage
    if stage is None or ref not in stage.pulling:
        return state
    pulling = stage.pulling - {ref}
    if refused:
        why = f"refused update: {refused}"
        state = replace(state, trust=state.trust.fault(ref.sender, state.round, why))
        return with_stage(state, pulling=pulling, refused={**stage.refused, ref: refused})
    return with_stage(state, pulling=pulling, held={**stage.held, ref: now_s - stage.opens_s})


def _vote(state: RoundState, vote: Vote, out: list[act.Action]) -> RoundState:
    stage = state.stage
    if stage is None or vote.round != state.round or vote.voter == state.me:
        return state
    if stage.agreed is not None:
        return state
    known = state.peers.get(vote.voter)
    proposal = known.proposal_s if known else state.rules.deadline.ceiling_s
    view = PeerView(vote.round, vote.base, vote.base_round, proposal)
    if known != view:
        state = _see(state, vote.voter, view)
    ballot = stage.ballot.with_vote(vote)
    if vote.voter in ballot.two_faced and vote.voter not in stage.ballot.two_faced:
        trust = state.trust.fault(vote.voter, state.round, "two different votes in one round")
        state = replace(state, trust=trust)
    state = with_stage(state, ballot=ballot)
    # Only the voter's own update counts as an offer: a vote may overtake its record, and without
    # this the voter would count as a peer that sends none. Other senders in a vote are hearsay.
    own = next((ref for ref in vote.listed if ref.sender == vote.voter), None)
    if own is not None and state.stage is not None:
        state = _offer(state, state.stage, own, (vote.voter,), out)
    return state


def _pass_deadlines(state: RoundState, now_s: float, out: list[act.Action]) -> RoundState:
    """Handle events that came early, and end phases as long as one is due."""
    if state.early and _round_of(state.early[0]) == state.round:
        due, state = state.early, replace(state, early=())
        for event in due:
            state = _hear(state, event, now_s, out)
    while state.stage is not None:
        before = state
        phase = state.stage.phase
        if phase is Phase.COLLECT:
            state = end_collect(state, now_s, out)
        elif phase is Phase.VOTE:
            state = end_vote(state, now_s, out)
        elif phase is Phase.REPAIR:
            state = end_repair(state, now_s, out)
        if state is before:
            break
    return state


def _round_of(event: act.Event) -> int:
    match event:
        case act.PeerRecord():
            return event.round
        case act.VoteArrived(vote):
            return vote.round
    return -1
