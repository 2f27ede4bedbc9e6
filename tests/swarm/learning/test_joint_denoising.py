"""Joint denoising: off by default, no target but through z, its loss, its chain, that it learns."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from protocol.errors import UsageError
from swarm.cost import block_parameters, parameter_counts
from swarm.learning.composition import ComposedModel
from swarm.learning.flat import flat_weights, initial_flat, load_flat
from swarm.learning.joint_denoising import JointDenoising, Rows, draw_rows
from swarm.learning.local import LocalSwarm
from swarm.learning.model import Block, NoisyInput, block_of
from swarm.learning.moving_copy import frozen_copy
from swarm.learning.noise import target_table
from swarm.learning.worker import BlockWorker, initial_block, step_generator
from swarm.run import Run
from swarm.run_template import emit, preset
from swarm.runfile import RunFileError, parse
from swarm.writing.denoise import choose_bytes, traverse
from swarm.writing.generate import Sampling
from tests.conftest import MakeModel, MakeRun

CPU = torch.device("cpu")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(rows: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    windows = torch.randint(256, (rows, 17), generator=seeded(seed))
    return windows[:, :-1], windows[:, 1:]


def joint_of(run: Run) -> JointDenoising:
    return JointDenoising(run, target_table(run.seed, run.model.width))


def some_rows(run: Run, rows: int = 3) -> Rows:
    return draw_rows(*batch(rows), run.model.width, seeded(1))


# --- off, nothing changes -----------------------------------------------------------------------


def test_off_by_default_and_then_not_in_the_weights(tiny_run: MakeRun) -> None:
    run = tiny_run()
    assert not run.denoises and run.training.denoise_rows == 0
    assert Run.from_dict(run.to_dict()) == run
    plain, more = initial_block(run, 1), initial_block(tiny_run(denoise_share=0.3), 1)
    extra = {name for name, _ in more.named_parameters()} - dict(plain.named_parameters()).keys()
    assert extra == {"unknown", "byte_prior"}
    for name, value in plain.state_dict().items():
        assert torch.equal(value, more.state_dict()[name])


@pytest.mark.parametrize("coupling", ["independent", "look_ahead"])
def test_off_a_step_is_the_objective_and_nothing_else(tiny_run: MakeRun, coupling: str) -> None:
    """The same losses and the same weights, bit for bit, as a step written out here."""
    run = tiny_run(coupling=coupling, look_ahead_weight=0.0)
    ahead = frozen_copy(initial_block(run, 1)) if coupling == "look_ahead" else None
    worker, other = BlockWorker(run, 0, CPU), BlockWorker(run, 0, CPU)
    x, y = batch()
    told = worker.step(x, y, [], ahead)
    generator = step_generator(run.seed, 0, 0)
    own, _ = other.objective.loss(other.block, x, y, None, generator)
    own.backward()  # type: ignore[no-untyped-call]  # torch's own gap
    other._update()
    assert told.own_nats == own.item() and told.joint_nats is None
    for name, value in worker.block.state_dict().items():
        assert torch.equal(value, other.block.state_dict()[name])


def test_other_rows_are_trained_as_before(tiny_run: MakeRun) -> None:
    """The rows that are not denoised have the loss that they would have by themselves."""
    on, off = tiny_run(denoise_share=0.5), tiny_run()
    x, y = batch()
    ahead = frozen_copy(initial_block(on, 1))
    told = BlockWorker(on, 0, CPU).step(x, y, [], ahead)
    alone = BlockWorker(off, 0, CPU).step(x[2:], y[2:], [], frozen_copy(initial_block(off, 1)))
    assert (told.own_nats, told.ahead_nats) == (alone.own_nats, alone.ahead_nats)
    assert told.joint_nats is not None and told.joint_nats > 0


# --- the option ---------------------------------------------------------------------------------


def test_how_many_rows(tiny_run: MakeRun) -> None:
    for share, batch_, rows in ((0.25, 8, 2), (0.01, 8, 1), (0.9, 8, 7), (0.9, 2, 1), (0, 8, 0)):
        assert tiny_run(denoise_share=share, batch=batch_).training.denoise_rows == rows


@pytest.mark.parametrize(
    "changes",
    [
        {"denoise_share": 0.95},
        {"denoise_share": -0.1},
        {"denoise_share": float("nan")},
        {"denoise_share": 0.5, "batch": 1},
        {"denoise_share": 0.5, "objective": "edm", "coupling": "independent"},
        {"denoise_share": 0.5, "p_mean": 40.0, "sigma_min": 1e17, "sigma_max": 1e18},
    ],
    ids=str,
)
def test_runs_that_make_no_sense(tiny_run: MakeRun, changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        tiny_run(**changes)


def test_the_run_file_says_whether_it_is_on() -> None:
    tiny = preset("tiny", "tiny")
    assert b"\ndenoise_share = 0.0\n" in emit(tiny) and not tiny.run.denoises
    training = replace(tiny.run.training, denoise_share=0.25)
    on = replace(tiny, run=replace(tiny.run, training=training))
    assert b"\ndenoise_share = 0.25\n" in emit(on)
    assert parse(emit(on)) == on and on.parameters(1) == tiny.parameters(1) + 128 + 256
    assert Run.from_dict(on.run.to_dict()) == on.run
    for bad in (b"2.0", b'"much"', b"nan"):
        with pytest.raises(RunFileError):
            parse(emit(on).replace(b"denoise_share = 0.25", b"denoise_share = " + bad))


def test_hosts_exchange_the_new_parameters_too(tiny_run: MakeRun) -> None:
    run = tiny_run(denoise_share=0.5)
    block = initial_block(run, 1)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(generator=seeded(3))
    flat = flat_weights(block)
    assert flat.shape == initial_flat(run, 1).shape == (block_parameters(run)[1],)
    again = block_of(run, 1)
    load_flat(again, flat)
    for name, value in again.state_dict().items():
        assert torch.equal(value, block.state_dict()[name]), name


def test_parameters_are_counted(tiny_run: MakeRun) -> None:
    run = tiny_run(denoise_share=0.5)
    real = [sum(p.numel() for p in block_of(run, b).parameters()) for b in range(3)]
    assert block_parameters(run) == tuple(real)
    assert block_parameters(tiny_run()) == parameter_counts(run.model, "bayes")


# --- training: what a block sees ----------------------------------------------------------------


def test_sigmas_go_down_the_chain_and_start_at_the_edges(tiny_run: MakeRun) -> None:
    joint = joint_of(tiny_run(denoise_share=0.5))
    assert joint.edges[0] == 10.0 and joint.edges[-1] == 0.1 and len(joint.edges) == 4
    level = torch.linspace(0, 1, 5, dtype=torch.float64)
    sigmas = [joint.sigma(block, level) for block in range(3)]
    for block, sigma in enumerate(sigmas):
        assert float(sigma[0]) == pytest.approx(joint.edges[block], rel=1e-5)
        assert float(sigma[-1]) == pytest.approx(joint.edges[block + 1], rel=1e-5)
        assert bool((sigma[1:] < sigma[:-1]).all())
    assert bool((sigmas[0] >= sigmas[1]).all() and (sigmas[1] >= sigmas[2]).all())


def test_cuts_and_levels(tiny_run: MakeRun) -> None:
    run = tiny_run(denoise_share=0.5)
    rows = draw_rows(*batch(400), run.model.width, seeded(2))
    assert int(rows.cut.min()) == 1 and int(rows.cut.max()) == 12
    at_the_top = float((rows.level == 0).float().mean())
    assert 0.4 < at_the_top < 0.6 and float(rows.level.max()) <= 1


@pytest.mark.parametrize("coupling", ["independent", "look_ahead"])
def test_bytes_after_the_cut_are_seen_through_z_only(tiny_run: MakeRun, coupling: str) -> None:
    """Other bytes after the cut, the same z: the same hidden states. And z reaches only what comes
    after it: a position never sees the z of the byte that it predicts."""
    run = tiny_run(denoise_share=0.5, coupling=coupling)
    joint, rows = joint_of(run), some_rows(run)
    block, before = initial_block(run, 1), initial_block(run, 0)
    relay = before.hidden(rows.x) if run.model.relays else None
    hidden = joint.hidden(block, 1, rows, relay)
    after = torch.arange(16) >= rows.cut[:, None]
    other = torch.where(after, (rows.x + 7) % 256, rows.x)
    assert torch.equal(joint.hidden(block, 1, replace(rows, x=other), relay), hidden)
    for row in range(3):
        for position in range(int(rows.cut[row]) - 1, 16):
            y = rows.y.clone()
            y[row, position] = (y[row, position] + 1) % 256
            moved = joint.hidden(block, 1, replace(rows, y=y), relay) != hidden
            changed = moved.any(-1)
            assert not changed[row, : position + 1].any()
            assert position == 15 or changed[row, position + 1]
            changed[row] = False
            assert not changed.any()


def test_known_bytes_are_read_as_ever(tiny_run: MakeRun) -> None:
    """Up to the cut the hidden state is an ordinary pass's; a certain z is as good as a byte."""
    run = tiny_run(denoise_share=0.5)
    block, (x, _) = initial_block(run, 0), batch(2)
    plain = block.hidden(x)
    known = torch.arange(16).expand(2, -1) < 5
    sure = 1e4 * torch.nn.functional.one_hot(x, 256).float()
    seen = block.hidden(torch.where(known, x, 0), noisy=NoisyInput(known, sure))
    assert torch.allclose(seen, plain, atol=1e-5)
    vague = block.hidden(torch.where(known, x, 0), noisy=NoisyInput(known, torch.zeros(2, 16, 256)))
    assert torch.equal(vague[:, :5], seen[:, :5]) and not torch.allclose(vague, plain, atol=1e-2)


