"""A liar: `python tests/support/liar.py LIE join ADDRESS ...` is `blockswarm join` with its lie."""

from __future__ import annotations

import sys
from dataclasses import replace

if __name__ == "__main__":
    from node.cli import main
    from node.host import host
    from node.simulator.liar import Lie, liar

    honest, lie = host.live_parts, Lie(sys.argv.pop(1))
    host.live_parts = lambda: replace(honest(), replica=liar(lie))
    main()
