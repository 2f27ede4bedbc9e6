"""Standing of peers, exclusion for a time, the canary."""

from __future__ import annotations

from swarm.consensus.trust import MAX_PEERS, Canary, TrustBook, TrustRules

RULES = TrustRules(seniority=3, fault_limit=2, fault_memory=10, exclusion=4, absence=5)


def test_seniority_comes_with_rounds_not_with_records() -> None:
    book = TrustBook(RULES)
    for number in (1, 1, 1, 2):
        book = book.seen(["a"], number)
    assert not book.senior("a")
    assert book.seen(["a"], 3).senior("a")
    assert not book.seen(["a"], 3).seen(["a"], 20).senior("a")  # away for long: anew


def test_faults_exclude_for_a_time_that_doubles() -> None:
    book = TrustBook(RULES).fault("a", 1)
    assert not book.excluded("a", 2)
    assert not book.fault("a", 30).excluded("a", 31)  # the first one is forgotten
    book = book.fault("a", 2)
    assert [book.excluded("a", n) for n in (3, 6, 7)] == [True, True, False]
    book = book.fault("a", 10).fault("a", 11)
    assert [book.excluded("a", n) for n in (12, 19, 20)] == [True, True, False]
    assert not book.excluded("b", 3)


def test_a_flood_of_identities_does_not_wash_out_an_exclusion() -> None:
    book = TrustBook(RULES).exclude("liar", 10)
    book = book.seen([f"s{i}" for i in range(2 * MAX_PEERS)], 11)
    assert len(book.peers) == MAX_PEERS
    assert book.excluded("liar", 12)


def test_canary() -> None:
    canary = Canary(margin_nats=0.1)
    for head, loss in ((b"1", 2.0), (b"2", 1.9), (b"3", 1.95), (b"4", 1.91)):
        canary, alarm = canary.with_loss(head, loss)
        assert not alarm
    after, alarm = canary.with_loss(b"5", 2.5)
    assert alarm
    assert after == canary  # the bad one is not the new normal
    for odd in (float("nan"), float("inf")):
        assert canary.with_loss(b"5", odd)[1]
        assert Canary().with_loss(b"1", odd)[1]
        assert canary.accepting(b"5", odd).recent == ()
    # Harm is measured from where the consensus was best, among what can still be made.
    assert canary.best({b"1", b"2", b"3"}) == b"2"
    assert canary.best({b"1", b"4"}) == b"4"
    assert canary.best({b"9"}) is None
    # Once it was looked into, the next one is measured against what is now.
    later = canary.accepting(b"5", 2.5)
    assert not later.with_loss(b"6", 2.55)[1] and later.with_loss(b"6", 2.7)[1]


def test_who_is_accused() -> None:
    canary, nan = Canary(margin_nats=0.1), float("nan")
    tested = {"me": 1.89, "good": 1.95, "bad": 2.4, "nan": nan}
    assert canary.harmful(1.9, tested, "me") == ["bad", "nan"]
    # Nobody is blamed for what our own part does as well,
    assert canary.harmful(1.9, {**tested, "me": 2.35}, "me") == ["nan"]
    assert canary.harmful(1.9, {**tested, "me": nan}, "me") == []
    # nor, without one of our own, the greater part of the others.
    assert canary.harmful(1.9, {"a": 2.4, "b": 1.9}, "me") == ["a"]
    assert canary.harmful(1.9, {"a": 2.4, "b": 2.5, "c": 1.9}, "me") == []


def test_an_audit_is_due_once_in_a_history() -> None:
    canary, due = Canary(history=4), []
    for number in range(12):
        canary, _ = canary.with_loss(bytes([number]), 2.0 - 0.001 * number)
        due.append(canary.audit_due)
        canary = canary.audited() if canary.audit_due else canary
    assert [n for n, now in enumerate(due) if now] == [3, 7, 11]
    assert canary.oldest({b"\x07", b"\x09", b"\x0a"}) == b"\x09"  # older ones are forgotten
    assert canary.oldest({b"\x00"}) is None
    assert not canary.accepting(b"x", 2.0).with_loss(b"y", 2.0)[0].audit_due


def test_who_undoes_what_we_do_is_found_without_a_jump() -> None:
    canary, nan = Canary(gain_nats=0.02), float("nan")
    tested = {"me": 1.7, "good": 1.75, "idle": 1.9, "noisy": 1.94, "bad": 1.96, "nan": nan}
    assert canary.undoing(1.9, tested, "me") == ["bad", "nan"]
    # Nothing is undone where we gain nothing, or nothing that could be told from chance.
    for mine in (1.95, 1.89, nan):
        assert canary.undoing(1.9, {**tested, "me": mine}, "me") == []
    assert canary.undoing(1.9, {"bad": 2.5}, "me") == []
    assert canary.undoing(1.9, {"me": 1.87, "other": 1.915}, "me") == []


def test_an_exclusion_has_a_reason() -> None:
    book = TrustBook(RULES).fault("a", 1, "first").fault("a", 2, "second")
    assert book.of("a").reason == "second"
    assert book.exclude("a", 20, "canary").of("a").reason == "canary"
