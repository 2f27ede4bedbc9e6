"""What a loop does about an error that nobody foresaw: it says so, and goes on.

For loops that a host cannot do without and that handle what strangers send: an answer that breaks
our code in a new way must cost that answer, not the host. It is a defect of ours all the same, so
it is logged as an error, with its traceback; each kind at most once a minute, because a stranger
could repeat it. Cancellation passes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

SAY_AGAIN_S = 60.0

_said: dict[tuple[str, str, type[Exception]], float] = {}  # bounded by our own code


@contextmanager
def going_on(log: logging.Logger, what: str, *expected: type[Exception]) -> Iterator[None]:
    """Leave the block at an error: an `expected` one silently, any other is logged."""
    try:
        yield
    except expected:
        pass
    except Exception as error:
        now_s, kind = time.monotonic(), (log.name, what, type(error))
        if now_s - _said.get(kind, -SAY_AGAIN_S) >= SAY_AGAIN_S:
            _said[kind] = now_s
            log.exception("%s failed unexpectedly; going on", what)
