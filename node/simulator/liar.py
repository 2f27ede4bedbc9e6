"""Replicas that lie: each falsifies the update that it sends.

For the simulator and for tests of real swarms (`tests.support.liar` is `blockswarm join` with one).
"""

from __future__ import annotations

import enum
from dataclasses import replace

import numpy as np

from node.replica.replica import Replica
from protocol.limits import PEER_ID_BYTES
from swarm.consensus.feedback import Unsent
from swarm.consensus.fixed_point import QUANTUM_BITS, FixedUpdate
from swarm.consensus.log import ConsensusLog
from swarm.learning.flat import Floats
from swarm.rounds import actions as act

HEADER_BYTES = 2 + 8 + PEER_ID_BYTES  # block, round, sender
HEAD_BIAS_AT = 256 * 32  # weights are in the order of their names: after an embedding of width 32


class Lie(enum.Enum):
    SIGN_FLIP = "sign-flip"
    SCALE = "scale"
    NOISE = "noise"
    NAN = "nan"
    MALFORMED = "malformed"
    REPLAY = "replay"
    COPY = "copy"
    OTHER_BLOCK = "other-block"
    OVERSIZED = "oversized"
    STALL = "stall"
    POISON = "poison"
    BIAS = "bias"
    STALE = "stale"  # its first update, made anew in every round
    SILENT = "silent"  # announced, and never handed out
    TWO_FACED = "two-faced"  # different votes for different peers


class Liar(Replica):
    """What it keeps of its update is honest, so that it lies the same way in every round.

    But for STALL, POISON and BIAS, which nothing gives away: their log is in order, their norm an
    ordinary one. The first takes back the last step of the consensus; the second turns around what
    it learned, which stalls a block of two (what the honest one learns is undone, and learned
    again); the third makes it worse round by round.
    """

    lie = Lie.SCALE
    first: bytes = b""
    first_rest: Floats | None = None

    def encode(self, rest: Unsent, log: ConsensusLog, number: int) -> tuple[bytes, FixedUpdate]:
        # Consistent with themselves, and as long as is allowed.
        if self.lie is Lie.STALL:
            return super().encode(self._last_step_back(rest, log), log, number)
        if self.lie is Lie.POISON:
            return super().encode(rest.times(-4.0), log, number)
        if self.lie is Lie.BIAS:
            nothing = np.zeros(rest.size, dtype=np.int32)
            return super().encode(Unsent(_against_spaces(rest.dense()), nothing), log, number)
        payload, update = super().encode(rest, log, number)
        self.first = self.first or payload
        if self.first_rest is None:
            self.first_rest = rest.dense()
        return self.falsified(payload, rest.dense(), number), update

    def _last_step_back(self, rest: Unsent, log: ConsensusLog) -> Unsent:
        """Twice, as the other one of two has its half of the mean."""
        made = self.consensus.steps.get(log.head.digest)
        if made is None:
            return rest
        back = (made.dense() * -(2.0 ** (1 - QUANTUM_BITS))).astype(np.float32)
        return Unsent(back, np.zeros(rest.size, dtype=np.int32))

    def _carry_out_one(self, action: act.Action) -> None:
        match self.lie, action:
            case Lie.TWO_FACED, act.SendVote(vote, to):
                super()._carry_out_one(act.SendVote(vote, to[::2]))
                super()._carry_out_one(act.SendVote(replace(vote, listed=()), to[1::2]))
            case Lie.SILENT, act.PublishRecord(number):
                super()._carry_out_one(action)
                self.exchange.forget_before(number + 1)
            case _:
                super()._carry_out_one(action)

    def falsified(self, payload: bytes, rest: Floats, number: int) -> bytes:
        codec, block, me = self.settings.codec, self.settings.block, self.identity.peer_id
        match self.lie:
            case Lie.SIGN_FLIP:
                return codec.encode(-rest, block, number, me)[0]
            case Lie.SCALE:
                return codec.encode(rest * np.float32(100), block, number, me)[0]
            case Lie.NOISE:
                noise = np.random.default_rng(number).normal(size=len(rest)) * rest.std()
                return codec.encode(noise.astype(np.float32), block, number, me)[0]
            case Lie.NAN:  # every four bytes of it are the float NaN
                body = b"\x00\x00\xc0\x7f" * (len(payload) // 4)
                return payload[: HEADER_BYTES + 8] + body[: len(payload) - HEADER_BYTES - 8]
            case Lie.MALFORMED:
                return payload[:HEADER_BYTES] + payload[HEADER_BYTES:][::-1]
            case Lie.REPLAY:
                return self.first
            case Lie.COPY:  # hands in what another peer made
                return payload[:10] + bytes(PEER_ID_BYTES) + payload[HEADER_BYTES:]
            case Lie.STALE if self.first_rest is not None:
                return codec.encode(self.first_rest, block, number, me)[0]
            case Lie.SILENT | Lie.TWO_FACED:
                return payload
            case Lie.OTHER_BLOCK:
                return codec.encode(rest, block + 1, number, me)[0]
            case _:
                return payload + bytes(codec.max_bytes_at(number) + 1 - len(payload))


def _against_spaces(rest: Floats) -> Floats:
    """All of the norm on one weight: in the blocks of the live tests, the bias of the space."""
    update = np.zeros_like(rest)
    update[HEAD_BIAS_AT + ord(" ") if len(rest) > HEAD_BIAS_AT else 0] = -1.0
    return update


def liar(lie: Lie) -> type[Liar]:
    return type("Liar", (Liar,), {"lie": lie})
