"""`blockswarm peers --light ADDRESS`: look at a run through one of its peers, believing nothing.

Decides what is asked, what is checked and how it is shown. The questions work on any transport;
trio and py-libp2p are imported inside the command, and hivemind is not needed at all.
"""

from __future__ import annotations

import math
import time
import tomllib
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import click

from node.commands.options import FiniteRange
from node.console.results import Facts, print_json, table_lines
from node.console.terminal import say
from protocol import records
from protocol.admission import select
from protocol.errors import UsageError, WireError
from protocol.frames import Channel, Deadline, VersionMismatch
from protocol.identity import peer_text
from protocol.limits import (
    BLOCK_NONE,
    CLOCK_SKEW_S,
    CONTROL_DEADLINE_S,
    RECORDS_PER_REPLY,
    STALL_S,
    TEXT_MAX_BYTES,
)
from protocol.messages import (
    Hello,
    HelloReply,
    PeersReply,
    PeersRequest,
    RunReply,
    RunRequest,
    receive,
    send,
)
from protocol.packing import Malformed, text
from protocol.payloads import unpack_records
from protocol.records import Role, SignedRecord
from protocol.version import PACKAGE_VERSION

T = TypeVar("T")


# --- the questions ------------------------------------------------------------------------------


class OtherRun(WireError):
    """A valid record that has no place in an answer about this run."""


@dataclass(frozen=True)
class Survey:
    """What one peer told, of it only what could be checked."""

    run: bytes
    run_file: bytes
    answered: HelloReply
    peers: tuple[SignedRecord, ...]  # the newest live record of each
    refused: dict[str, int]  # reason -> records
    superseded: int  # valid, but there was a newer one of the same peer
    clock_offset_s: float  # the peer's clock less ours


async def survey(channel: Channel, clock: Callable[[], float] = time.time) -> Survey:
    """Ask for the run and for everybody's records, over one stream.

    The run file must have the digest that names the run; each record must be signed by the owner
    of its subkey, live, and of this run. What a liar can still do is leave peers out.
    """
    async with channel:
        await send(channel, Hello(agent=f"blockswarm-light {PACKAGE_VERSION}"))
        hello, _ = await receive(channel, HelloReply)
        offset_s = hello.now_s - clock()
        await send(channel, RunRequest(run=hello.run))
        _, head = await receive(channel, RunReply)
        run_file = bytes(await channel.receive_bytes(head, expected=hello.run))
        await send(channel, PeersRequest(run=hello.run, block=BLOCK_NONE))
        reply, head = await receive(channel, PeersReply)
        claims = unpack_records(await channel.receive_bytes(head)) if head.payload_bytes else []
    if len(claims) != reply.count:
        raise Malformed(f"{reply.count} records were announced and {len(claims)} sent")
    now_s = clock()
    verified, refused = check_claims(claims, hello.run, now_s)
    peers = select(verified, now_s, RECORDS_PER_REPLY, {})
    superseded = len(verified) - len(peers)
    return Survey(hello.run, run_file, hello, tuple(peers), refused, superseded, offset_s)


def check_claims(
    claims: list[tuple[bytes, bytes, bytes, float]], run: bytes, now_s: float
) -> tuple[list[SignedRecord], dict[str, int]]:
    """The records that their owners signed for this run, and why the others are refused.

    At most RECORDS_PER_REPLY claims come in one answer, so as many signatures are checked.
    """
    verified: list[SignedRecord] = []
    refused: Counter[str] = Counter()
    for claim in claims:
        try:
            signed = records.verify_record(*claim, now_s=now_s)
            if signed.record.run != run:
                raise OtherRun("the record is of another run")
        except WireError as error:
            refused[_REFUSALS.get(type(error), "malformed")] += 1
        else:
            verified.append(signed)
    return verified, dict(refused)


_REFUSALS: dict[type[WireError], str] = {
    OtherRun: "another run",
    VersionMismatch: "another version",
    records.BadSignature: "forged",
    records.ForeignSubkey: "forged",
    records.WrongKey: "wrong key",
    records.RecordExpired: "expired",
    records.LifeTooLong: "lives too long",
}


def run_name(run_file: bytes) -> str:
    """The name that the run gives itself, if it is one that a terminal can show; else ""."""
    try:
        name = text(TEXT_MAX_BYTES)(tomllib.loads(run_file.decode()).get("name", ""))
    except (ValueError, RecursionError, Malformed):
        return ""
    assert isinstance(name, str)
    return name


# --- what a person and a machine see ------------------------------------------------------------


