"""Honest CE: against a hand computation, and blind to the targets it is measured on."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from protocol.errors import UsageError
from swarm.learning.composition import ComposedModel
from swarm.learning.evaluate import Evaluation, honest_ce, nll_sum, teacher_forced_ce
from swarm.learning.worker import initial_block
from tests.conftest import ALL_KINDS, MakeModel, MakeRun


def windows(rows: int = 3, length: int = 17, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_bits_per_byte_and_perplexity() -> None:
    uniform = Evaluation(math.log(256), (None,), 10)
    assert uniform.bits_per_byte == pytest.approx(8.0)
    assert uniform.perplexity == pytest.approx(256.0)
    assert Evaluation(0.0, (), 1).perplexity == 1.0
    assert Evaluation(5000.0, (), 1).perplexity == math.inf  # a model that diverged


def test_every_block_has_bits_and_perplexity_of_its_own() -> None:
    found = Evaluation(1.0, (math.log(4), None, 5000.0), 10)
    assert found.block_bits_per_byte[:2] == (pytest.approx(2.0), None)
    assert found.block_perplexity == (pytest.approx(4.0), None, math.inf)


def test_nll_sum() -> None:
    log_probs = torch.tensor([[[0.5, 0.5], [0.25, 0.75]]]).log()
    assert nll_sum(log_probs, torch.tensor([[0, 1]])) == pytest.approx(-math.log(0.5 * 0.75))


def test_honest_ce_of_a_known_model_by_hand(tiny_run: MakeRun) -> None:
    """A block that always predicts p: its CE is the mean of -log p of the bytes from the second."""
    run = tiny_run(blocks=2, coupling="independent")
    generator = np.random.default_rng(0)
    tables = [generator.dirichlet(np.ones(256)) for _ in range(2)]
    blocks = [initial_block(run, index).requires_grad_(False) for index in range(2)]
    for block, table in zip(blocks, tables, strict=True):
        block.head.weight.zero_()
        block.head.bias.copy_(torch.from_numpy(np.log(table)))
    batches = [windows(3, seed=1), windows(5, 9, seed=2)]  # of unequal size
    found = honest_ce(ComposedModel(run, blocks), batches)
    y = np.concatenate([batch[:, 1:].numpy().ravel() for batch in batches])
    assert found.size_bytes == len(y) == 3 * 16 + 5 * 8
    for ce, table in zip(found.block_ce_nats, tables, strict=True):
        assert ce == pytest.approx(-np.log(table[y]).mean(), abs=1e-5)
    mean = (np.log(tables[0]) + np.log(tables[1])) / 2
    mean -= np.log(np.exp(mean).sum())
    assert found.ce_nats == pytest.approx(-mean[y].mean(), abs=1e-5)


@pytest.mark.parametrize("composition", ["logit", "embedding"])
@pytest.mark.parametrize(("objective", "coupling"), ALL_KINDS)
def test_the_targets_do_not_move_the_prediction(
    tiny_run: MakeRun, tiny_model: MakeModel, objective: str, coupling: str, composition: str
) -> None:
    """Another last byte is another target of the same input: only its own term may change."""
    run = tiny_run(objective=objective, coupling=coupling)
    model = tiny_model(run, composition=composition)
    first = windows()
    log_probs = model.log_probs(first[:, :-1], torch.Generator().manual_seed(0))
    for shift in (1, 100):
        other = first.clone()
        other[:, -1] = (other[:, -1] + shift) % 256
        difference = honest_ce(model, [other]).ce_nats - honest_ce(model, [first]).ce_nats
        at_end = log_probs[:, -1]
        expected = nll_sum(at_end, other[:, -1]) - nll_sum(at_end, first[:, -1])
        assert difference * 48 == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("objective", "coupling"), ALL_KINDS)
def test_nobody_predicts_random_bytes(
    tiny_run: MakeRun, tiny_model: MakeModel, objective: str, coupling: str
) -> None:
    """Beating log 256 on random bytes is cheating. With z of the target a block does just that."""
    run = tiny_run(objective=objective, coupling=coupling, sigma_min=0.1, sigma_max=0.2)
    model = tiny_model(run, weights=(1.0, 1.0, 1.0))
    text = [windows(rows=16, seed=s) for s in range(4)]
    honest = honest_ce(model, text)
    for ce in (honest.ce_nats, *honest.block_ce_nats):
        assert ce is not None and ce > math.log(256) - 0.1
    forced = teacher_forced_ce(model, text, 1)
    if objective == "plain":
        assert forced == pytest.approx(honest.block_ce_nats[1], abs=1e-4)
    elif objective == "bayes":
        assert forced < math.log(256) - 2.0  # so the test could have caught it


def test_no_way_to_hand_targets_to_a_prediction() -> None:
    for method in (ComposedModel.log_probs, ComposedModel.block_log_probs, ComposedModel.compose):
        names = set(inspect.signature(method).parameters)
        assert names <= {"self", "x", "generator", "caches", "each"}


def test_honest_ce_is_the_same_again(tiny_run: MakeRun, tiny_model: MakeModel) -> None:
    model = tiny_model(tiny_run(objective="edm", coupling="independent"))
    assert honest_ce(model, [windows()]) == honest_ce(model, [windows()])


def test_a_missing_block_has_no_ce(tiny_run: MakeRun, tiny_model: MakeModel) -> None:
    found = honest_ce(tiny_model(tiny_run()).without(1), [windows()])
    assert [ce is None for ce in found.block_ce_nats] == [False, True, False]
    with pytest.raises(UsageError):
        teacher_forced_ce(tiny_model(tiny_run()).without(1), [windows()], 1)


def test_nothing_to_evaluate_is_refused(tiny_run: MakeRun, tiny_model: MakeModel) -> None:
    with pytest.raises(UsageError):
        honest_ce(tiny_model(tiny_run()), [])
    with pytest.raises(UsageError):
        teacher_forced_ce(tiny_model(tiny_run()), [], 0)


def test_teacher_forced_ce_reads_the_relayed_state(
    tiny_run: MakeRun, tiny_model: MakeModel
) -> None:
    """With z removed it must be the honest CE of the same block in the same chain."""
    model = tiny_model(tiny_run(objective="plain", coupling="relay"))
    text = [windows(), windows(seed=1)]
    honest = honest_ce(model, text).block_ce_nats
    for index in range(3):
        assert teacher_forced_ce(model, text, index) == pytest.approx(honest[index], abs=1e-5)


def test_teacher_forced_ce_is_of_the_blocks_own_sigmas(
    tiny_run: MakeRun, tiny_model: MakeModel
) -> None:
    """The lower its sigmas, the more a block reads out of its target: no other's will do."""
    run = tiny_run(coupling="independent", sigma_min=0.1, sigma_max=10.0, overlap=0.0)
    model = tiny_model(run)
    equal = replace(model, blocks=[model.blocks[0]] * 3)
    text = [windows(rows=16), windows(rows=5, seed=1)]
    high, middle, low = (teacher_forced_ce(equal, text, index) for index in range(3))
    assert high - 0.5 > middle > low + 0.5
