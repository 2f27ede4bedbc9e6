"""How a replica's consensus changes: by a computed step, or by a move to the others' branch.

Also what becomes of our own updates with each change: settled, returned, or still in flight. The
choice between branches is `swarm.consensus.forks`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from protocol.log import Entry, LogError
from protocol.votes import UpdateRef
from swarm.consensus.forks import YOUNG, SignedHead, Word, move_mode, support, winner
from swarm.consensus.log import MoveMode, check_chain
from swarm.rounds import actions as act
from swarm.rounds.clock import exchange_opens_s
from swarm.rounds.state import Phase, RoundState, Sync, active, with_stage

IN_FLIGHT = 8  # rounds that an update waits for a log entry of its round


def _settle(
    state: RoundState, new: tuple[Entry, ...], given_up: tuple[Entry, ...], out: list[act.Action]
) -> Mapping[UpdateRef, int]:
    """Settle or return our updates after the chain got `new` entries and lost `given_up` ones.

    Returns those that are still in flight.
    """
    before, after = _own_scales(state.me, given_up), _own_scales(state.me, new)
    for digest, scale in sorted(before.items()):
        if after.get(digest) != scale:
            out.append(act.ReturnToFeedback(UpdateRef(digest, state.me), scale))
    for digest, scale in sorted(after.items()):
        if before.get(digest) != scale:
            out.append(act.Settle(UpdateRef(digest, state.me), scale))
    left_out = {
        ref: number
        for ref, number in state.in_flight.items()
        if ref.digest not in after and new and number <= new[-1].round
    }
    out.extend(act.ReturnToFeedback(ref) for ref in sorted(left_out))
    return {
        ref: number
        for ref, number in state.in_flight.items()
        if ref.digest not in after and ref not in left_out
    }


def give_up_waiting(state: RoundState, out: list[act.Action]) -> RoundState:
    """Return updates whose rounds have stayed undecided for IN_FLIGHT rounds.

    A voter that agrees to nothing, or lines too slow for any update, could leave all rounds
    undecided: the updates in flight would pile up and never be sent again. Also those of future
    rounds, from a wrong clock, which may never be decided.
    """
    at = state.round
    late = {ref for ref, number in state.in_flight.items() if not at - IN_FLIGHT <= number <= at}
    out.extend(act.ReturnToFeedback(ref) for ref in sorted(late))
    waiting = {ref: number for ref, number in state.in_flight.items() if ref not in late}
    return replace(state, in_flight=waiting) if late else state


def _own_scales(me: str, entries: tuple[Entry, ...]) -> dict[bytes, int]:
    own = [entry.contribution_of(me) for entry in entries]
    return {c.digest: c.scale for c in own if c is not None and c.scale > 0}


def apply_entry(state: RoundState, entry: Entry, out: list[act.Action]) -> RoundState:
    """Apply a computed step, unless the head has moved meanwhile."""
    if entry.parent != state.log.head.digest or entry.round <= state.log.head.round:
        return state
    out.append(act.Apply(entry))
    in_flight = _settle(state, (entry,), (), out)
    state = replace(state, log=state.log.appended(entry), in_flight=in_flight, sync=None)
    if entry.round == state.round:
        state = replace(with_stage(state, phase=Phase.DONE), outcome="decided")
    return state


def _is_newcomer(state: RoundState) -> bool:
    """Whether no update of ours is in the log."""
    return not any(entry.contribution_of(state.me) for entry in state.log.entries)


def _next_round(state: RoundState) -> int:
    """The first round that no head can have yet: this one, or the one after the run's last."""
    last = state.rules.last
    return state.round if last is None else min(state.round, last + 1)


