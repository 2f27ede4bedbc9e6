"""Muon's arithmetic against the singular value decomposition, who is moved by what, and state."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from swarm.learning import optimizer
from swarm.learning.model import Block
from swarm.learning.optimizer import MOMENTUM, STEP_RMS, BlockOptimizer, Group, Muon, orthogonalised
from swarm.learning.worker import initial_block
from swarm.run import Training
from tests.conftest import MakeRun

MUON = Training(optimizer="muon")
INNER = ("qkv.weight", "attention_out.weight", "up.weight", "down.weight", "relay_in.weight")


def matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def with_gradients(block: Block, seed: int = 0) -> Block:
    generator = torch.Generator().manual_seed(seed)
    for parameter in block.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return block


@given(
    rows=st.integers(1, 12),
    more=st.integers(0, 12),
    scale=st.sampled_from([1e-6, 1.0, 1e4]),
    seed=st.integers(0, 1000),
)
def test_directions_stay_and_their_lengths_become_one(
    rows: int, more: int, scale: float, seed: int
) -> None:
    """U S V^T -> U f(S) V^T: the same singular vectors, singular values near one."""
    # Well conditioned: a singular value that is next to nothing stays small, as it should.
    u, _, v = torch.linalg.svd(matrix(rows, rows + more, seed).double(), full_matrices=False)
    given_values = torch.linspace(1.0, 0.2, rows, dtype=torch.float64)
    x = ((u * given_values) @ v * scale).float()
    made = orthogonalised(x[None])[0].double()
    inside = u.T @ made @ v.T  # diagonal if the singular vectors are the same
    assert torch.allclose(inside, torch.diag(inside.diagonal()), atol=2e-3)
    assert inside.diagonal().min() > 0.6 and inside.diagonal().max() < 1.3


def test_no_gradient_gives_no_direction() -> None:
    assert not orthogonalised(torch.zeros(2, 3, 4)).any()


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (8, 32), (32, 8)])
def test_the_first_step_of_a_matrix(rows: int, columns: int) -> None:
    weight = torch.nn.Parameter(matrix(rows, columns))
    before = weight.detach().clone()
    gradient = matrix(rows, columns, 1)
    weight.grad = gradient.clone()
    Muon([Group((weight,), 0.5)]).step(0.1)
    step = before * (1 - 0.1 * 0.5) - weight.detach()
    u, _, v = torch.linalg.svd(gradient, full_matrices=False)
    along = torch.linalg.svdvals(u.T @ step @ v.T) / (0.1 * STEP_RMS * max(rows, columns) ** 0.5)
    assert along.min() > 0.3 and along.max() < 1.3
    # The size of a number in it does not depend on the matrix's shape.
    assert float(step.square().mean().sqrt()) == pytest.approx(0.1 * STEP_RMS, rel=0.25)


def test_momentum_is_nesterovs() -> None:
    weight = torch.nn.Parameter(matrix(4, 4))
    muon = Muon([Group((weight,), 0.0)])
    momentum = torch.zeros(4, 4)
    for seed in range(3):
        gradient = matrix(4, 4, seed + 1)
        weight.grad = gradient.clone()
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * gradient
        way = (1 - MOMENTUM) * gradient + MOMENTUM * momentum
        wanted = weight.detach() - 0.1 * STEP_RMS * 2.0 * orthogonalised(way[None])[0]
        muon.step(0.1)
        assert torch.allclose(weight.detach(), wanted, atol=1e-6)


def test_queries_keys_and_values_are_three_matrices() -> None:
    """A gradient of the queries alone moves neither keys nor values."""
    weight = torch.nn.Parameter(matrix(12, 4))
    before = weight.detach().clone()
    weight.grad = torch.zeros(12, 4)
    weight.grad[:4] = matrix(4, 4, 1)
    Muon([Group((weight,), 0.0, parts=3)]).step(0.1)
    assert not torch.equal(weight[:4], before[:4])
    assert torch.equal(weight[4:], before[4:])


def test_large_matrices_alone_and_small_ones_together_are_the_same(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for together in (1, 1 << 22):
        monkeypatch.setattr(optimizer, "TOGETHER", together)
        block = with_gradients(initial_block(tiny_run(layers=2), 1))
        BlockOptimizer(MUON, block).step(0.01)
        found.append(torch.cat([p.detach().flatten() for p in block.parameters()]))
    assert torch.allclose(*found, atol=1e-6)


def test_matrices_inside_layers_have_muon_and_the_rest_adamw(tiny_run: MakeRun) -> None:
    block = with_gradients(initial_block(tiny_run(layers=2), 1))
    made = BlockOptimizer(MUON, block)
    made.step(0.01)
    keys = {name: {k for k in _keys(made, name)} for name in made.named}
    assert any(name.endswith("relay_in.weight") for name in keys)
    for name, found in keys.items():
        inner = name.endswith(INNER)
        assert found == ({"momentum"} if inner else {"step", "exp_avg", "exp_avg_sq"}), name


def test_adamw_for_everything(tiny_run: MakeRun) -> None:
    block = with_gradients(initial_block(tiny_run(), 1))
    made = BlockOptimizer(Training(optimizer="adamw"), block)
    made.step(0.01)
    assert not any(key.endswith(":momentum") for key in made.tensors())
    assert len(made.tensors()) == 3 * len(made.named)


def test_adamw_is_torchs_in_the_same_bits(tiny_run: MakeRun) -> None:
    training = Training(optimizer="adamw", weight_decay=0.07)
    ours, theirs = (initial_block(tiny_run(), 1) for _ in range(2))
    made = BlockOptimizer(training, ours)
    wanted = torch.optim.AdamW(
        [
            {"params": [p for p in theirs.parameters() if p.ndim >= 2], "weight_decay": 0.07},
            {"params": [p for p in theirs.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(training.beta1, training.beta2),
        fused=True,
    )
    for seed, rate in enumerate((0.01, 0.003, 0.02)):
        with_gradients(ours, seed)
        made.step(rate)
        with_gradients(theirs, seed)
        for group in wanted.param_groups:
            group["lr"] = rate
        wanted.step()
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_what_has_no_gradient_stays_as_it_is(tiny_run: MakeRun) -> None:
    for kind in ("muon", "adamw"):
        block = initial_block(tiny_run(), 1)
        before = [parameter.detach().clone() for parameter in block.parameters()]
        made = BlockOptimizer(Training(optimizer=kind), block)
        made.step(0.01)
        assert made.tensors() == {}
        assert all(torch.equal(a, b) for a, b in zip(before, block.parameters(), strict=True))


def _keys(made: BlockOptimizer, name: str) -> list[str]:
    return [key.split(":")[1] for key in made.tensors() if key.split(":")[0] == name]


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_weight_decay_is_for_matrices_only(tiny_run: MakeRun, kind: str) -> None:
    run = tiny_run(weight_decay=0.07, optimizer=kind)
    block = initial_block(run, 1)
    decays = {
        id(p): group.weight_decay
        for rule in BlockOptimizer(run.training, block).rules
        for group in rule.groups
        for p in group.weights
    }
    assert len(decays) == len(list(block.parameters()))
    for p in block.parameters():
        assert decays[id(p)] == (0.07 if p.ndim >= 2 else 0.0)


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_state_comes_back_and_goes_on_in_the_same_bits(tiny_run: MakeRun, kind: str) -> None:
    training = tiny_run(optimizer=kind).training
    one, two = (initial_block(tiny_run(), 1) for _ in range(2))
    first = BlockOptimizer(training, one)
    for seed in range(2):
        with_gradients(one, seed)
        first.step(0.01)
    two.load_state_dict(one.state_dict())
    second = BlockOptimizer(training, two)
    second.load({name: value.clone() for name, value in first.tensors().items()})
    assert second.tensors().keys() == first.tensors().keys()
    for block, made in ((one, first), (two, second)):
        with_gradients(block, 7)
        made.step(0.02)
    pairs = zip(one.parameters(), two.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_state_that_does_not_fit_is_refused(tiny_run: MakeRun) -> None:
    block = with_gradients(initial_block(tiny_run(), 1))
    made = BlockOptimizer(MUON, block)
    made.step(0.01)
    tensors = made.tensors()
    name = next(key for key in tensors if key.endswith(":momentum"))
    with pytest.raises(ValueError, match="another shape"):
        made.load({**tensors, name: torch.zeros(2, 2)})
    lost = next(key for key in tensors if key.endswith(":exp_avg"))
    with pytest.raises(KeyError):
        made.load({key: value for key, value in tensors.items() if key != lost})


def test_a_step_does_not_import_torchs_compiler() -> None:
    """Two seconds and 70 MB in every training process, for nothing that is compiled."""
    code = (
        "import sys, torch; from swarm.learning.local import LocalSwarm; from swarm.run import Run;"
        "swarm = LocalSwarm(Run(seed=0), torch.device('cpu'));"
        "x = torch.zeros(2, 128, dtype=torch.long); swarm.step(x, x);"
        "print('torch._dynamo' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"
