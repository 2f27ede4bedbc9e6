"""Copies that move: how fast, towards what, and that the first version is taken as it is."""

from __future__ import annotations

import pytest
import torch
from conftest import MakeRun

from swarm.flat import flat_weights
from swarm.model import Block
from swarm.moving_copy import MovingCopy, frozen_copy
from swarm.run import Run
from swarm.worker import initial_block


def filled(run: Run, value: float) -> Block:
    block = initial_block(run, 0).requires_grad_(False)
    for parameter in block.parameters():
        parameter.fill_(value)
    return block


def value_of(block: Block) -> float:
    values = flat_weights(block)
    assert (values == values[0]).all()
    return float(values[0])


def test_it_jumps_once_and_then_moves_a_part_of_the_way(tiny_run: MakeRun) -> None:
    run = tiny_run()
    moving = MovingCopy(filled(run, 7.0), 4.0)
    assert value_of(moving.move()) == 7.0  # nothing to follow yet
    moving.follow(filled(run, 0.0))
    assert value_of(moving.block) == 0.0
    moving.follow(filled(run, 16.0))
    assert [value_of(moving.move()) for _ in range(3)] == [4.0, 7.0, 9.25]
    moving.follow(filled(run, 9.25))
    assert value_of(moving.move()) == 9.25


def test_one_step_is_a_jump(tiny_run: MakeRun) -> None:
    run = tiny_run()
    moving, target = MovingCopy(filled(run, 1.0), 1.0), initial_block(run, 1 - 1)
    moving.follow(filled(run, 2.0))
    moving.follow(target)
    assert (flat_weights(moving.move()) == flat_weights(target)).all()  # to the bit


def test_a_version_in_half_precision_is_followed_as_well(tiny_run: MakeRun) -> None:
    run = tiny_run()
    moving, target = MovingCopy(filled(run, 1.0), 4.0), initial_block(run, 0)
    exact = torch.from_numpy(flat_weights(target))
    moving.follow_flat(torch.zeros_like(exact, dtype=torch.float16))
    moving.follow_flat(exact.half())
    for _ in range(100):
        moving.move()
    reached = torch.from_numpy(flat_weights(moving.block))
    assert reached.dtype is torch.float32
    assert torch.allclose(reached, exact, rtol=2**-10, atol=1e-6)


def test_a_flat_vector_is_followed_and_may_be_renewed_in_place(tiny_run: MakeRun) -> None:
    run = tiny_run()
    moving, target = MovingCopy(filled(run, 1.0), 2.0), initial_block(run, 0)
    flat = torch.from_numpy(flat_weights(target))
    moving.follow_flat(flat)
    assert (flat_weights(moving.block) == flat_weights(target)).all()  # the same order of weights
    flat.fill_(3.0)
    before = flat_weights(moving.block)
    moving.move()
    assert flat_weights(moving.block) == pytest.approx((before + 3.0) / 2, abs=1e-6)


def test_what_it_follows_is_left_alone_and_it_keeps_no_gradients(tiny_run: MakeRun) -> None:
    run = tiny_run()
    target = filled(run, 5.0)
    moving = MovingCopy(target, 3.0)
    moving.follow(target)
    moving.follow(filled(run, 1.0))
    moving.move()
    assert value_of(target) == 5.0 and value_of(moving.block) < 5.0
    assert not any(parameter.requires_grad for parameter in moving.block.parameters())


def test_a_frozen_copy_passes_gradients_through_and_keeps_none(tiny_run: MakeRun) -> None:
    block = initial_block(tiny_run(), 1)
    twin = frozen_copy(block)
    relay = torch.randn(1, 4, 16, requires_grad=True, generator=torch.Generator())
    twin.logits(twin.hidden(torch.zeros(1, 4, dtype=torch.long), relay)).square().sum().backward()
    assert relay.grad is not None and float(relay.grad.abs().max()) > 0
    assert all(p.grad is None for p in twin.parameters())
    with torch.no_grad():
        block.head.bias.add_(1.0)
    assert not torch.equal(block.head.bias, twin.head.bias)
