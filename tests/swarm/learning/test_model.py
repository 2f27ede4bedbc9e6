"""The network: causality, caches, rotary positions, initialisation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import UsageError
from swarm.learning.model import (
    Block,
    Layer,
    LayerCache,
    RotaryPositions,
    SigmaModulation,
    make_block,
)
from swarm.run import ModelShape, Run
from tests.conftest import ALL_KINDS, MakeRun, sharp_block


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inputs(run: Run, rows: int = 2, seed: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Bytes, and what else the second block of the run reads."""
    width, length = run.model.width, run.model.context
    x = torch.randint(256, (rows, length), generator=seeded(seed))
    more: dict[str, torch.Tensor] = {}
    if run.model.relays:
        more["relay"] = torch.randn(rows, length, width, generator=seeded(seed + 1))
    if run.training.objective == "edm":
        more["z_scaled"] = torch.randn(rows, length, width, generator=seeded(seed + 2))
        more["c_noise"] = torch.tensor([0.3, 0.6][:rows])
    return x, more


def positions(more: dict[str, torch.Tensor], part: slice) -> dict[str, torch.Tensor]:
    return {name: v[:, part] if v.ndim == 3 else v for name, v in more.items()}


@pytest.mark.parametrize(("objective", "coupling"), ALL_KINDS)
@pytest.mark.parametrize("t", [0, 1, 7, 15])
def test_a_byte_changes_nothing_before_it(
    tiny_run: MakeRun, objective: str, coupling: str, t: int
) -> None:
    run = tiny_run(objective=objective, coupling=coupling, layers=2)
    block = sharp_block(run, 1)
    x, more = inputs(run)
    before = block.hidden(x, **more)
    changed = x.clone()
    changed[:, t] = (changed[:, t] + 1) % 256
    after = block.hidden(changed, **more)
    assert torch.allclose(before[:, :t], after[:, :t], atol=1e-6)
    assert all(float((before - after)[:, s].abs().max()) > 1e-3 for s in range(t, 16))


@pytest.mark.parametrize("name", ["relay", "z_scaled"])
def test_relay_and_z_change_nothing_before_them(tiny_run: MakeRun, name: str) -> None:
    edm = {"objective": "edm", "coupling": "independent"}
    run = tiny_run(**(edm if name == "z_scaled" else {}))
    block = sharp_block(run, 1)
    x, more = inputs(run)
    before = block.hidden(x, **more)
    more[name] = more[name].clone()
    more[name][:, 6] += torch.randn(16, generator=seeded(9))
    after = block.hidden(x, **more)
    assert torch.allclose(before[:, :6], after[:, :6], atol=1e-6)
    assert float((before - after)[:, 6].abs().max()) > 1e-3


@pytest.mark.parametrize(("objective", "coupling"), ALL_KINDS)
@pytest.mark.parametrize("chunks", [[16], [1] * 16, [5, 1, 1, 6, 3], [1, 15]])
def test_cached_equals_uncached(
    tiny_run: MakeRun, objective: str, coupling: str, chunks: list[int]
) -> None:
    run = tiny_run(objective=objective, coupling=coupling, layers=2)
    block = sharp_block(run, 1)
    x, more = inputs(run)
    whole = block.hidden(x, **more)
    cache = block.new_cache()
    parts, start = [], 0
    for length in chunks:
        part = slice(start, start + length)
        parts.append(block.hidden(x[:, part], cache=cache, **positions(more, part)))
        start += length
    assert torch.allclose(torch.cat(parts, dim=1), whole, atol=1e-5)
    assert [layer.length for layer in cache] == [16, 16]


def test_a_chunk_after_a_cache_is_causal(tiny_run: MakeRun) -> None:
    block = sharp_block(tiny_run(layers=2), 1)
    x, more = inputs(tiny_run())
    changed = x.clone()
    changed[:, 12] = (changed[:, 12] + 1) % 256
    out = []
    for text in (x, changed):
        cache = block.new_cache()
        block.hidden(text[:, :8], cache=cache, **positions(more, slice(0, 8)))
        rest = positions(more, slice(8, 16))
        out.append(block.hidden(text[:, 8:], cache=cache, **rest))
    assert torch.allclose(out[0][:, :4], out[1][:, :4], atol=1e-6)
    assert float((out[0] - out[1])[:, 4].abs().max()) > 1e-3


