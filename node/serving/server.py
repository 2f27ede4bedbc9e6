"""A host's side of serving: the block versions that it offers, and the admission of sweeps.

Sweeps are bounded in length, count, memory and waiting time; beyond that the answer is `busy`.
Computing admitted sweeps is `queue`'s task.
"""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from node.network.network import Network
from node.network.service import Reply
from node.serving.carry import Carrier
from node.serving.parts import PartsUnderWay
from node.serving.queue import Job, SweepQueue
from node.serving.sessions import HOLD_S, Key, Sessions
from protocol.errors import UsageError
from protocol.frames import Busy, Refused
from protocol.limits import SWEEP_HOPS_MAX
from protocol.messages import ErrorCode
from protocol.parcel import Garbage, parcel_bytes, unpack_parcel
from protocol.serving import (
    Mode,
    ServingReply,
    ServingRequest,
    Sweep,
    SweepHanded,
    SweepTaken,
    SweepWait,
    Trouble,
    Version,
)
from swarm.learning.composition import default_weights
from swarm.learning.joint_denoising import JointDenoising
from swarm.learning.model import Block
from swarm.learning.noise import target_table
from swarm.run import Run

VERSIONS_KEPT = 2  # per block, so that requests for the previous version can still be served
BUILT_KEPT = 2  # modules kept of versions that are built on demand
WAITING_MAX = 32  # sweeps in the queue
HELD_MAX_BYTES = 256 << 20  # payloads of all sweeps that are here


def why_not_served(run: Run) -> str | None:
    """Why no host can serve this run, or None if it can be served."""
    if run.training.objective == "edm":
        return "blocks of the edm objective need z at every position and cannot be served"
    if run.model.blocks > SWEEP_HOPS_MAX:
        return (
            f"this run has {run.model.blocks} blocks and cannot be served: "
            f"a sweep goes through {SWEEP_HOPS_MAX} at most"
        )
    return None


def check_servable(run: Run) -> None:
    """Raise `UsageError` if the run cannot be served."""
    reason = why_not_served(run)
    if reason is not None:
        raise UsageError(
            reason, "let the assembled model write: blockswarm assemble, then blockswarm generate"
        )


Build = Callable[[], Block | None]  # in a thread; None if the version is gone for good


@dataclass(frozen=True)
class Served:
    """One version of one block: its module, or a function that builds it on demand."""

    version: Version
    module: Block | Build


