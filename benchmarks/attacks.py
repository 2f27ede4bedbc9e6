"""One of 4 replicas of a block lies: CE with our rule, with plain averaging, without the liar.

Three blocks, the middle one with 4 replicas, trained in one process (`benchmarks.exchange`): its
followers and the blocks that it reads suffer with it. The liar trains honestly and falsifies what
it sends, in every round. Lies that no honest codec produces (NaN, a replay, another block's update,
an oversized one) are refused by the checks of the live node before any rule sees them; they are
sent in turn in one row. Plain averaging is the mean of whatever can be read, with no check and no
clip; an oversized update costs it memory, not CE, and has no row there. The canary and exclusions
are not simulated: a live swarm does better.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks import harness
from benchmarks.corpus import benchmark_corpus
from benchmarks.exchange import Diverged, ExchangeRules, ExchangeSwarm
from benchmarks.exchange_rows import DEFAULT, HeldOut, SmallRow, cpu_minutes, train
from node.machine.memory import keep_freed_memory
from protocol.limits import PEER_ID_BYTES
from swarm.consensus.feedback import Unsent
from swarm.consensus.fixed_point import FixedUpdate, Ints, norm
from swarm.consensus.updates import UpdateCodec
from swarm.learning.flat import flat_weights

ATTACKED = 1
HEADER_BYTES = 2 + 8 + PEER_ID_BYTES  # block, round, sender
NAN = b"\x00\x00\xc0\x7f"
OLD_ROUND = 5  # of the update that is replayed: large, and soon out of date
REFUSED = "NaN, replay, other block, oversized"
LIES = ("sign flip", "scaled by 100", "noise of an honest norm", "an old update under a new name")


@dataclass(frozen=True, kw_only=True)
class Variant(SmallRow):
    """Who lies how, and how updates are combined."""

    lie: str
    plain: bool = False
    same_text: bool = True  # whether hosts are known to have the same, as ours here do
    honest: int = 3

    @property
    def replicas(self) -> tuple[int, ...]:
        return (1, self.honest + bool(self.lie), 1)


def variants(quick: bool) -> list[Variant]:
    size = SmallRow.size(quick)
    rows = [Variant("without the liar", lie="", **size)]
    rows += [Variant(f"our rule, {lie}", lie=lie, **size) for lie in LIES]
    rows += [Variant(f"texts may differ, {lie}", lie=lie, same_text=False, **size) for lie in LIES]
    rows += [Variant(f"plain, {lie}", lie=lie, plain=True, **size) for lie in LIES]
    rows += [
        Variant(f"our rule, {REFUSED}", lie=REFUSED, **size),
        Variant("plain, NaN", lie="NaN", plain=True, **size),
        Variant("plain, other block", lie="other block", plain=True, **size),
        Variant("our rule, 4 honest", lie="", honest=4, **size),
        Variant("plain, 4 honest", lie="", plain=True, honest=4, **size),
    ]
    return rows


class Liar:
    """What it sends instead of its honest update. Remembers what it can replay."""

    def __init__(self, lie: str, swarm: ExchangeSwarm) -> None:
        self.lie, self.swarm = lie, swarm
        self.rng = np.random.default_rng(swarm.run.seed)
        self.old_rest: Ints | None = None
        self.old_payload = b""

    def __call__(
        self, codec: UpdateCodec, rest: Ints, block: int, number: int, who: bytes, payload: bytes
    ) -> bytes:
        if number <= OLD_ROUND:
            self.old_rest, self.old_payload = rest, payload
        lie = self.lie
        if lie == REFUSED:  # one after the other; the first replay is of what is not yet known
            lie = lie.split(", ")[number % 4]
        ways: dict[str, Callable[[], bytes]] = {
            "sign flip": lambda: codec.encode(-rest, block, number, who)[0],
            "scaled by 100": lambda: codec.encode(rest * 100, block, number, who)[0],
            "noise of an honest norm": lambda: self._noise(codec, block, number, who, payload),
            "an old update under a new name": lambda: self._renamed(codec, block, number, who),
            "NaN": lambda: _nan(payload),
            "replay": lambda: self.old_payload if number > OLD_ROUND else _nan(payload),
            "other block": lambda: self._other_block(codec, number, who),
            "oversized": lambda: payload + bytes(codec.max_bytes_at(number) + 1 - len(payload)),
        }
        return ways[lie]()

    def _noise(
        self, codec: UpdateCodec, block: int, number: int, who: bytes, payload: bytes
    ) -> bytes:
        """As long as its honest update, so that no clip sees it."""
        wanted = norm(codec.decode(payload, block, number, who))
        noise = self.rng.normal(size=codec.size) * 1e6
        _, first = codec.encode(noise.astype(np.int64), block, number, who)
        noise *= wanted / max(norm(first), 1)
        return codec.encode(noise.astype(np.int64), block, number, who)[0]

    def _renamed(self, codec: UpdateCodec, block: int, number: int, who: bytes) -> bytes:
        assert self.old_rest is not None
        return codec.encode(self.old_rest, block, number, who)[0]

    def _other_block(self, codec: UpdateCodec, number: int, who: bytes) -> bytes:
        """A true update, of the next block: it has as many weights."""
        group = self.swarm.groups[ATTACKED + 1]
        rest = Unsent(flat_weights(group.members[0].worker.block), group.consensus)
        return codec.encode(rest, ATTACKED + 1, number, who)[0]


def _nan(payload: bytes) -> bytes:
    """Every four bytes of the values are the float NaN."""
    start = HEADER_BYTES + 8
    body = NAN * (len(payload) // 4)
    return payload[:start] + body[: len(payload) - start]


def unchecked(
    codec: UpdateCodec, payload: bytes, block: int, number: int, who: bytes
) -> FixedUpdate:
    """What plain averaging reads: whatever block and round it is of."""
    if payload.count(NAN) > len(payload) // 8:
        raise Diverged(f"the mean of round {number} is not a number")
    named_block = int.from_bytes(payload[:2], "big")
    named_round = int.from_bytes(payload[2:10], "big")
    return codec.decode(payload, named_block, named_round, payload[10:HEADER_BYTES])


def measure(variant: Variant) -> dict[str, Any]:
    keep_freed_memory()
    torch.set_num_threads(1)
    run = variant.run
    rules = ExchangeRules(DEFAULT, same_text=variant.same_text)
    if variant.plain:
        rules = ExchangeRules(DEFAULT, plain=True, read=unchecked)
    swarm = ExchangeSwarm(run, variant.replicas, benchmark_corpus().train, rules)
    members = swarm.groups[ATTACKED].members
    if variant.lie:
        members[-1].lie = Liar(variant.lie, swarm)
    sizes = (4096, 2048, 2048) if variant.quick else (65_536, 16_384, 16_384)
    row = train(swarm, variant.rounds, HeldOut(run, *sizes))
    honest = members[: variant.honest]
    liars = members[variant.honest :]
    return {
        "ce": row.pop("ce"),
        "lies_refused": sum(m.refused for m in liars),
        "lies_left_out": sum(m.left_out for m in liars),
        "honest_left_out": sum(m.left_out for m in honest),
        **row,
    }


def figures(rows: harness.Rows) -> harness.Figures:
    by_name = {row["name"]: row["ce"] for row in rows}
    if "without the liar" not in by_name:
        return {}
    reference = by_name["without the liar"]
    out: harness.Figures = {"ce_without_liar": reference}
    for figure, who in (
        ("worst_ce_gap", "our rule, "),
        ("worst_ce_gap_texts_differ", "texts may differ, "),
        ("worst_ce_gap_plain", "plain, "),
    ):
        lied = [
            ce for name, ce in by_name.items() if name.startswith(who) and name[-6:] != "honest"
        ]
        if lied:
            out[figure] = max(lied) - reference
    for figure, name in (
        ("ce_4_honest", "our rule, 4 honest"),
        ("ce_4_honest_plain", "plain, 4 honest"),
    ):
        if name in by_name:
            out[figure] = by_name[name]
    return out


def main() -> None:
    options = harness.parse("attacks")
    corpus = benchmark_corpus()
    facts = {
        "data": {"source": corpus.source, "sha256": corpus.sha256, "split": "valid"},
        "seeds": [0],
    }
    table = variants(options.quick)
    minutes = sum(cpu_minutes(v.run, v.replicas) for v in table)
    print(f"{len(table)} rows, about {minutes / len(table):.1f} CPU min each, {minutes:.0f} in all")
    harness.measure_rows(options, "attacks", table, measure, figures, facts)


if __name__ == "__main__":
    main()
