"""A client's side of an output: what to ask of the next sweep, and what its answer adds.

Decides the windows that the model reads (the same as in `swarm.writing.generate`: a full context
begins anew with its newest half), how much is drafted, and what hosts have in their caches. Knows
nothing of routes or streams: whoever sends the sweeps says `restart` when caches were lost.
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
    """One sweep: after `start` positions in the caches come `context` bytes, then a draft."""

    start: int
    context: bytes
    length: int
    seed: int


def first_window(prompt: bytes, context: int) -> list[int]:
    return list(prompt[-context:]) or [ord("\n")]  # there is always one byte to go on from


def next_window(window: Sequence[int], context: int) -> list[int]:
    """Positions beyond the trained context do not exist: go on from the newest half."""
    return list(window) if len(window) <= context else list(window[-max(1, context // 2) :])


class VerifiedWriter:
    """Draft, verify, repeat. A draft length of 0 is autoregression."""

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
        """The next sweep. Asked again (after a failure), it gets another seed."""
        self._sweeps += 1
        room = self.context - len(self._window)
        # The byte after the draft comes for nothing, so one less needs to be drafted.
        length = max(0, min(self.draft_length, room, self.left - 1))
        seed = (self.sampling.seed * 1_000_003 + self._sweeps) % 2**53
        return Ask(self._held, bytes(self._window[self._held :]), length, seed)

    def restart(self) -> None:
        """Some host has lost its caches: the next sweep brings the whole window."""
        self._held = 0

    def hear_greedy(self, drafted: Sequence[int], best: Sequence[int]) -> bytes:
        return self._add(accept_greedy(drafted, best))

    def hear_sampled(self, drafted: Sequence[int], q: Tensor, log_probs: Tensor) -> bytes:
        return self._add(accept_sampled(drafted, q, log_probs, self.sampling, self._generator))

    def _add(self, accepted: list[int]) -> bytes:
        """The last byte is the model's own; the hosts have not read it yet."""
        accepted = accepted[: self.left]
        self.left -= len(accepted)
        window = [*self._window, *accepted]
        self._window = next_window(window, self.context)
        self._held = len(window) - 1 if len(self._window) == len(window) else 0
        return bytes(accepted)


class SweepWriter:
    """A whole output per sweep; as many sweeps as the context makes necessary."""

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
        """Take the likeliest draft, or when sampling one by its importance."""
        if self.sampling.temperature == 0.0:
            chosen = best_draft(scores)
        else:
            chosen = resampled_draft(scores, drafted, self._generator)
        return self.add(drafts[chosen])

    def add(self, written: bytes) -> bytes:
        """What the last sweep was asked for, with nothing left to choose."""
        self.left -= len(written)
        self._written = [*self._written, *written][-self.context :]
        return written