class BlockServer:
    """Serves blocks on a network. `start` it, `offer` versions, `stop` it."""

    def __init__(
        self,
        network: Network,
        run_id: bytes,
        run: Run,
        weights: tuple[float, ...] = (),
        temperature: float = 1.0,
        versions_kept: int = VERSIONS_KEPT,
    ) -> None:
        check_servable(run)
        self.network, self.run_id, self.run = network, run_id, run
        self.weights = weights or default_weights(run)
        self.temperature, self.versions_kept = temperature, versions_kept
        self.carrier = Carrier(network, run.model)
        self.carrier.handover.keep = self._keep
        self.sessions, self.parts = Sessions(run), PartsUnderWay(run)
        self.joint: JointDenoising | None = None
        if run.denoises:
            self.joint = JointDenoising(run, target_table(run.seed, run.model.width))
        self.muted = False  # admit nothing new; admitted sweeps go on
        self.new_block: Callable[[int], None] = lambda block: None  # called at its first version
        self._served: OrderedDict[bytes, Served] = OrderedDict()
        self._built: OrderedDict[bytes, Block] = OrderedDict()  # only for the computing thread
        self.queue = SweepQueue(
            self.carrier, self.sessions, self.parts, self.joint, self._module_of
        )

    # --- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        service = self.network.service
        service.serve(ServingRequest, self._describe)
        service.serve(SweepWait, self._wait)
        service.take(Sweep, self._admit, self._take)
        self.queue.start()

    async def stop(self) -> None:
        await self.queue.stop()

    def offer(self, block: int, round_: int, digest: bytes, module: Block | Build) -> None:
        """Serve this version from now on; the newest `versions_kept` of each block are kept."""
        first = block not in self.blocks
        self._served.pop(digest, None)
        self._served[digest] = Served(Version(block, round_, digest), module)
        of_block = [d for d, served in self._served.items() if served.version.block == block]
        for old in of_block[: -self.versions_kept]:
            del self._served[old]
        if first:
            self.new_block(block)

    def serve_only(self, block: int) -> None:
        """Drop the versions of all other blocks, when a training host has moved to this one."""
        for digest in [d for d, s in self._served.items() if s.version.block != block]:
            del self._served[digest]

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(sorted({served.version.block for served in self._served.values()}))

    def _module_of(self, digest: bytes) -> Block | None:
        """The module of a version, built if need be. For the computing thread only."""
        for gone in [d for d in self._built if d not in self._served]:
            del self._built[gone]
        served = self._served.get(digest)
        if served is None:
            return None
        if isinstance(served.module, Block):
            return served.module
        module = self._built.pop(digest, None) or served.module()
        if module is not None:
            self._built[digest] = module
            if len(self._built) > BUILT_KEPT:
                self._built.popitem(last=False)
        return module

    # --- what is answered -----------------------------------------------------------------------

    async def _describe(self, request: ServingRequest, _: bytes) -> Reply:
        self._check_run(request.run)
        offered = () if self.muted else self._served.values()
        reply = ServingReply(
            versions=tuple(served.version.pack() for served in offered),
            waiting=len(self.queue.waiting),
            usual_s=min(self.queue.usual_s, 3600.0),
            weights=self.weights,
            temperature=self.temperature,
        )
        return Reply(reply)

    def _admit(
        self, sweep: Sweep, size_bytes: int, caller: bytes
    ) -> contextlib.AbstractContextManager[None]:
        """Check everything that can be checked before the payload is read."""
        self._check_run(sweep.run)
        sweep.check()
        shape, hop = self.run.model, sweep.hops()[sweep.place]
        if sweep.start + sweep.context + sweep.length > shape.context:
            raise Refused(ErrorCode.NOT_ALLOWED, f"the context is {shape.context} bytes")
        if sweep.mode == Mode.DENOISE and self.joint is None:
            raise Refused(ErrorCode.NOT_ALLOWED, "these blocks were not trained to denoise")
        if size_bytes != parcel_bytes(sweep, shape.width):
            raise Refused(ErrorCode.NOT_ALLOWED, "a payload of another size than its header says")
        served = self._served.get(hop.digest)
        if self.muted:
            raise Refused(ErrorCode.NOT_FOUND, "this host does not serve at the moment")
        if served is None or served.version.block != hop.block:
            raise Refused(ErrorCode.NOT_FOUND, "this version is not here (any more)")
        self._admit_session(sweep, (sweep.client or caller, sweep.session, hop.digest))
        self._admit_part(sweep, (sweep.client, sweep.sweep, hop.digest))
        wait_s = self.queue.wait_s
        full = len(self.queue.waiting) >= WAITING_MAX or wait_s > sweep.budget_s
        if full or self.queue.held_bytes + size_bytes > HELD_MAX_BYTES:
            raise Busy(min(max(wait_s, 0.05), 5.0))
        return self.queue.holding(size_bytes)

    def _admit_session(self, sweep: Sweep, key: Key) -> None:
        if sweep.start and self.sessions.find(key, sweep.start) is None:
            raise Refused(ErrorCode.NOT_FOUND, "no such session here (any more)")
        if sweep.session and not sweep.start and self.sessions.full:
            raise Busy(HOLD_S)

    def _admit_part(self, sweep: Sweep, key: Key) -> None:
        if sweep.place and sweep.parts > 1:
            if not self.parts.expects(key, sweep.part):
                raise Refused(ErrorCode.NOT_FOUND, "the parts before it are not here (any more)")
            if not sweep.part and not self.parts.room(sweep):
                raise Busy(HOLD_S)

    async def _take(self, sweep: Sweep, payload: bytes, caller: bytes) -> Reply:
        try:
            parcel = unpack_parcel(sweep, self.run.model.width, payload)
        except Garbage as garbage:
            if sweep.place:
                report = self.carrier.fail(sweep, Trouble.GARBAGE, str(garbage), caller)
                self.queue.tasks.spawn(report)
            raise
        job = Job(sweep, parcel, caller, time.monotonic() + sweep.budget_s, len(payload))
        if sweep.place and sweep.parts > 1:
            key = (sweep.client, sweep.sweep, job.hop.digest)
            if not self.parts.expects(key, sweep.part):  # they were dropped during this upload
                raise Refused(ErrorCode.NOT_FOUND, "the parts before it are not here (any more)")
            job.begun = self.parts.take(key, sweep, job.end_s)
        self.queue.put(job)
        return Reply(SweepTaken())

    async def _keep(self, sweep: Sweep, payload: bytes) -> None:
        """Take a sweep whose next block we serve too, under the same admission rules."""
        before, me = self.queue.jobs.get(sweep.sweep), self.network.peer_id
        with self._admit(sweep, len(payload), me):
            await self._take(sweep, payload, me)
        if before is not None:  # the progress that the sender sees must not go backwards
            kept = self.queue.jobs[sweep.sweep]
            kept.moves = before.moves
            kept.moved()

    async def _wait(self, request: SweepWait, _: bytes) -> Reply:
        job = self.queue.jobs.get(request.sweep)
        if job is None:
            return Reply(SweepHanded(handed=1))
        return Reply(SweepHanded(handed=int(job.handed.is_set()), moves=job.moves))

    def _check_run(self, run_id: bytes) -> None:
        if run_id != self.run_id:
            raise Refused(ErrorCode.WRONG_RUN, "this peer is part of another run")
