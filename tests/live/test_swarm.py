"""Real swarms of real processes: they agree, and go on when some of them die, stall, come or lie.

Every host here is `blockswarm seed` or `blockswarm join` with its own p2pd and training process.
Each test is one swarm through several misfortunes: starting processes is what takes the time.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node.data.corpus import load_corpus
from swarm.runfile import RoundSchedule
from tests.support.live import (
    START_LIMIT_S,
    Event,
    LiveSwarm,
    Process,
    agree_after,
    children,
    consensus_by_round,
    differing,
    live_swarm,
    tiny_run_file,
)
from tests.support.processes import alive, comes_true

PERIOD_S = 3.0
LIMIT_S = 120.0


def run_file(blocks: int = 1, **changes: Any) -> Any:
    """Windows with some room: the machine may be busy."""
    base = tiny_run_file(blocks=blocks, period_s=PERIOD_S, **changes)
    rounds = RoundSchedule(0, PERIOD_S, changes.get("count", 500), 0.7, 1.2, 0.45, 0.3)
    return type(base)(base.name, base.run, base.data, rounds, base.exchange)


def last_round(process: Process) -> int:
    return max((e["round"] for e in process.events("round")), default=-1)


def until_event(process: Process, what: str, after: int = 0) -> None:
    process.until(lambda: [e for e in process.events("node") if e["what"] == what][after:])


def four(swarm: LiveSwarm) -> list[Process]:
    seed = swarm.seed(0)
    address = seed.address()
    return [seed, *(swarm.join(address, name, 0) for name in "abc")]


def test_four_agree_and_agree_again_after_a_crash_a_pause_and_a_newcomer(tmp_path: Path) -> None:
    with live_swarm(tmp_path, run_file()) as swarm:
        hosts = four(swarm)
        seed, crashed, paused, _ = hosts
        agree_after(hosts, -1, 3, LIMIT_S)

        crashed.crash()
        paused.signal(signal.SIGSTOP)
        late = swarm.join(seed.address(), "late", 0)
        until_event(late, "started")
        paused.signal(signal.SIGCONT)
        again = swarm.join(seed.address(), "a", 0)
        until_event(again, "resumed")
        hosts[1] = again
        now = last_round(seed)
        first = agree_after([*hosts, late], now, 2, LIMIT_S)[0]
        assert first <= now + 4  # the running round, and three

        # SIGTERM: all leave within 5 s, and nothing of them is left.
        leaving = [*hosts, late]
        family = [pid for host in leaving for pid in (host.pid, *children(host.pid))]
        began_s = time.monotonic()
        for host in leaving:
            host.signal(signal.SIGTERM)
        assert [host.wait(START_LIMIT_S) for host in leaving] == [0] * 5
        assert time.monotonic() - began_s < 5.0 * _slowness()
        assert comes_true(lambda: not any(map(alive, family)), 2.0)
        assert all(host.events("node")[-1]["what"] == "left" for host in leaving)


def _slowness() -> float:
    """How much longer things take here now: five hosts leave at once on a machine in use."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def test_a_host_alone_trains_on_whatever_dies_under_it(tmp_path: Path) -> None:
    with live_swarm(tmp_path, run_file()) as swarm:
        host = swarm.seed(0)
        decided = lambda n: host.until_round(n, LIMIT_S)  # noqa: E731
        decided(0)

        os.kill(host.members()["trainer"], signal.SIGKILL)
        until_event(host, "trainer_restarted")
        os.kill(host.members()["p2pd"], signal.SIGKILL)
        decided(last_round(host) + 3)

        # A pause: it stays a replica, and does no steps.
        host.signal(signal.SIGUSR1)
        until_event(host, "paused")
        host.until(lambda: host.events("round")[-1]["steps"] == 0, LIMIT_S)
        host.signal(signal.SIGUSR2)
        until_event(host, "unpaused")

        # A full disk: said once, and training goes on.
        for pid in (host.pid, host.members()["trainer"]):
            soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (1024, hard))
        until_event(host, "disk_full")
        number = decided(last_round(host) + 1)["round"]
        assert sum("without saving" in line for line in host.err) == 1
        for pid in (host.pid, host.members()["trainer"]):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
        assert comes_true(lambda: saved_round(tmp_path / "seed") > number, LIMIT_S)

        # kill -9: the chain goes on from the last round that was decided, or the one before.
        before = consensus_by_round(host)
        host.crash()
        head = max(before)
        host = swarm.seed(0)
        until_event(host, "resumed")
        after = host.until(lambda: host.events("round"), LIMIT_S)[0]
        assert after["outcome"] in ("decided", "empty", "undecided", "missed")
        host.until_round(head + 1, LIMIT_S)
        assert not [e for e in host.events("node") if e["what"] == "started"]
        assert next(e["consensus_round"] for e in host.events("round")) >= head - 1


