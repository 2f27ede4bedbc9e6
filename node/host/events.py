"""What a host writes down: reports, moves and exclusions of its replica as events of the log.

Decides the content of the event lines that a live host adds to what the round reports (bytes by
purpose, CE, steps, the age of its copies). Their form is `swarm.events`; the file is `event_log`'s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from protocol.ledger import Count, Ledger
from protocol.messages import Purpose
from swarm import events
from swarm.consensus.log import ConsensusLog
from swarm.events import MoveEvent, NodeEvent, Refusal, RoundEvent, Traffic, TrustEvent
from swarm.rounds import actions as act


@dataclass
class Measured:
    """What was measured of the host itself. The CE is of this round: None if there was none."""

    steps: int = 0  # of this host since its start, in all its training processes
    loss_nats: float | None = None
    local_ce_nats: float | None = None
    consensus_ce_nats: float | None = None
    newest_ce_nats: float | None = None  # of the consensus, in whichever round it was measured
    newest_own_ce_nats: float | None = None  # of the running weights, likewise
    of_process: int = 0  # steps of the running training process, which counts from its start

    def hear_progress(self, progress: Mapping[str, object]) -> None:
        steps, loss = progress.get("steps"), progress.get("loss_nats")
        if isinstance(steps, int):
            self.steps += max(0, steps - self.of_process)
            self.of_process = steps
        self.loss_nats = loss if isinstance(loss, float) else self.loss_nats

    def new_process(self) -> None:
        self.of_process = 0

    def forget_block(self) -> None:
        """The host works on another one now."""
        self.newest_ce_nats = self.newest_own_ce_nats = None

    def forget_ce(self) -> None:
        """It was written down; a line never repeats what was measured in another round."""
        self.local_ce_nats = self.consensus_ce_nats = None


class EventWriter:
    """Makes the events of one host."""

    def __init__(self, me: str, ledger: Ledger) -> None:
        self.me, self.ledger = me, ledger
        self.block = -1
        self.measured = Measured()
        self._booked: dict[Purpose, Count] = ledger.by_purpose()
        self._steps_before = 0

    def round(
        self,
        time_s: float,
        report: act.RoundReport,
        log: ConsensusLog,
        update_bytes: int,
        copy_ages: tuple[int, ...],
    ) -> RoundEvent:
        entry = next((e for e in reversed(log.entries) if e.round == report.round), None)
        left_out = [c.sender for c in entry.contributions if c.scale == 0] if entry else []
        measured = self.measured
        steps, self._steps_before = measured.steps - self._steps_before, measured.steps
        event = RoundEvent(
            time_s=time_s,
            peer=self.me,
            block=self.block,
            round=report.round,
            outcome=cast(events.Outcome, report.outcome),
            in_time=report.in_time,
            late=report.late,
            missing=report.missing,
            refused=tuple(Refusal(peer, why) for peer, why in report.refused),
            agreed=report.agreed,
            left_out=tuple(left_out),
            included=report.included,
            voters=report.voters,
            first_deadline_s=report.first_deadline_s,
            consensus=log.head.digest.hex(),
            consensus_round=log.head.round,
            update_bytes=update_bytes,
            traffic=self._traffic(),
            local_ce_nats=_finite(measured.local_ce_nats),
            consensus_ce_nats=_finite(measured.consensus_ce_nats),
            steps=steps,
            copy_ages_rounds=copy_ages,
            declined=tuple(Refusal(peer, why) for peer, why in report.declined),
            replicas=round(log.replicas(), 2),
        )
        measured.forget_ce()
        return event

    def move(self, time_s: float, number: int, move: act.MoveTo, before: bytes) -> MoveEvent:
        return MoveEvent(
            time_s=time_s,
            peer=self.me,
            block=self.block,
            round=number,
            before=before.hex(),
            after=move.head.digest.hex(),
            rolled_back=len(move.plan.rollback),
            applied=len(move.plan.forward),
            from_snapshot=move.plan.snapshot is not None,
            mode=move.mode.value,
        )

    def exclusion(
        self, time_s: float, number: int, about: str, until_round: int, reason: str
    ) -> TrustEvent:
        return TrustEvent(time_s, self.me, self.block, number, about, reason, until_round)

    def node(
        self, time_s: float, what: str, detail: str = "", facts: Mapping[str, str] | None = None
    ) -> NodeEvent:
        return NodeEvent(time_s, self.me, what, detail, dict(facts or {}))

    def _traffic(self) -> tuple[Traffic, ...]:
        """Bytes since the last round, by purpose."""
        now = self.ledger.by_purpose()
        before, self._booked = self._booked, now
        out = []
        for purpose, count in now.items():
            old = before.get(purpose, Count())
            name = purpose.name.lower().replace("_", "-")
            sent, received = count.bytes_out - old.bytes_out, count.bytes_in - old.bytes_in
            if sent or received:
                out.append(Traffic(cast(events.Purpose, name), sent, received))
        return tuple(out)


def _finite(value: float | None) -> float | None:
    """NaN is not JSON."""
    return value if value is not None and math.isfinite(value) else None
