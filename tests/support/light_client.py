"""A process for tests: the light client in a Python where hivemind and torch cannot be imported.

    python -m tests.support.light_client            answers JSON lines: {"address", "timeout_s"}
    python -m tests.support.light_client peers ...  is `blockswarm peers ...`

Like a venv that was installed with `.[light]` only. It can also be its own hostile peer at the
level of Yamux, which no p2pd would be ({"flood": "bytes" | "streams"}), and use one connection for
several streams ({"several": address}).
"""

from __future__ import annotations

import importlib.abc
import json
import resource
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any


class Absent(importlib.abc.MetaPathFinder):
    """Makes packages look as if nobody had installed them."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> None:
        if name.partition(".")[0] in ("hivemind", "torch"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Absent())


def run_command() -> None:
    from node import cli
    from node.commands.light import light_commands

    for command in light_commands:
        cli.cli.add_command(command)
    cli.main()


def answer_lines() -> None:
    from node.commands.light import light_survey, survey_facts
    from protocol.errors import BlockswarmError

    for line in sys.stdin:
        wanted = json.loads(line)
        begun_s, before_mb = time.monotonic(), peak_mb()
        answer: dict[str, Any] = {}
        try:
            if "flood" in wanted:
                flood(wanted["flood"])
            elif "several" in wanted:
                answer["peers"] = several(wanted["several"])
            else:
                found = light_survey(wanted["address"], wanted.get("timeout_s", 10.0))
                answer["facts"] = survey_facts(found, time.time())
        except BlockswarmError as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            answer |= {"error": kinds, "message": error.message, "hint": error.hint}
        answer |= {"took_s": time.monotonic() - begun_s, "grew_mb": peak_mb() - before_mb}
        answer["hivemind"] = "hivemind" in sys.modules
        print(json.dumps(answer), flush=True)


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def several(address: str) -> list[int]:
    """Three surveys at once on one connection, beside a stream that is dropped in the middle."""
    import trio

    from node.commands.light import survey
    from node.network import light
    from protocol.frames import Deadline, Stalled
    from protocol.messages import Hello, send

    deadline = Deadline.after(10)
    counts: list[int] = []

    async def ask(peer: light.LightPeer) -> None:
        counts.append(len((await survey(await peer.open(deadline))).peers))

    async def drop(peer: light.LightPeer) -> None:
        try:
            async with await peer.open(deadline) as channel:
                await send(channel, Hello())
                raise Stalled("as somebody who has lost patience would")
        except Stalled:
            return

    async def main() -> None:
        async with light.connect(light.parse_light_address(address), deadline) as peer:
            async with trio.open_nursery() as nursery:
                for task in (ask, drop, ask, ask):
                    nursery.start_soon(task, peer)
            await ask(peer)

    trio.run(main, restrict_keyboard_interrupt_to_checkpoints=True)
    return counts


def flood(how: str) -> None:
    """Ask a peer that sends what nobody asked for."""
    import trio
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.crypto.x25519 import create_new_key_pair as create_new_x25519_key_pair
    from libp2p.io.trio import TrioTCPStream
    from libp2p.network.connection.raw_connection import RawConnection
    from libp2p.protocol_muxer.multiselect import Multiselect
    from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
    from libp2p.security.noise.transport import Transport

    from node.network import light
    from protocol.frames import Deadline
    from protocol.identity import peer_id_of

    keys = create_new_key_pair()

    async def flooder(tcp: trio.SocketStream) -> None:
        raw: Any = RawConnection(TrioTCPStream(tcp), False)
        await Multiselect({light.NOISE: None}).negotiate(MultiselectCommunicator(raw))
        noise = Transport(keys, create_new_x25519_key_pair().private_key)
        secured: Any = await noise.secure_inbound(raw)
        await Multiselect({light.YAMUX: None}).negotiate(MultiselectCommunicator(secured))
        syn, body = 1, bytes(60000 if how == "bytes" else 10)
        for number in range(1, 20000):
            stream_id = 2 if how == "bytes" else 2 * number
            flags = syn if how == "streams" or number == 1 else 0
            frame = struct.pack("!BBHII", 0, 0, flags, stream_id, len(body)) + body
            with trio.fail_after(10):
                await secured.write(frame)

    async def quietly(tcp: trio.SocketStream) -> None:
        try:
            await flooder(tcp)
        except Exception:
            return  # the client hung up, which is what it should do

    async def main() -> None:
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            listeners = await nursery.start(trio.serve_tcp, quietly, 0)
            port = listeners[0].socket.getsockname()[1]
            peer_id = peer_id_of(keys.public_key.to_bytes())
            deadline = Deadline.after(15)
            try:
                async with light.connect(
                    light.LightAddress("127.0.0.1", port, peer_id), deadline
                ) as peer:
                    await peer.open(deadline)
            except Exception as error:
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    trio.run(main, restrict_keyboard_interrupt_to_checkpoints=True)


if __name__ == "__main__":
    run_command() if sys.argv[1:] else answer_lines()
