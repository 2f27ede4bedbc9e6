"""One block's part of a sweep: drafting, scoring drafts, adding to the composition, denoising.

Contexts and drafts go through a block with caches, several sweeps of one shape at once, and the
composed log-probabilities are accumulated from hop to hop. The results are the same as of
`ComposedModel.log_probs` on the whole text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from swarm.learning.composition import euler_logit
from swarm.learning.joint_denoising import JointDenoising
from swarm.learning.model import Block, LayerCache
from swarm.run import VOCABULARY
from swarm.writing.denoise import Denoised
from swarm.writing.generate import Sampling
from swarm.writing.speculative import choose_rows, sampled_log_probs

Cache = list[LayerCache]

SPREAD = 0.5  # temperature of a greedy one-sweep's drafts after the first: likely, but different


@dataclass(frozen=True)
class Passage:
    """The input and output of a block in one sweep. The drafting block gets it without drafts."""

    context: Tensor  # (context,) of int64
    drafts: Tensor  # (drafts, length) of int64
    hidden_context: Tensor | None = None  # (context, width), of the block before, with relay
    hidden_drafts: Tensor | None = None  # (drafts, length, width)
    state: Tensor | None = None  # (drafts, scored, 256), normalised
    weight: float = 0.0  # of the blocks in `state`
    drafted: Tensor | None = None  # (drafts, length, 256): what the drafts were drawn from
    z: Tensor | None = None  # (length, width): input of joint denoising
    denoised: Denoised | None = None  # and its output


@dataclass(frozen=True)
class DraftOrder:
    """What the drafter is asked for. Of greedy drafts only the first is greedy, since the others
    would be the same. Drafts are drawn at the composition's temperature, `composed`, as the whole
    model would draw, so that more of them are kept."""

    drafts: int
    length: int
    sampling: Sampling
    composed: float = 1.0

    def samplings(self) -> list[Sampling]:
        if self.sampling.temperature > 0.0:
            return [self.sampling]
        spread = replace(self.sampling, temperature=SPREAD)
        return [self.sampling] if self.drafts == 1 else [self.sampling, spread]

    def choose(self, log_probs: Tensor, generator: torch.Generator) -> Tensor:
        """The next byte of each of this order's drafts, from (drafts, 256)."""
        first, *rest = self.samplings()
        if not rest:
            return choose_rows(log_probs, first, generator)
        head = choose_rows(log_probs[:1], first, generator)
        return torch.cat([head, choose_rows(log_probs[1:], rest[0], generator)])


def draft(
    block: Block,
    passages: Sequence[Passage],
    orders: Sequence[DraftOrder],
    weight: float,
    bonus: bool,
    cache: Cache | None = None,
) -> list[Passage]:
    """Write the drafts of several sweeps, all with contexts and orders of the same shape."""
    return next(draft_parts(block, passages, orders, weight, bonus, 1, cache))


