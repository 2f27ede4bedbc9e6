"""Copies that move: how fast, towards what, and that the first version is taken as it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swarm.learning.flat import flat_weights
from swarm.learning.model import Block
from swarm.learning.moving_copy import MovingCopy, frozen_copy
from swarm.learning.worker import initial_block
from swarm.run import Run
from tests.conftest import MakeRun


def filled(run: Run, value: float) -> Block:
    block = initial_block(run, 0).requires_grad_(False)
    for parameter in block.parameters():
        parameter.fill_(value)
    return block


def value_of(block: Block) -> float:
    values = flat_weights(block)
    assert (values == values[0]).all()
    return float(values[0])


def moved(moving: MovingCopy) -> Block:
    moving.move()
    return moving.block


def half_of(block: Block) -> Tensor:
    return torch.from_numpy(flat_weights(block)).half()


def in_full(moving: MovingCopy) -> Tensor:
    with moving.at_hand() as block:
        assert {p.dtype for p in block.parameters()} == {torch.float32}
        return torch.from_numpy(flat_weights(block).copy())


def test_it_jumps_once_and_then_moves_a_part_of_the_way(tiny_run: MakeRun) -> None:
    run = tiny_run()
    moving = MovingCopy(filled(run, 7.0), 4.0)
    assert value_of(moved(moving)) == 7.0  # nothing to follow yet
    moving.follow(filled(run, 0.0))
    assert value_of(moving.block) == 0.0
    moving.follow(filled(run, 16.0))
    assert [value_of(moved(moving)) for _ in range(3)] == [4.0, 7.0, 9.25]
    moving.follow(filled(run, 9.25))
    assert value_of(moved(moving)) == 9.25


def test_one_step_is_a_jump(tiny_run: MakeRun) -> None:
    run = tiny_run()
    moving, target = MovingCopy(filled(run, 1.0), 1.0), initial_block(run, 1 - 1)
    moving.follow(filled(run, 2.0))
    moving.follow(target)
    assert (flat_weights(moved(moving)) == flat_weights(target)).all()  # to the bit


def test_a_version_in_half_precision_is_reached(tiny_run: MakeRun) -> None:
    run = tiny_run()
    moving, wanted = MovingCopy(filled(run, 1.0), 4.0), half_of(initial_block(run, 0))
    moving.follow_flat(torch.zeros_like(wanted))
    assert moving.half and not in_full(moving).any()
    moving.follow_flat(wanted)
    for _ in range(300):
        moving.move()
    # To the bit, but for numbers near 0: there halves lie 6e-8 apart, and chance knows only digits.
    assert torch.allclose(in_full(moving), wanted.float(), rtol=0.0, atol=3e-7)
    usual = wanted.abs() > 2**-13
    assert usual.float().mean() > 0.9
    assert torch.equal(in_full(moving).half()[usual], wanted[usual])


def test_steps_smaller_than_a_halfs_last_digit_are_made_on_average(tiny_run: MakeRun) -> None:
    """Rounded to the nearest, a copy would stand still half a percent before where it goes."""
    run = tiny_run()
    moving = MovingCopy(filled(run, 0.0), 25.0)
    flat = torch.full_like(half_of(filled(run, 0.0)), -1.0)
    moving.follow_flat(flat)
    flat.fill_(-1.0 - 2**-8)  # a step is a sixth of the last digit, and less and less
    for step in range(1, 41):
        moving.move()
        left = 2**-8 * (1 - 1 / 25) ** step
        found = float(in_full(moving).mean()) + 1.0 + 2**-8
        assert abs(found - left) < 5 * 2**-10 / len(flat) ** 0.5
    assert len(in_full(moving).unique()) > 1
    assert float(in_full(moving).min()) > -1.0 - 2**-8 - 2**-9


def test_in_half_precision_it_takes_two_bytes_a_weight_until_it_is_read(tiny_run: MakeRun) -> None:
    moving = MovingCopy(initial_block(tiny_run(), 0), 3.0)
    moving.follow_flat(half_of(initial_block(tiny_run(), 0)))
    moving.move()
    held = [parameter.data_ptr() for parameter in moving.block.parameters()]
    with pytest.raises(ValueError, match="in between"), moving.at_hand():
        raise ValueError("in between")
    assert [parameter.data_ptr() for parameter in moving.block.parameters()] == held
    assert {parameter.dtype for parameter in moving.block.parameters()} == {torch.float16}


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("half", [True, False])
def test_what_is_changed_while_it_is_at_hand_is_kept_if_wanted(
    keep: bool, half: bool, tiny_run: MakeRun
) -> None:
    moving = MovingCopy(filled(tiny_run(), 1.0), 3.0)
    if half:
        moving.follow_flat(half_of(filled(tiny_run(), 1.0)))
    with moving.at_hand(keep) as block:
        for parameter in block.parameters():
            parameter.add_(0.5)
    assert set(in_full(moving).tolist()) == {1.5 if keep or not half else 1.0}


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
