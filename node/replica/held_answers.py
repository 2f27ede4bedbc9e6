"""Answers that wait a moment for our own word of the round that is asked about.

Two replicas have the same to tell each other in every round: their records, then their votes. If
the one that is ready first is answered only when the other is ready too, one question serves both.
Decides how long an answer waits and who need not be told any more. Knows nothing of what the word
is, nor of messages. Whoever is not ready in time answers what it has, and tells its own later.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress


class HeldAnswers:
    """The answers of one kind; each waits at most `hold_s`, and one at a time for each peer."""

    def __init__(self, hold_s: float) -> None:
        self.hold_s = hold_s
        self._said = -1  # the newest round of which we have said our word
        self._waiting: dict[str, tuple[int, asyncio.Event]] = {}

    async def until_said(self, peer: str, number: int) -> None:
        """Before an answer to `peer` that tells it our word of round `number`."""
        if number <= self._said or peer in self._waiting:
            return
        said = asyncio.Event()
        self._waiting[peer] = number, said
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.hold_s):
                    await said.wait()
        finally:
            if self._waiting.get(peer) == (number, said):
                del self._waiting[peer]

    def say(self, number: int) -> frozenset[str]:
        """Our word of a round is there: who hears it now, in an answer that waited for it."""
        self._said = max(self._said, number)
        due = {peer: said for peer, (round_, said) in self._waiting.items() if round_ <= number}
        told = frozenset(peer for peer in due if self._waiting[peer][0] == number)
        for peer, said in due.items():
            del self._waiting[peer]
            said.set()
        return told
