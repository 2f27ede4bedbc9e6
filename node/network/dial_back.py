"""One knock at a door: does a libp2p node answer a *new* connection at an IP and a port?

Decides how a knock is done, and for whom this node knocks when a peer asks (DIAL_BACK): only at the
IP that the asker's own connection comes from, once, and not often. So nobody can use it to scan or
to attack a third party, and a connection that p2pd has already does not make an answer look good.
Knows nothing of what an asker makes of the answers (`reachability.py`).
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from contextvars import ContextVar

from node.network.addresses import AddressError, host_port, is_relayed
from node.network.service import Reply
from protocol import frames, messages
from protocol.messages import DialOutcome, ErrorCode

KNOCK_S = 5.0  # one SYN and its two first retries; well within the asker's deadline
_HELLO = b"\x13/multistream/1.0.0\n"  # with what every libp2p connection begins, on both sides
# A host asks a few peers at its start, and again every ten minutes. Hosts behind one IP share.
BURST_PER_IP, IP_EVERY_S = 4, 10.0
BURST, EVERY_S = 16, 1.0
IPS_REMEMBERED = 1024

# Where the stream comes from that is being answered; every stream has a task of its own.
caller_address: ContextVar[str] = ContextVar("caller_address", default="")


async def knock(host: str, port: int, timeout_s: float = KNOCK_S) -> DialOutcome:
    """Connect, say hello as libp2p does, hang up."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(_HELLO)
            answer = await reader.readexactly(len(_HELLO))
    except ConnectionRefusedError:
        return DialOutcome.REFUSED
    except (OSError, UnicodeError, asyncio.IncompleteReadError) as error:
        if writer is not None:
            return DialOutcome.NOT_LIBP2P
        late = isinstance(error, TimeoutError)  # UnicodeError: a name that can be none
        return DialOutcome.TIMED_OUT if late else DialOutcome.UNREACHABLE
    finally:
        if writer is not None:
            writer.transport.abort()  # nothing is under way that anybody waits for
    return DialOutcome.REACHED if answer == _HELLO else DialOutcome.NOT_LIBP2P


class Allowance:
    """So many at once, then one every so often, for each name.

    Only what was allowed is remembered, so the limit for all together bounds the names, too.
    """

    def __init__(self, burst: int, every_s: float, clock: Callable[[], float]) -> None:
        self._burst, self._every_s, self._clock = burst, every_s, clock
        self._free_at_s: dict[str, float] = {}  # when all of the burst is there again

    def wait_s(self, name: str) -> float:
        """0 if it may be now, else how long until it may."""
        now_s = self._clock()
        ahead_s = max(self._free_at_s.get(name, now_s), now_s) - now_s
        return max(0.0, ahead_s - (self._burst - 1) * self._every_s)

    def take(self, name: str) -> None:
        now_s = self._clock()
        if len(self._free_at_s) >= IPS_REMEMBERED:
            self._free_at_s = {n: at_s for n, at_s in self._free_at_s.items() if at_s > now_s}
        self._free_at_s[name] = max(self._free_at_s.get(name, now_s), now_s) + self._every_s


class DialBacks:
    """Answers DIAL_BACK. `hosts` are the IPs that this node listens on."""

    def __init__(
        self,
        run_id: bytes,
        hosts: Iterable[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_id = run_id
        # Behind a proxy on this machine every stranger seems to come from it: then a dial back
        # would show strangers which ports are open here. Only a node for this machine alone,
        # whose callers are on it anyway, dials loopback.
        self._only_loopback = all(ipaddress.ip_address(host).is_loopback for host in hosts)
        self._of_ip = Allowance(BURST_PER_IP, IP_EVERY_S, clock)
        self._of_all = Allowance(BURST, EVERY_S, clock)

    async def answer(self, request: messages.DialBack, peer_id: bytes) -> Reply:
        if request.run != self._run_id:
            raise frames.Refused(ErrorCode.WRONG_RUN, "this peer is part of another run")
        observed = observed_ip(caller_address.get())
        if not observed or not self._may_dial(observed):
            return _reply(DialOutcome.NOT_TRIED, observed)
        wait_s = max(self._of_ip.wait_s(observed), self._of_all.wait_s(""))
        if wait_s:
            raise frames.Busy(round(wait_s, 1))
        self._of_ip.take(observed)
        self._of_all.take("")
        return _reply(await knock(observed, request.port), observed)

    def _may_dial(self, observed: str) -> bool:
        ip = ipaddress.ip_address(observed)
        ip = getattr(ip, "ipv4_mapped", None) or ip
        if ip.is_loopback:
            return self._only_loopback
        return not (ip.is_link_local or ip.is_multicast or ip.is_unspecified or ip.is_reserved)


def _reply(outcome: DialOutcome, observed: str) -> Reply:
    return Reply(messages.DialBackReply(outcome=int(outcome), observed=observed))


def observed_ip(address: str) -> str:
    """The IP that a connection comes from, as p2pd tells it; "" over a relay or if it is none."""
    with suppress(AddressError):
        if address.startswith(("/ip4/", "/ip6/")) and not is_relayed(address):
            return host_port(address)[0]
    return ""
