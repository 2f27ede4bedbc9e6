"""One run of a swarm on the emulated WAN, from its first host to the assembled model.

Decides the run files of the public-network experiments, when a run is over, and what of it is
measured. The bed and the start of the hosts are `benchmarks.wan`'s; what the figures mean is
`rows`' business.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.corpus import WIKITEXT2_VARIABLE
from benchmarks.harness import ROOT
from benchmarks.link_model import LinkModel
from benchmarks.wan import events as log
from benchmarks.wan.bed import Bed
from benchmarks.wan.namespaces import BedFailed
from benchmarks.wan.processes import Command
from benchmarks.wan.runner import SwarmOnBed, run_start_s
from node.data.corpus import Corpus
from protocol.errors import BlockswarmError
from swarm.run import ModelShape, Run, Training, usual_learning_rate
from swarm.run_template import emit
from swarm.runfile import DataRules, ExchangeRules, RoundSchedule, RunFile

WAN = ROOT / "benchmarks" / "wan"
CLIENT = "client"
SPARSE, DENSE = "topk:0.02:2:overall", "fp32"
START_S = 300.0  # a host at a tenth of a core takes minutes to import torch
END_S = 90.0  # after the last round: its exchange, and saving
HOSTS_START_S = 40.0  # on an idle machine
ASSEMBLE_S = 300.0
SEGMENT_BYTES, TUN_HEADER_BYTES = 1448, 52  # a TUN device has no Ethernet header
STEP_CPU_S = 0.12  # of a worker of the default shape (quality.json: 693 s for 5859 steps)


@dataclass(frozen=True)
class Plan:
    """A run and the bed it runs on.

    `enough_rounds`: assemble when every worker has closed so many; 0: at the end of the run.
    """

    topology: str
    run: RunFile
    evaluate_bytes: int
    enough_rounds: int = 0

    @property
    def seconds(self) -> float:
        """About what it takes: start, rounds, end, assembly."""
        rounds = self.run.rounds
        return HOSTS_START_S + ((self.enough_rounds or rounds.count) + 2) * rounds.period_s + 30

    def load(self, workers: int) -> float:
        """The share of two cores that the training takes, nodes and daemons not counted."""
        shape, training = self.run.run.model, self.run.run.training
        step_s = STEP_CPU_S * shape.layers / 2 * (shape.width / 128) ** 2
        step_s *= training.batch * shape.context / 1024
        return workers * training.steps_per_round * step_s / self.run.rounds.period_s / 2


def run_file(
    name: str, shape: ModelShape, codec: str, rounds: int, steps: int, period_s: float
) -> RunFile:
    """WikiText-2; the windows of an exchange are a part of the period, for any line."""
    all_steps = rounds * steps
    training = Training(
        steps=all_steps,
        steps_per_round=steps,
        warmup_steps=min(40, all_steps // 10),
        learning_rate=usual_learning_rate(all_steps),
    )
    p = period_s
    schedule = RoundSchedule(0, p, rounds, 0.08 * p, 0.3 * p, 0.1 * p, 0.15 * p)
    exchange = ExchangeRules(codec, snapshot_every=max(4, shape.blocks), min_replicas=1)
    data = DataRules("wikitext-2", "")
    return RunFile(name, Run(shape, training=training), data, schedule, exchange)


def data_option() -> str:
    """Where hosts of the bed read WikiText-2: they have no way to the internet. "": the cache."""
    beside = ROOT.parent / "shared" / "data" / "wikitext-2"
    return os.environ.get(WIKITEXT2_VARIABLE, "") or (str(beside) if beside.is_dir() else "")


def topology_text(name: str, slow: bool = True) -> str:
    """A file of `benchmarks/wan` with our run file in its [swarm]; `slow` False: no slow host."""
    text = (WAN / name).read_text()
    text = text[: text.index("[swarm]")]
    if not slow:
        text = re.sub(r"cpu_percent = .*\nup_mbit = .*\ndown_mbit = .*\n", "", text)
    data = f"data = {json.dumps(data_option())}\n" if data_option() else ""
    return f'{text}[swarm]\nrun_file = "run.toml"\n{data}'


@dataclass(frozen=True)
class Outcome:
    """What was measured of a run."""

    assembled: dict[str, Any]
    figures: dict[str, float]
    rows: list[dict[str, Any]]
    logs: dict[str, list[log.Event]]
    kernel_before_assembly: int
    start_s: int


def experiment(plan: Plan, late: Sequence[str] = ()) -> Outcome:
    """Bring the bed up, let the run end, assemble, collect, take all down.

    `late`: hosts that need not train when the run's clock starts, nor be there at all in the end.
    """
    with (
        tempfile.TemporaryDirectory(prefix="blockswarm-three-") as scratch,
        Bed(plan.topology) as bed,
    ):
        folder = Path(scratch)
        (folder / "run.toml").write_bytes(emit(plan.run))
        swarm = SwarmOnBed(bed, folder, folder, say)
        swarm.start()
        start_s = run_start_s(folder)
        try:
            _until_training(swarm, late)
            say(f"all train {time.time() - start_s:+.0f} s after the run's start")
            _until_ended(swarm, plan, start_s, late)
        except BedFailed as error:
            raise BedFailed(error.message, _last_words(swarm)) from error
        before = sum(_bytes(counts) for counts in bed.counters().values())
        assembled = assemble(swarm, plan)
        logs = {f"{n} {w}": log.read(c.folder) for (n, w), c in swarm.commands.items()}
        figures, rows = swarm.collect()
        _count_client(figures, rows, assembled)
        return Outcome(assembled, figures, rows, logs, before, start_s)


def _until_training(swarm: SwarmOnBed, late: Sequence[str]) -> None:
    every = swarm.commands
    swarm.commands = {key: c for key, c in every.items() if key[0] not in late}
    swarm.until_all_train(START_S)
    swarm.commands = every


def _last_words(swarm: SwarmOnBed) -> str:
    """Of every worker: whose fault it was is rarely the one that complains."""
    return "\n  ".join(
        f"{name} {worker} (exit code {command.process.poll()}): {command.last_words()}"
        for (name, worker), command in swarm.commands.items()
    )


def _until_ended(swarm: SwarmOnBed, plan: Plan, start_s: int, late: Sequence[str]) -> None:
    """Wait for the last exchange of every host, telling how it goes."""
    rounds, shown = plan.run.rounds, -1
    end_s = start_s + rounds.count * rounds.period_s + END_S
    waiting = [c for (name, _), c in swarm.commands.items() if name not in late]
    while waiting:
        waiting = [c for c in waiting if not _done(log.read(c.folder), plan)]
        for (name, worker), command in swarm.commands.items():
            if command.process.poll() is not None:
                raise BedFailed(f"worker {worker} of {name} ended", command.last_words())
        if time.time() > end_s:
            raise BedFailed(
                f"{waiting[0].host} is not at the end of the run", waiting[0].last_words()
            )
        now = int((time.time() - start_s) // rounds.period_s)
        if now > shown and now % 5 == 0:
            shown = now
            say(_standing(swarm, now))
        # Looks at processes until the run's end; one that dies is raised above.
        time.sleep(0.5)


def _done(events: list[log.Event], plan: Plan) -> bool:
    enough = plan.enough_rounds
    return log.said(events, "run_ended") or 0 < enough <= len(log.rounds(events))


def _standing(swarm: SwarmOnBed, number: int) -> str:
    logs = {f"{n} {w}": log.read(c.folder) for (n, w), c in swarm.commands.items()}
    points = log.curve(logs)
    at = f"  CE of the last block {points[-1][2]:.3f} at {points[-1][1]:.4f} GB" if points else ""
    share = log.included_share(logs)
    return f"round {number}{at}  {100 * share:.0f} % of the updates included"


def assemble(swarm: SwarmOnBed, plan: Plan) -> dict[str, Any]:
    """`blockswarm assemble` on a host that does nothing else; the facts that it prints."""
    folder = swarm.folder / CLIENT
    options: list[object] = ["assemble", swarm.seed_address, "-o", folder / "model", "--fit"]
    options += ["--json", "--threads", 1, "--evaluate-bytes", plan.evaluate_bytes]
    if data_option():
        options += ["--data", data_option()]
    command = Command(swarm.bed, CLIENT, folder, options)
    if command.finish(ASSEMBLE_S):
        raise BedFailed("the assembly failed", command.last_words())
    facts: dict[str, Any] = json.loads(command.out.read_text().strip().splitlines()[-1])
    return facts


def _count_client(
    figures: dict[str, float], rows: list[dict[str, Any]], assembled: dict[str, Any]
) -> None:
    """The assembler keeps no ledger file, but says what it counted."""
    traffic = assembled["traffic"]
    counted = traffic["sent_bytes"] + traffic["received_bytes"]
    estimated = sum(
        part["sent_bytes"] + part["received_bytes"] for part in traffic["estimated"].values()
    )
    for row in rows:
        if row["kind"] == "host" and row["host"] == CLIENT:
            row["ledger_bytes"], row["dht_estimate_bytes"] = counted, estimated
            row["ledger_frames"] = counted // SEGMENT_BYTES
    hosts = [row for row in rows if row["kind"] == "host"]
    figures["gb_ledger"] = sum(row["ledger_bytes"] for row in hosts) / 2e9
    figures["gb_dht_estimate"] = sum(row["dht_estimate_bytes"] for row in hosts) / 2e9
    figures["gb_expected"] = (
        sum(
            expected_bytes(row["ledger_bytes"], row["ledger_frames"], row["dht_estimate_bytes"])
            for row in hosts
        )
        / 2e9
    )


def expected_bytes(counted: int, frames: int, estimated: int) -> int:
    """What a host's device should have counted, by its ledger and the documented overhead.

    A frame has a packet of its own at least. Of the DHT the ledger knows an estimate only; what
    p2pd says by itself (identify, pings, its handshakes) is in neither.
    """
    link = LinkModel(segment_bytes=SEGMENT_BYTES, packet_header_bytes=TUN_HEADER_BYTES)
    whole = link.on_the_wire_bytes(counted) + link.acknowledgement_bytes(counted)
    small = max(0, frames - counted // SEGMENT_BYTES)  # packets beyond those of full segments
    return whole + small * (TUN_HEADER_BYTES * 3 // 2 + 12 + 18) + estimated


def start_ce(run: RunFile, corpus: Corpus, evaluate_bytes: int) -> float:
    """Honest CE of the first weights, on the bytes that the assembled model is judged by."""
    from node.local.training import held_out_batches
    from swarm.learning.composition import ComposedModel
    from swarm.learning.evaluate import honest_ce
    from swarm.learning.worker import initial_block

    spec = run.run
    blocks = [initial_block(spec, block) for block in range(spec.model.blocks)]
    batches = held_out_batches(corpus, "test", spec.model.context, evaluate_bytes)
    return honest_ce(ComposedModel(spec, blocks), batches).ce_nats


def _bytes(counts: dict[str, int]) -> int:
    return counts["tx_bytes"] + counts["rx_bytes"]


def explained(error: BlockswarmError) -> RuntimeError:
    """The same with its hint, which does not get out of a process of the pool otherwise."""
    return RuntimeError(f"{error.message}\n  {error.hint}")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
