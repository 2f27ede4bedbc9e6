"""Whether others can reach a host: what the answers of those who knocked mean."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.network.addresses import Scope, parse_address
from node.network.daemon import free_port
from node.network.discovery import PeerBook
from node.network.reachability import (
    ASKED,
    ASKED_AT_MOST,
    Door,
    Opinion,
    Reachability,
    Verdict,
    beyond_this_network,
    door_of,
    judge,
    opinions_of,
)
from protocol import frames, messages
from protocol.messages import DialBack, DialBackReply, DialOutcome
from tests.support.loopback import QUICK, _no_daemon_left, node, pair, run, until  # noqa: F401
from tests.support.strangers import many, standings_with

PUBLIC, OTHER, INSIDE = "198.51.100.7", "198.51.100.9", "192.168.1.5"
GLOBAL = "8.8.4.4"  # a public one in the sense of the registries, which the ones above are not
DOOR = Door(4001, 4001, inside=INSIDE)


def said(*rows: tuple[str, DialOutcome]) -> list[Opinion]:
    return [Opinion(f"peer{n}", ip, int(outcome)) for n, (ip, outcome) in enumerate(rows)]


# --- what the answers mean ------------------------------------------------------------------------


def test_nobody_to_ask_and_nobody_who_can_tell() -> None:
    assert judge([], DOOR).line == "reachable: unknown (no other peer to ask yet)"
    verdict = judge(said(("", DialOutcome.NOT_TRIED), (PUBLIC, DialOutcome.NOT_TRIED)), DOOR)
    assert verdict.line == "reachable: unknown (2 peers asked, none could tell)"
    nonsense = [Opinion("p", "0.0.0.0", 1), Opinion("p", "no ip", 1), Opinion("p", PUBLIC, 77)]
    assert judge(nonsense, DOOR).reachable == "unknown"


def test_most_of_the_peers_decide() -> None:
    yes = judge(said(*[(GLOBAL, DialOutcome.REACHED)] * 2, (GLOBAL, DialOutcome.TIMED_OUT)), DOOR)
    assert (yes.reachable, yes.address) == ("yes", f"/ip4/{GLOBAL}/tcp/4001")
    assert f"2 of 3 peers asked opened a new connection to {GLOBAL}:4001" in yes.why
    assert "none outside" not in yes.why and not yes.fixes and yes.public
    no = judge(said((GLOBAL, DialOutcome.REACHED), *[(GLOBAL, DialOutcome.TIMED_OUT)] * 2), DOOR)
    assert no.reachable == "no" and "2 of 3 peers" in no.why and "timed out" in no.why


def test_one_liar_cannot_make_us_announce_another_address() -> None:
    lie = (OTHER, DialOutcome.REACHED)
    verdict = judge(said(lie, *[(PUBLIC, DialOutcome.TIMED_OUT)] * 2), DOOR)
    assert (verdict.reachable, verdict.address) == ("no", f"/ip4/{PUBLIC}/tcp/4001")


def test_who_is_outside_tells_more_than_who_is_inside() -> None:
    inside = [(INSIDE, DialOutcome.REACHED)] * 3
    verdict = judge(said(*inside, (GLOBAL, DialOutcome.TIMED_OUT)), DOOR)
    assert verdict.reachable == "no" and GLOBAL in verdict.why
    alone = judge(said(*inside), DOOR)
    assert alone.reachable == "yes" and "of this network" in alone.why and not alone.public
    here = judge(said(("127.0.0.1", DialOutcome.REACHED)), DOOR)
    assert "of this machine: there was none outside of it to ask" in here.why


def test_another_address_than_the_announced_one() -> None:
    door = Door(4001, 4001, announced=frozenset({OTHER}))
    verdict = judge(said((PUBLIC, DialOutcome.REACHED)), door)
    assert verdict.reachable == "unknown" and verdict.fixes
    assert PUBLIC in verdict.why and OTHER in verdict.why


@pytest.mark.parametrize("outcome", list(DialOutcome)[2:])
def test_every_no_comes_with_fixes_that_hold_the_real_values(outcome: DialOutcome) -> None:
    door = Door(4001, 31337, inside=INSIDE)
    verdict = judge(said((GLOBAL, outcome)), door)
    text = " ".join(verdict.fixes)
    assert verdict.reachable == "no" and "--relay" in text and "4001" in text
    assert INSIDE in text and "31337" in text


IPS = st.sampled_from([PUBLIC, OTHER, GLOBAL, INSIDE, "127.0.0.1", "::1", "2a00::1", "x", ""])


@given(st.lists(st.tuples(IPS, st.integers(0, 255)), max_size=9), st.integers(1, 65535))
def test_any_answers_give_a_verdict(rows: list[tuple[str, int]], port: int) -> None:
    verdict = judge([Opinion("p", *row) for row in rows], Door(port, port))
    assert verdict.line.startswith("reachable: ") and "\n" not in verdict.line
    if verdict.reachable == "yes":
        assert (parse_address(verdict.address).text.split("/")[2], int(DialOutcome.REACHED)) in rows
    assert verdict.public == (
        bool(verdict.address) and parse_address(verdict.address).scope is Scope.PUBLIC
    )


def test_which_door_is_knocked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        own = [f"/ip4/{INSIDE}/tcp/31337", "/ip4/127.0.0.1/tcp/31337"]
        assert await door_of(own, (), 31337) == Door(31337, 31337, inside=INSIDE)
        mapped = [*own, f"/ip4/{GLOBAL}/tcp/999"]  # what a router granted
        assert (await door_of(mapped, (), 31337)).port == 999
        named = await door_of(own, ("/dns/localhost/tcp/4001",), 31337)
        assert named.port == 4001 and "127.0.0.1" in named.announced
        monkeypatch.setattr("node.network.reachability._look_up", nobody_knows)
        unknown = await door_of(own, ("/dns/nobody.invalid/tcp/4001",), 31337)
        assert unknown.announced == {"nobody.invalid"}

    async def nobody_knows(name: str) -> set[str]:
        return set()

    run(main())
    assert not beyond_this_network([f"/ip4/{INSIDE}/tcp/1", "/ip4/127.0.0.1/tcp/1"])
    assert beyond_this_network([f"/ip4/{GLOBAL}/tcp/1"]) and not beyond_this_network([])


def test_peers_that_are_busy_are_passed_over() -> None:
    asked: list[bytes] = []
    peers = [bytes([0, 36, 8, 1, 18, 32, *[n] * 32]) for n in range(20)]

    async def answer(peer: bytes) -> DialBackReply:
        asked.append(peer)
        if len(asked) <= 2:
            raise frames.Busy(1.0)
        return DialBackReply(outcome=1, observed=GLOBAL)

    assert len(asyncio.run(opinions_of(peers, answer))) >= ASKED
    assert len(asked) <= 2 * ASKED

    async def never(peer: bytes) -> DialBackReply:
        asked.append(peer)
        return DialBackReply(outcome=0)

    asked.clear()
    asyncio.run(opinions_of(peers, never))
    assert len(asked) == ASKED_AT_MOST


def test_peers_of_this_network_do_not_end_the_asking() -> None:
    """As long as somebody outside may be there to ask."""
    asked: list[bytes] = []
    outside = {bytes([n]) * 38 for n in (4, 7, 8)}

    async def answer(peer: bytes) -> DialBackReply:
        asked.append(peer)
        return DialBackReply(outcome=1, observed=GLOBAL if peer in outside else INSIDE)

    found = asyncio.run(opinions_of([bytes([n]) * 38 for n in range(20)], answer))
    assert len(asked) == len(found) == 9 and judge(found, DOOR).public
    nonsense = DialBackReply(outcome=1, observed="no ip")

    async def mad(peer: bytes) -> DialBackReply:
        return nonsense

    assert len(asyncio.run(opinions_of(list(outside), mad))) == 3


def test_beyond_the_contributors_whoever_was_met_is_asked() -> None:
    worker, met, named = many(1), many(20), many(20)
    book = PeerBook(standings=standings_with(worker))
    for peer in met:
        book.standings.spoke(peer.peer_id)
    for peer in (*worker, *met, *named):
        book.remember(peer.peer_id, ["/ip4/10.0.0.1/tcp/1"])
    nobody: Any = None
    turn = Reachability(nobody, print, random.Random(1))._in_turn(book)
    assert worker[0].peer_id in turn[:2]
    assert set(turn) == {peer.peer_id for peer in (*worker, *met)} and len(turn) == 21


# --- live -----------------------------------------------------------------------------------------


def test_a_peer_dials_back_over_a_new_connection(tmp_path: Path, closed: int) -> None:
    async def main() -> None:
        async with pair(tmp_path) as (a, b):
            request = DialBack(run=b.settings.run_id, port=b.daemon.port)
            reply = (await b.request(a.peer_id, request, DialBackReply)).message
            assert reply == DialBackReply(outcome=1, observed="127.0.0.1")
            # p2pd has a connection between the two, and still the closed port is found out
            wrong = DialBack(run=b.settings.run_id, port=closed)
            reply = (await b.request(a.peer_id, wrong, DialBackReply)).message
            assert reply.outcome == DialOutcome.REFUSED
            verdict = await b.reachability.look()
            assert verdict.reachable == "yes" and f"127.0.0.1:{b.daemon.port}" in verdict.why
            other = DialBack(run=b"x" * 32, port=1)
            with pytest.raises(frames.Refused):
                await b.request(a.peer_id, other, DialBackReply)

    run(main())


def test_a_wrong_port_is_told_once_and_again_when_it_is_right(tmp_path: Path, closed: int) -> None:
    async def main() -> None:
        lines: list[str] = []
        async with node(tmp_path, "a") as a:
            seeds = await a.invitations()
            port, wrong = free_port(("127.0.0.1",), 0)[1], closed
            announce = (f"127.0.0.1:{wrong}",)
            async with node(tmp_path, "b", seeds, port=port, announce=announce) as b:
                door = Reachability(b, lines.append, random.Random(1))
                verdict = await door.look()
                assert verdict.reachable == "no" and f"127.0.0.1:{wrong}" in verdict.line
                assert any(f"--port {wrong}" in fix for fix in verdict.fixes)
                for _ in range(2):
                    await door._tell(verdict)
                assert [line for line in lines if "reachable" in line] == [verdict.line]
                assert lines[1].startswith("  1. ")
                await door._tell(Verdict("yes", "now", verdict.address, 1))
                assert lines[-1] == "reachable: yes (now)"  # not public: no new invitation

    run(main())


def test_a_host_says_by_itself_whether_it_is_reached(tmp_path: Path) -> None:
    async def main() -> None:
        lines: list[str] = []
        async with node(tmp_path, "a", say=lines.append) as a:
            task = asyncio.create_task(a.reachability.run())
            await until(lambda: bool(lines))
            assert lines == ["reachable: unknown (no other peer to ask yet)"]
            async with node(tmp_path, "b", await a.invitations()) as b:
                a.discovery.book.remember(b.peer_id, await b.addresses())
                await until(lambda: any("reachable: yes" in line for line in lines), 40.0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run(main())


def test_what_breaks_our_code_does_not_end_the_asking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async def ask(peer: bytes) -> DialBackReply:
            if peer == b"bad":
                raise UnicodeError("label empty or too long")
            return DialBackReply(outcome=DialOutcome.REACHED, observed=PUBLIC)

        found = await opinions_of([b"bad", b"good"], ask)
        assert [o.observed for o in found] == [PUBLIC]
        async with node(tmp_path, "a") as a:
            looked: list[int] = []

            async def look() -> Verdict:
                looked.append(1)
                raise ZeroDivisionError

            monkeypatch.setattr(a.reachability, "look", look)
            a.reachability._backoff = QUICK
            task = asyncio.create_task(a.reachability.run())
            await until(lambda: len(looked) > 2)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run(main())
    assert "UnicodeError" in caplog.text and "ZeroDivisionError" in caplog.text


def test_who_is_behind_a_relay_or_does_not_listen_is_not_asked_about(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path, "relay", reachability="public") as relay:
            via = await relay.invitations()
            async with node(
                tmp_path, "b", via, relays=tuple(via), reachability="private"
            ) as behind:
                verdict = await behind.reachability.look()
                assert verdict.reachable == "no" and "relay" in verdict.why
            async with node(tmp_path, "c", via, hosts=()) as guest:
                assert (await guest.reachability.look()).reachable == "no"

    run(main())


def test_a_confirmed_public_address_goes_into_record_and_invitation(tmp_path: Path) -> None:
    async def main() -> None:
        lines: list[str] = []
        async with node(tmp_path, "a") as a:
            door = Reachability(a, lines.append, random.Random(1))
            a.reachability = door
            public = f"/ip4/{GLOBAL}/tcp/4001"
            await door._tell(Verdict("yes", "so they say", public, 1))
            assert (await a.addresses())[0] == public
            assert lines[1] == "others join with:" and public in lines[2]
            await door._tell(Verdict("no", "not any more", public, 3))
            assert public not in await a.addresses()

    run(main())


def test_a_peer_of_an_older_version_does_not_know_the_question(tmp_path: Path) -> None:
    async def main() -> None:
        async with pair(tmp_path) as (a, b):
            a.service._entries.pop(messages.DialBack.KIND)
            verdict = await b.reachability.look()
            assert verdict.reachable == "unknown"

    run(main())
