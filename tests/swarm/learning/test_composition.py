"""Composition: Euler steps, missing blocks, fitted weights, causality of the whole."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import UsageError
from swarm.learning.composition import (
    ComposedModel,
    default_weights,
    euler_embedding,
    euler_logit,
    fit_composition,
)
from swarm.learning.evaluate import honest_ce
from swarm.learning.model import Block
from swarm.learning.noise import sigma_edges, target_table
from tests.conftest import ALL_KINDS, MakeModel, MakeRun

KINDS_AND_COMPOSITIONS = [
    (objective, coupling, composition)
    for objective, coupling in ALL_KINDS
    for composition in ("logit", "embedding")
]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def windows(rows: int = 3, length: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (rows, length), generator=seeded(seed))


# Euler


@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=8), st.integers(0, 1000))
def test_euler_in_logit_space_is_the_weighted_mean(weights: list[float], seed: int) -> None:
    each = torch.randn(len(weights), 5, 7, generator=seeded(seed), dtype=torch.float64)
    each = each.log_softmax(-1)
    expected = torch.einsum("b,bnv->nv", torch.tensor(weights).double(), each) / sum(weights)
    assert torch.allclose(euler_logit(each, weights), expected, atol=1e-10)


@given(st.lists(st.sampled_from([0.0, 1.0, 2.5]), min_size=2, max_size=6).filter(any))
def test_a_weight_of_zero_leaves_the_block_out(weights: list[float]) -> None:
    each = torch.randn(len(weights), 4, generator=seeded(1), dtype=torch.float64)
    kept = [index for index, weight in enumerate(weights) if weight]
    poisoned = each.clone()
    poisoned[[index for index, weight in enumerate(weights) if not weight]] = math.nan
    expected = euler_logit(each[kept], [weights[index] for index in kept])
    assert torch.allclose(euler_logit(poisoned, weights), expected)


def test_no_weight_at_all_is_refused() -> None:
    with pytest.raises(UsageError):
        euler_logit(torch.zeros(2, 3), [0.0, 0.0])
    with pytest.raises(UsageError):
        euler_logit([], [])


@given(
    sigmas=st.lists(st.floats(0.01, 100.0), min_size=2, max_size=8, unique=True),
    seed=st.integers(0, 100),
)
def test_euler_in_embedding_space_is_exact_for_a_constant_denoiser(
    sigmas: list[float], seed: int
) -> None:
    """dz/dsigma = (z - D) / sigma has the straight solution z = D + (z0 - D) sigma / sigma0."""
    levels = sorted(sigmas, reverse=True)
    start, point = torch.randn(2, 8, generator=seeded(seed), dtype=torch.float64)
    z = start
    for sigma, after in itertools.pairwise(levels):
        z = euler_embedding(z, point, sigma, after)
    expected = point + (start - point) * levels[-1] / levels[0]
    assert torch.allclose(z, expected, atol=1e-9)


@given(st.floats(0.01, 100.0))
def test_euler_to_zero_ends_at_the_denoised_point(sigma: float) -> None:
    z, point = torch.randn(2, 8, generator=seeded(3), dtype=torch.float64)
    assert torch.allclose(euler_embedding(z, point, sigma, 0.0), point, atol=1e-12)
    assert torch.allclose(euler_embedding(z, point, sigma, sigma), z)


# The composed model


@pytest.mark.parametrize(("objective", "coupling", "composition"), KINDS_AND_COMPOSITIONS)
def test_a_byte_changes_no_prediction_before_it(
    tiny_run: MakeRun, tiny_model: MakeModel, objective: str, coupling: str, composition: str
) -> None:
    run = tiny_run(objective=objective, coupling=coupling)
    model = tiny_model(run, weights=(1.0, 1.0, 1.0), composition=composition)
    x = windows()
    changed = x.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = (model.log_probs(text, seeded(4)) for text in (x, changed))
    assert torch.allclose(before[:, :9], after[:, :9], atol=1e-5)
    assert float((before - after)[:, 9].abs().max()) > 1e-3
    assert torch.allclose(before.exp().sum(-1), torch.ones(3, 16), atol=1e-5)


@pytest.mark.parametrize(("objective", "coupling"), ALL_KINDS)
def test_caches_change_nothing(
    tiny_run: MakeRun, tiny_model: MakeModel, objective: str, coupling: str
) -> None:
    model = tiny_model(tiny_run(objective=objective, coupling=coupling), weights=(1.0, 2.0, 3.0))
    if objective == "edm":
        # z of a position is drawn when the position comes; without noise the two must agree.
        object.__setattr__(model, "_noise", lambda x, *_: torch.zeros(*x.shape, 16))
    x = windows()
    whole = model.log_probs(x)
    caches = model.new_caches()
    parts = [model.log_probs(x[:, a:b], None, caches) for a, b in ((0, 6), (6, 7), (7, 13))]
    for layer in (layer for cache in caches for layer in cache):
        layer.truncate(10)
    parts[-1] = parts[-1][:, :3]
    parts.append(model.log_probs(x[:, 10:], None, caches))
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-5)


def test_a_cached_chunk_is_causal(tiny_run: MakeRun, tiny_model: MakeModel) -> None:
    model = tiny_model(tiny_run())
    x = windows()
    changed = x.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 256
    out = []
    for text in (x, changed):
        caches = model.new_caches()
        model.log_probs(text[:, :6], None, caches)
        out.append(model.log_probs(text[:, 6:], None, caches))
    assert torch.allclose(out[0][:, :4], out[1][:, :4], atol=1e-5)
    assert float((out[0] - out[1])[:, 4].abs().max()) > 1e-3


def test_independent_blocks_compose_to_their_mean(tiny_run: MakeRun, tiny_model: MakeModel) -> None:
    model = tiny_model(tiny_run(coupling="independent"))
    x = windows()
    each = [F.log_softmax(b.logits(b.hidden(x)), -1) for b in model.blocks if b is not None]
    expected = (torch.stack(each).mean(0)).log_softmax(-1)
    assert torch.allclose(model.log_probs(x), expected, atol=1e-5)


def test_relay_passes_the_hidden_state_on(tiny_run: MakeRun, tiny_model: MakeModel) -> None:
    model = tiny_model(tiny_run(coupling="relay"))
    first, second, third = (b for b in model.blocks if b is not None)
    x = windows()
    hidden = third.hidden(x, second.hidden(x, first.hidden(x)))
    expected = F.log_softmax(third.logits(hidden), -1)
    assert torch.allclose(model.log_probs(x), expected, atol=1e-5)  # all weight on the last


def test_weights_and_temperature(tiny_run: MakeRun, tiny_model: MakeModel) -> None:
    model = tiny_model(tiny_run(), weights=(1.0, 0.0, 3.0), temperature=2.0)
    x = windows()
    each = model.block_log_probs(x)
    assert each[0] is not None and each[2] is not None
    expected = ((each[0] + 3 * each[2]) / 4 / 2.0).log_softmax(-1)
    assert torch.allclose(model.log_probs(x), expected, atol=1e-5)


def test_default_weights(tiny_run: MakeRun) -> None:
    assert default_weights(tiny_run(coupling="independent")) == (1.0, 1.0, 1.0)
    assert default_weights(tiny_run(coupling="relay")) == (0.0, 0.0, 1.0)
    assert default_weights(tiny_run(coupling="look_ahead", blocks=1)) == (1.0,)


def logits_at(
    block: Block, x: torch.Tensor, z: torch.Tensor, sigma: float, targets: torch.Tensor
) -> torch.Tensor:
    """A block's answer to z of one sigma: its own and z's evidence, or Karras' denoiser
    D = c_skip z + c_out F(c_in z, c_noise), whose data have the standard deviation 1 / 4 here."""
    if block.z_in is None:
        return block.logits(block.hidden(x)) + z @ targets.T / sigma**2
    total = sigma**2 + 0.25**2
    c_noise = torch.full((len(x),), math.log(sigma) / 4)
    raw = block.denoised(block.hidden(x, z_scaled=z / math.sqrt(total), c_noise=c_noise))
    denoised = 0.25**2 / total * z + sigma * 0.25 / math.sqrt(total) * raw
    return denoised @ targets.T * math.exp(float(block.log_scale))


@pytest.mark.parametrize("objective", ["bayes", "edm"])
def test_embedding_chain_by_hand(tiny_run: MakeRun, tiny_model: MakeModel, objective: str) -> None:
    """z from sigma_max down the edges; each block answers to it at its own sigma, and z keeps
    sigma_next / sigma of its distance from the mean of that answer."""
    run = tiny_run(objective=objective, coupling="independent", sigma_min=0.5, sigma_max=4.0)
    model = tiny_model(run, composition="embedding")
    x = windows()
    targets, edges = target_table(run.seed, 16), sigma_edges(run.noise, 3)
    z = edges[0] * torch.randn(3, 16, 16, generator=seeded(2))
    for index, block in enumerate(b for b in model.blocks if b is not None):
        expected = logits_at(block, x, z, edges[index], targets).log_softmax(-1)
        mean = expected.exp() @ targets
        z = mean + (z - mean) * (edges[index + 1] / edges[index])
    assert torch.allclose(model.log_probs(x, seeded(2)), expected, atol=1e-4)


def test_the_mean_of_edm_blocks_by_hand(tiny_run: MakeRun, tiny_model: MakeModel) -> None:
    """Each starts from noise of its own, of the highest sigma between its edges."""
    run = tiny_run(objective="edm", coupling="independent", sigma_min=0.5, sigma_max=4.0)
    model = tiny_model(run, weights=(1.0, 2.0, 3.0))
    x, noise = windows(), seeded(2)
    targets, edges = target_table(run.seed, 16), sigma_edges(run.noise, 3)
    expected = torch.zeros(3, 16, 256)
    for index, block in enumerate(b for b in model.blocks if b is not None):
        z = edges[index] * torch.randn(3, 16, 16, generator=noise)
        log_prob = logits_at(block, x, z, edges[index], targets).log_softmax(-1)
        expected += model.weights[index] / 6 * log_prob
    assert torch.allclose(model.log_probs(x, seeded(2)), expected.log_softmax(-1), atol=1e-4)


# Missing blocks


@pytest.mark.parametrize("missing", [(0,), (1,), (2,), (0, 2)])
def test_without_a_block_independent_is_the_mean_of_the_rest(
    tiny_run: MakeRun, tiny_model: MakeModel, missing: tuple[int, ...]
) -> None:
    model = tiny_model(tiny_run(coupling="independent"))
    x = windows()
    each = model.block_log_probs(x)
    rest = [lp for i, lp in enumerate(each) if i not in missing and lp is not None]
    expected = torch.stack(rest).mean(0).log_softmax(-1)
    left = model.without(*missing)
    assert torch.allclose(left.log_probs(x), expected, atol=1e-5)
    assert [lp is None for lp in left.block_log_probs(x)] == [i in missing for i in range(3)]


@pytest.mark.parametrize("composition", ["logit", "embedding"])
@pytest.mark.parametrize(("objective", "coupling"), ALL_KINDS)
@pytest.mark.parametrize("missing", [(0,), (1,), (2,), (0, 1), (1, 2)])
def test_without_a_block_the_model_still_answers(
    tiny_run: MakeRun,
    tiny_model: MakeModel,
    objective: str,
    coupling: str,
    composition: str,
    missing: tuple[int, ...],
) -> None:
    run = tiny_run(objective=objective, coupling=coupling)
    model = tiny_model(run, composition=composition).without(*missing)
    log_probs = model.log_probs(windows(), seeded(0))
    assert torch.isfinite(log_probs).all()
    assert torch.allclose(log_probs.exp().sum(-1), torch.ones(3, 16), atol=1e-5)
    gone = [w for w, b in zip(model.weights, model.blocks, strict=True) if b is None]
    assert gone == [0.0] * len(missing)
    caches = model.new_caches()
    model.log_probs(windows()[:, :4], seeded(0), caches)
    assert torch.isfinite(model.log_probs(windows()[:, 4:5], seeded(0), caches)).all()


def test_all_weight_on_missing_blocks_makes_the_rest_equals(
    tiny_run: MakeRun, tiny_model: MakeModel
) -> None:
    model = tiny_model(tiny_run(coupling="relay")).without(2)  # which had all the weight
    assert model.weights == (1.0, 1.0, 0.0)
    assert model.without(0).weights == (0.0, 1.0, 0.0)
    with pytest.raises(UsageError):
        model.without(0, 1)


def test_a_missing_block_leaves_no_gap_in_the_noise(
    tiny_run: MakeRun, tiny_model: MakeModel
) -> None:
    """z reaches each block that is there with the sigma which that block is told."""
    run = tiny_run(coupling="independent", sigma_min=0.5, sigma_max=4.0)
    whole = tiny_model(run, composition="embedding")
    x = windows()
    targets, edges = target_table(run.seed, 16), sigma_edges(run.noise, 3)
    first, _, third = whole.blocks
    assert first is not None and third is not None
    z = edges[0] * torch.randn(3, 16, 16, generator=seeded(2))
    guess = (first.logits(first.hidden(x)) + z @ targets.T / edges[0] ** 2).softmax(-1)
    z = euler_embedding(z, guess @ targets, edges[0], edges[2])
    logits = third.logits(third.hidden(x)) + z @ targets.T / edges[2] ** 2
    assert torch.allclose(
        whole.without(1).log_probs(x, seeded(2)), logits.log_softmax(-1), atol=1e-4
    )
    z = edges[2] * torch.randn(3, 16, 16, generator=seeded(2))
    logits = third.logits(third.hidden(x)) + z @ targets.T / edges[2] ** 2
    assert torch.allclose(
        whole.without(0, 1).log_probs(x, seeded(2)), logits.log_softmax(-1), atol=1e-4
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"weights": (1.0, 1.0)},
        {"weights": (1.0, -1.0, 1.0)},
        {"weights": (1.0, math.nan, 1.0)},
        {"weights": (1.0, math.inf, 1.0)},
        {"temperature": 0.0},
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"composition": "telepathy"},
    ],
)
def test_a_bad_composition_is_refused(
    tiny_run: MakeRun, tiny_model: MakeModel, changes: dict[str, Any]
) -> None:
    """A manifest that a stranger wrote can hold any of these."""
    with pytest.raises(UsageError):
        tiny_model(tiny_run(), **changes)


def test_no_block_at_all_is_refused(tiny_run: MakeRun) -> None:
    with pytest.raises(UsageError):
        ComposedModel(tiny_run(), [None, None, None])


# Noise


@pytest.mark.parametrize("composition", ["logit", "embedding"])
def test_predictions_are_a_function_of_the_noise_seed(
    tiny_run: MakeRun, tiny_model: MakeModel, composition: str
) -> None:
    model = tiny_model(tiny_run(objective="edm", coupling="independent"), composition=composition)
    x = windows()
    first, again, other = (model.log_probs(x, seeded(s)) for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_without_a_generator_the_global_one_is_left_alone(
    tiny_run: MakeRun, tiny_model: MakeModel
) -> None:
    model = tiny_model(tiny_run(objective="edm", coupling="independent"))
    x = windows()
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = model.log_probs(x)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(model.log_probs(x), first)
    fitted = [fit_composition(model, x[:, :-1], x[:, 1:]).weights for _ in range(2)]
    assert fitted[0] == fitted[1]


# Fitting


def ce_on(model: ComposedModel, x: torch.Tensor, y: torch.Tensor) -> float:
    log_probs = model.log_probs(x)
    return -float(log_probs.gather(-1, y[..., None]).double().mean())


def written_by(model: ComposedModel, block: int, x: torch.Tensor) -> torch.Tensor:
    """Targets drawn from one block's own predictions: that block is then the best predictor."""
    log_probs = model.block_log_probs(x)[block]
    assert log_probs is not None
    drawn = torch.multinomial(log_probs.exp().flatten(0, 1), 1, generator=seeded(5))
    return drawn.view(x.shape)


