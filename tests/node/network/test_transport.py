"""Streams through real p2pd processes: payloads, a typed error per fault, nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from node.network.daemon import Daemon
from node.network.gate import DaemonGone, Gate, Unreachable
from node.network.network import Network
from node.network.p2pd_stream import P2pdStream
from node.network.service import Reply
from protocol import frames, messages
from protocol.errors import WireError
from protocol.frames import Chunks, Deadline, content_digest, encode_head
from protocol.identity import load_or_create, new_identity
from protocol.limits import CHUNK_BYTES, Kind
from protocol.messages import ErrorCode, Purpose
from protocol.packing import Malformed
from protocol.version import PROTOCOL_MAJOR
from tests.support.loopback import (  # noqa: F401
    RUN_ID,
    _no_daemon_left,
    daemon_settings,
    node,
    pair,
    run,
    until,
)
from tests.support.paths import ROOT

MB = 1_000_000
UPDATE = messages.UpdateRequest(run=RUN_ID, block=2, round=3, digest=RUN_ID)
UPDATE_HEADER = messages.UpdateReply(block=2, round=3).to_header()


def serve_payload(network: Network, payload: bytes | Callable[[], Chunks]) -> None:
    async def update(request: messages.UpdateRequest, _: bytes) -> Reply:
        body = payload() if callable(payload) else payload
        return Reply(messages.UpdateReply(block=request.block, round=request.round), body)

    network.serve(messages.UpdateRequest, update, bulk=True)


def test_a_sender_that_knows_the_digest_need_not_hash_and_cannot_lie(tmp_path: Path) -> None:
    payload = os.urandom(MB)

    async def main() -> None:
        async with pair(tmp_path) as (a, b):
            serve_payload(a, lambda: Chunks(MB, (payload,), content_digest(payload)))
            answer = await b.request(a.peer_id, UPDATE, messages.UpdateReply)
            assert answer.payload == payload and answer.digest == content_digest(payload)
            serve_payload(a, lambda: Chunks(MB, (payload,), content_digest(b"another")))
            with pytest.raises(frames.DigestMismatch):
                await b.request(a.peer_id, UPDATE, messages.UpdateReply)
            serve_payload(a, lambda: Chunks(MB, (payload,), b"short"))
            with pytest.raises(frames.Truncated):
                await b.request(a.peer_id, UPDATE, messages.UpdateReply)

    run(main())


def endless() -> Chunks:
    """A payload whose sender never finishes in a test's time; one buffer for all of its parts."""
    part = bytes(CHUNK_BYTES)
    return Chunks(2000 * CHUNK_BYTES, (part for _ in range(2000)))


def test_messages_and_large_payloads_arrive_and_both_ledgers_agree(tmp_path: Path) -> None:
    payload = os.urandom(20 * MB)
    part = bytearray(CHUNK_BYTES)

    def reused() -> Chunks:
        """Parts in one buffer that is overwritten after each write."""

        def parts() -> Any:
            for number in range(16):
                part[:] = bytes([number]) * CHUNK_BYTES
                yield part

        return Chunks(16 * CHUNK_BYTES, parts())

    async def main() -> None:
        async with pair(tmp_path) as (a, b):
            pong = await b.request(a.peer_id, messages.Ping(nonce=b"7"), messages.Pong)
            assert pong.message.nonce == b"7" and not pong.payload
            serve_payload(a, payload)
            answer = await b.request(
                a.peer_id, UPDATE, messages.UpdateReply, expected=content_digest(payload)
            )
            assert answer.payload == payload
            assert answer.message == messages.UpdateReply(block=2, round=3)
            serve_payload(a, reused)
            answer = await b.request(a.peer_id, UPDATE, messages.UpdateReply)
            whole = b"".join(bytes([number]) * CHUNK_BYTES for number in range(16))
            assert answer.payload == whole
            with pytest.raises(frames.DigestMismatch):
                await b.request(a.peer_id, UPDATE, messages.UpdateReply, expected=RUN_ID)
            # ... and the other way round, over the same connection
            assert (await a.request(b.peer_id, messages.Ping(), messages.Pong)).message
            await until(lambda: a.transport.incoming_streams + b.transport.incoming_streams == 0)
            of_a, of_b = a.ledger.of_peer(b.identity.text), b.ledger.of_peer(a.identity.text)
            assert set(of_a) == set(of_b) == {(Purpose.CONTROL, 65535), (Purpose.UPDATE, 2)}
            for cell, count in of_a.items():
                assert count.bytes_in == of_b[cell].bytes_out > 0
                assert count.bytes_out == of_b[cell].bytes_in > 0
                assert count.frames_in == of_b[cell].frames_out
                assert count.frames_out == of_b[cell].frames_in
            assert of_a[Purpose.UPDATE, 2].bytes_out > 20 * MB

    run(main())


