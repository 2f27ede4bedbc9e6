"""Sweeps in parts: the same output as in one piece, in order, bounded, and safe when hosts fail."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from node.serving import output as sweep_output
from node.serving.compute import Session, compute, compute_parts, outcome_of, parcel_of
from node.serving.parts import Begun, PartsUnderWay
from node.serving.sessions import SESSIONS_MAX_BYTES, session_bytes
from protocol.identity import peer_id_of
from protocol.packing import Malformed
from protocol.parcel import Parcel, pack_parcel, parcel_bytes, unpack_parcel
from protocol.serving import Hop, Mode, Sweep
from swarm.learning.composition import ComposedModel
from swarm.writing.generate import Sampling
from swarm.writing.sweep import Passage, joined
from tests.conftest import MakeRun
from tests.support.loopback import _no_daemon_left, run, until  # noqa: F401
from tests.support.serving_swarm import idle, swarm, written

PEER = peer_id_of(b"p" * 32)
KEY = (PEER, b"s" * 16, b"d" * 32)
HOPS = tuple(Hop(block, b"d" * 32, float(block % 2 == 0), (PEER,)).pack() for block in range(3))
SWEEP = Sweep(
    run=b"r" * 32,
    block=0,
    sweep=b"s" * 16,
    mode=int(Mode.ONE_SWEEP),
    place=0,
    route=HOPS,
    context=3,
    drafts=2,
    length=7,
    parts=3,
    temperature=1.0,
    budget_s=10.0,
    hop_s=1.0,
    client=PEER,
)
CLOSE = 1e-5


@pytest.fixture
def always_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_output, "PARTS_FROM_S", 0.0)
    monkeypatch.setattr(sweep_output, "PARTS_FROM_BYTES", 4)


# What a part is.


def test_the_stretches_of_all_parts_are_the_drafts() -> None:
    for length in range(1, 40):
        for parts in range(1, min(length, 16) + 1):
            whole = replace(SWEEP, length=length, parts=parts)
            each = [replace(whole, part=part) for part in range(parts)]
            assert [at for sweep in each for at in sweep.stretch] == list(range(length))
            assert all(len(sweep.stretch) for sweep in each)
            assert each[-1].read == (0 if parts == 1 else 3 + each[-1].stretch.start)


@pytest.mark.parametrize(
    "changes",
    [
        {"part": 3},
        {"part": 1},
        {"parts": 8},
        {"mode": 2, "drafts": 1, "session": b"s" * 16},
        {"mode": 3, "drafts": 1},
    ],
    ids=str,
)
def test_parts_that_contradict_themselves(changes: dict[str, Any]) -> None:
    SWEEP.check()
    replace(SWEEP, place=1, block=1, part=2).check()
    with pytest.raises(Malformed):
        replace(SWEEP, **changes).check()


def test_only_the_first_part_brings_the_context() -> None:
    rng, width = np.random.default_rng(0), 5
    for part in range(3):
        sweep = replace(SWEEP, place=1, block=1, part=part, hidden=1)
        length, context = len(sweep.stretch), 0 if part else 3
        drafts = rng.integers(0, 256, (2, length), dtype=np.uint8)
        hidden_drafts = rng.normal(size=(2, length, width)).astype(np.float32)
        parcel = Parcel(
            rng.integers(0, 256, context, dtype=np.uint8),
            drafts,
            np.full(2, -3.0, np.float32),
            rng.normal(size=(context, width)).astype(np.float32),
            hidden_drafts,
        )
        data = pack_parcel(sweep, width, parcel)
        assert len(data) == parcel_bytes(sweep, width)
        assert len(data) == context + 2 * length + 8 + (context + 2 * length) * (2 + 3)
        found = unpack_parcel(sweep, width, data)
        assert found.drafts is not None and found.hidden_drafts is not None
        assert found.context.shape == (context,) and np.array_equal(found.drafts, drafts)
        assert np.allclose(found.hidden_drafts, hidden_drafts, atol=0.5)


# What is computed.


def swept(model: ComposedModel, texts: list[bytes], parts: int) -> list[Begun]:
    """All texts through all blocks together, in so many parts; the last block's results."""
    blocks = [block for block in model.blocks if block is not None]
    sweeps = [replace(SWEEP, seed=seed, parts=parts) for seed in range(len(texts))]
    work = [
        (sweep, Parcel(np.frombuffer(text, np.uint8)))
        for sweep, text in zip(sweeps, texts, strict=True)
    ]
    sessions = [[Session(block.new_cache()) for _ in texts] for block in blocks]
    ends = [Begun() for _ in texts]
    drafting = compute_parts(blocks[0], work, parts)
    for part in range(parts):
        passages: list[Passage] = next(drafting)
        for place in (1, 2):
            onward = [
                (moved, parcel_of(moved, passage))
                for sweep, passage in zip(sweeps, passages, strict=True)
                for moved in [
                    replace(
                        sweep, part=part, place=place, block=place, hidden=1, weight=passage.weight
                    )
                ]
            ]
            passages = compute(blocks[place], onward, sessions[place] if parts > 1 else ())
        for (sweep, _), passage, end in zip(onward, passages, ends, strict=True):
            end.results.append(outcome_of(sweep, passage))
    return ends


def test_a_draft_in_stretches_is_the_draft(relay_model: ComposedModel) -> None:
    block = relay_model.blocks[0]
    assert block is not None
    work = [(replace(SWEEP, parts=1, seed=7), Parcel(np.frombuffer(b"abc", np.uint8)))]
    [whole] = compute(block, work)
    stretched = joined([passage for [passage] in compute_parts(block, work, 3)])
    for field in dataclasses.fields(Passage):
        one, other = getattr(whole, field.name), getattr(stretched, field.name)
        if isinstance(one, torch.Tensor):
            assert one.shape == other.shape and torch.allclose(one, other, atol=CLOSE), field.name
        else:
            assert one == other