@pytest.mark.parametrize(("objective", "coupling"), ALL_KINDS)
@pytest.mark.parametrize("writer", [0, 2])
def test_fit_is_never_worse_than_its_start(
    tiny_run: MakeRun, tiny_model: MakeModel, objective: str, coupling: str, writer: int
) -> None:
    model = tiny_model(tiny_run(objective=objective, coupling=coupling))
    x = windows(rows=24)
    y = written_by(model, writer, x)
    fitted = fit_composition(model, x, y)
    equal = replace(model, weights=(1.0, 1.0, 1.0))
    assert ce_on(fitted, x, y) <= min(ce_on(model, x, y), ce_on(equal, x, y)) + 1e-5
    assert all(weight >= 0 for weight in fitted.weights) and fitted.temperature > 0
    if objective != "edm":
        assert fitted.weights[writer] == max(fitted.weights)


@pytest.mark.parametrize("writer", [0, 1, 2])
def test_fit_is_the_optimum(tiny_run: MakeRun, tiny_model: MakeModel, writer: int) -> None:
    """The conditions of an optimum with a >= 0, where a = weights / temperature."""
    model = tiny_model(tiny_run())
    x = windows(rows=24)
    y = written_by(model, writer, x)
    fitted = fit_composition(model, x, y)
    a = torch.tensor(fitted.weights, dtype=torch.float64) / sum(fitted.weights)
    a = (a / fitted.temperature).requires_grad_()
    each = torch.stack([lp for lp in model.block_log_probs(x) if lp is not None]).double()
    loss = F.cross_entropy(torch.einsum("b,bnv->nv", a, each.flatten(1, 2)), y.flatten())
    (slope,) = torch.autograd.grad(loss, a)
    for weight, gradient in zip(a.tolist(), slope.tolist(), strict=True):
        assert gradient > -2e-3 and (weight < 1e-3 or abs(gradient) < 2e-3)


