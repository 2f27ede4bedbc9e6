"""One peer of hivemind's for `benchmarks.averaging`: a DHT and a DecentralizedAverager per codec.

    python -m benchmarks.averaging.hivemind_peer '{"index": 0, "peers": 4, "codecs": ["fp16"], ...}'

As its documentation says to use it, with the group's size known. A step is matchmaking, then the
all-reduce: with `require_trigger` the averager stops between the two, so that each is timed alone
and all peers begin the all-reduce at the same moment. Speaks JSON lines, as `peer` does.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.averaging.swarm import lo_bytes
from node.machine.memory import keep_freed_memory

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # hivemind's import uses what torch calls deprecated
    import hivemind
    from hivemind.averaging.control import AveragingStage
    from hivemind.compression import (
        BlockwiseQuantization,
        CompressionBase,
        Float16Compression,
        Uniform8BitQuantization,
    )

COMPRESSION: dict[str, tuple[type[CompressionBase], float]] = {  # and its bytes per value
    "fp16": (Float16Compression, 2),
    "uniform8": (Uniform8BitQuantization, 1),
    "blockwise8": (BlockwiseQuantization, 1),
}
TENSOR_VALUES = 2_500_000  # a model has several tensors; the averager cuts them into parts
PART_MAX_BYTES = 2**19  # its default
MATCHMAKING_S = 20.0


def parts_of(vector: torch.Tensor) -> Sequence[torch.Tensor]:
    starts = range(0, len(vector), TENSOR_VALUES)
    return [vector[start : start + TENSOR_VALUES] for start in starts]


class Peer:
    def __init__(self, told: dict[str, Any]) -> None:
        self.dht = hivemind.DHT(initial_peers=told["join"], start=True)
        self.averagers = {codec: self._averager(told, codec) for codec in told["codecs"]}
        self.step: Any = None
        self.done_s = 0.0

    def _averager(self, told: dict[str, Any], codec: str) -> hivemind.DecentralizedAverager:
        kind, width = COMPRESSION[codec]
        size, peers = told["size"], told["peers"]
        tensors = [part.clone() for part in parts_of(torch.zeros(size))]
        # Each peer reduces 1/peers of the vector: some parts each, or the last one waits.
        part_bytes = min(PART_MAX_BYTES, max(2**16, int(size * width / peers / 4)))
        return hivemind.DecentralizedAverager(
            tensors,
            self.dht,
            start=True,
            prefix=f"averaging{codec}",
            target_group_size=peers,
            min_group_size=peers,
            min_matchmaking_time=told["matchmaking_s"],
            request_timeout=told["matchmaking_s"] * 0.6,
            compression=kind(),
            part_size_bytes=told.get("part_bytes") or part_bytes,
            sender_timeout=told["sender_timeout_s"],
            reducer_timeout=2 * told["sender_timeout_s"],
            allreduce_timeout=8 * told["sender_timeout_s"],
            allow_state_sharing=False,
        )

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        averager = self.averagers[order["codec"]]
        match order["op"]:
            case "load":
                vector = torch.from_numpy(np.load(order["path"]))
                with averager.get_tensors() as tensors:
                    for tensor, part in zip(tensors, parts_of(vector), strict=True):
                        tensor.copy_(part)
            case "counters":
                return {"lo_bytes": lo_bytes()}
            case "match":
                return self._match(averager)
            case "go":
                # All peers begin at one moment.
                time.sleep(max(order["at_s"] - time.monotonic(), 0.0))
                self.step.allow_allreduce()
                try:
                    group = self.step.result(timeout=300)
                except Exception as error:  # whatever a killed peer makes of it
                    return {"seconds": time.monotonic() - order["at_s"], "failed": repr(error)}
                return {"seconds": time.monotonic() - order["at_s"], "group": len(group)}
            case "check":
                wanted = np.load(order["path"])
                with averager.get_tensors() as tensors:
                    found = torch.cat(list(tensors)).numpy()
                distance = float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
                return {"error": distance}
        return {}

    def _match(self, averager: hivemind.DecentralizedAverager) -> dict[str, Any]:
        """Look for the group until it is there, or give up: all of them then look again."""
        began_s = time.monotonic()
        if self.step is not None and not self.step.done():
            self.step.cancel()
        self.step = averager.step(
            wait=False, require_trigger=True, allow_retries=True, timeout=MATCHMAKING_S
        )
        while self.step.stage is not AveragingStage.AWAITING_TRIGGER:
            if self.step.done() or time.monotonic() - began_s > MATCHMAKING_S:
                return {"failed": "no group"}
            # hivemind has no event for it; it ends by MATCHMAKING_S.
            time.sleep(0.005)
        return {"seconds": time.monotonic() - began_s}


def main(told: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()  # as ours does; what it forks inherits it. At 100 MB 6 % less CPU, else 1 %
    peer = Peer(told)
    print(json.dumps({"join": [str(a) for a in peer.dht.get_visible_maddrs()]}), flush=True)
    try:
        for line in sys.stdin:
            print(json.dumps(peer.obey(json.loads(line))), flush=True)
    finally:
        for averager in peer.averagers.values():
            averager.shutdown()
        peer.dht.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
