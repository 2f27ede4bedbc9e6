"""Seeds of a real swarm: they need not train, any of them is enough, and none is needed long."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.live import Process, agree_after, live_swarm, tiny_run_file

LIMIT_S = 240.0


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "node.cli", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def last_round(process: Process) -> int:
    return max((e["consensus_round"] for e in process.events("round")), default=-1)


def peer_of(address: str) -> str:
    return address.rpartition("/p2p/")[2]


@pytest.mark.long  # a minute and a half; the storm and test_live_swarm kill a seed as well
def test_a_swarm_outlives_its_seeds(tmp_path: Path) -> None:
    with live_swarm(tmp_path, tiny_run_file(blocks=1)) as swarm:

        def seed(name: str, *what: object) -> Process:
            own = ["--folder", tmp_path / name, "--listen", "127.0.0.1", "--json"]
            return swarm.start("seed", *what, *own, "--no-train")

        # Two seeds of one run, neither of which trains.
        first = seed("first", tmp_path / "run.toml")
        one = first.address()
        second = seed("second", one)
        two = second.address()
        run_file = (tmp_path / "first" / "run.toml").read_bytes()
        assert (tmp_path / "second" / "run.toml").read_bytes() == run_file
        for process in (first, second):
            began = process.until(lambda process=process: process.events("node"))
            assert began[0]["facts"] == {"role": "seed"}
            assert set(process.members()) == {"p2pd"}

        # Whoever joins through either is in the same swarm.
        a = swarm.join(one, "a", 0)
        b = swarm.join(two, "b", 0)
        agree_after([a, b], -1, 1, LIMIT_S)

        # A seed that is started again is the same peer, at the same place, of the same run.
        daemon = first.members()["p2pd"]
        first.kill()
        a.until(lambda: not Path(f"/proc/{daemon}").exists(), LIMIT_S)  # it lets go of the port
        again = seed("first", tmp_path / "run.toml")
        assert again.address() == one
        assert (tmp_path / "first" / "run.toml").read_bytes() == run_file

        # All seeds die, and the swarm goes on.
        again.kill()
        second.kill()
        agree_after([a, b], max(last_round(a), last_round(b)), 1, LIMIT_S)

        # Every member says how to join through it ...
        told = command("seed", tmp_path / "a")
        assert told.returncode == 0, told.stderr
        assert told.stdout.split() == ["blockswarm", "join", a.address()]

        # ... and one that had left comes back as a seed, which a newcomer joins through.
        was = peer_of(b.address())
        assert b.leave() == 0
        newest = seed("b")
        assert peer_of(newest.address()) == was
        c = swarm.join(newest.address(), "c", 0)
        agree_after([a, c], last_round(a), 1, LIMIT_S)

        # What this machine knows is enough to see how the run stands.
        shown = command("status", "--folder", tmp_path / "a", "--json", "--k", 5)
        assert shown.returncode == 0, shown.stderr
        facts: dict[str, Any] = json.loads(shown.stdout)
        block = facts["blocks"][0]
        assert block["live"] >= 2 and any("wanted are 5" in w for w in facts["warnings"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "say which run"),
        (("nowhere.toml",), "cannot read"),
        (("--folder", "."), "not the folder of a host"),
        (("a.toml", "b.toml"), "RUN is one run file"),
        (("run.toml", "--announce", "203.0.113.7"), "needs a port"),
    ],
)
def test_what_is_no_run(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "node.cli", "seed", *arguments]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2 and words in done.stderr and "try: " in done.stderr
