"""The local swarm: deterministic, resumable to the bit, and it learns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from protocol.errors import ModelError
from swarm.learning.composition import ComposedModel
from swarm.learning.coupling import upstream_versions
from swarm.learning.evaluate import honest_ce
from swarm.learning.flat import flat_weights
from swarm.learning.local import LocalSwarm
from tests.conftest import ALL_KINDS, MakeRun

CPU = torch.device("cpu")
Periodic = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]


def batch(step: int, rows: int = 4, length: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    windows = torch.randint(256, (rows, length + 1), generator=generator)
    return windows[:, :-1], windows[:, 1:]


def train(swarm: LocalSwarm, until: int, offline: frozenset[int] = frozenset()) -> LocalSwarm:
    while swarm.steps_done < until:
        swarm.step(*batch(swarm.steps_done), offline)
    return swarm


def saved(swarm: LocalSwarm) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The state as a file would hold it: not tied to the live weights."""
    tensors, numbers = swarm.state()
    return {name: value.clone() for name, value in tensors.items()}, numbers


def assert_equal(one: LocalSwarm, two: LocalSwarm) -> None:
    (tensors, numbers), (others, other_numbers) = one.state(), two.state()
    assert numbers == other_numbers
    assert tensors.keys() == others.keys()
    differing = [name for name in tensors if not torch.equal(tensors[name], others[name])]
    assert differing == []


CASES: list[dict[str, Any]] = [
    *({"objective": objective, "coupling": coupling} for objective, coupling in ALL_KINDS),
    {"coupling": "look_ahead", "staggered": False},
    {"coupling": "look_ahead", "copy_steps": 3.0},
    {"coupling": "look_ahead", "ahead_learns": True},
    {"coupling": "look_ahead", "blocks": 1},
]
IDS = ["-".join(map(str, case.values())) for case in CASES]


@pytest.mark.parametrize("changes", CASES, ids=IDS)
def test_training_is_a_function_of_the_seed(tiny_run: MakeRun, changes: dict[str, Any]) -> None:
    swarms = []
    for noise in (1, 2):
        torch.manual_seed(noise)  # the global generator plays no part
        swarms.append(train(LocalSwarm(tiny_run(**changes), CPU), 5))
    assert_equal(*swarms)
    other = train(LocalSwarm(tiny_run(**changes, seed=1), CPU), 5)
    first = swarms[0].workers[0].block.embedding.weight
    assert not torch.equal(first, other.workers[0].block.embedding.weight)


@pytest.mark.parametrize("changes", CASES, ids=IDS)
@pytest.mark.parametrize("cut", [1, 6, 8], ids=["first-step", "round-boundary", "mid-round"])
def test_resumed_training_equals_uninterrupted_bit_for_bit(
    tiny_run: MakeRun, changes: dict[str, Any], cut: int
) -> None:
    run = tiny_run(**changes)  # rounds of 3 steps, so 11 steps cross three boundaries
    whole = train(LocalSwarm(run, CPU), 11)
    state = saved(train(LocalSwarm(run, CPU), cut))
    resumed = LocalSwarm(run, CPU)
    resumed.load_state(*state)
    assert resumed.steps_done == cut
    assert_equal(whole, train(resumed, 11))


def test_resuming_a_swarm_that_was_used_before(tiny_run: MakeRun) -> None:
    """Going back to an earlier checkpoint leaves nothing of what came after it."""
    run = tiny_run()
    swarm = train(LocalSwarm(run, CPU), 5)
    state = saved(swarm)
    train(swarm, 10)
    swarm.load_state(*state)
    assert_equal(swarm, train(LocalSwarm(run, CPU), 5))
    assert_equal(train(swarm, 9), train(LocalSwarm(run, CPU), 9))


