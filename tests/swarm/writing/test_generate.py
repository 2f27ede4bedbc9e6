"""Generation: greedy, sampled, cached, and beyond the context."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from protocol.errors import ModelError, UsageError
from swarm.learning.composition import ComposedModel
from swarm.writing.generate import Sampling, generate
from tests.conftest import ALL_KINDS, MakeModel, MakeRun

GREEDY = Sampling(temperature=0.0)


def greedy_uncached(model: ComposedModel, prompt: bytes, length: int) -> list[int]:
    written = list(prompt)
    for _ in range(length):
        log_probs = model.log_probs(torch.tensor([written]))
        written.append(int(log_probs[0, -1].argmax()))
    return written[len(prompt) :]


@pytest.mark.parametrize("kind", [k for k in ALL_KINDS if k[0] != "edm"])
@pytest.mark.parametrize("prompt", [b"a", b"blocks"])
def test_greedy_is_the_argmax_without_caches(
    tiny_run: MakeRun, tiny_model: MakeModel, kind: tuple[str, str], prompt: bytes
) -> None:
    run = tiny_run(objective=kind[0], coupling=kind[1])
    model = tiny_model(run)
    length = 16 - len(prompt) + 1  # the last byte is predicted from a full context
    expected = greedy_uncached(model, prompt, length)
    assert list(generate(model, prompt, length, GREEDY)) == expected
    assert len(set(expected)) > 1


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_sampling_is_a_function_of_the_seed(
    tiny_run: MakeRun, tiny_model: MakeModel, kind: tuple[str, str]
) -> None:
    model = tiny_model(tiny_run(objective=kind[0], coupling=kind[1]))
    first, again, other = (
        list(generate(model, b"abc", 20, Sampling(1.0, seed=seed))) for seed in (5, 5, 6)
    )
    assert first == again != other


def test_top_k_of_one_is_greedy(tiny_run: MakeRun, tiny_model: MakeModel) -> None:
    model = tiny_model(tiny_run())
    expected = list(generate(model, b"abc", 30, GREEDY))
    for seed in (1, 2):
        assert list(generate(model, b"abc", 30, Sampling(1.0, top_k=1, seed=seed))) == expected


@pytest.mark.parametrize("temperature", [1e-6, 1e-300, 5e-324])
def test_a_temperature_near_zero_is_greedy(
    tiny_run: MakeRun, tiny_model: MakeModel, temperature: float
) -> None:
    model = tiny_model(tiny_run())
    expected = list(generate(model, b"abc", 10, GREEDY))
    assert list(generate(model, b"abc", 10, Sampling(temperature))) == expected


@pytest.mark.parametrize("context", [2, 3, 16])
@pytest.mark.parametrize("prompt", [b"", b"a", b"x" * 16, b"some text " * 20])
@pytest.mark.parametrize("length", [0, 1, 50])
def test_the_length_is_exact_within_and_beyond_the_context(
    tiny_run: MakeRun, tiny_model: MakeModel, context: int, prompt: bytes, length: int
) -> None:
    model = tiny_model(tiny_run(context=context))
    written = list(generate(model, prompt, length, Sampling(1.0)))
    assert len(written) == length and all(0 <= byte < 256 for byte in written)


def test_beyond_the_context_the_newest_half_goes_on(
    tiny_run: MakeRun, tiny_model: MakeModel
) -> None:
    model = tiny_model(tiny_run())
    prompt = bytes(range(97, 97 + 16))
    written = list(generate(model, prompt, 10, GREEDY))
    # The first byte comes from the full context; then its newest 8 bytes are read again.
    assert written[0] == greedy_uncached(model, prompt, 1)[0]
    text = [*prompt, written[0]]
    assert written[1:] == greedy_uncached(model, bytes(text[-8:]), 9)


def test_a_long_prompt_is_read_from_its_end(tiny_run: MakeRun, tiny_model: MakeModel) -> None:
    model = tiny_model(tiny_run())
    tail = bytes(range(97, 97 + 16))
    one, two = (list(generate(model, p, 3, GREEDY)) for p in (tail, b"something else" + tail))
    assert one == two


def test_bytes_come_one_at_a_time(tiny_run: MakeRun, tiny_model: MakeModel) -> None:
    stream = generate(tiny_model(tiny_run()), b"abc", 10**9, GREEDY)
    assert len([next(stream) for _ in range(5)]) == 5


def test_choose_follows_the_distribution() -> None:
    log_probs = torch.full((256,), -math.inf)
    log_probs[[65, 66, 67]] = torch.tensor([0.6, 0.3, 0.1]).log()
    generator = torch.Generator().manual_seed(0)

    def shares(sampling: Sampling) -> dict[int, float]:
        drawn = Counter(sampling.choose(log_probs, generator) for _ in range(4000))
        return {byte: count / 4000 for byte, count in drawn.items()}

    plain = shares(Sampling(1.0))
    assert plain == pytest.approx({65: 0.6, 66: 0.3, 67: 0.1}, abs=0.03)
    two = shares(Sampling(1.0, top_k=2))
    assert two == pytest.approx({65: 2 / 3, 66: 1 / 3}, abs=0.03)
    # p^(1/T) renormalised: at T = 0.5 the squares.
    cold = shares(Sampling(0.5))
    squares = {65: 0.36 / 0.46, 66: 0.09 / 0.46, 67: 0.01 / 0.46}
    assert cold == pytest.approx(squares, abs=0.03)


def test_a_prediction_that_is_no_number_is_an_error_not_a_crash(
    tiny_run: MakeRun, tiny_model: MakeModel
) -> None:
    """Weights may be finite and still too large to compute with."""
    model = tiny_model(tiny_run())
    with torch.no_grad():
        for block in model.blocks:
            assert block is not None and block.head is not None
            block.head.weight.copy_(block.head.weight.sign() * 3e38)
    with pytest.raises(ModelError, match="not a number"):
        list(generate(model, b"a", 4, Sampling()))


def test_without_a_block_it_still_writes(tiny_run: MakeRun, tiny_model: MakeModel) -> None:
    model = tiny_model(tiny_run()).without(1)
    assert list(generate(model, b"ab", 8, GREEDY)) == greedy_uncached(model, b"ab", 8)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_k": 257},
    ],
)
def test_bad_sampling_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Sampling(**bad)
