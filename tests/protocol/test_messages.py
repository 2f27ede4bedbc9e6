"""Messages: each one round-trips, each field has its limits, newer versions are understood."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from protocol import frames, messages, packing
from protocol.errors import WireError
from protocol.frames import Head
from protocol.limits import (
    BUSY_RETRY_MAX_S,
    HEADER_MAX_BYTES,
    KIND_LIMITS,
    PAYLOAD_MAX_BYTES,
    Kind,
)
from protocol.messages import (
    BusyReply,
    ErrorCode,
    ErrorReply,
    Hello,
    LogReply,
    LogRequest,
    Message,
    PeersRequest,
    Ping,
    Pong,
    Purpose,
    UpdateRequest,
    VoteRequest,
    decode_message,
    error_reply,
    expect,
    purpose_of,
)
from protocol.packing import Malformed, pack
from protocol.records import RecordExpired
from tests.support.message_examples import DIGEST, EXAMPLES, RUN


def head(kind: Kind, header: bytes) -> Head:
    return Head(kind, 0, 0, header, 0)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_round_trip(message: Message) -> None:
    header = message.to_header()
    assert decode_message(head(message.KIND, header)) == message
    assert len(header) <= HEADER_MAX_BYTES


def test_every_kind_has_a_message_and_an_example() -> None:
    serving = {kind for kind in Kind if 64 <= kind < 96}  # test_protocol_serving.py has those
    assert {message.KIND for message in EXAMPLES} == set(Kind) - serving
    assert set(KIND_LIMITS) == set(Kind)
    assert all(KIND_LIMITS[kind].payload_bytes == size for kind, size in PAYLOAD_MAX_BYTES.items())


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_unknown_fields_are_ignored(message: Message) -> None:
    fields = {**packing.to_map(message), "future": [1, 2, {"deep": None}]}
    assert decode_message(head(message.KIND, pack(fields))) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_every_field_is_checked(message: Message) -> None:
    whole = packing.to_map(message)
    for field in dataclasses.fields(message):
        name = field.metadata["name"]
        bad: list[object] = [None, -1, 2**64 - 1, 1.5e308, float("nan"), True, {"a": 1}, [[]]]
        for value in (*bad, "\x1b[31m", "x" * 6000, b"x" * 6000, [0] * 100):
            with pytest.raises(Malformed):
                decode_message(head(message.KIND, pack({**whole, name: value})))
        if field.default is dataclasses.MISSING:
            without = {key: value for key, value in whole.items() if key != name}
            with pytest.raises(Malformed, match="missing"):
                decode_message(head(message.KIND, pack(without)))


def test_nothing_is_sent_that_would_be_refused() -> None:
    with pytest.raises(Malformed):
        UpdateRequest(run=b"short", block=1, round=1, digest=DIGEST).to_header()
    with pytest.raises(Malformed):
        BusyReply(retry_after_s=BUSY_RETRY_MAX_S + 1).to_header()


@pytest.mark.parametrize("header", [b"", b"\x90", b"\xc0", b"\x80\x80", b"\xff" * 100])
def test_headers_that_are_no_map(header: bytes) -> None:
    with pytest.raises(Malformed):
        decode_message(head(Kind.PING, header))


def test_expect() -> None:
    assert expect(Pong(now_s=1.0), Pong) == Pong(now_s=1.0)
    with pytest.raises(frames.Busy) as busy:
        expect(BusyReply(retry_after_s=3.0), Pong)
    assert busy.value.retry_after_s == 3.0
    with pytest.raises(frames.Refused, match="not here") as refused:
        expect(ErrorReply(code=6, reason="not here"), Pong)
    assert refused.value.code == ErrorCode.NOT_FOUND
    with pytest.raises(Malformed, match="expected Pong"):
        expect(Ping(), Pong)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (frames.VersionMismatch("x"), ErrorCode.VERSION),
        (frames.UnknownKind(9), ErrorCode.UNKNOWN_KIND),
        (frames.Oversize("x"), ErrorCode.OVERSIZE),
        (frames.DigestMismatch("x"), ErrorCode.DIGEST),
        (frames.Stalled("x"), ErrorCode.TOO_SLOW),
        (Malformed("a\x00b\n" + "y" * 999), ErrorCode.MALFORMED),
        (RecordExpired("x"), ErrorCode.NOT_ALLOWED),
        (WireError("a secret address"), ErrorCode.NOT_ALLOWED),
        (RuntimeError("a secret path"), ErrorCode.INTERNAL),
    ],
)
def test_error_replies(error: Exception, code: ErrorCode) -> None:
    reply = error_reply(error)
    assert reply.code == code
    assert "secret" not in reply.reason
    assert decode_message(head(Kind.ERROR, reply.to_header())) == reply


@pytest.mark.parametrize(
    ("request_", "purpose", "block"),
    [
        (Hello(), Purpose.CONTROL, 65535),
        (PeersRequest(run=RUN, block=2), Purpose.RECORD, 2),
        (EXAMPLES[-4], Purpose.RECORD, 1),
        (VoteRequest(run=RUN, block=1, round=9), Purpose.VOTE, 1),
        (UpdateRequest(run=RUN, block=1, round=9, digest=DIGEST), Purpose.UPDATE, 1),
        (UpdateRequest(run=RUN, block=1, round=9, digest=DIGEST, purpose=3), Purpose.REPAIR, 1),
        (LogRequest(run=RUN, block=1), Purpose.CATCH_UP, 1),
        (LogRequest(run=RUN, block=1, purpose=int(Purpose.ASSEMBLY)), Purpose.ASSEMBLY, 1),
    ],
)
def test_what_an_exchange_is_booked_under(request_: Message, purpose: int, block: int) -> None:
    assert purpose_of(request_) == (purpose, block)


def test_pins_have_one_length() -> None:
    reply = LogReply(block=1, head_round=9, consensus=DIGEST, count=4)
    for pins in ((b"p" * 71,), (b"p" * 73,), (b"p" * 72,) * 5):
        with pytest.raises(Malformed):
            dataclasses.replace(reply, pins=pins).to_header()


def test_unknown_error_codes_stay_numbers() -> None:
    message: Any = decode_message(head(Kind.ERROR, pack({"code": 4000, "new": 1})))
    assert message == ErrorReply(code=4000)


def test_the_registry_is_closed() -> None:
    import protocol.serving  # noqa: F401

    assert len(Message.__subclasses__()) == len(messages._BY_KIND) == len(Kind)
