"""Standing of peers, exclusion for a time, the canary."""

from __future__ import annotations

from swarm.trust import MAX_PEERS, Canary, TrustBook, TrustRules

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
    for loss in (2.0, 1.9, 1.95, 1.9):
        canary, alarm = canary.with_loss(loss)
        assert not alarm
    after, alarm = canary.with_loss(2.5)
    assert alarm
    assert after == canary  # the bad one is not the new normal
    assert canary.with_loss(float("nan"))[1]
    tested = [("good", 1.89), ("bad", 2.4), ("nan", float("nan"))]
    assert canary.harmful(1.9, tested) == ["bad", "nan"]
