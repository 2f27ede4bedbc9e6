"""A process for tests: a real hivemind node (p2pd) that answers light clients, honestly or not.

    python -m tests.support.light_server FOLDER

Prints one JSON line with its address, then reads the name of a behaviour per line from stdin and
confirms it. Ends with its stdin. pytest must not import it: hivemind and py-libp2p cannot share a
process.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from node.network.daemon import Daemon, DaemonSettings
from node.network.service import Service, Status, serve_basics
from node.network.transport import Caller, P2pdStream
from protocol import frames, messages
from protocol.frames import Channel, Deadline, Truncated, content_digest
from protocol.identity import Identity, load_or_create, new_identity
from protocol.ledger import Ledger
from protocol.limits import BLOCK_NONE, MIB, Kind
from protocol.messages import Message
from protocol.payloads import pack_records
from protocol.records import Record, Role, SignedRecord, seal
from protocol.version import PROTOCOL_MAJOR

RUN_FILE = b'name = "light test"\nseed = 7\n'
RUN = content_digest(RUN_FILE)


def record_of(
    identity: Identity, number: int, life_s: float = 300.0, **changes: Any
) -> SignedRecord:
    values: dict[str, Any] = {
        "run": RUN,
        "role": Role.REPLICA,
        "block": number,
        "round": 10 + number,
        "sequence": 1,
        "consensus": content_digest(b"%d" % number),
        "addresses": (f"/ip4/10.{number}.0.1/tcp/31337",),
        **changes,
    }
    return seal(identity, Record(**values), time.time() + life_s)


def honest_records(own: Identity) -> list[SignedRecord]:
    others = [Identity(bytes([n]) * 32) for n in range(1, 4)]
    seed = record_of(own, 0, role=Role.SEED | Role.SERVER, block=BLOCK_NONE, consensus=b"")
    return [seed, *(record_of(other, n) for n, other in enumerate(others))]


def mixed_records(own: Identity) -> list[tuple[bytes, bytes, bytes, float]]:
    """Four good ones, one of them also in an older version, and some of every bad kind."""
    good = honest_records(own)
    older = record_of(own, 0, role=Role.SEED, block=BLOCK_NONE, sequence=0)
    forged, longer = record_of(new_identity(), 5), record_of(new_identity(), 6)
    changed = forged.value.replace(forged.record.consensus, content_digest(b"a lie"))
    moved = record_of(new_identity(), 4)
    expired = record_of(new_identity(), 7, life_s=-60)
    eternal = record_of(new_identity(), 8, life_s=86400)
    other = record_of(new_identity(), 9, run=content_digest(b"another run"))
    rows = [(r.key, r.subkey, r.value, r.expiration_s) for r in (*good, older)]
    rows += [(r.key, r.subkey, r.value, r.expiration_s) for r in (expired, eternal, other)]
    rows.append((forged.key, forged.subkey, changed, forged.expiration_s))
    rows.append((longer.key, longer.subkey, longer.value, longer.expiration_s + 1.0))
    rows.append((content_digest(b"elsewhere")[:20], moved.subkey, moved.value, moved.expiration_s))
    return rows


class Server:
    """The node's own service, and beside it what a liar would answer instead."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.behaviour = "honest"
        self.service = Service(Ledger())

        async def records(block: int, cap: int) -> list[SignedRecord]:
            return honest_records(identity)

        serve_basics(self.service, RUN, RUN_FILE, lambda: Status(Role.SEED, 12), records)

    async def on_stream(self, stream: P2pdStream, caller: Caller) -> None:
        if self.behaviour == "honest":
            await self.service.on_stream(stream, caller.peer_id)
            return
        async with Channel(stream, Deadline.after(30)) as channel:
            while True:
                request = messages.decode_message(await channel.receive_head())
                await self.answer(channel, request)

    async def answer(self, channel: Channel, request: Message) -> None:
        hostile = HOSTILE.get((self.behaviour, type(request)))
        if hostile is not None:
            await hostile(self, channel)
        elif isinstance(request, messages.Hello):
            reply = messages.HelloReply(run=RUN, role=Role.SEED, round=12, now_s=time.time())
            await messages.send(channel, reply)
        elif isinstance(request, messages.RunRequest):
            await messages.send(channel, messages.RunReply(run=request.run), RUN_FILE)
        else:
            await no_peers(self, channel)


