"""The run's clock on a host: whom it asks, what it makes of a step of the machine's clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from node.machine.steady_time import SteadyTime
from node.network.discovery import PeerBook
from node.network.invitation import CLOCK_LIMIT_S
from node.network.peer_clock import SILENT, PeerClock
from protocol import messages
from protocol.frames import Stalled
from protocol.identity import Identity
from swarm.rounds.clock import MAX_OFFSET_S
from tests.support.strangers import many, standings_with

RUN = bytes(32)


class Town:
    """Peers with clocks, and all of a network that a clock asks. The true time stands still."""

    def __init__(self, contributors: list[Identity]) -> None:
        self.true_s, self.wall_s, self.boot_s = 1_000_000.0, 1_000_000.0, 77.0
        self.clock = SteadyTime(lambda: self.wall_s, lambda: self.boot_s)
        self.discovery = SimpleNamespace(book=PeerBook(standings=standings_with(contributors)))
        self.offsets: dict[bytes, float] = {}
        self.asked: list[bytes] = []
        self.failure: Callable[[], Exception] = lambda: Stalled("silent")
        for peer in contributors:
            self.add(peer)

    def add(self, peer: Identity, offset_s: float = 0.0) -> None:
        self.discovery.book.remember(peer.peer_id, ["/ip4/10.0.0.1/tcp/1"])
        self.offsets[peer.peer_id] = offset_s

    async def request(self, peer: bytes, *_: object, deadline_s: float) -> Any:
        self.asked.append(peer)
        if peer not in self.offsets:
            raise self.failure()
        reply = messages.HelloReply(
            run=RUN, role=0, round=0, now_s=self.true_s + self.offsets[peer]
        )
        return SimpleNamespace(message=reply)

    def pass_s(self, seconds: float) -> None:
        self.true_s += seconds
        self.wall_s += seconds
        self.boot_s += seconds


def clock_in(town: Any) -> PeerClock:
    return PeerClock(town, RUN)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_strangers_do_not_outnumber_contributors_and_ourselves() -> None:
    honest, strangers = many(3), many(30)
    town = Town(honest)
    for peer in strangers:
        town.discovery.book.standings.spoke(peer.peer_id)
        town.add(peer, MAX_OFFSET_S - 1)
    clock = clock_in(town)
    run(clock.sample())
    assert {p.peer_id for p in honest} <= set(town.asked) and len(town.asked) == 6
    assert clock.now_s() == town.true_s
    named = many(200)  # and hearsay is not asked at all
    for peer in named:
        town.add(peer, -50.0)
    town.asked.clear()
    run(clock.sample())
    assert not {p.peer_id for p in named} & set(town.asked)


def test_no_majority_moves_a_host_further_than_joining_allows() -> None:
    assert MAX_OFFSET_S == CLOCK_LIMIT_S
    town = Town([])
    for peer in many(8):
        town.add(peer, MAX_OFFSET_S + 1)
    clock = clock_in(town)
    run(clock.sample())
    assert clock.now_s() == town.true_s


def test_who_was_asked_before_better_known_ones_were_there_has_no_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    town = Town([])
    for peer in many(5):
        town.add(peer, 100.0)
    clock = clock_in(town)
    run(clock.sample())
    assert clock.now_s() == town.true_s + 100
    workers = many(2)
    later = Town(workers)
    later.pass_s(town.true_s - later.true_s)
    monkeypatch.setattr(clock, "network", later)
    run(clock.sample())
    assert clock.now_s() == later.true_s and len(clock.clock.samples) == 2


@pytest.mark.parametrize("step_s", [-100.0, 100.0, 5000.0])
def test_a_wrong_step_of_the_wall_clock_changes_nothing(step_s: float) -> None:
    town = Town(many(3))
    clock = clock_in(town)
    run(clock.sample())
    town.wall_s += step_s
    assert clock.now_s() == town.true_s  # at once, before anybody was asked
    for _ in range(3):
        town.pass_s(60)
        run(clock.sample())
        assert clock.now_s() == town.true_s


def test_a_right_step_is_followed_and_the_runs_time_goes_on() -> None:
    town = Town(many(3))
    town.wall_s += 90.0
    town.clock.follow()  # it began with a wrong clock
    clock = clock_in(town)
    assert clock.now_s() == town.true_s + 90
    run(clock.sample())
    assert clock.now_s() == town.true_s
    town.wall_s -= 90.0  # NTP, rightly
    assert clock.now_s() == town.true_s
    run(clock.sample())
    assert clock.now_s() == town.true_s and town.clock() == town.true_s
    town.wall_s = town.true_s - 5000.0
    town.clock.follow()  # as a machine without a battery begins: further off than is corrected
    clock = clock_in(town)
    run(clock.sample())
    assert clock.now_s() == town.true_s - 5000
    town.wall_s = town.true_s
    run(clock.sample())
    assert clock.now_s() == town.true_s


def test_alone_the_wall_clock_is_what_there_is() -> None:
    town = Town([])
    clock = clock_in(town)
    town.wall_s += 30.0
    run(clock.sample())
    assert clock.now_s() == town.wall_s


@pytest.mark.parametrize("step_s", [-100.0, 100.0, 3600.0])
def test_a_step_is_not_followed_because_the_network_is_away_for_a_moment(step_s: float) -> None:
    town = Town(many(3))
    clock = clock_in(town)
    run(clock.sample())
    there = dict(town.offsets)
    town.offsets.clear()
    town.wall_s += step_s
    for _ in range(SILENT - 1):
        run(clock.sample())
        assert clock.now_s() == town.true_s
    town.offsets.update(there)
    run(clock.sample())
    assert clock.now_s() == town.true_s
    town.offsets.clear()  # their word was heard: silence counts anew
    for _ in range(SILENT - 1):
        run(clock.sample())
        assert clock.now_s() == town.true_s


@pytest.mark.parametrize("known", [False, True])
def test_a_wrong_step_that_was_followed_alone_is_undone_when_peers_are_back(known: bool) -> None:
    liar, *honest = many(4)
    town = Town([liar, *honest] if known else [])
    town.offsets.clear()
    clock = clock_in(town)
    town.wall_s += 3600.0
    for _ in range(SILENT):
        run(clock.sample())
    assert clock.now_s() == town.clock() == town.wall_s  # whoever is new here finds it right
    for peer in (liar, honest[0]):
        town.add(peer, 3600.0 * (peer is liar))
        run(clock.sample())
        assert clock.now_s() == town.wall_s  # one by itself, and one against one, settle nothing
    for peer in honest:
        town.add(peer)
    for _ in range(2):
        run(clock.sample())
        assert clock.now_s() == town.clock() == town.true_s
    town.wall_s = town.true_s  # and when it is set right nothing happens any more
    run(clock.sample())
    assert clock.now_s() == town.clock() == town.true_s


def test_a_right_step_that_was_followed_alone_is_borne_out_once_and_for_all() -> None:
    town = Town(many(3))
    there = dict(town.offsets)
    town.wall_s += 500.0
    town.clock.follow()  # it began with a wrong clock
    clock = clock_in(town)
    town.offsets.clear()
    town.wall_s -= 500.0
    for _ in range(SILENT):
        run(clock.sample())
    assert clock.now_s() == town.true_s
    town.offsets.update(there)
    run(clock.sample())
    assert clock.now_s() == town.true_s
    town.offsets = {peer: 500.0 for peer in there}  # too late for those who would have it back
    run(clock.sample())
    assert clock.now_s() == town.true_s


def test_peers_that_do_not_answer_after_a_step_are_asked_again_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("LOOK_S", "AGAIN_S"):
        monkeypatch.setattr(f"node.network.peer_clock.{name}", 0.001)
    town = Town(many(3))
    town.offsets.clear()
    clock = clock_in(town)

    async def main() -> None:
        task = asyncio.create_task(clock.run(600.0))
        await asyncio.sleep(0.01)
        town.wall_s += 3600.0
        async with asyncio.timeout(10.0):
            while clock.now_s() != town.wall_s:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        asked = len(town.asked)
        assert asked == SILENT * 3
        await asyncio.sleep(0.02)
        assert len(town.asked) == asked  # now it has no haste any more
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(main())


def test_a_step_is_noticed_long_before_the_next_time_to_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("node.network.peer_clock.LOOK_S", 0.001)
    town = Town(many(2))
    clock = clock_in(town)
    town.true_s += 3600.0  # a machine that slept, with all its clocks

    async def main() -> None:
        task = asyncio.create_task(clock.run(600.0))
        await asyncio.sleep(0.01)
        assert not town.asked
        town.wall_s += 3600.0  # and is told so
        async with asyncio.timeout(10.0):
            while clock.now_s() != town.true_s:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(main())


def test_the_timer_goes_on_whatever_an_answer_does(caplog: pytest.LogCaptureFixture) -> None:
    town = Town(many(2))
    broken = many(1)[0]
    town.discovery.book.standings.spoke(broken.peer_id)
    town.add(broken)
    del town.offsets[broken.peer_id]
    town.failure = lambda: UnicodeError("a name that is none")
    clock = clock_in(town)

    async def main() -> None:
        task = asyncio.create_task(clock.run(0.001))
        async with asyncio.timeout(10.0):
            while len(town.asked) < 9:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(main())
    assert len(clock.clock.samples) == 2
    assert "UnicodeError" in caplog.text
