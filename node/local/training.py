"""Train all blocks on this machine: the loop, its checkpoints, and the model folder at the end.

The learning itself is `swarm.learning.local`'s. Progress is displayed by the caller, through
`Report`.
"""

from __future__ import annotations

import math
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from node.console.progress import Progress, Report, StopAsked
from node.data.corpus import Corpus
from node.data.windows import WindowStream, evaluation_windows, stream_seed
from node.local.model_folder import MANIFEST, save_model
from node.machine.atomic import remove_file
from node.machine.device import autocast_dtype
from node.machine.tensor_file import DamagedFile, read_tensors, write_tensors
from protocol.errors import BlockswarmError, ModelError, UsageError
from swarm.learning.composition import SPARE_NATS, ComposedModel, fit_composition
from swarm.learning.coupling import composed_versions
from swarm.learning.evaluate import Evaluation, honest_ce
from swarm.learning.local import LocalSwarm
from swarm.learning.noise import refuse_leak, target_table
from swarm.run import Run

CHECKPOINT = "checkpoint.safetensors"
EVALUATION_BATCH = 64
FIT_BYTES = 32768  # enough to fit one weight per block and a temperature
GLANCE_BYTES = 8192  # for the CE that is shown while a run is under way


@dataclass(frozen=True)
class Finished:
    """A completed run: the saved model, and the honest CE before and after training."""

    model: ComposedModel
    before: Evaluation
    after: Evaluation
    seconds: float


def held_out_batches(
    corpus: Corpus, split: str, context: int, limit_bytes: int, batch: int = EVALUATION_BATCH
) -> list[torch.Tensor]:
    """Contiguous windows of a split, as int64 batches."""
    name = f"the {split} split of {corpus.name}"
    windows = evaluation_windows(getattr(corpus, split), context, limit_bytes, name)
    starts = range(0, len(windows), batch)
    return [torch.from_numpy(windows[i : i + batch].copy()).long() for i in starts]


def check_leak(run: Run, corpus: Corpus) -> float:
    """The leak of z in nats. Raises if it is above the run's limit."""
    if run.training.objective == "plain":
        return 0.0
    counts = torch.from_numpy(corpus.train[: 1 << 24].copy()).long().bincount(minlength=256)
    return refuse_leak(run.noise, target_table(run.seed, run.model.width), counts)