def _words(state: RoundState) -> Callable[[str], Word]:
    """How well this replica knows each peer (see `Word`), itself included.

    In a young swarm no peer is senior, and all count; so we do not count ourselves as senior before
    the others can be. A young log makes no contributors, since hosts that had not found each other
    yet may have decided its rounds separately.
    """
    mature = state.round - state.warm_until >= 2 * state.trust.rules.seniority
    young = len(state.log.entries) <= YOUNG
    contributors = frozenset() if young else state.log.contributors()

    def word(peer: str) -> Word:
        if peer in contributors:
            return Word.CONTRIBUTOR
        senior = mature if peer == state.me else state.trust.senior(peer)
        return Word.SENIOR if senior else Word.STRANGER

    return word


def choose_head(state: RoundState, now_s: float, out: list[act.Action]) -> RoundState:
    """Fetch another head if it wins. Before the first deadline only if most peers have it."""
    stage = state.stage
    if state.sync is not None or stage is None or stage.phase in (Phase.REPAIR, Phase.AGGREGATE):
        return state
    head = state.log.head
    if all(v.head == head.digest or v.round != state.round for v in state.peers.values()):
        return state
    if stage.phase is Phase.DONE and head.round == state.round:
        return state  # our step is applied; the others' signed heads are from before their step
    words = _words(state)
    heads = {
        peer: SignedHead(view.head, view.head_round, words(peer))
        for peer, view in state.peers.items()
        if view.round == state.round and active(state, peer)
    }
    known = sum(active(state, peer) for peer in state.peers)
    ahead = {peer: other for peer, other in heads.items() if other.round > head.round}
    if ahead and _is_newcomer(state):
        heads = ahead  # a newcomer's own head contains none of its work and must not cause a tie
    else:
        heads[state.me] = SignedHead(head.digest, head.round, words(state.me))
        known += 1
    counts = support(heads, _next_round(state))
    target = winner(counts)
    if target is None or target == head.digest:
        return state
    if now_s < stage.first_s and 2 * counts[target] <= known:
        return state
    holders = tuple(sorted(p for p, h in heads.items() if h.digest == target))
    until = exchange_opens_s(state.round + 1, state.rules.start_s, state.rules.period_s)
    out.append(act.FetchConsensus(target, head.digest, holders, until))
    return replace(state, sync=Sync(target, until))


def fetched(state: RoundState, event: act.ConsensusFetched, out: list[act.Action]) -> RoundState:
    if state.sync is None or event.target != state.sync.target:
        return state
    try:
        check_chain(event.entries, event.target)
    except LogError:
        return state
    if event.entries[-1].round >= _next_round(state):
        return state  # a round that cannot be decided yet: the peers' records gave another one
    log = state.log
    plan = log.plan_move(event.entries, event.pinned)
    mode = move_mode(log, plan, event.entries)
    out.append(act.MoveTo(event.entries[-1], plan, mode))
    if mode is not MoveMode.REBASE:
        out.extend(act.ReturnToFeedback(ref) for ref in sorted(state.in_flight))
        in_flight: Mapping[UpdateRef, int] = {}
    else:
        after = plan.fork.round if plan.fork else log.head.round
        new = tuple(entry for entry in event.entries if entry.round > after)
        in_flight = _settle(state, new, plan.rollback, out)
    newcomer = _is_newcomer(state) and event.entries[-1].round > 0
    warm = state.round + 1 if newcomer else state.warm_until
    return replace(
        state,
        log=log.moved(event.entries),
        in_flight=in_flight,
        sync=None,
        warm_until=max(warm, state.warm_until),
    )


def fetch_failed(state: RoundState, target: bytes, liars: tuple[str, ...]) -> RoundState:
    trust = state.trust
    for peer in liars:
        trust = trust.exclude(peer, state.round, "it vouched for a consensus that is not one")
    state = replace(state, trust=trust)
    if state.sync is None or state.sync.target != target:
        return state
    # Look again in the next round; until then do not ask for the same in a loop.
    peers = {
        p: replace(v, round=v.round - 1) if v.head == target and v.round == state.round else v
        for p, v in state.peers.items()
    }
    return replace(state, sync=None, peers=peers)