def test_truncate_forgets_a_rejected_draft(tiny_run: MakeRun) -> None:
    run = tiny_run(coupling="independent", layers=2)
    block = sharp_block(run, 0)
    x, _ = inputs(run)
    cache = block.new_cache()
    block.hidden(x[:, :5], cache=cache)
    block.hidden((x[:, 5:12] + 3) % 256, cache=cache)  # the draft
    for layer in cache:
        layer.truncate(5)
        assert layer.length == 5
    rest = block.hidden(x[:, 5:], cache=cache)
    assert torch.allclose(rest, block.hidden(x)[:, 5:], atol=1e-5)


def test_an_empty_cache_has_no_length_and_truncates() -> None:
    cache = LayerCache()
    cache.truncate(3)
    assert cache.length == 0


@pytest.mark.parametrize(("start", "length"), [(0, 17), (15, 2), (16, 1), (15, 5)])
def test_positions_beyond_the_context_are_refused(start: int, length: int) -> None:
    """Not broadcast: one row of the table would silently serve for all positions."""
    rotary = RotaryPositions(16, 8)
    with pytest.raises(UsageError, match="context"):
        rotary(torch.zeros(1, length, 3, 2, 8), start)


def rotated(rotary: RotaryPositions, x: torch.Tensor, start: int) -> torch.Tensor:
    """(length, head_width) as the q of one head."""
    q, k, v = rotary(x[None, :, None, None, :].expand(1, -1, 3, 1, -1), start)
    assert torch.equal(q, k) and torch.equal(v[0, 0], x)
    return q[0, 0]


@given(m=st.integers(0, 20), n=st.integers(0, 20), shift=st.integers(0, 43))
def test_rotary_products_depend_on_the_distance_alone(m: int, n: int, shift: int) -> None:
    rotary = RotaryPositions(64, 8)
    q, k = torch.randn(2, 1, 8, generator=seeded(m * 21 + n))
    here = (rotated(rotary, q, m) * rotated(rotary, k, n)).sum()
    there = (rotated(rotary, q, m + shift) * rotated(rotary, k, n + shift)).sum()
    assert float(here) == pytest.approx(float(there), abs=1e-4)
    assert float(rotated(rotary, q, m).norm()) == pytest.approx(float(q.norm()), rel=1e-5)


def test_rotary_turns_by_position_times_frequency() -> None:
    rotary = RotaryPositions(32, 4)
    turned = rotated(rotary, torch.tensor([1.0, 1.0, 0.0, 0.0]).expand(3, 4), 5)
    angles = torch.tensor([[p * 1.0, p * 10000.0**-0.5] for p in (5, 6, 7)])
    expected = torch.cat([angles.cos(), angles.sin()], dim=-1)
    assert torch.allclose(turned, expected, atol=1e-6)


def test_the_gradient_of_rotary_is_its_own() -> None:
    rotary = RotaryPositions(32, 4).double()
    qkv = torch.randn(2, 3, 3, 2, 4, dtype=torch.float64, generator=seeded(1)).requires_grad_()
    assert torch.autograd.gradcheck(lambda given: rotary(given, 5), (qkv,))


def test_the_order_of_earlier_bytes_matters(tiny_run: MakeRun) -> None:
    """Without positions one layer of attention would see a bag of bytes."""
    block = sharp_block(tiny_run(coupling="independent"), 0)
    x = torch.tensor([[10, 20, 30, 40], [20, 10, 30, 40]])
    first, second = block.hidden(x)[:, -1]
    assert float((first - second).abs().max()) > 1e-3


def test_rows_of_a_batch_do_not_mix(tiny_run: MakeRun) -> None:
    run = tiny_run()
    block = sharp_block(run, 1)
    x, more = inputs(run)
    alone = block.hidden(x[1:], **{name: v[1:] for name, v in more.items()})
    assert torch.allclose(block.hidden(x, **more)[1:], alone, atol=1e-5)


