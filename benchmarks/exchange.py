"""A swarm's learning with no network: real workers, codecs, aggregation and error feedback.

What `gb_per_nat`, `attacks` and `lateness` share. Every worker trains on its own stream of windows
and reads other blocks as copies of their consensus, in the versions that a live host would have. At
a round's end updates are encoded as the live node does; while they are exchanged training goes on
with the old copies; then what arrived is decoded, aggregated and applied as a correction. Deadlines
and loss are not simulated but chosen: which share of the updates is in time, how many rounds late
they are, and who lies. Bytes are those of `benchmarks.wire_bytes`.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.wire_bytes import control_bytes, follow_bytes, pull_bytes
from node.data.windows import WindowStream, stream_seed
from protocol.digests import weights_digest
from protocol.errors import BlockswarmError, WireError
from protocol.identity import peer_text
from protocol.limits import WORK_ONE
from protocol.log import genesis
from protocol.updates import update_digest
from protocol.votes import UpdateRef
from swarm.consensus.aggregate import Aggregate
from swarm.consensus.feedback import Unsent, aside_share, set_aside
from swarm.consensus.fixed_point import (
    QUANTUM_BITS,
    SCALE_ONE,
    FixedUpdate,
    Halves,
    Ints,
    add_into,
    scaled,
    to_fixed,
    to_float,
)
from swarm.consensus.log import ConsensusLog
from swarm.consensus.schedule import CodecSchedule
from swarm.consensus.step import TREND_ROUNDS, Step, fitting_update, next_step, step_of
from swarm.consensus.sums import mean_step, summed
from swarm.consensus.updates import UpdateCodec
from swarm.learning.composition import ComposedModel
from swarm.learning.coupling import composed_versions, followed_blocks, upstream_versions
from swarm.learning.flat import Floats, add_flat, flat_weights, load_flat
from swarm.learning.model import Block
from swarm.learning.moving_copy import MovingCopy, frozen_copy
from swarm.learning.worker import BlockWorker, initial_block
from swarm.run import Run

CPU = torch.device("cpu")

# What a liar sends instead: (codec, what is unsent, block, round, sender, its honest payload).
Lie = Callable[[UpdateCodec, Ints, int, int, bytes, bytes], bytes]
# How a receiver reads a payload: (codec, payload, block, round, sender). `checked` is the node's.
Reader = Callable[[UpdateCodec, bytes, int, int, bytes], FixedUpdate]


class Diverged(BlockswarmError):
    """Weights that are not numbers: nothing is left to measure."""


def checked(codec: UpdateCodec, payload: bytes, block: int, round_: int, who: bytes) -> FixedUpdate:
    return codec.decode(payload, block, round_, who)


def plain_mean(updates: Sequence[FixedUpdate]) -> Aggregate:
    """What averaging makes of them when nobody is judged."""
    work = WORK_ONE * len(updates)
    delta = mean_step(summed([(update, 1) for update in updates]), work)
    scales, scores = (SCALE_ONE,) * len(updates), (0,) * len(updates)
    return Aggregate(delta, scales, median_norm=0, scores=scores, work=work)


@dataclass(frozen=True)
class ExchangeRules:
    """What is exchanged, what arrives, and how it is read and combined."""

    codec: CodecSchedule | str
    participation: float = 1.0  # the share of updates that is in time; the others are left out
    late_rounds: int = 0  # a round's updates reach the consensus so many rounds later
    overlap: float = 0.2  # the share of a round's steps that is done while updates are exchanged
    plain: bool = False  # plain averaging: nothing is clipped or left out
    same_text: bool = True
    read: Reader = checked

    def overlap_steps(self, steps: int) -> int:
        return min(steps, math.ceil(self.overlap * steps))


@dataclass(frozen=True, eq=False)
class Sent:
    """An update on its way: what its maker keeps of it, and what it sent."""

    member: Member
    round: int
    due: int
    own: FixedUpdate
    payload: bytes

    @property
    def ref(self) -> UpdateRef:
        return UpdateRef(update_digest(self.payload), peer_text(self.member.peer_id))


@dataclass(eq=False)
class Member:
    """One worker of a block."""

    peer_id: bytes
    worker: BlockWorker
    stream: WindowStream
    lie: Lie | None = None
    in_flight: list[Sent] = field(default_factory=list)
    aside: Halves | None = None  # as `node.replica.running_weights` has it
    speed: float = 1.0  # the share of a round's steps that it makes
    owed: float = 0.0  # a part of a step
    refused: int = 0
    left_out: int = 0
    position: int = 0


@dataclass
class Moved:
    """Bytes of all hosts since the start, by purpose. `control` is an estimate."""

    update: int = 0
    relay: int = 0
    control: int = 0

    @property
    def everything(self) -> int:
        return self.update + self.relay + self.control


class BlockGroup:
    """The replicas of one block and their consensus."""

    def __init__(
        self, run: Run, block: int, replicas: int, text: npt.NDArray[np.uint8], rules: ExchangeRules
    ) -> None:
        self.block, self.rules = block, rules
        self.members = [
            Member(
                bytes([number]) * 38,
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
        self.log = ConsensusLog((genesis("", block, weights_digest(self.consensus)),))
        self.changes: deque[FixedUpdate] = deque(maxlen=TREND_ROUNDS)
        self.versions: dict[int, Floats] = {0: to_float(self.consensus)}

    def make_updates(self, number: int, rng: random.Random) -> list[int]:
        """Exchange `number`, from 1 on: every replica sends what is unsent. The payloads' lengths.

        What it agrees on is version `number` of the block.
        """
        lengths = []
        for member in self.members:
            running = flat_weights(member.worker.block)
            if not np.isfinite(running).all():
                raise Diverged(f"a replica of block {self.block} diverged in round {number}")
            flying = [sent.own for sent in member.in_flight]
            rest = Unsent(running, self.consensus, flying, member.aside)
            payload, own = self._encoded(rest, number, member.peer_id)
            share = aside_share(self.log.replicas()) if self.codec.schedule.sparse else 0.0
            member.aside, change = set_aside(rest, own, share)
            if change is not None:
                add_flat(member.worker.block, change)
            if member.lie is not None:
                quanta = np.rint(rest.dense() * 2.0**QUANTUM_BITS).astype(np.int64)
                payload = member.lie(
                    self.codec, quanta, self.block, number, member.peer_id, payload
                )
            lengths.append(len(payload))
            if rng.random() < self.rules.participation:  # else it stays unsent, as live
                due = number + self.rules.late_rounds
                member.in_flight.append(Sent(member, number, due, own, payload))
        return lengths

    def _encoded(self, rest: Unsent, number: int, peer_id: bytes) -> tuple[bytes, FixedUpdate]:
        if self.rules.plain:  # nobody is refused for its length
            return self.codec.encode(rest, self.block, number, peer_id)
        return fitting_update(self.codec, rest, self.log, self.block, number, peer_id)

    def settle(self, number: int) -> tuple[list[int], int]:
        """The end of an exchange: combine what arrived, correct the running weights.

        The lengths of the payloads that went in, and how many updates the log's entry names.
        """
        due: list[tuple[Sent, FixedUpdate]] = []
        for member in self.members:
            for sent in [s for s in member.in_flight if s.due <= number]:
                member.in_flight.remove(sent)
                read, who = self.rules.read, member.peer_id
                try:
                    due.append((sent, read(self.codec, sent.payload, self.block, sent.round, who)))
                except WireError:
                    member.refused += 1
        due.sort(key=lambda pair: pair[0].ref)
        included = self._combine(number, due) if due else []
        self.versions[number] = to_float(self.consensus)
        return included, len(due)

    def _next_step(self, number: int, due: list[tuple[Sent, FixedUpdate]]) -> Step:
        if self.rules.plain:
            refs = [sent.ref for sent, _ in due]
            result = plain_mean([update for _, update in due])
            return step_of(self.log, number, self.consensus, refs, result)
        return next_step(
            self.log,
            number,
            self.consensus,
            [(sent.ref, update) for sent, update in due],
            summed([(step, 1) for step in self.changes]) if self.changes else None,
            same_text=self.rules.same_text,
        )

    def _combine(self, number: int, due: list[tuple[Sent, FixedUpdate]]) -> list[int]:
        step = self._next_step(number, due)
        self.log, self.consensus = self.log.appended(step.entry), step.weights
        self.changes.append(step.change)
        scales = {c.digest: c.scale for c in step.entry.contributions}
        own: dict[int, list[FixedUpdate]] = {}
        for sent, _ in due:
            scale = scales[sent.ref.digest]
            sent.member.left_out += scale == 0
            if scale:  # what a liar takes out of its weights is what it should have sent
                own.setdefault(id(sent.member), []).append(scaled(sent.own, scale))
        for member in self.members:
            change = step.change.dense().copy()
            for part in own.get(id(member), []):
                add_into(change, part, -1)
            add_flat(member.worker.block, (change * 2.0**-QUANTUM_BITS).astype(np.float32))
        return [len(sent.payload) for sent, _ in due if scales[sent.ref.digest]]


class ExchangeSwarm:
    """All blocks. `replicas[b]` workers train block b."""

    def __init__(
        self,
        run: Run,
        replicas: Sequence[int],
        text: npt.NDArray[np.uint8],
        rules: ExchangeRules,
    ) -> None:
        self.run, self.rules = run, rules
        self.groups = [BlockGroup(run, b, n, text, rules) for b, n in enumerate(replicas)]
        self.rng = random.Random(run.seed)
        self.round = 0  # that is trained next
        self.settled = 0  # exchanges that are over: the newest version
        self.moved = Moved()
        self._blocks = [frozen_copy(initial_block(run, b)) for b in range(len(replicas))]
        steps = run.training.copy_steps
        followed = [followed_blocks(run.model, b) for b in range(len(replicas))]
        self._copies = [  # what each worker reads: group, member, block -> copy
            [
                {other: MovingCopy(self._blocks[other], steps) for other in followed[b]}
                for _ in range(count)
            ]
            for b, count in enumerate(replicas)
        ]
        self._followers = [
            sum(n for n, read in zip(replicas, followed, strict=True) if block in read)
            for block in range(len(replicas))
        ]

    def one_round(self) -> None:
        """Train on while the last round's updates are exchanged, settle, train, send."""
        training = self.run.training
        steps = training.steps_per_round
        first = self.round * steps
        overlap = self.rules.overlap_steps(steps) if self.round else 0
        self._train(first, overlap)
        self.settle()
        self._train(first + overlap, steps - overlap)
        for group in self.groups:
            lengths = group.make_updates(self.round + 1, self.rng)
            others = len(group.members) - 1
            self.moved.update += others * sum(map(pull_bytes, lengths))
        self.round += 1

    def settle(self) -> None:
        """End the exchange that is under way, if there is one."""
        if self.settled == self.round:
            return
        for group, followers in zip(self.groups, self._followers, strict=True):
            included, agreed = group.settle(self.settled + 1)
            replicas = len(group.members)
            self.moved.relay += followers * follow_bytes(included, agreed, replicas)
            self.moved.control += control_bytes(replicas)
            for version in [v for v in group.versions if v < self.round - len(self.groups)]:
                del group.versions[version]
        self.settled += 1

    def _train(self, first: int, steps: int) -> None:
        for group in self.groups:
            wanted = self._wanted(group.block)
            faster = self.run.training.rate_factor(group.log.replicas())
            for member, copies in zip(group.members, self._copies[group.block], strict=True):
                for other, moving in copies.items():
                    version = self.groups[other].versions[wanted[other]]
                    moving.follow_flat(torch.from_numpy(version))
                member.worker.steps_done, member.worker.rate_factor = first, faster
                member.owed += steps * member.speed
                due = int(member.owed)
                member.owed -= due
                for _ in range(due):
                    windows = torch.from_numpy(member.stream.batch_at(member.position)).long()
                    member.position += 1
                    for moving in copies.values():
                        moving.move()
                    upstream = [copies[o] for o in range(group.block) if o in copies]
                    ahead = copies.get(group.block + 1)
                    member.worker.step(windows[:, :-1], windows[:, 1:], upstream, ahead)

    def _wanted(self, block: int) -> dict[int, int]:
        """The version of each block that its workers read (`node.log.copies.Copies.wanted`)."""
        upstream = upstream_versions(block, self.settled, self.run.training.staggered)
        return {**dict(enumerate(upstream)), block + 1: self.settled}

    def assembled(self) -> ComposedModel:
        """The model that an assembler would get now."""
        staggered = self.run.model.relays and self.run.training.staggered
        versions = composed_versions(len(self.groups), self.settled, staggered)
        blocks: list[Block] = []
        for group, version in zip(self.groups, versions, strict=True):
            block = frozen_copy(self._blocks[group.block])
            load_flat(block, group.versions[version])
            blocks.append(block)
        return ComposedModel(self.run, blocks)
