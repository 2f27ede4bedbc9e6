"""A chain of blocks in one process: what hosts do with a sweep, without hosts."""

from __future__ import annotations

from dataclasses import replace

import torch

from swarm.learning.composition import ComposedModel
from swarm.writing.generate import Sampling
from swarm.writing.sweep import DraftOrder, Passage, byte_scores, draft, finish, score
from swarm.writing.writer import Ask, SweepWriter, VerifiedWriter


class Chain:
    """All blocks with their caches. `sweeps` counts traversals."""

    def __init__(self, model: ComposedModel) -> None:
        self.model, self.sweeps = model, 0
        self.caches = model.new_caches()

    def verify(self, ask: Ask, sampling: Sampling) -> Passage:
        order = self._order(1, ask, sampling)
        return self._pass(ask, order, bonus=True, keep=True)

    def sweep(self, ask: Ask, drafts: int, sampling: Sampling) -> Passage:
        order = self._order(drafts, ask, sampling)
        return self._pass(ask, order, bonus=False, keep=False)

    def _order(self, drafts: int, ask: Ask, sampling: Sampling) -> DraftOrder:
        own = replace(sampling, seed=ask.seed)
        return DraftOrder(drafts, ask.length, own, self.model.temperature)

    def _pass(self, ask: Ask, order: DraftOrder, bonus: bool, keep: bool) -> Passage:
        self.sweeps += 1
        passage = Passage(torch.tensor(list(ask.context)), torch.zeros(0, 0, dtype=torch.int64))
        first = True
        for block, cache, weight in zip(
            self.model.blocks, self.caches, self.model.weights, strict=True
        ):
            if block is None:
                continue
            for layer in cache:
                assert not keep or layer.length >= ask.start
                layer.truncate(ask.start)
            held = cache if keep else None
            if first:
                [passage] = draft(block, [passage], [order], weight, bonus, held)
            else:
                [passage] = score(block, [passage], weight, bonus, held)
            if not self.model.run.model.relays:
                passage = replace(passage, hidden_context=None, hidden_drafts=None)
            first = False
        return passage


def write_verified(
    model: ComposedModel, prompt: bytes, length: int, draft_length: int, sampling: Sampling
) -> tuple[bytes, int]:
    chain = Chain(model)
    writer = VerifiedWriter(prompt, length, model.run.model.context, draft_length, sampling)
    written = b""
    while not writer.done:
        passage = chain.verify(writer.ask(), sampling)
        log_probs = finish(passage, model.temperature)[0]
        drafted = passage.drafts[0].tolist()
        if sampling.temperature == 0.0:
            written += writer.hear_greedy(drafted, log_probs.argmax(-1).tolist())
        else:
            assert passage.drafted is not None
            written += writer.hear_sampled(drafted, passage.drafted[0], log_probs)
    return written, chain.sweeps


def write_many_verified(
    model: ComposedModel, prompt: bytes, length: int, draft_length: int, samplings: list[Sampling]
) -> list[bytes]:
    """The same for many seeds at once, without caches: texts of one length go together."""
    context = model.run.model.context
    writers = [VerifiedWriter(prompt, length, context, draft_length, s) for s in samplings]
    written = [b""] * len(writers)
    while any(not writer.done for writer in writers):
        groups: dict[tuple[int, int], list[tuple[int, Ask]]] = {}
        for index, writer in enumerate(writers):
            if not writer.done:
                writer.restart()
                ask = writer.ask()
                groups.setdefault((len(ask.context), ask.length), []).append((index, ask))
        for group in groups.values():
            passages = _pass_all(model, [ask for _, ask in group], samplings[0])
            for (index, _), passage in zip(group, passages, strict=True):
                log_probs = finish(passage, model.temperature)[0]
                assert passage.drafted is not None
                drafted = passage.drafts[0].tolist()
                written[index] += writers[index].hear_sampled(
                    drafted, passage.drafted[0], log_probs
                )
    return written


def _pass_all(model: ComposedModel, asks: list[Ask], sampling: Sampling) -> list[Passage]:
    empty = torch.zeros(0, 0, dtype=torch.int64)
    passages = [Passage(torch.tensor(list(ask.context)), empty) for ask in asks]
    orders = [
        DraftOrder(1, ask.length, replace(sampling, seed=ask.seed), model.temperature)
        for ask in asks
    ]
    first, *rest = model.blocks
    assert first is not None
    passages = draft(first, passages, orders, model.weights[0], True)
    for block, weight in zip(rest, model.weights[1:], strict=True):
        assert block is not None
        if not model.run.model.relays:
            passages = [replace(p, hidden_context=None, hidden_drafts=None) for p in passages]
        passages = score(block, passages, weight, True)
    return passages


def write_one_sweep(
    model: ComposedModel, prompt: bytes, length: int, drafts: int, sampling: Sampling
) -> tuple[bytes, int]:
    chain = Chain(model)
    writer = SweepWriter(prompt, length, model.run.model.context, sampling)
    written = b""
    while not writer.done:
        passage = chain.sweep(writer.ask(), drafts, sampling)
        scores = byte_scores(finish(passage, model.temperature), passage.drafts, sampling)
        assert passage.drafted is not None
        q = byte_scores(passage.drafted, passage.drafts, sampling).sum(-1)
        written += writer.hear([bytes(row) for row in passage.drafts.tolist()], scores, q)
    return written, chain.sweeps
