"""The commented text of a run file, and the presets of `blockswarm init`.

Reading and checking run files is `runfile`'s part. Imports inside functions keep NumPy out of
`--help`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from protocol.errors import UsageError

if TYPE_CHECKING:
    from swarm.runfile import RunFile

PRESETS = ("tiny", "small", "large")

TEMPLATE = """\
# A blockswarm run: a model, its data and its rules. The run's name on the network is the hash of
# this file, so every host has exactly these bytes. Change what you like before the run starts;
# afterwards any change, even of a comment, makes another run. Every field must be there.

format = {format}
# What people call this run.
name = {name}
# All randomness that hosts must share comes from it: first weights, targets, noise.
seed = {seed}

[model]
# The model is cut into blocks. Each host trains one of them, alone.
blocks = {model.blocks}
# Transformer layers in a block.
layers = {model.layers}
# Hidden width, and how many attention heads share it (the width of a head must be even).
width = {model.width}
heads = {model.heads}
# How many bytes the model sees at once. Text is read as bytes; there is no tokenizer.
context = {model.context}
# What a block sees of the others: "independent": nothing. "relay": also the hidden state of the
# blocks before it. "look_ahead": relay, and its loss includes that of the next block.
coupling = {model.coupling}

[noise]
# A block trains on z = target + sigma * noise; each block has its own part of this range of sigma.
# Little noise shows a block its own target, and then its loss says nothing.
sigma_min = {noise.sigma_min}
sigma_max = {noise.sigma_max}
# ln(sigma) has this mean and deviation, before it is cut to the range.
p_mean = {noise.p_mean}
p_std = {noise.p_std}
# How far the ranges of neighbouring blocks overlap, in ln(sigma).
overlap = {noise.overlap}
# The run is refused if z alone tells more than so many nats of the target.
leak_limit_nats = {noise.leak_limit_nats}

[training]
# How z enters. "bayes": as analytic evidence beside the network. "edm": as an input of the network
# (independent blocks only). "plain": not at all, the control.
objective = {training.objective}
# The most steps a host makes in a round; a slow host makes fewer. Longer rounds send fewer bytes,
# shorter ones keep the copies of other blocks fresh. All steps: rounds.count times this.
steps_per_round = {training.steps_per_round}
# Windows of text in a step of one host. Memory grows with it.
batch = {training.batch}
# Rises during the warm-up, then falls in a half cosine to this share of its peak.
learning_rate = {training.learning_rate}
final_learning_rate = {training.final_learning_rate}
warmup_steps = {training.warmup_steps}
# Of the matrices inside layers. "muon": by their orthogonalised momentum; embeddings, heads and
# norms have AdamW in any case. "adamw": everything.
optimizer = {training.optimizer}
weight_decay = {training.weight_decay}
# AdamW.
beta1 = {training.beta1}
beta2 = {training.beta2}
# A gradient with a larger norm is scaled down to it.
clip_norm = {training.clip_norm}
# The weight of the next block's loss, with the coupling look_ahead.
look_ahead_weight = {training.look_ahead_weight}
# Read other blocks in the versions that they were trained with, not all in the newest.
staggered = {training.staggered}
# Copies of other blocks move 1 / copy_steps of the way to a new version in each step; 1 jumps.
copy_steps = {training.copy_steps}
# The copy of the next block learns along with ours until a newer version of it comes.
ahead_learns = {training.ahead_learns}
# The learning rate is that of a host alone. With R hosts on a block it is R to this power times as
# high: the mean of their steps is shorter than each of them, and less noisy.
replica_power = {training.replica_power}
# So much of every batch teaches blocks to denoise a whole output at once, for the mode `denoise`.
denoise_share = {training.denoise_share}

[data]
# "python": the library of the host's Python, no download. "wikitext-2", "wikitext-103": downloaded
# once. "own": every host brings its own text.
spec = {data.spec}
# Refuse hosts whose corpus has another sha256; "" does not check. Leave it "" for "python", which
# differs from one Python patch version to the next.
sha256 = {data.sha256}

[rounds]
# When the run begins, in unix time. 0: not yet; `blockswarm seed` fills it in.
start_s = {rounds.start_s}
# A round lasts so long, and the run has so many.
period_s = {rounds.period_s}
count = {rounds.count}
# Updates are collected until a deadline that follows how fast they arrive, between these two.
deadline_floor_s = {rounds.deadline_floor_s}
deadline_ceiling_s = {rounds.deadline_ceiling_s}
# Then hosts vote on what arrived, and pull what they miss. The whole exchange must fit into a
# period: deadline_ceiling_s + 2 * vote_window_s + 3 * repair_window_s.
vote_window_s = {rounds.vote_window_s}
repair_window_s = {rounds.repair_window_s}

