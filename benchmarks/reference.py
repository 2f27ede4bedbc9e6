"""The end-to-end baseline of BlockTrain: the same layers and schedule, gradients through all.

Unlike a block's worker it holds the whole model's gradients and optimizer state.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarm.learning.head_loss import head_loss
from swarm.learning.model import Layer, RotaryPositions, draw
from swarm.learning.optimizer import BlockOptimizer
from swarm.run import VOCABULARY, ModelShape, Run


class EndToEnd(nn.Module):
    """The same layers, blocks * layers of them, trained with one loss at the top.

    With `heads_every` > 0 there is also a head after every so many layers, trained with the same
    loss, because relay and look-ahead have such heads and the baseline must not lack them.
    """

    def __init__(self, shape: ModelShape, heads_every: int = 0) -> None:
        super().__init__()
        depth = shape.blocks * shape.layers
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        draw(self.embedding.weight, 1.0)
        rotary = RotaryPositions(shape.context, shape.width // shape.heads)
        self.layers = nn.ModuleList(Layer(shape, depth, rotary) for _ in range(depth))
        every = heads_every or depth
        self.head_after = [index for index in range(depth) if (index + 1) % every == 0]
        if not self.head_after or self.head_after[-1] != depth - 1:
            self.head_after.append(depth - 1)
        self.heads = nn.ModuleList(nn.Linear(shape.width, VOCABULARY) for _ in self.head_after)
        for head in self.heads:
            assert isinstance(head, nn.Linear)
            draw(head.weight, 0.02)
            nn.init.zeros_(head.bias)

    def forward(self, x: Tensor) -> list[Tensor]:
        """What every head reads, the last layer's last."""
        u: Tensor = self.embedding(x)
        out: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            u = layer(u)
            if index in self.head_after:
                out.append(F.rms_norm(u, u.shape[-1:]))
        return out

    def logits(self, x: Tensor) -> list[Tensor]:
        return [head(u) for head, u in zip(self.heads, self(x), strict=True)]

    def losses(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """Mean nats of y under every head."""
        heads = [head for head in self.heads if isinstance(head, nn.Linear)]
        return [head_loss(head, u, y, None) for head, u in zip(heads, self(x), strict=True)]


class ReferenceWorker:
    """Trains an `EndToEnd` on the same batches as the blocks. `heads_every`: see `EndToEnd`."""

    def __init__(self, run: Run, device: torch.device, heads_every: int = 0) -> None:
        self.run = run
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(run.seed * 1_000_003 + 999_983)
            self.model = EndToEnd(run.model, heads_every).to(device)
        self.optimizer = BlockOptimizer(run.training, self.model)
        self.steps_done = 0

    def step(self, x: Tensor, y: Tensor) -> float:
        """One step; the loss is the sum over heads, the value returned the last head's."""
        training = self.run.training
        losses = self.model.losses(x, y)
        self.optimizer.zero_grad()
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]  # torch's own gap
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), training.clip_norm)
        self.optimizer.step(training.learning_rate_at(self.steps_done))
        self.steps_done += 1
        return losses[-1].item()

    def state(self) -> dict[str, Tensor]:
        """The state for a checkpoint."""
        model = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        optimizer = {f"optimizer.{n}": tensor for n, tensor in self.optimizer.tensors().items()}
        return {**model, **optimizer, "steps_done": torch.tensor(self.steps_done)}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `state`."""
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "steps_done": {}}
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = tensor
        self.model.load_state_dict(parts["model"])
        self.optimizer.load(parts["optimizer"])
        self.steps_done = int(parts["steps_done"][""])

    @torch.no_grad()
    def head_log_probs(self, x: Tensor) -> list[Tensor]:
        """Every head's log-probabilities, the last layer's last."""
        return [F.log_softmax(out.float(), dim=-1) for out in self.model.logits(x)]
