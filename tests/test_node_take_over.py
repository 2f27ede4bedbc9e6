"""A block that lost all its hosts goes on from the copies that others followed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from chains import CODEC, EVERY, FIRST, RUN, Chain, Donors, identity, run
from live import tiny_run_file

from node.exchange import ReplicaSettings
from node.follow import Follower, FollowSettings
from node.replica_service import serve_replica
from node.take_over import copy_of_lost_block
from protocol import messages
from protocol.frames import Refused
from protocol.identity import generate, peer_text
from protocol.messages import Purpose
from protocol.records import Role
from swarm.deadline import DeadlineRules
from swarm.round_state import RoundRules

BLOCKS = 3


class Town(Donors):
    """Hosts of block 1 that follow block 0, which has no host any more."""

    def __init__(self, copies: Sequence[Chain], hosts_of_0: int = 0) -> None:
        super().__init__()
        self.peer_id = generate().peer_id
        self.settings = SimpleNamespace(run_id=RUN)
        self.found: dict[int, list[Any]] = {0: [_record() for _ in range(hosts_of_0)], 1: []}
        for chain in copies:
            self.found[1].append(_record())
            self.hold(peer_text(self.found[1][-1].peer_id), chain)

    def hold(self, name: str, chain: Chain) -> None:
        rules = RoundRules(0.0, 10.0, DeadlineRules(0.5, 1.0), 0.5, 0.5)
        replica: Any = SimpleNamespace(
            muted=False, settings=ReplicaSettings(RUN, 1, rules, CODEC, EVERY)
        )
        served: dict[type, Any] = {}
        service: Any = SimpleNamespace(
            serve=lambda kind, handler, bulk=False: served.update({kind: handler})
        )

        def copies(block: int) -> Any:
            return (chain.log, chain.consensus) if block == 0 else None

        serve_replica(service, replica, lambda signed: None, list, lambda: 0.0, copies)
        self.handlers[name] = served

    async def replicas(self, block: int) -> list[Any]:
        return self.found.get(block, [])


def _record() -> Any:
    record = SimpleNamespace(round=20, role=Role.REPLICA)
    return SimpleNamespace(peer_id=generate().peer_id, record=record)


async def nobody(block: int) -> Sequence[str]:
    return ()


def known(town: Town) -> Mapping[int, Follower]:
    settings = FollowSettings(RUN, 0, CODEC, EVERY, Purpose.CATCH_UP, ask_s=1.0)
    return {0: Follower(settings, FIRST, town, nobody)}


def copy(town: Any, coupling: str = "look_ahead", block: int = 0) -> Follower | None:
    file = tiny_run_file(blocks=BLOCKS, coupling=coupling)
    return run(copy_of_lost_block(town, town, file, block, 20, known(town)))


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return Chain(identity(tmp_path)).grow(9)


def test_it_goes_on_where_the_newest_copy_of_most_stands(chain: Chain) -> None:
    older = chain.fork(0)
    town = Town([older, chain.grow(3), chain])
    found = copy(town)
    assert found is not None and found.log.head == chain.log.head
    assert np.array_equal(found.consensus.weights, chain.consensus.weights)
    # From there it can save and serve.
    assert found.consensus.oldest_start(found.log) is not None


def test_a_block_that_has_hosts_is_caught_up_with_as_ever(chain: Chain) -> None:
    assert copy(Town([chain], hosts_of_0=1)) is None
    assert copy(Town([chain]), coupling="independent") is None


def test_without_any_copy_it_begins_anew() -> None:
    found = copy(Town([]))
    assert found is not None and found.round == -1


def test_only_the_logs_of_followed_blocks_are_served(chain: Chain) -> None:
    town = Town([chain])
    name = peer_text(town.found[1][0].peer_id)
    for request in (
        messages.LogRequest(run=RUN, block=2, since=b"", purpose=Purpose.RELAY),
        messages.LogRequest(run=bytes(32), block=0, since=b"", purpose=Purpose.RELAY),
        messages.UpdateRequest(run=RUN, block=0, round=9, digest=bytes(32), purpose=Purpose.UPDATE),
        messages.VoteRequest(run=RUN, block=0, round=9, vote=b""),
    ):
        with pytest.raises(Refused):
            run(town.ask(name, request, messages.Message, 1.0))
