"""Training all blocks on this machine: the loop, its checkpoints, and the model folder at the end.

Decides when to save and what a resumed run needs. The learning itself is `swarm.local`'s; what a
person sees of it is the caller's, through `Report`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file

from node.atomic import write_atomically
from node.data import Corpus, WindowStream, evaluation_windows, stream_seed
from node.model_folder import save_model
from protocol.errors import ModelError, UsageError
from swarm.composition import ComposedModel, fit_composition
from swarm.coupling import composed_versions
from swarm.evaluate import Evaluation, honest_ce
from swarm.local import LocalSwarm
from swarm.noise import refuse_leak, target_table
from swarm.run import Run

CHECKPOINT = "checkpoint.safetensors"
EVALUATION_BATCH = 64


@dataclass(frozen=True)
class Progress:
    """Where a run stands. `loss_nats` is the last block's training loss, smoothed: not its CE."""

    step: int
    steps: int
    loss_nats: float
    bytes_per_s: float
    valid_ce_nats: float | None


Report = Callable[[Progress], None]
StopAsked = Callable[[], bool]


@dataclass(frozen=True)
class Finished:
    """What a completed run gives: the model as saved, and its honest CE before and after."""

    model: ComposedModel
    before: Evaluation
    after: Evaluation
    seconds: float


def held_out_batches(
    corpus: Corpus, split: str, context: int, limit_bytes: int
) -> list[torch.Tensor]:
    """Windows of a split in order, as int64 batches."""
    windows = evaluation_windows(getattr(corpus, split), context, limit_bytes, split)
    return [torch.from_numpy(w.copy()).long() for w in _split(windows)]


def _split(windows: Any) -> list[Any]:
    return [windows[i : i + EVALUATION_BATCH] for i in range(0, len(windows), EVALUATION_BATCH)]


def check_leak(run: Run, corpus: Corpus) -> float:
    """Refuse a run whose lowest sigma shows the block its target; the leak in nats otherwise."""
    if run.training.objective == "plain":
        return 0.0
    counts = torch.from_numpy(corpus.train[: 1 << 24].copy()).long().bincount(minlength=256)
    return refuse_leak(run.noise, target_table(run.seed, run.model.width), counts)


