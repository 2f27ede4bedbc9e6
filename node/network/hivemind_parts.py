"""All that we use of hivemind: its p2pd client and its Kademlia, without the rest of it.

hivemind's own `__init__` imports its averager, experts and optimizer, and with them scipy: a second
of CPU at every start and about 50 MB in every host, for nothing that runs here. So its package is
entered without its `__init__`, unless this process has it already. Decides nothing else.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec


def _enter_package() -> None:
    """Make `hivemind` a package whose modules can be imported, and import none of them."""
    if "hivemind" in sys.modules:
        return
    spec = find_spec("hivemind")
    if spec is not None:  # otherwise the imports below say that it is missing
        sys.modules["hivemind"] = module_from_spec(spec)


_enter_package()

from hivemind.dht.protocol import DHTProtocol  # noqa: E402
from hivemind.dht.routing import DHTID  # noqa: E402
from hivemind.dht.storage import DictionaryDHTValue  # noqa: E402
from hivemind.p2p import P2P, P2PContext, PeerID  # noqa: E402
from hivemind.proto import dht_pb2, p2pd_pb2  # noqa: E402
from hivemind.utils import MSGPackSerializer  # noqa: E402
from hivemind.utils.multiaddr import Multiaddr  # noqa: E402

__all__ = [
    "DHTID",
    "P2P",
    "DHTProtocol",
    "DictionaryDHTValue",
    "MSGPackSerializer",
    "Multiaddr",
    "P2PContext",
    "PeerID",
    "dht_pb2",
    "p2pd_pb2",
]
