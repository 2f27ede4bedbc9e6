"""The written-out gradients are autograd's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm.learning.gradients import relu_squared, rms_norm, rotate_qk


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).requires_grad_()


def same(ours: Tensor, theirs: Tensor, inputs: list[Tensor], seed: int) -> None:
    assert torch.allclose(ours, theirs, atol=1e-5, rtol=1e-4)
    outer = drawn(*ours.shape, seed=seed + 1).detach()
    found = torch.autograd.grad(ours, inputs, outer)
    for mine, wanted in zip(found, torch.autograd.grad(theirs, inputs, outer), strict=True):
        assert torch.allclose(mine, wanted, atol=1e-4, rtol=1e-3)


shapes = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 9))


@settings(deadline=None)
@given(shape=shapes, seed=st.integers(0, 1000), size=st.sampled_from([1e-3, 1.0, 1e3]))
def test_rms_norm(shape: tuple[int, int, int], seed: int, size: float) -> None:
    x, weight = drawn(*shape, seed=seed), drawn(shape[-1], seed=seed + 7)
    big = (x.detach() * size).requires_grad_()
    theirs = F.rms_norm(big, shape[-1:], weight, torch.finfo(torch.float32).eps)
    ours = rms_norm(big, weight)
    assert torch.allclose(ours, theirs, atol=1e-5, rtol=1e-4)
    outer = drawn(*shape, seed=seed + 1).detach()
    found = torch.autograd.grad(ours, [big, weight], outer)
    for mine, wanted in zip(found, torch.autograd.grad(theirs, [big, weight], outer), strict=True):
        assert torch.allclose(mine * size, wanted * size, atol=1e-3 * max(1.0, size), rtol=1e-3)


@settings(deadline=None)
@given(shape=shapes, seed=st.integers(0, 1000))
def test_relu_squared(shape: tuple[int, int, int], seed: int) -> None:
    x = drawn(*shape, seed=seed)
    same(relu_squared(x), F.relu(x).square(), [x], seed)


def test_rotation() -> None:
    qkv, angle = drawn(2, 5, 3, 2, 4), drawn(5, 2, seed=3).detach()
    cos, sin = angle.cos(), angle.sin()

    def turned(x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)

    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    ours = torch.cat(rotate_qk(qkv, cos, sin))
    same(ours, torch.cat([turned(q), turned(k), v]), [qkv], 5)


def test_a_frozen_norm_gets_no_gradient() -> None:
    x, weight = drawn(2, 3), torch.ones(3)
    rms_norm(x, weight).sum().backward()  # type: ignore[no-untyped-call]  # torch's own gap
    assert weight.grad is None and x.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_under_autocast(dtype: torch.dtype) -> None:
    """As on a GPU: half-precision activations, float32 weights."""
    x = drawn(2, 3).detach().to(dtype).requires_grad_()
    weight = torch.ones(3, requires_grad=True)
    out = rms_norm(relu_squared(x), weight)
    out.sum().backward()  # type: ignore[no-untyped-call]  # torch's own gap
    assert x.grad is not None and x.grad.dtype == dtype
    assert weight.grad is not None and weight.grad.dtype == torch.float32
