"""Can others reach this host? What peers say after they knocked, and what a person is told.

Decides whom to ask, when to ask again, what the answers mean together, and which public address
goes into this host's record and invitation. The knocking itself is `dial_back.py`'s. A peer can
lie, so an address counts only if most of those that were asked have seen it and reached it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import logging
import random
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from node.machine.going_on import going_on
from node.network.addresses import AddressError, Scope, direct, host_port, parse_address, with_peer
from node.network.gate import Backoff
from protocol import messages
from protocol.errors import WireError
from protocol.identity import peer_text
from protocol.messages import DialOutcome

if TYPE_CHECKING:
    from node.network.discovery import PeerBook
    from node.network.network import Network

_log = logging.getLogger(__name__)

ASKED = 3  # opinions that are wanted
ASKED_AT_MOST = 9  # peers for them: some are busy, some see this host over a relay
ASK_S = 12.0
AGAIN_S = 600.0  # addresses and routers change
AGAIN_AFTER_NO_S = 120.0  # somebody may be at the router right now
RESOLVE_S = 5.0

_WORDS = {
    DialOutcome.REFUSED: "refused: nothing listens there",
    DialOutcome.TIMED_OUT: "timed out: a firewall or a router in between",
    DialOutcome.UNREACHABLE: "no way there",
    DialOutcome.NOT_LIBP2P: "something else than blockswarm answers",
}


@dataclass(frozen=True)
class Opinion:
    """One peer's answer: at which IP it sees us, and what came of its knock there."""

    peer: str
    observed: str
    outcome: int


@dataclass(frozen=True)
class Verdict:
    """`address` is the multiaddress that was tried, `fixes` what a person can do about a no."""

    reachable: Literal["yes", "no", "unknown"]
    why: str
    address: str = ""
    outcome: int = 0
    fixes: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        return f"reachable: {self.reachable} ({self.why})"

    @property
    def news(self) -> tuple[object, ...]:
        """What has to change for it to be said again: not how many peers said it."""
        return self.reachable, self.address, self.outcome

    @property
    def public(self) -> bool:
        return bool(self.address) and parse_address(self.address).scope is Scope.PUBLIC


@dataclass(frozen=True)
class Door:
    """Where this host can be knocked at: a port, and the IPs that it says are its own."""

    port: int  # that others dial
    listens: int  # that p2pd has; another one behind a router that was told so
    announced: frozenset[str] = frozenset()  # empty: the operator said nothing
    inside: str = ""  # our IP behind the router, for whoever has to configure that


def judge(opinions: Sequence[Opinion], door: Door) -> Verdict:
    """What the answers say together."""
    told = [o for o in opinions if o.outcome in _WORDS or o.outcome == DialOutcome.REACHED]
    told = [o for o in told if _multiaddress(o.observed, door.port)]
    if not told:
        why = "no other peer to ask yet"
        if opinions:
            why = f"{_peers(len(opinions))} asked, none could tell"
        return Verdict("unknown", why)
    # Who sees us from outside tells more than who sits in the same network.
    widest = min(_scope(o.observed) for o in told)
    told = [o for o in told if _scope(o.observed) == widest]
    seen = Counter(o.observed for o in told)
    observed = max(sorted(seen), key=lambda ip: seen[ip])
    where = f"{_shown(observed)}:{door.port}"
    if door.announced and observed not in door.announced:
        said = ", ".join(sorted(map(_shown, door.announced)))
        why = f"peers see this host at {_shown(observed)}, and it announces {said}"
        fix = f"if {_shown(observed)} is right: --announce {where}"
        return Verdict("unknown", why, fixes=(fix,))
    address = _multiaddress(observed, door.port)
    reached = sum(o.outcome == DialOutcome.REACHED and o.observed == observed for o in told)
    if 2 * reached > len(told):
        why = f"{reached} of {_peers(len(told))} asked opened a new connection to {where}"
        if widest is not Scope.PUBLIC:
            what = "machine" if widest is Scope.LOOPBACK else "network"
            why += f", all of this {what}: there was none outside of it to ask"
        return Verdict("yes", why, address, int(DialOutcome.REACHED))
    failed = Counter(o.outcome for o in told if o.outcome != DialOutcome.REACHED)
    outcome = DialOutcome(failed.most_common(1)[0][0]) if failed else DialOutcome.TIMED_OUT
    missed = len(told) - reached
    why = f"{missed} of {_peers(len(told))} asked could not connect to {where}: {_WORDS[outcome]}"
    return Verdict("no", why, address, int(outcome), fixes_for(outcome, observed, door))


