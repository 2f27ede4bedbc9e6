"""Status from signed records: coverage, agreement, who is behind; and what a person sees."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.commands.assemble import print_status
from node.log.fetch import FetchError
from node.report.status import RunStatus, block_status, look
from protocol import records
from protocol.errors import WireError
from protocol.frames import content_digest
from protocol.identity import Identity, peer_text
from protocol.records import Record, Role, SignedRecord
from tests.support.live import tiny_run_file

RUN_ID = content_digest(b"a run")
NOW_S = time.time()


def record(
    number: int, round_: int, head: bytes = b"a", head_round: int | None = None, **more: Any
) -> SignedRecord:
    """A replica's record; its head is that of the round before unless said otherwise."""
    values: dict[str, Any] = {
        "run": RUN_ID,
        "role": int(Role.REPLICA),
        "block": 0,
        "round": round_,
        "sequence": 1,
        "consensus": content_digest(head),
        "head_round": round_ - 1 if head_round is None else head_round - 1,
        "update_bytes": 100,
        **more,
    }
    identity = Identity(bytes([number]) * 32)
    return records.seal(identity, Record(**values), NOW_S + 60)


def name(number: int) -> str:
    return peer_text(Identity(bytes([number]) * 32).peer_id)


def status(*found: SignedRecord, current: int = 10, needed: int = 2) -> Any:
    return block_status(0, found, current, needed, NOW_S)


def test_replicas_that_agree() -> None:
    block = status(record(1, 10), record(2, 10), record(3, 9, head_round=10))
    assert (block.live, block.agree, block.consensus_round) == (3, 3, 9)
    assert block.warnings == []
    assert block.replicas[0].expires_in_s == pytest.approx(60, abs=1)


def test_a_replica_that_is_behind_is_not_live() -> None:
    block = status(record(1, 10), record(2, 7, b"old"))
    assert [(r.peer, r.behind_rounds, r.live) for r in block.replicas] == [
        (name(1), 0, True),
        (name(2), 3, False),
    ]
    assert block.warnings == ["block 0 has 1 live replica, wanted are 2"]


def test_the_silent_have_no_say_about_the_head() -> None:
    block = status(record(1, 10, b"new"), record(2, 3, b"old"), record(3, 3, b"old"))
    assert block.consensus == content_digest(b"new").hex() and block.agree == 1


def test_no_replica_and_only_dead_ones() -> None:
    assert status().warnings == ["block 0 has no live replica"]
    dead = status(record(1, 2))
    assert dead.warnings == ["block 0 has no live replica"] and dead.consensus_round == 1


def test_a_branch_of_its_own_is_seen() -> None:
    block = status(record(1, 10), record(2, 10), record(3, 10, b"b"))
    assert block.warnings == ["block 0: 1 of 3 live replicas are on another branch"]


def test_one_round_behind_in_the_log_is_no_branch() -> None:
    """The exchange is open: some have signed the new head already."""
    assert status(record(1, 10), record(2, 10), record(3, 9, b"before")).warnings == []


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from([b"a", b"b", b"c"]), st.integers(0, 40)),
        max_size=12,
    ),
    st.integers(0, 40),
    st.integers(1, 5),
)
def test_counts_are_consistent(
    rows: list[tuple[int, bytes, int]], current: int, needed: int
) -> None:
    found = [record(n + 1, r, head, h) for n, (r, head, h) in enumerate(rows)]
    block = status(*found, current=current, needed=needed)
    assert len(block.replicas) == len(rows) and 0 <= block.live <= len(rows)
    assert block.agree == sum(r.consensus == block.consensus for r in block.replicas)
    assert not rows or block.agree >= 1
    assert (block.live < needed) == any(
        ("live replica" in w and "wanted" in w) or "no live" in w for w in block.warnings
    )
    json.dumps(RunStatus("ab", "n", current, 50, (block,)).facts())


class Nobody:
    """Peers that do not answer."""

    async def ask(self, *_: Any, **__: Any) -> Any:
        raise FetchError("refused")


def test_looking_when_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    run_file = tiny_run_file()

    async def found(block: int) -> list[SignedRecord]:
        if block == 1:
            raise WireError("the DHT did not answer")
        return [record(1, 0), record(2, 0, role=int(Role.REPLICA | Role.SEED))]

    seen = asyncio.run(look(run_file, RUN_ID, found, Nobody(), NOW_S))
    facts = seen.facts()
    assert facts["peers"] == 2 and facts["warnings"][-1] == "block 1 has no live replica"
    assert [r["seed"] for r in facts["blocks"][0]["replicas"]].count(True) == 1
    assert facts["blocks"][0]["last"] is None
    print_status(seen)
    out = capsys.readouterr().out
    assert "warning: block 1 has no live replica" in out and "live test" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["1", "0", "-", "-", "-", "-", "-", "-", "-"] in lines  # no round, no agreement
