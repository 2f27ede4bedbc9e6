"""A worker: it changes its own block alone, and look-ahead really reaches it."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from swarm.learning.joint_denoising import draw_rows
from swarm.learning.model import Block
from swarm.learning.moving_copy import frozen_copy
from swarm.learning.noise import block_interval
from swarm.learning.worker import (
    AHEAD_PARTS,
    JOINT_STREAM,
    BlockWorker,
    initial_block,
    relayed_hidden,
    step_generator,
)
from swarm.run import Run
from tests.conftest import ALL_KINDS, MakeRun

CPU = torch.device("cpu")


def batch(seed: int = 0, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    windows = torch.randint(256, (rows, 17), generator=torch.Generator().manual_seed(seed))
    return windows[:, :-1], windows[:, 1:]


def weights(block: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in block.state_dict().items()}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], two[name]) for name in one)


def copies(run: Run) -> list[Block]:
    """Frozen copies of all blocks, with heads that are not near zero, so that gradients show."""
    out = []
    for index in range(run.model.blocks):
        block = initial_block(run, index)
        if run.training.objective != "edm":
            generator = torch.Generator().manual_seed(index)
            torch.nn.init.normal_(block.head.weight, std=0.5, generator=generator)
        out.append(frozen_copy(block))
    return out


@pytest.mark.parametrize(("objective", "coupling"), ALL_KINDS)
@pytest.mark.parametrize("index", [0, 1, 2])
def test_only_the_own_block_changes(
    tiny_run: MakeRun, objective: str, coupling: str, index: int
) -> None:
    run = tiny_run(objective=objective, coupling=coupling)
    others = copies(run)
    kept = [weights(block) for block in others]
    worker = BlockWorker(run, index, CPU)
    own = weights(worker.block)
    ahead = others[index + 1] if coupling == "look_ahead" and index < 2 else None
    for _ in range(3):
        loss = worker.step(*batch(), others[:index], ahead)
    assert (loss.ahead_nats is not None) == (ahead is not None)
    assert not same(own, weights(worker.block))
    assert all(same(k, weights(block)) for k, block in zip(kept, others, strict=True))
    assert all(p.grad is None for block in others for p in block.parameters())
    held = {id(p) for r in worker.optimizer.rules for g in r.groups for p in g.weights}
    assert held == {id(p) for p in worker.block.parameters()}


def test_every_weight_of_the_own_block_moves(tiny_run: MakeRun) -> None:
    worker = BlockWorker(tiny_run(), 1, CPU)
    before = weights(worker.block)
    for seed in range(2):
        worker.step(*batch(seed), copies(tiny_run())[:1], copies(tiny_run())[2])
    after = weights(worker.block)
    assert [name for name in before if torch.equal(before[name], after[name])] == []


def test_no_gradient_reaches_upstream_even_if_it_could(tiny_run: MakeRun) -> None:
    run = tiny_run()
    upstream = [initial_block(run, 0), initial_block(run, 1)]
    assert all(p.requires_grad for block in upstream for p in block.parameters())
    relay = relayed_hidden(upstream, batch()[0])
    assert relay is not None and not relay.requires_grad
    BlockWorker(run, 2, CPU).step(*batch(), upstream, None)
    assert all(p.grad is None for block in upstream for p in block.parameters())


def loss_ahead(
    run: Run,
    copy: Block,
    index: int,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    generator: torch.Generator,
) -> torch.Tensor:
    """Block `index`'s own loss over all rows of (x, y, hidden): noise is drawn a part at a time,
    but every row counts the same."""
    objective = BlockWorker(run, index, CPU).objective
    parts = zip(*(whole.chunk(AHEAD_PARTS) for whole in rows), strict=True)
    each = [len(part[0]) * objective.loss(copy, *part, generator)[0].double() for part in parts]
    return torch.stack(each).sum() / len(rows[0])


# Five rows are parts of two, two and one.
@pytest.mark.parametrize(("rows", "weight"), [(4, 1.0), (5, 1.0), (5, 0.3)])
@pytest.mark.parametrize("objective", ["bayes", "plain"])
def test_look_ahead_reaches_the_own_block_through_the_frozen_copy(
    tiny_run: MakeRun, objective: str, rows: int, weight: float
) -> None:
    """The step's gradient is that of own + weight * ahead, by autograd through both blocks."""
    # Nothing is clipped, and AdamW leaves gradients as they are.
    run = tiny_run(objective=objective, look_ahead_weight=weight, clip_norm=1e9, optimizer="adamw")
    others, (x, y) = copies(run), batch(rows=rows)
    worker = BlockWorker(run, 1, CPU)
    torch.nn.init.normal_(worker.block.head.weight, std=0.5, generator=torch.Generator())
    fresh = deepcopy(worker.block)
    worker.step(x, y, others[:1], others[2])
    generator = step_generator(run.seed, 1, 0)
    relay = relayed_hidden(others[:1], x)
    own, hidden = worker.objective.loss(fresh, x, y, relay, generator)
    assert hidden is not None
    ahead = loss_ahead(run, others[2], 2, (x, y, hidden), generator)
    names, parameters = zip(*fresh.named_parameters(), strict=True)
    through = torch.autograd.grad(ahead, parameters, retain_graph=True, allow_unused=True)
    both = torch.autograd.grad(own + weight * ahead, parameters)
    found = [p.grad for p in worker.block.parameters()]
    for name, part, expected, gradient in zip(names, through, both, found, strict=True):
        assert gradient is not None
        assert torch.allclose(gradient, expected, rtol=1e-4, atol=1e-6), name
        # It reaches every layer. The own head plays no part in the next block's loss.
        assert (part is None) == name.startswith("head.")
        assert part is None or float(part.abs().max()) > 1e-4, name