def _without(part: str) -> Callable[[dict[str, torch.Tensor], dict[str, Any]], None]:
    def damage(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> None:
        found = [name for name in tensors if part in name]
        assert found
        for name in found:
            del tensors[name]

    return damage


def _reshaped(part: str) -> Callable[[dict[str, torch.Tensor], dict[str, Any]], None]:
    def damage(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> None:
        name = next(name for name in tensors if part in name)
        tensors[name] = torch.zeros(3, 5)

    return damage


def _number(key: str, value: Any) -> Callable[[dict[str, torch.Tensor], dict[str, Any]], None]:
    def damage(_: dict[str, torch.Tensor], numbers: dict[str, Any]) -> None:
        if value is None:
            del numbers[key]
        else:
            numbers[key] = value

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        _without("block.1."),
        _without("block.0.head.bias"),
        _without("version.1.2."),
        _without("version."),
        _without("optimizer.1.head.weight:exp_avg_sq"),
        _without("optimizer.1.head.weight:step"),
        _reshaped("block.0.head.weight"),
        _reshaped("version.1.0.head.weight"),
        _reshaped("optimizer.2.head.weight:exp_avg"),
        _number("steps_done", None),
        _number("steps_done", "five"),
        _number("steps_done", -1),
        _number("steps_done", 3),  # the versions are those of the second round
        _number("steps_done", 7),
    ],
)
def test_a_state_of_another_run_is_refused(
    tiny_run: MakeRun, damage: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]
) -> None:
    tensors, numbers = saved(train(LocalSwarm(tiny_run(), CPU), 5))
    damage(tensors, numbers)
    with pytest.raises(ModelError) as refused:
        LocalSwarm(tiny_run(), CPU).load_state(tensors, numbers)
    assert "\n" not in refused.value.message and refused.value.hint


@pytest.mark.parametrize(
    "changes",
    [{"width": 32}, {"layers": 2}, {"coupling": "independent"}, {"blocks": 4}, {"blocks": 2}],
)
def test_a_state_of_another_shape_is_refused(tiny_run: MakeRun, changes: dict[str, Any]) -> None:
    state = saved(train(LocalSwarm(tiny_run(), CPU), 2))
    with pytest.raises(ModelError):
        LocalSwarm(tiny_run(**changes), CPU).load_state(*state)


# Versions


def test_copies_are_frozen_and_as_old_as_their_round(tiny_run: MakeRun) -> None:
    swarm = LocalSwarm(tiny_run(copy_steps=1.0), CPU)
    seen: list[list[dict[str, torch.Tensor]]] = []  # by version, as they were pushed
    for step in range(14):
        if step % 3 == 0:
            seen.append(
                [{k: v.clone() for k, v in w.block.state_dict().items()} for w in swarm.workers]
            )
        swarm.step(*batch(step))
        newest = swarm.versions.newest
        assert newest == step // 3
        for worker in swarm.workers:
            numbers = upstream_versions(worker.index, newest, staggered=True)
            read = [moving.block for moving in swarm._upstream(worker.index)]
            for before, (version, copied) in enumerate(zip(numbers, read, strict=True)):
                expected = seen[version][before]
                assert all(torch.equal(v, expected[k]) for k, v in copied.state_dict().items())
                assert not any(p.requires_grad for p in copied.parameters())
                assert all(p.grad is None for p in copied.parameters())
            ahead = swarm._next(worker.index)
            assert (ahead is None) == (worker.index == 2)
            if ahead is not None:
                expected = seen[newest][worker.index + 1]
                found = ahead.block.state_dict()
                assert all(torch.equal(v, expected[k]) for k, v in found.items())
    assert len(swarm.versions.copies) <= 3  # what nobody reads any more is gone


def test_copies_are_renewed_at_the_start_of_each_round(tiny_run: MakeRun) -> None:
    swarm = LocalSwarm(tiny_run(steps_per_round=4), CPU)
    newest = []
    for step in range(9):
        swarm.step(*batch(step))
        newest.append(swarm.versions.newest)
    assert newest == [0, 0, 0, 0, 1, 1, 1, 1, 2]


def test_the_composed_model_is_what_the_last_worker_trains_on(tiny_run: MakeRun) -> None:
    swarm = train(LocalSwarm(tiny_run(copy_steps=1.0), CPU), 11)
    composed = swarm.composed_blocks()
    assert composed[-1] is swarm.workers[-1].block
    for block, read in zip(composed[:-1], swarm._upstream(2), strict=True):
        assert (flat_weights(block) == flat_weights(read.block)).all()


