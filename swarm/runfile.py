"""The run file: all that a swarm must agree on, as one short TOML text, and what it costs to join.

Decides which run files are accepted and how large a run may be. Knows nothing of disks, peers or
clocks; the text comes as bytes, perhaps from a stranger. A run is named by the hash of these bytes
(`run_id`), so they travel exactly as they were written and nothing here writes them again;
`with_start` makes the one change that gives a run its beginning, and so its name.

Every field must be there. If a missing one took a default, two versions of this program with
different defaults would train different runs under one name.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from protocol.codec import MAX_SIZE, CodecId, CodecSpec
from protocol.errors import UsageError
from protocol.frames import content_digest
from protocol.limits import PAYLOAD_MAX_BYTES, TIME_MAX_S, Kind
from swarm.deadline import DeadlineRules
from swarm.groups import MAX_GROUP, group_count
from swarm.round_state import RoundRules
from swarm.run import VOCABULARY, ModelShape, Noise, Objective, Run, Training

FORMAT = 1
MAX_TEXT_BYTES = PAYLOAD_MAX_BYTES[Kind.RUN_REPLY]
# tomllib takes 40 s for 60 KB of one dotted key; with lines this short the worst found is 1 s.
MAX_LINE_BYTES = 160
MAX_QUOTED = 300  # characters of a stranger's text in an error
MAX_PARAMETERS = 2**35  # of the whole model: 137 GB of fp32, which a host of the last block reads
MAX_WORKER_BYTES = 2**40  # a run that needs more memory than this is a mistake or an attack
MAX_SNAPSHOT_EVERY = 256  # the log keeps 1024 entries, and two snapshots must be among them
MAX_SHORT_ROUNDS = 1000

DataName = Literal["python", "wikitext-2", "wikitext-103", "own"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,47}")  # strangers' terminals show it
_CODEC = re.compile(r"[a-z0-9.:+-]{1,48}")
_START = re.compile(rb"^([ \t]*start_s[ \t]*=[ \t]*)0(?=[ \t]*(?:#.*)?\r?$)", re.MULTILINE)
_HINT = "blockswarm init writes a complete run file to start from"


class RunFileError(UsageError):
    """A run file that is no run file, or describes a run that cannot work."""


@dataclass(frozen=True)
class DataRules:
    """Which text the hosts train on."""

    spec: DataName
    sha256: str  # of the corpus; "" if it need not be equal everywhere

    def __post_init__(self) -> None:
        if self.spec not in get_args(DataName):
            raise RunFileError(f"data.spec must be one of {', '.join(get_args(DataName))}")
        if self.sha256 and not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise RunFileError('data.sha256 must be 64 lowercase hex digits, or ""')
        if self.sha256 and self.spec == "own":
            raise RunFileError(
                "data.sha256 is given, but hosts bring their own text", 'set data.sha256 = ""'
            )


@dataclass(frozen=True)
class RoundSchedule:
    """The run's clock, and the windows of an exchange within a period."""

    start_s: int  # unix time; 0: not started yet
    period_s: float
    count: int
    deadline_floor_s: float
    deadline_ceiling_s: float
    vote_window_s: float
    repair_window_s: float

    def __post_init__(self) -> None:
        _between("rounds.start_s", self.start_s, 0, int(TIME_MAX_S))
        _between("rounds.period_s", self.period_s, 1.0, 86400.0)
        _between("rounds.count", self.count, 1, 10**7)
        for name in ("deadline_ceiling_s", "vote_window_s", "repair_window_s"):
            _between(f"rounds.{name}", getattr(self, name), 0.01, self.period_s)
        ceiling_s = self.deadline_ceiling_s
        _between("rounds.deadline_floor_s", self.deadline_floor_s, 0.01, ceiling_s)
        try:
            self.rules()
        except ValueError as error:
            raise RunFileError(
                f"[rounds] {error}",
                "raise period_s, or lower deadline_ceiling_s (counts once), vote_window_s (twice) "
                "or repair_window_s (three times)",
            ) from error

    def rules(self) -> RoundRules:
        """The same, as the exchange wants it."""
        deadline = DeadlineRules(self.deadline_floor_s, self.deadline_ceiling_s)
        return RoundRules(
            float(self.start_s), self.period_s, deadline, self.vote_window_s, self.repair_window_s
        )


