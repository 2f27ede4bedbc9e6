"""Decode a model's bytes to text as they come, without half characters or parts of stop sequences.

The text does not depend on how the bytes are cut into pieces.
"""

from __future__ import annotations

import codecs


class TextStream:
    """The text of one output as it grows. Bytes that are not UTF-8 become U+FFFD."""

    def __init__(self, stops: tuple[bytes, ...] = ()) -> None:
        self.stops = stops
        self.stopped = False
        self.size_bytes = 0  # of the output, up to and including the stop sequence
        self._held = b""  # held back: may be the beginning of a stop sequence
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, piece: bytes) -> str:
        """Add bytes; return the text that is certain now. The first stop sequence ends the text."""
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
        """End the output; return the text held back, with U+FFFD for half a character."""
        if self.stopped:
            return ""
        held, self._held = self._held, b""
        return self._decoder.decode(held, final=True)

    def _beginning(self, text: bytes) -> int:
        """How many of the last bytes may begin a stop sequence."""
        longest = min(len(text), max((len(stop) for stop in self.stops), default=1) - 1)
        for size in range(longest, 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self.stops):
                return size
        return 0