def test_rows_that_are_denoised_count_for_their_share(tiny_run: MakeRun) -> None:
    """One row of four: a quarter of the step's gradient is its own, look-ahead included."""
    run = tiny_run(denoise_share=0.25, look_ahead_weight=0.3, clip_norm=1e9, optimizer="adamw")
    others, (x, y) = copies(run), batch()
    worker = BlockWorker(run, 1, CPU)
    torch.nn.init.normal_(worker.block.head.weight, std=0.5, generator=torch.Generator())
    fresh = deepcopy(worker.block)
    worker.step(x, y, others[:1], others[2])
    generator = step_generator(run.seed, 1, 0)
    relay = relayed_hidden(others[:1], x[1:])
    own, hidden = worker.objective.loss(fresh, x[1:], y[1:], relay, generator)
    assert hidden is not None and worker.joint is not None
    ahead = loss_ahead(run, others[2], 2, (x[1:], y[1:], hidden), generator)
    rows = draw_rows(x[:1], y[:1], 16, step_generator(run.seed, 1 + JOINT_STREAM, 0))
    joint, hidden = worker.joint.loss(fresh, 1, rows, worker.joint.relayed(others[:1], rows))
    joint_ahead, _ = worker.joint.loss(others[2], 2, rows, hidden)
    (0.75 * (own + 0.3 * ahead) + 0.25 * (joint + 0.3 * joint_ahead)).backward()
    for (name, p), twin in zip(worker.block.named_parameters(), fresh.parameters(), strict=True):
        assert p.grad is not None and twin.grad is not None
        assert torch.allclose(p.grad, twin.grad, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("rows", [4, 5])
def test_look_ahead_is_the_next_blocks_own_loss_in_its_own_interval(
    tiny_run: MakeRun, rows: int
) -> None:
    run = tiny_run()
    others = copies(run)
    worker = BlockWorker(run, 0, CPU)
    fresh = frozen_copy(worker.block)
    x, y = batch(rows=rows)
    loss = worker.step(x, y, [], others[1])
    generator = step_generator(run.seed, 0, 0)
    own, hidden = worker.objective.loss(fresh, x, y, None, generator)
    assert hidden is not None
    ahead = loss_ahead(run, others[1], 1, (x, y, hidden), generator)
    assert loss.own_nats == pytest.approx(float(own), abs=1e-5)
    assert loss.ahead_nats == pytest.approx(float(ahead), abs=1e-5)
    assert worker.objective.interval == block_interval(run.noise, 3, 0)
    assert worker.ahead is not None
    assert worker.ahead.interval == block_interval(run.noise, 3, 1)


def test_a_look_ahead_of_weight_zero_is_relay(tiny_run: MakeRun) -> None:
    relay, ahead = tiny_run(coupling="relay"), tiny_run(look_ahead_weight=0.0)
    others = copies(relay)
    one, two = BlockWorker(relay, 1, CPU), BlockWorker(ahead, 1, CPU)
    for _ in range(3):
        one.step(*batch(), others[:1], None)
        two.step(*batch(), others[:1], others[2])
    for p, q in zip(one.block.parameters(), two.block.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6)


def test_the_last_block_has_nothing_ahead(tiny_run: MakeRun) -> None:
    assert BlockWorker(tiny_run(), 2, CPU).ahead is None
    assert BlockWorker(tiny_run(coupling="relay"), 0, CPU).ahead is None


def test_gradients_are_clipped_and_the_rate_follows_the_schedule(tiny_run: MakeRun) -> None:
    # AdamW leaves gradients as they were clipped; Muon makes its directions in their memory.
    run = tiny_run(clip_norm=1e-3, warmup_steps=5, optimizer="adamw")
    worker = BlockWorker(run, 2, CPU)
    for step in range(4):
        worker.step(*batch(step), copies(run)[:2], None)
        rates = {worker.optimizer.learning_rate}
        assert rates == {run.training.learning_rate_at(step)}
    norms = [float(p.grad.norm()) for p in worker.block.parameters() if p.grad is not None]
    assert sum(n**2 for n in norms) ** 0.5 == pytest.approx(1e-3, rel=1e-3)
    assert worker.steps_done == 4


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1])
def test_initial_blocks_are_equal_on_every_host_and_differ_from_each_other(
    tiny_run: MakeRun, seed: int
) -> None:
    run = tiny_run(seed=seed)
    torch.manual_seed(99)
    blocks = [weights(initial_block(run, index)) for index in range(3)]
    torch.manual_seed(7)
    assert all(same(blocks[i], weights(initial_block(run, i))) for i in range(3))
    tables = [block["embedding.weight"] for block in blocks]
    assert not torch.equal(tables[0], tables[1]) and not torch.equal(tables[1], tables[2])
    other = initial_block(tiny_run(seed=seed - 1 if seed else 5), 0)
    assert not torch.equal(tables[0], other.embedding.weight)


