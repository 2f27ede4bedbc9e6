"""A liar: `python tests/support/liar.py LIE join ADDRESS ...` is `blockswarm join` with its lie."""

from __future__ import annotations

import sys
from dataclasses import replace

if __name__ == "__main__":
    from node.cli import main
    from node.host import block_work
    from node.simulator.liar import Lie, liar

    honest, lie = block_work.live_parts, Lie(sys.argv.pop(1))
    block_work.live_parts = lambda: replace(honest(), replica=liar(lie))
    main()
