"""The model that the serving benchmark serves, and the judges of what it writes.

Decides its size and training (`blockswarm train`, kept in the cache folder, never committed), the
end-to-end reference on the same bytes, and the measures of a text: CE under the reference, CE under
the composed model, repetition. Knows nothing of hosts or of the network.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.corpus import benchmark_corpus
from benchmarks.harness import ROOT
from benchmarks.reference import ReferenceWorker
from node.data.corpus import Corpus
from node.data.download import cache_folder
from node.data.windows import WindowStream, stream_seed
from node.local.model_folder import has_model, load_model
from swarm.learning.composition import ComposedModel
from swarm.run import Run
from swarm.writing.generate import Sampling
from swarm.writing.speculative import choose_rows

REPEATED_BYTES = 8  # a run of so many bytes that was there before counts as repetition
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Recipe:
    """How the model is trained."""

    layers: int
    width: int
    batch: int
    steps: int
    blocks: int = 3
    heads: int = 4
    context: int = 256
    denoise_share: float = 0.25  # one model for all modes: `denoise` needs to be trained for
    seed: int = 0

    @property
    def folder(self) -> Path:
        name = sha256(json.dumps(vars(self), sort_keys=True).encode()).hexdigest()[:12]
        return cache_folder() / "benchmarks" / f"sweep-{name}"


def recipe(quick: bool) -> Recipe:
    return Recipe(1, 64, 4, 40) if quick else Recipe(2, 96, 4, 800)


def trained(wanted: Recipe) -> Path:
    """The model folder; trained now if it is not in the cache. A cut-off training goes on."""
    folder = wanted.folder / "model"
    if has_model(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "node.cli", "train", "-o", str(folder)]
    if (folder / "checkpoint.safetensors").exists():
        command.append("--resume")
    else:
        command += ["--data", _data_path(), "--threads", "1", "--evaluate-bytes", "8192"]
        for name, value in vars(wanted).items():
            command += [f"--{name.replace('_', '-')}", str(value)]
    subprocess.run(command, check=True, cwd=ROOT)
    return folder


def _data_path() -> str:
    """The benchmarks' WikiText-2 as `train` names it."""
    beside = ROOT.parent / "shared" / "data" / "wikitext-2"
    named = os.environ.get("BLOCKSWARM_WIKITEXT2", "")
    return named or (str(beside) if beside.is_dir() else "wikitext-2")


@dataclass(frozen=True)
class Judges:
    """Loaded models, and texts to begin from."""

    model: ComposedModel
    reference: ReferenceWorker
    corpus: Corpus

    def prompts(self, count: int, length: int, after: int) -> list[tuple[bytes, bytes]]:
        """Texts of the valid split, far from each other: a prompt and what really follows."""
        text = self.corpus.valid
        step = (len(text) - length - after) // count
        places = [step // 2 + place * step for place in range(count)]
        return [
            (text[p : p + length].tobytes(), text[p + length : p + length + after].tobytes())
            for p in places
        ]

    def ce_reference(self, prompts: Sequence[bytes], outputs: Sequence[bytes]) -> float:
        return self._ce(prompts, outputs, lambda x: self.reference.head_log_probs(x)[-1])

    def ce_composed(self, prompts: Sequence[bytes], outputs: Sequence[bytes]) -> float:
        return self._ce(prompts, outputs, self.model.log_probs)

    def _ce(self, prompts: Sequence[bytes], outputs: Sequence[bytes], judge: object) -> float:
        """Mean nats per output byte, each given the prompt and the output before it."""
        assert callable(judge)
        total, count = 0.0, 0
        for prompt, output in zip(prompts, outputs, strict=True):
            text = torch.tensor([list(prompt + output)])
            log_probs = judge(text[:, :-1])[0, len(prompt) - 1 :]
            total -= float(log_probs.gather(-1, text[0, len(prompt) :, None]).double().sum())
            count += len(output)
        return total / count

    @torch.no_grad()
    def composed_samples(
        self, prompts: Sequence[bytes], length: int, sampling: Sampling
    ) -> list[bytes]:
        """What autoregression with the composed model writes: all prompts at once, locally."""
        x = torch.tensor([list(prompt) for prompt in prompts])
        caches, generator = self.model.new_caches(), torch.Generator().manual_seed(sampling.seed)
        written: list[Tensor] = []
        for _ in range(length):
            log_probs = self.model.log_probs(x, generator, caches)[:, -1]
            x = choose_rows(log_probs, sampling, generator)[:, None]
            written.append(x)
        return [bytes(row.tolist()) for row in torch.cat(written, 1)]


def judges(wanted: Recipe) -> Judges:
    model, _ = load_model(trained(wanted), CPU)
    for block in model.blocks:
        assert block is not None
        block.requires_grad_(False)
    corpus = benchmark_corpus()
    return Judges(model, reference(wanted, model.run, corpus), corpus)


def reference(wanted: Recipe, run: Run, corpus: Corpus) -> ReferenceWorker:
    """The same layers trained end to end on the same windows; from the cache if it is there."""
    path = wanted.folder / "reference.safetensors"
    worker = ReferenceWorker(run, CPU)
    if path.exists():
        worker.model.load_state_dict(load_file(path))
    else:
        seed = stream_seed("windows", run.seed)
        shape, training = run.model, run.training
        stream = WindowStream(corpus.train, shape.context, training.batch, seed, name="train")
        for step in range(training.steps):
            windows = torch.from_numpy(stream.batch_at(step)).long()
            worker.step(windows[:, :-1], windows[:, 1:])
        half = path.with_suffix(".tmp")
        save_file(worker.model.state_dict(), half)
        half.replace(path)
    worker.model.requires_grad_(False)
    return worker


def parameters(model: ComposedModel) -> int:
    return sum(p.numel() for block in model.blocks if block is not None for p in block.parameters())


def repetition(prompts: Sequence[bytes], outputs: Sequence[bytes]) -> float:
    """The share of output bytes that end a run of `REPEATED_BYTES` which was in the text before."""
    repeated, count = 0, 0
    for prompt, output in zip(prompts, outputs, strict=True):
        text = prompt + output
        for end in range(len(prompt) + 1, len(text) + 1):
            run = text[max(0, end - REPEATED_BYTES) : end]
            repeated += text.find(run, 0, end - 1) >= 0
            count += 1
    return repeated / count