async def raw(channel: Channel, data: bytes) -> None:
    await channel.stream.write(data, 10)


async def garbage(server: Server, channel: Channel) -> None:
    await raw(channel, os.urandom(4096))


async def silence(server: Server, channel: Channel) -> None:
    await asyncio.sleep(30)  # longer than any client waits


async def oversize(server: Server, channel: Channel) -> None:
    head = frames.encode_head(Kind.RUN_REPLY, messages.RunReply(run=RUN).to_header(), 2**40)
    await raw(channel, head + bytes(MIB))


async def half_a_run(server: Server, channel: Channel) -> None:
    head = frames.encode_head(Kind.RUN_REPLY, messages.RunReply(run=RUN).to_header(), 1000)
    await raw(channel, head + bytes(500))


async def truncated(server: Server, channel: Channel) -> None:
    await half_a_run(server, channel)
    raise Truncated("as the behaviour wants it")


async def stalled(server: Server, channel: Channel) -> None:
    await half_a_run(server, channel)
    await asyncio.sleep(30)  # longer than any client waits


async def wrong_digest(server: Server, channel: Channel) -> None:
    header = messages.RunReply(run=RUN).to_header()
    head = frames.encode_head(Kind.RUN_REPLY, header, len(RUN_FILE))
    await raw(channel, head + RUN_FILE + content_digest(b"something else"))


async def other_run_file(server: Server, channel: Channel) -> None:
    await messages.send(channel, messages.RunReply(run=RUN), b'name = "not the one"\n')


async def other_version(server: Server, channel: Channel) -> None:
    head = bytearray(frames.encode_head(Kind.ERROR, b"\x80", 0))
    head[4] = PROTOCOL_MAJOR + 1
    await raw(channel, bytes(head))


async def busy(server: Server, channel: Channel) -> None:
    await messages.send(channel, messages.BusyReply(retry_after_s=7.0))


async def not_expected(server: Server, channel: Channel) -> None:
    await messages.send(channel, messages.Pong(now_s=time.time()))


async def mixed(server: Server, channel: Channel) -> None:
    rows = mixed_records(server.identity)
    payload = messages.pack([list(row) for row in rows])
    await messages.send(channel, messages.PeersReply(count=len(rows)), payload)


async def miscounted(server: Server, channel: Channel) -> None:
    payload = pack_records(honest_records(server.identity))
    await messages.send(channel, messages.PeersReply(count=3), payload)


async def no_peers(server: Server, channel: Channel) -> None:
    await messages.send(channel, messages.PeersReply(count=0))


async def wrong_clock(server: Server, channel: Channel) -> None:
    now_s = time.time() + 3600
    await messages.send(channel, messages.HelloReply(run=RUN, role=0, round=0, now_s=now_s))


Behaviour = Callable[[Server, Channel], Awaitable[None]]
HOSTILE: dict[tuple[str, type[Message]], Behaviour] = {
    ("garbage", messages.Hello): garbage,
    ("silence", messages.Hello): silence,
    ("other_version", messages.Hello): other_version,
    ("busy", messages.Hello): busy,
    ("not_expected", messages.Hello): not_expected,
    ("wrong_clock", messages.Hello): wrong_clock,
    ("oversize", messages.RunRequest): oversize,
    ("truncated", messages.RunRequest): truncated,
    ("stalled", messages.RunRequest): stalled,
    ("wrong_digest", messages.RunRequest): wrong_digest,
    ("other_run_file", messages.RunRequest): other_run_file,
    ("mixed", messages.PeersRequest): mixed,
    ("miscounted", messages.PeersRequest): miscounted,
    ("no_peers", messages.PeersRequest): no_peers,
}


async def main(folder: Path) -> None:
    identity = load_or_create(folder / "identity")
    settings = DaemonSettings(
        folder / "identity", hosts=("127.0.0.1",), reachability="public", map_port=False
    )
    daemon = await Daemon.start(settings)
    try:
        address = f"/ip4/127.0.0.1/tcp/{daemon.port}/p2p/{identity.text}"
        print(json.dumps({"address": address, "peer": identity.text}), flush=True)
        server = Server(identity)
        # Before the first line it is a libp2p node of something else.
        registered = False
        while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
            if not registered:
                await daemon.transport.serve(server.on_stream)
                registered = True
            server.behaviour = line
            print(json.dumps({"behaviour": line}), flush=True)
    finally:
        await daemon.stop()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
