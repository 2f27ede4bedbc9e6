"""Devices, threads and precision."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from node.machine import device
from node.machine.device import autocast_dtype, available_devices, choose_device, make_deterministic
from protocol.errors import UsageError
from swarm.learning.local import LocalSwarm
from swarm.run import ModelShape, Run, Training

CPU = torch.device("cpu")


def test_the_best_device_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("cpu") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device() == torch.device("mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert available_devices() == ["cuda:0", "cuda:1", "mps", "cpu"]
    assert choose_device() == torch.device("cuda")
    assert choose_device("cuda:1") == torch.device("cuda:1")


@pytest.mark.parametrize("name", ["", "gpu", "cpu:x", "cpu:0", "cuda:99", "cuda:-1", "mps:1"])
def test_a_device_that_is_not_there(name: str) -> None:
    with pytest.raises(UsageError, match="no device") as caught:
        choose_device(name)
    assert "cpu" in caught.value.hint


@pytest.mark.parametrize("threads", [0, -1, 10**9])
def test_bad_threads(threads: int) -> None:
    with pytest.raises(UsageError, match="threads"):
        make_deterministic(threads)


def losses(autocast: torch.dtype | None) -> tuple[list[float], LocalSwarm]:
    run = Run(
        ModelShape(blocks=2, layers=1, width=32, heads=2, context=16), training=Training(steps=20)
    )
    swarm = LocalSwarm(run, CPU, autocast)
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(10):
        windows = torch.randint(97, 105, (4, 17), generator=generator)
        found += [loss.own_nats for loss in swarm.step(windows[:, :-1], windows[:, 1:])]
    return found, swarm


@pytest.mark.parametrize(
    ("flags", "width", "bf16"),
    [
        ("flags\t\t: fpu avx2 avx512_bf16 sse", 512, True),
        ("flags\t\t: fpu amx_bf16", 1024, True),
        ("flags\t\t: fpu amx_bf16", 128, False),  # casts cost what they gain
        ("flags\t\t: fpu avx2 avx512f", 1024, False),  # emulated: up to 60 times slower
        ("model name : xbf16 avx512_bf16", 1024, False),
        (None, 1024, False),
    ],
)
def test_bf16_only_on_cpus_that_compute_with_it(
    flags: str | None, width: int, bf16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cpuinfo"
    if flags is not None:
        path.write_text(f"processor\t: 0\n{flags}\nbogomips\t: 1\n")
    monkeypatch.setattr(device, "_cpu_flags", partial(device._cpu_flags, path))
    assert autocast_dtype(CPU, width) is (torch.bfloat16 if bf16 else None)
    assert autocast_dtype(torch.device("mps"), width) is None


def test_bf16_stays_close() -> None:
    exact, plain = losses(None)
    close, cast = losses(torch.bfloat16)
    assert plain.workers[0].autocast is None
    assert close != exact  # it did something
    assert max(abs(a - b) for a, b in zip(exact, close, strict=True)) < 0.05
    assert {p.dtype for p in cast.workers[0].block.parameters()} == {torch.float32}
