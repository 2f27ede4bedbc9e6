"""Writing with `--mode denoise`: whole outputs, one pass of each block, models that cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from protocol.errors import UsageError
from swarm.learning.model import Block
from swarm.writing.denoise import require_denoising, write
from swarm.writing.generate import Sampling
from tests.conftest import MakeModel, MakeRun

GREEDY = Sampling(temperature=0.0)


@pytest.mark.parametrize("coupling", ["independent", "look_ahead"])
def test_write(tiny_run: MakeRun, tiny_model: MakeModel, coupling: str) -> None:
    model = tiny_model(tiny_run(denoise_share=0.5, coupling=coupling))
    for prompt in (b"", b"a", bytes(range(40))):
        text = write(model, prompt, 20, GREEDY)  # more than a context: several traversals
        assert len(text) == 20 and text == write(model, prompt, 20, GREEDY)
    assert write(model, b"a", 9, Sampling(1.0, seed=1)) != write(
        model, b"a", 9, Sampling(1.0, 0, 2)
    )
    assert len(write(model, b"a", 1, GREEDY)) == 1
    for missing in ((0,), (1,), (2,), (0, 1)):
        assert len(write(model.without(*missing), b"abc", 9, GREEDY)) == 9


def test_one_parallel_pass_of_each_block(
    tiny_run: MakeRun, tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost of an output does not grow with a loop over its bytes."""
    model = tiny_model(tiny_run(denoise_share=0.5))
    passes: list[int] = []
    honest: Callable[..., torch.Tensor] = Block.hidden

    def counted(self: Block, x: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        passes.append(x.shape[1])
        return honest(self, x, *rest, **named)

    monkeypatch.setattr(Block, "hidden", counted)
    write(model, b"abc", 13, GREEDY)
    assert passes == [16, 16, 16]


def test_models_that_never_denoised_refuse(tiny_run: MakeRun, tiny_model: MakeModel) -> None:
    run = tiny_run()
    with pytest.raises(UsageError, match="not trained") as refused:
        write(tiny_model(run), b"a", 4, GREEDY)
    assert "--denoise-share" in refused.value.hint
    require_denoising(tiny_run(denoise_share=0.1))
