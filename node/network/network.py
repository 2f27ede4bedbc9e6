"""One object for the rest of the node: ask a peer, answer peers, announce, look up. Keeps running.

Decides the order in which the parts start and stop, that a dead p2pd is started again under the
same identity and port, and that a node which hears from nobody joins again through the peers it
remembers; a person is told once when such a thing begins and once when it is over. Knows nothing
of rounds or of training.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from node.machine.phases import mark
from node.machine.steady_time import SteadyTime
from node.network.addresses import from_option, through_relay, to_announce, with_peer
from node.network.daemon import Daemon, DaemonError, DaemonSettings
from node.network.dial_back import DialBacks, caller_address
from node.network.discovery import SALT_BYTES, Discovery, PeerBook, parse_seeds
from node.network.gate import Backoff, DaemonGone, Gate, SaidOnce, with_backoff
from node.network.kept_files import KeptFiles
from node.network.p2pd_stream import P2pdStream
from node.network.pace import PacedStream, Rate
from node.network.reachability import Reachability
from node.network.service import Reply, Service, Status, serve_basics
from node.network.standing import Standings
from node.network.stream_pool import Kept, StreamPool
from node.network.transport import Caller, Transport
from protocol import messages
from protocol.errors import BlockswarmError, WireError
from protocol.frames import Channel, Deadline, Sink, Stalled, Stream, Truncated
from protocol.identity import Identity, load_or_create, peer_text
from protocol.ledger import Ledger
from protocol.limits import CONTROL_DEADLINE_S, RECORDS_PER_REPLY, STALL_S
from protocol.messages import Message, purpose_of
from protocol.records import Record, SignedRecord

M = TypeVar("M", bound=Message)
R = TypeVar("R", bound=Message)

CHECK_EVERY_S = 20.0  # whether somebody is still there
BOOK_EVERY_S = 60.0
_log = logging.getLogger(__name__)


class NobodyThere(BlockswarmError):
    """None of the peers to join through answered."""


@dataclass(frozen=True)
class NetworkSettings:
    """What the operator says. `announce` as typed; `join` are whole multiaddresses."""

    daemon: DaemonSettings
    run_id: bytes
    run_file: bytes
    join: tuple[str, ...] = ()
    announce: tuple[str, ...] = ()
    state_folder: Path | None = None  # for the cached peers and the ledger
    check_every_s: float = CHECK_EVERY_S
    backoff: Backoff = field(default_factory=Backoff)
    up_bytes_per_s: float | None = None  # None: no limit
    down_bytes_per_s: float | None = None
    blocks: int | None = None  # of the run; records of blocks that it does not have are not kept
    ask_reachable: bool = False  # let peers dial back, and say whether they could


@dataclass(frozen=True)
class Answer(Generic[R]):
    """A peer's reply. `payload` is empty if it went into a sink; `digest` is its name."""

    message: R
    payload: bytearray
    digest: bytes
    address: str  # over which it came