def saved_round(folder: Path) -> int:
    """The round of the last complete state in a folder; -2 if there is none."""
    from node.host.state import StateFolder

    try:
        run = bytes.fromhex(json.loads((folder / "state.json").read_text())["run"])
        state = StateFolder(folder).load(run)
    except Exception:  # it is being replaced
        return -2
    return state.entries[-1].round if state else -2


def test_a_host_with_another_text_is_told_what_was_expected(tmp_path: Path) -> None:
    base = run_file()
    with live_swarm(tmp_path, replace(base, data=replace(base.data, sha256="0" * 64))) as swarm:
        seed = swarm.seed(0)
        assert seed.wait() != 0
        said = "".join(seed.err)
        assert "0" * 64 in said and "its sha256 is" in said and "--data PATH" in said
        assert "Traceback" not in said


@pytest.mark.long
def test_a_swarm_that_was_down_altogether_comes_back(tmp_path: Path) -> None:
    """After a power cut: each goes on alone, under its old address, until it finds the others."""
    with live_swarm(tmp_path, run_file()) as swarm:
        seed = swarm.seed(0)
        address = seed.address()
        other = swarm.join(address, "other", 0)
        agree_after([seed, other], -1, 2, LIMIT_S)
        other.until((tmp_path / "other" / "state.json").exists)
        seed.crash()
        other.crash()
        other = swarm.join(address, "other", 0)  # the address is dead, the folder knows the run
        until_event(other, "resumed")
        other.until_round(last_round(seed) + 2, LIMIT_S)
        assert any("going on alone" in line for line in other.err)
        seed = swarm.seed(0)
        assert seed.address() == address
        agree_after([seed, other], last_round(other), 2, LIMIT_S)


# What becomes of each lie: refused when it arrives, for this reason; left out by the robust rule;
# or outvoted (noise of an ordinary norm cannot be told from an unlucky honest update).
REFUSED = {
    "nan": "",
    "malformed": "",
    "replay": "",
    "copy": "another peer",
    "other-block": "block",
    "oversized": "limit",
}
LEFT_OUT = ("scale", "sign-flip")
LIES = (*REFUSED, *LEFT_OUT, "noise")


@pytest.mark.long  # every one of them, in one process, is in the tests of the replica
@pytest.mark.parametrize("lie", LIES)
def test_one_of_four_lies_and_the_honest_three_go_on(tmp_path: Path, lie: str) -> None:
    with live_swarm(tmp_path, run_file()) as swarm:
        seed = swarm.seed(0)
        address = seed.address()
        honest = [seed, *(swarm.join(address, name, 0) for name in "ab")]
        liar = swarm.liar(address, "liar", 0, lie)
        until_event(liar, "started")
        me = liar.events("node")[0]["peer"]

        def seen() -> list[Event]:
            """Rounds of the honest ones in which the lie was met."""
            rows = [e for host in honest for e in host.events("round")]
            if lie in REFUSED:
                return [e for e in rows if me in (r["peer"] for r in e["refused"])]
            if lie in LEFT_OUT:
                return [e for e in rows if me in e["left_out"]]
            return [e for e in rows if me in e["agreed"]]

        first = seed.until(seen, LIMIT_S)[0]
        agree_after(honest, first["round"], 3, LIMIT_S)
        assert all(host.running for host in honest)
        if lie in REFUSED:
            reasons = [r["reason"] for e in seen() for r in e["refused"] if r["peer"] == me]
            assert all(reason and REFUSED[lie] in reason for reason in reasons)
            # Twice, and it is left out for a time, for a reason that stands in the log.
            trust = seed.until(lambda: [e for h in honest for e in h.events("trust")], LIMIT_S)
            assert all(e["about"] == me and e["reason"] for e in trust)


