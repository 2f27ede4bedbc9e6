"""Log an unexpected error in a loop and go on.

For vital loops that handle input from strangers: input that trips a bug of ours must cost that
input, not the host. The bug is logged as an error with its traceback; each kind at most once a
minute, because a stranger could repeat it. Cancellation is not caught.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

SAY_AGAIN_S = 60.0

_said: dict[tuple[str, str, type[Exception]], float] = {}  # as many kinds as our code has


@contextmanager
def going_on(log: logging.Logger, what: str, *expected: type[Exception]) -> Iterator[None]:
    """Suppress errors of the block: `expected` ones silently, any other is logged."""
    try:
        yield
    except expected:
        pass
    except Exception as error:
        now_s, kind = time.monotonic(), (log.name, what, type(error))
        if now_s - _said.get(kind, -SAY_AGAIN_S) >= SAY_AGAIN_S:
            _said[kind] = now_s
            log.exception("%s failed unexpectedly; going on", what)
