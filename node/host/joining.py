"""Which run an address leads to, also when nobody is there any more.

Decides that a run which was joined through these addresses before is known from its folder: the
peer that one joined through may be gone for ever; the folder knows others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from node.console.terminal import say
from node.host.home import joined_through, run_in, state_home
from node.machine.phases import mark
from node.network.invitation import NobodyAnswers, fetch_run


async def run_of(addresses: Sequence[str], folder: Path | None) -> bytes:
    """The run file behind these addresses. Raises `NobodyAnswers`, `UsageError`."""
    mark("libraries")
    try:
        return await fetch_run(addresses, say)
    except NobodyAnswers:
        homes = [folder] if folder else sorted(state_home().glob("*"))
        for home in homes:
            text = run_in(home)
            if text is not None and (folder or set(joined_through(home)) & set(addresses)):
                return text
        raise
    finally:
        mark("run_file")
