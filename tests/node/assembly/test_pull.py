"""Assembly from replicas in memory: versions, signers, missing blocks, liars, bytes saved.

The replicas answer with the service's own code on a real log; only the network between is short.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

import node.assembly.pull
from node.assembly.pull import Assembler, BlockMissing, CountedPeers, signed_round
from node.assembly.store import ConsensusStore
from node.log.consensus import Consensus
from node.log.fetch import FetchError
from node.replica.service import _Answers
from protocol import messages, records
from protocol.digests import weights_digest
from protocol.errors import UsageError, WireError
from protocol.frames import content_digest
from protocol.identity import Identity, peer_text
from protocol.limits import WORK_ONE
from protocol.log import Contribution, Entry, genesis
from protocol.messages import Message
from protocol.records import Record, Role, SignedRecord
from swarm.consensus.fixed_point import add_into, compact, rounded_mean, to_fixed, to_float
from swarm.consensus.log import ConsensusLog
from swarm.consensus.sums import apply_step
from swarm.consensus.updates import UpdateCodec
from swarm.learning.flat import flat_weights, initial_flat
from swarm.runfile import RunFile
from tests.support.chains import no_records
from tests.support.live import tiny_run_file

M = TypeVar("M", bound=Message)

RUN_ID = content_digest(b"a run")
_TINY = tiny_run_file(blocks=3, width=16, context=16)
RUN_FILE = replace(_TINY, exchange=replace(_TINY.exchange, snapshot_every=4))
SCALE_ONE = 1 << 16
HANDLERS = {
    messages.LogRequest: "log",
    messages.AggregateRequest: "aggregate",
    messages.IndexRequest: "index",
    messages.ShardRequest: "shard",
}


def identity(number: int) -> Identity:
    return Identity(bytes([number]) * 32)


class Replica:
    """A replica of one block with a real log, and the code that answers for it."""

    def __init__(self, number: int, block: int, run_file: RunFile = RUN_FILE) -> None:
        self.identity, self.block = identity(number), block
        first = to_fixed(initial_flat(run_file.run, block))
        self.codec = UpdateCodec(run_file.exchange.codec, len(first))
        self.consensus = Consensus(first, self.codec, block)
        start = genesis(RUN_ID.hex(), block, weights_digest(first))
        self.log = ConsensusLog((start,), run_file.exchange.snapshot_every)
        self.consensus.prune(self.log)
        self.versions = {-1: first}
        self.signed_head: Entry | None = None  # None: the newest

    @property
    def name(self) -> str:
        return peer_text(self.identity.peer_id)

    def live(self, rounds: int, senders: tuple[int, ...] = (1, 2), flavour: int = 0) -> Replica:
        """Go through so many rounds. Equal arguments give equal logs."""
        for _ in range(rounds):
            number = self.log.head.round + 1
            sent, total = [], np.zeros(self.codec.size, dtype=np.int64)
            for sender in senders:
                rng = np.random.default_rng([self.block, number, sender, flavour])
                quanta = rng.integers(-(1 << 18), 1 << 18, self.codec.size, dtype=np.int64)
                peer = identity(sender).peer_id
                payload, update = self.codec.encode(quanta, self.block, number, peer)
                add_into(total, update)
                part = Contribution(content_digest(payload), peer_text(peer), SCALE_ONE, 0)
                sent.append((part.digest, payload, part))
            payloads = [payload for _, payload, _ in sorted(sent)]
            parts = tuple(part for _, _, part in sorted(sent))
            mean = compact(rounded_mean(total, len(senders)))
            new, step = apply_step(self.consensus.weights, mean)
            entry = Entry(
                number,
                self.log.head.digest,
                weights_digest(new),
                step.digest,
                1,
                parts,
                WORK_ONE * len(parts),
            )
            self.consensus.follow(entry, payloads)
            self.log = self.log.appended(entry)
            self.consensus.prune(self.log)
            self.versions[number] = self.consensus.weights
        return self

    def record(self) -> SignedRecord:
        head = self.signed_head or self.log.head
        record = Record(
            run=RUN_ID,
            role=int(Role.REPLICA),
            block=self.block,
            round=head.round + 1,
            sequence=1,
            consensus=head.digest,
            head_round=head.round,
        )
        return records.seal(self.identity, record, time.time() + 60)

    async def answer(self, request: Message) -> tuple[Message, bytes]:
        settings = SimpleNamespace(run_id=RUN_ID, block=self.block)
        inside: Any = SimpleNamespace(
            settings=settings,
            state=SimpleNamespace(log=self.log),
            consensus=self.consensus,
            muted=False,
        )
        answers = _Answers(inside, no_records, time.time, lambda block: None)
        reply = await getattr(answers, HANDLERS[type(request)])(request, b"")
        return reply.message, bytes(reply.payload)


class Swarm:
    """Replicas, looked up and asked directly. `asked` counts requests, `received_bytes` bytes."""

    def __init__(self, *replicas: Replica) -> None:
        self.replicas = list(replicas)
        self.silent: set[str] = set()
        self.asked: list[type[Message]] = []
        self.received_bytes = 0
        self.said: list[str] = []

    async def records(self, block: int) -> list[SignedRecord]:
        return [r.record() for r in self.replicas if r.block == block]

    async def ask(
        self,
        peer: str,
        request: Message,
        wanted: type[M],
        deadline_s: float,
        max_payload_bytes: int | None = None,
    ) -> tuple[M, bytes]:
        replica = next(r for r in self.replicas if r.name == peer)
        if peer in self.silent:
            raise FetchError("refused")
        self.asked.append(type(request))
        message, payload = await replica.answer(request)
        assert isinstance(message, wanted)
        return message, payload

    def count(self, block: int, size_bytes: int) -> None:
        assert 0 <= block < 3
        self.received_bytes += size_bytes

    def assembler(self, run_file: RunFile = RUN_FILE, store: Any = None) -> Assembler:
        peers = CountedPeers(self, self.count)
        return Assembler(run_file, RUN_ID, peers, self.records, self.said.append, store)


def pull(assembler: Assembler, **options: Any) -> node.assembly.pull.Assembled:
    return asyncio.run(assembler.pull(**options))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.assembly.pull, "RETRY_S", 0.01)


@pytest.fixture
def swarm() -> Swarm:
    """Three blocks with two replicas each, all after round 5."""
    return Swarm(*(Replica(10 * b + n, b).live(6) for b in range(3) for n in (1, 2)))


def weights_of(found: node.assembly.pull.Assembled, block: int) -> Any:
    module = found.model.blocks[block]
    assert module is not None
    return flat_weights(module)


# Versions.


def test_blocks_are_composed_staggered_and_bit_for_bit(swarm: Swarm) -> None:
    found = pull(swarm.assembler())
    assert found.versions == [4, 5, 6] and found.newest_round == 5 and found.missing == []
    for block, number in enumerate((3, 4, 5)):
        expected = to_float(swarm.replicas[2 * block].versions[number])
        assert np.array_equal(weights_of(found, block), expected)


def test_whoever_claims_the_newest_round_is_not_all_whom_we_ask() -> None:
    """Records are free, and so is the round in them."""
    honest = [Replica(b + 1 + 10 * i, b).live(6) for b in range(3) for i in range(5)]
    lies = [Replica(60 + i, 2).live(9, flavour=1) for i in range(4)]
    found = pull(Swarm(*honest, *lies).assembler())
    assert found.versions == [4, 5, 6]
    assert np.array_equal(weights_of(found, 2), to_float(honest[-1].versions[5]))


def test_blocks_that_do_not_relay_are_each_at_their_newest() -> None:
    model = replace(RUN_FILE.run.model, coupling="independent")
    run_file = replace(RUN_FILE, run=replace(RUN_FILE.run, model=model))
    replicas = [Replica(b + 1, b, run_file).live(2 + b) for b in range(3)]
    assert pull(Swarm(*replicas).assembler(run_file)).versions == [2, 3, 4]


def test_a_run_before_its_first_round_gives_the_first_weights() -> None:
    found = pull(Swarm(*(Replica(b + 1, b) for b in range(3))).assembler())
    assert found.versions == [0, 0, 0] and found.newest_round == -1


def test_an_assembler_follows_by_replaying_and_not_by_snapshots(swarm: Swarm) -> None:
    assembler = swarm.assembler()
    pull(assembler)
    swarm.asked.clear()
    for _ in range(2 * RUN_FILE.exchange.snapshot_every + 1):  # past pinned snapshots
        for replica in swarm.replicas:
            replica.live(1)
        found = pull(assembler)
    assert found.versions == [13, 14, 15]
    assert messages.AggregateRequest in swarm.asked
    assert messages.ShardRequest not in swarm.asked


def test_a_late_assembler_begins_at_a_snapshot() -> None:
    swarm = Swarm(*(Replica(b + 1, b).live(23) for b in range(3)))
    found = pull(swarm.assembler())
    assert found.versions == [21, 22, 23]
    assert messages.ShardRequest in swarm.asked
    assert np.array_equal(weights_of(found, 0), to_float(swarm.replicas[0].versions[20]))


# What a manifest says.


def test_facts_name_signers_and_contributors(swarm: Swarm) -> None:
    found = pull(swarm.assembler())
    for facts, number in zip(found.facts, (3, 4, 5), strict=True):
        replicas = [r for r in swarm.replicas if r.block == facts["block"]]
        entry = next(e for e in replicas[0].log.entries if e.round == number)
        assert facts["round"] == number and facts["consensus"] == entry.digest.hex()
        # They signed a later head of the same chain; that covers this one.
        assert facts["signers"] == sorted(r.name for r in replicas)
        names = [peer_text(identity(sender).peer_id) for sender in (1, 2)]
        assert facts["contributors"] == dict.fromkeys(names, number + 1)
        assert facts["contributors_total"] == 2


def test_how_many_peers_a_manifest_names_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.assembly.pull, "NAMED_PEERS", 24)
    senders = tuple(range(1, 21))
    swarm = Swarm(*(Replica(b + 1, b).live(1, senders) for b in range(3)))
    for facts in pull(swarm.assembler()).facts[2:]:
        assert len(facts["contributors"]) == 8 and facts["contributors_total"] == 20


# Who is believed.


def test_only_what_is_signed_is_taken(swarm: Swarm) -> None:
    """The head that a record names is a round old; the log beyond it is not waited for."""
    for replica in swarm.replicas:
        replica.signed_head = replica.log.entries[-2]
    assert pull(swarm.assembler()).versions == [3, 4, 5]


def test_a_log_that_nobody_signed_is_refused(swarm: Swarm) -> None:
    for replica in swarm.replicas:
        if replica.block == 2:
            replica.signed_head = Replica(99, 2).live(6, flavour=1).log.head
    with pytest.raises(BlockMissing, match=r"block 2 .*has signed"):
        pull(swarm.assembler())


def test_one_stranger_ahead_of_all_moves_nobody(swarm: Swarm) -> None:
    swarm.replicas.append(Replica(77, 2).live(9, flavour=1))
    found = pull(swarm.assembler())
    assert found.versions == [4, 5, 6]
    assert swarm.replicas[-1].name not in found.facts[2]["signers"]


def test_a_donor_that_serves_rubbish_costs_an_attempt_and_no_more(swarm: Swarm) -> None:
    liar = swarm.replicas[0]
    for digest in list(liar.consensus.updates):
        liar.consensus.updates[digest] = [b"rubbish"]
    assert pull(swarm.assembler()).versions == [4, 5, 6]


def test_the_signed_round_is_that_of_most_and_of_equals_the_newest() -> None:
    old, new = Replica(1, 0).live(2), Replica(2, 0).live(3)
    other = Replica(3, 0).live(2)
    assert signed_round([old.record(), new.record()]) == 2
    assert signed_round([old.record(), new.record(), other.record()]) == 1


def test_newcomers_that_have_not_caught_up_do_not_outvote_who_has_trained(swarm: Swarm) -> None:
    """Else an assembly would be the first weights as long as most hosts are new."""
    swarm.replicas += [Replica(80 + number, 2) for number in range(3)]
    assert pull(swarm.assembler()).versions == [4, 5, 6]
    assert signed_round([Replica(1, 0).record(), Replica(2, 0).record()]) == -1


# Blocks without replicas.


@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_block_with_no_replica_is_named_and_can_be_left_out(block: int, swarm: Swarm) -> None:
    swarm.replicas = [r for r in swarm.replicas if r.block != block]
    with pytest.raises(BlockMissing, match=f"block {block} has no replica") as caught:
        pull(swarm.assembler())
    assert f"--without {block}" in str(caught.value.hint)
    for options in ({"leave_out": [block]}, {"allow_missing": True}):
        found = pull(swarm.assembler(), **options)
        assert found.missing == [block] and found.newest_round == 5
        x = torch.zeros(1, 4, dtype=torch.long)
        assert found.model.log_probs(x).shape == (1, 4, 256)


def test_a_replica_that_is_recorded_but_silent_is_no_replica(swarm: Swarm) -> None:
    swarm.silent = {r.name for r in swarm.replicas if r.block == 2}
    with pytest.raises(BlockMissing, match="block 2"):
        pull(swarm.assembler())
    found = pull(swarm.assembler(), allow_missing=True)
    assert found.missing == [2]


def test_no_replica_at_all(swarm: Swarm) -> None:
    swarm.replicas = []
    with pytest.raises(BlockMissing):
        pull(swarm.assembler(), allow_missing=True)


def test_replicas_come_and_go(swarm: Swarm) -> None:
    """Any one that is left will do; and with none left, what was pulled stays."""
    assembler = swarm.assembler()
    swarm.silent = {r.name for r in swarm.replicas[::2]}
    assert pull(assembler).versions == [4, 5, 6]
    for replica in swarm.replicas:
        replica.live(1)
    swarm.silent = {r.name for r in swarm.replicas[1::2]} | {swarm.replicas[0].name}
    found = pull(assembler)
    assert found.versions == [4, 6, 7]
    assert any("block 0" in line and "keeping round 3" in line for line in swarm.said)


def test_lookups_that_fail_find_nobody(swarm: Swarm) -> None:
    async def fail(block: int) -> list[SignedRecord]:
        raise WireError("the DHT did not answer")

    assembler = Assembler(RUN_FILE, RUN_ID, swarm, fail, swarm.said.append)
    with pytest.raises(BlockMissing, match="block 0"):
        pull(assembler)


@pytest.mark.parametrize("leave_out", [[3], [-1], [0, 1, 2]])
def test_what_cannot_be_left_out(leave_out: list[int], swarm: Swarm) -> None:
    with pytest.raises(UsageError):
        pull(swarm.assembler(), leave_out=leave_out)


# Kept versions.


def store_in(folder: Path, run: bytes = RUN_ID) -> ConsensusStore:
    return ConsensusStore(folder, run, RUN_FILE.exchange.snapshot_every)


def test_a_second_run_pulls_only_what_is_new(swarm: Swarm, tmp_path: Path) -> None:
    pull(swarm.assembler(store=store_in(tmp_path)))
    before, swarm.received_bytes = swarm.received_bytes, 0
    for replica in swarm.replicas:
        replica.live(1)
    again = pull(swarm.assembler(store=store_in(tmp_path)))
    assert again.versions == [5, 6, 7]
    assert np.array_equal(weights_of(again, 2), to_float(swarm.replicas[-1].versions[6]))
    assert swarm.received_bytes < before / 3


def test_a_pull_that_was_cut_off_goes_on_block_by_block(swarm: Swarm, tmp_path: Path) -> None:
    swarm.silent = {r.name for r in swarm.replicas if r.block == 1}
    with pytest.raises(BlockMissing):
        pull(swarm.assembler(store=store_in(tmp_path)))
    swarm.silent = set()
    swarm.asked.clear()
    assert pull(swarm.assembler(store=store_in(tmp_path))).versions == [4, 5, 6]
    assert swarm.asked.count(messages.IndexRequest) == 1  # of block 1 alone


@pytest.mark.parametrize("damage", ["cut", "flip", "other_run", "other_block", "empty"])
def test_kept_files_that_are_not_right_are_not_used(
    damage: str, swarm: Swarm, tmp_path: Path
) -> None:
    store = store_in(tmp_path)
    pull(swarm.assembler(store=store))
    size = len(swarm.replicas[0].consensus.weights)
    path = store.path(0)
    whole = path.read_bytes()
    assert store.load(0, size) is not None and store.load(0, size + 1) is None
    if damage == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "flip":
        path.write_bytes(whole[:-1000] + bytes([whole[-1000] ^ 1]) + whole[-999:])
    elif damage == "other_run":
        store = store_in(tmp_path, content_digest(b"another"))
    elif damage == "other_block":
        path.write_bytes(store.path(1).read_bytes())
    else:
        path.write_bytes(b"")
    assert store.load(0, size) is None
    if damage != "other_run":
        assert pull(swarm.assembler(store=store)).versions == [4, 5, 6]


def test_a_kept_version_of_a_branch_that_was_given_up(swarm: Swarm, tmp_path: Path) -> None:
    pull(swarm.assembler(store=store_in(tmp_path)))
    moved = Swarm(*(Replica(10 * b + n, b).live(8, flavour=1) for b in range(3) for n in (1, 2)))
    found = pull(moved.assembler(store=store_in(tmp_path)))
    assert found.versions == [6, 7, 8]
    assert np.array_equal(weights_of(found, 1), to_float(moved.replicas[2].versions[6]))