def survey_facts(found: Survey, now_s: float) -> Facts:
    return {
        "run": found.run.hex(),
        "name": run_name(found.run_file),
        "run_file_bytes": len(found.run_file),
        "round": found.answered.round,
        "agent": found.answered.agent,
        "clock_offset_s": round(found.clock_offset_s, 3),
        "peers": [_peer_facts(signed, now_s) for signed in _ordered(found.peers)],
        "refused": found.refused,
        "superseded": found.superseded,
    }


def _ordered(peers: tuple[SignedRecord, ...]) -> list[SignedRecord]:
    return sorted(peers, key=lambda signed: (signed.record.block, signed.peer_id))


def _peer_facts(signed: SignedRecord, now_s: float) -> Facts:
    record = signed.record
    return {
        "peer": peer_text(signed.peer_id),
        "roles": role_names(record.role),
        "block": None if record.block == BLOCK_NONE else record.block,
        "round": record.round,
        "consensus": record.consensus.hex(),
        "update": record.update.hex(),
        "update_bytes": record.update_bytes,
        "addresses": list(record.addresses),
        "expires_in_s": round(signed.expiration_s - now_s, 1),
    }


def role_names(role: int) -> list[str]:
    known = [flag.name.lower() for flag in Role if flag.name and role & flag]
    unknown = role & ~sum(Role)
    return known + ([f"{unknown:#x}"] if unknown else [])


def print_survey(facts: Facts) -> None:
    print(f"run    {facts['run']}")
    print(f"name   {facts['name'] or '(the run file gives none)'}")
    print(f"round  {facts['round']}")
    print(f"peers  {len(facts['peers'])}")
    if facts["peers"]:
        print("", *_peer_lines(facts["peers"]), "", sep="\n")
    if facts["refused"]:
        reasons = ", ".join(f"{count} {reason}" for reason, count in facts["refused"].items())
        print(f"refused records: {reasons}")
    if abs(facts["clock_offset_s"]) > CLOCK_SKEW_S:
        say(f"this peer's clock and ours are {abs(facts['clock_offset_s']):.0f} s apart")


def _peer_lines(peers: list[Facts]) -> list[str]:
    head = ("peer", "role", "block", "round", "consensus", "expires in", "addresses")
    rows = [
        (
            short_peer(peer["peer"]),
            "+".join(peer["roles"]) or "-",
            "-" if peer["block"] is None else str(peer["block"]),
            str(peer["round"]),
            peer["consensus"][:12] or "-",
            f"{max(0, math.floor(peer['expires_in_s']))} s",
            " ".join(peer["addresses"]) or "-",
        )
        for peer in peers
    ]
    return table_lines(head, rows, left=("peer", "role", "consensus", "addresses"))


def short_peer(peer: str) -> str:
    """The end tells peers apart: all of them begin with 12D3Koo."""
    return f"..{peer[-8:]}"


# --- the command --------------------------------------------------------------------------------


@click.command("peers", short_help="Who takes part in a run, seen through one of its peers.")
@click.option(
    "--light",
    "address",
    metavar="ADDRESS",
    required=True,
    help="A peer to ask, without joining: /ip4/1.2.3.4/tcp/31337/p2p/12D3Koo...",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=FiniteRange(0.1, 3600),
    default=CONTROL_DEADLINE_S,
    show_default=True,
    help="Seconds for all of it.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def peers(address: str, timeout_s: float, as_json: bool) -> None:
    """Ask a live peer for its run and for the records of all peers that it knows.

    `blockswarm status` asks the whole swarm and says what it means; this asks one peer, from a
    machine without hivemind.

    Signatures and the run's hash are checked here. What is not signed by the peer it is about,
    has expired or belongs to another run is counted as refused and not shown. Needs no hivemind.
    """
    found = light_survey(address, timeout_s)
    facts = survey_facts(found, time.time())
    (print_json if as_json else print_survey)(facts)


def light_survey(address: str, timeout_s: float) -> Survey:
    """`survey` over py-libp2p, in a trio loop of its own."""
    try:
        from node.network import light
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("libp2p", "trio"):
            raise
        raise UsageError(
            "--light needs py-libp2p, which is not installed", 'pip install "blockswarm[light]"'
        ) from None
    target = light.parse_light_address(address)
    deadline = Deadline.after(timeout_s, min(STALL_S, timeout_s))

    async def ask() -> Survey:
        async with light.connect(target, deadline) as peer:
            return await survey(await peer.open(deadline))

    return _run_trio(ask)


def _run_trio(main: Callable[[], Awaitable[T]]) -> T:
    import trio

    try:
        # Ctrl-C in the middle of trio's own work would leave a warning about it behind.
        return trio.run(main, restrict_keyboard_interrupt_to_checkpoints=True)
    except BaseExceptionGroup as group:
        if group.subgroup(KeyboardInterrupt):  # Ctrl-C while a nursery was open
            raise KeyboardInterrupt from None
        raise


light_commands = (peers,)