@dataclass(frozen=True)
class ExchangeRules:
    """How updates are compressed, and how a block's log is kept."""

    codec: str
    snapshot_every: int
    min_replicas: int

    def __post_init__(self) -> None:
        if not _CODEC.fullmatch(self.codec):
            raise RunFileError("exchange.codec is not the name of a codec", "try topk:0.02:2")
        CodecSpec.parse(self.codec)
        _between("exchange.snapshot_every", self.snapshot_every, 1, MAX_SNAPSHOT_EVERY)
        _between("exchange.min_replicas", self.min_replicas, 1, 1024)


@dataclass(frozen=True)
class RunFile:
    """A run (swarm.run) and what a swarm needs besides: a name, data, a clock, an exchange.

    `run.training.steps` is not in the file; it must be `scheduled_steps` of the rest.
    """

    name: str
    run: Run
    data: DataRules
    rounds: RoundSchedule
    exchange: ExchangeRules

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise RunFileError(
                "name must be 1 to 48 letters, digits, spaces or . _ -, not beginning with a space"
            )
        self._check_size()
        model, training = self.run.model, self.run.training
        if training.steps != scheduled_steps(training, self.rounds.count):
            raise RunFileError("training.steps is not what rounds.count makes it")
        if model.relays and training.staggered and self.exchange.snapshot_every < model.blocks:
            raise RunFileError(
                "exchange.snapshot_every is below model.blocks: the log would forget versions that "
                "staggered copies still read",
                f"set snapshot_every = {model.blocks} or more, or staggered = false",
            )

    def _check_size(self) -> None:
        """Bounds on what a stranger's run makes a host allocate and pull."""
        counts = parameter_counts(self.run.model, self.run.training.objective)
        _between("the number of parameters of a block", max(counts), 1, MAX_SIZE)
        _between("the number of parameters of the model", sum(counts), 1, MAX_PARAMETERS)
        largest = PAYLOAD_MAX_BYTES[Kind.UPDATE_REPLY]
        _between("the size of an update in bytes", self.max_update_bytes(), 1, largest)
        _between("a worker's memory in bytes", worker_memory_bytes(self), 1, MAX_WORKER_BYTES)

    @property
    def codec(self) -> CodecSpec:
        return CodecSpec.parse(self.exchange.codec)

    @property
    def started(self) -> bool:
        return self.rounds.start_s > 0

    def parameters(self, block: int | None = None) -> int:
        """Parameters of a block; without one, of the largest."""
        counts = parameter_counts(self.run.model, self.run.training.objective)
        return max(counts) if block is None else counts[block]

    def max_update_bytes(self, block: int | None = None) -> int:
        """No honest update is longer; a longer one is refused before it is pulled."""
        return self.codec.max_bytes(self.parameters(block))


def run_id(text: bytes) -> bytes:
    """The name of a run: the digest of its file's exact bytes."""
    return content_digest(text)


def scheduled_steps(training: Training, count: int) -> int:
    """Steps in `count` rounds: count * steps_per_round, less what the short rounds leave out."""
    _between("training.short_rounds", training.short_rounds, 0, MAX_SHORT_ROUNDS)
    short = min(count, training.short_rounds)
    first = sum(training.steps_in_round(number) for number in range(short))
    return first + (count - short) * training.steps_per_round


def with_start(text: bytes, start_s: int) -> bytes:
    """The file of a run that begins now: the same bytes but for the value of rounds.start_s."""
    before = parse(text)
    if before.started:
        raise RunFileError(f"{before.name} has started already; another start is another run")
    changed, found = _START.subn(rb"\g<1>%d" % start_s, text)
    after = parse(changed) if found == 1 else None
    if after != replace(before, rounds=replace(before.rounds, start_s=start_s)):
        raise RunFileError(
            "cannot fill in the start of the run", "write start_s = 0 on a line of its own"
        )
    return changed


# Reading


def parse(text: bytes) -> RunFile:
    """Read a run file that anybody may have written; a `RunFileError` names what is wrong."""
    try:
        return _read(_tables(text))
    except UsageError as error:
        raise RunFileError(_cut(error.message), _cut(error.hint) or _HINT) from error


