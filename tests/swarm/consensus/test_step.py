"""The step of a round, and an update that the others take."""

from __future__ import annotations

import numpy as np

from protocol.digests import weights_digest
from protocol.log import Entry, genesis
from protocol.updates import update_digest
from protocol.votes import UpdateRef
from swarm.consensus.aggregate import SEND_X16
from swarm.consensus.feedback import Unsent
from swarm.consensus.fixed_point import FixedUpdate, norm, to_fixed
from swarm.consensus.log import ConsensusLog
from swarm.consensus.step import fitting_update, next_step
from swarm.consensus.updates import UpdateCodec
from tests.support.chains import CODEC, SIZE

SENDER = bytes(38)


def log_of(norms: tuple[int, ...]) -> ConsensusLog:
    log = ConsensusLog((genesis("run", 0, bytes(32)),))
    for number, length in enumerate(norms):
        entry = Entry(number, log.head.digest, bytes(32), bytes(32), length, ())
        log = log.appended(entry)
    return log


def sent(codec: UpdateCodec, seed: int) -> tuple[UpdateRef, FixedUpdate]:
    values = np.random.default_rng(seed).normal(size=SIZE).astype(np.float32)
    payload, update = codec.encode(values, 0, 3, SENDER)
    return UpdateRef(update_digest(payload), f"p{seed}"), update


def test_the_step_is_the_mean_and_its_entry_says_what_it_is() -> None:
    weights = to_fixed(np.zeros(SIZE, dtype=np.float32))
    log = ConsensusLog((genesis("run", 0, weights_digest(weights)),))
    updates = sorted(sent(CODEC, seed) for seed in range(2))
    step = next_step(log, 3, weights, updates, None)
    assert step.entry.parent == log.head.digest and step.entry.round == 3
    assert step.entry.weights == weights_digest(step.weights)
    assert (weights + step.change.dense() == step.weights).all()
    assert [c.sender for c in step.entry.contributions] == [ref.sender for ref, _ in updates]
    mean = sum(update.dense().astype(np.float64) for _, update in updates) / 2
    cosine = (mean @ step.weights) / np.linalg.norm(mean) / np.linalg.norm(step.weights)
    assert cosine > 0.9


def test_an_update_is_no_longer_than_what_the_others_take() -> None:
    values = np.random.default_rng(0).normal(size=SIZE).astype(np.float32)
    rest = Unsent(values, np.zeros(SIZE, dtype=np.int32))
    whole, honest = CODEC.encode(rest, 0, 3, SENDER)
    with_no_past, _ = fitting_update(CODEC, rest, log_of(()), 0, 3, SENDER)
    assert with_no_past == whole
    usual = norm(honest) // 10
    log = ConsensusLog(log_of((usual, usual)).entries)
    entry = next_step(log, 2, np.zeros(SIZE, dtype=np.int32), [sent(CODEC, 1)], None).entry
    log = log.appended(Entry(2, log.head.digest, bytes(32), bytes(32), usual, entry.contributions))
    shorter, update = fitting_update(CODEC, rest, log, 0, 3, SENDER)
    assert shorter != whole
    assert norm(update) <= 1.05 * usual * SEND_X16 / 16
