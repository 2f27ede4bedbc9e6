"""Signed records for tests of the DHT, and a store request as a hostile peer writes it."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from node.network.hivemind_parts import (
    PeerID,
    dht_pb2,
)
from node.network.network import Network
from protocol import records
from protocol.identity import Identity
from protocol.records import Record, Role, SignedRecord
from tests.support.loopback import RUN_ID

RECORD = Record(run=RUN_ID, role=Role.REPLICA, block=1, round=1, sequence=0)


def sealed(identity: Identity, life_s: float = 100.0, **changes: Any) -> SignedRecord:
    values: dict[str, Any] = {"sequence": 5, "addresses": ("/ip4/127.0.0.1/tcp/1",), **changes}
    return records.seal(identity, dataclasses.replace(RECORD, **values), time.time() + life_s)


async def store_raw(
    asker: Network, storer: Network, key: bytes, subkey: bytes, value: bytes, expiration_s: float
) -> bool:
    """A store request as a hostile peer would write it. Refused: False or no answer at all."""
    protocol = asker.discovery.ring.protocol
    request = dht_pb2.StoreRequest(
        keys=[key],
        subkeys=[subkey],
        values=[value],
        expiration_time=[expiration_s],
        in_cache=[False],
        peer=protocol.node_info,
    )
    try:
        stub = protocol.get_stub(PeerID(storer.peer_id))
        response = await stub.rpc_store(request, timeout=5.0)
    except Exception:
        return False
    return bool(response.store_ok[0])