def fixes_for(outcome: DialOutcome, observed: str, door: Door) -> tuple[str, ...]:
    """What to do about it, with this host's own values."""
    inside = door.inside if door.inside != observed else ""
    steps = []
    if outcome == DialOutcome.NOT_LIBP2P:
        steps.append(f"another program has port {door.port}: choose a port with --port")
    if outcome == DialOutcome.REFUSED and door.port != door.listens:
        steps.append(
            f"port {door.port} is announced, blockswarm listens on {door.listens}: start it with "
            f"--port {door.port}, or forward the one to the other"
        )
    if inside or outcome == DialOutcome.REFUSED:
        target = f"{inside or 'this machine'}, port {door.listens}"
        steps.append(f"on the router: forward TCP port {door.port} to {target}")
    if outcome in (DialOutcome.TIMED_OUT, DialOutcome.UNREACHABLE):
        steps.append(
            f"on this machine: let TCP port {door.listens} through the firewall, for example "
            f"sudo ufw allow {door.listens}/tcp"
        )
    steps.append(
        "no access to the router: let a peer that can be reached forward for you: --relay ADDRESS"
    )
    return tuple(steps)


def from_outside(door: Door) -> tuple[str, ...]:
    """For a host that knows of no public address, before anybody was asked."""
    if not door.inside:
        return ()
    return (
        f"the address above is one of this network only; for hosts elsewhere give --port "
        f"{door.listens} --announce YOUR-PUBLIC-IP, and on the router forward TCP port "
        f"{door.listens} to {door.inside}",
        "no access to the router: --relay ADDRESS, of a peer that can be reached",
    )


class Reachability:
    """Asks peers of a network now and then, and says what changed."""

    def __init__(self, network: Network, say: Callable[[str], None], rng: random.Random) -> None:
        self._network, self._say, self._rng = network, say, rng
        self.verdict = Verdict("unknown", "nobody was asked yet")
        self._backoff = Backoff(first_s=2.0, most_s=60.0)
        self._told: tuple[object, ...] = ()

    @property
    def confirmed(self) -> tuple[str, ...]:
        """A public address that most of the asked peers have reached."""
        yes = self.verdict.reachable == "yes" and self.verdict.public
        return (self.verdict.address,) if yes else ()

    async def run(self) -> None:
        attempt = 0
        while True:
            # DaemonGone, a WireError: it is being restarted.
            with going_on(_log, "asking whether we can be reached", WireError):
                await self._tell(await self.look())
            wait_s = {"yes": AGAIN_S, "no": AGAIN_AFTER_NO_S}.get(self.verdict.reachable)
            attempt = 0 if wait_s else attempt + 1
            await asyncio.sleep(wait_s or self._backoff.wait_s(attempt, self._rng))

    async def look(self) -> Verdict:
        """Ask now."""
        network = self._network
        settings = network.daemon.settings
        if not settings.hosts:
            return Verdict("no", "it does not listen for connections")
        if settings.relays and settings.reachability == "private":
            return Verdict("no", "not directly; peers come over the relay that was given")
        own = await network.transport.own_addresses()
        door = await door_of(own, settings.announce, network.daemon.port)
        request = messages.DialBack(run=network.settings.run_id, port=door.port)
        known = self._in_turn(network.discovery.book)

        async def ask(peer: bytes) -> messages.DialBackReply:
            wanted = messages.DialBackReply
            return (await network.request(peer, request, wanted, deadline_s=ASK_S)).message

        verdict = judge(await opinions_of(known, ask), door)
        if verdict.reachable == "unknown" and not beyond_this_network(await network.addresses()):
            return dataclasses.replace(verdict, fixes=(*verdict.fixes, *from_outside(door)))
        return verdict

    def _in_turn(self, book: PeerBook) -> list[bytes]:
        """Whom to ask: those whose word counts, then whoever else has spoken to us.

        The few contributors of a block may all be busy, or sit in this network: then strangers
        tell more than nobody.
        """
        trusted = book.trusted(4 * ASKED_AT_MOST)
        others = [peer for peer in book.met(4 * ASKED_AT_MOST) if peer not in trusted]
        for peers in (trusted, others):
            self._rng.shuffle(peers)
        return trusted + others

    async def _tell(self, verdict: Verdict) -> None:
        before, self.verdict = self.confirmed, verdict
        if verdict.news == self._told:
            return
        self._told = verdict.news
        self._say(verdict.line)
        for number, fix in enumerate(verdict.fixes, 1):
            self._say(f"  {number}. {fix}")
        if self.confirmed and self.confirmed != before:
            self._say("others join with:")
            self._say(f"  blockswarm join {with_peer(verdict.address, self._network.peer_id)}")


