"""Whom a client believes to serve: who answered, and once whoever is silent for a moment."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from node.serving.client import SweepClient
from swarm.writing.route import Offer
from tests.conftest import MakeRun


def offer(peer: bytes) -> Offer:
    return Offer(peer, (), 0.1, 0, 0.1, (), 1.0)


class Hosts(SweepClient):
    """Hosts that answer as they are told: real ones are not silent at a given moment."""

    def __init__(self, run: Any) -> None:
        service = SimpleNamespace(take=lambda *_: None)
        network: Any = SimpleNamespace(service=service, serve=lambda *_: None)
        super().__init__(network, b"run", run, lambda line: None)
        self.there = {b"a", b"b"}

    async def _serving_peers(self) -> set[bytes]:
        return {b"a", b"b"}

    async def _ask(self, peer: bytes) -> Offer | None:
        return offer(peer) if peer in self.there else None


def known(hosts: Hosts) -> set[bytes]:
    found = [one.peer for one in hosts.offers]
    assert len(found) == len(set(found))
    return set(found)


def test_a_host_that_is_silent_once_is_believed_once(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.serving.client.SURVEY_AGAIN_S", 0.0)

    async def main() -> None:
        hosts = Hosts(tiny_run())
        for there, believed in (
            ({b"a", b"b"}, {b"a", b"b"}),
            ({b"a"}, {b"a", b"b"}),  # perhaps it is only slow
            ({b"a", b"b"}, {b"a", b"b"}),
            (set(), {b"a", b"b"}),  # perhaps we are
            ({b"a"}, {b"a"}),
            (set(), {b"a"}),
            (set(), set()),
        ):
            hosts.there = there
            await hosts.survey()
            assert known(hosts) == believed, there

    asyncio.run(main())
