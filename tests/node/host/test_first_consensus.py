"""A newcomer begins with its block's consensus; with a lost block's, as others followed it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from node.host.first_consensus import bring_up
from node.log.follow import Follower, FollowSettings
from node.replica.exchange import ReplicaSettings
from node.replica.service import serve_replica
from protocol import messages
from protocol.frames import Refused
from protocol.identity import new_identity, peer_text
from protocol.messages import Purpose
from protocol.records import Role
from swarm.rounds.deadline import DeadlineRules
from swarm.rounds.state import RoundRules
from tests.support.chains import CODEC, EVERY, FIRST, RUN, Chain, Donors, identity, no_records, run
from tests.support.live import tiny_run_file

BLOCKS = 3


class Town(Donors):
    """Hosts of block 1 that follow block 0, and those that block 0 has itself."""

    def __init__(self, copies: Sequence[Chain], hosts_of_0: Sequence[Chain] = ()) -> None:
        super().__init__()
        self.peer_id = new_identity().peer_id
        self.settings = SimpleNamespace(run_id=RUN)
        self.found: dict[int, list[Any]] = {0: [], 1: []}
        for block, chains in enumerate((hosts_of_0, copies)):
            for chain in chains:
                self.found[block].append(_record())
                self.hold(peer_text(self.found[block][-1].peer_id), chain)

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

        serve_replica(service, replica, no_records, lambda: 0.0, copies)
        self.handlers[name] = served

    async def replicas(self, block: int) -> list[Any]:
        return self.found.get(block, [])


def _record() -> Any:
    record = SimpleNamespace(round=20, role=Role.REPLICA)
    return SimpleNamespace(peer_id=new_identity().peer_id, record=record)


async def nobody(block: int) -> Sequence[str]:
    return ()


def found_in(town: Any, coupling: str = "look_ahead") -> Follower:
    file = tiny_run_file(blocks=BLOCKS, coupling=coupling)
    settings = FollowSettings(RUN, 0, CODEC, EVERY, Purpose.CATCH_UP, ask_s=1.0, to_train=True)
    found = Follower(settings, FIRST, town, nobody)
    run(bring_up(found, town, file, 20))
    return found


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return Chain(identity(tmp_path)).grow(9)


def test_a_lost_block_goes_on_where_the_newest_copy_of_most_stands(chain: Chain) -> None:
    older = chain.fork(0)
    found = found_in(Town([older, chain.grow(3), chain]))
    assert found.log.head == chain.log.head
    assert np.array_equal(found.consensus.weights, chain.consensus.weights)
    # From there it can save, serve, and judge updates as all others do.
    assert found.consensus.oldest_start(found.log) is not None
    steps = found.consensus.whole(found.log).recent_steps(found.log)
    assert len(steps) == len(chain.consensus.recent_steps(chain.log)) > 0


@pytest.mark.parametrize("coupling", ["look_ahead", "independent"])
def test_of_a_block_that_has_hosts_they_are_asked(chain: Chain, coupling: str) -> None:
    newer = chain.fork(0).grow(3)
    found = found_in(Town([newer, newer, newer], hosts_of_0=[chain, chain]), coupling)
    assert found.log.head == chain.log.head


def test_without_any_copy_it_begins_anew(chain: Chain) -> None:
    assert found_in(Town([])).round == -1
    assert found_in(Town([chain]), coupling="independent").round == -1


def test_hosts_that_do_not_answer_keep_nobody_from_beginning(chain: Chain) -> None:
    town = Town([], hosts_of_0=[chain])
    town.handlers.clear()
    assert found_in(town).round == -1


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
