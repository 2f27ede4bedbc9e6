"""Cross entropy of a head, a slice of rows at a time, so that a batch's logits never exist at once.

A byte's 256 logits take more memory than its hidden state of width 128, and a loss holds several
such tensors at once. Here each slice's gradients are computed with its loss, while its logits are
in the cache, and only those of the hidden state and of the head's weights are kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CPU_ROWS = 256  # 256 kB of logits: they stay in a core's cache
DEVICE_ROWS = 16_384


class Evidence(NamedTuple):
    """z of every row, the target table, and sigma of every row: logits gain <z, E_v> / sigma^2."""

    z: Tensor
    targets: Tensor
    sigma: Tensor

    def logits(self, rows: slice) -> Tensor:
        scaled = self.z[rows] / (self.sigma[rows] ** 2).unsqueeze(1)
        return scaled @ self.targets.T


def head_loss(head: nn.Linear, hidden: Tensor, y: Tensor, evidence: Evidence | None) -> Tensor:
    """Mean nats of `y` under softmax(head(hidden) + evidence); rows are flattened (batch, length).

    Gradients flow to `hidden` and to the head's parameters, if they need them.
    """
    flat = hidden.flatten(0, -2)
    apply: Any = _HeadLoss.apply  # torch leaves it unannotated
    loss: Tensor = apply(flat, head.weight, head.bias, y.flatten(), evidence)
    return loss


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: Tensor, bias: Tensor, y: Tensor, evidence: Evidence | None
    ) -> Tensor:
        with torch.autocast(h.device.type, enabled=False):
            return _forward(ctx, h, weight, bias, y, evidence)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = outer
        grads = [g * scale if g.numel() else None for g in ctx.saved_tensors]
        h, weight, bias = grads
        return (None if h is None else h.to(ctx.hidden_dtype)), weight, bias, None, None


def _forward(
    ctx: Any, h: Tensor, weight: Tensor, bias: Tensor, y: Tensor, evidence: Evidence | None
) -> Tensor:
    ctx.hidden_dtype = h.dtype
    h = h.float()
    wants_h, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    grad_h = torch.empty_like(h) if wants_h else h.new_empty(0)
    grad_weight = torch.zeros_like(weight) if wants_weight else h.new_empty(0)
    grad_bias = torch.zeros_like(bias) if wants_bias else h.new_empty(0)
    total = torch.zeros((), dtype=torch.float64 if h.device.type == "cpu" else None).to(h.device)
    count = h.shape[0]
    step = CPU_ROWS if h.device.type == "cpu" else DEVICE_ROWS
    for start in range(0, count, step):
        rows = slice(start, start + step)
        logits = F.linear(h[rows], weight, bias)
        if evidence is not None:
            logits += evidence.logits(rows)
        log_probs = F.log_softmax(logits, dim=-1)
        wanted = y[rows].unsqueeze(1)
        total -= log_probs.gather(1, wanted).sum()
        residual = log_probs.exp_()
        residual.scatter_add_(1, wanted, torch.full_like(wanted, -1, dtype=residual.dtype))
        residual /= count
        if wants_h:
            torch.mm(residual, weight, out=grad_h[rows])
        if wants_weight:
            grad_weight.addmm_(residual.T, h[rows])
        if wants_bias:
            grad_bias += residual.sum(0)
    ctx.save_for_backward(grad_h, grad_weight, grad_bias)
    return (total / count).float()
