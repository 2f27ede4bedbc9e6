"""`assemble`, `status` and `generate` on a swarm of real processes that trains: what a person gets,
and what a kill costs.

One swarm for all tests: a seed on block 0, two hosts on block 1.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from node.cli import cli
from node.commands.assemble import print_assembly
from tests.support.live import LiveSwarm, Process, live_swarm

BYTES = ["--evaluate-bytes", "2048", "--threads", "1"]


@dataclass(frozen=True)
class Live:
    swarm: LiveSwarm
    address: str
    hosts: tuple[Process, ...]


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "node.cli", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)


def offline(*arguments: object) -> Any:
    """A command that needs no network, in this process."""
    done = CliRunner().invoke(cli, [*map(str, arguments), "--json", "--threads", "1"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_swarm(tmp_path_factory.mktemp("swarm")) as swarm:
        seed = swarm.seed(block=0)
        address = seed.address()
        others = [swarm.join(address, name, block=1) for name in ("one", "two")]
        for host in (seed, *others):
            host.until_round(4)  # a log that is worth not pulling twice
        yield Live(swarm, address, (seed, *others))
    assert not any(process.running for process in swarm.processes)


@pytest.fixture(scope="module")
def model(live: Live, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("assembled") / "model"
    done = command("assemble", live.address, "-o", folder, "--json", *BYTES)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


def test_status_shows_every_block(live: Live) -> None:
    done = command("status", live.address, "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["name"] == "live test" and facts["peers"] == 3
    assert [len(block["replicas"]) for block in facts["blocks"]] == [1, 2]
    assert "block 0 has 1 live replica, wanted are 2" in facts["warnings"]
    assert all(block["consensus_round"] >= 0 for block in facts["blocks"])
    last = facts["blocks"][1]["last"]
    assert last is not None and last["round"] >= facts["blocks"][1]["consensus_round"]


def test_assembled_and_checked(live: Live, model: tuple[Path, Any]) -> None:
    folder, facts = model
    assert facts["missing"] == [] and facts["size_bytes"] == 2048 and facts["split"] == "test"
    assert facts["ce_nats"] < 5.56  # ln 256 = 5.545, and something was learnt
    first, second = facts["blocks"]
    # Staggered: the last consensus before the other's. A slow host may have sat a round out.
    assert -1 <= first["round"] < second["round"]
    assert len(first["signers"]) == 1 and len(second["signers"]) >= 1
    assert facts["traffic"]["by_purpose"]["assembly"]["received_bytes"] > 0
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["assembly"]["blocks"] == facts["blocks"]
    assert manifest["assembly"]["run_id"] == facts["run"]
    assert manifest["evaluation"]["ce_nats"] == facts["ce_nats"]


def test_the_folder_works_offline(model: tuple[Path, Any]) -> None:
    folder, facts = model
    found = offline("eval", folder, "--limit-bytes", 2048)
    assert found["ce_nats"] == pytest.approx(facts["ce_nats"], abs=1e-6)
    assert offline("generate", folder, "--prompt", "def ", "--length", 8)["length_bytes"] == 8


def test_the_same_command_again_pulls_only_what_is_new(
    live: Live, model: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, _ = model
    done = command("assemble", live.address, "-o", folder, "--fit", *BYTES)
    assert done.returncode == 0, done.stderr
    assert "model folder" in done.stdout and "composed" in done.stdout
    manifest = json.loads((folder / "manifest.json").read_text())
    assembly = manifest["assembly"]
    assert assembly["fitted"]
    # Somebody who begins now needs every round that we have pulled, and those before.
    fresh = command("assemble", live.address, "-o", tmp_path / "fresh", "--json", *BYTES)
    assert fresh.returncode == 0, fresh.stderr
    traffic = (assembly["traffic"], json.loads(fresh.stdout)["traffic"])
    again, anew = (t["by_purpose"]["assembly"]["received_bytes"] for t in traffic)
    assert again < anew


def test_watching_keeps_the_best_and_ends_cleanly(live: Live, tmp_path: Path) -> None:
    folder = tmp_path / "best"
    watch = live.swarm.start("assemble", live.address, "-o", folder, "--watch", "--json", *BYTES)
    watch.until(lambda: len(watch.events()) >= 2)
    assert watch.leave() == 0, watch.err
    lines = watch.events()
    assert lines[0]["kept"] and lines[1]["round"] > lines[0]["round"]
    best = min(line["held_out_ce_nats"] for line in lines)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["assembly"]["held_out"]["ce_nats"] == best
    assert offline("eval", folder, "--limit-bytes", 1024)["size_bytes"] == 1024


def test_what_they_train_they_serve_and_they_train_on(live: Live) -> None:
    prompt = ("--prompt", "def ", "--length", "12", "--json")
    seed, other, _ = live.hosts
    for address, how in ((live.address, ("--mode", "exact")), (other.address(), ("--drafts", "4"))):
        done = command("generate", address, *prompt, *how)
        assert done.returncode == 0, done.stderr
        facts = json.loads(done.stdout)
        assert facts["length_bytes"] == 12 and facts["missing_blocks"] == []
    seed.until_round(seed.events("round")[-1]["consensus_round"] + 1)
    assert seed.until(lambda: served_bytes(seed)) > 0
    assert seed.until(lambda: sum(map(served_bytes, live.hosts[1:]))) > 0  # by either of them


def served_bytes(host: Process) -> int:
    traffic = [t for event in host.events("round") for t in event["traffic"]]
    return sum(t["sent_bytes"] for t in traffic if t["purpose"] == "serving")


def test_nobody_at_the_address(live: Live) -> None:
    peer = live.address.rpartition("/")[2]
    done = command("status", f"/ip4/127.0.0.1/tcp/1/p2p/{peer}")
    assert done.returncode == 2 and "no peer answers" in done.stderr
    assert "Traceback" not in done.stderr


def test_hosts_that_die_are_named(live: Live, tmp_path: Path) -> None:
    """The last test on this swarm: both replicas of block 1 are killed."""
    for host in live.hosts[1:]:
        host.kill()
    done = command("assemble", live.address, "-o", tmp_path / "m", *BYTES)
    assert done.returncode == 2 and not (tmp_path / "m" / "manifest.json").exists()
    assert "block 1 has no replica" in done.stderr and "--without 1" in done.stderr
    assert "Traceback" not in done.stderr
    done = command("assemble", live.address, "-o", tmp_path / "m", "--without", 1, "--json", *BYTES)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["missing"] == [1] and facts["block_ce_nats"][1] is None
    watch = live.swarm.start("status", live.address, "--watch", "--json")
    silent = "block 1 has no live replica"
    watch.until(lambda: any(silent in e["warnings"] for e in watch.events()))
    watch.signal(signal.SIGINT)
    assert watch.wait() == 0


def test_a_summary_of_a_model_without_figures(capsys: pytest.CaptureFixture[str]) -> None:
    block = {"block": 0, "round": 3, "consensus": "ab" * 32, "signers": ["x"]}
    print_assembly(
        {
            "name": "n",
            "run": "cd" * 32,
            "round": 3,
            "blocks": [{**block, "contributors_total": 2}],
            "missing": [1],
            "traffic": {"received_bytes": 10},
            "model": "a folder",
        }
    )
    out = capsys.readouterr().out
    assert "block 1    left out" in out and "generate 'a folder'" in out and "CE" not in out