class LocalTraining:
    """A run in progress in a folder that the caller has locked (`node.machine.atomic`)."""

    def __init__(
        self, run: Run, corpus: Corpus, data_spec: str, folder: Path, device: torch.device
    ):
        corpus.require_window(run.model.context)
        self.leak_nats = check_leak(run, corpus)
        self.run, self.corpus, self.data_spec = run, corpus, data_spec
        self.folder, self.device = folder, device
        self.swarm = LocalSwarm(run, device, autocast_dtype(device, run.model.width))
        self.before: Evaluation | None = None
        self.seconds = 0.0  # of training, including those before a resume
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
        """Train to the end. If asked to stop, save a checkpoint and return None.

        The first checkpoint is written before the first step: a folder that is not writable is
        noticed at once, and after kill -9 at any moment the run can be resumed.
        """
        before = self.before = self.before or self._evaluate("test", evaluate_bytes)
        if self.swarm.steps_done == 0:
            self.save_checkpoint()
        clock = _Clock(self.swarm.steps_done, self.seconds)
        saved_s, smooth, ce = clock.seconds(), math.nan, None
        while self.swarm.steps_done < self.run.training.steps:
            if stop_asked():
                self.save_checkpoint()
                return None
            loss = self._step()
            smooth = loss if math.isnan(smooth) else 0.95 * smooth + 0.05 * loss
            ce = self._glance() or ce
            self.seconds = clock.seconds()
            report(self._progress(clock, smooth, ce))
            if self.seconds - saved_s > save_every_s:
                self.save_checkpoint()
                saved_s = clock.seconds()
        return self._finish(before)

    def _step(self) -> float:
        step = self.swarm.steps_done
        windows = torch.from_numpy(self.stream.batch_at(step)).long().to(self.device)
        losses = self.swarm.step(windows[:, :-1], windows[:, 1:])
        for block, loss in enumerate(losses):
            if not math.isfinite(loss.own_nats):
                raise self._diverged(block, f"loss at step {step}", loss.own_nats)
        return losses[-1].own_nats

    def _diverged(self, block: int, what: str, value: float) -> UsageError:
        slower = min(3e-3, self.run.training.learning_rate / 3)
        return UsageError(
            f"block {block} diverged: its {what} is {value}",
            f"--learning-rate {slower:.2g}, in a new folder",
        )

    def _glance(self) -> float | None:
        """Ten times in a run: measure the CE on the valid split."""
        done, total = self.swarm.steps_done, self.run.training.steps
        if done % max(1, total // 10) or done == total:
            return None
        return self._evaluate("valid", GLANCE_BYTES).ce_nats

    def _progress(self, clock: _Clock, loss_nats: float, ce: float | None) -> Progress:
        done, total = self.swarm.steps_done, self.run.training.steps
        steps_per_s = (done - clock.first_step) / max(clock.this_sitting_s(), 1e-9)
        size_bytes = self.run.training.batch * self.run.model.context
        left_s = (total - done) / steps_per_s
        return Progress(done, total, loss_nats, steps_per_s * size_bytes, left_s, ce)

    def _finish(self, before: Evaluation) -> Finished:
        """Fit, evaluate and save the model. CE before and after are measured on the same bytes."""
        fit = torch.cat(self._held_out("valid", FIT_BYTES)).to(self.device)
        model = fit_composition(self._model(), fit[:, :-1], fit[:, 1:], SPARE_NATS)
        after = self._evaluate("test", before.size_bytes, model)
        for block, ce in enumerate(after.block_ce_nats):  # the last step's loss was before its step
            if ce is not None and not math.isfinite(ce):
                raise self._diverged(block, "CE after the last step", ce)
        newest = self.swarm.versions.newest + 1
        staggered = self.run.model.relays and self.run.training.staggered
        versions = composed_versions(self.run.model.blocks, newest, staggered)
        save_model(self.folder, model, list(versions), self._facts(before, after))
        discard_checkpoint(self.folder)
        return Finished(model, before, after, self.seconds)

    def _model(self) -> ComposedModel:
        return ComposedModel(self.run, self.swarm.composed_blocks())

    def _evaluate(
        self, split: str, limit_bytes: int, model: ComposedModel | None = None
    ) -> Evaluation:
        """Honest CE. The test split is for reports: nothing is fitted or chosen on it."""
        return honest_ce(model or self._model(), self._held_out(split, limit_bytes))

    def _held_out(self, split: str, limit_bytes: int) -> list[torch.Tensor]:
        return held_out_batches(self.corpus, split, self.run.model.context, limit_bytes)

    def _facts(self, before: Evaluation, after: Evaluation) -> dict[str, Any]:
        training, shape = self.run.training, self.run.model
        return {
            "data": {"spec": self.data_spec, "source": self.corpus.source, **self._corpus_id()},
            "trained_bytes_per_block": training.steps * training.batch * shape.context,
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

    def save_checkpoint(self) -> None:
        """Write everything that a resumed run needs to one file, atomically."""
        assert self.before is not None
        tensors, numbers = self.swarm.state()
        facts = {
            "run": self.run.to_dict(),
            "data_spec": self.data_spec,
            "corpus": self._corpus_id(),
            "threads": torch.get_num_threads(),
            "numbers": numbers,
            "seconds": self.seconds,
            "ce_before_nats": self.before.ce_nats,
            "before_bytes": self.before.size_bytes,
        }
        write_tensors(self.folder / CHECKPOINT, tensors, facts)

    def load_checkpoint(self, evaluate_bytes: int | None = None) -> None:
        """Restore the checkpoint. With `evaluate_bytes` the CE before is measured on that many."""
        facts, tensors = _read_checkpoint(self.folder)
        if facts["corpus"] != self._corpus_id():
            raise UsageError(
                f"{self.data_spec} is not the text that the run in {self.folder} was started on",
                f"give that text with --data (it was {facts['data_spec']}), or start a new folder",
            )
        try:
            self.seconds = float(facts["seconds"])
            before_bytes = int(facts["before_bytes"])
            self.before = Evaluation(float(facts["ce_before_nats"]), (), before_bytes)
        except (TypeError, ValueError, OverflowError) as error:
            raise _damaged(self.folder / CHECKPOINT, error) from error
        if evaluate_bytes is not None:
            self._measure_before(evaluate_bytes)
        self.swarm.load_state(tensors, facts["numbers"])

    def _measure_before(self, evaluate_bytes: int) -> None:
        """Measure the CE before training, if that was on another number of bytes. To be called
        while the initial weights are still loaded."""
        assert self.before is not None and self.swarm.steps_done == 0
        windows = self._held_out("test", evaluate_bytes)
        if sum(each[:, 1:].numel() for each in windows) != self.before.size_bytes:
            self.before = honest_ce(self._model(), windows)


class _Clock:
    """Seconds of training, in this process alone and including those before a resume."""

    def __init__(self, first_step: int, earlier_s: float) -> None:
        self.first_step, self.earlier_s = first_step, earlier_s
        self.started = time.monotonic()

    def this_sitting_s(self) -> float:
        return time.monotonic() - self.started

    def seconds(self) -> float:
        return self.earlier_s + self.this_sitting_s()


@dataclass(frozen=True)
class CutOffRun:
    """The options of an interrupted run, from its checkpoint; `--resume` needs no others."""

    run: Run
    data_spec: str
    threads: int
    """Equal bits need an equal number of threads."""


def cut_off_run(folder: Path) -> CutOffRun:
    facts, _ = _read_checkpoint(folder)
    try:
        return CutOffRun(
            Run.from_dict(facts["run"]), str(facts["data_spec"]), int(facts["threads"])
        )
    except (UsageError, TypeError, ValueError, OverflowError) as error:
        raise _damaged(folder / CHECKPOINT, error) from error


def has_checkpoint(folder: Path) -> bool:
    return (folder / CHECKPOINT).exists()


def discard_checkpoint(folder: Path) -> None:
    remove_file(folder / CHECKPOINT)


def _read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    path = folder / CHECKPOINT
    try:
        tensors, facts = read_tensors(path)
    except FileNotFoundError as error:
        if (folder / MANIFEST).exists():
            raise UsageError(
                f"the run in {folder} has ended", f"blockswarm eval {shlex.quote(str(folder))}"
            ) from error
        raise UsageError(
            f"there is nothing to resume in {folder}",
            f"blockswarm train -o {shlex.quote(str(folder))} starts a run",
        ) from error
    except DamagedFile as error:
        raise _damaged(path, error) from error
    needed = {"run", "data_spec", "corpus", "threads", "numbers", "seconds"}
    needed |= {"ce_before_nats", "before_bytes"}
    if not needed <= set(facts):
        raise _damaged(path, DamagedFile("its description is incomplete"))
    return facts, tensors


def _damaged(path: Path, error: Exception) -> ModelError:
    reason = error.message if isinstance(error, BlockswarmError) else error
    return ModelError(f"{path} is damaged: {reason}", f"remove {path} and start the run again")