def test_fit_finds_the_temperature(tiny_run: MakeRun, tiny_model: MakeModel) -> None:
    """Text written at temperature 2 by the last of the blocks is fitted with about that."""
    model = tiny_model(tiny_run(blocks=1))
    x = windows(rows=200)
    hot = (model.log_probs(x) / 2).softmax(-1).flatten(0, 1)
    y = torch.multinomial(hot, 1, generator=seeded(6)).view(x.shape)
    assert fit_composition(model, x, y).temperature == pytest.approx(2.0, rel=0.15)


def test_fit_survives_blocks_that_are_wrong_on_purpose(
    tiny_run: MakeRun, tiny_model: MakeModel
) -> None:
    """Every block worse than chance: the best weight is 0 for all, which cannot be divided by."""
    model = tiny_model(tiny_run(coupling="independent"))
    x = windows(rows=24)
    each = [lp for lp in model.block_log_probs(x) if lp is not None]
    y = torch.stack(each).mean(0).argmin(-1)
    fitted = fit_composition(model, x, y)
    assert ce_on(fitted, x, y) <= ce_on(model, x, y) + 1e-5
    assert math.isfinite(fitted.temperature) and fitted.temperature > 0
    assert all(math.isfinite(weight) and weight >= 0 for weight in fitted.weights)


