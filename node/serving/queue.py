"""The sweeps at a host: a queue, batches of equal shape through a block, then on to the next host.

Late sweeps are dropped. Admission is `server`'s, the way on is `carry`'s, and the arithmetic is
`swarm.writing.sweep`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from node.machine.tasks import BackgroundTasks
from node.serving.carry import Carrier
from node.serving.compute import Session, compute, compute_joint, compute_parts
from node.serving.parts import Begun, PartsUnderWay
from node.serving.sessions import Sessions
from protocol.parcel import Parcel
from protocol.serving import Hop, Mode, Sweep, Trouble
from swarm.learning.joint_denoising import JointDenoising
from swarm.learning.model import Block
from swarm.writing.sweep import Passage, joined

_log = logging.getLogger(__name__)
R = TypeVar("R")

STRETCH = 16  # bytes of a draft after which progress is reported
BATCH_MAX = 16  # sweeps that go through a block together
MOVES_MAX = 65535
_FIRST_GUESS_S = 0.1
_MEMORY = 0.2


@dataclass(eq=False)
class Job:
    """A sweep at this host: waiting, being computed, or being handed on."""

    sweep: Sweep
    parcel: Parcel
    caller: bytes
    end_s: float
    size_bytes: int
    handed: asyncio.Event = field(default_factory=asyncio.Event)
    moves: int = 0  # progress counter; the sender watches it to tell a long queue from a stall
    begun: Begun | None = None  # of a sweep in parts, except at its drafter
    released: bool = False

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
        """The key of its caches: client, text and version."""
        return (self.client, self.sweep.session, self.hop.digest)

    @property
    def shape(self) -> tuple[object, ...]:
        """What sweeps must have in common to form a batch.

        That includes the length of their caches, since a batch has one mask.
        """
        s = self.sweep
        return (s.mode, self.hop.digest, self.hop.weight, s.place == 0, s.hidden, s.weight > 0,
                s.start, s.context, s.drafts, s.length, s.part, s.parts)  # fmt: skip

    @property
    def next(self) -> bool:
        """Whether all earlier parts of this sweep have been computed."""
        return self.begun is None or self.begun.computed == self.sweep.part


class SweepQueue:
    """One host's sweeps, and the thread that computes them.

    `module_of` maps a version's digest to its block, or None if it is gone. It is called in that
    thread, since it may have to build the block first.
    """

    def __init__(
        self,
        carrier: Carrier,
        sessions: Sessions,
        parts: PartsUnderWay,
        joint: JointDenoising | None,
        module_of: Callable[[bytes], Block | None],
    ) -> None:
        self.carrier, self.sessions, self.parts = carrier, sessions, parts
        self.joint, self.module_of = joint, module_of
        self.usual_s = _FIRST_GUESS_S  # moving average of a sweep's computing time
        self.waiting: deque[Job] = deque()
        self.jobs: dict[bytes, Job] = {}
        self.held_bytes = 0
        self.tasks = BackgroundTasks(_log, "a sweep was lost")
        self.worker: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="serving")

    def start(self) -> None:
        self.worker = asyncio.create_task(self._work())

    async def stop(self) -> None:
        await self.tasks.cancel(*([self.worker] if self.worker else []))
        await self.carrier.close()
        await asyncio.to_thread(self._thread.shutdown)  # the batch in progress is completed

    @contextlib.contextmanager
    def holding(self, size_bytes: int) -> Iterator[None]:
        """Count a payload as held while it is still being received."""
        self.held_bytes += size_bytes
        try:
            yield
        finally:
            self.held_bytes -= size_bytes

    @property
    def wait_s(self) -> float:
        """The expected wait of a sweep that is queued now."""
        return self.usual_s * len(self.waiting)

    def put(self, job: Job) -> None:
        self.jobs[job.sweep.sweep] = job
        self.held_bytes += job.size_bytes
        self.waiting.append(job)
        self._wake.set()

    async def _work(self) -> None:
        while True:
            if not self.waiting:
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
        """Pass a batch through its block, then send each sweep on."""
        began_s, first = time.monotonic(), jobs[0].sweep
        # All code is inside the try: an exception outside would end the worker, and the host would
        # go on taking sweeps without computing any.
        try:
            module = await self._in_thread(self.module_of, jobs[0].hop.digest)
            if module is None:
                return self._fail(jobs, Trouble.NO_SESSION)  # a newer version has replaced it
            jobs, sessions = self._with_sessions(jobs, module)
            if not jobs:
                return
            work = [(job.sweep, job.parcel) for job in jobs]
            if first.mode == Mode.ONE_SWEEP and first.place == 0:
                await self._draft_parts(jobs, module, work)
            else:
                passages = await self._in_thread(self._pass, module, work, sessions)
                self._send_on(jobs, passages)
        except Exception as error:
            _log.exception("a block could not be computed", exc_info=error)
            return self._fail(jobs, Trouble.INTERNAL)
        spent_s = (time.monotonic() - began_s) / len(jobs)
        if first.place:
            spent_s *= first.parts  # the time of the whole sweep, not of one part
        self.usual_s += _MEMORY * (spent_s - self.usual_s)

    async def _in_thread(self, work: Callable[..., R], *given: Any) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *given)

    def _send_on(self, jobs: list[Job], passages: list[Passage]) -> None:
        for job in (*jobs, *self.waiting):
            job.moved()
        for job, passage in zip(jobs, passages, strict=True):
            carry = partial(self.carrier.carry, job, passage)
            if job.begun is not None:
                job.begun.computed += 1
                carry = partial(self.carrier.carry_part, job, job.sweep.part, passage, job.begun)
            self.tasks.spawn(self._carry(job, carry))

    async def _draft_parts(
        self, jobs: list[Job], module: Block, work: list[tuple[Sweep, Parcel]]
    ) -> None:
        """Draft in pieces. In parts, each is sent while the next is written; else they are joined,
        and the pieces only show progress to the sender, since many drafts take long."""
        sweep, ways = work[0][0], [Begun() for _ in jobs]
        pieces = sweep.parts if sweep.parts > 1 else -(-sweep.length // STRETCH)
        drafting, made = compute_parts(module, work, pieces), []
        for part in range(pieces):
            passages = await self._in_thread(next, drafting)
            for job in (*jobs, *self.waiting):
                job.moved()
            if sweep.parts == 1:
                made.append(passages)
                continue
            for job, passage, begun in zip(jobs, passages, ways, strict=True):
                carry = partial(self.carrier.carry_part, job, part, passage, begun)
                self.tasks.spawn(self._carry(job, carry) if part == pieces - 1 else carry())
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
        """The jobs with their sessions, if they have any; jobs whose caches are gone fail."""
        if jobs[0].begun is not None:
            return jobs, [job.begun.session for job in jobs if job.begun is not None]
        if not jobs[0].sweep.session:
            return jobs, []
        able, sessions, without = [], [], []
        for job in jobs:
            session = self.sessions.open(job.session, job.sweep.start, module.new_cache)
            if session is None:
                without.append(job)
            else:
                able.append(job)
                sessions.append(session)
        self._fail(without, Trouble.NO_SESSION)  # last: if opening one raises, the caller fails all
        return able, sessions

    def _next_batch(self) -> list[Job]:
        """The oldest waiting sweep and others of its shape. Late sweeps are dropped."""
        now_s = time.monotonic()
        for job in [job for job in self.waiting if job.end_s <= now_s]:
            self.waiting.remove(job)
            self._release(job)
        while self.waiting and not self.waiting[0].next:
            self._release(self.waiting.popleft())  # an earlier part failed
        if not self.waiting:
            return []
        shape = self.waiting[0].shape
        batch: list[Job] = []
        for job in self.waiting:
            # A sweep that came twice (its sender timed out) must not share its caches in one batch.
            twice = job.sweep.session and any(job.session == other.session for other in batch)
            if job.shape == shape and job.next and not twice and len(batch) < BATCH_MAX:
                batch.append(job)
        for job in batch:
            self.waiting.remove(job)
        return batch

    def _fail(self, jobs: list[Job], trouble: Trouble) -> None:
        """Tell the clients that these sweeps failed."""
        for job in jobs:
            sweep = self.carrier.with_client(job)
            report = partial(self.carrier.fail, sweep, trouble, "it could not be computed", b"")
            self.tasks.spawn(self._carry(job, report))

    async def _carry(self, job: Job, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work`, then release the job. The coroutine is created here: otherwise a task that is
        cancelled before its first step would leave it unawaited."""
        try:
            await work()
        finally:
            self._release(job)

    def _release(self, job: Job) -> None:
        """Remove a job; idempotent, since a job may also fail while it is being handed on."""
        if job.released:
            return
        job.released = True
        job.handed.set()
        self.held_bytes -= job.size_bytes
        if self.jobs.get(job.sweep.sweep) is job:
            del self.jobs[job.sweep.sweep]
