"""Serving messages and parcels: round trips, limits, and everything that counts as garbage."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.frames import Head
from protocol.identity import peer_id_of
from protocol.limits import HEADER_MAX_BYTES, PAYLOAD_MAX_BYTES, SWEEP_HOPS_MAX, Kind
from protocol.messages import Message, Purpose, decode_message, purpose_of
from protocol.packing import Malformed, pack, to_map
from protocol.parcel import (
    NIBBLE_TOP,
    Garbage,
    Outcome,
    Parcel,
    from_nibbles,
    outcome_bytes,
    pack_outcome,
    pack_parcel,
    parcel_bytes,
    to_nibbles,
    unpack_outcome,
    unpack_parcel,
)
from protocol.serving import (
    Hop,
    Mode,
    ServingReply,
    ServingRequest,
    Sweep,
    SweepFailed,
    SweepHanded,
    SweepResult,
    SweepTaken,
    SweepWait,
    Trouble,
    Version,
    unpack_hop,
    unpack_version,
)
from tests.support.paths import ROOT

RUN, DIGEST, ID = b"r" * 32, b"d" * 32, b"i" * 16
PEER, OTHER = peer_id_of(b"p" * 32), peer_id_of(b"q" * 32)
WIDTH = 8
HOPS = tuple(Hop(block, DIGEST, float(block), (PEER, OTHER)) for block in range(3))
SWEEP = Sweep(
    run=RUN,
    block=1,
    sweep=ID,
    mode=int(Mode.ONE_SWEEP),
    place=1,
    route=tuple(hop.pack() for hop in HOPS),
    context=5,
    drafts=2,
    length=3,
    temperature=0.7,
    hidden=1,
    weight=1.0,
    budget_s=10.0,
    hop_s=1.0,
    client=PEER,
)
VERIFY = dataclasses.replace(
    SWEEP, mode=int(Mode.VERIFY), drafts=1, session=b"s" * 16, start=4, top_k=3, seed=9
)
GREEDY = dataclasses.replace(VERIFY, temperature=0.0)
DENOISE = dataclasses.replace(SWEEP, mode=int(Mode.DENOISE), drafts=1, seed=5)
EXAMPLES: list[Message] = [
    ServingRequest(run=RUN),
    ServingReply(
        versions=(Version(1, 7, DIGEST).pack(),), waiting=3, usual_s=0.1, weights=(0.0, 1.0)
    ),
    SWEEP,
    VERIFY,
    DENOISE,
    SweepTaken(),
    SweepWait(sweep=ID),
    SweepHanded(handed=1),
    SweepResult(sweep=ID, path=(PEER,), missing=(1,)),
    SweepFailed(sweep=ID, trouble=int(Trouble.GARBAGE), block=2, blamed=PEER, reason="why"),
]


def head(kind: Kind, header: bytes) -> Head:
    return Head(kind, 0, 0, header, 0)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_round_trip(message: Message) -> None:
    assert decode_message(head(message.KIND, message.to_header())) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_every_field_is_checked(message: Message) -> None:
    whole = to_map(message)
    for field in dataclasses.fields(message):
        for bad in (None, "\x1b", -1, 2**63, b"x" * 5000, [[]], 1e300, {"a": 1}):
            with pytest.raises(Malformed):
                decode_message(head(message.KIND, pack({**whole, field.metadata["name"]: bad})))


def test_every_serving_kind_has_a_message_and_stands_in_the_spec() -> None:
    kinds = {kind for kind in Kind if 64 <= kind < 96}
    assert {message.KIND for message in EXAMPLES} == kinds
    spec = (ROOT / "protocol" / "SPEC.md").read_text().splitlines()
    for message in EXAMPLES:
        row = next(line for line in spec if line.startswith(f"| {message.KIND.name} |"))
        for field in dataclasses.fields(message):
            assert f"`{field.metadata['name']}`" in row
    for kind in kinds & set(PAYLOAD_MAX_BYTES):
        size = f"{PAYLOAD_MAX_BYTES[kind] >> 20} MiB"
        assert any(kind.name in line and f"| {size}, 0 |" in line for line in spec)


def test_serving_is_booked_as_serving() -> None:
    assert purpose_of(SWEEP) == (Purpose.SERVING, 1)
    assert purpose_of(SweepWait(sweep=ID))[0] == Purpose.SERVING


def test_the_longest_route_fits_into_a_header() -> None:
    longest = tuple(Hop(b, DIGEST, 1e6, (PEER,) * 3).pack() for b in range(SWEEP_HOPS_MAX))
    sweep = dataclasses.replace(
        VERIFY, route=longest, path=(PEER,) * SWEEP_HOPS_MAX, missing=tuple(range(4000, 4032))
    )
    assert len(sweep.to_header()) <= HEADER_MAX_BYTES


@given(st.binary(max_size=200))
def test_hops_and_versions_of_strangers(data: bytes) -> None:
    for unpack in (unpack_hop, unpack_version):
        with contextlib.suppress(Malformed):
            assert unpack(data).pack() == data


FOREIGN = b"\x12\x20" + b"r" * 36  # the length of ours, and no Ed25519 key in it


@pytest.mark.parametrize(
    ("message", "name", "bad"),
    [
        (SWEEP, "client", PEER[:-1]),
        (SWEEP, "client", FOREIGN),
        (SWEEP, "path", [PEER, FOREIGN]),
        (SWEEP, "route", [HOPS[0].pack(), Hop(1, DIGEST, 1.0, (PEER, FOREIGN)).pack()]),
        (VERIFY, "session", ID[:-1]),
        (SweepResult(sweep=ID, path=(PEER,)), "path", [FOREIGN]),
        (SweepFailed(sweep=ID, trouble=1), "blamed", b"x"),
        (SweepFailed(sweep=ID, trouble=1), "blamed", FOREIGN),
    ],
)
def test_ids_are_whole_or_empty_and_of_peers(message: Message, name: str, bad: object) -> None:
    whole = to_map(message)
    assert decode_message(head(message.KIND, pack(whole))) == message
    with pytest.raises(Malformed):
        decode_message(head(message.KIND, pack({**whole, name: bad})))


@pytest.mark.parametrize("weight", [float("nan"), -1.0, float("inf"), 1e7])
def test_a_weight_that_is_none(weight: float) -> None:
    with pytest.raises(Malformed):
        unpack_hop(Hop(0, DIGEST, weight, (PEER,)).pack())


def test_versions_and_hops_round_trip() -> None:
    assert unpack_hop(HOPS[2].pack()) == HOPS[2]
    assert unpack_version(Version(3, 9, DIGEST).pack()) == Version(3, 9, DIGEST)
    with pytest.raises(Malformed):
        unpack_hop(Hop(0, DIGEST, 1.0, ()).pack())
    with pytest.raises(Malformed):
        unpack_hop(Hop(0, DIGEST, 1.0, (PEER,) * 4).pack())
    with pytest.raises(Malformed):
        unpack_version(Version(5000, 9, DIGEST).pack())


@pytest.mark.parametrize(
    "changes",
    [
        {"place": 3},
        {"block": 2},
        {"route": (HOPS[1].pack(), HOPS[0].pack())},
        {"route": (HOPS[0].pack(), HOPS[0].pack(), HOPS[1].pack())},
        {"session": b"s" * 16},
        {"start": 1},
        {"length": 0},
        {"client": b""},
        {"context": 16384},
        {"mode": 2},
    ],
    ids=str,
)
def test_sweeps_that_contradict_themselves(changes: dict[str, Any]) -> None:
    SWEEP.check()
    VERIFY.check()
    with pytest.raises(Malformed):
        dataclasses.replace(SWEEP, **changes).check()


# Parcels.


def log_probs(*shape: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    values = np.random.default_rng(seed).normal(0, 3, (*shape, 256))
    return (values - np.log(np.exp(values).sum(-1, keepdims=True))).astype(np.float32)


@pytest.mark.parametrize(
    "changes",
    [{"session": b"s" * 16}, {"start": 1}, {"length": 0}, {"drafts": 2}, {"context": 16384}],
    ids=str,
)
def test_denoising_that_contradicts_itself(changes: dict[str, Any]) -> None:
    DENOISE.check()
    with pytest.raises(Malformed):
        dataclasses.replace(DENOISE, **changes).check()


def parcel_for(sweep: Sweep) -> Parcel:
    rng = np.random.default_rng(1)
    rows, length = sweep.drafts, sweep.length
    if sweep.mode == Mode.DENOISE:
        return Parcel(
            rng.integers(0, 256, sweep.context, dtype=np.uint8),
            hidden_context=rng.normal(size=(sweep.context, WIDTH)).astype(np.float32),
            hidden_drafts=rng.normal(size=(1, length, WIDTH)).astype(np.float32),
            z=rng.normal(size=(length, WIDTH)).astype(np.float32),
        )
    verify = sweep.mode == Mode.VERIFY
    drafted = log_probs(rows, length) if verify else log_probs(rows, length)[..., 0].sum(-1)
    return Parcel(
        rng.integers(0, 256, sweep.context, dtype=np.uint8),
        rng.integers(0, 256, (rows, length), dtype=np.uint8),
        None if verify and sweep.temperature == 0 else drafted,
        rng.normal(size=(sweep.context, WIDTH)).astype(np.float32),
        rng.normal(size=(rows, length, WIDTH)).astype(np.float32),
        log_probs(rows, length + verify, seed=2),
    )


@pytest.mark.parametrize(
    "sweep", [SWEEP, VERIFY, GREEDY, DENOISE], ids=["one-sweep", "sampled", "greedy", "denoise"]
)
def test_parcels_round_trip(sweep: Sweep) -> None:
    parcel = parcel_for(sweep)
    data = pack_parcel(sweep, WIDTH, parcel)
    assert len(data) == parcel_bytes(sweep, WIDTH)
    found = unpack_parcel(sweep, WIDTH, data)
    exact = sweep.mode != Mode.ONE_SWEEP
    for field in dataclasses.fields(Parcel):
        before, after = getattr(parcel, field.name), getattr(found, field.name)
        assert (before is None) == (after is None)
        if before is not None:
            rough = 0.02 if field.name == "state" else 0.25  # half a step of the 4-bit codes
            assert np.allclose(before, after, rtol=1e-5, atol=0 if exact else rough)


@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.floats(1e-3, 1e3))
def test_vectors_in_four_bits(seed: int, width: int, size: float) -> None:
    """Half a step off at most, and zeros stay zeros."""
    vectors = np.random.default_rng(seed).normal(0, size, (3, 2, width)).astype(np.float32)
    vectors[0, 0] = 0.0
    scales, pairs = to_nibbles(vectors)
    assert pairs.shape == (3, 2, (width + 1) // 2) and pairs.dtype == np.uint8
    found = from_nibbles(scales, pairs, width)
    step = np.abs(vectors).max(-1, keepdims=True) / NIBBLE_TOP
    assert (np.abs(found - vectors) <= 0.51 * step + 1e-6).all()
    assert not found[0, 0].any()


def test_a_whole_output_with_hidden_states_is_small() -> None:
    """What the round trips of TCP's first windows are saved by."""
    sweep = dataclasses.replace(SWEEP, context=64, drafts=8, length=128, weight=0.0)
    assert parcel_bytes(sweep, 96) == 64 + 8 * 128 + 8 * 4 + (64 + 8 * 128) * (2 + 48)


