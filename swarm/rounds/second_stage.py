"""The second stage of a round with more than 16 replicas: the groups' aggregates.

Decides when it opens and whose claims are followed. Its votes, deadlines and repair are those of
the first stage, in `swarm.rounds.round`.
"""

from __future__ import annotations

from dataclasses import replace

from swarm.consensus.votes import UpdateRef
from swarm.rounds import actions as act
from swarm.rounds.groups import group_of, speakers_of
from swarm.rounds.report import remember_arrivals, report_of
from swarm.rounds.state import Phase, RoundState, keep_ahead, opened, own_group, with_stage


def group_name(group: int) -> str:
    """The sender of a group's aggregate in a vote of the second stage."""
    return f"group {group}"


def group_ready(
    state: RoundState, number: int, ref: UpdateRef, now_s: float, out: list[act.Action]
) -> tuple[RoundState, tuple[act.Event, ...]]:
    """Our group's aggregate is there: open the second stage; also what waited for it."""
    stage = state.stage
    if stage is None or number != state.round or stage.number != 0:
        return state, ()
    rules = state.rules
    members = own_group(state)
    if state.me in speakers_of(members, number):
        group = group_of(state.me, number, state.groups)
        claim = act.GroupClaim(state.me, number, state.log.head.digest, group, ref)
        out.append(act.Claim(claim, tuple(p for p in state.peers)))
    report = report_of(state, stage)
    state = remember_arrivals(state, stage)
    # The first stage may end early; the second has the time that the first one was given.
    second = opened(rules, 1, stage.opens_s, stage.third_s + rules.repair_window_s)
    second = replace(second, held={ref: now_s - stage.opens_s}, offers={ref: (state.me,)})
    waiting, state = state.ahead, replace(state, stage=second, first_report=report, ahead=())
    return state, waiting


def heard_claim(state: RoundState, claim: act.GroupClaim, out: list[act.Action]) -> RoundState:
    stage = state.stage
    if stage is None or claim.round != state.round or not 0 <= claim.group < state.groups:
        return state
    if group_of(claim.peer, state.round, state.groups) != claim.group:
        return state
    if claim.ref.sender != group_name(claim.group):
        return state
    if stage.number == 0:
        return keep_ahead(state, claim) if stage.phase is not Phase.DONE else state
    if claim.base != state.log.head.digest or stage.phase is not Phase.COLLECT:
        return state
    holders = stage.offers.get(claim.ref, ())
    if claim.peer in holders:
        return state
    offers = {**stage.offers, claim.ref: (*holders, claim.peer)}
    if claim.ref in stage.held or claim.ref in stage.pulling:
        return with_stage(state, offers=offers)
    if any(ref.sender == claim.ref.sender for ref in (*stage.held, *stage.pulling)):
        return with_stage(state, offers=offers)
    out.append(act.Pull(claim.ref, offers[claim.ref], stage.third_s))
    return with_stage(state, offers=offers, pulling=stage.pulling | {claim.ref})
