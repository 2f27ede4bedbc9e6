"""The client's side of an output: what the next sweep asks for, and what its result adds.

Keeps the window that the model reads (as in `swarm.writing.generate`, a full context begins anew
with its newest half), the length of drafts, and how much hosts have in their caches. The caller
sends the sweeps, and calls `restart` when caches were lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.writing.generate import Sampling
from swarm.writing.speculative import accept_greedy, accept_sampled, best_draft, resampled_draft


@dataclass(frozen=True)
class Ask:
    """The request of one sweep: after `start` cached positions, `context` bytes, then a draft."""

    start: int
    context: bytes
    length: int
    seed: int


def first_window(prompt: bytes, context: int) -> list[int]:
    return list(prompt[-context:]) or [ord("\n")]  # the model needs at least one byte


def next_window(window: Sequence[int], context: int) -> list[int]:
    """The window, or its newest half if it is longer than the trained context."""
    return list(window) if len(window) <= context else list(window[-max(1, context // 2) :])


class VerifiedWriter:
    """Writes by draft and verification, sweep after sweep. Draft length 0 is autoregression."""

    def __init__(
        self, prompt: bytes, length: int, context: int, draft_length: int, sampling: Sampling
    ) -> None:
        self.left, self.context = length, context
        self.draft_length, self.sampling = draft_length, sampling
        self._window = first_window(prompt, context)
        self._held = 0  # positions that the hosts' caches share with the window
        self._sweeps = 0
        self._generator = torch.Generator().manual_seed(sampling.seed)

    @property
    def done(self) -> bool:
        return self.left == 0

    def ask(self) -> Ask:
        """The next sweep. A repeated call, after a failure, gives another seed."""
        self._sweeps += 1
        room = self.context - len(self._window)
        # A verification also gives the byte after the draft, so one less is drafted.
        length = max(0, min(self.draft_length, room, self.left - 1))
        seed = (self.sampling.seed * 1_000_003 + self._sweeps) % 2**53
        return Ask(self._held, bytes(self._window[self._held :]), length, seed)

    def restart(self) -> None:
        """After a host lost its caches: the next sweep contains the whole window."""
        self._held = 0

    def hear_greedy(self, drafted: Sequence[int], best: Sequence[int]) -> bytes:
        return self._add(accept_greedy(drafted, best))

    def hear_sampled(self, drafted: Sequence[int], q: Tensor, log_probs: Tensor) -> bytes:
        return self._add(accept_sampled(drafted, q, log_probs, self.sampling, self._generator))

    def _add(self, accepted: list[int]) -> bytes:
        """Append accepted bytes; the last is the model's own and not in the hosts' caches yet."""
        accepted = accepted[: self.left]
        self.left -= len(accepted)
        window = [*self._window, *accepted]
        self._window = next_window(window, self.context)
        self._held = len(window) - 1 if len(self._window) == len(window) else 0
        return bytes(accepted)


class SweepWriter:
    """Writes a whole output per sweep, or in several sweeps if the context is too short."""

    def __init__(self, prompt: bytes, length: int, context: int, sampling: Sampling) -> None:
        self.left, self.context, self.sampling = length, context, sampling
        self._written = first_window(prompt, context)
        self._sweeps = 0
        self._generator = torch.Generator().manual_seed(sampling.seed)

    @property
    def done(self) -> bool:
        return self.left == 0

    def ask(self) -> Ask:
        self._sweeps += 1
        free = self.context - min(len(self._written), self.context)
        length = min(self.left, max(free, self.context // 2))
        window = self._written[-(self.context - length) :]
        seed = (self.sampling.seed * 1_000_003 + self._sweeps) % 2**53
        return Ask(0, bytes(window), length, seed)

    def hear(self, drafts: Sequence[bytes], scores: Tensor, drafted: Tensor) -> bytes:
        """Take the likeliest draft, or when sampling one drawn by importance."""
        if self.sampling.temperature == 0.0:
            chosen = best_draft(scores)
        else:
            chosen = resampled_draft(scores, drafted, self._generator)
        return self.add(drafts[chosen])

    def add(self, written: bytes) -> bytes:
        """Append the output of the last sweep."""
        self.left -= len(written)
        self._written = [*self._written, *written][-self.context :]
        return written