[exchange]
# How updates are compressed: topk:DENSITY:BITS[:overall] sends the largest weights only (what is
# left out is sent later), int8 and int4 send all of them.
codec = {exchange.codec}
# The n-th exchange from either end of the run sends at least this / n of all weights: at first all
# is new, and after the last nothing comes any more.
ends_density = {exchange.ends_density}
# Every so many rounds hosts keep a full snapshot, from which newcomers start.
snapshot_every = {exchange.snapshot_every}
# Warn if a block has fewer hosts than this.
min_replicas = {exchange.min_replicas}
"""


def emit(runfile: RunFile) -> bytes:
    """A run as a commented run file, the inverse of `swarm.runfile.parse`."""
    from swarm.runfile import FORMAT

    tables = asdict(runfile.run)
    top = {"format": FORMAT, "name": _toml(runfile.name), "seed": tables.pop("seed")}
    for name in ("data", "rounds", "exchange"):
        tables[name] = asdict(getattr(runfile, name))
    written = {
        name: SimpleNamespace(**{key: _toml(value) for key, value in table.items()})
        for name, table in tables.items()
    }
    return TEMPLATE.format(**top, **written).encode()


def _toml(value: Any) -> str:
    """A value in TOML. A run file's strings need no escapes, since their characters are checked."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else repr(value)


@dataclass(frozen=True)
class Wishes:
    """An operator's options for a run beyond its preset; None: as in the preset."""

    hours: float | None = None
    steps_per_s: float | None = None  # of the hosts
    gb_per_day: float | None = None  # of a host, both ways, with `plan.REPLICAS` on every block


AS_PRESET = Wishes()


def preset(name: str, run_name: str, seed: int = 0, wishes: Wishes = AS_PRESET) -> RunFile:
    """The run that `init --preset` writes, with rounds and densities from `swarm.plan`."""
    from swarm.plan import ENDS_DENSITY, plan
    from swarm.run import ModelShape, Run, Training
    from swarm.runfile import DataName, DataRules, ExchangeRules, RoundSchedule, RunFile

    data: DataName = "python" if name == "tiny" else "wikitext-103"
    if name == "tiny":
        shape, training = ModelShape(), Training(learning_rate=2e-3)
        hours, steps_per_s, min_replicas = 1 / 3, 2.5, 2
    elif name == "small":
        shape = ModelShape(layers=4, width=512, heads=8, context=256)
        training = Training(batch=16, learning_rate=1e-3, warmup_steps=500)
        hours, steps_per_s, min_replicas = 24.0, 5 / 3, 3
    elif name == "large":
        shape = ModelShape(layers=6, width=1024, heads=16, context=1024)
        training = Training(batch=8, learning_rate=4e-4, warmup_steps=2000)
        hours, steps_per_s, min_replicas = 7 * 24.0, 2 / 3, 3
    else:
        raise UsageError(f"no preset is called {name}", f"choose one of {', '.join(PRESETS)}")
    training = replace(training, replica_power=0.5)
    hours, steps_per_s = wishes.hours or hours, wishes.steps_per_s or steps_per_s
    planned = plan(training, hours * 3600.0, steps_per_s)
    rounds = RoundSchedule(0, planned.period_s, planned.count, *planned.windows_s)
    steps = planned.count * planned.steps_per_round
    training = replace(training, steps_per_round=planned.steps_per_round, steps=steps)
    run = Run(model=shape, training=training, seed=seed)
    exchange = ExchangeRules(_topk(planned.density), 32, min_replicas, ENDS_DENSITY)
    file = RunFile(run_name, run, DataRules(data, ""), rounds, exchange)
    return file if wishes.gb_per_day is None else _within_budget(file, wishes.gb_per_day)


def _topk(density: float) -> str:
    return f"topk:{density:.3g}:2:overall"


def _within_budget(file: RunFile, gb_per_day: float) -> RunFile:
    """The same run with updates less dense, if the budget demands it."""
    from swarm.cost import expected_gb_per_day
    from swarm.plan import LEAST_DENSITY, REPLICAS

    density, ends = file.codec.density, file.exchange.ends_density
    while expected_gb_per_day(file, REPLICAS) > gb_per_day:
        density, ends = density * 0.9, ends * 0.9
        if density < LEAST_DENSITY:
            least = expected_gb_per_day(file, REPLICAS)
            raise UsageError(
                f"{gb_per_day:g} GB a day are too few for this run: a host with "
                f"{REPLICAS} on every block would move {least:.2g} at least",
                "allow more with --gb-per-day, or train longer with --hours",
            )
        exchange = replace(file.exchange, codec=_topk(density), ends_density=round(ends, 3))
        file = replace(file, exchange=exchange)
    return file
