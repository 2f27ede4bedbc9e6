"""A swarm on a bed: seed, joins, partitions by the clock, then every ledger and counter.

Only `blockswarm seed` and `blockswarm join` are started, as strangers would. Decides what is
collected. What the figures should be is for whoever described the topology.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.wan.bed import Bed
from benchmarks.wan.namespaces import BedFailed
from benchmarks.wan.processes import START_S, Command
from benchmarks.wan.topology import Host, Swarm
from protocol.errors import BlockswarmError
from protocol.ledger import Count, Ledger
from swarm.runfile import parse

PORT = 4001
EVENTS = "events.jsonl"
Facts = dict[str, Any]
Say = Callable[[str], None]


class SwarmOnBed:
    """The swarm of a bed's topology. `start` it, `watch` it, then `collect`."""

    def __init__(self, bed: Bed, folder: Path, base: Path, say: Say) -> None:
        self.bed, self.folder, self.base, self.say = bed, folder, base, say
        self.commands: dict[tuple[str, int], Command] = {}
        self.seed_address = ""
        self._blocks = 1
        self._before: dict[str, dict[str, int]] = {}

    def start(self) -> None:
        """The seed first; when it has told its address, all others at once."""
        topology = self.bed.topology
        seeds = [host for host in topology.hosts if host.role == "seed"]
        if not seeds:
            raise BedFailed("no host is the seed", 'give one of them role = "seed"')
        self._before = self.bed.counters()
        run_file = self._run_file(topology.swarm)
        self._blocks = parse(run_file.read_bytes()).run.model.blocks
        seed = seeds[0]
        first = self._command(seed, 0, ["seed", run_file])
        self.seed_address = first.address(seed.address)
        self.say(f"{seed.name}: {self.seed_address}")
        for host in topology.hosts:
            for worker in range(host.workers if host.role != "none" else 0):
                if (host.name, worker) not in self.commands:
                    self._command(host, worker, ["join", self.seed_address])

    def until_all_train(self, seconds: float = START_S) -> None:
        """Wait until every worker has begun: only then does the topology's clock start."""
        end_s = time.monotonic() + seconds
        waiting = dict(self.commands)
        while waiting:
            for key, command in list(waiting.items()):
                if b'"what":"started"' in _bytes_of(command.folder / EVENTS):
                    del waiting[key]
                elif command.process.poll() is not None or time.monotonic() > end_s:
                    raise BedFailed(
                        f"worker {key[1]} of {key[0]} does not train", command.last_words()
                    )
            # Polls the event logs, until `end_s`.
            time.sleep(0.2)

    def _command(self, host: Host, worker: int, what: list[object]) -> Command:
        swarm, folder = self.bed.topology.swarm, self.folder / f"{host.name}-{worker}"
        options: list[object] = ["--folder", folder, "--port", PORT + worker, "--json"]
        options += ["--threads", swarm.threads]
        if swarm.data:
            options += ["--data", (self.base / swarm.data).resolve()]
        named = {"{seed}": self.seed_address, "{block}": str(len(self.commands) % self._blocks)}
        options += [_filled(option, named) for option in host.options]
        command = Command(self.bed, host.name, folder, [*what, *options])
        self.commands[host.name, worker] = command
        return command

    def _run_file(self, swarm: Swarm) -> Path:
        if swarm.run_file:
            return (self.base / swarm.run_file).resolve()
        from swarm.run_template import emit, preset

        path = self.folder / "run.toml"
        path.write_bytes(emit(preset(swarm.preset, self.bed.topology.name)))
        return path

    def watch(self) -> None:
        """Let it run for its time; partitions open and heal. Fails if a process ends early."""
        began_s = time.monotonic()
        cuts = self.bed.topology.partitions
        moments = sorted({s for cut in cuts for s in (cut.from_s, cut.to_s)})
        end_s = self.bed.topology.swarm.seconds
        while (now_s := time.monotonic() - began_s) < end_s:
            while moments and moments[0] <= now_s:
                moment = moments.pop(0)
                self.bed.heal()
                for cut in cuts:
                    if cut.from_s <= moment < cut.to_s:
                        self.bed.cut(cut.apart)
                        self.say(f"{now_s:.0f} s: {', '.join(cut.apart)} cut off")
                if not any(cut.from_s <= moment < cut.to_s for cut in cuts):
                    self.say(f"{now_s:.0f} s: healed")
            for (name, worker), command in self.commands.items():
                if command.process.poll() is not None:
                    raise BedFailed(f"worker {worker} of {name} ended", command.last_words())
            # The clock of the run; partitions come at their times.
            time.sleep(min(0.5, end_s - now_s))
        self.bed.heal()

    def collect(self) -> tuple[dict[str, float], list[Facts]]:
        """End the swarm; figures and a row per worker and host."""
        self.bed.stop_processes()
        emulated, after = self.bed.emulated(), self.bed.counters()
        workers = [self._worker(name, worker) for name, worker in self.commands]
        peers = {name: {w["peer"] for w in workers if w["host"] == name} for name in after}
        hosts: list[Facts] = []
        for name, counts in after.items():
            moved = {k: v - self._before.get(name, {}).get(k, 0) for k, v in counts.items()}
            counted = self._ledgers(name, peers[name])
            kernel = moved["tx_bytes"] + moved["rx_bytes"]
            facts: Facts = {
                "kind": "host",
                "name": f"host {name}",
                "host": name,
                "ledger_bytes": counted[0].bytes_total,
                "ledger_frames": counted[0].frames_in + counted[0].frames_out,
                "kernel_bytes": kernel,
                "dht_estimate_bytes": counted[1].bytes_total,
                "packets_lost": emulated[name]["lost"],
            }
            hosts.append({**facts, **moved})
        return figures(hosts, workers), [*workers, *hosts]

    def _worker(self, name: str, worker: int) -> Facts:
        rounds: list[Facts] = []
        peer = ""
        for line in _bytes_of(self.folder / f"{name}-{worker}" / EVENTS).splitlines():
            event = json.loads(line)
            peer = event.get("peer", peer)
            if event.get("kind") == "round":
                rounds.append(event)
        ce = [r["consensus_ce_nats"] for r in rounds if r.get("consensus_ce_nats") is not None]
        return {
            "kind": "worker",
            "name": f"{name} {worker}",
            "host": name,
            "peer": peer,
            "block": rounds[-1]["block"] if rounds else -1,
            "rounds": len(rounds),
            "included": sum(r.get("included") is True for r in rounds),
            "ce_first": ce[0] if ce else -1.0,
            "ce_last": ce[-1] if ce else -1.0,
        }

    def _ledgers(self, name: str, neighbours: set[str]) -> tuple[Count, Count]:
        """Counted and estimated bytes of a host's workers, without what they told each other."""
        counted, estimated = Count(), Count()
        for host, worker in self.commands:
            if host == name:
                ledger = Ledger.load(self.folder / f"{name}-{worker}" / "ledger.json")
                counts = (c for peer, c in ledger.by_peer().items() if peer not in neighbours)
                counted = sum(counts, counted)
                estimated = sum(ledger.estimates().values(), estimated)
        return counted, estimated