class LocalTraining:
    """A run in progress in a folder."""

    def __init__(
        self, run: Run, corpus: Corpus, data_spec: str, folder: Path, device: torch.device
    ):
        corpus.require_window(run.model.context)
        self.leak_nats = check_leak(run, corpus)
        self.run, self.corpus, self.data_spec = run, corpus, data_spec
        self.folder, self.device = folder, device
        self.swarm = LocalSwarm(run, device)
        self.stream = WindowStream(
            corpus.train,
            run.model.context,
            run.training.batch,
            stream_seed("windows", run.seed),
            name="the train split",
        )

    def train(
        self,
        report: Report,
        stop_asked: StopAsked,
        save_every_s: float = 30.0,
        evaluate_bytes: int = 65536,
    ) -> Finished | None:
        """Train to the end; or until asked to stop: then a checkpoint is saved and None returned."""
        run, total = self.run, self.run.training.steps
        started = saved = time.monotonic()
        first_step, smooth = self.swarm.steps_done, float("nan")
        before = self._evaluate(evaluate_bytes) if first_step == 0 else None
        quick_ce: float | None = None
        while self.swarm.steps_done < total:
            if stop_asked():
                self.save_checkpoint(before)
                return None
            windows = torch.from_numpy(self.stream.batch_at(self.swarm.steps_done)).long()
            windows = windows.to(self.device)
            losses = self.swarm.step(windows[:, :-1], windows[:, 1:])
            loss = losses[-1].own_nats
            smooth = loss if smooth != smooth else 0.95 * smooth + 0.05 * loss
            done = self.swarm.steps_done
            if done % max(1, total // 10) == 0 and done < total:
                quick_ce = self._evaluate(8192).ce_nats
                if run.noise.adaptive:
                    self.swarm.adapt_sigmas(self._held_out("valid", 8192))
            seconds = time.monotonic() - started
            seen = (done - first_step) * run.training.batch * run.model.context
            report(Progress(done, total, smooth, seen / max(seconds, 1e-9), quick_ce))
            if time.monotonic() - saved > save_every_s:
                self.save_checkpoint(before)
                saved = time.monotonic()
        return self._finish(before, evaluate_bytes, time.monotonic() - started)

    def _finish(self, before: Evaluation | None, limit_bytes: int, seconds: float) -> Finished:
        fit = torch.cat(self._held_out("valid", 65536)).to(self.device)
        model = fit_composition(self._model(), fit[:, :-1], fit[:, 1:])
        after = self._evaluate(limit_bytes, model)
        before = before or self._before or after
        newest = self.swarm.versions.newest + 1
        staggered = self.run.model.relays and self.run.training.staggered
        versions = composed_versions(self.run.model.blocks, newest, staggered)
        save_model(self.folder, model, list(versions), self._facts(before, after))
        (self.folder / CHECKPOINT).unlink(missing_ok=True)
        return Finished(model, before, after, seconds)

    def _model(self) -> ComposedModel:
        return ComposedModel(self.run, self.swarm.composed_blocks())

    def _evaluate(self, limit_bytes: int, model: ComposedModel | None = None) -> Evaluation:
        """Honest CE on the test split; the composition is fitted on the valid split."""
        return honest_ce(model or self._model(), self._held_out("test", limit_bytes))

    def _held_out(self, split: str, limit_bytes: int) -> list[torch.Tensor]:
        return held_out_batches(self.corpus, split, self.run.model.context, limit_bytes)

    def _facts(self, before: Evaluation, after: Evaluation) -> dict[str, Any]:
        return {
            "data": {"spec": self.data_spec, "source": self.corpus.source, **self._corpus_id()},
            "trained_bytes_per_block": self.run.training.steps
            * self.run.training.batch
            * self.run.model.context,
            "leak_nats": self.leak_nats,
            "evaluation": {
                "split": "test",
                "size_bytes": after.size_bytes,
                "ce_before_nats": before.ce_nats,
                "ce_nats": after.ce_nats,
                "block_ce_nats": list(after.block_ce_nats),
            },
        }

    def _corpus_id(self) -> dict[str, str]:
        return {"name": self.corpus.name, "sha256": self.corpus.sha256}

    # Checkpoints.

    _before: Evaluation | None = None

    def save_checkpoint(self, before: Evaluation | None) -> None:
        """Everything that a resumed run needs, in one file that is there whole or not at all."""
        tensors, numbers = self.swarm.state()
        self._before = before or self._before
        facts = {
            "run": self.run.to_dict(),
            "data_spec": self.data_spec,
            "corpus": self._corpus_id(),
            "numbers": numbers,
            "ce_before": self._before.ce_nats if self._before else None,
            "before_bytes": self._before.size_bytes if self._before else 0,
        }
        contiguous = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
        write_atomically(
            self.folder / CHECKPOINT,
            lambda half: save_file(contiguous, half, {"blockswarm": json.dumps(facts)}),
        )

    def load_checkpoint(self) -> None:
        facts, tensors = _read_checkpoint(self.folder)
        if facts["corpus"] != self._corpus_id():
            raise UsageError(
                "the data is not what this run was started on: its hash differs",
                f"give the same text as before (--data {facts['data_spec']}), or a new folder",
            )
        self.swarm.load_state(tensors, facts["numbers"])
        if facts.get("ce_before") is not None:
            self._before = Evaluation(facts["ce_before"], (), facts["before_bytes"])


def checkpoint_run(folder: Path) -> tuple[Run, str]:
    """The run and the data of the checkpoint in a folder: `--resume` needs no other option."""
    facts, _ = _read_checkpoint(folder)
    return Run.from_dict(facts["run"]), str(facts["data_spec"])


def _read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    path = folder / CHECKPOINT
    if not path.exists():
        raise UsageError(
            f"there is nothing to resume in {folder}",
            f"start a run with: blockswarm train -o {folder}",
        )
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["blockswarm"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if not {"run", "data_spec", "corpus", "numbers"} <= set(facts):
            raise KeyError("run")
    except (OSError, safetensors.SafetensorError, KeyError, ValueError) as error:
        raise ModelError(
            f"{path} is damaged: {error}", "remove it and start the run again"
        ) from error
    return facts, tensors
