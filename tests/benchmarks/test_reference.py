"""The end-to-end reference: it learns, it is honest, it is deterministic."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.reference import EndToEnd, ReferenceWorker
from swarm.learning.model import Block
from swarm.run import ModelShape
from tests.conftest import MakeRun

CPU = torch.device("cpu")
Periodic = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]


def test_it_learns(tiny_run: MakeRun, periodic: Periodic) -> None:
    run = tiny_run(blocks=2, width=32, steps=60, learning_rate=1e-2)
    worker = ReferenceWorker(run, CPU)
    x, y = periodic(8, 16)
    losses = [worker.step(x, y) for _ in range(60)]
    assert losses[0] > 4.5 and losses[-1] < 1.0
    log_probs = worker.head_log_probs(x)[-1]
    ce = -float(log_probs.gather(-1, y[..., None]).mean())
    assert ce == pytest.approx(losses[-1], abs=0.3)


@pytest.mark.parametrize("heads_every", [0, 1])
def test_training_is_a_function_of_the_seed(
    tiny_run: MakeRun, periodic: Periodic, heads_every: int
) -> None:
    x, y = periodic(4, 16)
    workers = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        before = torch.random.get_rng_state()
        worker = ReferenceWorker(tiny_run(), CPU, heads_every)
        for _ in range(3):
            worker.step(x, y)
        assert torch.equal(torch.random.get_rng_state(), before)
        workers.append(worker.model.state_dict())
    assert all(torch.equal(workers[0][name], workers[1][name]) for name in workers[0])
    other = ReferenceWorker(tiny_run(seed=1), CPU, heads_every).model.state_dict()
    assert not torch.equal(workers[0]["embedding.weight"], other["embedding.weight"])


def test_the_largest_seed_works(tiny_run: MakeRun) -> None:
    ReferenceWorker(tiny_run(seed=2**32 - 1), CPU)


def head_weights(worker: ReferenceWorker) -> list[torch.Tensor]:
    return [head.get_parameter("weight") for head in worker.model.heads]


def test_changing_a_byte_changes_no_prediction_before_it(tiny_run: MakeRun) -> None:
    worker = ReferenceWorker(tiny_run(), CPU, heads_every=1)
    for weight in head_weights(worker):
        torch.nn.init.normal_(weight, std=0.3, generator=torch.Generator())
    x = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    changed = x.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    for before, after in zip(worker.head_log_probs(x), worker.head_log_probs(changed), strict=True):
        assert torch.allclose(before[:, :9], after[:, :9], atol=1e-5)
        assert float((before - after)[:, 9].abs().max()) > 1e-3
        assert torch.allclose(before.exp().sum(-1), torch.ones(2, 16), atol=1e-5)


def test_every_head_is_trained(tiny_run: MakeRun, periodic: Periodic) -> None:
    worker = ReferenceWorker(tiny_run(), CPU, heads_every=1)
    assert len(worker.model.heads) == 3
    before = [weight.detach().clone() for weight in head_weights(worker)]
    worker.step(*periodic(4, 16))
    for old, new in zip(before, head_weights(worker), strict=True):
        assert not torch.equal(old, new)


def test_the_rate_follows_the_runs_schedule(tiny_run: MakeRun, periodic: Periodic) -> None:
    run = tiny_run(warmup_steps=5)
    worker = ReferenceWorker(run, CPU)
    for step in range(4):
        worker.step(*periodic(4, 16))
        rates = {worker.optimizer.learning_rate}
        assert rates == {run.training.learning_rate_at(step)}


# Its layers


@pytest.mark.parametrize("heads_every", [0, 2, 3])
def test_end_to_end_is_causal_at_every_head(heads_every: int) -> None:
    torch.manual_seed(0)
    shape = ModelShape(2, 2, 16, 2, 16)
    model = EndToEnd(shape, heads_every).requires_grad_(False)
    x = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    changed = x.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = model(x), model(changed)
    assert len(before) == {0: 1, 2: 2, 3: 2}[heads_every]
    for one, two in zip(before, after, strict=True):
        assert torch.allclose(one[:, :9], two[:, :9], atol=1e-6)
        assert float((one - two)[:, 9].abs().max()) > 1e-4


def test_end_to_end_has_the_layers_of_all_blocks() -> None:
    shape = ModelShape(3, 2, 16, 2, 16)
    model = EndToEnd(shape)
    assert len(model.layers) == 6
    layer = sum(p.numel() for p in Block(shape).layers[0].parameters())
    assert sum(p.numel() for p in model.layers.parameters()) == 6 * layer
    assert model.head_after == [5]
    assert EndToEnd(shape, 2).head_after == [1, 3, 5]
    assert EndToEnd(shape, 4).head_after == [3, 5]