def _tables(text: bytes) -> dict[str, Any]:
    if len(text) > MAX_TEXT_BYTES:
        raise RunFileError(f"a run file has at most {MAX_TEXT_BYTES} bytes, not {len(text)}")
    for number, line in enumerate(text.split(b"\n"), 1):
        if len(line) > MAX_LINE_BYTES:
            raise RunFileError(f"line {number} is longer than {MAX_LINE_BYTES} bytes")
    try:
        return tomllib.loads(text.decode())
    except RecursionError as error:
        raise RunFileError("the run file is nested too deeply") from error
    except ValueError as error:  # also UnicodeDecodeError, and integers of thousands of digits
        raise RunFileError(f"the run file is not valid TOML: {error}") from error


def _read(raw: dict[str, Any]) -> RunFile:
    version = raw.get("format", FORMAT)
    if type(version) is int and version > FORMAT:
        raise RunFileError(
            f"this run needs a newer blockswarm (format above {FORMAT})", "upgrade blockswarm"
        )
    sections = ("model", "noise", "training", "data", "rounds", "exchange")
    _expect("the run file", raw, ("format", "name", "seed", *sections))
    if _typed("format", version, int) != FORMAT:
        raise RunFileError(f"format must be {FORMAT}")
    rounds = _section(RoundSchedule, "rounds", raw)
    training = _section(Training, "training", raw, derived={"steps": 1})
    training = replace(training, steps=scheduled_steps(training, rounds.count))
    run = Run(
        model=_section(ModelShape, "model", raw),
        noise=_section(Noise, "noise", raw),
        training=training,
        seed=_typed("seed", raw["seed"], int),
    )
    data, exchange = _section(DataRules, "data", raw), _section(ExchangeRules, "exchange", raw)
    return RunFile(_typed("name", raw["name"], str), run, data, rounds, exchange)


_T = TypeVar("_T", ModelShape, Noise, Training, DataRules, RoundSchedule, ExchangeRules)


def _section(
    kind: type[_T], name: str, raw: Mapping[str, Any], derived: Mapping[str, Any] | None = None
) -> _T:
    """One section, with exactly the fields of its dataclass but for the derived ones."""
    table, known = raw[name], derived or {}
    if not isinstance(table, dict):
        raise RunFileError(f"{name} is not a section; write [{name}]")
    _expect(f"[{name}]", table, [f.name for f in fields(kind) if f.name not in known])
    hints = get_type_hints(kind)
    values = {key: _typed(f"{name}.{key}", value, hints[key]) for key, value in table.items()}
    return kind(**values, **known)


def _expect(where: str, table: Mapping[str, Any], wanted: Collection[str]) -> None:
    for key in table:
        if key not in wanted:
            raise RunFileError(f"unknown field in {where}: {key[:60]!r}")
    for key in wanted:
        if key not in table:
            raise RunFileError(f"missing in {where}: {key}")


def _typed(name: str, value: Any, hint: Any) -> Any:
    kind = str if get_origin(hint) is Literal else hint
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise RunFileError(f"{name} is no 64-bit integer")
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise RunFileError(f"{name} must be of type {kind.__name__}, not {type(value).__name__}")
    return value


def _between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # NaN is between nothing
        raise RunFileError(f"{name} is {value}; it must be between {low} and {high}")


def _cut(text: str) -> str:
    return text if len(text) <= MAX_QUOTED else text[:MAX_QUOTED] + "..."


# What it costs. Estimates for a person and for the choice of a block, of the costliest block unless
# one is named; they lean to the high side.

RUNTIME_BYTES = 600 << 20  # two processes with torch (224 and 285 MiB measured) and p2pd (62 MB)
WORKER_BYTES_PER_WEIGHT = 20  # fp32 weights, gradients, two moments of Adam, int32 consensus
EXCHANGE_BYTES_PER_WEIGHT = 32  # int64 and float64 vectors while an update is made or aggregated
COPY_BYTES_PER_WEIGHT = 8  # a followed block: its int32 consensus and the fp32 copy that is read
LAYER_FLOATS_PER_WIDTH = 24  # kept for the backward pass, per byte of context
HEAD_FLOATS = 6 * VOCABULARY  # logits, evidence, their softmax
SAVED_BYTES_PER_WEIGHT = 2 * 16 + 2 * 4  # a checkpoint and the one that replaces it, two snapshots


