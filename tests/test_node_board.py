"""The notice board on a real network: records shown and looked up, and those left aside."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from loopback import RUN_ID, _no_daemon_left, node, run, until  # noqa: F401

from node.board import ReplicaBoard
from node.network import Network
from node.network_peers import NetworkPeers
from node.service import Reply
from protocol import messages
from protocol.payloads import pack_records, record_of
from protocol.records import Record, Role
from swarm import actions as act

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


def says(number: int) -> act.Announce:
    return act.Announce(number, bytes([number]) * 32, number - 1, None, 0, 1.5)


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
            # A board that is full of the living hears nobody new; the dead make room.
            monkeypatch.setattr("node.board.PEERS_MET", 1)
            async with node(tmp_path, "c", await a.invitations()) as c:
                board.hear(c.discovery.seal(record))
                assert len(heard) == 1
                board._met = {p: replace(s, expiration_s=1.0) for p, s in board._met.items()}
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
