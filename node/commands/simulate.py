"""The command `simulate`: a swarm of real hosts on a made-up network, replayed by a number."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from node.commands.options import FiniteRange, PathOption
from node.console.results import print_json
from node.console.terminal import say

if TYPE_CHECKING:
    from node.simulator.scenario import Scenario
    from node.simulator.story import Look, Story

MOST_SEEDS = 100_000


@click.command(short_help="Simulate a swarm: real hosts, a made-up network, one seed.")
@click.argument(
    "scenario_file",
    metavar="[SCENARIO]",
    type=PathOption(dir_okay=False, exists=True),
    required=False,
)
@click.option("--hosts", type=click.IntRange(1, 2000), help="Hosts in all (default: 8).")
@click.option("--blocks", type=click.IntRange(1, 2000), help="Blocks of the model (default: 2).")
@click.option("--rounds", type=click.IntRange(1, 100_000), help="Rounds of the run (default: 20).")
@click.option("--loss", type=FiniteRange(0, 0.9), help="The share of questions that are lost.")
@click.option(
    "--storm",
    type=click.IntRange(0, 1000),
    default=0,
    help="So many faults drawn from the seed: kills with a restart, and partitions.",
)
@click.option(
    "--lie",
    "lies",
    multiple=True,
    metavar="HOST=LIE",
    help="A host that falsifies its updates, as in h3=sign-flip. May be given again.",
)
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="All chance."
)
@click.option(
    "--seeds",
    type=click.IntRange(1, MOST_SEEDS),
    default=1,
    help="Try so many seeds, from --seed on; end at the first one that goes wrong.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each seed.")
def simulate(
    scenario_file: Path | None,
    storm: int,
    lies: tuple[str, ...],
    seed: int,
    seeds: int,
    as_json: bool,
    **sizes: Any,
) -> None:
    """Simulate a swarm in one process, in virtual time, and say how it went.

    \b
      blockswarm simulate                                  8 hosts, 2 blocks, 20 rounds
      blockswarm simulate --hosts 12 --storm 10 --seed 7   with faults; 7 replays them
      blockswarm simulate --storm 10 --seeds 100           look for a seed that goes wrong
      blockswarm simulate partition.toml --json            a scenario of your own

    Hosts run the code of `blockswarm join`; only the network, the clock and the training (a walk
    toward a goal) are made up. Equal seeds give equal events. Exit code 1 if hosts of a block
    disagree for long, or a host fell over.

    \b
    A SCENARIO is a TOML file; what it leaves out is as without it. Times are rounds:
      hosts = 8                      # h0 to h7; host number n trains block n modulo blocks
      blocks = 2
      rounds = 40
      [link]
      latency_s = 0.08               # also: jitter, loss, bytes_per_s
      [later]
      h7 = 10.5                      # joins in the middle of round 10
      [skews_s]
      h1 = 1.5                       # its clock is wrong; also: [speeds], [lies]
      [[faults]]
      round = 12.1
      kill = ["h2"]                  # as by kill -9
      [[faults]]
      round = 15
      start = ["h2"]                 # back, with what it had saved
      cut = ["h3", "h4"]             # these two reach only each other
      [[faults]]
      round = 20
      heal = true
    """
    from node.simulator.scenario import Scenario, lie_called, read, with_storm

    scenario = read(scenario_file.read_text()) if scenario_file else Scenario()
    scenario = replace(scenario, **{k: v for k, v in sizes.items() if k != "loss" and v})
    if sizes["loss"] is not None:
        scenario = replace(scenario, link=replace(scenario.link, loss=sizes["loss"]))
    liars = dict(scenario.lies)
    for text in lies:
        name, _, lie = text.partition("=")
        liars[name] = lie_called(lie)
    scenario = replace(scenario, lies=liars)
    for number in range(seed, seed + seeds):
        troubles = _tell(with_storm(scenario, storm, number), number, as_json, seeds == 1)
        if troubles:
            raise click.exceptions.Exit(1)


def _tell(scenario: Scenario, seed: int, as_json: bool, alone: bool) -> list[str]:
    """Run one seed and print what happened; what went wrong."""
    from node.simulator.world import run_scenario as simulated

    shown = alone and not as_json
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="blockswarm-simulated-") as folder:
        story = simulated(scenario, seed, Path(folder), _say_look if shown else None)
    seconds = time.monotonic() - began_s
    facts = _facts(scenario, seed, story, seconds)
    if as_json:
        print_json(facts)
    elif alone:
        _print(facts)
    else:
        wrong = facts["troubles"]
        print(f"seed {seed}: {'; '.join(wrong) if wrong else 'ok'} ({seconds:.1f} s)", flush=True)
    found: list[str] = facts["troubles"]
    return found


def _say_look(look: Look) -> None:
    apart = ", ".join(sorted(look.apart))
    state = f"apart from their blocks: {apart}" if apart else "all blocks agree"
    say(f"round {look.round}: {look.hosts} honest hosts, {state}")


def _facts(scenario: Scenario, seed: int, story: Story, seconds: float) -> dict[str, Any]:
    from swarm.events import MoveEvent, TrustEvent

    honest_events = [e for _, name, e in story.events if name not in scenario.lies]
    kinds = Counter(map(type, honest_events))
    sent = [count.bytes_total for count in story.moved.values()]
    honest = [r for _, name, r in story.by_host if name not in scenario.lies]
    went_in = [r.included for r in honest if r.included is not None]
    calm = scenario.calm_rounds()
    return {
        "seed": seed,
        "hosts": scenario.hosts,
        "blocks": scenario.blocks,
        "rounds": scenario.rounds,
        "outcomes": dict(story.outcomes),
        "updates_included": sum(went_in),
        "updates_sent": len(went_in),
        "longest_apart_rounds": story.longest_apart(calm)[0],
        "moves": kinds[MoveEvent],
        "exclusions": kinds[TrustEvent],
        "bytes_per_host_and_round": round(sum(sent) / max(len(sent), 1) / scenario.rounds),
        "events_digest": story.digest,
        "troubles": story.troubles(calm),
        "seconds": round(seconds, 2),
    }


def _print(facts: dict[str, Any]) -> None:
    outcomes = ", ".join(f"{count} {name}" for name, count in sorted(facts["outcomes"].items()))
    print(
        f"{facts['hosts']} hosts, {facts['blocks']} blocks, {facts['rounds']} rounds, "
        f"seed {facts['seed']}: {facts['seconds']:.1f} s"
    )
    print(f"  rounds of hosts          {outcomes}")
    print(f"  updates of honest hosts  {facts['updates_included']} of {facts['updates_sent']} in")
    print(f"  longest apart            {facts['longest_apart_rounds']} rounds")
    print(f"  moves, exclusions        {facts['moves']}, {facts['exclusions']}")
    print(f"  a host and round         {facts['bytes_per_host_and_round'] / 1e3:.1f} kB")
    print(f"  digest of all events     {facts['events_digest']}")
    for trouble in facts["troubles"]:
        print(f"  went wrong: {trouble}")


simulate_commands = (simulate,)
