"""Commands that need no network: train, eval, generate, probe.

Imports of torch happen inside the commands: `blockswarm --help` should not take seconds.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
from click.core import ParameterSource

from node.commands.options import FiniteRange, PathOption, meant_as_address
from node.commands.serve import generate_from_swarm, is_address, sweep_options
from node.console.results import (
    evaluation_facts,
    print_evaluation,
    print_json,
    print_probe,
    print_training,
)
from node.console.terminal import ByteWriter
from node.local.memory import SMALLER, memory_errors_told
from node.network.addresses import split_peer
from protocol.errors import UsageError
from swarm.run import Composition, Coupling, Objective, Optimizer

F = TypeVar("F", bound=Any)

DATA_HELP = "python (this machine's CPython library), wikitext-2, wikitext-103, or a path."
FOLDER = PathOption()
SIZE = click.IntRange(min=1)
SEED = click.IntRange(0, 2**62)
RUN_SEED = click.IntRange(0, 2**32 - 1)  # as `swarm.run.Run` has it
FOLDER_MODES = ("autoregressive", "denoise")  # of `generate --mode`


def _compute_options(command: F) -> F:
    threads = click.option("--threads", type=int, help="CPU threads (default: torch's choice).")
    device = click.option(
        "--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1, mps."
    )
    return device(threads(command))


json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
without_option = click.option(
    "--without",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="BLOCK",
    help="Leave this block out (repeatable).",
)


@click.command(short_help="Train all blocks on this machine.")
@click.option("-o", "--out", type=FOLDER, required=True, help="Model folder to write.")
@click.option("--data", default="python", show_default=True, help=DATA_HELP)
@click.option("--blocks", type=int, default=4, show_default=True, help="Blocks in the model.")
@click.option("--layers", type=int, default=2, show_default=True, help="Layers in a block.")
@click.option("--width", type=int, default=128, show_default=True, help="Hidden width.")
@click.option("--heads", type=int, default=4, show_default=True, help="Attention heads.")
@click.option("--context", type=int, default=128, show_default=True, help="Bytes of context.")
@click.option(
    "--coupling",
    type=click.Choice(get_args(Coupling)),
    default="look_ahead",
    show_default=True,
    help="What a block sees of the others.",
)
@click.option(
    "--objective",
    type=click.Choice(get_args(Objective)),
    default="bayes",
    show_default=True,
    help="How z enters; plain is the control without z.",
)
@click.option("--sigma-min", type=float, default=5.0, show_default=True, help="Lowest noise.")
@click.option("--sigma-max", type=float, default=10.0, show_default=True, help="Highest noise.")
@click.option(
    "--leak-limit", type=float, default=0.05, show_default=True, help="Nats z may tell of a byte."
)
@click.option("--steps", type=int, default=2000, show_default=True, help="Steps of every block.")
@click.option(
    "--steps-per-round", type=int, default=50, show_default=True, help="Age of copies, in steps."
)
@click.option("--batch", type=int, default=8, show_default=True, help="Windows in a step.")
@click.option(
    "--learning-rate",
    type=float,
    default=None,
    help="At its peak. [default: 0.002, from 6000 steps on 0.001]",
)
@click.option(
    "--optimizer",
    type=click.Choice(get_args(Optimizer)),
    default="muon",
    show_default=True,
    help="Of the matrices inside layers.",
)
@click.option(
    "--denoise-share",
    type=float,
    default=0.0,
    show_default=True,
    help="Part of a batch that trains `generate --mode denoise`; 0: none.",
)
@click.option("--seed", type=RUN_SEED, default=0, show_default=True, help="Of everything random.")
@click.option(
    "--resume",
    is_flag=True,
    help="Go on with the run in --out that was cut off, with its options. Other --threads than "
    "before give other last bits.",
)
@click.option("--overwrite", is_flag=True, help="Replace the model or the run in --out.")
@click.option(
    "--save-every",
    type=FiniteRange(min=0),
    default=30.0,
    show_default=True,
    help="Seconds between checkpoints.",
)
@click.option(
    "--evaluate-bytes", type=SIZE, default=65536, show_default=True, help="Test bytes for the CE."
)
@_compute_options
@json_option
@click.pass_context
@memory_errors_told(SMALLER)
def train(ctx: click.Context, /, out: Path, as_json: bool, **options: Any) -> None:
    """Train all blocks on this machine and write a model folder.

    Each block has its own worker, which updates that block only and sees other blocks as frozen
    copies, as it would in a swarm. Ctrl-C saves; `--resume -o FOLDER` goes on, also after kill -9.
    """
    from node.local.jobs import train_blocks

    typed = ParameterSource.COMMANDLINE
    given = {name for name in options if ctx.get_parameter_source(name) is typed}
    facts = train_blocks(out, options, given)
    if as_json:
        print_json(facts)
        return
    print_training(facts)
    print(f'let it write: blockswarm generate {shlex.quote(str(out))} --prompt "..."')


@click.command("eval", short_help="Honest cross entropy, per block and composed.")
@click.argument("model", type=FOLDER)
@click.option("--data", default=None, help=f"Default: what it was trained on. {DATA_HELP}")
@click.option(
    "--split",
    type=click.Choice(["train", "valid", "test"]),
    default="test",
    show_default=True,
    help="Which part of the data.",
)
@click.option(
    "--limit-bytes", type=SIZE, default=250_000, show_default=True, help="Bytes to read at most."
)
@click.option(
    "--composition",
    type=click.Choice(get_args(Composition)),
    default=None,
    help="How blocks make one model (default: the folder's); embedding: independent blocks only.",
)
@without_option
@_compute_options
@json_option
@memory_errors_told()
def evaluate(
    model: Path,
    data: str | None,
    split: str,
    limit_bytes: int,
    composition: Composition | None,
    without: tuple[int, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Honest cross entropy of a model folder: no block ever sees the byte it predicts."""
    from node.local.jobs import composed_as, data_changed, load_with_corpus
    from node.local.training import held_out_batches
    from swarm.learning.evaluate import honest_ce

    composed, corpus = load_with_corpus(model, data, without, options)
    composed = composed_as(composed, composition)
    changed = data_changed(model, data, corpus)
    batches = held_out_batches(corpus, split, composed.run.model.context, limit_bytes)
    facts = evaluation_facts(honest_ce(composed, batches), split, corpus, composed.composition)
    facts["data_changed"] = changed
    (print_json if as_json else print_evaluation)(facts)


