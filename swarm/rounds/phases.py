"""When each phase of a round ends, and what follows: the vote, the agreed set, the step.

Called after every event; the events themselves are `swarm.rounds.round`'s.
"""

from __future__ import annotations

from dataclasses import replace

from protocol.limits import DECLINED_PER_VOTE, LISTED_PER_VOTE
from protocol.votes import Reason, Vote
from swarm.consensus.votes import agreed_set
from swarm.rounds import actions as act
from swarm.rounds.clock import exchange_opens_s
from swarm.rounds.heads import choose_head
from swarm.rounds.state import (
    Phase,
    RoundState,
    Stage,
    active,
    members,
    with_stage,
)

NEW_ROUNDS = 2  # rounds after its warm-up in which a newcomer may not know the others yet


def end_collect(state: RoundState, now_s: float, out: list[act.Action]) -> RoundState:
    stage = state.stage
    assert stage is not None
    if now_s < stage.first_s and not _all_collected(state, stage):
        return state
    state = choose_head(state, now_s, out)
    if state.sync is not None and now_s < stage.first_s:
        return state
    if state.rules.ended(state.round):
        return with_stage(state, phase=Phase.DONE)
    if state.sync is not None:
        return with_stage(state, phase=Phase.VOTE)
    head = state.log.head
    accepted = [r for r in stage.held if not state.trust.excluded(r.sender, state.round)]
    vote = Vote(
        state.me,
        state.round,
        head.digest,
        head.round,
        tuple(sorted(accepted)[:LISTED_PER_VOTE]),
        _declined(state, stage),
    )
    out.append(act.SendVote(vote, tuple(state.peers)))
    return with_stage(state, phase=Phase.VOTE, ballot=stage.ballot.with_vote(vote))


def _declined(state: RoundState, stage: Stage) -> tuple[tuple[str, Reason], ...]:
    """Senders of this round whose updates we do not accept, and why."""
    found = {ref.sender: Reason.REFUSED for ref in stage.refused}
    for peer, view in state.peers.items():
        if view.round == state.round and state.trust.excluded(peer, state.round):
            found[peer] = Reason.HARM if state.trust.of(peer).harmed else Reason.FAULT
    return tuple(sorted(found.items())[:DECLINED_PER_VOTE])


def _is_new(state: RoundState) -> bool:
    return state.round <= state.warm_until + NEW_ROUNDS


def _company(state: RoundState) -> bool:
    return any(active(state, peer) for peer in state.peers)


def _all_collected(state: RoundState, stage: Stage) -> bool:
    """Whether all expected updates are here. Never in our first rounds: peers may be unknown."""
    if state.round <= state.warm_until + 1 or state.own is None:
        return False
    if _is_new(state) and state.log.eligible_voters() - {state.me} and not _company(state):
        return False  # we may still hear of the peers that made the log
    head = state.log.head.digest
    if any(v.round == state.round and v.head != head for v in state.peers.values()):
        return False  # which head wins is decided at the first deadline, not before
    done = {ref.sender for ref in (*stage.held, *stage.refused)}
    offered = {ref.sender for ref in stage.offers}
    for peer, view in state.peers.items():  # cheap checks first: usually an early peer decides
        # A peer that announced itself without an update sends none (a newcomer).
        silent = view.round == state.round and peer not in offered
        if peer not in done and not silent and active(state, peer):
            return False
    return True


def end_vote(state: RoundState, now_s: float, out: list[act.Action]) -> RoundState:
    stage = state.stage
    assert stage is not None
    expected = {p for p in members(state) if p == state.me or active(state, p)}
    missing = tuple(sorted(expected - set(stage.ballot.votes) - {state.me}))
    if now_s < stage.second_s and missing:
        if now_s >= (stage.first_s + stage.second_s) / 2 and not stage.asked:
            to = tuple(sorted(p for p in stage.ballot.votes if p != state.me))
            if to:
                out.append(act.AskVotes(state.round, to))
            return with_stage(state, asked=True)
        return state
    counted = stage.ballot.counted(state.log.head.digest, state.log.eligible_voters())
    if state.sync is not None or not counted or _leaves_it_to_others(state, counted):
        # We are on the wrong head, or leave it to others. If the right head arrives before the
        # third deadline we can still count the votes; else we get the result with the next head.
        if now_s < stage.third_s:
            return state
        return replace(with_stage(state, phase=Phase.DONE), outcome="syncing")
    agreed = agreed_set(counted)
    if not agreed:
        return replace(with_stage(state, phase=Phase.DONE, agreed=()), outcome="empty")
    pulling = stage.pulling
    for ref in agreed if now_s < stage.third_s else ():
        if ref not in stage.held:
            holders = tuple(p for p in stage.ballot.holders(ref) if p != state.me)
            out.append(act.Pull(ref, holders, stage.third_s))
            pulling |= {ref}
    refused = {ref: why for ref, why in stage.refused.items() if ref not in agreed}
    return with_stage(state, phase=Phase.REPAIR, agreed=agreed, pulling=pulling, refused=refused)


def _leaves_it_to_others(state: RoundState, counted: list[Vote]) -> bool:
    """Whether a newcomer has no vote of another peer although eligible voters are active: it is
    late (its first step takes longest) and would decide alone. Only in its first rounds, so that
    it cannot be kept waiting."""
    if not _is_new(state) or any(v.voter != state.me for v in counted):
        return False
    eligible = state.log.eligible_voters() - {state.me}
    return any(active(state, peer) for peer in eligible)


def end_repair(state: RoundState, now_s: float, out: list[act.Action]) -> RoundState:
    stage = state.stage
    assert stage is not None
    assert stage.agreed is not None
    if all(ref in stage.held for ref in stage.agreed):
        opens_next = exchange_opens_s(state.round + 1, state.rules.start_s, state.rules.period_s)
        base = state.log.head.digest
        out.append(act.ComputeStep(state.round, base, stage.agreed, opens_next))
        return with_stage(state, phase=Phase.AGGREGATE)
    if now_s >= stage.third_s:
        return replace(with_stage(state, phase=Phase.DONE), outcome="undecided")
    return state