def test_the_loss_by_hand(tiny_run: MakeRun, tiny_model: MakeModel) -> None:
    run = tiny_run(denoise_share=0.5)
    joint, rows = joint_of(run), some_rows(run)
    block = tiny_model(run).blocks[0]
    assert block is not None
    loss, hidden = joint.loss(block, 0, rows, None)
    sigma, table = joint.sigma(0, rows.level), joint.targets
    total, count = 0.0, 0
    for row in range(3):
        for position in range(int(rows.cut[row]) - 1, 16):
            y = int(rows.y[row, position])
            z = table[y] + sigma[row] * rows.eps[row, position]
            logits = block.logits(hidden[row, position]) + table @ z / sigma[row] ** 2
            total -= float(logits.log_softmax(-1)[y])
            count += 1
    assert float(loss) == pytest.approx(total / count, rel=1e-4)


def test_gradients_reach_the_own_block_alone(tiny_run: MakeRun) -> None:
    """With relay and look-ahead: copies of other blocks stay as they are, new parameters learn."""
    run = tiny_run(denoise_share=0.5)
    copies = [frozen_copy(initial_block(run, b)) for b in range(3)]
    kept = copy.deepcopy(copies)
    worker = BlockWorker(run, 1, CPU)
    before = copy.deepcopy(worker.block.state_dict())
    told = worker.step(*batch(), copies[:1], copies[2])
    assert told.joint_nats is not None
    for one, other in zip(copies, kept, strict=True):
        for name, value in one.state_dict().items():
            assert torch.equal(value, other.state_dict()[name])
    for name in ("unknown", "byte_prior", "embedding.weight", "relay_in.weight"):
        assert not torch.equal(worker.block.state_dict()[name], before[name]), name


