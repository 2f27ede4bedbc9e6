"""Sweeps through a chain in one process: the same numbers, the same text, the same distribution."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from swarm.learning.composition import ComposedModel
from swarm.writing.generate import Sampling, generate
from swarm.writing.speculative import sampled_log_probs
from swarm.writing.sweep import DraftOrder, Passage, byte_scores, draft, finish, score
from swarm.writing.writer import Ask
from tests.conftest import MakeModel, MakeRun
from tests.support.sweep_chain import Chain, write_many_verified, write_one_sweep, write_verified

GREEDY = Sampling(temperature=0.0)
COUPLINGS = ("independent", "look_ahead")
NEAR_TIE_NATS = 1e-4


@pytest.fixture(scope="module", params=COUPLINGS)
def model(
    request: pytest.FixtureRequest, tiny_run: MakeRun, tiny_model: MakeModel
) -> ComposedModel:
    """Weights on several blocks in both couplings: relay alone would leave most of them at 0."""
    run = tiny_run(coupling=request.param)
    return tiny_model(run, weights=(0.5, 1.0, 2.0), temperature=1.3)


def whole_text(passage: Passage, row: int) -> torch.Tensor:
    return torch.cat([passage.context, passage.drafts[row]])[None]


@pytest.mark.parametrize("drafts", [1, 3])
@pytest.mark.parametrize("bonus", [False, True])
def test_a_sweep_scores_as_the_composed_model(
    model: ComposedModel, drafts: int, bonus: bool
) -> None:
    ask = Ask(0, b"abcde", 7, seed=3)
    order = DraftOrder(drafts, ask.length, Sampling(1.0, seed=3))
    passage = Chain(model)._pass(ask, order, bonus=bonus, keep=False)
    composed = finish(passage, model.temperature)
    assert composed.shape == (drafts, 8 if bonus else 7, 256)
    for row in range(drafts):
        x = whole_text(passage, row)
        expected = model.log_probs(x)[0, 4:] if bonus else model.log_probs(x)[0, 4:-1]
        assert torch.allclose(composed[row], expected, atol=1e-5)
        first = model.blocks[0]
        assert first is not None and passage.drafted is not None
        alone = first.logits(first.hidden(x)).log_softmax(-1)[0, 4:-1]
        assert torch.allclose(passage.drafted[row], alone, atol=1e-5)


def test_several_sweeps_at_once_are_the_same_as_one_by_one(model: ComposedModel) -> None:
    first, second, *_ = model.blocks
    assert first is not None and second is not None
    orders = [DraftOrder(2, 5, Sampling(1.0, seed=s)) for s in (1, 2)]
    empty = torch.zeros(0, 0, dtype=torch.int64)
    passages = [Passage(torch.tensor(list(text)), empty) for text in (b"abcd", b"wxyz")]
    together = score(second, draft(first, passages, orders, 1.0, False), 2.0, False)
    for passage, order, found in zip(passages, orders, together, strict=True):
        [alone] = score(second, draft(first, [passage], [order], 1.0, False), 2.0, False)
        assert torch.equal(alone.drafts, found.drafts)
        assert alone.state is not None and found.state is not None
        assert torch.allclose(alone.state, found.state, atol=1e-5)
        assert found.weight == 3.0
        assert torch.allclose(found.state.exp().sum(-1), torch.ones(2, 5), atol=1e-5)


def test_a_block_of_weight_zero_only_relays(tiny_run: MakeRun, tiny_model: MakeModel) -> None:
    model = tiny_model(tiny_run(coupling="relay"))
    first = model.blocks[0]
    assert first is not None
    passage = Passage(torch.tensor([1, 2]), torch.zeros(0, 0, dtype=torch.int64))
    [out] = draft(first, [passage], [DraftOrder(1, 3, GREEDY)], 0.0, True)
    assert out.state is None and out.weight == 0.0 and out.hidden_drafts is not None


def margin_nats(model: ComposedModel, text: bytes, prompt: bytes) -> float:
    """How far the composed model's two likeliest bytes are apart where a text goes on."""
    window = text[-model.run.model.context :] if len(text) > len(prompt) else prompt
    top = model.log_probs(torch.tensor([list(window)]))[0, -1].topk(2).values
    return float(top[0] - top[1])


@pytest.mark.parametrize("draft_length", [0, 1, 5, 40])
@pytest.mark.parametrize("prompts", [5, pytest.param(25, marks=pytest.mark.long)])
def test_exact_greedy_is_local_generation(
    model: ComposedModel, prompts: int, draft_length: int
) -> None:
    rng = random.Random(draft_length)
    near_ties = sweeps = 0
    for _ in range(prompts):  # times 2 couplings and 4 draft lengths: 200 in all
        prompt = rng.randbytes(rng.randrange(0, 24))
        expected = bytes(generate(model, prompt, 24, GREEDY))  # longer than a context of 16
        found, count = write_verified(model, prompt, 24, draft_length, GREEDY)
        sweeps += count
        if found != expected:
            at = next(i for i in range(24) if found[i] != expected[i])
            assert margin_nats(model, prompt + expected[:at], prompt) < NEAR_TIE_NATS
            near_ties += 1
    assert near_ties <= 1
    assert sweeps == prompts * 24 if draft_length == 0 else sweeps <= prompts * 24


