"""What is simulated: how many hosts, the links between them, what goes wrong, and when.

A scenario is a small TOML file or a few options; `blockswarm simulate --help` shows one.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from msgspec import Meta

from node.simulator.liar import Lie
from protocol.errors import UsageError
from swarm.run import Coupling, ModelShape
from swarm.run_template import emit, preset
from swarm.runfile import ExchangeRules, RoundSchedule, RunFile
from swarm.tables import from_table

MAX_HOSTS = 2000
HINT = "blockswarm simulate --help shows a scenario"
Speed = Annotated[float, Meta(ge=0.01, le=10)]
STEPS = 2  # of toy training in a round
AFTER = 4  # rounds after the run's last, in which its hosts come to one consensus
# Of a round's exchange, as shares of the period.
FLOOR, CEILING, VOTE, REPAIR = 0.05, 0.3, 0.075, 0.075


@dataclass(frozen=True)
class Link:
    """What lies between two hosts."""

    latency_s: Annotated[float, Meta(ge=0, le=60)] = 0.05  # one way; the median of a lognormal
    jitter: Annotated[float, Meta(ge=0, le=3)] = 0.5  # its sigma
    loss: Annotated[float, Meta(ge=0, le=0.9)] = 0.0  # of questions that are never answered
    bytes_per_s: Annotated[float, Meta(ge=1e3)] = 12.5e6  # of a host, each way


@dataclass(frozen=True)
class Fault:
    """Something that happens at a (fractional) round. `hosts` are names."""

    round: float
    kill: tuple[str, ...] = ()  # as by kill -9
    start: tuple[str, ...] = ()  # again, from what it had saved; or for the first time
    cut: tuple[str, ...] = ()  # these reach each other and nobody else
    heal: bool = False  # all reach each other again


@dataclass(frozen=True)
class Scenario:
    """A swarm to simulate. Hosts are called h0, h1, ... and take the blocks in turn."""

    hosts: int = 8
    blocks: int = 2
    rounds: Annotated[int, Meta(ge=1, le=100_000)] = 20
    period_s: Annotated[float, Meta(ge=1, le=86_400)] = 20.0
    codec: str = "topk:0.1:8:overall"
    coupling: Coupling = "look_ahead"
    same_text: bool = False  # all hosts are known to have the same: see the run file's [data]
    learning: Annotated[float, Meta(ge=0, le=1)] = 0.1  # of the way to the goal, in a step
    noise: Annotated[float, Meta(ge=0, le=100)] = 0.0  # of a toy's step
    link: Link = field(default_factory=Link)
    faults: tuple[Fault, ...] = ()
    later: Mapping[str, float] = field(default_factory=dict)  # name -> the round it joins in
    skews_s: Mapping[str, float] = field(default_factory=dict)  # name -> how wrong its clock is
    speeds: Mapping[str, Speed] = field(default_factory=dict)  # name -> share of the steps
    lies: Mapping[str, Lie] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= MAX_HOSTS or not 1 <= self.blocks <= self.hosts:
            raise UsageError(
                f"{self.hosts} hosts cannot train {self.blocks} blocks",
                f"choose 1 to {MAX_HOSTS} hosts, and no more blocks than hosts",
            )
        named = {*self.later, *self.skews_s, *self.speeds, *self.lies}
        for fault in self.faults:
            named |= {*fault.kill, *fault.start, *fault.cut}
        unknown = sorted(named - set(self.names))
        if unknown:
            raise UsageError(
                f"there is no host {unknown[0]}", f"hosts are called h0 to h{self.hosts - 1}"
            )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"h{number}" for number in range(self.hosts))

    def block_of(self, name: str) -> int:
        return int(name[1:]) % self.blocks

    def calm_rounds(self) -> list[int]:
        """The rounds in which all hosts can reach each other."""
        calm: list[int] = []
        cut, now = False, 0
        for fault in sorted(self.faults, key=lambda f: f.round):
            first = int(fault.round) + 1
            if not cut:
                calm += range(now, int(fault.round) if fault.cut else first)
            cut, now = bool(fault.cut) or (cut and not fault.heal), first
        return calm + ([] if cut else list(range(now, self.rounds + AFTER + 1)))

    def run_text(self, start_s: int, seed: int) -> bytes:
        """The run file of this swarm."""
        base = preset("tiny", "simulated", seed)
        shape = ModelShape(self.blocks, 1, 8, 1, 8, self.coupling)
        training = replace(base.run.training, steps_per_round=STEPS, steps=STEPS * self.rounds)
        windows = (share * self.period_s for share in (FLOOR, CEILING, VOTE, REPAIR))
        rounds = RoundSchedule(start_s, self.period_s, self.rounds, *windows)
        exchange = ExchangeRules(self.codec, 8, 1)
        run = replace(base.run, model=shape, training=training)
        data = replace(base.data, sha256="0" * 64 if self.same_text else "")
        return emit(RunFile("simulated", run, data, rounds, exchange))


def read(text: str) -> Scenario:
    """A scenario from TOML. Raises `UsageError`."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"the scenario is not TOML: {error}", HINT) from None
    faults = table.get("faults", [])
    for number, row in enumerate(faults if isinstance(faults, list) else []):
        from_table(Fault, row, f"the scenario's faults[{number}]")
    return from_table(Scenario, table, "the scenario")


def lie_called(name: str) -> Lie:
    try:
        return Lie(name)
    except ValueError:
        known = ", ".join(lie.value for lie in Lie)
        raise UsageError(f"no lie is called {name}", f"choose one of {known}") from None


def with_storm(scenario: Scenario, count: int, seed: int) -> Scenario:
    """The same with so many faults more, drawn from the seed: kills with a restart, and cuts.

    They are over some rounds before the end, so that all can be together again.
    """
    rng = random.Random(f"storm {seed}")
    faults = list(scenario.faults)
    calm = 6.0
    for _ in range(count):
        begins = rng.uniform(2.0, max(3.0, scenario.rounds - calm - 4.0))
        ends = begins + rng.uniform(0.3, 4.0)
        if rng.random() < 0.6:
            name = rng.choice(scenario.names)
            faults += [Fault(begins, kill=(name,)), Fault(ends, start=(name,))]
        else:
            some = rng.sample(scenario.names, rng.randint(1, max(1, scenario.hosts // 2)))
            faults += [Fault(begins, cut=tuple(sorted(some))), Fault(ends, heal=True)]
    return replace(scenario, faults=tuple(sorted(faults, key=lambda fault: fault.round)))