# --- bad peers ----------------------------------------------------------------------------------


def frame(payload: bytes = b"x" * 100, kind: int = Kind.UPDATE_REPLY) -> bytes:
    head = encode_head(kind, UPDATE_HEADER, len(payload))
    return head + payload + content_digest(payload)


def changed(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


GOOD = frame()
FAULTS: dict[str, tuple[bytes, bool, type[WireError]]] = {
    # what the peer answers, whether it closes then, and what we call it
    "truncated in the payload": (GOOD[:-60], True, frames.Truncated),
    "truncated in the header": (GOOD[:9], True, frames.Truncated),
    "closed without a word": (b"", True, frames.StreamEnded),
    "stalled": (GOOD[:-60], False, frames.Stalled),
    "silent": (b"", False, frames.Stalled),
    "oversize": (encode_head(Kind.UPDATE_REPLY, UPDATE_HEADER, 1 << 40), False, frames.Oversize),
    "oversize for the call": (frame(bytes(5000)), False, frames.Oversize),
    "wrong digest": (changed(GOOD, len(GOOD) - 1), False, frames.DigestMismatch),
    "changed payload": (changed(GOOD, len(GOOD) - 40), False, frames.DigestMismatch),
    "unknown kind": (frame(kind=999), False, frames.UnknownKind),
    "another major version": (changed(GOOD, 4), False, frames.VersionMismatch),
    "garbage": (b"HTTP/1.1 200 OK\r\n" * 9, False, Malformed),
    "another answer": (encode_head(Kind.PONG, b"\x81\xa3now\x01", 0), False, Malformed),
}


def test_every_fault_of_a_peer_is_its_own_error(tmp_path: Path) -> None:
    async def main() -> None:
        async with pair(tmp_path) as (a, b):
            now = {"answer": b"", "ends": False}
            done = asyncio.Event()

            async def raw(stream: P2pdStream, peer_id: bytes) -> None:
                await stream.read(1, 5.0)
                if now["answer"]:
                    await stream.write(now["answer"], 5.0)
                if now["ends"]:
                    await stream.close()
                else:
                    await done.wait()

            # In the method's place, which mypy forbids: a peer that does not speak our protocol.
            b.service.on_stream = raw  # type: ignore[method-assign,assignment]
            for name, (answer, ends, error) in FAULTS.items():
                done.clear()
                now = {"answer": answer, "ends": ends}
                with pytest.raises(error) as caught:
                    await a.request(
                        b.peer_id,
                        UPDATE,
                        messages.UpdateReply,
                        deadline_s=10.0,
                        stall_s=0.3,
                        max_payload_bytes=4096,
                    )
                assert caught.type is error, name
                done.set()
                await until(lambda: b.transport.incoming_streams == 0)

    run(main())


REQUESTS: dict[str, tuple[bytes, ErrorCode]] = {
    "garbage": (b"GET / HTTP/1.1\r\n\r\n", ErrorCode.MALFORMED),
    "another major version": (
        changed(encode_head(Kind.PING, b"\x80", 0), 4),
        ErrorCode.VERSION,
    ),
    "unknown kind": (encode_head(999, b"\x80", 0), ErrorCode.UNKNOWN_KIND),
    "an answer as a request": (
        encode_head(Kind.BUSY, b"\x81\xabretry_after\x01", 0),
        ErrorCode.UNKNOWN_KIND,
    ),
    "a payload where none may be": (encode_head(Kind.PING, b"\x80", 10), ErrorCode.OVERSIZE),
    "a header that is no map": (
        encode_head(Kind.PING, b"\x93\x01\x02\x03", 0),
        ErrorCode.MALFORMED,
    ),
    "a run that we are not part of": (
        encode_head(Kind.RUN_REQUEST, messages.RunRequest(run=content_digest(b"?")).to_header(), 0),
        ErrorCode.WRONG_RUN,
    ),
    "nobody serves it yet": (
        encode_head(Kind.UPDATE_REQUEST, UPDATE.to_header(), 0),
        ErrorCode.UNKNOWN_KIND,
    ),
}


def test_every_bad_request_gets_its_reason(tmp_path: Path) -> None:
    assert PROTOCOL_MAJOR == 2

    async def main() -> None:
        async with pair(tmp_path) as (a, b):
            for name, (request, code) in REQUESTS.items():
                deadline = Deadline.after(10.0)
                stream = await a.transport.dial(b.peer_id, await b.addresses(), deadline)
                async with frames.Channel(stream, deadline) as channel:
                    await stream.write(request, 5.0)
                    with pytest.raises(frames.Refused) as refused:
                        await messages.receive(channel, messages.Pong)
                    assert refused.value.code == code, name
            # a stranger that hangs up in the middle of a request costs nothing either
            stream = await a.transport.dial(b.peer_id, await b.addresses(), Deadline.after(5.0))
            await stream.write(GOOD[:10], 5.0)
            stream.abort()
            await until(lambda: b.transport.incoming_streams == 0)
            assert (await a.request(b.peer_id, messages.Ping(), messages.Pong)).message

    run(main())


# --- ends of all kinds --------------------------------------------------------------------------


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_a_cancelled_transfer_leaves_no_task_and_no_stream(tmp_path: Path) -> None:
    async def main() -> None:
        async with pair(tmp_path) as (a, b):
            serve_payload(a, endless)
            await b.request(a.peer_id, messages.Ping(), messages.Pong)
            await until(lambda: a.transport.incoming_streams == 0)
            tasks, held = len(asyncio.all_tasks()), open_files(b.daemon.pid)
            arrived = asyncio.Event()

            def sink(data: bytes) -> None:
                arrived.set()

            for _ in range(3):
                arrived.clear()
                task = asyncio.create_task(
                    b.request(a.peer_id, UPDATE, messages.UpdateReply, sink=sink)
                )
                await arrived.wait()
                assert a.service.transfers == 1
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await until(lambda: a.transport.incoming_streams == 0 == a.service.transfers)
            assert len(asyncio.all_tasks()) == tasks
            # the daemons let go of the streams too
            await until(lambda: open_files(b.daemon.pid) <= held)
            # what had come through is in the books of both
            assert b.ledger.by_purpose()[Purpose.UPDATE].bytes_in > 0

    run(main())


def test_stopping_in_the_middle_of_transfers_leaves_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path, "a") as a:
            serve_payload(a, endless)
            async with node(tmp_path, "b", await a.invitations()) as b:
                arrived = asyncio.Event()
                task = asyncio.create_task(
                    b.request(
                        a.peer_id, UPDATE, messages.UpdateReply, sink=lambda data: arrived.set()
                    )
                )
                await arrived.wait()
            with pytest.raises(frames.Truncated):
                await task
            await until(lambda: a.transport.incoming_streams == 0)

    run(main())


