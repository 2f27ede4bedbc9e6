"""Send a computed sweep on to the next host, or its result to the client.

A block that no host takes is left out if other blocks remain to compose; otherwise the client is
told of the failure.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import Protocol

from node.network.network import Network
from node.serving.compute import outcome_of, parcel_of
from node.serving.handover import Accused, Crowded, Handover, NoHost, NoSession
from node.serving.parts import Begun
from protocol.errors import WireError
from protocol.frames import Busy
from protocol.limits import BLOCK_NONE, TEXT_MAX_BYTES
from protocol.parcel import Outcome, pack_outcome, pack_parcel
from protocol.serving import Sweep, SweepFailed, SweepResult, Trouble
from swarm.run import ModelShape
from swarm.writing.sweep import Passage

_log = logging.getLogger(__name__)

BUSY_SHARE = 0.8  # share of the time left to wait for a busy host; the rest is to tell the client


class CarriedJob(Protocol):
    """The part of `queue.Job` that is needed here."""

    sweep: Sweep
    end_s: float
    handed: asyncio.Event

    @property
    def client(self) -> bytes: ...

    def moved(self) -> None: ...


class Carrier:
    """Sends one host's computed sweeps on."""

    def __init__(self, network: Network, shape: ModelShape) -> None:
        self.network, self.shape = network, shape
        self.handover = Handover(network)

    async def close(self) -> None:
        await self.handover.close()

    def with_client(self, job: CarriedJob) -> Sweep:
        return replace(job.sweep, client=job.client)

    async def carry(self, job: CarriedJob, passage: Passage) -> None:
        """Send on to the next block that a host takes, or deliver the result to the client."""
        sweep = self._behind(job, passage)
        hops = sweep.hops()
        for place in range(sweep.place + 1, len(hops)):
            left_s = job.end_s - time.monotonic()
            if left_s <= 0:
                return
            onward = replace(sweep, place=place, block=hops[place].block, budget_s=left_s)
            payload = pack_parcel(onward, self.shape.width, parcel_of(onward, passage))
            end_s = time.monotonic() + BUSY_SHARE * left_s
            try:
                await self.handover.to_any(
                    hops[place], onward, payload, end_s, job.handed.set, job.moved
                )
                return
            except NoSession as error:
                await self.fail(onward, Trouble.NO_SESSION, str(error), b"")
                return
            except Crowded as error:
                await self.fail(onward, Trouble.BUSY, str(error), b"")
                return
            except Accused:
                return
            except NoHost as error:
                later = sum(hop.weight for hop in hops[place + 1 :])
                # After joint denoising there is an output, whatever the blocks' weights.
                weighed = passage.weight + later > 0 or passage.denoised is not None
                if sweep.start or not weighed:
                    await self.fail(onward, Trouble.NOBODY, str(error), b"")
                    return
                sweep = replace(sweep, missing=(*sweep.missing, hops[place].block))
        await self._deliver(sweep, outcome_of(sweep, passage))

    def _behind(self, job: CarriedJob, passage: Passage) -> Sweep:
        """The sweep's header as it leaves this host."""
        return replace(
            self.with_client(job),
            path=(*job.sweep.path, self.network.peer_id),
            weight=passage.weight,
            hidden=int(self.shape.relays),
        )

    async def carry_part(self, job: CarriedJob, part: int, passage: Passage, begun: Begun) -> None:
        """Send one part of a sweep to the next block's first host; at the last host, deliver the
        result after the last part. To be called in the order of the parts.

        Any failure is reported to the client, which sends the sweep again in one piece: only that
        can be handed to another replica.
        """
        sweep = replace(self._behind(job, passage), part=part)
        hops, last = sweep.hops(), part == sweep.parts - 1
        if sweep.place + 1 == len(hops):
            begun.results.append(outcome_of(sweep, passage))
            if last:
                await self._deliver(sweep, begun.result())
            return
        hop, left_s = hops[sweep.place + 1], job.end_s - time.monotonic()
        if left_s <= 0:
            return
        onward = replace(sweep, place=sweep.place + 1, block=hop.block, budget_s=left_s)
        payload = pack_parcel(onward, self.shape.width, parcel_of(onward, passage))
        end_s = time.monotonic() + BUSY_SHARE * left_s
        taken = job.handed.set if last else job.moved
        try:
            await self.handover.part(hop, onward, payload, end_s, begun.line, taken)
        except (Busy, Crowded) as error:
            await self.fail(onward, Trouble.BUSY, str(error), b"")
        except WireError as error:
            await self.fail(onward, Trouble.IN_PARTS, str(error), b"")

    async def _deliver(self, sweep: Sweep, outcome: Outcome) -> None:
        result = SweepResult(sweep=sweep.sweep, path=sweep.path, missing=sweep.missing)
        payload = pack_outcome(sweep, outcome)
        try:
            await self.handover.tell(sweep.client, result, payload)
        except WireError as error:
            _log.info("a client did not take its result: %s", error)

    async def fail(self, sweep: Sweep, trouble: Trouble, reason: str, blamed: bytes) -> None:
        """Tell the client that its sweep failed."""
        printable = "".join(c for c in reason if c.isascii() and c.isprintable())
        message = SweepFailed(
            sweep=sweep.sweep,
            trouble=int(trouble),
            block=BLOCK_NONE if trouble == Trouble.GARBAGE else sweep.block,
            blamed=blamed,
            reason=printable[:TEXT_MAX_BYTES],
        )
        try:
            await self.handover.tell(sweep.client, message)
        except WireError as error:
            _log.info("a client did not hear of a failure: %s", error)
