"""The doctor's checks of the network: port, p2pd, peers, clock, reachability.

They start a p2pd with a temporary identity on the port that a host would have. If a host on this
machine already has that port, peers are asked to dial that host.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from node.doctor.examine import Check, Examination
from protocol.errors import BlockswarmError
from protocol.identity import load_or_create, peer_text
from protocol.limits import CLOCK_SKEW_S
from protocol.messages import DialOutcome

if TYPE_CHECKING:
    from node.network.daemon import Daemon
    from node.network.invitation import Invited

PEERS_S = 60.0  # 15 s for a silent peer, 12 s for a dial back, and reserve for a busy machine
USUAL_PORT = 31337
HOST_EXTRA = 'pip install "blockswarm[host]"'


async def port(plan: Examination) -> Check:
    """Whether a host could listen on the port now."""
    from node.network.dial_back import knock

    try:
        from node.network.daemon import ALL_INTERFACES, DaemonError, PortInUse, free_port
    except ImportError as error:
        return Check("port", "skipped", f"not tried without {error.name}")
    hosts = plan.listen or ALL_INTERFACES
    try:
        usable, number = free_port(hosts, plan.port)
    except PortInUse as error:
        near = plan.listen[0] if plan.listen else "127.0.0.1"
        if await knock(near, plan.port, 3.0) == DialOutcome.REACHED:
            what = f"a libp2p node has port {plan.port} already, most likely your own host"
            return Check("port", "warning", what, (error.hint,))
        return Check("port", "failed", error.message, (error.hint,))
    except DaemonError as error:
        return Check("port", "failed", error.message, (error.hint,))
    where = ", ".join(usable)
    if plan.port:
        return Check("port", "ok", f"{plan.port} is free on {where}")
    return Check("port", "ok", f"any free one on {where}, for example {number} (--port checks one)")


# --- p2pd, and what it sees -----------------------------------------------------------------------


@dataclass(frozen=True)
class Met:
    """An address that was dialled, and the peer's answer or the error."""

    address: str
    peer_id: bytes
    answer: Invited | BaseException


async def network_checks(plan: Examination) -> list[Check]:
    """Start p2pd; if addresses are given, also check their peers, the clock and reachability."""
    try:
        from node.network.daemon import DaemonError
    except ImportError as error:
        what = f"{error.name or 'hivemind'} is not installed, and it brings p2pd"
        return [Check("p2pd", "failed", what, (HOST_EXTRA,)), *_skipped(plan, "there is no p2pd")]
    with tempfile.TemporaryDirectory(prefix="blockswarm-") as folder:
        path = Path(folder) / "identity"
        load_or_create(path).close()
        try:
            daemon, knocked_at, started_s = await _start(plan, path)
        except DaemonError as error:
            failed = Check("p2pd", "failed", error.message, (error.hint,))
            return [failed, *_skipped(plan, "p2pd does not start")]
        try:
            answers = await daemon.transport.own_addresses()
            what = f"starts in {started_s:.1f} s and answers"
            found = [Check("p2pd", "ok", what, seconds=round(started_s, 3))]
            if not plan.addresses:
                return [*found, *_skipped(plan, "give the ADDRESS of a peer")]
            return [*found, *await _peers(daemon, plan, answers, knocked_at)]
        finally:
            await daemon.stop()


def _skipped(plan: Examination, why: str) -> list[Check]:
    names = ("peers", "clock", "reachability") if plan.addresses else ("clock", "reachability")
    return [Check(name, "skipped", f"not checked: {why}") for name in names]


async def _start(plan: Examination, identity: Path) -> tuple[Daemon, int, float]:
    """Start p2pd as a host does, or without listening if the port is taken.

    Return it, the port that peers are to dial, and the seconds that it took.
    """
    from node.network.daemon import ALL_INTERFACES, Daemon, DaemonSettings, PortInUse

    loop = asyncio.get_running_loop()
    hosts = plan.listen or (ALL_INTERFACES if plan.addresses else ("127.0.0.1",))
    began_s = loop.time()
    try:
        settings = DaemonSettings(identity, port=plan.port, hosts=hosts)
        daemon = await Daemon.start(settings)
        knocked_at = daemon.port
    except PortInUse:
        began_s = loop.time()
        daemon = await Daemon.start(DaemonSettings(identity, hosts=(), map_port=False))
        knocked_at = plan.port
    return daemon, knocked_at, loop.time() - began_s