def test_copies_approach_the_versions_that_they_follow(tiny_run: MakeRun) -> None:
    swarm = train(LocalSwarm(tiny_run(copy_steps=3.0), CPU), 10)
    (read,) = swarm._upstream(1)
    followed = flat_weights(swarm.versions.get(0, swarm.versions.newest))
    away = abs(flat_weights(read.block) - followed).max()
    assert away > 0
    swarm.copies[0, 0].move()
    assert abs(flat_weights(read.block) - followed).max() == pytest.approx(away * 2 / 3, rel=1e-3)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("composed", [True, False, None])
def test_any_run_can_be_composed_either_way(
    tiny_run: MakeRun, trained: bool, composed: bool | None
) -> None:
    """Both ways are measured whichever the run was trained with."""
    swarm = LocalSwarm(tiny_run(staggered=trained, steps_per_round=2), CPU)
    assert len(swarm.composed_blocks(composed)) == 3  # before any step
    for step in range(9):
        swarm.step(*batch(step))
        blocks = swarm.composed_blocks(composed)
        assert blocks[-1] is swarm.workers[-1].block
        live = [worker.block for worker in swarm.workers]
        newest = composed is False or (composed is None and not trained)
        assert all((a is b) == newest for a, b in zip(blocks[:-1], live[:-1], strict=True))


def test_independent_blocks_are_composed_live(tiny_run: MakeRun) -> None:
    swarm = train(LocalSwarm(tiny_run(coupling="independent"), CPU), 5)
    assert swarm.composed_blocks() == [worker.block for worker in swarm.workers]


def test_an_offline_worker_stands_still_and_comes_back(tiny_run: MakeRun) -> None:
    swarm = train(LocalSwarm(tiny_run(), CPU), 4)
    before = {name: v.clone() for name, v in swarm.workers[1].block.state_dict().items()}
    losses = swarm.step(*batch(4), offline=frozenset({1}))
    train(swarm, 8, frozenset({1}))
    assert len(losses) == 2
    after = swarm.workers[1].block.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert [worker.steps_done for worker in swarm.workers] == [8, 8, 8]
    state = saved(swarm)
    resumed = LocalSwarm(tiny_run(), CPU)
    resumed.load_state(*state)
    assert_equal(train(swarm, 11), train(resumed, 11))


def test_a_worker_that_never_trained_can_be_resumed(tiny_run: MakeRun) -> None:
    """It has no optimizer state yet, and that is not damage."""
    swarm = train(LocalSwarm(tiny_run(), CPU), 4, frozenset({0}))
    resumed = LocalSwarm(tiny_run(), CPU)
    resumed.load_state(*saved(swarm))
    assert_equal(train(swarm, 8), train(resumed, 8))


def test_each_worker_may_have_its_own_batch(tiny_run: MakeRun) -> None:
    together, apart = (LocalSwarm(tiny_run(coupling="independent"), CPU) for _ in range(2))
    for step in range(3):
        together.step(*batch(step))
        apart.step_each([batch(step), batch(step + 50), batch(step)])
    for index in range(3):
        one, two = (s.workers[index].block.embedding.weight for s in (together, apart))
        assert torch.equal(one, two) == (index != 1)


# Learning


@pytest.mark.parametrize(("objective", "coupling"), ALL_KINDS)
def test_it_learns(tiny_run: MakeRun, periodic: Periodic, objective: str, coupling: str) -> None:
    run = tiny_run(
        objective=objective,
        coupling=coupling,
        blocks=2,
        width=32,
        steps=80,
        steps_per_round=5,
        learning_rate=1e-2,
        batch=8,
        sigma_min=1.0 if objective == "edm" else 5.0,
        leak_limit_nats=1.0,
    )
    x, y = periodic(8, 16)
    windows = torch.cat([x, y[:, -1:]], dim=1)
    swarm = LocalSwarm(run, CPU)
    start = honest_ce(ComposedModel(run, swarm.composed_blocks()), [windows])
    for _ in range(run.training.steps):
        swarm.step(x, y)
    end = honest_ce(ComposedModel(run, swarm.composed_blocks()), [windows])
    assert start.ce_nats > 4.5
    assert end.ce_nats < 0.3 * start.ce_nats
    for block in end.block_ce_nats:
        assert block is not None and block < 0.5 * start.ce_nats
