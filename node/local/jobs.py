"""The work of the local commands: train or resume, load, probe, write. Results are dicts of facts.

It also refuses folders in use, and options that a resumed run cannot change. The options' names and
help are `node.commands.local`'s, the text of results `node.console.results`'s.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from node.console.results import Facts, evaluation_facts, plan_line
from node.console.terminal import ByteWriter, DownloadDisplay, TrainingDisplay, say, stop_on_signals
from node.data.corpus import Corpus, lasting_spec, load_corpus
from node.local.memory import refuse_too_large
from node.local.model_folder import data_sha256, data_spec, has_model, load_model, read_manifest
from node.local.training import (
    LocalTraining,
    cut_off_run,
    discard_checkpoint,
    has_checkpoint,
    held_out_batches,
)
from node.machine.atomic import StorageError, hold_folder
from node.machine.device import choose_device, make_deterministic
from node.machine.memory import keep_freed_memory
from protocol.errors import DataError, UsageError
from swarm.learning.composition import ComposedModel
from swarm.learning.evaluate import honest_ce, teacher_forced_ce
from swarm.learning.noise import block_interval
from swarm.run import Composition, ModelShape, Noise, Run, Training, usual_learning_rate
from swarm.writing import denoise
from swarm.writing.generate import Sampling, generate

RUN_OPTIONS = {
    "blocks": ("model", "blocks"),
    "layers": ("model", "layers"),
    "width": ("model", "width"),
    "heads": ("model", "heads"),
    "context": ("model", "context"),
    "coupling": ("model", "coupling"),
    "objective": ("training", "objective"),
    "sigma_min": ("noise", "sigma_min"),
    "sigma_max": ("noise", "sigma_max"),
    "leak_limit": ("noise", "leak_limit_nats"),
    "steps": ("training", "steps"),
    "steps_per_round": ("training", "steps_per_round"),
    "batch": ("training", "batch"),
    "learning_rate": ("training", "learning_rate"),
    "optimizer": ("training", "optimizer"),
    "denoise_share": ("training", "denoise_share"),
}
"""Option of `train` -> the field of the run that it sets, where its value is checked."""


def train_blocks(out: Path, options: Mapping[str, Any], given: set[str]) -> Facts:
    """Train or resume. `given`: the options that were typed. Raises SystemExit if stopped."""
    device = choose_device(options["device"])
    threads, data, resume = options["threads"], options["data"], options["resume"]
    if resume:
        cut_off = cut_off_run(out)
        run, threads = cut_off.run, threads or cut_off.threads
        data = data if "data" in given else cut_off.data_spec
        _refuse_other_run(run, options, given)
        if threads != cut_off.threads:
            say(
                f"going on with {threads} threads instead of {cut_off.threads}: the weights will "
                "differ from those of a run in one go in their last bits"
            )
    else:
        run = _run_of(options)
        _refuse_used_folder(out, options["overwrite"])
    make_deterministic(threads)
    refuse_too_large(run, device)
    keep_freed_memory()
    corpus = _corpus(data)
    training = LocalTraining(run, corpus, lasting_spec(data), out, device)
    with hold_folder(out):
        if resume:
            again = options["evaluate_bytes"] if "evaluate_bytes" in given else None
            training.load_checkpoint(again)
        else:
            discard_checkpoint(out)
        say(plan_line(run, training.corpus, device.type, training.swarm.steps_done))
        try:
            with stop_on_signals() as stop, TrainingDisplay() as display:
                _show_start(display, training)
                finished = training.train(
                    display, stop, options["save_every"], options["evaluate_bytes"]
                )
        except StorageError as error:
            if not has_checkpoint(out):
                raise
            raise StorageError(error.message, f"{error.hint}; then {_resume(out)}") from error
    if finished is None:
        say(f"saved at step {training.swarm.steps_done}; to go on:\n  {_resume(out)}")
        raise SystemExit(stop.exit_code)
    return {
        "model": str(out),
        "steps": run.training.steps,
        "seconds": finished.seconds,
        "ce_before_nats": finished.before.ce_nats,
        "leak_nats": training.leak_nats,
        **evaluation_facts(finished.after, "test", training.corpus, "logit"),
    }


def _show_start(display: TrainingDisplay, training: LocalTraining) -> None:
    """Show something before the first step, since the initial weights are measured first."""
    done, steps = training.swarm.steps_done, training.run.training.steps
    state = "measuring the start" if training.before is None else "going on"
    display.show(f"step {done}/{steps}", done, steps, state)


def _resume(out: Path) -> str:
    return f"blockswarm train --resume -o {shlex.quote(str(out))}"


def probe_blocks(composed: ComposedModel, corpus: Corpus, limit_bytes: int) -> Facts:
    """Measure by how much each block's CE falls if it sees its noised target.

    A run may allow any leak, to study it; so the verdict uses the default limit, or the run's own
    if that is stricter.
    """
    run = composed.run
    batches = held_out_batches(corpus, "test", run.model.context, limit_bytes)
    rows: list[Facts] = []
    for index, honest in enumerate(honest_ce(composed, batches).block_ce_nats):
        if honest is None:
            continue
        forced = teacher_forced_ce(composed, batches, index)
        sigmas = block_interval(run.noise, run.model.blocks, index)
        rows.append(
            {
                "block": index,
                "sigma_low": sigmas.low,
                "sigma_high": sigmas.high,
                "teacher_forced_ce_nats": forced,
                "honest_ce_nats": honest,
                "leak_nats": honest - forced,
            }
        )
    limit = min(Noise.leak_limit_nats, run.noise.leak_limit_nats)
    return {
        "rows": rows,
        "leak_limit_nats": limit,
        "run_leak_limit_nats": run.noise.leak_limit_nats,
        "leaking_blocks": [row["block"] for row in rows if row["leak_nats"] > limit],
    }


def composed_as(model: ComposedModel, composition: Composition | None) -> ComposedModel:
    """The same blocks under another composition. Raises `UsageError` if they do not support it."""
    if composition is None or composition == model.composition:
        return model
    if composition == "embedding":
        shape, objective = model.run.model, model.run.training.objective
        if shape.relays:
            raise UsageError(
                f"the embedding composition is for independent blocks; these are {shape.coupling}",
                "--composition logit, or a model trained with --coupling independent",
            )
        if objective == "plain":
            raise UsageError(
                "the embedding composition hands z on, and plain blocks have none",
                "--composition logit, or a model trained with --objective bayes",
            )
    return replace(model, composition=composition)


def write_text(
    composed: ComposedModel,
    prompt: str,
    length: int,
    sampling: Sampling,
    out: ByteWriter | None,
    joint: bool = False,
) -> Facts:
    """Write byte after byte, or with `joint` all at once by denoising."""
    start = os.fsencode(prompt)  # the bytes that were typed, UTF-8 or not
    written = bytearray()
    source = denoise.write if joint else generate
    for byte in source(composed, start, length, sampling):
        written.append(byte)
        if out is not None:  # the prompt goes with the first byte: an error before prints nothing
            out.write(start + bytes([byte]) if len(written) == 1 else bytes([byte]))
    if out is not None:
        out.close()
    return {
        "prompt": start.decode(errors="replace"),
        "text": written.decode(errors="replace"),
        "hex": written.hex(),  # the bytes themselves: the text may hold replacements
        "length_bytes": len(written),
    }


def _run_of(options: Mapping[str, Any]) -> Run:
    tables: dict[str, dict[str, Any]] = {"model": {}, "noise": {}, "training": {}}
    for option, (table, field) in RUN_OPTIONS.items():
        tables[table][field] = options[option]
    if options["learning_rate"] is None:
        tables["training"]["learning_rate"] = usual_learning_rate(options["steps"])
    return Run(
        ModelShape(**tables["model"]),
        Noise(**tables["noise"]),
        Training(**tables["training"]),
        options["seed"],
    )


def _refuse_other_run(run: Run, options: Mapping[str, Any], given: set[str]) -> None:
    """Refuse options whose typed value differs from the resumed run's, which cannot change."""
    values = {
        name: getattr(getattr(run, table), field) for name, (table, field) in RUN_OPTIONS.items()
    }
    for name, value in {**values, "seed": run.seed}.items():
        if name in given and options[name] != value:
            flag = "--" + name.replace("_", "-")
            raise UsageError(
                f"{flag} {options[name]} is not what this run was started with ({value})",
                f"leave {flag} out, or start a new run in another folder",
            )
    if options["overwrite"]:
        raise UsageError("--resume and --overwrite exclude each other", "leave one of them out")