def run_start_s(folder: Path) -> int:
    """When the run's clock began: the seed has written it into its copy of the run file."""
    for path in (folder / "run.toml", *sorted(folder.glob("*/run.toml"))):
        if start := parse(path.read_bytes()).rounds.start_s:
            return start
    raise BedFailed("no host has a run file with a start", "the seed has not begun")


def figures(hosts: list[Facts], workers: list[Facts]) -> dict[str, float]:
    """Sums over the swarm; the ledgers' bytes as a share of the kernels'."""
    kernel = sum(host["kernel_bytes"] for host in hosts)
    ledger = sum(host["ledger_bytes"] for host in hosts)
    segments = sum(host.get("tcp_segments", 0) for host in hosts)
    resent = sum(host.get("tcp_resent", 0) for host in hosts)
    return {
        "hosts": len(hosts),
        "workers": len(workers),
        "rounds": sum(w["rounds"] for w in workers),
        "rounds_included": sum(w["included"] for w in workers),
        "gb_kernel": kernel / 2e9,  # every byte is sent once and received once
        "gb_ledger": ledger / 2e9,
        "ledger_share_percent": 100 * ledger / kernel if kernel else 0.0,
        "tcp_resent_percent": 100 * resent / segments if segments else 0.0,
    }


def run(text: str, folder: Path, base: Path, say: Say) -> tuple[dict[str, float], list[Facts]]:
    """Bring the topology up, let its swarm run, collect, tear down. Also if something fails."""
    with Bed(text) as bed:
        names = ", ".join(host.name for host in bed.topology.hosts)
        say(f"{bed.topology.name}: {names} are up")
        swarm = SwarmOnBed(bed, folder, base, say)
        swarm.start()
        swarm.until_all_train()
        say(f"all train; {bed.topology.swarm.seconds:g} s begin")
        swarm.watch()
        return swarm.collect()


def _filled(option: str, named: dict[str, str]) -> str:
    for name, value in named.items():
        option = option.replace(name, value)
    return option


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def explain(error: BlockswarmError) -> None:
    print(f"error: {error.message}\n  try: {error.hint}", file=sys.stderr)
