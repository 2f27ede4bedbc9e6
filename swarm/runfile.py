"""The run file: everything that a swarm must agree on, as a short TOML text from any peer.

Parses and checks it, and bounds the size of a run. Costs of a run are `swarm.cost`'s part. A run is
named by the hash of the file's bytes (`run_id`), so they are passed on as they were written; only
`with_start` changes them, when a run begins.

Every field must be there. If a missing one took a default, two versions of this program with
different defaults would train different runs under one name.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, Literal, get_type_hints

from protocol.codec import MAX_SIZE, CodecSpec
from protocol.errors import UsageError
from protocol.frames import content_digest
from protocol.limits import LOG_ENTRIES_PER_REPLY, PAYLOAD_MAX_BYTES, TIME_MAX_S, Kind
from swarm.consensus.schedule import CodecSchedule
from swarm.cost import block_parameters, worker_memory_bytes
from swarm.rounds.deadline import DeadlineRules
from swarm.rounds.state import RoundRules
from swarm.run import ModelShape, Noise, Run, Training
from swarm.tables import from_table

FORMAT = 2
MAX_TEXT_BYTES = PAYLOAD_MAX_BYTES[Kind.RUN_REPLY]
# tomllib takes 40 s for 60 KB of one dotted key; with lines this short the worst found is 1 s.
MAX_LINE_BYTES = 160
MAX_QUOTED = 300  # characters of a stranger's text in an error
MAX_PARAMETERS = 2**35  # of the whole model: 137 GB of fp32, which a host of the last block reads
MAX_WORKER_BYTES = 2**40  # a run that needs more memory than this is a mistake or an attack
# Newcomers start from a snapshot within one log reply. Replicas keep the last two snapshots, and
# the older one is up to twice `snapshot_every` rounds back.
MAX_SNAPSHOT_EVERY = LOG_ENTRIES_PER_REPLY // 2
MAX_ENDS_DENSITY = 16.0  # all weights in the first and the last 16 exchanges

DataName = Literal["python", "wikitext-2", "wikitext-103", "own"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,47}")  # shown on other users' terminals
_CODEC = re.compile(r"[a-z0-9.:+-]{1,48}")
_START = re.compile(rb"^([ \t]*start_s[ \t]*=[ \t]*)0(?=[ \t]*(?:#.*)?\r?$)", re.MULTILINE)
_HINT = "blockswarm init writes a complete run file to start from"


class RunFileError(UsageError):
    """Not a valid run file, or a run that cannot work."""


@dataclass(frozen=True)
class DataRules:
    """Which text the hosts train on."""

    spec: DataName
    sha256: str  # of the corpus; "" if it need not be equal everywhere

    def __post_init__(self) -> None:
        if self.sha256 and not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise RunFileError('data.sha256 must be 64 lowercase hex digits, or ""')
        if self.sha256 and self.spec == "own":
            raise RunFileError(
                "data.sha256 is given, but hosts bring their own text", 'set data.sha256 = ""'
            )

    @property
    def same_text(self) -> bool:
        """Whether all hosts have the same text, since others are refused at the start."""
        return bool(self.sha256)


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
        """The schedule as the round's machine needs it."""
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
    ends_density: float = 0.0  # see swarm.consensus.schedule

    def __post_init__(self) -> None:
        if not _CODEC.fullmatch(self.codec):
            raise RunFileError("exchange.codec is not the name of a codec", "try topk:0.02:2")
        CodecSpec.parse(self.codec)
        if self.snapshot_every > MAX_SNAPSHOT_EVERY:
            raise RunFileError(
                f"exchange.snapshot_every is {self.snapshot_every}; with more than "
                f"{MAX_SNAPSHOT_EVERY} newcomers would find no snapshot to start from",
                f"set snapshot_every = {MAX_SNAPSHOT_EVERY} or less",
            )
        _between("exchange.snapshot_every", self.snapshot_every, 1, MAX_SNAPSHOT_EVERY)
        _between("exchange.min_replicas", self.min_replicas, 1, 1024)
        _between("exchange.ends_density", self.ends_density, 0.0, MAX_ENDS_DENSITY)


