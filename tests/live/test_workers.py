"""`join --workers 2` on a real swarm: two blocks that follow each other, and one Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.support.live import LEAVE_S, Process, children, live_swarm, tiny_run_file

LIMIT_S = 240.0


def workers_of(process: Process) -> dict[str, int]:
    """Folder -> pid of the workers that run now."""
    found = {}
    for pid in children(process.pid):
        with suppress(OSError):
            words = (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0")
            if b"--as-worker" in words:
                found[Path(words[words.index(b"--folder") + 1].decode()).name] = pid
    return found


def rounds_of(process: Process, block: int) -> int:
    return sum(event["block"] == block for event in process.events("round"))


def copies_are_fresh(process: Process, block: int, since: int) -> bool:
    """Whether a block's worker has, in its last rounds, followed the other block's closely."""
    rounds = [event for event in process.events("round") if event["block"] == block][since:]
    ages = [event["copy_ages_rounds"] for event in rounds][-3:]
    return len(ages) == 3 and all(age <= 1 for some in ages for age in some)


def test_two_workers_of_one_host_and_a_dead_block_or_seed_stops_nobody(tmp_path: Path) -> None:
    with live_swarm(tmp_path, tiny_run_file(blocks=2)) as swarm:
        own = ["--listen", "127.0.0.1", "--json"]
        seed = swarm.start(
            "seed", tmp_path / "run.toml", "--folder", tmp_path / "seed", "--no-train", *own
        )
        address, home = seed.address(), tmp_path / "host"
        host = swarm.start("join", address, "--workers", 2, "--folder", home, *own)
        host.until(lambda: rounds_of(host, 0) and rounds_of(host, 1), LIMIT_S)

        # Different blocks, identities, ports and folders.
        assert len({event["peer"] for event in host.events("round")}) == 2
        ports = {(home / f"worker-{n}" / "port").read_text() for n in (1, 2)}
        keys = {(home / f"worker-{n}" / "identity").read_bytes() for n in (1, 2)}
        assert len(ports) == len(keys) == 2

        # Each follows the other's block.
        host.until(lambda: all(copies_are_fresh(host, block, 0) for block in (0, 1)), LIMIT_S)
        traffic = [t["purpose"] for event in host.events("round") for t in event["traffic"]]
        assert "relay" in traffic

        # The seed dies, and one of the workers: the other goes on, and it comes back as who it was.
        seed.crash()
        running = workers_of(host)
        os.kill(running["worker-1"], signal.SIGKILL)
        host.until(lambda: workers_of(host).get("worker-1") not in (None, running["worker-1"]))
        block = next(b for b in (0, 1) if f'"block": {b}' in _state(home / "worker-2"))
        before, others = rounds_of(host, 1 - block), rounds_of(host, block)
        host.until(lambda: rounds_of(host, block) > others + 1, LIMIT_S)
        last = [event for event in host.events("round") if event["block"] == block][-1]
        assert last["outcome"] == "decided" and last["included"]
        host.until(lambda: rounds_of(host, 1 - block) > before, LIMIT_S)
        host.until(lambda: copies_are_fresh(host, 1 - block, before), LIMIT_S)
        assert workers_of(host)["worker-2"] == running["worker-2"]
        assert len({event["peer"] for event in host.events("round")}) == 2

        # One Ctrl-C, and all of them are gone.
        pids = list(workers_of(host).values())
        began_s = time.monotonic()
        assert host.leave() == 0, "".join(host.err[-20:])
        assert time.monotonic() - began_s < LEAVE_S
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)

        # A worker whose supervisor is gone leaves by itself.
        line = ["join", address, "--as-worker", "1", "--folder", str(home / "worker-1"), *own]
        orphan = subprocess.Popen(
            [sys.executable, "-m", "node.cli", *line],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        _, said = orphan.communicate(timeout=LIMIT_S)  # closes its standard input
        assert orphan.returncode == 0 and "left the run" in said, said


def _state(home: Path) -> str:
    return (home / "state.json").read_text()
