"""Accepting drafts: what is kept is the model's, whatever the drafts were."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.generate import Sampling
from swarm.speculative import (
    accept_greedy,
    accept_sampled,
    best_draft,
    choose_rows,
    importance,
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
    drafted = torch.tensor([[-1.0, -2.0], [-0.5, -2.0], [-4.0, -4.0 - torch.log(torch.tensor(2))]])
    assert best_draft(scores) == 1
    assert torch.allclose(importance(scores, drafted), torch.tensor([0.25, 0.25, 0.5]).double())
    only = torch.tensor([[0.0], [-1e4], [-1e4]])
    generator = torch.Generator().manual_seed(0)
    assert resampled_draft(only, torch.zeros(3, 1), generator) == 0
