"""The sliced loss is the plain one, to rounding, and so are its gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.learning import head_loss as module
from swarm.learning.head_loss import Evidence, head_loss
from swarm.learning.objective import evidence


def made(batch: int, length: int, seed: int) -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    head = torch.nn.Linear(8, 256)
    with torch.no_grad():
        head.weight.copy_(torch.randn(256, 8, generator=generator))
        head.bias.copy_(torch.randn(256, generator=generator))
    hidden = torch.randn(batch, length, 8, generator=generator).requires_grad_()
    return head, hidden, torch.randint(256, (batch, length), generator=generator)


@settings(deadline=None, max_examples=30)
@given(
    batch=st.integers(1, 5),
    length=st.integers(1, 9),
    rows=st.integers(1, 50),
    with_z=st.booleans(),
    scale=st.floats(-3, 3),
)
def test_slices_add_up_to_the_plain_loss(
    batch: int, length: int, rows: int, with_z: bool, scale: float
) -> None:
    head, hidden, y = made(batch, length, 17 * batch + length)
    targets = F.normalize(torch.randn(256, 8, generator=torch.Generator().manual_seed(1)), dim=1)
    z = torch.randn(batch, length, 8, generator=torch.Generator().manual_seed(2))
    sigma = torch.linspace(1.0, 3.0, batch)
    logits = head(hidden)
    if with_z:
        logits = logits + evidence(z, targets, sigma)
    plain = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    wanted = torch.autograd.grad(plain * scale, [hidden, head.weight, head.bias])
    given_z = Evidence(z.flatten(0, 1), targets, sigma.repeat_interleave(length))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CPU_ROWS", rows)
        sliced = head_loss(head, hidden, y, given_z if with_z else None)
        found = torch.autograd.grad(sliced * scale, [hidden, head.weight, head.bias])
    assert float(sliced.detach()) == pytest.approx(float(plain.detach()), rel=1e-5)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5, rtol=1e-4)


def test_a_frozen_head_passes_the_gradient_on_and_keeps_none() -> None:
    head, hidden, y = made(2, 3, 0)
    head.requires_grad_(False)
    head_loss(head, hidden, y, None).backward()  # type: ignore[no-untyped-call]  # torch's own gap
    assert hidden.grad is not None and hidden.grad.abs().sum() > 0
    assert head.weight.grad is None and head.bias.grad is None


def test_no_gradient_is_computed_where_none_is_wanted() -> None:
    head, hidden, y = made(2, 3, 0)
    with torch.no_grad():
        assert not head_loss(head, hidden, y, None).requires_grad


def test_half_precision_hidden_states_get_their_own_kind_of_gradient() -> None:
    """As under autocast: the loss is computed in float32."""
    head, hidden, y = made(2, 3, 0)
    half = hidden.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = head_loss(head, half, y, None)
    loss.backward()  # type: ignore[no-untyped-call]  # torch's own gap
    assert loss.dtype == torch.float32
    assert half.grad is not None and half.grad.dtype == torch.bfloat16
