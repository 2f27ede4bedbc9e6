"""A swarm's learning with no network: real workers, codecs, aggregation and error feedback.

What `gb_per_nat` and `lateness` share. Every worker trains on its own stream of windows and reads
other blocks as copies of their consensus, in the versions that a live host would have; at a round's
end updates are encoded, decoded, aggregated and applied by the code that the live node runs, so the
bytes of updates are exact. Deadlines and loss are not simulated but chosen: which share of updates
arrives in time, and how many rounds late they are.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from node.windows import WindowStream, stream_seed
from swarm.aggregate import (
    QUANTUM_BITS,
    FixedUpdate,
    Ints,
    add_into,
    aggregate,
    apply_step,
    compact,
    scaled,
    to_fixed,
    to_float,
)
from swarm.composition import ComposedModel
from swarm.coupling import composed_versions, upstream_versions
from swarm.feedback import unsent
from swarm.flat import Floats, add_flat, flat_weights, load_flat
from swarm.local import frozen_copy
from swarm.model import Block
from swarm.run import Run
from swarm.updates import UpdateCodec
from swarm.worker import BlockWorker, initial_block

CPU = torch.device("cpu")
SENDER = bytes(38)
WINDOW = 8


@dataclass(frozen=True)
class ExchangeRules:
    """What is exchanged, and what arrives."""

    codec: str
    participation: float = 1.0
    late_rounds: int = 0


@dataclass
class Member:
    """One worker of a block."""

    name: str
    worker: BlockWorker
    stream: WindowStream
    in_flight: deque[tuple[int, FixedUpdate]] = field(default_factory=deque)  # due round, update
    scores: deque[int] = field(default_factory=lambda: deque(maxlen=7))
    position: int = 0


class BlockGroup:
    """The replicas of one block and their consensus."""

    def __init__(self, run: Run, block: int, replicas: int, text: np.ndarray, rules: ExchangeRules):
        self.block = block
        self.members = [
            Member(
                f"{block}/{number}",
                BlockWorker(run, block, CPU),
                WindowStream(
                    text,
                    run.model.context,
                    run.training.batch,
                    stream_seed("windows", run.seed, block, number),
                ),
            )
            for number in range(replicas)
        ]
        self.consensus = to_fixed(flat_weights(self.members[0].worker.block))
        self.codec = UpdateCodec(rules.codec, len(self.consensus))
        self.norms: deque[int] = deque(maxlen=WINDOW)
        self.steps: deque[FixedUpdate] = deque(maxlen=WINDOW)
        self.versions: list[Floats] = [to_float(self.consensus)]
        self.update_bytes: list[int] = []  # of every update that was sent, this round

    def exchange(self, number: int, rules: ExchangeRules, rng: random.Random) -> None:
        """One round's end: encode what is unsent, aggregate what has arrived, correct all."""
        self.update_bytes = []
        arrived: list[tuple[Member, FixedUpdate]] = []
        for member in self.members:
            rest = unsent(
                flat_weights(member.worker.block), self.consensus, [u for _, u in member.in_flight]
            )
            payload, update = self.codec.encode(rest, self.block, number, SENDER)
            self.update_bytes.append(len(payload))
            if rng.random() < rules.participation:
                member.in_flight.append((number + rules.late_rounds, update))
            while member.in_flight and member.in_flight[0][0] <= number:
                arrived.append((member, member.in_flight.popleft()[1]))
        if arrived:
            self._apply(arrived)
        self.versions.append(to_float(self.consensus))

    def _apply(self, arrived: list[tuple[Member, FixedUpdate]]) -> None:
        trend: Ints | None = None
        if self.steps:
            trend = np.zeros(len(self.consensus), dtype=np.int64)
            for made in self.steps:
                add_into(trend, made)
        result = aggregate(
            [update for _, update in arrived],
            recent_norms=list(self.norms),
            trend=None if trend is None else compact(trend),
            past_scores=[list(member.scores) for member, _ in arrived],
        )
        self.consensus, made = apply_step(self.consensus, result.delta)
        self.norms.append(result.median_norm)
        self.steps.append(made)
        scores = result.scores or (0,) * len(arrived)
        settled = {id(m): (u, s) for (m, u), s in zip(arrived, result.scales, strict=True)}
        for (member, _), score in zip(arrived, scores, strict=True):
            member.scores.append(score)
        for member in self.members:
            change = made.dense().copy()
            if id(member) in settled:
                update, scale = settled[id(member)]
                add_into(change, scaled(update, scale), -1)
            add_flat(member.worker.block, (change * 2.0**-QUANTUM_BITS).astype(np.float32))


class ExchangeSwarm:
    """All blocks. `replicas[b]` workers train block b."""

    def __init__(
        self, run: Run, replicas: list[int], text: np.ndarray, rules: ExchangeRules
    ) -> None:
        self.run, self.rules = run, rules
        self.groups = [BlockGroup(run, b, n, text, rules) for b, n in enumerate(replicas)]
        self.rng = random.Random(run.seed)
        self.round = 0
        self.update_bytes = 0  # pulled by the other replicas
        self.relay_bytes = 0  # fetched by the workers of other blocks that follow the log
        self._copies = [frozen_copy(initial_block(run, b)) for b in range(len(replicas))]

    def one_round(self) -> None:
        """Train, exchange, count."""
        steps = self.run.training.steps_per_round
        for group in self.groups:
            upstream, ahead = self._read(group.block)
            for member in group.members:
                self._train(member, upstream, ahead, steps)
        for group in self.groups:
            group.exchange(self.round, self.rules, self.rng)
            total = sum(group.update_bytes)
            others = len(group.members) - 1
            self.update_bytes += total * others
            self.relay_bytes += total * self._followers(group.block)
        self.round += 1

    def _train(
        self, member: Member, upstream: list[Block], ahead: Block | None, steps: int
    ) -> None:
        member.worker.steps_done = self.round * steps
        for _ in range(steps):
            windows = torch.from_numpy(member.stream.batch_at(member.position)).long()
            member.position += 1
            member.worker.step(windows[:, :-1], windows[:, 1:], upstream, ahead)

    def _read(self, block: int) -> tuple[list[Block], Block | None]:
        """The copies that the workers of a block read in this round."""
        if not self.run.model.relays:
            return [], None
        staggered = self.run.training.staggered
        wanted = upstream_versions(block, self.round, staggered)
        upstream = [self._copy(before, version) for before, version in enumerate(wanted)]
        ahead = None
        if self.run.model.coupling == "look_ahead" and block + 1 < len(self.groups):
            ahead = self._copy(block + 1, self.round)
        return upstream, ahead

    def _copy(self, block: int, version: int) -> Block:
        copy = self._copies[block]
        load_flat(copy, self.groups[block].versions[version])
        return copy

    def _followers(self, block: int) -> int:
        """How many workers of other blocks read this one."""
        if not self.run.model.relays:
            return 0
        later = sum(len(group.members) for group in self.groups[block + 1 :])
        before = len(self.groups[block - 1].members) if block else 0
        return later + (before if self.run.model.coupling == "look_ahead" else 0)

    def assembled(self) -> ComposedModel:
        """The model that an assembler would get now."""
        staggered = self.run.model.relays and self.run.training.staggered
        versions = composed_versions(len(self.groups), self.round, staggered)
        blocks: list[Block] = []
        for group, version in zip(self.groups, versions, strict=True):
            block = frozen_copy(self._copies[group.block])
            load_flat(block, group.versions[version])
            blocks.append(block)
        return ComposedModel(self.run, blocks)
