"""The logical-shape benchmark: its sizes, blocks that share layers, what is extrapolated."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.harness import ROOT
from benchmarks.logical_shape import rows as logical_shape
from benchmarks.logical_shape import table as logical_shape_table
from benchmarks.logical_shape.bed import Pass, Written
from benchmarks.logical_shape.matmul import WAYS, HalfLinear, Ways, fastest_ways
from benchmarks.logical_shape.model import BLOCKS, SHAPES, shared_block
from swarm.learning.composition import ComposedModel
from swarm.learning.joint_denoising import JointDenoising
from swarm.learning.model import Block, block_of
from swarm.learning.noise import target_table
from swarm.writing.denoise import traverse

TINY = SHAPES["tiny"]
EXACT = Ways("fp32 tiles", "fp32 tiles")


@pytest.mark.parametrize(
    ("label", "billions"), [("0.1B", 0.1), ("1B", 1.0), ("7B", 7.0), ("75B", 75.8)]
)
def test_a_shape_has_the_parameters_that_it_is_called_by(label: str, billions: float) -> None:
    shape = SHAPES[label]
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.03)
    with torch.device("meta"):
        blocks = [block_of(shape.run, block) for block in range(BLOCKS)]
    assert shape.parameters == sum(p.numel() for block in blocks for p in block.parameters())


def test_the_largest_shape_has_75_80_billion() -> None:
    assert f"{SHAPES['75B'].parameters / 1e9:.2f}" == "75.80"


def unshared(block: int) -> Block:
    """The product's own block with the same weights, each layer its own copy."""
    shared = shared_block(TINY, block, EXACT)
    plain = block_of(TINY.run, block)
    plain.load_state_dict({name: value.float() for name, value in shared.state_dict().items()})
    return plain


@torch.no_grad()
@pytest.mark.parametrize("block", [0, 1])
def test_a_block_that_shares_layers_computes_what_one_does_that_does_not(block: int) -> None:
    shared, plain = shared_block(TINY, block, EXACT), unshared(block)
    passes: list[int] = []
    shared.spent = lambda positions, seconds, cpu_s: passes.append(positions)
    assert len(shared.layers) == TINY.layers
    assert len({id(layer) for layer in shared.layers}) == TINY.physical < TINY.layers
    x = torch.randint(256, (1, 20), generator=torch.Generator().manual_seed(0))
    relay = torch.randn(1, 20, TINY.width) if block else None
    whole = plain.hidden(x, relay)
    torch.testing.assert_close(shared.hidden(x, relay), whole)
    cache, parts = shared.new_cache(), []  # every logical layer has a cache of its own
    for place in range(20):
        before = None if relay is None else relay[:, place : place + 1]
        parts.append(shared.hidden(x[:, place : place + 1], before, cache))
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)
    assert passes == [20, *[1] * 20]


def test_shared_blocks_denoise_a_whole_output() -> None:
    run = TINY.run
    model = ComposedModel(run, [shared_block(TINY, block, EXACT) for block in range(BLOCKS)])
    joint = JointDenoising(run, target_table(run.seed, TINY.width))
    posterior = traverse(model, joint, b"prompt", 32, 0)
    assert posterior.shape == (32, 256)
    torch.testing.assert_close(posterior.exp().sum(-1), torch.ones(32))


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("positions", [1, 5])
def test_every_way_to_multiply_gives_the_product(name: str, positions: int) -> None:
    generator = torch.Generator().manual_seed(positions)
    weight = torch.randn(96, 64, generator=generator).mul_(0.1).half()
    x = torch.randn(1, positions, 64, generator=generator)
    got = HalfLinear(weight, Ways(name, name))(x)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, x @ weight.float().T, rtol=0.05, atol=0.05)


def test_the_fastest_ways_are_some_that_were_measured() -> None:
    ways, gflops = fastest_ways(64, 16)
    assert {ways.few, ways.many} <= set(WAYS)
    assert all(speed > 0 for speed in gflops.values())


# --- extrapolation, figures, table ---------------------------------------------------------------


