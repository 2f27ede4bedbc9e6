"""The flat form of a block: every weight once, in an order that follows from the shape alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from protocol.errors import ModelError
from swarm.learning.flat import (
    Change,
    add_flat,
    add_flat_at,
    flat_size,
    flat_weights,
    initial_flat,
    load_flat,
)
from swarm.learning.worker import initial_block
from swarm.run import ModelShape, Run

RUN = Run(model=ModelShape(blocks=3, layers=1, width=16, heads=2, context=16))


def test_round_trip_covers_every_parameter() -> None:
    block = initial_block(RUN, 1)
    flat = flat_weights(block)
    assert flat.shape == (flat_size(block),) == (sum(p.numel() for p in block.parameters()),)
    other = initial_block(RUN, 1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(7.0)
    load_flat(other, flat)
    for (name, a), (_, b) in zip(block.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_the_order_is_by_name() -> None:
    block = initial_block(RUN, 0)
    name, first = min(block.named_parameters())
    assert np.array_equal(flat_weights(block)[: first.numel()], first.detach().flatten().numpy())
    assert name == "embedding.weight"


def test_add_is_in_place_and_exact() -> None:
    block = initial_block(RUN, 0)
    before, held = flat_weights(block), block.embedding.weight
    change = np.zeros_like(before)
    change[[0, 5, -1]] = [0.5, -1.0, 2.0]
    add_flat(block, change)
    assert block.embedding.weight is held
    assert np.array_equal(flat_weights(block), before + change)
    at = np.flatnonzero(change)
    add_flat_at(block, Change(at, change[at]))
    assert block.embedding.weight is held
    assert np.array_equal(flat_weights(block), before + change + change)


def test_wrong_size_is_refused() -> None:
    block = initial_block(RUN, 0)
    with pytest.raises(ModelError):
        load_flat(block, np.zeros(flat_size(block) - 1, dtype=np.float32))


def test_everybody_starts_from_the_same_weights() -> None:
    assert np.array_equal(initial_flat(RUN, 2), initial_flat(RUN, 2))
    assert not np.array_equal(initial_flat(RUN, 1), initial_flat(RUN, 2))