def test_fit_gives_missing_blocks_nothing(tiny_run: MakeRun, tiny_model: MakeModel) -> None:
    model = tiny_model(tiny_run(coupling="independent")).without(1)
    x = windows(rows=24)
    y = written_by(model, 2, x)
    fitted = fit_composition(model, x, y)
    assert fitted.weights[1] == 0.0 and fitted.weights[2] > fitted.weights[0]
    assert honest_ce(fitted, [torch.cat([x, y[:, -1:]], 1)]).block_ce_nats[1] is None


def test_fit_leaves_out_what_is_worth_little(tiny_run: MakeRun, tiny_model: MakeModel) -> None:
    """Of a text that the last block wrote the others know nothing: their weight is spared."""
    model = tiny_model(tiny_run())
    x = windows(rows=24)
    y = written_by(model, 2, x)
    whole = fit_composition(model, x, y)
    lean = fit_composition(model, x, y, spare_nats=0.01)
    assert lean.weights == (0.0, 0.0, 1.0)
    assert ce_on(lean, x, y) < ce_on(whole, x, y) + 0.01
    # What is worth something stays.
    mixed = torch.cat([written_by(model, b, x[8 * b : 8 * b + 8]) for b in range(3)])
    assert sum(w > 0 for w in fit_composition(model, x, mixed, spare_nats=1e-6).weights) > 1