async def _peers(
    daemon: Daemon, plan: Examination, own: Sequence[str], knocked_at: int
) -> list[Check]:
    from node.network.addresses import split_peer
    from node.network.invitation import ask_peer
    from protocol.ledger import Ledger

    targets = [(text, *split_peer(text)) for text in plan.addresses]
    asks = (ask_peer(daemon, Ledger(), peer_id, address) for _, peer_id, address in targets)
    answers = await asyncio.gather(*asks, return_exceptions=True)
    met = [
        Met(text, peer_id, answer)
        for (text, peer_id, _), answer in zip(targets, answers, strict=True)
    ]
    found = [await _peer(one) for one in met]
    answered = [one for one in met if not isinstance(one.answer, BaseException)]
    if not answered:
        return [*found, *_skipped(Examination(), "no peer answers")]
    return [*found, _clock(answered), await _reachable(daemon, answered, own, knocked_at, plan)]


async def _peer(met: Met) -> Check:
    """The finding for one address: its run, or what is wrong."""
    from node.network.invitation import why_not

    if isinstance(met.answer, BaseException):
        what, fix = await why_not(met.address, met.answer)
        return Check("peers", "failed", f"{met.address}: {what}", (fix,))
    name = _run_name(met.answer.run_file)
    run = met.answer.hello.run.hex()[:16]
    return Check("peers", "ok", f"{_short(met.peer_id)} answers, {name} ({run})")


def _run_name(text: bytes) -> str:
    from swarm.runfile import parse

    try:
        return f"run {parse(text).name}"
    except BlockswarmError as error:
        return f"but its run file is not usable: {error.message}"


def _clock(answered: Sequence[Met]) -> Check:
    from node.network.invitation import CLOCK_LIMIT_S, clock_fix, clock_words

    off_s = median(_invited(one).clock.offset_s for one in answered)
    if abs(off_s) > CLOCK_SKEW_S:
        state: Any = "failed" if abs(off_s) > CLOCK_LIMIT_S else "warning"
        return Check("clock", state, clock_words(off_s), (clock_fix(),))
    return Check("clock", "ok", f"within {abs(off_s):.1f} s of the peers'")


def _invited(met: Met) -> Invited:
    assert not isinstance(met.answer, BaseException)
    return met.answer


async def _reachable(
    daemon: Daemon, answered: Sequence[Met], own: Sequence[str], knocked_at: int, plan: Examination
) -> Check:
    """Ask the peers to dial us back, and judge whether we are reachable."""
    from node.network.reachability import door_of, judge, opinions_of
    from protocol import messages
    from protocol.frames import Channel, Deadline

    runs = {one.peer_id: _invited(one).hello.run for one in answered}
    door = await door_of(own, (), knocked_at)

    async def ask(peer: bytes) -> messages.DialBackReply:
        deadline = Deadline.after(12.0)
        stream = await daemon.transport.dial(peer, (), deadline)
        async with Channel(stream, deadline) as channel:
            await messages.send(channel, messages.DialBack(run=runs[peer], port=door.port))
            reply, _ = await messages.receive(channel, messages.DialBackReply)
        return reply

    verdict = judge(await opinions_of(list(runs), ask), door)
    if verdict.reachable == "yes":
        return Check("reachability", "ok", f"yes ({verdict.why})")
    if verdict.reachable == "unknown":
        return Check("reachability", "warning", f"unknown ({verdict.why})", verdict.fixes)
    fixes = verdict.fixes
    if not plan.port:
        first = (
            f"port {door.port} was chosen at random: choose one, let it through, and check that: "
            f"blockswarm doctor {plan.addresses[0]} --port {USUAL_PORT}"
        )
        fixes = (first, *(f for f in fixes if str(door.port) not in f))
    return Check("reachability", "failed", f"no ({verdict.why})", fixes)


def _short(peer_id: bytes) -> str:
    return f"...{peer_text(peer_id)[-8:]}"
