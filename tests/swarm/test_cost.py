"""What a run costs a host: the estimates against real blocks, real updates and arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from protocol.codec import encode
from swarm.cost import (
    HEAD_FLOATS,
    LAYER_FLOATS_PER_WIDTH,
    disk_bytes,
    encoded_bytes,
    expected_gb_per_day,
    expected_update_bytes,
    parameter_counts,
    worker_memory_bytes,
)
from swarm.learning.moving_copy import frozen_copy
from swarm.learning.worker import BlockWorker, initial_block
from swarm.run import ModelShape, Run, Training
from swarm.run_template import preset

TINY = preset("tiny", "tiny")


@pytest.mark.parametrize(
    ("coupling", "objective"),
    [("independent", "edm"), ("independent", "plain"), ("relay", "bayes"), ("look_ahead", "bayes")],
)
def test_parameter_counts_are_those_of_real_blocks(coupling: Any, objective: Any) -> None:
    shape = ModelShape(blocks=3, layers=2, width=24, heads=3, context=8, coupling=coupling)
    run = Run(shape, training=Training(objective=objective))
    real = [sum(p.numel() for p in initial_block(run, b).parameters()) for b in range(3)]
    assert parameter_counts(shape, objective) == tuple(real)


@pytest.mark.parametrize("block", [1, 2])
def test_activations_are_as_estimated(block: int) -> None:
    """What autograd really keeps for the backward pass, against the estimate."""
    shape = ModelShape(blocks=3, layers=2, width=64, heads=4, context=64)
    run = Run(shape, training=Training(batch=4))
    worker = BlockWorker(run, block, torch.device("cpu"))
    upstream = [frozen_copy(initial_block(run, b)) for b in range(block)]
    ahead = frozen_copy(initial_block(run, block + 1)) if block < 2 else None
    weights = {p.untyped_storage().data_ptr() for p in worker.block.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # holds them, so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    x = torch.zeros(4, 64, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        worker.step(x, x, upstream, ahead)
    real = sum(storage.nbytes() for at, storage in kept.items() if at not in weights)
    floats = shape.layers * LAYER_FLOATS_PER_WIDTH * shape.width + HEAD_FLOATS
    estimate = (2 if ahead is not None else 1) * 4 * floats * 4 * 64
    assert 0.5 * estimate < real < 1.1 * estimate


def test_memory_grows_with_what_is_held() -> None:
    by_block = [worker_memory_bytes(TINY, block) for block in range(4)]
    assert worker_memory_bytes(TINY) == max(by_block) == by_block[2]
    alone = replace(TINY, run=replace(TINY.run, model=ModelShape(coupling="independent")))
    assert worker_memory_bytes(alone) < worker_memory_bytes(TINY)
    assert worker_memory_bytes(preset("large", "x")) > 10 * worker_memory_bytes(TINY)


@pytest.mark.parametrize("codec", ["topk:0.02:2:overall", "topk:0.05:4", "topk:0.005:2", "int8"])
def test_updates_are_as_long_as_expected(codec: str) -> None:
    runfile = replace(TINY, exchange=replace(TINY.exchange, codec=codec, ends_density=0.0))
    update = np.random.default_rng(3).standard_t(4, runfile.parameters(1)).astype(np.float32)
    real = len(encode(update, codec).data)
    assert 0.85 * real < expected_update_bytes(runfile, 1) < 1.15 * real
    assert real <= runfile.max_update_bytes(1)


def test_denser_ends_count_for_what_they_are() -> None:
    plain = replace(TINY, exchange=replace(TINY.exchange, ends_density=0.0))
    size = TINY.parameters(1)
    every = [encoded_bytes(TINY.codecs.at(n), size) for n in range(1, TINY.rounds.count + 1)]
    assert expected_update_bytes(TINY, 1) == pytest.approx(sum(every) / len(every), rel=1e-4)
    assert expected_update_bytes(TINY, 1) > expected_update_bytes(plain, 1)
    assert TINY.max_update_bytes(1) > 2 * plain.max_update_bytes(1)


def test_gb_per_day_by_hand() -> None:
    alone = replace(TINY, run=replace(TINY.run, model=ModelShape(coupling="independent")))
    update = expected_update_bytes(alone)
    assert expected_gb_per_day(alone, 1) == 0
    assert expected_gb_per_day(alone, 3) == pytest.approx(21600 * 2 * 2 * update / 1e9)
    # Block 0 of look_ahead follows one log, whose steps hold the updates of both replicas.
    both = 2 * 21600 * (expected_update_bytes(TINY, 0) + 2 * expected_update_bytes(TINY, 1))
    assert expected_gb_per_day(TINY, 2, block=0) == pytest.approx(both / 1e9)
    amounts = [expected_gb_per_day(TINY, n) for n in (1, 2, 4, 16)]
    assert amounts == sorted(amounts)
    # No more than 16 replicas exchange with each other.
    assert expected_gb_per_day(alone, 32) == expected_gb_per_day(alone, 16)


def test_disk() -> None:
    assert disk_bytes(TINY, 1) < disk_bytes(TINY, 4) < disk_bytes(preset("small", "x"), 4)
