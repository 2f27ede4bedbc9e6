"""The overhead around frames that the ledger is checked against."""

from __future__ import annotations

from benchmarks.link_model import LinkModel


def test_link_model() -> None:
    model = LinkModel()
    assert model.on_the_wire_bytes(0) == 0
    assert model.on_the_wire_bytes(1) == 1 + 12 + 18 + 66
    share = model.on_the_wire_bytes(10**8) / 10**8
    assert 1.04 < share < 1.06
    offloaded = LinkModel(segment_bytes=65_000)
    assert offloaded.on_the_wire_bytes(10**8) / 10**8 < 1.005
    assert model.acknowledgement_bytes(10**8) < 0.03 * 10**8
