"""Which part of a draft is kept, from the composed model's probabilities.

Greedy: the longest prefix on which draft and composed model agree, and the model's own next byte:
exactly the composed model's greedy output. Sampled: speculative sampling, which keeps the composed
model's distribution for any drafter. One sweep: one of several whole drafts, the likeliest or one
drawn by its importance weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarm.writing.generate import Sampling


def sampled_log_probs(log_probs: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that `Sampling.choose` draws from: log-probabilities (..., 256) in float64,
    on the CPU. With temperature 0 all probability is on the likeliest byte.
    """
    log_probs = log_probs.cpu()  # not every device has float64, and generators are the CPU's
    if sampling.temperature == 0.0:
        best = log_probs.argmax(-1, keepdim=True)
        nothing = torch.full_like(log_probs, -torch.inf, dtype=torch.float64)
        return nothing.scatter(-1, best, 0.0)
    highest = log_probs.max(-1, keepdim=True).values
    scaled = (log_probs - highest).double() / sampling.temperature
    if sampling.top_k:
        kept = scaled.topk(sampling.top_k).values[..., -1:]
        scaled = scaled.masked_fill(scaled < kept, -torch.inf)
    return scaled.log_softmax(-1)


def choose_rows(log_probs: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """One byte for every row of (rows, 256), as `Sampling.choose` would."""
    if sampling.temperature == 0.0:
        return log_probs.argmax(-1)
    probabilities = sampled_log_probs(log_probs, sampling).exp()
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0].to(log_probs.device)


def accept_greedy(draft: Sequence[int], best: Sequence[int]) -> list[int]:
    """The draft's prefix that the model would write too, then the model's next byte.

    `best`: the model's choice after each prefix of the draft, the whole draft included.
    """
    agreed = 0
    while agreed < len(draft) and draft[agreed] == best[agreed]:
        agreed += 1
    return [*draft[:agreed], best[agreed]]


def accept_sampled(
    draft: Sequence[int],
    drafted: Tensor,
    log_probs: Tensor,
    sampling: Sampling,
    generator: torch.Generator,
) -> list[int]:
    """Speculative sampling of one draft; returns at least one byte.

    `drafted` (length, 256) are the log-probabilities that the draft was drawn from under the same
    `sampling`, `log_probs` (length + 1, 256) those of the model. The draft is verified as a block
    (Sun et al., "Block verification accelerates speculative decoding"): a prefix is kept by its
    joint probability, so that a byte that the model finds likelier makes up for one that it finds
    less likely. The result is distributed exactly as p, and on average is never shorter than if
    each byte were kept with min(1, p / q).
    """
    p = sampled_log_probs(log_probs, sampling).exp()
    q = sampled_log_probs(drafted, sampling).exp()
    weights, chances = prefix_chances(draft, p, q)
    luck = torch.rand(len(draft), generator=generator, dtype=torch.float64).tolist()
    kept = max((n + 1 for n, chance in enumerate(chances) if luck[n] < chance), default=0)
    left = p[kept] if kept == len(draft) else left_over(weights[kept], p[kept], q[kept])
    return [*draft[:kept], int(torch.multinomial(left, 1, generator=generator))]


def prefix_chances(draft: Sequence[int], p: Tensor, q: Tensor) -> tuple[list[float], list[float]]:
    """The weight of every prefix of the draft (from the empty one on), and the probability of
    accepting each prefix (from one byte on). The longest accepted prefix is kept."""
    weights, chances = [1.0], []
    for place, byte in enumerate(draft):
        wanted, said = float(p[place, byte]), float(q[place, byte])
        # q = 0 for a drafted byte is false: the model alone decides.
        weights.append(min(1.0, weights[-1] * wanted / said) if said else float(wanted > 0))
        if place + 1 == len(draft):
            chances.append(weights[-1])
            break
        more = float((weights[-1] * p[place + 1] - q[place + 1]).clamp_min(0.0).sum())
        missing = more + 1.0 - weights[-1]
        chances.append(more / missing if missing > 0.0 else 1.0)  # p = q
    return weights, chances


def left_over(weight: float, p: Tensor, q: Tensor) -> Tensor:
    """The distribution of the byte after a kept prefix: the excess of p over q."""
    left = (weight * p - q).clamp_min(0.0)
    return left if float(left.sum()) > 0.0 else p  # p = q up to rounding


def best_draft(scores: Tensor) -> int:
    """The index of the likeliest draft under the composed model. `scores` is (drafts, length)."""
    return int(scores.double().sum(-1).argmax())


def importance(scores: Tensor, drafted: Tensor) -> Tensor:
    """The probability of taking each draft: p / q of the whole draft, normalised.

    `scores` (drafts, length): log p of each byte. `drafted` (drafts,): log q of each draft. With
    many drafts the result is distributed as p, with one as q.
    """
    ratio = scores.double().sum(-1) - drafted.double()
    return ratio.softmax(-1)


def resampled_draft(scores: Tensor, drafted: Tensor, generator: torch.Generator) -> int:
    return int(torch.multinomial(importance(scores, drafted), 1, generator=generator))