def test_a_drafter_that_agrees_saves_sweeps(tiny_run: MakeRun, tiny_model: MakeModel) -> None:
    model = tiny_model(tiny_run(), weights=(20.0, 1.0, 1.0))
    expected = bytes(generate(model, b"abc", 13, GREEDY))
    written, sweeps = write_verified(model, b"abc", 13, 12, GREEDY)
    assert written == expected and sweeps < 6


def test_a_missing_block_is_left_out(model: ComposedModel) -> None:
    for missing in range(3):
        left = model.without(missing)
        expected = bytes(generate(left, b"abc", 12, GREEDY))
        assert write_verified(left, b"abc", 12, 6, GREEDY)[0] == expected


def distribution_of_pairs(model: ComposedModel, prompt: bytes, sampling: Sampling) -> torch.Tensor:
    """The exact probabilities of all 65536 next two bytes."""
    first = model.log_probs(torch.tensor([list(prompt)]))[:, -1]
    texts = torch.tensor([[*prompt, byte] for byte in range(256)])
    second = model.log_probs(texts)[:, -1]
    both = sampled_log_probs(first, sampling).T + sampled_log_probs(second, sampling)
    return both.exp()


@pytest.mark.parametrize("top_k", [0, 6])
def test_exact_sampling_has_the_composed_distribution(model: ComposedModel, top_k: int) -> None:
    """Chi-square of pairs of bytes against the composed model, and against the drafter alone."""
    sampling = Sampling(0.7, top_k=top_k)
    samples, prompt = 4000, b"swarm"
    exact = distribution_of_pairs(model, prompt, sampling)
    counts = torch.zeros(256, 256)
    samplings = [replace(sampling, seed=seed) for seed in range(samples)]
    for written in write_many_verified(model, prompt, 2, 2, samplings):
        counts[written[0], written[1]] += 1
    assert chi_square_z(counts.flatten(), exact.flatten(), samples) < 4.0
    alone = distribution_of_pairs(model.without(1, 2), prompt, sampling)
    assert chi_square_z(counts.flatten(), alone.flatten(), samples) > 20.0  # the test can tell


def chi_square_z(counts: torch.Tensor, exact: torch.Tensor, samples: int) -> float:
    """How many standard deviations chi-square is above its mean; rare cells are one cell."""
    expected = exact.double() * samples
    often = expected >= 5.0
    seen = torch.cat([counts[often].double(), counts[~often].double().sum()[None]])
    wanted = torch.cat([expected[often], expected[~often].sum()[None]])
    wanted = wanted.clamp_min(1e-3)
    degrees = len(seen) - 1
    chi = float(((seen - wanted) ** 2 / wanted).sum())
    return (chi - degrees) / max(1.0, 2 * degrees) ** 0.5


def test_one_sweep_with_one_draft_is_the_drafter_alone(model: ComposedModel) -> None:
    """K=1 is the control: nothing is chosen, so it is what host 1 writes by itself."""
    alone = bytes(generate(model.without(1, 2), b"abc", 10, GREEDY))
    written, sweeps = write_one_sweep(model, b"abc", 10, 1, GREEDY)
    assert (written, sweeps) == (alone, 1)


def composed_score(model: ComposedModel, prompt: bytes, text: bytes) -> float:
    x = torch.tensor([list(prompt + text)])
    log_probs = model.log_probs(x)[:, len(prompt) - 1 : -1]
    return float(byte_scores(log_probs, x[:, len(prompt) :], GREEDY).sum())


def test_more_drafts_are_never_worse_when_greedy(model: ComposedModel) -> None:
    better = 0
    for seed in range(8):
        sampling = Sampling(0.0, seed=seed)
        one, _ = write_one_sweep(model, b"abc", 10, 1, sampling)
        many, sweeps = write_one_sweep(model, b"abc", 10, 16, sampling)
        assert sweeps == 1
        gain = composed_score(model, b"abc", many) - composed_score(model, b"abc", one)
        assert gain > -1e-4
        better += gain > 0.1
    assert better > 0


def test_resampled_drafts_come_closer_to_the_composed_distribution(model: ComposedModel) -> None:
    sampling, prompt, samples = Sampling(1.0), b"abc", 150
    distance = {}
    exact = model.log_probs(torch.tensor([list(prompt)]))[0, -1].exp()

    def off(counts: torch.Tensor) -> float:
        return float((counts / samples - exact).abs().sum()) / 2

    generator = torch.Generator().manual_seed(0)
    own = torch.multinomial(exact.expand(50, -1), samples, True, generator=generator)
    floor = sum(off(torch.bincount(row, minlength=256)) for row in own) / len(own)  # of so few
    for drafts in (1, 32):
        counts = torch.zeros(256)
        for seed in range(samples):
            written, _ = write_one_sweep(model, prompt, 1, drafts, replace(sampling, seed=seed))
            counts[written[0]] += 1
        distance[drafts] = off(counts) - floor
    assert distance[32] < 0.5 * distance[1]


def test_a_long_output_takes_several_sweeps(model: ComposedModel) -> None:
    written, sweeps = write_one_sweep(model, b"x" * 40, 30, 2, Sampling(1.0))
    assert len(written) == 30 and sweeps == 4  # 8, half a context, at a time