@pytest.mark.long
def test_the_canary_finds_who_poisons_a_block_of_two(tmp_path: Path) -> None:
    """Two cannot outvote each other, so the rule leaves the poison in; the held-out text tells.

    The run pins its text: only then the canary judges.
    """
    file = run_file(steps_per_round=8)
    file = replace(file, data=replace(file.data, sha256=load_corpus("python").sha256))
    with live_swarm(tmp_path, file) as swarm:
        seed = swarm.seed(0)
        liar = swarm.liar(seed.address(), "liar", 0, "bias")
        until_event(liar, "started")
        me = liar.events("node")[0]["peer"]
        trust = seed.until(lambda: seed.events("trust"), 3 * LIMIT_S)
        assert trust[0]["about"] == me and "canary" in trust[0]["reason"]
        number = trust[0]["round"]
        after = seed.until(
            lambda: [e for e in seed.events("round") if e["round"] > number + 1 and e["included"]],
            LIMIT_S,
        )
        assert me not in after[0]["agreed"]


@pytest.mark.long
def test_hosts_with_texts_of_their_own_all_count(tmp_path: Path) -> None:
    """Before, each of two found that the other made its own text worse, and left it out."""
    text = tmp_path / "verses.txt"
    lines = [f"{n} green bottles on the wall, {n * 7 % 100} cats below\n" for n in range(4000)]
    text.write_text("".join(lines))
    with live_swarm(tmp_path, run_file(steps_per_round=8)) as swarm:
        seed = swarm.seed(0)
        address = seed.address()
        other = swarm.join(address, "other", 0, "--data", text)
        until_event(other, "started")
        seed.until_round(last_round(seed) + 40, 4 * LIMIT_S)
        assert not seed.events("trust") and not other.events("trust")
        counted = [e["included"] for e in other.events("round") if e["update_bytes"]]
        assert counted.count(True) > 0.8 * len(counted) > 20


@pytest.mark.long
def test_six_hosts_settle_on_four_blocks_and_take_over_one_that_is_lost(tmp_path: Path) -> None:
    with live_swarm(tmp_path, run_file(blocks=4)) as swarm:
        seed = swarm.seed(None)
        address = seed.address()
        until_event(seed, "started")
        hosts = [seed]
        for name in "abcde":  # one after another: each sees where the others are
            hosts.append(swarm.join(address, name))
            hosts[-1].until(lambda: hosts[-1].events("round"), LIMIT_S)

        def block_of(host: Process) -> int:
            return int(host.events("round")[-1]["block"])

        def places(alive: list[Process]) -> dict[int, list[Process]]:
            return {b: [h for h in alive if block_of(h) == b] for b in range(4)}

        seed.until(lambda: all(places(hosts).values()), LIMIT_S)
        settled = {h.pid: block_of(h) for h in hosts}
        # Longer than the rest after which one may move: nobody does.
        number = last_round(seed) + 12
        seed.until_round(number, LIMIT_S)
        assert {h.pid: block_of(h) for h in hosts} == settled
        moved = lambda h: [e for e in h.events("node") if e["what"] == "moved_block"]  # noqa: E731
        assert not any(moved(h) for h in hosts)

        lost, victims = min(
            ((b, hs) for b, hs in places(hosts).items() if seed not in hs),
            key=lambda pair: (len(pair[1]), pair[0]),
        )
        last = max(consensus_by_round(victims[0]))
        for victim in victims:
            victim.kill()
        alive = [h for h in hosts if h not in victims]
        seed.until(lambda: places(alive)[lost], 2 * LIMIT_S)
        mover = places(alive)[lost][0]
        assert moved(mover)[-1]["facts"]["to"] == str(lost)
        here = lambda: [e for e in mover.events("round") if e["block"] == lost]  # noqa: E731
        decided = mover.until(lambda: [e for e in here() if e["outcome"] == "decided"], LIMIT_S)
        assert decided[0]["included"]
        # It goes on from a copy that some host had, not from the beginning.
        assert any(e["consensus_round"] >= last - 5 for e in here()[:2])
        assert all(places(alive).values())


