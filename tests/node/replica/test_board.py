"""The notice board on a real network: records shown and looked up, and those left aside."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from node.network.discovery import Discovery, PeerBook
from node.network.network import Network
from node.network.peers import NetworkPeers
from node.network.service import Reply
from node.replica.board import ReplicaBoard
from node.replica.notices import UNPROVEN_SHOWN
from protocol import messages
from protocol.frames import Stalled
from protocol.identity import Identity, peer_text
from protocol.ledger import Ledger
from protocol.payloads import pack_records, record_of
from protocol.records import Record, Role
from swarm.rounds import actions as act
from tests.support.loopback import RUN_ID, _no_daemon_left, node, run, until  # noqa: F401
from tests.support.strangers import many, standings_with
from tests.support.strangers import record_of as stranger_record

Heard = list[act.PeerRecord]


class CountingBoard(ReplicaBoard):
    asked = 0  # by others


def board_on(network: Network, block: int = 0) -> tuple[CountingBoard, Heard]:
    heard: Heard = []
    board = CountingBoard(
        network, NetworkPeers(network), block, int(Role.REPLICA), heard.append, show_s=5.0
    )

    async def announce(request: messages.Announce, asker: bytes) -> Reply:
        board.asked += 1
        found = (await board.answer(record_of(request, time.time()), asker))[:16]
        return Reply(messages.AnnounceReply(count=len(found)), pack_records(found))

    network.service.serve(messages.Announce, announce)
    return board, heard


def says(number: int) -> act.PublishRecord:
    return act.PublishRecord(number, bytes([number]) * 32, number - 1, None, 0, 1.5)


def test_replicas_find_each_other_and_hear_every_round(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path, "a") as a, node(tmp_path, "b", await a.invitations()) as b:
            (board_a, heard_a), (board_b, heard_b) = board_on(a), board_on(b)
            await board_a.publish(says(3))
            await board_b.publish(says(3))
            await board_b.look_up()  # finds a, and shows itself
            assert [r.round for r in heard_b] == [3]
            assert [r.round for r in heard_a] == [3]
            assert heard_b[0].head == bytes([3]) * 32 and heard_b[0].head_round == 2
            assert heard_b[0].proposal_s == 1.5 and heard_b[0].update is None
            # From now on a record is shown directly, and the answer brings the other's.
            await board_a.publish(says(4))
            assert [r.round for r in heard_b] == [3, 4]
            await board_b.publish(says(4))
            assert [r.round for r in heard_a] == [3, 4]
            assert len(board_a.known()) == 2

    run(main())


def test_of_two_replicas_that_know_each_other_one_asks(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path, "a") as a, node(tmp_path, "b", await a.invitations()) as b:
            (board_a, heard_a), (board_b, heard_b) = board_on(a), board_on(b)
            await board_a.publish(says(3))
            await board_b.publish(says(3))
            await board_b.look_up()
            before = board_a.asked
            first = asyncio.create_task(board_a.publish(says(4)))
            await until(lambda: heard_b[-1].round == 4)
            assert heard_a[-1].round == 3  # the answer waits until b has something to say
            await board_b.publish(says(4))
            await first
            assert heard_a[-1].round == heard_b[-1].round == 4
            assert board_a.asked == before

    run(main())


def test_what_is_old_of_another_block_or_of_another_run_is_left_aside(
    tmp_path: Path, monkeypatch: Any
) -> None:
    async def main() -> None:
        async with node(tmp_path, "a") as a, node(tmp_path, "b", await a.invitations()) as b:
            board, heard = board_on(a)
            record = Record(
                run=RUN_ID,
                role=int(Role.REPLICA),
                block=0,
                round=5,
                sequence=0,
                consensus=bytes(32),
            )
            old, new = b.discovery.seal(record), b.discovery.seal(replace(record, round=6))
            board.hear(new)
            board.hear(old)
            board.hear(new)
            board.hear(b.discovery.seal(replace(record, block=1)))
            board.hear(a.discovery.seal(record))  # our own
            board.hear(replace(new, record=replace(record, run=bytes(32), round=9)))
            assert [r.round for r in heard] == [6]
            # A board that is full of the living hears no more hearsay; the dead make room.
            monkeypatch.setattr("node.replica.notices.PEERS_MET", 1)
            async with node(tmp_path, "c", await a.invitations()) as c:
                board.hear(c.discovery.seal(record))
                assert len(heard) == 1
                for notice in board.notices._met.values():
                    notice.signed = replace(notice.signed, expiration_s=1.0)
                board.hear(c.discovery.seal(record))
                assert len(heard) == 2

    run(main())


def test_a_dead_peer_or_daemon_holds_nobody_up(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path, "a") as a:
            board, _ = board_on(a)
            async with node(tmp_path, "b", await a.invitations()) as b:
                other, heard = board_on(b)
                await board.publish(says(1))
                await other.publish(says(1))
                await other.look_up()
                assert heard
            await board.publish(says(2))  # b is gone: it takes its time, and no error
            await a.stop()
            await board.publish(says(3))

    run(main())


class Town:
    """All of a network that a board asks for, and peers that answer as told: nothing is sent."""

    def __init__(self, contributors: list[Identity]) -> None:
        me = many(1)[0]
        self.peer_id, self.clock = me.peer_id, time.time
        self.settings = SimpleNamespace(run_id=RUN_ID)
        self.standings = standings_with(contributors)
        self.discovery = Discovery(me, RUN_ID, PeerBook(standings=self.standings), Ledger())
        self.shown: list[str] = []
        self.failure: Exception = Stalled("silent")

    async def addresses(self) -> tuple[str, ...]:
        return ("/ip4/198.51.100.1/tcp/1",)

    async def announce(self, record: Record) -> int:
        return 1

    async def ask(self, peer: str, *_: object) -> Any:
        self.shown.append(peer)
        raise self.failure


def board_in(town: Any) -> tuple[ReplicaBoard, Heard]:
    heard: Heard = []
    return ReplicaBoard(town, town, 0, int(Role.REPLICA), heard.append), heard


def test_a_flood_of_identities_hides_no_honest_replica() -> None:
    honest, strangers = many(8), many(600)

    async def main() -> None:
        town = Town(honest)
        board, heard = board_in(town)
        for peer in honest:
            await board.answer(stranger_record(peer, 300.0), peer.peer_id)
        # Of others than the asker, which nobody honest shows; then each for itself.
        for peer in strangers[:100]:
            await board.answer(stranger_record(peer, 900.0), strangers[0].peer_id)
        assert len(board.known()) == 9
        for peer in strangers:
            await board.answer(stranger_record(peer, 900.0), peer.peer_id)
        await board.publish(says(6))
        ours = {peer_text(peer.peer_id) for peer in honest}
        assert ours <= set(town.shown)
        assert {s.peer_id for s in board.known()[:16]} >= {p.peer_id for p in honest}
        assert all(town.discovery.book.addresses(peer.peer_id) for peer in honest)
        latest = {peer for peer, _ in town.discovery.book.latest(8)}
        assert latest == {peer.peer_id for peer in honest}
        # And an honest newcomer is heard.
        newcomer = many(1)[0]
        await board.answer(stranger_record(newcomer), newcomer.peer_id)
        assert heard[-1].peer == newcomer.text

    asyncio.run(main())


def test_a_host_knocks_at_few_doors_that_strangers_name() -> None:
    async def main() -> None:
        town = Town([])
        board, _ = board_in(town)
        for _ in range(40):
            teller = many(1)[0].peer_id
            for peer in many(5):
                board.hear(stranger_record(peer, 900.0), teller)
        await board.publish(says(6))
        assert len(town.shown) == UNPROVEN_SHOWN

    asyncio.run(main())


def test_an_answer_that_breaks_our_code_does_not_end_publishing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        town = Town([])
        town.failure = UnicodeError("label empty or too long")
        board, _ = board_in(town)
        peer = many(1)[0]
        await board.answer(stranger_record(peer), peer.peer_id)
        await board.publish(says(6))
        assert town.shown == [peer.text]

    asyncio.run(main())
    assert "UnicodeError" in caplog.text
