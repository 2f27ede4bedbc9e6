"""The memory that training here needs: against real tensors, and what is refused at once."""

from __future__ import annotations

import resource
from dataclasses import replace

import pytest
import torch

from node.local import memory as local_memory
from node.local.memory import (
    free_memory_bytes,
    is_out_of_memory,
    memory_errors_told,
    refuse_too_large,
    training_memory_bytes,
)
from protocol.errors import UsageError
from swarm.learning.local import LocalSwarm
from swarm.run import ModelShape, Run, Training
from tests.conftest import MakeRun

CPU = torch.device("cpu")


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("staggered", [True, False])
@pytest.mark.parametrize("coupling", ["independent", "relay", "look_ahead"])
def test_the_estimate_against_a_real_run(
    tiny_run: MakeRun, coupling: str, staggered: bool, optimizer: str
) -> None:
    """Everything that lives between two steps; the rest of the estimate is activations."""
    more = {"coupling": coupling, "staggered": staggered, "optimizer": optimizer}
    run = tiny_run(blocks=4, width=64, batch=1, context=2, steps=10, **more)
    swarm = LocalSwarm(run, CPU)
    x = torch.randint(256, (1, 3), generator=torch.Generator().manual_seed(0))
    for _ in range(10):
        swarm.step(x[:, :-1], x[:, 1:])
    real = sum(tensor.nbytes for tensor in swarm.state()[0].values())
    for worker in swarm.workers:
        real += sum(p.grad.nbytes for p in worker.block.parameters() if p.grad is not None)
    assert training_memory_bytes(run) == pytest.approx(real, rel=0.04)


def test_a_short_run_never_holds_all_versions() -> None:
    long = Run(ModelShape(blocks=8), training=Training(steps=1000))
    short = replace(long, training=replace(long.training, steps=50))
    assert training_memory_bytes(short) < training_memory_bytes(long)


@pytest.mark.parametrize(
    "shape",
    [
        ModelShape(blocks=1000, layers=200, width=32768),
        ModelShape(blocks=4, layers=8, width=32768),
    ],
)
def test_what_no_machine_has_is_refused_at_once(shape: ModelShape) -> None:
    with pytest.raises(UsageError, match=r"needs about [\d,]+\.\d [TE]B .* is free here") as caught:
        refuse_too_large(Run(shape), CPU)
    assert "--width" in caught.value.hint and "--layers" in caught.value.hint


def test_the_default_run_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_memory, "free_memory_bytes", lambda device: 400 << 20)
    refuse_too_large(Run(), CPU)
    monkeypatch.setattr(local_memory, "free_memory_bytes", lambda device: None)
    refuse_too_large(Run(ModelShape(width=32768)), CPU)  # nobody can say: it is tried


def test_a_limit_of_the_shell_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    without = free_memory_bytes(CPU)
    limit = (1 << 40, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limit)
    assert without is not None and free_memory_bytes(CPU) == pytest.approx(without, rel=0.2)
    limit = (1 << 20, resource.RLIM_INFINITY)  # less than this process has already
    assert free_memory_bytes(CPU) == 0


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        type("OutOfMemoryError", (RuntimeError,), {})("CUDA"),
        RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    ],
)
def test_errors_of_memory(error: BaseException) -> None:
    assert is_out_of_memory(error)


def test_torch_has_no_memory_left() -> None:
    with pytest.raises(UsageError, match="not enough memory") as caught, memory_errors_told("less"):
        torch.empty(1 << 50)
    assert caught.value.hint == "less"
    with pytest.raises(RuntimeError, match="other"), memory_errors_told():
        raise RuntimeError("some other mistake")
