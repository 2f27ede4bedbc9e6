"""Getting to know a run from nothing but an address: who answers, and the run file by its hash.

Uses a daemon and an identity of its own for a moment, because the host's folder is named after the
run, which is not known yet.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from node.addresses import split_peer
from node.daemon import Daemon, DaemonSettings
from protocol import messages
from protocol.errors import BlockswarmError, UsageError, WireError
from protocol.frames import Channel, Deadline, content_digest
from protocol.identity import load_or_create
from swarm.runfile import parse

ASK_S = 15.0


class NobodyAnswers(BlockswarmError):
    """None of the addresses led to a peer of a run."""


async def fetch_run(addresses: Sequence[str]) -> bytes:
    """The run file of the peers at these addresses, checked. The first that answers will do."""
    wanted = [split_peer(text) for text in addresses]
    with tempfile.TemporaryDirectory(prefix="blockswarm-") as folder:
        path = Path(folder) / "identity"
        load_or_create(path).close()
        daemon = await Daemon.start(DaemonSettings(path, hosts=(), map_port=False))
        try:
            tries = [_ask(daemon, peer, address) for peer, address in wanted]
            answers = await asyncio.gather(*tries, return_exceptions=True)
        finally:
            await daemon.stop()
    found = [answer for answer in answers if isinstance(answer, bytes)]
    if len(set(found)) > 1:
        raise UsageError("these addresses belong to different runs", "give those of one run")
    if not found:
        raise NobodyAnswers(*_why(addresses, answers))
    parse(found[0])
    return found[0]


async def _ask(daemon: Daemon, peer: bytes, address: str) -> bytes:
    deadline = Deadline.after(ASK_S)
    stream = await daemon.transport.dial(peer, [address], deadline)
    async with Channel(stream, deadline) as channel:
        await messages.send(channel, messages.Hello())
        hello, _ = await messages.receive(channel, messages.HelloReply)
        await messages.send(channel, messages.RunRequest(run=hello.run))
        _, head = await messages.receive(channel, messages.RunReply)
        text = bytes(await channel.receive_bytes(head, hello.run))
    assert content_digest(text) == hello.run
    return text


def _why(addresses: Sequence[str], answers: Sequence[object]) -> tuple[str, str]:
    """One line for each address, and what to do."""
    lines = []
    for address, answer in zip(addresses, answers, strict=True):
        reason = answer.message if isinstance(answer, WireError) else repr(answer)
        lines.append(f"{address}: {reason}")
    message = "no peer answers: " + "; ".join(lines)
    return message, "check that its host is up and the address is whole; ask for another peer's"
