"""Training on one machine: deterministic, resumable, and careful with its checkpoints."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import node.local.training
import node.machine.tensor_file
from node.console.progress import Progress
from node.data.corpus import Corpus, load_corpus
from node.local.model_folder import has_model, load_model, read_manifest
from node.local.training import CHECKPOINT, LocalTraining, cut_off_run
from node.machine.atomic import StorageError
from protocol.errors import LeakError, ModelError, UsageError
from swarm.learning.evaluate import Evaluation
from swarm.learning.local import LocalSwarm
from swarm.run import ModelShape, Noise, Run, Training

CPU = torch.device("cpu")
RUN = Run(
    ModelShape(blocks=2, layers=1, width=16, heads=2, context=16),
    training=Training(steps=20, steps_per_round=3, batch=2, learning_rate=2e-3),
)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{n} green bottles hanging on the wall\n" for n in range(400)))
    return load_corpus(str(path))


def train(
    run: Run,
    corpus: Corpus,
    folder: Path,
    stop: Callable[[], bool] = lambda: False,
    resume: bool = False,
    evaluate_bytes: int = 64,
) -> list[Progress]:
    training = LocalTraining(run, corpus, "text.txt", folder, CPU)
    if resume:
        training.load_checkpoint()
    seen: list[Progress] = []
    training.train(seen.append, stop, evaluate_bytes=evaluate_bytes)
    return seen


def stop_after(steps: int) -> Callable[[], bool]:
    calls = iter(range(steps))
    return lambda: next(calls, None) is None


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("coupling", ["look_ahead", "independent"])
def test_stopped_and_resumed_equals_uninterrupted(
    corpus: Corpus, tmp_path: Path, coupling: str
) -> None:
    run = replace(RUN, model=replace(RUN.model, coupling=coupling))
    progress = train(run, corpus, tmp_path / "whole")
    assert [p.step for p in progress] == list(range(1, 21))
    assert progress[-1].valid_ce_nats is not None
    part = tmp_path / "part"
    train(run, corpus, part, stop_after(7))
    assert not (part / "manifest.json").exists()
    assert cut_off_run(part).run == run
    train(run, corpus, part, stop_after(4), resume=True)
    assert [p.step for p in train(run, corpus, part, resume=True)] == list(range(12, 21))
    assert weights(part) == weights(tmp_path / "whole")
    assert not (part / CHECKPOINT).exists()
    figures = [read_manifest(f)["evaluation"] for f in (part, tmp_path / "whole")]
    assert figures[0] == figures[1]


def test_a_resumed_run_measures_the_same_bytes(corpus: Corpus, tmp_path: Path) -> None:
    train(RUN, corpus, tmp_path / "whole", evaluate_bytes=64)
    train(RUN, corpus, tmp_path / "m", stop_after(5), evaluate_bytes=64)
    train(RUN, corpus, tmp_path / "m", resume=True, evaluate_bytes=400)
    figures = [read_manifest(tmp_path / name)["evaluation"] for name in ("m", "whole")]
    assert figures[0] == figures[1] and figures[0]["size_bytes"] == 64


def test_a_resumed_run_may_measure_more_bytes_before_and_after(
    corpus: Corpus, tmp_path: Path
) -> None:
    train(RUN, corpus, tmp_path / "whole", evaluate_bytes=400)
    train(RUN, corpus, tmp_path / "m", stop_after(5), evaluate_bytes=64)
    training = LocalTraining(RUN, corpus, "text.txt", tmp_path / "m", CPU)
    training.load_checkpoint(evaluate_bytes=400)
    finished = training.train(lambda _: None, lambda: False)
    assert finished is not None and finished.before.size_bytes == finished.after.size_bytes == 400
    figures = [read_manifest(tmp_path / name)["evaluation"] for name in ("m", "whole")]
    assert figures[0] == figures[1]


SPLIT_LETTERS = {"train": b"abcdefgh", "valid": b"ijklmnop", "test": b"qrstuvwx"}


@pytest.fixture
def lettered() -> Corpus:
    """A text that tells of every byte which split it is from."""
    generator = np.random.default_rng(0)
    splits = {
        name: generator.choice(np.frombuffer(letters, dtype=np.uint8), 3000)
        for name, letters in SPLIT_LETTERS.items()
    }
    return Corpus("lettered", "made up", "0" * 64, **splits)


def only_from(split: str, *windows: torch.Tensor) -> bool:
    return all(set(each.flatten().tolist()) <= set(SPLIT_LETTERS[split]) for each in windows)


def test_each_split_is_used_for_its_own_purpose(
    lettered: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained on train; fitted and watched on valid; reported on test."""
    used: dict[str, list[torch.Tensor]] = {"steps": [], "fit": [], "ce": []}
    step = LocalSwarm.step
    fit, ce = node.local.training.fit_composition, node.local.training.honest_ce

    def stepped(self: LocalSwarm, x: torch.Tensor, y: torch.Tensor) -> Any:
        used["steps"] += [x, y]
        return step(self, x, y)

    def fitted(model: Any, inputs: torch.Tensor, targets: torch.Tensor, *spare: float) -> Any:
        used["fit"] += [inputs, targets]
        return fit(model, inputs, targets, *spare)

    def measured(model: Any, windows: list[torch.Tensor]) -> Evaluation:
        used["ce"] += windows[:1]
        return ce(model, windows)

    monkeypatch.setattr(LocalSwarm, "step", stepped)
    monkeypatch.setattr(node.local.training, "fit_composition", fitted)
    monkeypatch.setattr(node.local.training, "honest_ce", measured)
    train(RUN, lettered, tmp_path / "m")
    assert len(used["steps"]) == 2 * RUN.training.steps
    assert only_from("train", *used["steps"])
    assert len(used["fit"]) == 2 and only_from("valid", *used["fit"])
    before, *glances, after = used["ce"]
    assert only_from("test", before, after)
    assert glances and only_from("valid", *glances)