@pytest.mark.long
def test_at_the_end_of_the_run_hosts_stop_training_and_serve_what_they_agreed_on(
    tmp_path: Path,
) -> None:
    count = 24  # on a busy machine the first ones are over before anybody is there
    with live_swarm(tmp_path, run_file(count=count)) as swarm:
        seed = swarm.seed(0)
        other = swarm.join(seed.address(), "other", 0)
        for host in (seed, other):
            until_event(host, "run_ended")
            assert sum("the run has ended" in line for line in host.err) == 1
        assert max(e["round"] for e in seed.events("round")) <= count
        # Whoever comes too late still gets what they agreed on.
        late = swarm.join(seed.address(), "late", 0)
        until_event(late, "run_ended")
        [began] = (e for e in late.events("node") if e["what"] == "started")
        last = max(consensus_by_round(seed))
        assert began["facts"] == {"round": str(last), "consensus": consensus_by_round(seed)[last]}
        assert not late.events("round")


@pytest.mark.long
def test_twenty_rounds_bit_by_bit_on_two_blocks(tmp_path: Path) -> None:
    with live_swarm(tmp_path, run_file(blocks=2)) as swarm:
        seed = swarm.seed(0)
        address = seed.address()
        pairs = [
            [seed, swarm.join(address, "a", 0)],
            [swarm.join(address, "b", 1), swarm.join(address, "c", 1)],
        ]
        for pair in pairs:
            rounds = agree_after(pair, -1, 21, 60 * PERIOD_S)
            assert differing(pair, rounds[0]) == []


def trained_lately(process: Process) -> bool:
    """Whether its training process was there for the last rounds."""
    rounds = process.events("round")[-3:]
    return len(rounds) == 3 and all(e["steps"] for e in rounds)


@pytest.mark.long
def test_thirty_kills_at_random_moments(tmp_path: Path) -> None:
    """Node, trainer or p2pd, whenever: the host resumes and the two agree again."""
    rng = random.Random(4)
    with live_swarm(tmp_path, run_file()) as swarm:
        seed = swarm.seed(0)
        address = seed.address()
        victim = swarm.join(address, "victim", 0)
        agree_after([seed, victim], -1, 1, LIMIT_S)
        for _ in range(30):
            time.sleep(rng.uniform(0.0, PERIOD_S))  # any moment will do: that is what is tested
            kind = rng.choice(["node", "trainer", "p2pd"])
            if kind == "node":
                head = max(consensus_by_round(victim), default=-1)
                trained = trained_lately(victim)
                victim.crash()
                # What is on disk is whole. Of training at most the running round is lost, and
                # on a busy machine the one whose state was being written.
                assert saved_round(tmp_path / "victim") >= (head - 2 if trained else 0)
                victim = swarm.join(address, "victim", 0)
                until_event(victim, "resumed")
            else:
                pid = victim.members().get(kind)
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
        agree_after([seed, victim], last_round(seed), 3, LIMIT_S)
