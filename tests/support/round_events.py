"""Rounds as hosts write them into their event logs, made up for tests that read those."""

from __future__ import annotations

from typing import Any

from benchmarks.wan.events import Event


def round_event(number: int, **changes: Any) -> Event:
    """A worker's line of a round in which nothing went wrong, with some fields changed."""
    event: Event = {
        "kind": "round",
        "time_s": 100.0 + 5 * number,
        "peer": "me",
        "block": 0,
        "round": number,
        "outcome": "decided",
        "in_time": [],
        "late": [],
        "refused": [],
        "agreed": [],
        "left_out": [],
        "included": True,
        "first_deadline_s": 1.0,
        "consensus": f"c{number}",
        "consensus_round": number,
        "update_bytes": 10,
        "traffic": [{"purpose": "update", "sent_bytes": 1000, "received_bytes": 0}],
        "consensus_ce_nats": 5.0 - number / 10,
        "steps": 3,
    }
    return {**event, **changes}