def test_upstream_copies_see_higher_sigmas(tiny_run: MakeRun) -> None:
    run = tiny_run(denoise_share=0.5)
    joint, rows = joint_of(run), some_rows(run)
    first, second = initial_block(run, 0), initial_block(run, 1)
    by_hand = joint.hidden(second, 1, rows, joint.hidden(first, 0, rows, None))
    relayed = joint.relayed([first, second], rows)
    assert relayed is not None and torch.equal(relayed, by_hand)
    noise = [(joint.z(b, rows) - joint.targets[rows.y]).norm() for b in range(3)]
    assert noise[0] > noise[1] > noise[2]


# --- the chain ----------------------------------------------------------------------------------


def known_posterior(run: Run, probability: torch.Tensor) -> Block:
    """A block whose F is a fixed distribution of bytes, whatever it reads."""
    block = block_of(run, 0).requires_grad_(False)
    block.head.weight.zero_()
    block.head.bias.copy_(probability.clamp_min(1e-30).log())
    return block


def test_the_chain_ends_in_the_bytes_that_noise_points_at(tiny_run: MakeRun) -> None:
    """Euler steps on a known posterior: by hand, and bytes of probability 0 are never written."""
    run = tiny_run(denoise_share=0.5, coupling="independent", blocks=24)
    joint = joint_of(run)
    probability = torch.zeros(256)
    probability[list(b"abcd")] = torch.tensor([0.4, 0.3, 0.2, 0.1])
    block = known_posterior(run, probability)
    context = torch.full((40, 1), 65)
    z = joint.first_z(0, 400, 3).view(40, 10, 16)
    by_hand = z.flatten(0, 1).double()
    for index in range(24):
        posterior, _ = joint.denoise(block, index, context, z, None)
        sigma = joint.edges[index]
        weight = probability.double() * (by_hand @ joint.targets.double().T / sigma**2).exp()
        exact = weight / weight.sum(-1, keepdim=True)
        assert torch.allclose(posterior.flatten(0, 1).exp().double(), exact, atol=2e-3)
        if index < 23:
            after = joint.edges[index + 1]
            z = joint.onward(z, posterior, index, index + 1)
            mean = exact @ joint.targets.double()
            by_hand = mean + (by_hand - mean) * after / sigma
    assert float(posterior.exp().max(-1).values.median()) > 0.99  # sigma 0.1: certain
    written = choose_bytes(posterior.flatten(0, 1), Sampling(temperature=0.0))
    share = torch.bincount(written, minlength=256) / 400
    # The flow carries noise to the bytes' own distribution, up to the size of its 24 steps.
    assert torch.allclose(share, probability, atol=0.12) and set(written.tolist()) <= set(b"abcd")


