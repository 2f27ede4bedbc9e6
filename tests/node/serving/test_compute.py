"""Sweeps that go through a block together get what each would have got alone."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from node.serving.compute import LostCache, Session, compute, parcel_of
from protocol.identity import peer_id_of
from protocol.parcel import Parcel
from protocol.serving import Hop, Mode, Sweep
from swarm.learning.model import Block
from swarm.writing.sweep import Passage
from tests.conftest import MakeModel, MakeRun

PEER = peer_id_of(b"p" * 32)
TEXTS = [b"abcde", b"swarm", b"\x00\xff..."]
CLOSE = 1e-5  # a batch may add up in another order; near-ties below 1e-4 are counted apart


def verification(place: int, start: int, context: int, length: int, seed: int) -> Sweep:
    route = tuple(Hop(block, b"d" * 32, 1.0, (PEER,)).pack() for block in range(3))
    return Sweep(
        run=b"r" * 32,
        block=place,
        sweep=b"s" * 16,
        mode=int(Mode.VERIFY),
        place=place,
        route=route,
        context=context,
        length=length,
        start=start,
        session=b"t" * 16,
        temperature=1.0,
        seed=seed,
        budget_s=10.0,
        hop_s=1.0,
        client=PEER,
        hidden=int(place > 0),
    )


def first_parcel(text: bytes) -> Parcel:
    context = np.frombuffer(text, np.uint8)
    return Parcel(context, np.zeros((1, 0), np.uint8), None, None, None, None)


Work = list[tuple[Sweep, Parcel]]


def two_sweeps(blocks: list[Block], together: bool) -> tuple[list[Passage], list[Session]]:
    """The first bytes of some texts, then more of them, through two blocks with caches."""
    sessions = [[Session(block.new_cache()) for _ in TEXTS] for block in blocks]
    passages: list[Passage] = []
    for start, stop, length in ((0, 3, 2), (3, 5, 3)):
        work: Work = [
            (verification(0, start, stop - start, length, seed), first_parcel(text[start:stop]))
            for seed, text in enumerate(TEXTS)
        ]
        for place, block in enumerate(blocks):
            if together:
                passages = compute(block, work, sessions[place])
            else:
                each = zip(work, sessions[place], strict=True)
                passages = [compute(block, [one], [session])[0] for one, session in each]
            onward = [
                replace(s, place=place + 1, block=place + 1, hidden=1, weight=p.weight)
                for (s, _), p in zip(work, passages, strict=True)
            ]
            work = [(s, parcel_of(s, p)) for s, p in zip(onward, passages, strict=True)]
    return passages, sessions[-1]


def test_sessions_of_one_shape_together_or_alone(tiny_run: MakeRun, tiny_model: MakeModel) -> None:
    model = tiny_model(tiny_run(coupling="look_ahead", layers=2))
    blocks = [block for block in model.blocks[:2] if block is not None]
    alone, caches_alone = two_sweeps(copy.deepcopy(blocks), together=False)
    joint, caches_joint = two_sweeps(blocks, together=True)
    for one, other in zip(alone, joint, strict=True):
        assert torch.equal(one.drafts, other.drafts)
        assert one.state is not None and other.state is not None
        assert torch.allclose(one.state, other.state, atol=CLOSE)
    for a, b in zip(caches_alone, caches_joint, strict=True):
        assert a.length == b.length == 8  # 3 + 2 bytes of context and a draft of 3
        for layer, its in zip(a.cache, b.cache, strict=True):
            assert layer.keys is not None and its.keys is not None
            assert its.keys.shape[0] == 1 and torch.allclose(layer.keys, its.keys, atol=CLOSE)
            # Its own memory: a view would keep the caches of all others.
            assert its.keys.untyped_storage().nbytes() == its.keys.numel() * 4


def test_caches_that_are_too_short(tiny_run: MakeRun, tiny_model: MakeModel) -> None:
    block = tiny_model(tiny_run()).blocks[0]
    assert block is not None
    work: Work = [(verification(0, 4, 1, 1, 0), first_parcel(b"x"))]
    with pytest.raises(LostCache):
        compute(block, work, [Session(block.new_cache())])
