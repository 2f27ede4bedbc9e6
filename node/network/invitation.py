"""Getting to know a run from nothing but an address: who answers, and the run file by its hash.

Says what is wrong with addresses at which nobody answers. Refuses a clock that is far from the
peers', before it costs rounds.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from node.network.addresses import host_port, is_relayed, split_peer
from node.network.daemon import Daemon
from node.network.dial_back import knock
from node.network.gate import Unreachable
from protocol import messages
from protocol.errors import BlockswarmError, UsageError, WireError
from protocol.frames import Busy, Channel, Deadline, Refused, Stalled, VersionMismatch
from protocol.frames import content_digest as digest_of
from protocol.identity import peer_text
from protocol.ledger import Ledger
from protocol.limits import CLOCK_SKEW_S
from protocol.messages import DialOutcome, ErrorCode, Purpose
from protocol.version import PACKAGE_VERSION
from swarm.rounds.clock import ClockSample
from swarm.runfile import parse

ASK_S = 15.0
OTHERS_S = 1.0  # for the other addresses once one has answered: a dead seed costs no more
KNOCK_S = 3.0
# Records live 300 s by their owner's clock: long before that, replicas cannot see each other.
CLOCK_LIMIT_S = 120.0
_OTHER_KEY = re.compile(r"remote key matches (\w{40,64})")


class NobodyAnswers(BlockswarmError):
    """None of the addresses led to a peer of a run."""


class ClockOff(BlockswarmError):
    """This machine and its peers disagree about the time, by more than records live."""


@dataclass(frozen=True)
class Invited:
    """What a peer at an address told: its run file, checked, and its clock."""

    run_file: bytes
    hello: messages.HelloReply
    clock: ClockSample


async def run_behind(
    daemon: Daemon, ledger: Ledger, addresses: Sequence[str], say: Callable[[str], None]
) -> bytes:
    """The run file of the peers at these addresses, checked. The first that answers will do."""
    wanted = [split_peer(text) for text in addresses]
    answers = await _first_answers(
        [ask_peer(daemon, ledger, peer, address) for peer, address in wanted]
    )
    found = [answer for answer in answers if isinstance(answer, Invited)]
    if len({answer.run_file for answer in found}) > 1:
        raise UsageError("these addresses belong to different runs", "give those of one run")
    if not found:
        raise await nobody_answers(addresses, answers)
    check_clock([answer.clock.offset_s for answer in found], say)
    parse(found[0].run_file)
    return found[0].run_file


async def _first_answers(asks: Sequence[Coroutine[Any, Any, Invited]]) -> list[object]:
    """A result or an error for each; those that are late when one has answered are left."""
    tasks = [asyncio.create_task(ask) for ask in asks]
    try:
        waiting = set(tasks)
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if any(task.exception() is None for task in done):
                await asyncio.wait(tasks, timeout=OTHERS_S)
                break
    finally:
        for task in tasks:
            task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    return list(answers)


async def ask_peer(daemon: Daemon, ledger: Ledger, peer: bytes, address: str) -> Invited:
    """Who is there, and of which run? Raises a `WireError`, or `UsageError` for a bad run file."""
    deadline = Deadline.after(ASK_S)
    stream = await daemon.transport.dial(peer, [address], deadline)
    channel = Channel(stream, deadline)
    try:
        async with channel:
            sent_s = time.time()
            await messages.send(channel, messages.Hello())
            hello, _ = await messages.receive(channel, messages.HelloReply)
            clock = ClockSample(sent_s, hello.now_s, time.time())
            await messages.send(channel, messages.RunRequest(run=hello.run))
            _, head = await messages.receive(channel, messages.RunReply)
            text = bytes(await channel.receive_bytes(head, hello.run))
    finally:
        ledger.book(channel.tally, peer_text(peer), Purpose.CONTROL)
    assert digest_of(text) == hello.run
    return Invited(text, hello, clock)


# --- the clock ----------------------------------------------------------------------------------


def check_clock(offsets_s: Sequence[float], say: Callable[[str], None]) -> None:
    """Raises `ClockOff` if most peers say so; a smaller difference is only mentioned."""
    off_s = median(offsets_s)
    if abs(off_s) <= CLOCK_SKEW_S:
        return
    if abs(off_s) <= CLOCK_LIMIT_S:
        say(f"{clock_words(off_s)}; the rounds are corrected for it, but set it right")
        return
    raise ClockOff(
        f"{clock_words(off_s)}, so that neither would accept what the other signs "
        f"(at most {CLOCK_LIMIT_S:g} s); most likely this machine does not keep its time by NTP",
        clock_fix(),
    )


def clock_words(offset_s: float) -> str:
    """`offset_s`: the peers' clock less ours."""
    amount = abs(offset_s)
    shown = f"{amount:.0f} s" if amount < 600 else f"{amount / 60:.0f} minutes"
    if amount >= 7200:
        shown = f"{amount / 3600:.1f} hours"
    side = "behind" if offset_s > 0 else "ahead of"
    return f"the clock of this machine is {shown} {side} that of the peers it asked"


