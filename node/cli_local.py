"""Commands that need no network: train, eval, generate, probe, demo.

Imports of torch happen inside the commands: `blockswarm --help` should not take seconds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from protocol.errors import UsageError

if TYPE_CHECKING:
    from node.data import Corpus
    from swarm.evaluate import Evaluation
    from swarm.run import Run

F = TypeVar("F", bound=Any)

DATA_HELP = "python (this machine's CPython library), wikitext-2, wikitext-103, or a path."


def _compute_options(command: F) -> F:
    command = click.option("--threads", type=int, help="CPU threads (default: torch's choice).")(
        command
    )
    return click.option(
        "--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1, mps."
    )(command)


json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")


@click.command()
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="Model folder.")
@click.option("--data", default="python", show_default=True, help=DATA_HELP)
@click.option("--blocks", type=int, default=4, show_default=True, help="Blocks in the model.")
@click.option("--layers", type=int, default=2, show_default=True, help="Layers in a block.")
@click.option("--width", type=int, default=128, show_default=True, help="Hidden width.")
@click.option("--heads", type=int, default=4, show_default=True, help="Attention heads.")
@click.option("--context", type=int, default=128, show_default=True, help="Bytes of context.")
@click.option(
    "--coupling", default="look_ahead", show_default=True, help="independent, relay, look_ahead."
)
@click.option("--objective", default="bayes", show_default=True, help="bayes, edm, plain.")
@click.option("--sigma-min", type=float, default=5.0, show_default=True, help="Lowest noise.")
@click.option("--sigma-max", type=float, default=10.0, show_default=True, help="Highest noise.")
@click.option(
    "--leak-limit", type=float, default=0.05, show_default=True, help="Nats z may tell of a byte."
)
@click.option(
    "--adaptive-sigma", is_flag=True, help="Raise a block's lowest sigma if its leak is measured."
)
@click.option("--steps", type=int, default=2000, show_default=True, help="Steps of every block.")
@click.option(
    "--steps-per-round", type=int, default=50, show_default=True, help="Age of copies, in steps."
)
@click.option("--batch", type=int, default=8, show_default=True, help="Windows in a step.")
@click.option("--learning-rate", type=float, default=3e-3, show_default=True, help="At its peak.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of everything random.")
@click.option("--resume", is_flag=True, help="Go on where a cut-off run in --out stopped.")
@click.option(
    "--evaluate-bytes", type=int, default=65536, show_default=True, help="Test bytes for the CE."
)
@_compute_options
@json_option
def train(out: Path, data: str, resume: bool, as_json: bool, **options: Any) -> None:
    """Train all blocks on this machine and write a model folder.

    Each block has its own worker, which updates that block only and sees other blocks as frozen
    copies, as it would in a swarm. Ctrl-C saves; `--resume -o FOLDER` goes on, also after kill -9.
    """
    from node.data import load_corpus
    from node.device import choose_device, make_deterministic
    from node.local_training import LocalTraining, checkpoint_run
    from node.terminal import TrainingDisplay, stop_on_signals

    make_deterministic(options["threads"])
    device = choose_device(options["device"])
    if resume:
        run, data = checkpoint_run(out)
    else:
        run = _run_of(options)
        if (out / "checkpoint.safetensors").exists():
            raise UsageError(
                f"{out} holds a run that was cut off",
                f"go on with it: blockswarm train --resume -o {out}",
            )
    training = LocalTraining(run, load_corpus(data), data, out, device)
    if resume:
        training.load_checkpoint()
    if not as_json:
        _say_plan(run, training.corpus, device.type)
    with stop_on_signals() as stop, TrainingDisplay(quiet=as_json) as display:
        finished = training.train(display, stop, evaluate_bytes=options["evaluate_bytes"])
    if finished is None:
        print(
            f"saved at step {training.swarm.steps_done}; go on with:\n"
            f"  blockswarm train --resume -o {out}",
            file=sys.stderr,
        )
        raise click.Abort
    result = {
        "model": str(out),
        "seconds": finished.seconds,
        "ce_before_nats": finished.before.ce_nats,
        "leak_nats": training.leak_nats,
        **_evaluation_facts(finished.after, "test", training.corpus),
    }
    if as_json:
        print(json.dumps(result))
        return
    print(f"CE {finished.before.ce_nats:.3f} -> {finished.after.ce_nats:.3f} nats per byte")
    _print_evaluation(finished.after, training.corpus, "test")
    print(f'model folder: {out}\nlet it write: blockswarm generate {out} --prompt "..."')


@click.command("eval")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--data", default=None, help=f"Default: what it was trained on. {DATA_HELP}")
@click.option("--split", type=click.Choice(["train", "valid", "test"]), default="test")
@click.option("--limit-bytes", type=int, default=250_000, show_default=True, help="At most.")
@click.option("--without", type=int, multiple=True, help="Leave this block out (repeatable).")
@_compute_options
@json_option
def evaluate(
    model: Path,
    data: str | None,
    split: str,
    limit_bytes: int,
    without: tuple[int, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Honest cross entropy of a model folder: no block ever sees the byte it predicts."""
    composed, corpus = _load(model, data, without, options)
    from node.local_training import held_out_batches
    from swarm.evaluate import honest_ce

    batches = held_out_batches(corpus, split, composed.run.model.context, limit_bytes)
    result = honest_ce(composed, batches)
    if as_json:
        print(json.dumps(_evaluation_facts(result, split, corpus)))
    else:
        _print_evaluation(result, corpus, split)


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--data", default=None, help=f"Default: what it was trained on. {DATA_HELP}")
@click.option("--limit-bytes", type=int, default=65536, show_default=True, help="At most.")
@_compute_options
@json_option
def probe(model: Path, data: str | None, limit_bytes: int, as_json: bool, **options: Any) -> None:
    """Show each block's teacher-forced CE beside its honest CE, on the test split.

    Teacher-forced, z is made from the byte to be predicted, as in training. A block whose
    teacher-forced CE is far below its honest CE reads its target out of z and has learnt little.
    """
    composed, corpus = _load(model, data, (), options)
    from node.local_training import held_out_batches
    from swarm.evaluate import honest_ce, teacher_forced_ce
    from swarm.noise import block_interval

    batches = held_out_batches(corpus, "test", composed.run.model.context, limit_bytes)
    honest = honest_ce(composed, batches)
    rows: list[dict[str, Any]] = []
    for index, own in enumerate(honest.block_ce_nats):
        if own is None:
            continue
        teacher = teacher_forced_ce(composed, batches, index)
        interval = block_interval(composed.run.noise, composed.run.model.blocks, index)
        rows.append(
            {
                "block": index,
                "sigma_low": interval.low,
                "sigma_high": interval.high,
                "teacher_forced_ce_nats": teacher,
                "honest_ce_nats": own,
                "leak_nats": own - teacher,
            }
        )
    limit = composed.run.noise.leak_limit_nats
    leaking = [row["block"] for row in rows if row["leak_nats"] > limit]
    if as_json:
        print(json.dumps({"rows": rows, "leak_limit_nats": limit, "leaking_blocks": leaking}))
        return
    print("block  sigma            teacher-forced CE  honest CE  difference")
    for row in rows:
        print(
            f"{row['block']:>5}  {row['sigma_low']:6.3f}..{row['sigma_high']:<7.3f}"
            f"  {row['teacher_forced_ce_nats']:17.4f}  {row['honest_ce_nats']:9.4f}"
            f"  {row['leak_nats']:10.4f}"
        )
    verdict = f"blocks {leaking} read their target" if leaking else "no block reads its target"
    print(f"{verdict} (limit {limit:g} nats)")


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--prompt", default="\n", help="Text to go on from.")
@click.option("--length", type=click.IntRange(1, 1_000_000), default=256, show_default=True)
@click.option("--temperature", type=float, default=0.8, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, show_default=True, help="Only the k likeliest bytes.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--without", type=int, multiple=True, help="Leave this block out (repeatable).")
@_compute_options
@json_option
def generate(
    model: Path,
    prompt: str,
    length: int,
    temperature: float,
    top_k: int,
    seed: int,
    without: tuple[int, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Let a model write: bytes that follow the prompt, streamed as they come."""
    from swarm.generate import Sampling
    from swarm.generate import generate as write

    sampling = Sampling(temperature, top_k, seed)
    composed = _load_composed(model, without, options)
    written = bytearray()
    if not as_json:
        sys.stdout.write(prompt)
    for byte in write(composed, prompt.encode(), length, sampling):
        written.append(byte)
        if not as_json:
            sys.stdout.buffer.write(bytes([byte]))
            sys.stdout.flush()
    if as_json:
        text = written.decode("utf-8", errors="replace")
        print(json.dumps({"prompt": prompt, "text": text, "length_bytes": len(written)}))
    else:
        print()


@click.command()
@click.option("-o", "--out", type=click.Path(path_type=Path), default=Path("runs/demo"))
@click.option("--steps", type=int, default=600, show_default=True)
@json_option
@click.pass_context
def demo(context: click.Context, out: Path, steps: int, as_json: bool) -> None:
    """Train, compose and generate on the text of CPython's own library, in under 3 minutes."""
    (out / "checkpoint.safetensors").unlink(missing_ok=True)
    shared = {"threads": None, "device": "auto"}
    context.invoke(train, out=out, steps=steps, as_json=as_json, **shared)
    if not as_json:
        print("\nwhat each block reads of its target, and what it knows:")
    context.invoke(probe, model=out, limit_bytes=16384, as_json=as_json, **shared)
    if not as_json:
        print("\na text it wrote:")
    context.invoke(generate, model=out, prompt="def ", length=240, as_json=as_json, **shared)


local_commands = (train, evaluate, generate, probe, demo)


def _run_of(options: dict[str, Any]) -> Run:
    from swarm.run import ModelShape, Noise, Run, Training

    return Run(
        model=ModelShape(
            blocks=options["blocks"],
            layers=options["layers"],
            width=options["width"],
            heads=options["heads"],
            context=options["context"],
            coupling=options["coupling"],
        ),
        noise=Noise(
            sigma_min=options["sigma_min"],
            sigma_max=options["sigma_max"],
            leak_limit_nats=options["leak_limit"],
            adaptive=options["adaptive_sigma"],
        ),
        training=Training(
            objective=options["objective"],
            steps=options["steps"],
            steps_per_round=options["steps_per_round"],
            batch=options["batch"],
            learning_rate=options["learning_rate"],
        ),
        seed=options["seed"],
    )


def _load_composed(model: Path, without: tuple[int, ...], options: dict[str, Any]) -> Any:
    from node.device import choose_device, make_deterministic
    from node.model_folder import load_model

    make_deterministic(options["threads"])
    composed, _ = load_model(model, choose_device(options["device"]), frozenset(without))
    return composed


def _load(
    model: Path, data: str | None, without: tuple[int, ...], options: dict[str, Any]
) -> tuple[Any, Corpus]:
    from node.data import load_corpus
    from node.model_folder import read_manifest

    composed = _load_composed(model, without, options)
    spec = data or read_manifest(model).get("data", {}).get("spec", "python")
    corpus = load_corpus(spec)
    corpus.require_window(composed.run.model.context)
    return composed, corpus


def _say_plan(run: Run, corpus: Corpus, device: str) -> None:
    shape, training = run.model, run.training
    seen = training.steps * training.batch * shape.context
    print(
        f"{shape.blocks} blocks of {shape.layers} layers, width {shape.width}, {shape.coupling}, "
        f"{training.objective}, sigma {run.noise.sigma_min:g}..{run.noise.sigma_max:g}; "
        f"{seen / 1e6:.1f} MB of {corpus.name} a block, on {device}",
        file=sys.stderr,
    )


def _evaluation_facts(result: Evaluation, split: str, corpus: Corpus) -> dict[str, Any]:
    return {
        "ce_nats": result.ce_nats,
        "bits_per_byte": result.bits_per_byte,
        "perplexity": result.perplexity,
        "block_ce_nats": list(result.block_ce_nats),
        "size_bytes": result.size_bytes,
        "split": split,
        "data": corpus.name,
        "data_sha256": corpus.sha256,
    }


def _print_evaluation(result: Evaluation, corpus: Corpus, split: str) -> None:
    print(f"honest CE over {result.size_bytes} bytes of {corpus.name}, {split} split:")
    for index, ce in enumerate(result.block_ce_nats):
        print(f"  block {index}    " + ("left out" if ce is None else f"{ce:.4f} nats per byte"))
    print(
        f"  composed   {result.ce_nats:.4f} nats per byte = {result.bits_per_byte:.4f} bits per "
        f"byte, perplexity {result.perplexity:.3f}"
    )
