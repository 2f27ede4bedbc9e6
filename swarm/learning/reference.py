"""The end-to-end baseline of BlockTrain: the same layers and schedule, gradients through all.

Unlike a block's worker it holds the whole model's gradients and optimizer state.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from swarm.learning.model import EndToEnd
from swarm.learning.optimizer import BlockOptimizer
from swarm.run import Run


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
