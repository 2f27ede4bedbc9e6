"""What every test shares: one torch thread, repeatable property tests, tiny runs and models."""

from __future__ import annotations

import dataclasses
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from benchmarks.wan import namespaces
from swarm.learning.composition import ComposedModel
from swarm.learning.model import Block
from swarm.learning.worker import initial_block
from swarm.run import ModelShape, Noise, Run, Training

# Derandomized: a red run of CI is red again when it is repeated. No deadline: CI machines stall.
settings.register_profile("blockswarm", deadline=None, derandomize=True)
settings.load_profile("blockswarm")

# A shell starts background jobs with SIGINT ignored, and nohup does so with SIGHUP; their children
# inherit that, and tests that press Ctrl-C or hang up would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

MakeRun = Callable[..., Run]
MakeModel = Callable[..., ComposedModel]

# Every objective with every coupling that it works with.
ALL_KINDS = (
    ("bayes", "independent"),
    ("bayes", "relay"),
    ("bayes", "look_ahead"),
    ("plain", "independent"),
    ("plain", "look_ahead"),
    ("edm", "independent"),
)


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """More threads than cores make tiny matrices many times slower, not faster."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def same_numbers_each_time() -> None:
    """torch begins with another seed in every process: a test's random data would be others."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_run() -> MakeRun:
    """A run of tiny shapes; any field of its sections can be given by name."""

    def make(**changes: Any) -> Run:
        values: dict[str, Any] = {
            "blocks": 3,
            "layers": 1,
            "width": 16,
            "heads": 2,
            "context": 16,
            "steps": 100,
            "steps_per_round": 3,
            "batch": 4,
            "warmup_steps": 2,
            "learning_rate": 2e-3,
            **changes,
        }
        sections: dict[str, Any] = {}
        for name, kind in (("model", ModelShape), ("noise", Noise), ("training", Training)):
            fields = {f.name for f in dataclasses.fields(kind)}
            sections[name] = kind(**{k: values.pop(k) for k in list(values) if k in fields})
        return Run(**sections, **values)

    return make


@pytest.fixture(scope="session")
def tiny_model() -> MakeModel:
    """A composed model with random heads of order one, so that its predictions are far from flat.

    As a fresh block's head is nearly zero, a wrong composition of fresh blocks would look right.
    """

    def make(run: Run, **changes: Any) -> ComposedModel:
        blocks = [sharp_block(run, index) for index in range(run.model.blocks)]
        return ComposedModel(run, blocks, **changes)

    return make


@pytest.fixture
def relay_model(tiny_run: MakeRun, tiny_model: MakeModel) -> ComposedModel:
    """Blocks that hand a latent on, weighted unlike: what order and weights change shows."""
    return tiny_model(tiny_run(coupling="look_ahead"), weights=(2.0, 0.0, 1.0), temperature=0.8)


@pytest.fixture
def mean_model(tiny_run: MakeRun, tiny_model: MakeModel) -> ComposedModel:
    """Blocks that do not know of each other; the mean of what they say counts."""
    return tiny_model(tiny_run(coupling="independent"))


def sharp_block(run: Run, index: int) -> Block:
    block = initial_block(run, index)
    generator = torch.Generator().manual_seed(1000 + index)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if name.startswith(("head.", "denoised_out.", "sigma_modulation.outer")):
                parameter.normal_(0.0, 0.3, generator=generator)
            elif name == "relay_in.weight":
                # Not the identity that it starts from: a transposed relay would look right.
                parameter.normal_(0.0, parameter.shape[0] ** -0.5, generator=generator)
    return block.requires_grad_(False)


@pytest.fixture(scope="session")
def periodic() -> Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]:
    """`(count, context)` -> inputs and targets cut from a text of period 8 at various phases."""

    def make(count: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        text = torch.tensor(list(b"blockswa" * (context // 4)))
        windows = torch.stack([text[i % 8 : i % 8 + context + 1] for i in range(count)])
        return windows[:, :-1], windows[:, 1:]

    return make


@pytest.fixture(scope="session")
def wan_rights() -> None:
    """What needs network namespaces is skipped where a person may not make them (they need root),
    and says how to get the rights: nothing of ours is wrong then."""
    try:
        namespaces.check_rights()
    except namespaces.NoRights as error:
        pytest.skip(f"{error.message}: {error.hint}")


@pytest.fixture
def closed() -> Iterator[int]:
    """A port on which nothing listens, and which nobody else can take meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