def test_noise_comes_from_the_seed(tiny_run: MakeRun) -> None:
    joint = joint_of(tiny_run(denoise_share=0.5))
    one, again, other = (joint.first_z(1, 50, seed) for seed in (5, 5, 6))
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert float(one.std()) == pytest.approx(joint.edges[1], rel=0.1)


def test_a_posterior_reads_what_stands_before_it(tiny_run: MakeRun, tiny_model: MakeModel) -> None:
    """In a sweep, too: later positions depend on the z of earlier ones, never the other way."""
    model = tiny_model(tiny_run(denoise_share=0.5))
    joint, block = joint_of(model.run), model.blocks[0]
    assert block is not None
    context, z = torch.tensor([list(b"abc")]), joint.first_z(1, 8, 0)[None]
    posterior, _ = joint.denoise(block, 1, context, z, None)
    z[0, 4] += 1.0
    moved = (joint.denoise(block, 1, context, z, None)[0] - posterior).abs().amax(-1)[0] > 1e-6
    assert moved.tolist() == [False] * 4 + [True] * 4


def test_it_learns(
    tiny_run: MakeRun, periodic: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """On a text of period 8: after a few steps most bytes of a whole output are right."""
    run = tiny_run(
        denoise_share=0.75, batch=8, width=32, blocks=2, coupling="relay", learning_rate=1e-2
    )
    swarm = LocalSwarm(run, CPU)
    for _ in range(60):
        swarm.step(*periodic(8, 16))
    blocks: list[Block | None] = [worker.block for worker in swarm.workers]
    model = ComposedModel(run, blocks)
    joint = JointDenoising(run, model.targets)
    right = 0
    for seed in range(8):
        best = traverse(model, joint, b"bloc", 12, seed).argmax(-1)
        right += sum(a == b for a, b in zip(bytes(best.tolist()), b"kswablockswa", strict=True))
    assert right > 24  # of 96; by chance it would be 12
