"""What must hold after every event of a round, whatever it was."""

from __future__ import annotations

from protocol.votes import UpdateRef
from swarm.rounds import actions as act
from swarm.rounds.round import next_wakeup_s
from swarm.rounds.state import Phase, RoundState


def check_time(state: RoundState, now_s: float) -> None:
    """Nothing waits past its deadline."""
    assert next_wakeup_s(state, now_s) > now_s
    stage = state.stage
    if stage is None:
        return
    if now_s >= stage.first_s:
        assert stage.phase is not Phase.COLLECT
    if now_s >= stage.second_s:
        assert stage.phase is not Phase.VOTE or now_s < stage.third_s
    if now_s >= stage.third_s:
        assert stage.phase in (Phase.AGGREGATE, Phase.DONE)


class Books:
    """What became of every update of ours, as the actions say."""

    def __init__(self, me: str = "me") -> None:
        self.me = me
        self.offered: set[UpdateRef] = set()
        self.settled: dict[UpdateRef, int] = {}
        self.returned: set[UpdateRef] = set()

    def see(self, action: act.Action) -> None:
        if isinstance(action, act.Settle):
            assert action.ref not in self.settled, "counted twice"
            self.settled[action.ref] = action.scale
        if isinstance(action, act.ReturnToFeedback):
            assert self.settled.pop(action.ref, 0) == action.scale
            self.returned.add(action.ref)

    def check(self, state: RoundState) -> None:
        """Each is in flight, or in the chain and settled, or returned: exactly one of them."""
        chain = [
            UpdateRef(c.digest, c.sender)
            for e in state.log.entries
            for c in e.contributions
            if c.sender == self.me and c.scale > 0
        ]
        assert len(chain) == len(set(chain))
        assert set(chain) == set(self.settled)
        for ref in self.offered:
            places = (ref in state.in_flight, ref in self.settled)
            assert sum(places) == 1 or (sum(places) == 0 and ref in self.returned)