def _refuse_used_folder(out: Path, overwrite: bool) -> None:
    if overwrite:
        return
    if has_checkpoint(out):
        raise UsageError(
            f"{out} holds a run that was cut off",
            f"{_resume(out)}, or --overwrite to start anew",
        )
    if has_model(out):
        raise UsageError(
            f"{out} holds a model already", "another folder, or --overwrite to replace it"
        )


def _corpus(spec: str) -> Corpus:
    with DownloadDisplay() as display:
        return load_corpus(spec, progress=display)


def load_composed(
    model: Path, without: tuple[int, ...], options: Mapping[str, Any]
) -> ComposedModel:
    make_deterministic(options["threads"])
    composed, _ = load_model(model, choose_device(options["device"]), frozenset(without))
    return composed


def load_with_corpus(
    model: Path, data: str | None, without: tuple[int, ...], options: Mapping[str, Any]
) -> tuple[ComposedModel, Corpus]:
    composed = load_composed(model, without, options)
    if data is not None:
        return composed, _corpus(data)
    spec = data_spec(read_manifest(model))
    try:
        return composed, _corpus(spec)
    except DataError as error:
        raise DataError(
            f"the text that {model} was trained on cannot be had: {error.message}",
            "give a text with --data",
        ) from error


def data_changed(model: Path, data: str | None, corpus: Corpus) -> bool | None:
    """Whether the corpus of this name has changed since training; a warning is printed if so.

    Its splits have then moved, and bytes held out now may have been trained on. None if unknown: a
    corpus of another name, or a manifest without a hash.
    """
    manifest = read_manifest(model)
    spec, sha256 = data_spec(manifest), data_sha256(manifest)
    if sha256 is None or (data is not None and lasting_spec(data) != lasting_spec(spec)):
        return None
    if corpus.sha256 == sha256:
        return False
    say(
        f"warning: {corpus.name} has changed since the training of {model} (its sha256 differs): "
        "bytes held out now may have been trained on"
    )
    return True