async def opinions_of(
    peers: Sequence[bytes], ask: Callable[[bytes], Awaitable[messages.DialBackReply]]
) -> list[Opinion]:
    """The answers of some peers, until enough of them see us from outside.

    Those who are busy or do not answer are passed over.
    """
    found: list[Opinion] = []

    async def one(peer: bytes) -> None:
        with going_on(_log, "an opinion on whether we can be reached", WireError):
            reply = await ask(peer)
            found.append(Opinion(peer_text(peer), reply.observed, reply.outcome))

    for start in range(0, min(len(peers), ASKED_AT_MOST), ASKED):
        await asyncio.gather(*(one(peer) for peer in peers[start : start + ASKED]))
        if sum(map(_sees_us_from_outside, found)) >= ASKED:
            break
    return found


def _sees_us_from_outside(opinion: Opinion) -> bool:
    address = _multiaddress(opinion.observed, 1)
    tried = opinion.outcome != DialOutcome.NOT_TRIED
    return tried and bool(address) and parse_address(address).scope is Scope.PUBLIC


async def door_of(own: Sequence[str], announced: Sequence[str], listens: int) -> Door:
    """Where to let peers knock: at what the operator announces, else at what p2pd found out."""
    said = direct(announced)
    public = [a for a in direct(own) if parse_address(a).scope is Scope.PUBLIC]
    port = host_port((said or public)[0])[1] if said or public else listens
    private = [host_port(a)[0] for a in direct(own) if parse_address(a).scope is Scope.PRIVATE]
    hosts = [host_port(a)[0] for a in said]
    return Door(port, listens, frozenset(await _resolved(hosts)), (private or [""])[0])


async def _resolved(hosts: Collection[str]) -> set[str]:
    """IPs as they are, names as what they stand for; one that nobody knows stays a name."""
    found: set[str] = set()
    for host in hosts:
        try:
            found.add(str(ipaddress.ip_address(host)))
        except ValueError:
            found.update(await _look_up(host) or {host})
    return found


async def _look_up(name: str) -> set[str]:
    loop = asyncio.get_running_loop()
    with suppress(OSError, UnicodeError):  # TimeoutError is an OSError
        async with asyncio.timeout(RESOLVE_S):
            infos = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            return {str(info[4][0]) for info in infos}
    return set()


def beyond_this_network(addresses: Sequence[str]) -> bool:
    """Whether some address can work from anywhere: a public one, or one over a relay."""
    return any(
        parse_address(a).relayed or parse_address(a).scope is Scope.PUBLIC for a in addresses
    )


def _multiaddress(ip: str, port: int) -> str:
    """ "" for what a peer may say that is no IP which can be dialled."""
    with suppress(ValueError, AddressError):
        return parse_address(f"/ip{ipaddress.ip_address(ip).version}/{ip}/tcp/{port}").text
    return ""


def _scope(ip: str) -> Scope:
    return parse_address(_multiaddress(ip, 1)).scope


def _shown(ip: str) -> str:
    return f"[{ip}]" if ":" in ip else ip


def _peers(count: int) -> str:
    return f"{count} peer{'s' * (count != 1)}"