def test_the_seed_decides_which_windows_are_drawn(lettered: Corpus, tmp_path: Path) -> None:
    def drawn(seed: int) -> list[bytes]:
        training = LocalTraining(replace(RUN, seed=seed), lettered, "x", tmp_path / "m", CPU)
        return [training.stream.batch_at(step).tobytes() for step in range(5)]

    assert drawn(1) == drawn(1)
    assert not set(drawn(1)) & set(drawn(2))


def test_seed_decides_the_weights(corpus: Corpus, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(replace(RUN, seed=seed), corpus, tmp_path / name)
    assert weights(tmp_path / "a") == weights(tmp_path / "b") != weights(tmp_path / "c")
    model, manifest = load_model(tmp_path / "a", CPU)
    assert model.run.seed == 1
    assert manifest["evaluation"]["ce_nats"] < manifest["evaluation"]["ce_before_nats"]


def test_full_disk_keeps_the_earlier_checkpoint(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "m"
    train(RUN, corpus, folder, stop_after(5))
    kept = (folder / CHECKPOINT).read_bytes()

    def full(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(kept[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(node.machine.tensor_file, "save_file", full)
        with pytest.raises(StorageError, match="the disk is full"):
            train(RUN, corpus, folder, stop_after(3), resume=True)
    assert (folder / CHECKPOINT).read_bytes() == kept
    train(RUN, corpus, folder, resume=True)
    train(RUN, corpus, tmp_path / "whole")
    assert weights(folder) == weights(tmp_path / "whole")


def test_other_text_is_not_resumed_on(corpus: Corpus, tmp_path: Path) -> None:
    train(RUN, corpus, tmp_path / "m", stop_after(2))
    other = replace(corpus, sha256="0" * 64)
    with pytest.raises(UsageError, match="not the text"):
        train(RUN, other, tmp_path / "m", resume=True)
    bigger = replace(RUN, model=replace(RUN.model, width=32))
    with pytest.raises(ModelError, match="does not fit"):
        train(bigger, corpus, tmp_path / "m", resume=True)


def test_damaged_checkpoints(corpus: Corpus, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    with pytest.raises(UsageError, match="nothing to resume"):
        cut_off_run(folder)
    train(RUN, corpus, folder, stop_after(2))
    path = folder / CHECKPOINT
    whole = path.read_bytes()
    tensors = {name: value.clone() for name, value in load_file(path).items()}  # off the file
    for content in (b"", whole[:50], whole[: len(whole) // 2], b"x" * 200):
        path.write_bytes(content)
        with pytest.raises(ModelError, match="is damaged"):
            cut_off_run(folder)
    described = json.loads(_header(whole)["__metadata__"]["blockswarm"])
    endless = json.dumps({**described, "threads": float("inf")})
    for facts in ("[]", "{}", "{", json.dumps({"run": {}}), "[" * 100_000, endless):
        save_file(tensors, path, {"blockswarm": facts})
        with pytest.raises(ModelError, match="is damaged"):
            cut_off_run(folder)
    for change in ({"seconds": []}, {"before_bytes": float("inf")}, {"ce_before_nats": "low"}):
        save_file(tensors, path, {"blockswarm": json.dumps({**described, **change})})
        with pytest.raises(ModelError, match="is damaged"):
            train(RUN, corpus, folder, resume=True)


def _header(file: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])
    return found


def test_refusals_before_any_work(corpus: Corpus, tmp_path: Path) -> None:
    leaky = replace(RUN, noise=Noise(sigma_min=0.1, sigma_max=10))
    with pytest.raises(LeakError, match="sigma_min"):
        LocalTraining(leaky, corpus, "text.txt", tmp_path / "m", CPU)
    wide = replace(RUN, model=replace(RUN.model, context=4096))
    with pytest.raises(UsageError, match="one window of 4096"):
        LocalTraining(wide, corpus, "text.txt", tmp_path / "m", CPU)
    assert not (tmp_path / "m").exists()


def test_a_loss_that_is_no_number_ends_the_run(corpus: Corpus, tmp_path: Path) -> None:
    training = LocalTraining(RUN, corpus, "text.txt", tmp_path / "m", CPU)
    with torch.no_grad():
        training.swarm.workers[1].block.embedding.weight.fill_(torch.nan)
    training.before = Evaluation(5.5, (), 1)
    with pytest.raises(UsageError, match="block 1 diverged") as caught:
        training.train(lambda _: None, lambda: False)
    assert "--learning-rate 0.00067" in caught.value.hint


def test_nor_is_a_model_that_the_last_step_spoilt_written(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loss, which is measured before the step, was a number."""
    honest = LocalSwarm.step

    def step(swarm: LocalSwarm, x: torch.Tensor, y: torch.Tensor) -> Any:
        losses = honest(swarm, x, y)
        if swarm.steps_done == RUN.training.steps:
            with torch.no_grad():
                swarm.workers[1].block.head.bias[0] = torch.inf
        return losses

    monkeypatch.setattr(LocalSwarm, "step", step)
    with pytest.raises(UsageError, match="block 1 diverged: its CE after the last step is nan"):
        train(RUN, corpus, tmp_path / "m")
    assert not has_model(tmp_path / "m")
