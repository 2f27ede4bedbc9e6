"""The work of `assemble`: pull all blocks, judge the model, write it; with `watch` every round.

Of a watched run the model with the lowest held-out CE is kept. Models are chosen on the valid split
and reported on the test split. Pulling and checking blocks is `node.assembly.pull`'s task.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from node.assembly.pull import Assembled, Assembler, BlockMissing, CountedPeers, OnBytes
from node.assembly.store import ConsensusStore
from node.console.results import Facts, evaluation_facts
from node.console.terminal import DownloadDisplay
from node.data.corpus import Corpus, lasting_spec, load_corpus
from node.local.model_folder import has_model, read_manifest, save_model
from node.local.training import FIT_BYTES, held_out_batches
from node.machine.atomic import hold_folder
from node.machine.device import choose_device, make_deterministic
from node.network.client import guest, replicas_of
from node.network.peers import NetworkPeers
from protocol.errors import DataError, UsageError
from protocol.ledger import Ledger
from protocol.records import Role
from swarm.learning.composition import SPARE_NATS, ComposedModel, fit_composition
from swarm.learning.evaluate import Evaluation, honest_ce
from swarm.rounds.clock import exchange_opens_s, round_at
from swarm.runfile import RunFile, parse, run_id

Say = Callable[[str], None]


@dataclass(frozen=True)
class AssembleOptions:
    """A user's options. `evaluate_bytes` 0: no text is needed and nothing is judged."""

    addresses: tuple[str, ...]
    out: Path
    watch: bool = False
    fit: bool = False
    without: tuple[int, ...] = ()
    allow_missing: bool = False
    evaluate_bytes: int = 65536
    data: str | None = None
    device: str = "auto"
    threads: int | None = None


class Judge:
    """Evaluates models on held-out text: `valid` to fit and choose, `test` to report.

    `spec` names the text in the manifest.
    """

    def __init__(self, corpus: Corpus, spec: str, context: int, limit_bytes: int) -> None:
        self.corpus, self.spec = corpus, spec
        self.valid = held_out_batches(corpus, "valid", context, limit_bytes)
        self.test = held_out_batches(corpus, "test", context, limit_bytes)
        self.fitting = held_out_batches(corpus, "valid", context, min(limit_bytes, FIT_BYTES))

    def fit(self, model: ComposedModel) -> ComposedModel:
        windows = torch.cat(self.fitting).to(model.device)
        return fit_composition(model, windows[:, :-1], windows[:, 1:], SPARE_NATS)

    def held_out_ce(self, model: ComposedModel) -> float:
        return honest_ce(model, self.valid).ce_nats

    def report(self, model: ComposedModel) -> Evaluation:
        return honest_ce(model, self.test)


def load_judge(run_file: RunFile, options: AssembleOptions) -> Judge | None:
    if not options.evaluate_bytes:
        if options.fit:
            raise UsageError("--fit needs text to fit on", "leave --evaluate-bytes 0 out")
        return None
    spec = run_file.data.spec if options.data is None else options.data
    if spec == "own" and options.data is None:
        raise UsageError(
            "in this run every host brings its own text, so there is none to evaluate on",
            "give a text with --data PATH, or --evaluate-bytes 0",
        )
    with DownloadDisplay() as display:
        corpus = load_corpus(spec, progress=display)
    if options.data is None and run_file.data.sha256 not in ("", corpus.sha256):
        raise DataError(
            f"the corpus {spec} on this machine is not the run's (sha256 {corpus.sha256[:16]}...)",
            "give the right text with --data, or --evaluate-bytes 0",
        )
    return Judge(corpus, lasting_spec(spec), run_file.run.model.context, options.evaluate_bytes)