def test_a_verification_travels_in_full_precision() -> None:
    parcel = parcel_for(VERIFY)
    found = unpack_parcel(VERIFY, WIDTH, pack_parcel(VERIFY, WIDTH, parcel))
    assert found.state is not None and parcel.state is not None
    assert np.array_equal(found.state, parcel.state)


def test_the_drafter_gets_the_context_alone() -> None:
    first = dataclasses.replace(VERIFY, place=0, block=0, hidden=0, weight=0.0)
    found = unpack_parcel(first, WIDTH, b"abcde")
    assert found.context.tobytes() == b"abcde" and found.drafts is None


@pytest.mark.parametrize("sweep", [SWEEP, VERIFY], ids=["one-sweep", "verify"])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("hidden_context", lambda a: a * np.nan),
        ("hidden_drafts", lambda a: a + np.inf),
        ("state", lambda a: a - 1.0),
        ("state", lambda a: a + 1.0),
        ("state", lambda a: a * np.nan),
        ("state", lambda a: -a),
        ("drafted", lambda a: a * np.nan),
        ("drafted", lambda a: np.abs(a)),
    ],
)
def test_garbage_is_found_out(sweep: Sweep, name: str, change: Any) -> None:
    parcel = parcel_for(sweep)
    bad = dataclasses.replace(parcel, **{name: change(getattr(parcel, name))})
    with np.errstate(over="ignore", invalid="ignore"):
        data = pack_parcel(sweep, WIDTH, bad)
    with pytest.raises(Garbage):
        unpack_parcel(sweep, WIDTH, data)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("z", lambda a: a * np.nan),
        ("z", lambda a: a + np.inf),
        ("z", lambda a: a + 2e3),
        ("hidden_context", lambda a: a * np.nan),
        ("hidden_drafts", lambda a: a - np.inf),
    ],
)
def test_garbage_in_denoising_is_found_out(name: str, change: Any) -> None:
    parcel = parcel_for(DENOISE)
    bad = dataclasses.replace(parcel, **{name: change(getattr(parcel, name))})
    data = pack_parcel(DENOISE, WIDTH, bad)
    with pytest.raises(Garbage):
        unpack_parcel(DENOISE, WIDTH, data)
    for off in (-4, -1, 1):
        with pytest.raises(Garbage):
            unpack_parcel(DENOISE, WIDTH, (data + b"x")[: len(data) + off])


