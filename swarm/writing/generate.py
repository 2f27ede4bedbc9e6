"""Writing bytes with a composed model one at a time, greedy or sampled, with key/value caches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from protocol.errors import ModelError, UsageError
from swarm.learning.composition import ComposedModel


@dataclass(frozen=True)
class Sampling:
    """How bytes are chosen. temperature 0: greedy; top_k 0: all bytes are kept."""

    temperature: float = 0.8
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise UsageError(f"temperature is {self.temperature}; it must be between 0 and 100")
        if not 0 <= self.top_k <= 256:
            raise UsageError(f"top-k is {self.top_k}; it must be between 0 and 256")

    def choose(self, log_probs: Tensor, generator: torch.Generator) -> int:
        """One byte from log-probabilities of shape (256,)."""
        if self.temperature == 0.0:
            return int(log_probs.argmax())
        if not bool(torch.isfinite(log_probs.max())):
            raise ModelError(
                "the model's prediction is not a number: its weights are too large",
                "take another model, or train this one with a lower learning rate",
            )
        # Relative to the highest: a tiny temperature must not make all of them -inf.
        scaled = (log_probs - log_probs.max()).cpu().double() / self.temperature
        if self.top_k:
            kept = scaled.topk(self.top_k).values[-1]
            scaled = scaled.masked_fill(scaled < kept, -torch.inf)
        return int(torch.multinomial(scaled.softmax(-1), 1, generator=generator))


def generate(model: ComposedModel, prompt: bytes, length: int, sampling: Sampling) -> Iterator[int]:
    """Yield `length` bytes that follow the prompt.

    The model has no positions beyond its trained context: when the context is full, its newest half
    is read again with new caches.
    """
    context = model.run.model.context
    generator = torch.Generator().manual_seed(sampling.seed)
    written = list(prompt[-context:]) or [ord("\n")]  # the model needs at least one byte
    caches = model.new_caches()
    pending, held = written, 0
    for _ in range(length):
        if held + len(pending) > context:
            written = written[-max(1, context // 2) :]
            pending, held, caches = written, 0, model.new_caches()
        x = torch.tensor([pending], device=model.device)
        log_probs = model.log_probs(x, generator, caches)[0, -1]
        held += len(pending)
        byte = sampling.choose(log_probs, generator)
        yield byte
        written = [*written[-context:], byte]
        pending = [byte]