def test_noise_is_a_function_of_seed_block_and_step() -> None:
    def first(*key: int) -> float:
        return float(torch.rand(1, generator=step_generator(*key), dtype=torch.float64))

    assert first(3, 1, 7) == first(3, 1, 7)
    keys = [(s, b, t) for s in (0, 1, 2**32 - 1) for b in range(4) for t in range(20)]
    assert len({first(*key) for key in keys}) == len(keys)


# A copy that learns along


def test_the_copy_ahead_learns_and_leaves_no_trace(tiny_run: MakeRun) -> None:
    """Its matrices inside layers move; no gradient, no state, and nobody else's weights do."""
    run = tiny_run(ahead_learns=True)
    others = copies(run)
    kept = [weights(block) for block in others]
    worker = BlockWorker(run, 1, CPU)
    worker.step(*batch(), others[:1], others[2])
    assert same(kept[0], weights(others[0])) and same(kept[1], weights(others[1]))
    moved = {n for n, value in weights(others[2]).items() if not torch.equal(value, kept[2][n])}
    inner = {n for n in kept[2] if n.startswith("layers.") and "norm" not in n}
    assert moved == inner | {"relay_in.weight"}
    assert all(p.grad is None and not p.requires_grad for p in others[2].parameters())
    held = {id(p) for r in worker.optimizer.rules for g in r.groups for p in g.weights}
    assert held == {id(p) for p in worker.block.parameters()}


def test_what_the_copy_ahead_learns_makes_it_better(tiny_run: MakeRun) -> None:
    """Our block stands still here, so that only the copy can lower the loss it looks ahead to."""
    losses = {}
    for learns in (False, True):
        run = tiny_run(ahead_learns=learns, objective="plain", warmup_steps=0, learning_rate=1e-2)
        worker, others = BlockWorker(run, 0, CPU), copies(run)
        fixed = weights(worker.block)
        for _ in range(12):
            worker.block.load_state_dict(fixed)
            ahead = worker.step(*batch(), [], others[1]).ahead_nats
        assert ahead is not None
        losses[learns] = ahead
    assert losses[True] < losses[False] - 0.5


def test_our_own_step_is_taken_through_the_copy_as_it_was(tiny_run: MakeRun) -> None:
    """What the copy learns in a step counts from the next one on."""
    first, later = [], []
    for learns in (False, True):
        run = tiny_run(ahead_learns=learns)
        worker, others = BlockWorker(run, 1, CPU), copies(run)
        worker.step(*batch(), others[:1], others[2])
        first.append(weights(worker.block))
        worker.step(*batch(), others[:1], others[2])
        later.append(weights(worker.block))
    assert same(*first) and not same(*later)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_copy_learns_with_joint_denoising_and_either_optimizer(
    tiny_run: MakeRun, optimizer: str
) -> None:
    run = tiny_run(ahead_learns=True, denoise_share=0.5, optimizer=optimizer)
    worker, others = BlockWorker(run, 0, CPU), copies(run)
    kept = weights(others[1])
    worker.step(*batch(), [], others[1])
    assert not same(kept, weights(others[1]))
    assert all(p.grad is None for p in others[1].parameters())
