"""hivemind without its averager: nothing of it is imported that no host runs."""

from __future__ import annotations

import subprocess
import sys


def _python(code: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.strip()


def test_a_host_imports_neither_the_averager_nor_scipy() -> None:
    unwanted = "{'scipy', 'hivemind.averaging', 'hivemind.optim', 'hivemind.moe'}"
    assert _python(f"import sys, node.host.host; print({unwanted} & set(sys.modules))") == "set()"


def test_a_process_that_has_hivemind_whole_keeps_it() -> None:
    code = (
        "import warnings; warnings.simplefilter('ignore'); import hivemind;"
        "from node.network import hivemind_parts; from hivemind.p2p import P2P;"
        "print(hivemind.DecentralizedAverager.__name__, hivemind_parts.P2P is P2P)"
    )
    assert _python(code) == "DecentralizedAverager True"