def clock_fix() -> str:
    return "sudo timedatectl set-ntp true (or: sudo chronyc makestep), then the same command again"


# --- who does not answer ------------------------------------------------------------------------


async def nobody_answers(addresses: Sequence[str], answers: Sequence[object]) -> NobodyAnswers:
    """One reason for each address, and what to do about the first."""
    found = await asyncio.gather(
        *(why_not(address, answer) for address, answer in zip(addresses, answers, strict=True))
    )
    lines = [f"{address}: {why}" for address, (why, _) in zip(addresses, found, strict=True)]
    fix = found[0][1]
    if len({fix for _, fix in found}) > 1:
        fix = f"blockswarm doctor {' '.join(addresses)} (looks closer at each)"
    return NobodyAnswers("no peer answers: " + "; ".join(lines), fix)


async def why_not(address: str, answer: object) -> tuple[str, str]:
    """What happened at an address with its likely cause, and the next thing to do."""
    another = f"ask for another peer's address; blockswarm doctor {address} looks closer"
    if isinstance(answer, VersionMismatch) or (
        isinstance(answer, Refused) and answer.code == ErrorCode.VERSION
    ):
        return _version_words(answer)
    if isinstance(answer, Busy):
        return answer.message, f"the same command again in {answer.retry_after_s:.0f} s"
    if isinstance(answer, Unreachable) and (other := _OTHER_KEY.search(_said(address, answer))):
        bare = address.rpartition("/p2p/")[0]
        return (
            f"another peer answers there, {other[1]}: the address is mistyped, or its host has a "
            "new identity (a new --folder)",
            f"ask its operator; if that is the right one: blockswarm join {bare}/p2p/{other[1]}",
        )
    if isinstance(answer, Unreachable | Stalled):
        return await _knocked(address, answer), another
    if isinstance(answer, BlockswarmError):
        return answer.message, answer.hint or another
    if isinstance(answer, BaseException) and not isinstance(answer, asyncio.CancelledError):
        return f"failed: {answer!r}", another
    return f"no answer within {ASK_S:g} s", another


def _said(address: str, error: WireError) -> str:
    """Of p2pd's words, which tell of every address that it knows of a peer, those about this one.

    Names are resolved in them: then the only one there is must be it.
    """
    bare = address.rpartition("/p2p/")[0]
    parts = error.message.split("* [")[1:]
    return next((p for p in parts if p.startswith(f"{bare}]")), parts[0] if len(parts) == 1 else "")


def _version_words(answer: VersionMismatch | Refused) -> tuple[str, str]:
    """A peer answers with frames of its own version, so that we see which one is the newer."""
    fix = "ask its operator to upgrade, or join another run"
    if isinstance(answer, Refused) or "here" in answer.hint:
        fix = 'pip install --upgrade "blockswarm[host]"'
    return (
        f"it speaks another version of the protocol ({answer.message})",
        f"{fix}; this is blockswarm {PACKAGE_VERSION}",
    )


async def _knocked(address: str, error: WireError) -> str:
    """p2pd says that it could not; a knock of our own says how it could not."""
    if is_relayed(address):
        return f"not reached over its relay ({error.message})"
    host, port = host_port(split_peer(address)[1])
    outcome = await knock(host, port, KNOCK_S)
    if outcome == DialOutcome.REFUSED:
        return (
            f"connection refused: {host} is up, but nothing listens on port {port} "
            "(its blockswarm is not running, or has another port now)"
        )
    if outcome == DialOutcome.TIMED_OUT:
        return (
            f"timed out: nothing came back from {host} port {port} (the machine is off, its "
            "address has changed, or a firewall or router on its side lets nobody in)"
        )
    if outcome == DialOutcome.UNREACHABLE:
        return f"no way to {host} from here (this machine is offline, or the name does not exist)"
    if outcome == DialOutcome.NOT_LIBP2P:
        return f"another program than blockswarm answers on {host} port {port}"
    if "protocols not supported" in error.message:
        return f"a libp2p node answers at {host} port {port}, but it is no blockswarm host"
    return f"it answers on {host} port {port}, but not to us ({error.message})"
