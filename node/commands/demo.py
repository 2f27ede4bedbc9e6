"""The `demo` command: a whole swarm on this machine in a few minutes, and what came out of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from node.commands.options import PathOption
from node.console.amounts import duration_words, size_words
from node.console.results import print_json
from node.console.terminal import say

if TYPE_CHECKING:
    from swarm.runfile import RunFile


@click.command(short_help="A real swarm on this machine, to an assembled model.")
@click.option(
    "-o",
    "--out",
    type=PathOption(),
    default=Path("runs/demo"),
    show_default=True,
    help="Folder for the hosts, the model and the report; what is there is replaced.",
)
@click.option(
    "--rounds",
    type=click.IntRange(4, 1000),
    default=80,
    show_default=True,
    help="Rounds of 1.5 seconds to train for.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def demo(out: Path, rounds: int, as_json: bool) -> None:
    """Start a seed and six workers on four blocks, train, exchange, assemble, let it write.

    Every worker is a process of its own with its own p2pd, as on seven machines. Half way one is
    killed and another joins. Then the same is trained on one machine without a swarm, to compare.
    Takes under 4 minutes on 2 cores; nothing is left running.
    """
    from node.commands.demo_alone import train_alone
    from node.commands.demo_swarm import EVALUATION_BYTES, demo_run, run_demo
    from node.local.jobs import load_composed, write_text
    from node.machine.device import make_deterministic
    from swarm.writing.generate import Sampling

    run = demo_run(rounds)
    found = run_demo(out, say, run)
    make_deterministic(1)
    alone = train_alone(run, EVALUATION_BYTES, say)
    found["ce_alone_same_steps"], found["steps_of_a_host"] = alone["ce_nats"], alone["steps"]
    composed = load_composed(Path(found["model"]), (), {"device": "cpu", "threads": 1})
    written = write_text(composed, "def ", 200, Sampling(), None)
    found["text"] = written["prompt"] + written["text"]
    found["ce_before_nats"] = _ce_before(run)
    found["report"] = str(_report(out))
    if as_json:
        print_json(found)
    else:
        _print(found)


demo_commands = (demo,)


def _report(out: Path) -> Path:
    """The report of the hosts' event logs, as `blockswarm report` would make it."""
    from node.commands.report import load_run
    from node.report.html import page
    from node.report.logs import Budget

    path = out / "report.html"
    html = page([load_run(out / "hosts", "demo", Budget())])
    path.write_text(html, encoding="utf-8", errors="replace")
    return path


def _ce_before(run: RunFile) -> float:
    """CE of the run's first weights, on the text that the assembly is judged by."""
    from node.commands.demo_swarm import EVALUATION_BYTES
    from node.data.corpus import load_corpus
    from node.local.training import held_out_batches
    from swarm.learning.composition import ComposedModel
    from swarm.learning.evaluate import honest_ce
    from swarm.learning.worker import initial_block

    blocks = [initial_block(run.run, index) for index in range(run.run.model.blocks)]
    corpus = load_corpus(run.data.spec)
    batches = held_out_batches(corpus, "test", run.run.model.context, EVALUATION_BYTES)
    return honest_ce(ComposedModel(run.run, blocks), batches).ce_nats


def _print(found: dict[str, Any]) -> None:
    assembled = found["assembled"]
    before, after = found["ce_before_nats"], assembled["ce_nats"]
    gained = before - after
    moved = found["bytes_moved"]
    print(f"\nCE {before:.3f} -> {after:.3f} nats per byte (assembled, honest, held-out text)")
    for index, ce in enumerate(assembled["block_ce_nats"]):
        print(f"  block {index} alone  " + ("left out" if ce is None else f"{ce:.3f}"))
    print(
        f"CE {found['ce_alone_same_steps']:.3f} on one machine without a swarm: "
        f"one worker a block, the same {found['steps_of_a_host']} steps"
    )
    print("each host's own weights and its block's consensus, on its own held-out text:")
    for host in found["hosts"]:
        ces = [host["own_ce_nats"], host["consensus_ce_nats"]]
        own, consensus = ("-" if ce is None else f"{ce:.3f}" for ce in ces)
        print(
            f"  {host['name']:<9} block {host['block']}  {host['steps']:>4} steps  "
            f"own {own}  consensus {consensus}"
        )
    print(f"moved {size_words(moved)} among {found['workers']} hosts, every frame counted once")
    for purpose, count in sorted(found["bytes_by_purpose"].items(), key=lambda item: -item[1]):
        print(f"  {purpose:<10} {size_words(count):>10}")
    if gained > 0:
        print(f"GB per nat: {moved / 1e9 / gained:.5f}")
    print(f"updates included: {found['updates_included']} of {found['updates_sent']}")
    print(f"{duration_words(found['seconds'])}; model {found['model']}, report {found['report']}")
    print(f"\na text it wrote:\n{found['text']}")
