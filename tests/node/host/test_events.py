"""Event lines of a host: nothing is counted twice, nothing is repeated."""

from __future__ import annotations

from pathlib import Path

from node.host.events import EventWriter
from protocol.frames import Tally
from protocol.ledger import Ledger
from protocol.messages import Purpose
from swarm.events import RoundEvent, from_line, to_line
from swarm.rounds import actions as act
from tests.support.chains import Chain, identity

REPORT = act.RoundReport(3, "decided", (), (), (), (), (), True, 1, 0.5)


def line(writer: EventWriter, chain: Chain) -> RoundEvent:
    writer.block = 0
    event = writer.round(1.0, REPORT, chain.log, 10, ())
    assert from_line(to_line(event)) == event
    return event


def test_a_ce_stands_in_the_line_of_the_round_in_which_it_was_measured(tmp_path: Path) -> None:
    chain = Chain(identity(tmp_path)).grow(2)
    writer = EventWriter("me", Ledger())
    writer.measured.consensus_ce_nats, writer.measured.local_ce_nats = 2.5, float("nan")
    first, second = line(writer, chain), line(writer, chain)
    assert (first.consensus_ce_nats, first.local_ce_nats) == (2.5, None)
    assert (second.consensus_ce_nats, second.local_ce_nats) == (None, None)


def test_steps_are_counted_once_over_restarts_of_the_process(tmp_path: Path) -> None:
    chain = Chain(identity(tmp_path)).grow(2)
    writer = EventWriter("me", Ledger())
    measured = writer.measured
    measured.hear_progress({"steps": 3, "loss_nats": 2.0})
    measured.hear_progress({"steps": 5, "loss_nats": 1.9})
    assert line(writer, chain).steps == 5
    measured.new_process()
    measured.hear_progress({"steps": 6})  # more than the old process had: all six are new
    assert line(writer, chain).steps == 6
    assert line(writer, chain).steps == 0


def test_what_the_ledger_had_before_is_not_of_this_round(tmp_path: Path) -> None:
    chain = Chain(identity(tmp_path)).grow(2)
    ledger = Ledger()
    ledger.book(Tally(100, 50, 1, 1), "peer", Purpose.UPDATE)
    writer = EventWriter("me", ledger)
    assert line(writer, chain).traffic == ()
    ledger.book(Tally(7, 8, 1, 1), "peer", Purpose.UPDATE)
    (traffic,) = line(writer, chain).traffic
    assert (traffic.purpose, traffic.received_bytes, traffic.sent_bytes) == ("update", 7, 8)
