"""Which run an address leads to, and the folder of the host that joins it.

A run that was joined through an address before is known from its folder, also when nobody answers
there any more. Of another one the run file is fetched, with the p2pd and the identity that the host
then keeps.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from node.console.terminal import say
from node.host import home as homes
from node.host.options import HostOptions
from node.machine.phases import mark
from node.network.addresses import from_option
from node.network.client import Guest
from node.network.daemon import ALL_INTERFACES, Daemon, DaemonSettings
from node.network.invitation import NobodyAnswers
from protocol.identity import load_or_create
from protocol.ledger import Ledger
from swarm.runfile import run_id


@dataclass(frozen=True)
class Arrival:
    """A run, and the host's folder for it. `guest`: the p2pd that found it, to go on with."""

    text: bytes
    home: Path
    guest: Guest | None = None


async def arrive(addresses: Sequence[str], folder: Path | None, options: HostOptions) -> Arrival:
    """Raises `NobodyAnswers`, `UsageError`."""
    mark("libraries")
    try:
        for home in [folder] if folder else sorted(homes.state_home().glob("*")):
            text = homes.run_in(home)
            if text is not None and set(addresses) <= set(homes.joined_through(home)):
                return Arrival(text, home if folder else homes.free_folder(home))
        return await _arrive_anew(addresses, folder, options)
    finally:
        mark("run_file")


async def _arrive_anew(
    addresses: Sequence[str], folder: Path | None, options: HostOptions
) -> Arrival:
    homes.make(homes.state_home())
    with tempfile.TemporaryDirectory(prefix="arriving-", dir=homes.state_home()) as place:
        identity = Path(place) / "identity"
        load_or_create(identity).close()
        visitor = Guest(
            await Daemon.start(daemon_settings(options, identity, options.port)), Ledger()
        )
        try:
            text = await run_of(visitor, addresses, folder)
            home = folder or homes.free_folder(homes.state_home() / run_id(text).hex()[:16])
            homes.make(home)
            homes.remember(home, text, addresses)
            if homes.take_identity(home, identity):
                return Arrival(text, home, visitor)
        except BaseException:  # cancelled, too: no p2pd may be left behind
            await visitor.daemon.stop()
            raise
    await visitor.daemon.stop()  # a host of this run was here before, and has an identity
    return Arrival(text, home)


async def run_of(visitor: Guest, addresses: Sequence[str], folder: Path | None) -> bytes:
    """The run file behind these addresses. Raises `NobodyAnswers`, `UsageError`."""
    try:
        return await visitor.fetch_run(addresses, say)
    except NobodyAnswers:  # the peer may be gone for ever; the folder knows others
        for home in [folder] if folder else sorted(homes.state_home().glob("*")):
            text = homes.run_in(home)
            if text is not None and (folder or set(homes.joined_through(home)) & set(addresses)):
                return text
        raise


def daemon_settings(options: HostOptions, identity: Path, port: int) -> DaemonSettings:
    """How a host's p2pd is started."""
    return DaemonSettings(
        identity,
        port=port,
        hosts=options.listen or ALL_INTERFACES,
        announce=tuple(from_option(text, port) for text in options.announce),
        relays=options.relay,
        reachability="private" if options.relay else "auto",
    )
