"""A host's side of serving: its blocks' versions, the queue before them, sessions, what it answers.

Decides what is taken in (bounded in length, count, memory and time; beyond that `busy`), which
waiting sweeps go through a block together, and how long caches live. The arithmetic is
`swarm.sweep`'s, the way to the next host `sweep_handover`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from node.network import Network
from node.service import Reply
from node.sweep_carry import Carrier
from node.sweep_compute import Session, compute
from protocol.errors import UsageError, WireError
from protocol.frames import Busy, Refused
from protocol.messages import ErrorCode
from protocol.parcel import Garbage, Parcel, parcel_bytes, unpack_parcel
from protocol.serving import (
    Hop,
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
from swarm.composition import default_weights
from swarm.model import Block
from swarm.run import Run

_log = logging.getLogger(__name__)

VERSIONS_KEPT = 2  # of each block: a request that pinned the one before still finds it
WAITING_MAX = 32  # sweeps in the queue
HELD_MAX_BYTES = 256 << 20  # payloads of all sweeps that are here
BATCH_MAX = 16  # sweeps that go through a block together
SESSIONS_MAX = 64
SESSIONS_MAX_BYTES = 1 << 30  # keys and values of all sessions with full contexts
SESSION_IDLE_S = 60.0
_FIRST_GUESS_S = 0.1
_MEMORY = 0.2


@dataclass(frozen=True)
class Served:
    """One version of one block, ready to compute."""

    version: Version
    module: Block


@dataclass(eq=False)
class Job:
    """A sweep that is here: waiting, computed, or on its way to the next host."""

    sweep: Sweep
    parcel: Parcel
    caller: bytes
    end_s: float
    size_bytes: int
    handed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def hop(self) -> Hop:
        return self.sweep.hops()[self.sweep.place]

    @property
    def client(self) -> bytes:
        return self.sweep.client or self.caller  # at the first place the caller is the client

    @property
    def shape(self) -> tuple[object, ...]:
        """Sweeps of one shape can go through a block together. One with a cache goes alone."""
        s = self.sweep
        if s.mode == Mode.VERIFY:
            return (s.sweep,)
        return (self.hop.digest, self.hop.weight, s.place == 0, s.hidden, s.weight > 0,
                s.context, s.drafts, s.length)  # fmt: skip


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
        if run.training.objective == "edm":
            raise UsageError(
                "blocks of the edm objective cannot be served: they need z at every position",
                "serve a model that was trained with --objective bayes or plain",
            )
        self.network, self.run_id, self.run = network, run_id, run
        self.weights = weights or default_weights(run)
        self.temperature, self.versions_kept = temperature, versions_kept
        self.carrier = Carrier(network, run.model)
        self.usual_s = _FIRST_GUESS_S
        self._served: OrderedDict[bytes, Served] = OrderedDict()
        self._waiting: deque[Job] = deque()
        self._jobs: dict[bytes, Job] = {}
        self._sessions: OrderedDict[tuple[bytes, bytes, bytes], Session] = OrderedDict()
        self._sessions_max = max(2, min(SESSIONS_MAX, SESSIONS_MAX_BYTES // session_bytes(run)))
        self._held_bytes = 0
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="serving")
        self._worker: asyncio.Task[None] | None = None
        self._carrying: set[asyncio.Task[None]] = set()

    # --- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        service = self.network.service
        service.serve(ServingRequest, self._describe)
        service.serve(SweepWait, self._wait)
        service.take(Sweep, self._admit, self._take)
        self._worker = asyncio.create_task(self._work())

    async def stop(self) -> None:
        tasks = [*self._carrying, *([self._worker] if self._worker else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.carrier.close()
        self._thread.shutdown(wait=True)

    def offer(self, block: int, round_: int, digest: bytes, module: Block) -> None:
        """Serve this version from now on; of each block the newest few are kept."""
        self._served.pop(digest, None)
        self._served[digest] = Served(Version(block, round_, digest), module)
        of_block = [d for d, served in self._served.items() if served.version.block == block]
        for old in of_block[: -self.versions_kept]:
            del self._served[old]

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(sorted({served.version.block for served in self._served.values()}))

    # --- what is answered -----------------------------------------------------------------------

    async def _describe(self, request: ServingRequest, _: bytes) -> Reply:
        self._check_run(request.run)
        reply = ServingReply(
            versions=tuple(served.version.pack() for served in self._served.values()),
            waiting=len(self._waiting),
            usual_s=min(self.usual_s, 3600.0),
            weights=self.weights,
            temperature=self.temperature,
        )
        return Reply(reply)

    @contextlib.contextmanager
    def _admitted(self, size_bytes: int) -> Iterator[None]:
        self._held_bytes += size_bytes
        try:
            yield
        finally:
            self._held_bytes -= size_bytes

    def _admit(
        self, sweep: Sweep, size_bytes: int, caller: bytes
    ) -> contextlib.AbstractContextManager[None]:
        """Everything that can be said before the payload is read."""
        self._check_run(sweep.run)
        sweep.check()
        shape, hop = self.run.model, sweep.hops()[sweep.place]
        if sweep.start + sweep.context + sweep.length > shape.context:
            raise Refused(ErrorCode.NOT_ALLOWED, f"the context is {shape.context} bytes")
        if size_bytes != parcel_bytes(sweep, shape.width):
            raise Refused(ErrorCode.NOT_ALLOWED, "a payload of another size than its header says")
        served = self._served.get(hop.digest)
        if served is None or served.version.block != hop.block:
            raise Refused(ErrorCode.NOT_FOUND, "this version is not here (any more)")
        if sweep.start and self._session_of(sweep, sweep.client or caller) is None:
            raise Refused(ErrorCode.NOT_FOUND, "no such session here (any more)")
        if len(self._waiting) >= WAITING_MAX or self._held_bytes + size_bytes > HELD_MAX_BYTES:
            raise Busy(min(max(self.usual_s * len(self._waiting), 0.05), 5.0))
        return self._admitted(size_bytes)

    async def _take(self, sweep: Sweep, payload: bytes, caller: bytes) -> Reply:
        try:
            parcel = unpack_parcel(sweep, self.run.model.width, payload)
        except Garbage as garbage:
            if sweep.place:
                report = self.carrier.fail(sweep, Trouble.GARBAGE, str(garbage), caller)
                self._spawn(report)
            raise
        job = Job(sweep, parcel, caller, time.monotonic() + sweep.budget_s, len(payload))
        self._jobs[sweep.sweep] = job
        self._held_bytes += job.size_bytes
        self._waiting.append(job)
        self._wake.set()
        return Reply(SweepTaken())

    async def _wait(self, request: SweepWait, _: bytes) -> Reply:
        job = self._jobs.get(request.sweep)
        return Reply(SweepHanded(handed=int(job is None or job.handed.is_set())))

    def _check_run(self, run_id: bytes) -> None:
        if run_id != self.run_id:
            raise Refused(ErrorCode.WRONG_RUN, "this peer is part of another run")

    # --- the queue ------------------------------------------------------------------------------

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not self._waiting:
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SESSION_IDLE_S):
                        await self._wake.wait()
                self._forget_sessions()
            jobs = self._next_batch()
            if not jobs:
                continue
            began_s = time.monotonic()
            try:
                served = self._served[jobs[0].hop.digest]
                session = self._session_for(jobs[0])
                parcels = await loop.run_in_executor(
                    self._thread, compute, served.module, [(j.sweep, j.parcel) for j in jobs],
                    session,
                )  # fmt: skip
            except Exception as error:
                self._failed(jobs, error)
                continue
            spent_s = (time.monotonic() - began_s) / len(jobs)
            self.usual_s += _MEMORY * (spent_s - self.usual_s)
            for job, passage in zip(jobs, parcels, strict=True):
                self._spawn(self._carry(job, self.carrier.carry(job, passage)))

    def _next_batch(self) -> list[Job]:
        """The oldest waiting sweep, and those that can go with it. Late ones are dropped."""
        now_s = time.monotonic()
        for job in [job for job in self._waiting if job.end_s <= now_s]:
            self._waiting.remove(job)
            self._release(job)
        if not self._waiting:
            return []
        shape = self._waiting[0].shape
        batch = [job for job in self._waiting if job.shape == shape][:BATCH_MAX]
        for job in batch:
            self._waiting.remove(job)
        return batch

    def _failed(self, jobs: list[Job], error: Exception) -> None:
        """A version or session that went meanwhile, or a fault of ours: the client hears it."""
        trouble = Trouble.NO_SESSION if isinstance(error, WireError) else Trouble.INTERNAL
        if trouble == Trouble.INTERNAL and not isinstance(error, KeyError):
            _log.exception("a block could not be computed", exc_info=error)
        for job in jobs:
            sweep = self.carrier.with_client(job)
            report = self.carrier.fail(sweep, trouble, "it could not be computed", b"")
            self._spawn(self._carry(job, report))

    async def _carry(self, job: Job, work: Awaitable[None]) -> None:
        try:
            await work
        finally:
            self._release(job)

    def _release(self, job: Job) -> None:
        job.handed.set()
        self._held_bytes -= job.size_bytes
        if self._jobs.get(job.sweep.sweep) is job:
            del self._jobs[job.sweep.sweep]

    # --- sessions -------------------------------------------------------------------------------

    def _session_of(self, sweep: Sweep, client: bytes) -> Session | None:
        key = (client, sweep.session, sweep.hops()[sweep.place].digest)
        session = self._sessions.get(key)
        return session if session is not None and session.length >= sweep.start else None

    def _session_for(self, job: Job) -> Session | None:
        """The caches of a verification; new ones if it begins at position 0."""
        sweep = job.sweep
        if sweep.mode != Mode.VERIFY:
            return None
        self._forget_sessions()
        session = self._session_of(sweep, job.client)
        if session is None:
            if sweep.start:
                raise Refused(ErrorCode.NOT_FOUND, "no such session here (any more)")
            session = Session(self._served[job.hop.digest].module.new_cache())
        key = (job.client, sweep.session, job.hop.digest)
        session.used_s = time.monotonic()
        self._sessions[key] = session
        self._sessions.move_to_end(key)
        while len(self._sessions) > self._sessions_max:
            self._sessions.popitem(last=False)
        return session

    def _forget_sessions(self) -> None:
        """Those of clients that went away, or are through."""
        oldest_s = time.monotonic() - SESSION_IDLE_S
        for key in [k for k, session in self._sessions.items() if session.used_s < oldest_s]:
            del self._sessions[key]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._carrying.add(task)
        task.add_done_callback(self._carried)

    def _carried(self, task: asyncio.Task[None]) -> None:
        self._carrying.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a sweep was lost", exc_info=error)


def session_bytes(run: Run) -> int:
    """Keys and values of one full context in one block."""
    shape = run.model
    return 2 * 4 * shape.layers * shape.width * shape.context