def test_a_stream_that_comes_in_at_the_very_end_is_ended_too(tmp_path: Path) -> None:
    """Its task is cancelled before its first step; that must not leave the connection open."""

    async def main() -> None:
        async with node(tmp_path, "a") as a:
            transport = a.transport
            with socket.socket(socket.AF_UNIX) as p2pd:
                p2pd.connect(str(transport._incoming))
                while not transport.incoming_streams:  # noqa: ASYNC110 (not a turn too late)
                    await asyncio.sleep(0)
                await transport.close()
                assert transport.incoming_streams == transport.open_streams == 0
                with pytest.raises(DaemonGone):
                    await transport.connected()

    run(main())


def test_a_busy_peer_says_so_and_is_asked_again_later(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path, "a") as a:
            a.service.updates = Gate(places=1)
            go_on = asyncio.Event()
            began = asyncio.Event()

            async def update(request: messages.UpdateRequest, _: bytes) -> Reply:
                began.set()
                await go_on.wait()
                return Reply(messages.UpdateReply(block=2, round=3), b"done")

            a.serve(messages.UpdateRequest, update, bulk=True)
            async with node(tmp_path, "b", await a.invitations()) as b:
                first = asyncio.create_task(b.request(a.peer_id, UPDATE, messages.UpdateReply))
                await began.wait()
                with pytest.raises(frames.Busy) as busy:
                    await b.request(a.peer_id, UPDATE, messages.UpdateReply)
                assert 0 < busy.value.retry_after_s <= 120
                # control messages need no place
                pong = await b.request(a.peer_id, messages.Ping(), messages.Pong)
                assert pong.message.transfers == 1
                second = asyncio.create_task(
                    b.request_patiently(a.peer_id, UPDATE, messages.UpdateReply, 30.0)
                )
                await asyncio.sleep(0)  # one turn: it has begun to ask
                go_on.set()
                assert (await first).payload == (await second).payload == b"done"

    run(main())