@torch.no_grad()
def draft_parts(
    block: Block,
    passages: Sequence[Passage],
    orders: Sequence[DraftOrder],
    weight: float,
    bonus: bool,
    parts: int,
    cache: Cache | None = None,
) -> Iterator[list[Passage]]:
    """The same, part by part as they are written; only the first part contains the context.

    Each drafted byte is also read as input, the last one too: the next sweep needs it in the cache
    if it is accepted, and the next hosts need its hidden state.
    """
    cache = block.new_cache() if cache is None else cache
    rows, length = orders[0].drafts, orders[0].length
    generators = [torch.Generator().manual_seed(order.sampling.seed) for order in orders]
    context = torch.stack([passage.context for passage in passages])
    hidden_context = block.hidden(context, None, cache)
    fan_out(cache, rows)
    hidden = hidden_context[:, -1:].repeat_interleave(rows, 0)
    cooler = torch.tensor([order.composed for order in orders], device=context.device)
    cooler = cooler.repeat_interleave(rows)[:, None]
    for part in range(parts):
        hiddens, drawn, written = [hidden[:, -1:]], [], []
        for _ in range(part * length // parts, (part + 1) * length // parts):
            drawn.append(F.log_softmax(block.logits(hiddens[-1][:, 0]).float() / cooler, dim=-1))
            each = drawn[-1].view(len(orders), rows, -1)
            chosen = [o.choose(lp, g) for o, lp, g in zip(orders, each, generators, strict=True)]
            written.append(torch.cat(chosen)[:, None])
            hiddens.append(block.hidden(written[-1], None, cache))
        hidden = torch.cat(hiddens, 1)
        drafts = torch.cat([context.new_zeros(len(hidden), 0), *written], 1)
        drafted = torch.stack(drawn, 1) if drawn else hidden.new_zeros(len(hidden), 0, VOCABULARY)
        seen = _scored(_log_probs(block, hidden), bonus) if weight > 0.0 else None
        out = []
        for index, passage in enumerate(passages):
            own = slice(index * rows, (index + 1) * rows)
            before = passage.context, hidden_context[index]
            if part:
                before = passage.context[:0], hidden_context[index, :0]
            made = Passage(before[0], drafts[own], before[1], hidden[own, 1:], drafted=drafted[own])
            out.append(made if seen is None else _composed(made, seen[own], weight))
        yield out


def joined(parts: Sequence[Passage]) -> Passage:
    """Drafted parts as one passage."""
    first, *rest = parts
    if not rest:
        return first
    state = None
    if first.state is not None:
        state = torch.cat([_there(part.state) for part in parts], 1)
    return replace(
        first,
        drafts=torch.cat([part.drafts for part in parts], 1),
        hidden_drafts=torch.cat([_there(part.hidden_drafts) for part in parts], 1),
        drafted=torch.cat([_there(part.drafted) for part in parts], 1),
        state=state,
    )


@torch.no_grad()
def score(
    block: Block,
    passages: Sequence[Passage],
    weight: float,
    bonus: bool,
    cache: Cache | None = None,
    last: Tensor | None = None,
) -> list[Passage]:
    """Pass several sweeps of one shape through a block: new hidden states, and the state with the
    block's prediction added.

    A context is read once for all of its drafts. With weight 0 nothing is predicted. A later part
    has no context, but `last` (sweeps * drafts, 1, width): the hidden state at the end of the part
    before, whose keys and values are in the cache.
    """
    rows = passages[0].drafts.shape[0]
    context = torch.stack([passage.context for passage in passages])
    drafts = torch.cat([passage.drafts for passage in passages])
    relay_context = relay_drafts = None
    if passages[0].hidden_context is not None and passages[0].hidden_drafts is not None:
        relay_context = torch.stack([_there(passage.hidden_context) for passage in passages])
        relay_drafts = torch.cat([_there(passage.hidden_drafts) for passage in passages])
    if last is not None:
        hidden_context = last.new_zeros(len(passages), 0, block.shape.width)
        hidden_drafts = block.hidden(drafts, relay_drafts, cache)
    elif rows == 1:  # one draft: context and draft in one forward pass
        x, relay = torch.cat([context, drafts], 1), relay_context
        if relay_context is not None and relay_drafts is not None:
            relay = torch.cat([relay_context, relay_drafts], 1)
        both = block.hidden(x, relay, cache)
        hidden_context, hidden_drafts = both[:, : context.shape[1]], both[:, context.shape[1] :]
    else:
        cache = block.new_cache() if cache is None else cache
        hidden_context = block.hidden(context, relay_context, cache)
        fan_out(cache, rows)
        hidden_drafts = block.hidden(drafts, relay_drafts, cache)
    seen: Tensor | None = None
    if weight > 0.0:
        if last is None:
            last = hidden_context[:, -1:].repeat_interleave(rows, 0)
        seen = _scored(_log_probs(block, torch.cat([last, hidden_drafts], 1)), bonus)
    out = []
    for index, passage in enumerate(passages):
        own = slice(index * rows, (index + 1) * rows)
        moved = replace(
            passage, hidden_context=hidden_context[index], hidden_drafts=hidden_drafts[own]
        )
        out.append(moved if seen is None else _composed(moved, seen[own], weight))
    return out


@torch.no_grad()
def denoise(
    joint: JointDenoising, module: Block, block: int, passages: Sequence[Passage]
) -> list[Passage]:
    """Denoise the z of several sweeps of one shape with a block."""
    context = torch.stack([passage.context for passage in passages])
    z = torch.stack([_there(passage.z) for passage in passages])
    relay: Tensor | None = None
    if passages[0].hidden_context is not None:
        before = torch.stack([_there(passage.hidden_context) for passage in passages])
        after = torch.cat([_there(passage.hidden_drafts) for passage in passages])
        relay = torch.cat([before, after], 1)
    posterior, hidden = joint.denoise(module, block, context, z, relay)
    start = context.shape[1]
    return [
        replace(
            passage,
            hidden_context=hidden[index, :start],
            hidden_drafts=hidden[index : index + 1, start:],
            denoised=Denoised(joint, block, z[index], posterior[index]),
        )
        for index, passage in enumerate(passages)
    ]


def finish(passage: Passage, temperature: float) -> Tensor:
    """The composed log-probabilities (drafts, scored, 256) after the last block."""
    assert passage.state is not None
    return F.log_softmax(passage.state / temperature, dim=-1)


def byte_scores(log_probs: Tensor, drafts: Tensor, sampling: Sampling) -> Tensor:
    """The log-probability of each drafted byte, under the sampling unless it is greedy."""
    if sampling.temperature > 0.0:
        log_probs = sampled_log_probs(log_probs, sampling)
    return log_probs.gather(-1, drafts[..., None].to(log_probs.device))[..., 0]


def fan_out(cache: Cache, rows: int) -> None:
    """Repeat every text in the cache `rows` times, once for each draft."""
    if rows == 1:
        return
    for layer in cache:
        if layer.keys is not None and layer.values is not None:
            layer.keys = layer.keys.repeat_interleave(rows, 0)
            layer.values = layer.values.repeat_interleave(rows, 0)


def _log_probs(block: Block, hidden: Tensor) -> Tensor:
    return F.log_softmax(block.logits(hidden).float(), dim=-1)


def _scored(log_probs: Tensor, bonus: bool) -> Tensor:
    """The predictions to score. `bonus`: with the one after the whole draft."""
    return log_probs if bonus else log_probs[:, :-1]


def _composed(passage: Passage, log_probs: Tensor, weight: float) -> Passage:
    """Add a block to the state, normalised again so that the next host can check it."""
    if passage.state is None:
        return replace(passage, state=log_probs, weight=weight)
    state = euler_logit([passage.state, log_probs], [passage.weight, weight])
    return replace(passage, state=F.log_softmax(state, -1), weight=passage.weight + weight)


def _there(hidden: Tensor | None) -> Tensor:
    assert hidden is not None
    return hidden