def parameter_counts(shape: ModelShape, objective: Objective) -> tuple[int, ...]:
    """Parameters of every block, without building one."""
    width, layers = shape.width, shape.layers
    count = VOCABULARY * width + layers * (12 * width**2 + 2 * width)
    if objective == "edm":
        count += 2 * width**2 + width + 1  # z_in, denoised_out, log_scale
        count += (16 + 1) * 64 + (64 + 1) * 4 * layers * width  # the modulation by sigma
    else:
        count += VOCABULARY * (width + 1)  # head
    relay_in = width**2 if shape.relays else 0
    return (count, *(count + relay_in for _ in range(1, shape.blocks)))


def followed_blocks(shape: ModelShape, block: int) -> tuple[int, ...]:
    """The blocks whose consensus a worker reads besides its own."""
    before = tuple(range(block)) if shape.relays else ()
    ahead = shape.coupling == "look_ahead" and block + 1 < shape.blocks
    return (*before, block + 1) if ahead else before


def worker_memory_bytes(runfile: RunFile, block: int | None = None) -> int:
    """Memory of one worker with everything around it; on a GPU host, of both memories together."""
    shape, training = runfile.run.model, runfile.run.training
    counts = parameter_counts(shape, training.objective)
    if block is None:  # the last two follow the most; one of them trains through the next, too
        last = shape.blocks - 1
        return max(worker_memory_bytes(runfile, b) for b in {max(0, last - 1), last})
    followed = followed_blocks(shape, block)
    own = counts[block] * (WORKER_BYTES_PER_WEIGHT + EXCHANGE_BYTES_PER_WEIGHT)
    copies = sum(counts[other] for other in followed) * COPY_BYTES_PER_WEIGHT
    floats = shape.layers * LAYER_FLOATS_PER_WIDTH * shape.width + HEAD_FLOATS
    through = 2 if block + 1 in followed else 1
    activations = 4 * through * floats * training.batch * shape.context
    return RUNTIME_BYTES + own + copies + activations


def expected_update_bytes(runfile: RunFile, block: int | None = None) -> int:
    """What an update will have; for top-k a kept weight costs its value and the gap before it."""
    size, codec = runfile.parameters(block), runfile.codec
    if codec.codec != CodecId.TOPK:
        return codec.max_bytes(size)
    kept = codec.max_kept(size)
    return math.ceil(kept * (math.log2(size / kept) + 1.5 + codec.value_bits) / 8)


def expected_step_bytes(runfile: RunFile, replicas: int, block: int | None = None) -> int:
    """One step of the log: the aggregate of so many updates, whose weights hardly overlap."""
    dense = 4 * runfile.parameters(block)
    return min(max(1, replicas) * expected_update_bytes(runfile, block), dense)


def expected_gb_per_day(runfile: RunFile, replicas: int, block: int | None = None) -> float:
    """Both directions, with `replicas` hosts on every block: updates, and the logs it follows.

    Whatever is pulled is served by somebody, so an average host sends as much as it receives.
    """
    shape = runfile.run.model
    worst = shape.blocks - 1 if block is None else block
    groups = group_count(replicas)
    members = min(MAX_GROUP, math.ceil(replicas / groups))
    pulled = max(0, members - 1) * expected_update_bytes(runfile, worst)
    pulled += (groups - 1) * expected_step_bytes(runfile, members, worst)
    for other in followed_blocks(shape, worst):
        pulled += expected_step_bytes(runfile, replicas, other)
    return 2 * pulled * (86400.0 / runfile.rounds.period_s) / 1e9


def disk_bytes(runfile: RunFile, replicas: int, block: int | None = None) -> int:
    """Checkpoints and the log with its snapshots; without the corpus."""
    saved = SAVED_BYTES_PER_WEIGHT * runfile.parameters(block)
    steps = 2 * runfile.exchange.snapshot_every * expected_step_bytes(runfile, replicas, block)
    return saved + steps