class Network:
    """A node's side of the swarm. `async with Network(...)` starts and stops it."""

    def __init__(
        self,
        settings: NetworkSettings,
        status: Callable[[], Status],
        say: Callable[[str], None] = lambda line: None,
        rng: random.Random | None = None,
        gate: Gate | None = None,
        clock: SteadyTime | None = None,
        daemon: Daemon | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        """`daemon`: one that runs already, under the settings' identity; `ledger`: its bytes."""
        self.settings = settings
        self._seeds = parse_seeds(settings.join)
        folder = settings.state_folder
        loaded = Ledger.load(folder / "ledger.json") if folder else Ledger()
        self.ledger = ledger or loaded
        self.service = Service(self.ledger, gate, up_bytes_per_s=settings.up_bytes_per_s)
        self.clock = clock or SteadyTime()
        self.standings = Standings(self.clock.steady)
        book = PeerBook(folder / "peers.json" if folder else None, self.standings)
        self.kept = KeptFiles(folder)
        self.kept.keep("peers.json", book.to_bytes)
        self.kept.keep("ledger.json", self.ledger.to_bytes)
        # Last: from here on the identity is locked, until `stop`.
        self.identity: Identity = load_or_create(settings.daemon.identity_path)
        self.discovery = Discovery(
            self.identity,
            settings.run_id,
            book,
            self.ledger,
            self.clock,
            settings.blocks,
            salt=None if rng is None else rng.randbytes(SALT_BYTES),
        )
        self.restarts = 0
        self._up, self._down = (
            None if rate is None else Rate(rate)
            for rate in (settings.up_bytes_per_s, settings.down_bytes_per_s)
        )
        self._said_of_daemon = SaidOnce(say)
        self._said_of_peers = SaidOnce(say)
        self._say = say
        self._rng = rng or random.Random()
        self._daemon: Daemon | None = None
        self._given = daemon
        self._pool = StreamPool()
        self._tasks: list[asyncio.Task[None]] = []
        self._record: Record | None = None
        self.reachability = Reachability(self, say, self._rng)
        self.service.serve(
            messages.DialBack, DialBacks(settings.run_id, settings.daemon.hosts).answer
        )
        serve_basics(
            self.service,
            settings.run_id,
            settings.run_file,
            status,
            self.discovery.for_stranger,
            self.clock,
        )

    # --- life -----------------------------------------------------------------------------------

    async def __aenter__(self) -> Network:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, alone_ok: bool = False) -> None:
        """Start the daemon and join. Raises `DaemonError` or `NobodyThere`, all cleaned up.

        `alone_ok`: if nobody answers go on alone; joining is tried again until somebody does.
        """
        try:
            await self._open(self.settings.daemon.port)
            mark("p2pd")
            wanted = bool(self._seeds or len(self.discovery.book))
            if wanted and not await self.discovery.join(self._seeds.items()):
                if not alone_ok:
                    raise NobodyThere(
                        "none of the peers to join through answered",
                        "check the address and that its host is up; ask for another peer's address",
                    )
                self._say("no peer answers; going on alone and trying to join again")
        except BaseException:
            await self.stop()
            raise
        mark("dht")
        self._tasks = [
            asyncio.create_task(self._keep_daemon()),
            asyncio.create_task(self._keep_company()),
        ]
        if self.settings.ask_reachable:
            self._tasks.append(asyncio.create_task(self.reachability.run()))

    async def _open(self, port: int) -> None:
        if self.settings.announce and not port:
            raise DaemonError("--announce needs to know the port", "give one with --port")
        announce = tuple(from_option(text, port) for text in self.settings.announce)
        wanted = dataclasses.replace(
            self.settings.daemon, port=port, announce=announce or self.settings.daemon.announce
        )
        daemon, self._given = self._given or await Daemon.start(wanted), None
        try:
            if daemon.peer_id != self.identity.peer_id:
                raise DaemonError("p2pd runs under another identity than ours")
            await self.discovery.attach(daemon.p2p, daemon.transport)
            await daemon.transport.serve(self._on_stream)
        except BaseException:
            self.discovery.detach()
            await daemon.stop()
            raise
        self._daemon = daemon

    async def stop(self) -> None:
        """End every task, stream and process of ours, and keep what must survive."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self.discovery.detach()
        self._pool.clear()
        if self._daemon is not None:
            await self._daemon.stop()
            self._daemon = None
        try:
            self.kept.save_now()
        finally:
            self.identity.close()

    async def _keep_daemon(self) -> None:
        """Start p2pd again whenever it has died: same identity, same port, same records.

        Whatever goes wrong on the way is tried again: without this task a host whose p2pd dies
        would be deaf for ever, and would not say so.
        """
        port, attempt = self.daemon.port, 0
        while True:
            try:
                if self._daemon is not None:
                    await self._until_ended(self._daemon)
                await self._open(port)
                await self._greet()
            except Exception as error:  # hivemind and p2pd raise what they like
                if not isinstance(error, BlockswarmError | OSError):
                    _log.exception("p2pd could not be started again", exc_info=error)
                self._said_of_daemon.trouble(f"p2pd does not start: {error}; trying again")
                await asyncio.sleep(self.settings.backoff.wait_s(attempt, self._rng))
                attempt += 1
            else:
                attempt = 0

    async def _until_ended(self, daemon: Daemon) -> None:
        """Wait for its end, then clear away what is left of it."""
        code = await daemon.ended()
        self._said_of_daemon.trouble(f"p2pd has ended (code {code}); starting it again")
        self._daemon = None
        self.discovery.detach()
        self._pool.clear()
        await daemon.stop()

    async def _greet(self) -> None:
        """A new daemon knows nobody yet. Failing that, `_keep_company` will join again."""
        try:
            await self._rejoin()
        except Exception as error:
            if not isinstance(error, WireError):
                _log.exception("joining again failed", exc_info=error)
        self.restarts += 1
        self._said_of_daemon.over("p2pd runs again")

    async def _rejoin(self) -> bool:
        met = await self.discovery.join(self._seeds.items())
        if met and self._record is not None:
            await self.announce(self._record)
        return bool(met)

    async def _keep_company(self) -> None:
        """Join again when nobody answers any more; with growing waits, and said once."""
        now_s = asyncio.get_running_loop().time
        attempt, saved_s = 0, now_s()
        while True:
            wait_s = self.settings.check_every_s
            if attempt:
                wait_s = self.settings.backoff.wait_s(attempt - 1, self._rng)
            await asyncio.sleep(wait_s)
            if now_s() - saved_s > BOOK_EVERY_S:
                saved_s = now_s()
                with suppress(BlockswarmError, OSError):  # a full disk
                    await self.kept.save()
            try:
                attempt = await self._look_for_company(attempt)
            except WireError:
                pass  # DaemonGone: the other task is at it
            except Exception as error:
                _log.exception("looking for peers failed", exc_info=error)

    async def _look_for_company(self, attempt: int) -> int:
        """Join again if nobody answers; how many attempts in a row were in vain."""
        if await self.discovery.anyone_there():
            self._said_of_peers.over("peers answer again")
            return 0
        if not self._seeds and not len(self.discovery.book):
            return 0  # the first of its run: alone is not cut off
        self._said_of_peers.trouble("no peer answers; training goes on, trying to join again")
        if not await self._rejoin():
            return attempt + 1
        self._said_of_peers.over("peers answer again")
        return 0

    # --- who and where --------------------------------------------------------------------------

    @property
    def daemon(self) -> Daemon:
        if self._daemon is None:
            raise DaemonGone
        return self._daemon

    @property
    def transport(self) -> Transport:
        return self.daemon.transport

    @property
    def peer_id(self) -> bytes:
        return self.identity.peer_id

    async def addresses(self) -> tuple[str, ...]:
        """What goes into our record."""
        own = [*self.reachability.confirmed, *await self.transport.own_addresses()]
        settings = self.daemon.settings
        if settings.relays and (settings.reachability == "private" or not settings.hosts):
            # p2pd itself tells of a relay only if that has a public IP.
            connected = await self.transport.connected()
            for peer_id, known in parse_seeds(settings.relays).items():
                if peer_id in connected:
                    own += [through_relay(address, peer_id) for address in known]
        return to_announce(own, settings.announce)

    async def invitations(self) -> list[str]:
        """Whole multiaddresses that another host can join through."""
        return [with_peer(address, self.peer_id) for address in await self.addresses()]

    # --- asking and answering -------------------------------------------------------------------

    def serve(
        self, request: type[M], handler: Callable[[M, bytes], Awaitable[Reply]], bulk: bool = False
    ) -> None:
        """See `Service.serve`. May be called at any time."""
        self.service.serve(request, handler, bulk)

    async def _on_stream(self, stream: P2pdStream, caller: Caller) -> None:
        caller_address.set(caller.address)  # for this stream: it has a task of its own
        await self.service.on_stream(self._paced(stream), caller.peer_id)

    def _paced(self, stream: P2pdStream) -> Stream:
        if self._up is None and self._down is None:
            return stream
        return PacedStream(stream, self._up, self._down)

    async def request(
        self,
        peer_id: bytes,
        request: Message,
        wanted: type[R],
        *,
        deadline_s: float = CONTROL_DEADLINE_S,
        stall_s: float = STALL_S,
        max_payload_bytes: int | None = None,
        expected: bytes | None = None,
        sink: Sink | None = None,
        again_soon: bool = False,
    ) -> Answer[R]:
        """Ask a peer once, within the deadline. Raises a `WireError`, a distinct one per cause.

        `sink` takes the payload in pieces, *before* it is verified: act on it only after this
        has returned. `expected` is the digest that the payload must have. `again_soon`: we ask
        this peer often, so a stream that is open serves, and is kept for a while; not with a sink.
        """
        deadline = Deadline.after(deadline_s, stall_s)

        def once(kept: Kept) -> Awaitable[Answer[R]]:
            return self._ask_on(
                kept, peer_id, request, wanted, deadline, max_payload_bytes, expected, sink
            )

        usable = again_soon and not self.transport.is_silent(peer_id)
        if usable and (kept := self._pool.take(peer_id)) is not None:
            with suppress(Truncated):  # the peer let go of it while it was idle
                answer = await once(kept)
                await self._let_go(peer_id, kept)
                return answer
        stream = await self.transport.dial(peer_id, self._addresses_of(peer_id), deadline)
        answer = await once(kept := Kept(stream, 0))
        if again_soon:
            await self._let_go(peer_id, kept)
        else:
            await stream.close()
        return answer

    async def _ask_on(
        self,
        kept: Kept,
        peer_id: bytes,
        request: Message,
        wanted: type[R],
        deadline: Deadline,
        max_payload_bytes: int | None,
        expected: bytes | None,
        sink: Sink | None,
    ) -> Answer[R]:
        """One question on a stream, which stays open unless it fails."""
        channel = Channel(self._paced(kept.stream), deadline)
        purpose, block = purpose_of(request)
        asked_s = asyncio.get_running_loop().time()
        try:
            await messages.send(channel, request)
            message, head = await messages.receive(channel, wanted, max_payload_bytes)
            payload = bytearray()
            digest = await channel.receive_payload(head, sink or payload.extend, expected)
            self.transport.answered(peer_id)
            self.standings.spoke(peer_id)
        except BaseException as error:
            # Also when cancelled: a half-read stream must not be kept. No await, for that reason.
            kept.stream.abort()
            if isinstance(error, Stalled | asyncio.CancelledError) and not channel.tally.bytes_in:
                self.transport.unanswered(peer_id, asked_s)
            raise
        finally:
            self.ledger.book(channel.tally, peer_text(peer_id), purpose, block)
        return Answer(message, payload, digest, kept.stream.remote_address)

    async def _let_go(self, peer_id: bytes, kept: Kept) -> None:
        if not self._pool.give(peer_id, Kept(kept.stream, kept.exchanges + 1)):
            await kept.stream.close()

    async def request_patiently(
        self, peer_id: bytes, request: Message, wanted: type[R], patience_s: float
    ) -> Answer[R]:
        """`request` until it is answered: waits as long as a busy peer says, backs off else."""

        def once() -> Awaitable[Answer[R]]:
            return self.request(peer_id, request, wanted)

        deadline = Deadline.after(patience_s)
        return await with_backoff(once, deadline, self._rng, self.settings.backoff)

    def _addresses_of(self, peer_id: bytes) -> tuple[str, ...]:
        return (*self._seeds.get(peer_id, ()), *self.discovery.book.addresses(peer_id))

    # --- records --------------------------------------------------------------------------------

    async def announce(self, record: Record) -> int:
        """Publish our record, with addresses and sequence filled in; on how many nodes it is."""
        self._record = record  # said again when p2pd had to be restarted
        if not record.addresses:
            record = dataclasses.replace(record, addresses=await self.addresses())
        return await self.discovery.announce(record)

    async def replicas(self, block: int, cap: int = RECORDS_PER_REPLY) -> list[SignedRecord]:
        """The verified records of a block, looked up now; known contributors first."""
        return await self.discovery.replicas(block, cap)