@given(st.integers(-3, 3).filter(bool))
def test_another_length_is_garbage(off: int) -> None:
    data = pack_parcel(SWEEP, WIDTH, parcel_for(SWEEP)) + b"xxx"
    with pytest.raises(Garbage):
        unpack_parcel(SWEEP, WIDTH, data[: parcel_bytes(SWEEP, WIDTH) + off])


@given(st.binary(min_size=0, max_size=4000))
def test_any_bytes_are_a_parcel_or_garbage(data: bytes) -> None:
    for sweep in (SWEEP, VERIFY, DENOISE):
        data = data.ljust(parcel_bytes(sweep, WIDTH), b"\x7f")[: parcel_bytes(sweep, WIDTH)]
        with contextlib.suppress(Garbage):
            unpack_parcel(sweep, WIDTH, data)


# Results.


def outcome_for(sweep: Sweep) -> Outcome:
    if sweep.mode == Mode.DENOISE:
        scores = log_probs(1, sweep.length)[..., 0]
        return Outcome(np.zeros((1, sweep.length), np.uint8), scores=scores)
    parcel = parcel_for(sweep)
    assert parcel.drafts is not None
    if sweep.mode == Mode.ONE_SWEEP:
        scores = log_probs(sweep.drafts, sweep.length)[..., 0]
        return Outcome(parcel.drafts, parcel.drafted, scores=scores)
    if sweep.temperature > 0:
        return Outcome(parcel.drafts, parcel.drafted, log_probs=log_probs(sweep.length + 1))
    best = log_probs(sweep.length + 1)
    return Outcome(parcel.drafts, best=best.argmax(-1).astype(np.uint8), best_scores=best.max(-1))


