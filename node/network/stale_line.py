"""Connections that are dead although the line works: after a partition, for as long again.

TCP tries a broken line after waits that double: 25 s without a line may cost 25 s more. A new
connection would do at once, but p2pd makes none while it believes in the old one.

Decides when a connection counts as stale: for a while the peer answered nothing and nothing else
was heard from it, yet its daemon greets us on a new connection. Whoever is still cut off keeps its
connection: p2pd must not dial in vain, since each time it waits for longer before it dials again
(5 s, then 6, 9, 14, up to 5 minutes) and whoever is back is out of reach for as long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from node.network import addresses

QUIET_S = 3.0  # whoever was heard so lately has a connection that works
PROBE_S = 1.5
PROBED_ADDRESSES = 4


async def greets(known: Iterable[str]) -> bool:
    """Whether a daemon says its first words on a new connection to any of these addresses."""
    places = [addresses.host_port(text) for text in addresses.direct(known)][:PROBED_ADDRESSES]
    found = await asyncio.gather(*(_greets(*place) for place in places))
    return any(found)


async def _greets(host: str, port: int) -> bool:
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(PROBE_S):
            reader, writer = await asyncio.open_connection(host, port)
            return bool(await reader.read(1))  # a listener of libp2p speaks first
    except (OSError, TimeoutError, ValueError):  # the last: a name that no resolver takes
        return False
    finally:
        if writer is not None:
            writer.transport.abort()