def test_what_a_block_owns() -> None:
    shape = ModelShape(3, 1, 16, 2, 16, "relay")
    assert Block(shape, first=True).relay_in is None
    later = Block(shape, first=False)
    assert later.relay_in is not None and torch.equal(later.relay_in.weight, torch.eye(16))
    alone = Block(ModelShape(3, 1, 16, 2, 16, "independent"), first=False)
    assert alone.relay_in is None and alone.z_in is None
    edm = Block(ModelShape(3, 1, 16, 2, 16, "independent"), "edm")
    assert edm.z_in is not None and not hasattr(edm, "head")


def test_sigma_modulation_starts_as_the_identity_and_then_reads_sigma() -> None:
    modulation = SigmaModulation(16, 2).requires_grad_(False)
    assert torch.equal(modulation(torch.tensor([0.1, 0.5])), torch.zeros(2, 2, 4, 16))
    torch.nn.init.normal_(modulation.outer.weight, generator=seeded(0))
    low, high = modulation(torch.tensor([0.1, 0.5]))
    assert float((low - high).abs().max()) > 0.1


@pytest.mark.parametrize("part", range(4))
def test_each_part_of_the_modulation_has_its_own_place_in_a_layer(part: int) -> None:
    """Scale and shift of attention's norm, then of the MLP's: one at a time, a layer by hand."""
    torch.manual_seed(0)
    layer = Layer(ModelShape(1, 1, 16, 2, 16), 1, RotaryPositions(16, 8)).requires_grad_(False)
    layer.attention_norm.normal_(1.0, 0.3, generator=seeded(1))
    layer.mlp_norm.normal_(1.0, 0.3, generator=seeded(2))
    x, modulation = torch.randn(2, 5, 16, generator=seeded(3)), torch.zeros(2, 4, 16)
    modulation[:, part] = torch.randn(2, 16, generator=seeded(4))
    scale, shift, mlp_scale, mlp_shift = modulation.unsqueeze(2).unbind(1)
    h = F.rms_norm(x, (16,), layer.attention_norm) * (1 + scale) + shift
    q, k, v = layer.rotary(layer.qkv(h).view(2, 5, 3, 2, 8), 0)
    later = torch.ones(5, 5).triu(1).bool()
    attention = (q @ k.mT / 8**0.5).masked_fill(later, -torch.inf).softmax(-1)
    between = x + layer.attention_out((attention @ v).transpose(1, 2).reshape(2, 5, 16))
    h = F.rms_norm(between, (16,), layer.mlp_norm) * (1 + mlp_scale) + mlp_shift
    expected = between + layer.down(layer.up(h).relu() ** 2)
    assert torch.allclose(layer(x, modulation), expected, atol=1e-5)
    assert float((layer(x, modulation) - layer(x)).abs().max()) > 0.1  # so that it could fail


def test_every_layer_has_a_modulation_of_its_own(tiny_run: MakeRun) -> None:
    run = tiny_run(objective="edm", coupling="independent", layers=2)
    block = sharp_block(run, 0)
    x, more = inputs(run)
    assert block.z_in is not None and block.sigma_modulation is not None
    expected = block.embedding(x) + block.z_in(more["z_scaled"])
    modulation = block.sigma_modulation(more["c_noise"])
    for layer, own in zip(block.layers, modulation.unbind(1), strict=True):
        expected = layer(expected, own)
    assert torch.allclose(block.hidden(x, **more), expected, atol=1e-5)


def test_make_block_depends_on_the_generator_alone() -> None:
    shape = ModelShape(2, 1, 16, 2, 16)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = make_block(shape, "bayes", 1, seeded(5)).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    again = make_block(shape, "bayes", 1, seeded(5)).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    other = make_block(shape, "bayes", 1, seeded(6)).state_dict()
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])


def test_a_fresh_block_predicts_nearly_uniformly() -> None:
    shape = ModelShape(1, 2, 64, 4, 32)
    block = make_block(shape, "bayes", 0, seeded(0)).requires_grad_(False)
    x = torch.randint(256, (4, 32), generator=seeded(1))
    hidden = block.hidden(x)
    assert 0.5 < float(hidden.std()) < 3.0  # the residual stream stays of order one
    assert float(block.logits(hidden).std()) < 0.5