def test_a_peer_killed_in_mid_stream_is_a_truncation(tmp_path: Path) -> None:
    """A process of its own, with its p2pd, killed with SIGKILL while it sends."""

    async def main() -> None:
        async with node(tmp_path, "a") as a:
            script = ROOT / "tests" / "support" / "loopback_sender.py"
            sender = await asyncio.create_subprocess_exec(
                sys.executable,
                str(script),
                str(tmp_path),
                *await a.invitations(),
                stdout=subprocess.PIPE,
            )
            try:
                assert sender.stdout is not None
                told = json.loads(await sender.stdout.readline())
                peer_id = bytes.fromhex(told["peer"])

                killed: list[int] = []

                def sink(data: bytes) -> None:
                    if not killed:  # more pieces may come before its end is noticed
                        killed.append(told["p2pd"])
                        os.kill(told["p2pd"], signal.SIGKILL)
                        sender.kill()

                with pytest.raises(frames.Truncated) as caught:
                    await a.request(
                        peer_id, UPDATE, messages.UpdateReply, sink=sink, deadline_s=30.0
                    )
                assert caught.type is frames.Truncated
                with pytest.raises(Unreachable):
                    await a.request(peer_id, messages.Ping(), messages.Pong, deadline_s=5.0)
            finally:
                if sender.returncode is None:
                    sender.kill()
                await sender.wait()

    run(main())


def test_dialling_nobody_is_unreachable_and_a_dead_daemon_is_said(tmp_path: Path) -> None:
    async def main() -> None:
        load_or_create(tmp_path / "x.key").close()
        daemon = await Daemon.start(daemon_settings(tmp_path, "x"))
        stranger = new_identity().peer_id
        try:
            with pytest.raises(Unreachable):
                await daemon.transport.dial(stranger, ["/ip4/127.0.0.1/tcp/9"], Deadline.after(5.0))
            with pytest.raises(Unreachable):  # nothing at all is known about it
                await daemon.transport.dial(stranger, [], Deadline.after(5.0))
            with pytest.raises(Unreachable):  # addresses that p2pd cannot parse
                await daemon.transport.dial(
                    stranger, ["/ip4/127.0.0.1/tcp/9/nonsense/1"], Deadline.after(5.0)
                )
            os.kill(daemon.pid, signal.SIGKILL)
            await daemon.ended()
            with pytest.raises(DaemonGone):
                await daemon.transport.dial(stranger, [], Deadline.after(5.0))
        finally:
            await daemon.stop()

    run(main())


def test_it_runs_on_the_plain_asyncio_loop(tmp_path: Path) -> None:
    payload = os.urandom(3 * MB)

    async def main() -> None:
        async with pair(tmp_path) as (a, b):
            serve_payload(a, payload)
            answer = await b.request(a.peer_id, UPDATE, messages.UpdateReply)
            assert answer.payload == payload

    asyncio.run(main())
