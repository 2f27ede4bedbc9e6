"""The live network as those see it who only ask: peers by their text, an answer or a `WireError`.

What fetching a log, following it and assembling need (`node.log.fetch.Peers`), so that they can be
tested without a network. Decides that such peers are asked again soon: their streams are kept.
"""

from __future__ import annotations

from typing import TypeVar

from node.network.network import Network
from protocol.identity import peer_from_text
from protocol.messages import Message

R = TypeVar("R", bound=Message)


class NetworkPeers:
    """`node.log.fetch.Peers` over the live network: peers by their text."""

    def __init__(self, network: Network) -> None:
        self.network = network

    async def ask(
        self,
        peer: str,
        request: Message,
        wanted: type[R],
        deadline_s: float,
        max_payload_bytes: int | None = None,
    ) -> tuple[R, bytes]:
        answer = await self.network.request(
            peer_from_text(peer),
            request,
            wanted,
            deadline_s=max(deadline_s, 0.05),  # one that is over is asked for and fails as late
            max_payload_bytes=max_payload_bytes,
            again_soon=True,
        )
        return answer.message, bytes(answer.payload)
