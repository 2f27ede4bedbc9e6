"""A host or the client of the logical-shape benchmark, in a process whose limits allow its sizes.

    python -m benchmarks.logical_shape.process host SHAPE BLOCK ...     (see `host`)
    python -m benchmarks.logical_shape.process client ADDRESS           (see `client`)

Decides which of the product's limits are lifted, and nothing else. They stand in the product for
good reasons: a run file from a stranger must not make a host allocate without end, and a sweep must
not be held for ever. Here both come from ourselves, and one pass through a block takes minutes.
"""

from __future__ import annotations

import sys

HOP_MAX_S = 900.0  # in the place of 12: one host's part of a sweep
BUDGET_MAX_S = 3600.0  # in the place of 120: a whole sweep


def lift_limits() -> None:
    """Before anything is imported that has read them."""
    early = {"protocol.serving", "node.serving.client", "node.serving.output"} & set(sys.modules)
    assert not early, f"{early} have read the limits already"
    from protocol import limits

    limits.SWEEP_HOP_MAX_S = HOP_MAX_S
    limits.SWEEP_BUDGET_MAX_S = BUDGET_MAX_S
    from swarm.runfile import RunFile

    # A run is there to be trained; the bounds are on its updates and on a worker's memory. Here
    # nothing is trained, and only this process, of the benchmark, goes without them.
    RunFile._check_size = lambda self: None  # type: ignore[method-assign]


def main() -> None:
    lift_limits()
    role, *arguments = sys.argv[1:]
    if role == "host":
        from benchmarks.logical_shape.host import main as host

        host(arguments)
    else:
        from benchmarks.logical_shape.client import main as client

        client(arguments)


if __name__ == "__main__":
    main()