async def assemble_model(
    options: AssembleOptions, say: Say, on_bytes: OnBytes, on_model: Callable[[Facts], None]
) -> Facts:
    """Assemble once, or with `watch` until the run is over. Return the facts of the best model.

    `on_model` is called with the facts of every pulled model. Its "kept" is true, or false if the
    folder has a better one, or None for the best one left by an earlier watch.
    """
    make_deterministic(options.threads)
    device = choose_device(options.device)
    was_there = options.out.exists()
    try:
        async with guest() as visitor:
            text = await visitor.fetch_run(options.addresses)
            run_file, run = parse(text), run_id(text)
            with hold_folder(options.out):
                kept = _folder_of_run(options.out, run)
                judge = await asyncio.to_thread(load_judge, run_file, options)
                async with visitor.network(text, options.addresses, say, Role.ASSEMBLER) as network:
                    store = ConsensusStore(options.out, run, run_file.exchange.snapshot_every)
                    peers = CountedPeers(NetworkPeers(network), on_bytes)
                    assembler = Assembler(run_file, run, peers, replicas_of(network), say, store)
                    job = _Job(options, run_file, run, assembler, judge, device, network.ledger)
                    if options.watch:
                        return await job.watch(kept, say, on_model)
                    return await job.once(on_model)
    finally:
        if not was_there:
            with suppress(OSError):  # not empty: something was kept
                options.out.rmdir()


def _folder_of_run(out: Path, run: bytes) -> Facts | None:
    """The manifest of this run's model in the folder, or None. Refuses a model of another run."""
    if not has_model(out):
        return None
    manifest = read_manifest(out)
    assembly = manifest.get("assembly")
    if not isinstance(assembly, dict) or assembly.get("run_id") != run.hex():
        raise UsageError(
            f"{out} holds a model that is not of this run", "choose another folder with -o"
        )
    return manifest


