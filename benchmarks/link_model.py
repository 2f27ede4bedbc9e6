"""The documented overhead of libp2p and TCP/IP around frames."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LinkModel:
    """What libp2p (Noise, Yamux) and TCP/IP add to bytes of frames. An estimate.

    Noise seals at most 65519 bytes of plaintext into 2 bytes of length and 16 of tag; Yamux puts
    12 bytes before each piece; a TCP segment has 14 + 20 + 32 bytes of Ethernet, IPv4 and TCP
    with timestamps, and about every second one is acknowledged. Set `segment_bytes` to what the
    interface really counts: with segmentation offload that is up to 64 KiB, not 1448.
    """

    yamux_piece_bytes: int = 16384
    noise_piece_bytes: int = 65519
    segment_bytes: int = 1448
    packet_header_bytes: int = 66

    def on_the_wire_bytes(self, frame_bytes: int) -> int:
        """Bytes on the interface in the direction of the frames."""
        inner = frame_bytes + 12 * math.ceil(frame_bytes / self.yamux_piece_bytes)
        sealed = inner + 18 * math.ceil(inner / self.noise_piece_bytes)
        return sealed + self.packet_header_bytes * math.ceil(sealed / self.segment_bytes)

    def acknowledgement_bytes(self, frame_bytes: int) -> int:
        """Bytes on the interface in the other direction."""
        segments = math.ceil(self.on_the_wire_bytes(frame_bytes) / self.segment_bytes)
        return self.packet_header_bytes * math.ceil(segments / 2)
