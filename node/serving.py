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
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from node.network import Network
from node.service import Reply
from node.sweep_carry import Carrier
from node.sweep_compute import Session, compute, compute_joint, compute_parts
from node.sweep_parts import Begun, PartsUnderWay
from node.sweep_sessions import HOLD_S, Key, Sessions
from protocol.errors import UsageError
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
from swarm.denoise import JointDenoising
from swarm.model import Block
from swarm.noise import target_table
from swarm.run import Run
from swarm.sweep import Passage, joined

_log = logging.getLogger(__name__)
R = TypeVar("R")

VERSIONS_KEPT = 2  # of each block: a request that pinned the one before still finds it
WAITING_MAX = 32  # sweeps in the queue
HELD_MAX_BYTES = 256 << 20  # payloads of all sweeps that are here
STRETCH = 16  # bytes of a draft between two signs of life
BATCH_MAX = 16  # sweeps that go through a block together
MOVES_MAX = 65535
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
    moves: int = 0  # how often it came nearer to being handed on
    begun: Begun | None = None  # of a sweep in parts, but for its drafter

    def moved(self) -> None:
        self.moves = min(self.moves + 1, MOVES_MAX)

    @property
    def hop(self) -> Hop:
        return self.sweep.hops()[self.sweep.place]

    @property
    def client(self) -> bytes:
        return self.sweep.client or self.caller  # at the first place the caller is the client

    @property
    def session(self) -> tuple[bytes, bytes, bytes]:
        """Whose caches it goes on from: a client's, of one text, for one version."""
        return (self.client, self.sweep.session, self.hop.digest)

    @property
    def shape(self) -> tuple[object, ...]:
        """Sweeps of one shape can go through a block together.

        With caches that means: as many positions in them, since a batch has one mask.
        """
        s = self.sweep
        return (s.mode, self.hop.digest, self.hop.weight, s.place == 0, s.hidden, s.weight > 0,
                s.start, s.context, s.drafts, s.length, s.part, s.parts)  # fmt: skip

    @property
    def next(self) -> bool:
        """Whether all parts before it have been computed."""
        return self.begun is None or self.begun.computed == self.sweep.part


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
        self.carrier.handover.keep = self._keep
        self.joint: JointDenoising | None = None
        if run.denoises:
            self.joint = JointDenoising(run, target_table(run.seed, run.model.width))
        self.usual_s = _FIRST_GUESS_S
        self._served: OrderedDict[bytes, Served] = OrderedDict()
        self._waiting: deque[Job] = deque()
        self._jobs: dict[bytes, Job] = {}
        self.sessions = Sessions(run)
        self.parts = PartsUnderWay(run)
        self._held_bytes = 0
        self.muted = False  # takes nothing new; what is here goes on
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
        await asyncio.to_thread(self._thread.shutdown)  # what it computes now it ends

    def offer(self, block: int, round_: int, digest: bytes, module: Block) -> None:
        """Serve this version from now on; of each block the newest few are kept."""
        self._served.pop(digest, None)
        self._served[digest] = Served(Version(block, round_, digest), module)
        of_block = [d for d, served in self._served.items() if served.version.block == block]
        for old in of_block[: -self.versions_kept]:
            del self._served[old]

    def serve_only(self, block: int) -> None:
        """Drop the versions of all other blocks: a host that trains has moved to this one."""
        for digest in [d for d, s in self._served.items() if s.version.block != block]:
            del self._served[digest]

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(sorted({served.version.block for served in self._served.values()}))

    # --- what is answered -----------------------------------------------------------------------

    async def _describe(self, request: ServingRequest, _: bytes) -> Reply:
        self._check_run(request.run)
        offered = () if self.muted else self._served.values()
        reply = ServingReply(
            versions=tuple(served.version.pack() for served in offered),
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
        queue_s = self.usual_s * len(self._waiting)
        full = len(self._waiting) >= WAITING_MAX or queue_s > sweep.budget_s
        if full or self._held_bytes + size_bytes > HELD_MAX_BYTES:
            raise Busy(min(max(queue_s, 0.05), 5.0))
        return self._admitted(size_bytes)

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
                self._spawn(report)
            raise
        job = Job(sweep, parcel, caller, time.monotonic() + sweep.budget_s, len(payload))
        if sweep.place and sweep.parts > 1:
            key = (sweep.client, sweep.sweep, job.hop.digest)
            if not self.parts.expects(key, sweep.part):  # it was forgotten while this one came
                raise Refused(ErrorCode.NOT_FOUND, "the parts before it are not here (any more)")
            job.begun = self.parts.take(key, sweep, job.end_s)
        self._jobs[sweep.sweep] = job
        self._held_bytes += job.size_bytes
        self._waiting.append(job)
        self._wake.set()
        return Reply(SweepTaken())

    async def _keep(self, sweep: Sweep, payload: bytes) -> None:
        """The next block is here, too: into our own queue, by the rules for everybody's."""
        before, me = self._jobs.get(sweep.sweep), self.network.peer_id
        with self._admit(sweep, len(payload), me):
            await self._take(sweep, payload, me)
        if before is not None:  # whoever waits for it must not see it move backwards
            self._jobs[sweep.sweep].moves = before.moves
            self._jobs[sweep.sweep].moved()

    async def _wait(self, request: SweepWait, _: bytes) -> Reply:
        job = self._jobs.get(request.sweep)
        if job is None:
            return Reply(SweepHanded(handed=1))
        return Reply(SweepHanded(handed=int(job.handed.is_set()), moves=job.moves))

    def _check_run(self, run_id: bytes) -> None:
        if run_id != self.run_id:
            raise Refused(ErrorCode.WRONG_RUN, "this peer is part of another run")

    # --- the queue ------------------------------------------------------------------------------

    async def _work(self) -> None:
        while True:
            if not self._waiting:
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.sessions.idle_s):
                        await self._wake.wait()
            self.sessions.forget_idle()
            self.parts.forget_late()
            jobs = self._next_batch()
            if jobs:
                await self._compute(jobs)

    async def _compute(self, jobs: list[Job]) -> None:
        """Through the block, all at once; then each on its way."""
        began_s, first = time.monotonic(), jobs[0].sweep
        served = self._served.get(jobs[0].hop.digest)
        if served is None:
            return self._fail(jobs, Trouble.NO_SESSION)  # a newer version has replaced it
        jobs, sessions = self._with_sessions(jobs, served.module)
        if not jobs:
            return
        work = [(job.sweep, job.parcel) for job in jobs]
        try:
            if first.mode == Mode.ONE_SWEEP and first.place == 0:
                await self._draft_parts(jobs, served.module, work)
            else:
                passages = await self._in_thread(self._pass, served.module, work, sessions)
                self._send_on(jobs, passages)
        except Exception as error:
            _log.exception("a block could not be computed", exc_info=error)
            return self._fail(jobs, Trouble.INTERNAL)
        spent_s = (time.monotonic() - began_s) / len(jobs)
        if first.place:
            spent_s *= first.parts  # what the whole takes
        self.usual_s += _MEMORY * (spent_s - self.usual_s)

    async def _in_thread(self, work: Callable[..., R], *given: Any) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *given)

    def _send_on(self, jobs: list[Job], passages: list[Passage]) -> None:
        for job in (*jobs, *self._waiting):
            job.moved()
        for job, passage in zip(jobs, passages, strict=True):
            carry = partial(self.carrier.carry, job, passage)
            if job.begun is not None:
                job.begun.computed += 1
                carry = partial(self.carrier.carry_part, job, job.sweep.part, passage, job.begun)
            self._spawn(self._carry(job, carry))

    async def _draft_parts(
        self, jobs: list[Job], module: Block, work: list[tuple[Sweep, Parcel]]
    ) -> None:
        """Each part is on its way while the next is written. What travels in one piece is written
        in stretches as well: many drafts take long, and whoever waits must see that they grow."""
        sweep, ways = work[0][0], [Begun() for _ in jobs]
        pieces = sweep.parts if sweep.parts > 1 else -(-sweep.length // STRETCH)
        drafting, made = compute_parts(module, work, pieces), []
        for part in range(pieces):
            passages = await self._in_thread(next, drafting)
            for job in (*jobs, *self._waiting):
                job.moved()
            if sweep.parts == 1:
                made.append(passages)
                continue
            for job, passage, begun in zip(jobs, passages, ways, strict=True):
                carry = partial(self.carrier.carry_part, job, part, passage, begun)
                self._spawn(self._carry(job, carry) if part == pieces - 1 else carry())
        drafting.close()
        if made:
            self._send_on(jobs, [joined(parts) for parts in zip(*made, strict=True)])

    def _pass(
        self, module: Block, work: list[tuple[Sweep, Parcel]], sessions: list[Session]
    ) -> list[Passage]:
        if self.joint is not None and work[0][0].mode == Mode.DENOISE:
            return compute_joint(self.joint, module, work)
        return compute(module, work, sessions)

    def _with_sessions(self, jobs: list[Job], module: Block) -> tuple[list[Job], list[Session]]:
        """The verifications with their caches; those whose caches went meanwhile fail."""
        if jobs[0].begun is not None:
            return jobs, [job.begun.session for job in jobs if job.begun is not None]
        if not jobs[0].sweep.session:
            return jobs, []
        able, sessions = [], []
        for job in jobs:
            session = self.sessions.open(job.session, job.sweep.start, module.new_cache)
            if session is None:
                self._fail([job], Trouble.NO_SESSION)
            else:
                able.append(job)
                sessions.append(session)
        return able, sessions

    def _next_batch(self) -> list[Job]:
        """The oldest waiting sweep, and those that can go with it. Late ones are dropped."""
        now_s = time.monotonic()
        for job in [job for job in self._waiting if job.end_s <= now_s]:
            self._waiting.remove(job)
            self._release(job)
        while self._waiting and not self._waiting[0].next:
            self._release(self._waiting.popleft())  # the part before it came to nothing
        if not self._waiting:
            return []
        shape = self._waiting[0].shape
        batch: list[Job] = []
        for job in self._waiting:
            # A sweep that came twice (its sender took us for dead) must not meet itself.
            twice = job.sweep.session and any(job.session == other.session for other in batch)
            if job.shape == shape and job.next and not twice and len(batch) < BATCH_MAX:
                batch.append(job)
        for job in batch:
            self._waiting.remove(job)
        return batch

    def _fail(self, jobs: list[Job], trouble: Trouble) -> None:
        """The client hears that it has to begin again."""
        for job in jobs:
            sweep = self.carrier.with_client(job)
            report = partial(self.carrier.fail, sweep, trouble, "it could not be computed", b"")
            self._spawn(self._carry(job, report))

    async def _carry(self, job: Job, work: Callable[[], Awaitable[None]]) -> None:
        """`work` is made here: a task cancelled before its first step must not leave it behind."""
        try:
            await work()
        finally:
            self._release(job)

    def _release(self, job: Job) -> None:
        job.handed.set()
        self._held_bytes -= job.size_bytes
        if self._jobs.get(job.sweep.sweep) is job:
            del self._jobs[job.sweep.sweep]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._carrying.add(task)
        task.add_done_callback(self._carried)

    def _carried(self, task: asyncio.Task[None]) -> None:
        self._carrying.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a sweep was lost", exc_info=error)