def test_parts_make_what_one_piece_makes(relay_model: ComposedModel) -> None:
    texts = [b"abc", b"xyz"]
    for one, other in zip(swept(relay_model, texts, 1), swept(relay_model, texts, 3), strict=True):
        whole, parted = one.result(), other.result()
        assert np.array_equal(whole.drafts, parted.drafts)
        assert whole.drafted is not None and parted.drafted is not None
        assert np.allclose(whole.drafted, parted.drafted, atol=1e-4)
        assert whole.scores is not None and parted.scores is not None
        assert np.allclose(whole.scores, parted.scores, atol=CLOSE)


# What is kept between the parts.


def test_parts_come_in_their_order(tiny_run: MakeRun) -> None:
    parts = PartsUnderWay(tiny_run())
    sweep = replace(SWEEP, place=1, block=1)
    assert parts.expects(KEY, 0) and not parts.expects(KEY, 1)
    begun = parts.take(KEY, sweep, 1e12)
    assert parts.expects(KEY, 1) and not parts.expects(KEY, 2)
    assert parts.take(KEY, replace(sweep, part=1), 1e12) is begun
    parts.take(KEY, replace(sweep, part=2), 1e12)
    assert len(parts) == 0 and not parts.expects(KEY, 3)


def test_what_is_late_or_too_much_is_not_kept(tiny_run: MakeRun) -> None:
    run_ = tiny_run()
    parts = PartsUnderWay(run_)
    parts.take(KEY, replace(SWEEP, place=1, block=1), 0.0)
    parts.forget_late()
    assert len(parts) == 0
    large = replace(run_, model=replace(run_.model, layers=8, context=131072))
    assert 32 * session_bytes(large) > SESSIONS_MAX_BYTES
    assert not PartsUnderWay(large).room(replace(SWEEP, drafts=32))
    assert parts.room(SWEEP)


# On the wire.


@pytest.mark.usefixtures("always_parts")
def test_three_hosts_in_parts_and_in_one_piece(
    tmp_path: Path, relay_model: ComposedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with swarm(tmp_path, relay_model) as s:
            client = await s.client()
            for seed in range(3):
                how = (b"abc", 12, Sampling(1.0, seed=seed))
                monkeypatch.setattr(sweep_output, "PARTS", 4)
                parted, figures = await written(client, *how, drafts=3)
                assert figures.failures == 0 and figures.traversals == 1
                monkeypatch.setattr(sweep_output, "PARTS", 1)
                assert (await written(client, *how, drafts=3))[0] == parted
            monkeypatch.setattr(sweep_output, "PARTS", 4)
            orders = [written(client, b"ab", 9, Sampling(1.0, seed=n), drafts=2) for n in range(12)]
            assert all(figures.failures == 0 for _, figures in await asyncio.gather(*orders))
            await idle(s)
            assert not any(len(server.parts) for server in s.servers.values())

    run(main())


@pytest.mark.usefixtures("always_parts")
def test_a_host_that_dies_in_the_middle_of_the_parts(
    tmp_path: Path, relay_model: ComposedModel
) -> None:
    """The client hears of it, and sends the sweep again in one piece."""

    async def main() -> None:
        async with swarm(tmp_path, relay_model, "abc-d") as s:
            client = await s.client(hop_min_s=12.0)
            used = await s.chosen(client, block=1)
            s.halt(used)
            writing = asyncio.create_task(written(client, b"abc", 9, drafts=2))
            await until(lambda: bool(s.servers[used].queue.waiting))
            await s.hosts[used].stop()
            text, figures = await writing
            assert len(text) == 9 and figures.missing == () and figures.failures > 0
            assert s.hosts[used].peer_id not in figures.path

    run(main())


@pytest.mark.usefixtures("always_parts")
def test_a_host_that_lies_in_a_later_part(
    tmp_path: Path, relay_model: ComposedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from node.serving import carry as sweep_carry

    honest, lies = sweep_carry.parcel_of, []

    async def main() -> None:
        async with swarm(tmp_path, relay_model) as s:
            client = await s.client()

            def lying(sweep: Sweep, passage: Passage) -> Parcel:
                parcel = honest(sweep, passage)
                if sweep.part == 2 and sweep.path[-1:] == (s.hosts["b"].peer_id,):
                    lies.append(sweep)
                    assert parcel.hidden_drafts is not None
                    return replace(parcel, hidden_drafts=parcel.hidden_drafts * np.nan)
                return parcel

            monkeypatch.setattr(sweep_carry, "parcel_of", lying)
            text, figures = await written(client, b"abc", 9, Sampling(1.0), drafts=2)
            assert len(text) == 9 and figures.missing == ()
            assert len(lies) == 1 and figures.failures > 0

    run(main())


def test_a_part_that_nobody_waits_for_is_refused(relay_model: ComposedModel) -> None:
    """Caches that do not reach to where a part begins are no caches."""
    from node.serving.compute import LostCache

    block = relay_model.blocks[1]
    assert block is not None
    sweep = replace(SWEEP, place=1, block=1, part=1)
    parcel = Parcel(np.zeros(0, np.uint8), np.zeros((2, len(sweep.stretch)), np.uint8))
    with pytest.raises(LostCache), torch.no_grad():
        compute(block, [(sweep, parcel)], [Session(block.new_cache())])