@pytest.mark.parametrize(
    "sweep", [SWEEP, VERIFY, GREEDY, DENOISE], ids=["one-sweep", "sampled", "greedy", "denoise"]
)
def test_outcomes_round_trip(sweep: Sweep) -> None:
    outcome = outcome_for(sweep)
    data = pack_outcome(sweep, outcome)
    assert len(data) == outcome_bytes(sweep)
    found = unpack_outcome(sweep, data)
    for field in dataclasses.fields(Outcome):
        before, after = getattr(outcome, field.name), getattr(found, field.name)
        assert (before is None and after is None) or np.array_equal(before, after)
    with pytest.raises(Garbage):
        unpack_outcome(sweep, data[:-1])


@pytest.mark.parametrize(
    ("sweep", "name"),
    [
        (SWEEP, "scores"),
        (SWEEP, "drafted"),
        (VERIFY, "log_probs"),
        (GREEDY, "best_scores"),
        (DENOISE, "scores"),
    ],
    ids=str,
)
def test_garbage_in_results_is_found_out(sweep: Sweep, name: str) -> None:
    outcome = outcome_for(sweep)
    for change in (np.nan, 1.0):
        bad = dataclasses.replace(outcome, **{name: np.abs(getattr(outcome, name)) * change + 1})
        with pytest.raises(Garbage):
            unpack_outcome(sweep, pack_outcome(sweep, bad))
