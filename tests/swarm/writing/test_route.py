"""Routes: near and idle hosts first, failed ones last, versions that belong together."""

from __future__ import annotations

from typing import Any

from protocol.serving import Version
from swarm.writing.route import Offer, choose_route, choose_versions, composition
from tests.conftest import MakeRun


def peer(number: int) -> bytes:
    return bytes([number]) * 38


def version(block: int, round_: int = 1, name: int = 0) -> Version:
    return Version(block, round_, bytes([block, round_, name]) + bytes(29))


def offer(number: int, *versions: Version, latency_s: float = 0.1, **changes: Any) -> Offer:
    return Offer(peer(number), versions, latency_s, **changes)


def test_the_nearest_and_idlest_replica_is_first(tiny_run: MakeRun) -> None:
    offers = [
        offer(1, version(0)),
        offer(2, version(1), latency_s=0.3),
        offer(3, version(1), latency_s=0.1, waiting=9, usual_s=0.1),
        offer(4, version(1), latency_s=0.2),
        offer(5, version(1), latency_s=9.0),
        offer(6, version(2)),
    ]
    route = choose_route(tiny_run(), offers, {})
    assert route is not None and route.missing == ()
    assert [hop.block for hop in route.hops] == [0, 1, 2]
    assert route.hops[1].peers == (peer(4), peer(2), peer(3))
    route = choose_route(tiny_run(), offers, {peer(4): 1.0}, first={1: peer(3)})
    assert route is not None and route.hops[1].peers == (peer(3), peer(2), peer(5))


def test_weights_of_missing_blocks_go_to_the_others(tiny_run: MakeRun) -> None:
    run = tiny_run(coupling="relay")
    offers = [offer(1, version(0)), offer(2, version(1)), offer(3, version(2))]
    route = choose_route(run, offers, {})
    assert route is not None and [hop.weight for hop in route.hops] == [0.0, 0.0, 1.0]
    route = choose_route(run, offers, {}, leave_out={2})
    assert route is not None and route.missing == (2,)
    assert [hop.weight for hop in route.hops] == [1.0, 1.0]
    assert choose_route(run, offers, {}, leave_out={0, 1, 2}) is None
    assert choose_route(run, [], {}) is None


def test_staggered_versions_belong_together(tiny_run: MakeRun) -> None:
    every = [version(block, round_) for block in range(3) for round_ in (3, 4, 5)]
    staggered = choose_versions(tiny_run(coupling="relay"), [offer(1, *every)])
    assert [staggered[block].round for block in range(3)] == [3, 4, 5]
    newest = choose_versions(tiny_run(coupling="independent"), [offer(1, *every)])
    assert [newest[block].round for block in range(3)] == [5, 5, 5]
    nearest = choose_versions(tiny_run(coupling="relay"), [offer(1, *every[2:])])
    assert [nearest[block].round for block in range(3)] == [5, 4, 5]


def test_of_two_digests_of_a_round_the_common_one(tiny_run: MakeRun) -> None:
    odd, common = version(0, 1, 0), version(0, 1, 1)
    chosen = choose_versions(tiny_run(), [offer(1, odd), offer(2, common), offer(3, common)])
    assert chosen == {0: common}


def test_blocks_that_the_run_does_not_have_are_ignored(tiny_run: MakeRun) -> None:
    assert choose_versions(tiny_run(), [offer(1, version(7))]) == {}


def test_the_composition_is_what_most_hosts_say(tiny_run: MakeRun) -> None:
    run = tiny_run(coupling="independent")
    fitted = {"weights": (0.1, 0.2, 0.7), "temperature": 0.9}
    liar = offer(9, version(0), weights=(9.0, 0.0, 0.0))
    short = offer(8, version(0), weights=(1.0,))
    assert composition(run, [offer(1, version(0), **fitted), offer(2, version(1), **fitted), liar])[
        0
    ] == (0.1, 0.2, 0.7)
    assert composition(run, [offer(1, version(0), **fitted), liar]) == ((1.0, 1.0, 1.0), 1.0)
    assert composition(run, [short]) == ((1.0, 1.0, 1.0), 1.0)
