"""The command `init`: it writes the run file of a new swarm.

Decides what is said about a new run's cost. The presets and the file's words are
`swarm.run_template`'s; what a run file may say is decided in `swarm.runfile`.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from node.commands.options import PathOption
from node.console.amounts import duration_words, size_words
from protocol.errors import UsageError
from swarm.run_template import PRESETS, Wishes, emit, preset

if TYPE_CHECKING:
    from swarm.runfile import RunFile


@click.command(short_help="Write a run file to start a swarm with.")
@click.argument("path", type=PathOption(dir_okay=False), default="run.toml")
@click.option(
    "--preset",
    "preset_name",
    type=click.Choice(PRESETS),
    default="tiny",
    show_default=True,
    help="tiny: a laptop, minutes. small: 52M parameters, a day. large: 307M, GPUs, a week.",
)
@click.option("--name", default=None, help="What people call the run (default: the preset's).")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    show_default=True,
    help="Of the first weights, the targets and the noise.",
)
@click.option(
    "--hours",
    type=click.FloatRange(0, 10**5, min_open=True),
    default=None,
    help="How long the run is (default: the preset's).",
)
@click.option(
    "--steps-per-s",
    type=click.FloatRange(0, 10**4, min_open=True),
    default=None,
    help="Steps that a host makes in a second (default: the preset's). Rounds follow from it.",
)
@click.option(
    "--gb-per-day",
    type=click.FloatRange(0, 10**6, min_open=True),
    default=None,
    help="What a host may move, both ways, with 4 on every block. Less makes updates sparser.",
)
@click.option("--force", is_flag=True, help="Replace the file that is there.")
def init(
    path: Path,
    preset_name: str,
    name: str | None,
    seed: int,
    hours: float | None,
    steps_per_s: float | None,
    gb_per_day: float | None,
    force: bool,
) -> None:
    """Write a commented run file: model, data, rounds and rules of a new swarm.

    \b
      blockswarm init                             run.toml, preset tiny
      blockswarm init big.toml --preset large     another file, another preset
      blockswarm init --hours 8 --gb-per-day 2    rounds and updates that fit

    PATH is the file to write (default: run.toml). It says what the run will cost a host. Edit it
    as you like, then start the swarm with `blockswarm seed PATH`.
    """
    from node.machine.atomic import write_atomically

    wishes = Wishes(hours, steps_per_s, gb_per_day)
    runfile = preset(preset_name, name or preset_name, seed, wishes)
    shown = shlex.quote(str(path))
    if path.exists() and not force:
        raise UsageError(
            f"{path} exists already",
            f"blockswarm seed {shown} starts it; blockswarm init {shown} --force replaces it",
        )
    text = emit(runfile)

    def write(half: Path) -> None:
        half.write_bytes(text)

    write_atomically(path, write)
    print(f"wrote {path}: {run_summary(runfile)}")
    for line in sparse_warning(runfile):
        print(line)
    print(f"read it, change what you like, then: blockswarm seed {shown}")


def run_summary(runfile: RunFile) -> str:
    """The run, and what it costs a host, in one line."""
    from swarm.cost import block_parameters, expected_gb_per_day, worker_memory_bytes

    shape, rounds = runfile.run.model, runfile.rounds
    total = sum(block_parameters(runfile.run))
    hosts = runfile.exchange.min_replicas
    days = rounds.count * rounds.period_s / 86400.0
    moved_gb = expected_gb_per_day(runfile, hosts) * min(days, 1.0)
    memory, moved = size_words(worker_memory_bytes(runfile)), size_words(moved_gb * 1e9)
    return (
        f"{total / 1e6:.1f} million parameters in {shape.blocks} blocks, {rounds.count} rounds of "
        f"{rounds.period_s:g} s, {duration_words(rounds.count * rounds.period_s)} in all. A host "
        f"needs up to {memory} of memory; with {hosts} hosts on each "
        f"block it moves up to {moved} {'per day' if days > 1 else 'in all'}, both ways"
    )


def sparse_warning(runfile: RunFile) -> list[str]:
    """What a run pays for updates that are too sparse for its length."""
    from swarm.plan import ENOUGH_COVERAGE

    coverage = runfile.codecs.mean(lambda codec: codec.density) * runfile.rounds.count
    if coverage >= ENOUGH_COVERAGE:
        return []
    return [
        f"warning: each weight is sent only {coverage:.1f} times in the whole run. Below "
        f"{ENOUGH_COVERAGE:g} the consensus lags behind its hosts;",
        "  make the run longer (--hours), or allow more bytes (--gb-per-day)",
    ]


operator_commands = (init,)