@click.command(short_help="Does any block read its own target?")
@click.argument("model", type=FOLDER)
@click.option("--data", default=None, help=f"Default: what it was trained on. {DATA_HELP}")
@click.option(
    "--limit-bytes", type=SIZE, default=65536, show_default=True, help="Bytes to read at most."
)
@without_option
@_compute_options
@json_option
@memory_errors_told()
def probe(
    model: Path,
    data: str | None,
    limit_bytes: int,
    without: tuple[int, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Show each block's teacher-forced CE beside its honest CE, on the test split.

    Teacher-forced, z is made from the byte to be predicted, as in training. A block whose
    teacher-forced CE is far below its honest CE reads its target out of z and has learnt little.
    The limit is that of runs by default, whatever --leak-limit this run had; a stricter one counts.
    """
    from node.local.jobs import data_changed, load_with_corpus, probe_blocks

    composed, corpus = load_with_corpus(model, data, without, options)
    changed = data_changed(model, data, corpus)
    facts = probe_blocks(composed, corpus, limit_bytes)
    facts["data_changed"] = changed
    (print_json if as_json else print_probe)(facts)


@click.command(short_help="Let a model folder, or a swarm that serves, write.")
@click.argument("model", type=FOLDER, metavar="MODEL|ADDRESS")
@click.option("--prompt", default="\n", help="Text to go on from (default: an empty line).")
@click.option(
    "--length",
    type=click.IntRange(1, 1_000_000),
    default=256,
    show_default=True,
    help="Bytes to write.",
)
@click.option("--greedy", is_flag=True, help="Always the likeliest byte; same as --temperature 0.")
@click.option("--temperature", type=float, default=0.8, show_default=True, help="0 is greedy.")
@click.option(
    "--top-k", type=int, default=0, show_default=True, help="Only the k likeliest bytes; 0: all."
)
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of the sampling.")
@sweep_options
@without_option
@_compute_options
@json_option
@click.pass_context
@memory_errors_told()
def generate(
    ctx: click.Context,
    /,
    model: Path,
    prompt: str,
    length: int,
    greedy: bool,
    temperature: float,
    top_k: int,
    seed: int,
    without: tuple[int, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Let a model write: bytes that follow the prompt, streamed as they come.

    \b
      blockswarm generate model/ --prompt "def "
      blockswarm generate /ip4/203.0.113.7/tcp/4001/p2p/12D3Koo... --prompt "def "

    MODEL is a model folder, as `train` and `assemble` write it. ADDRESS is that of any peer of a
    run whose hosts serve it; the options from --mode to --scores are for the latter. A folder
    knows one mode besides byte after byte (autoregressive): --mode denoise writes all bytes at
    once, if the model was trained with --denoise-share.

    The model writes bytes. Into a pipe they go as they are; on a terminal those that are not
    UTF-8 text are shown as a replacement character.
    """
    from node.local.jobs import load_composed, write_text
    from swarm.writing.generate import Sampling

    sampling = Sampling(0.0 if greedy else temperature, top_k, seed)
    if meant_as_address(str(model)):
        split_peer(str(model))  # says what is wrong with an address that is not whole
    if is_address(str(model)):
        options["without"] = without
        generate_from_swarm(str(model), prompt, length, sampling, as_json, options)
        return
    _refuse_options_for_hosts(ctx, options["mode"])
    composed = load_composed(model, without, options)
    joint = options["mode"] == "denoise"
    out = None if as_json else ByteWriter()
    facts = write_text(composed, prompt, length, sampling, out, joint)
    if as_json:
        print_json(facts)


def _refuse_options_for_hosts(ctx: click.Context, mode: str) -> None:
    """What only hosts that serve know of was typed for nothing beside a folder."""

    def typed(name: str) -> bool:
        return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE

    hint = "leave it out, or give the ADDRESS of a run whose hosts serve it"
    for name in ("drafts", "draft_length", "scores"):
        if typed(name):
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} is for hosts that serve, not for a model folder", hint)
    if typed("mode") and mode not in FOLDER_MODES:
        raise UsageError(f"--mode {mode} is for hosts that serve, not for a model folder", hint)


local_commands = (train, evaluate, generate, probe)
