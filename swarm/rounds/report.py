"""The report on a closed round, and its arrival times for the next deadlines."""

from __future__ import annotations

from dataclasses import replace

from protocol.votes import Reason
from swarm.rounds import actions as act
from swarm.rounds.deadline import remembered
from swarm.rounds.state import RoundState, Stage

WORDS = {
    Reason.OTHER: "for a reason that this version does not know",
    Reason.REFUSED: "the update was not valid",
    Reason.FAULT: "earlier updates were not valid, or votes differed",
    Reason.HARM: "it made their held-out text worse",
}


def remember_arrivals(state: RoundState, stage: Stage) -> RoundState:
    gave_up = stage.third_s - stage.opens_s
    times = [
        stage.held.get(ref, gave_up)
        for ref in stage.offers
        if ref.sender != state.me and ref not in stage.refused
    ]
    return replace(
        state, arrivals_s=remembered(state.arrivals_s, sorted(times), state.rules.deadline)
    )


def included(state: RoundState) -> bool | None:
    if state.own is None or state.own in state.in_flight:
        return None
    return any(entry.included(state.own.digest) for entry in state.log.entries[-4:])


def report_of(state: RoundState, stage: Stage) -> act.RoundReport:
    first = stage.first_s - stage.opens_s
    others = {ref: at for ref, at in stage.held.items() if ref.sender != state.me}
    missing = [r for r in stage.offers if r not in stage.held and r not in stage.refused]
    return act.RoundReport(
        round=state.round,
        outcome=state.outcome,
        in_time=tuple(sorted(ref.sender for ref, at in others.items() if at <= first)),
        late=tuple(sorted(ref.sender for ref, at in others.items() if at > first)),
        missing=tuple(sorted(ref.sender for ref in missing)),
        refused=tuple(sorted((ref.sender, why) for ref, why in stage.refused.items())),
        agreed=tuple(ref.sender for ref in stage.agreed or ()),
        included=included(state),
        voters=len(stage.ballot.votes),
        first_deadline_s=first,
        declined=_declined(state, stage),
    )


def _declined(state: RoundState, stage: Stage) -> tuple[tuple[str, str], ...]:
    """Which voters declined our own update, and why."""
    said = [
        (voter, why)
        for voter, vote in stage.ballot.votes.items()
        for sender, why in vote.declined
        if sender == state.me and state.own is not None
    ]
    return tuple(sorted((voter, WORDS[why]) for voter, why in said))