@dataclass(frozen=True)
class RunFile:
    """A run (swarm.run) with its name, data, clock and rules of exchange.

    `run.training.steps` is not in the file; it must be `rounds.count` times the steps of a round.
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
        if training.steps != self.rounds.count * training.steps_per_round:
            raise RunFileError("training.steps is not what rounds.count makes it")
        if model.relays and training.staggered and self.exchange.snapshot_every < model.blocks:
            possible = model.blocks <= MAX_SNAPSHOT_EVERY
            enough = f"set snapshot_every = {model.blocks} or more, or " if possible else "set "
            raise RunFileError(
                "exchange.snapshot_every is below model.blocks: the log would forget versions that "
                "staggered copies still read",
                f"{enough}staggered = false",
            )

    def _check_size(self) -> None:
        """Bounds on what a run can make a host allocate and pull."""
        counts = block_parameters(self.run)
        _between("the number of parameters of a block", max(counts), 1, MAX_SIZE)
        _between("the number of parameters of the model", sum(counts), 1, MAX_PARAMETERS)
        largest = PAYLOAD_MAX_BYTES[Kind.UPDATE_REPLY]
        _between("the size of an update in bytes", self.max_update_bytes(), 1, largest)
        _between("a worker's memory in bytes", worker_memory_bytes(self), 1, MAX_WORKER_BYTES)

    @property
    def codec(self) -> CodecSpec:
        return CodecSpec.parse(self.exchange.codec)

    @property
    def codecs(self) -> CodecSchedule:
        """The codec of every exchange."""
        return CodecSchedule(self.codec, self.rounds.count, self.exchange.ends_density)

    @property
    def started(self) -> bool:
        return self.rounds.start_s > 0

    def parameters(self, block: int | None = None) -> int:
        """Parameters of a block; without one, of the largest."""
        counts = block_parameters(self.run)
        return max(counts) if block is None else counts[block]

    def max_update_bytes(self, block: int | None = None) -> int:
        """Upper bound of an honest update; a longer one is refused before it is pulled."""
        return self.codecs.densest.max_bytes(self.parameters(block))


@dataclass(frozen=True)
class _Tables:
    """The tables of a run file, as written."""

    format: int
    name: str
    seed: int
    model: ModelShape
    noise: Noise
    training: Training
    data: DataRules
    rounds: RoundSchedule
    exchange: ExchangeRules


SECTIONS = {name: kind for name, kind in get_type_hints(_Tables).items() if is_dataclass(kind)}
DERIVED = {"steps"}


def run_id(text: bytes) -> bytes:
    """The name of a run: the digest of its file's exact bytes."""
    return content_digest(text)


def with_start(text: bytes, start_s: int) -> bytes:
    """The file with rounds.start_s filled in; all other bytes stay."""
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


@lru_cache(4)  # a host asks for what is in its file more than once
def parse(text: bytes) -> RunFile:
    """Read a run file from an untrusted source. Raises `RunFileError`, which says what is wrong."""
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
    _check_format(raw.get("format", FORMAT))
    _expect("the run file", raw, [field.name for field in fields(_Tables)])
    for name, kind in SECTIONS.items():
        if not isinstance(raw[name], dict):
            raise RunFileError(f"{name} is not a section; write [{name}]")
        _expect(f"[{name}]", raw[name], [f.name for f in fields(kind) if f.name not in DERIVED])
    file = from_table(_Tables, raw, "run file")
    training = replace(file.training, steps=file.rounds.count * file.training.steps_per_round)
    run = Run(file.model, file.noise, training, file.seed)
    return RunFile(file.name, run, file.data, file.rounds, file.exchange)


def _check_format(version: object) -> None:
    if type(version) is not int:
        raise RunFileError(f"format must be {FORMAT}")
    if version > FORMAT:
        raise RunFileError(
            f"this run needs a newer blockswarm (format above {FORMAT})", "upgrade blockswarm"
        )
    if version < FORMAT:
        raise RunFileError(
            f"this run file is of an older version: format {version}, where {FORMAT} is needed",
            "blockswarm init writes a new one; a run that has begun ends with the version of "
            "blockswarm that it began with",
        )


def _expect(where: str, table: Mapping[str, Any], wanted: Collection[str]) -> None:
    for key, value in table.items():
        if key not in wanted:
            raise RunFileError(f"unknown field in {where}: {key[:60]!r}")
        if type(value) is int and not -(2**63) <= value < 2**63:
            raise RunFileError(f"{key} in {where} is no 64-bit integer")
    for key in wanted:
        if key not in table:
            raise RunFileError(f"missing in {where}: {key}")


def _between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # NaN is between nothing
        raise RunFileError(f"{name} is {value}; it must be between {low} and {high}")


def _cut(text: str) -> str:
    return text if len(text) <= MAX_QUOTED else text[:MAX_QUOTED] + "..."
