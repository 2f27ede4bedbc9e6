"""Bytes of a model into text for a stream: never half a character, never half a stop sequence.

Decides what can be said already and what must wait for more bytes. However the bytes are cut into
pieces, the text is the same. Knows nothing of where they come from.
"""

from __future__ import annotations

import codecs


class TextStream:
    """The text of one output as it grows. Bytes that are not UTF-8 become U+FFFD."""

    def __init__(self, stops: tuple[bytes, ...] = ()) -> None:
        self.stops = stops
        self.stopped = False
        self.size_bytes = 0  # what was written, with the stop sequence, without what followed it
        self._held = b""  # may be the beginning of a stop sequence
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, piece: bytes) -> str:
        """What can be said after these bytes. The stop sequence that is complete first counts."""
        if self.stopped:
            return ""
        known, text = self.size_bytes - len(self._held), self._held + piece
        found = [(at + len(stop), at) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            end, begin = min(found)  # of two that end together the longer one
            self.stopped, self._held, self.size_bytes = True, b"", known + end
            return self._decoder.decode(text[:begin], final=True)
        self.size_bytes = known + len(text)
        keep = self._beginning(text)
        self._held = text[len(text) - keep :]
        return self._decoder.decode(text[: len(text) - keep])

    def end(self) -> str:
        """There are no more bytes: what was held back, and U+FFFD for half a character."""
        if self.stopped:
            return ""
        held, self._held = self._held, b""
        return self._decoder.decode(held, final=True)

    def _beginning(self, text: bytes) -> int:
        """How many of the last bytes may be the beginning of a stop sequence."""
        longest = min(len(text), max((len(stop) for stop in self.stops), default=1) - 1)
        for size in range(longest, 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self.stops):
                return size
        return 0