def written(pieces_s: list[float], passes: list[list[Pass]]) -> Written:
    return Written(pieces_s[-1], tuple(pieces_s), tuple(map(tuple, passes)), 1000, 0)


SLOW = written([3.0, 5.0, 7.0], [[Pass(16, 0.5, 0.5), Pass(1, 0.3, 0.1), Pass(1, 0.5, 0.2)]] * 3)
SWEEP = written([10.0], [[Pass(144, 3.0, 1.5)]] * 3)


def test_autoregression_is_extrapolated_from_its_later_bytes() -> None:
    found = logical_shape.extrapolated(SLOW, 101)
    assert found.seconds == pytest.approx(3.0 + 100 * 2.0)
    assert found.compute_s == pytest.approx(1.5 + 100 * 1.2)
    whole = logical_shape.extrapolated(SLOW, 3)
    assert (whole.seconds, whole.compute_s) == pytest.approx((7.0, SLOW.compute_s))


def test_a_drafted_sweep_is_put_together_from_what_was_measured() -> None:
    found = logical_shape.drafted_from(SLOW, SWEEP, 100)
    assert found.compute_s == pytest.approx(0.5 + 100 * 0.4 + 2 * 3.0)
    assert found.seconds == pytest.approx(found.compute_s + 1.0)


def row(name: str, extrapolated: bool) -> dict[str, Any]:
    variant = logical_shape.Variant(name, 100, 3 if extrapolated else 100, 1, 1)
    drafted = None
    if not extrapolated:
        drafted = replace(written([20.0], [[Pass(1, 1.0, 1.0)]] * 3), retries=1)
    facts = logical_shape.row_of(variant, Ways(), SLOW, [SWEEP], drafted)
    return {"name": name, "key": variant.key, **facts}


def test_figures_and_table_come_from_the_rows() -> None:
    rows = [row("0.1B", False), row("75B", True)]
    figures = logical_shape.figures(rows)
    assert figures["seconds_75b"] == 10.0
    assert figures["speedup_75b"] == pytest.approx((3.0 + 99 * 2.0) / 10.0)
    assert figures["compute_share_75b"] == pytest.approx(0.9)
    assert figures["compute_share_75b"] + figures["wan_share_75b"] == pytest.approx(1)
    assert rows[1]["waited"] == pytest.approx(2.0)
    assert figures["bytes_timed_autoregressive_75b"] == 3
    lines = logical_shape_table.table(rows)
    assert sum(line.startswith("| 75B") for line in lines) == 1
    [largest] = [line for line in lines if line.startswith("| 75B")]
    assert "201 (extrapolated from 3 bytes)" in largest
    assert any(line.endswith("| 20 with 1 sent again |") for line in lines)


IN_A_PROCESS_OF_ITS_OWN = """
from benchmarks.logical_shape.process import BUDGET_MAX_S, lift_limits
lift_limits()
from benchmarks.logical_shape.host import served_folder
from benchmarks.logical_shape.matmul import Ways
from benchmarks.logical_shape.model import SHAPES, shared_block
from node.serving.host import run_file_of
from protocol.serving import SWEEP_BUDGET_MAX_S
from swarm.runfile import parse

assert SWEEP_BUDGET_MAX_S == BUDGET_MAX_S
large, tiny = SHAPES["75B"], SHAPES["tiny"]
text = run_file_of(large.run, {block: large.digest(block) for block in range(3)})
assert parse(text).run.model == large.run.model
folders = [served_folder(tiny, b, shared_block(tiny, b, Ways())) for b in range(3)]
assert len({folder.run_file for folder in folders}) == 1
assert folders[1].model.weights == (0.0, 0.0, 1.0)
devices = [block.embedding.weight.device.type for block in folders[1].model.blocks]
assert devices == ["meta", "cpu", "meta"]
"""


def test_a_host_has_one_block_the_shapes_of_the_others_and_limits_that_allow_them() -> None:
    """In a process, as the hosts are: the limits of this one stay as they are."""
    command = [sys.executable, "-c", IN_A_PROCESS_OF_ITS_OWN]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
