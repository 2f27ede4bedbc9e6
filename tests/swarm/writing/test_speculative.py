"""Accepting drafts: what is kept is the model's, whatever the drafts were."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from swarm.writing.generate import Sampling
from swarm.writing.speculative import (
    accept_greedy,
    accept_sampled,
    best_draft,
    choose_rows,
    importance,
    left_over,
    prefix_chances,
    resampled_draft,
    sampled_log_probs,
)

bytes_list = st.lists(st.integers(0, 255), max_size=12)


@given(bytes_list, st.data())
def test_greedy_keeps_a_prefix_and_adds_the_models_byte(draft: list[int], data: st.DataObject):
    best = data.draw(st.lists(st.integers(0, 255), min_size=len(draft) + 1, max_size=13))
    kept = accept_greedy(draft, best)
    assert 1 <= len(kept) <= len(draft) + 1
    assert kept == best[: len(kept)]
    assert len(kept) == len(draft) + 1 or draft[len(kept) - 1] != best[len(kept) - 1]


@given(bytes_list)
def test_a_draft_of_the_model_itself_is_kept_whole(draft: list[int]) -> None:
    assert accept_greedy(draft, [*draft, 7]) == [*draft, 7]


def random_log_probs(rows: int, seed: int, spread: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(rows, 256, generator=generator)).log_softmax(-1)


@given(st.integers(0, 2**31), st.integers(0, 6), st.floats(0.1, 3.0), st.integers(0, 256))
def test_sampled_acceptance_is_well_formed(seed: int, length: int, temperature: float, k: int):
    sampling = Sampling(temperature, top_k=k)
    q, p = random_log_probs(length, seed), random_log_probs(length + 1, seed + 1)
    generator = torch.Generator().manual_seed(seed)
    draft = choose_rows(q, sampling, generator).tolist() if length else []
    kept = accept_sampled(draft, q, p, sampling, generator)
    assert 1 <= len(kept) <= length + 1 and kept[:-1] == draft[: len(kept) - 1]
    allowed = sampled_log_probs(p, sampling).isfinite()
    assert all(bool(allowed[place, byte]) for place, byte in enumerate(kept))


@given(st.integers(0, 2**31))
def test_a_drafter_equal_to_the_model_is_never_refused(seed: int) -> None:
    sampling = Sampling(0.9)
    p = random_log_probs(5, seed)
    generator = torch.Generator().manual_seed(seed)
    draft = choose_rows(p[:4], sampling, generator).tolist()
    assert accept_sampled(draft, p[:4], p, sampling, generator)[:4] == draft


def test_acceptance_has_the_models_distribution() -> None:
    """One drafted byte, 1500 times, against p by total variation; q is far from p."""
    sampling = Sampling(1.0, top_k=8)
    q, p = random_log_probs(1, 1), random_log_probs(2, 2)
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(256)
    for _ in range(1500):
        draft = choose_rows(q, sampling, generator).tolist()
        counts[accept_sampled(draft, q, p, sampling, generator)[0]] += 1
    exact = sampled_log_probs(p[0], sampling).exp()
    assert float((counts / 1500 - exact).abs().sum()) / 2 < 0.05


def test_a_liar_about_q_cannot_stop_the_text() -> None:
    """A drafter that gives a byte of its own no probability: still bytes that p allows."""
    p = random_log_probs(2, 3)
    q = torch.full((1, 256), -1e4)
    q[0, 5] = 0.0
    generator = torch.Generator().manual_seed(0)
    for byte in range(256):
        assert 1 <= len(accept_sampled([byte], q, p, Sampling(1.0), generator)) <= 2


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(0.5), Sampling(1.0, top_k=3)])
def test_rows_are_chosen_as_a_single_byte_is(sampling: Sampling) -> None:
    log_probs = random_log_probs(1, 5)
    for seed in range(20):
        one = sampling.choose(log_probs[0], torch.Generator().manual_seed(seed))
        rows = choose_rows(log_probs, sampling, torch.Generator().manual_seed(seed))
        assert rows.tolist() == [one]


def test_the_likeliest_draft_and_the_weights() -> None:
    scores = torch.tensor([[-1.0, -2.0], [-0.5, -2.0], [-4.0, -4.0]])
    drafted = torch.tensor([-3.0, -2.5, -8.0 - torch.log(torch.tensor(2))])
    assert best_draft(scores) == 1
    assert torch.allclose(importance(scores, drafted), torch.tensor([0.25, 0.25, 0.5]).double())
    only = torch.tensor([[0.0], [-1e4], [-1e4]])
    generator = torch.Generator().manual_seed(0)
    assert resampled_draft(only, torch.zeros(3), generator) == 0


def _texts(alphabet: int, length: int) -> list[tuple[int, ...]]:
    return list(itertools.product(range(alphabet), repeat=length))


def test_a_verified_draft_has_exactly_the_models_distribution() -> None:
    """Every draft, every fate of it, every byte after: no sampling, the whole distribution."""
    alphabet, length = 3, 3
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)

        def table(generator: torch.Generator = generator) -> dict[tuple[int, ...], Tensor]:
            prefixes = [t for n in range(length + 1) for t in _texts(alphabet, n)]
            draws = torch.randn(len(prefixes), alphabet, generator=generator, dtype=torch.float64)
            return dict(zip(prefixes, draws.softmax(-1), strict=True))

        p, q = table(), table()

        def chance(of: dict[tuple[int, ...], Tensor], text: tuple[int, ...], start: int) -> float:
            return math.prod(float(of[text[:n]][text[n]]) for n in range(start, len(text)))

        made = dict.fromkeys(_texts(alphabet, length + 1), 0.0)
        plain = together = 0.0  # bytes of the draft that are kept, one by one and as a whole
        for draft in _texts(alphabet, length):
            along = [draft[:n] for n in range(length + 1)]
            model, drafter = (torch.stack([of[t] for t in along]) for of in (p, q))
            weights, chances = prefix_chances(draft, model, drafter[:-1])
            drawn, one_by_one = chance(q, draft, 0), 1.0
            for n in range(length):
                one_by_one *= min(1.0, float(model[n, draft[n]] / drafter[n, draft[n]]))
                plain += drawn * one_by_one
            for kept in range(length + 1):
                fate = drawn * (chances[kept - 1] if kept else 1.0)
                fate *= math.prod(1.0 - later for later in chances[kept:])
                together += fate * kept
                last = kept == length
                left = model[kept] if last else left_over(weights[kept], model[kept], drafter[kept])
                for text in made:
                    if text[:kept] == draft[:kept]:
                        byte = float(left[text[kept]] / left.sum())
                        made[text] += fate * byte * chance(p, text, kept + 1)
        for text, found in made.items():
            assert math.isclose(found, chance(p, text, 0), abs_tol=1e-12)
        assert together >= plain - 1e-12


def test_the_chances_of_a_draft_of_the_model_itself() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(4, 256, generator=generator, dtype=torch.float64).softmax(-1)
    weights, chances = prefix_chances([5, 6, 7], p, p[:-1])
    assert weights == [1.0] * 4 and chances == [1.0] * 3