@dataclass
class _Job:
    options: AssembleOptions
    run_file: RunFile
    run_id: bytes
    assembler: Assembler
    judge: Judge | None
    device: torch.device
    ledger: Ledger

    async def once(self, on_model: Callable[[Facts], None]) -> Facts:
        pulled = await self._pull()
        model, held_out = await asyncio.to_thread(self._judged, pulled)
        facts = await self._write(pulled, model, held_out)
        on_model({**facts, "kept": True})
        return facts

    async def watch(self, kept: Facts | None, say: Say, on_model: Callable[[Facts], None]) -> Facts:
        """Assemble every round until the run is over; the folder always holds the best model."""
        best = self._best_of(kept)
        if best is not None:
            on_model({**best, "kept": None})
        last: list[int | None] = []
        while True:
            try:
                pulled = await self._pull()
            except BlockMissing as error:
                say(f"{error.message}; waiting for one")
            else:
                if pulled.versions != last:
                    last = pulled.versions
                    best = await self._consider(pulled, best, on_model)
            if best is not None and self._over():
                say("the run is over")
                return best
            await asyncio.sleep(self._until_next_s())

    async def _consider(
        self, pulled: Assembled, best: Facts | None, on_model: Callable[[Facts], None]
    ) -> Facts:
        model, held_out = await asyncio.to_thread(self._judged, pulled)
        beaten = best is None or held_out is None or held_out < best["held_out_ce_nats"]
        if not beaten:
            assert best is not None
            on_model(
                {
                    "kept": False,
                    "round": pulled.newest_round,
                    "held_out_ce_nats": held_out,
                    "best_round": best["round"],
                    "best_held_out_ce_nats": best["held_out_ce_nats"],
                }
            )
            return best
        facts = await self._write(pulled, model, held_out)
        on_model({**facts, "kept": True})
        return facts

    async def _pull(self) -> Assembled:
        return await self.assembler.pull(self.options.without, self.options.allow_missing)

    def _judged(self, pulled: Assembled) -> tuple[ComposedModel, float | None]:
        """The model, with its composition fitted if asked for, and its held-out CE."""
        blocks = [None if b is None else b.to(self.device) for b in pulled.model.blocks]
        model = replace(pulled.model, blocks=blocks)
        if self.judge is None:
            return model, None
        if self.options.fit:
            model = self.judge.fit(model)
        return model, self.judge.held_out_ce(model)

    async def _write(
        self, pulled: Assembled, model: ComposedModel, held_out: float | None
    ) -> Facts:
        """Evaluate on the test split and write the folder. Return the facts of the result."""
        data: Facts = {"spec": self.run_file.data.spec if self.judge is None else self.judge.spec}
        manifest: Facts = {
            "data": data,
            "evaluation": None,
            "assembly": {
                "run_id": self.run_id.hex(),
                "run_name": self.run_file.name,
                "assembled_s": round(time.time(), 3),
                "blocks": pulled.facts,
                "missing": pulled.missing,
                "fitted": self.options.fit,
                "held_out": None if held_out is None else self._held_out_facts(held_out),
                "traffic": traffic_facts(self.ledger),
            },
        }
        if self.judge is not None:
            report = await asyncio.to_thread(self.judge.report, model)
            corpus = self.judge.corpus
            data.update(source=corpus.source, name=corpus.name, sha256=corpus.sha256)
            manifest["evaluation"] = evaluation_facts(report, "test", corpus, model.composition)
        # Without an await, so that it cannot be cancelled half way.
        save_model(self.options.out, model, pulled.versions, manifest)
        return summary(self.options.out, manifest)

    def _held_out_facts(self, ce: float) -> Facts:
        assert self.judge is not None
        size = sum(windows[:, 1:].numel() for windows in self.judge.valid)
        return {"split": "valid", "size_bytes": size, "ce_nats": ce}

    def _best_of(self, kept: Facts | None) -> Facts | None:
        """The best model of an earlier watch, if it was judged on the same bytes."""
        if kept is None or self.judge is None:
            return None
        try:
            held_out = kept["assembly"]["held_out"]
            same_text = kept["data"]["sha256"] == self.judge.corpus.sha256
            if same_text and self._held_out_facts(float(held_out["ce_nats"])) == held_out:
                return summary(self.options.out, kept)
        except (KeyError, TypeError, ValueError):
            pass
        return None

    # The run's clock.

    def _now_round(self) -> int:
        rounds = self.run_file.rounds
        return round_at(time.time(), rounds.start_s, rounds.period_s)

    def _over(self) -> bool:
        """Whether the run is over. One round is added, in which its last consensus is signed."""
        return self._now_round() > self.run_file.rounds.count + 1

    def _until_next_s(self) -> float:
        """Seconds until the next exchange has opened and replicas have signed the round before."""
        rounds = self.run_file.rounds
        opens_s = exchange_opens_s(self._now_round() + 1, rounds.start_s, rounds.period_s)
        return max(0.5, opens_s + min(rounds.deadline_ceiling_s, rounds.period_s / 2) - time.time())


def summary(out: Path, manifest: Facts) -> Facts:
    """The facts to print of an assembled model, taken from its manifest."""
    assembly, held_out = manifest["assembly"], manifest["assembly"]["held_out"]
    return {
        "model": str(out),
        "run": assembly["run_id"],
        "name": assembly["run_name"],
        "round": max(int(block["round"]) for block in assembly["blocks"]),
        "blocks": assembly["blocks"],
        "missing": assembly["missing"],
        "held_out_ce_nats": None if held_out is None else float(held_out["ce_nats"]),
        "traffic": assembly["traffic"],
        **(manifest["evaluation"] or {}),
    }


def traffic_facts(ledger: Ledger) -> Facts:
    """Bytes by purpose, counted on the wire; the DHT's are an estimate, listed apart."""
    counted = {
        purpose.name.lower().replace("_", "-"): {
            "sent_bytes": count.bytes_out,
            "received_bytes": count.bytes_in,
        }
        for purpose, count in sorted(ledger.by_purpose().items())
    }
    total = ledger.total()
    estimated = {
        name: {"sent_bytes": count.bytes_out, "received_bytes": count.bytes_in}
        for name, count in ledger.estimates().items()
    }
    return {
        "sent_bytes": total.bytes_out,
        "received_bytes": total.bytes_in,
        "by_purpose": counted,
        "estimated": estimated,
    }
