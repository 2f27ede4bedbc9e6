"""What is kept of drafts once the composed model has judged them. Pure decisions on probabilities.

Greedy: the longest prefix on which draft and composed model agree, and the model's own next byte:
the composed model's greedy output, byte for byte. Sampled: speculative sampling, which keeps the
composed model's distribution whatever the drafts came from. One sweep: whole drafts, of which one
is taken: the likeliest, or one drawn by its importance. Knows nothing of blocks or hosts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarm.writing.generate import Sampling


def sampled_log_probs(log_probs: Tensor, sampling: Sampling) -> Tensor:
    """What `Sampling.choose` draws from: log-probabilities (..., 256) in float64, on the CPU.

    With temperature 0 everything is on the likeliest byte.
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
    """The draft as far as it is the model's own, then the model's next byte.

    `best` has the model's choice after each prefix of the draft, one more than the draft is long.
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
    """Speculative sampling of one draft; at least one byte comes out.

    `drafted` (length, 256) are the log-probabilities that the draft was drawn from under the same
    `sampling`, `log_probs` (length + 1, 256) those of the model. The draft is verified as a whole
    (Sun et al., "Block verification accelerates speculative decoding"): a prefix is kept by the
    probability of all of it, so that a byte that the model likes more makes up for one that it
    likes less. The result is distributed as p, exactly, and is never shorter on average than if
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
    """The weight of every prefix of the draft, from the empty one on, and the chance that a prefix
    (from one byte on) is kept; the longest that is lucky stays."""
    weights, chances = [1.0], []
    for place, byte in enumerate(draft):
        wanted, said = float(p[place, byte]), float(q[place, byte])
        # A drafter that says it could not have drawn this byte lies; the model decides.
        weights.append(min(1.0, weights[-1] * wanted / said) if said else float(wanted > 0))
        if place + 1 == len(draft):
            chances.append(weights[-1])
            break
        more = float((weights[-1] * p[place + 1] - q[place + 1]).clamp_min(0.0).sum())
        missing = more + 1.0 - weights[-1]
        chances.append(more / missing if missing > 0.0 else 1.0)  # p is q, here and after it
    return weights, chances


def left_over(weight: float, p: Tensor, q: Tensor) -> Tensor:
    """What the byte behind a kept prefix is drawn from: what p has more than q."""
    left = (weight * p - q).clamp_min(0.0)
    return left if float(left.sum()) > 0.0 else p  # p is q but for rounding


def best_draft(scores: Tensor) -> int:
    """The draft that the composed model finds likeliest. `scores` is (drafts, length)."""
    return int(scores.double().sum(-1).argmax())


def importance(scores: Tensor, drafted: Tensor) -> Tensor:
    """The drafts' probabilities of being taken: p / q of each whole draft, normalised.

    `scores` (drafts, length) are of each byte, `drafted` (drafts,) of each draft. With many drafts
    the one taken is distributed as p; with one it is the drafter's own.
    """
    ratio = scores.double().sum(-1) - drafted.double()
    return ratio.softmax(-1)


def resampled_draft(scores: Tensor, drafted: Tensor, generator: torch.Generator) -> int:
    return int(torch.multinomial(importance(scores, drafted), 1, generator=generator))
