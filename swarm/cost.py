"""What a run costs a host: memory, bytes on the wire, disk. Estimates from its run file alone.

For users who consider joining, and for the choice of a block. For the costliest block unless one is
given; rather too high than too low. `benchmarks.join_time` compares the memory with a real host's.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from protocol.codec import CodecId, CodecSpec
from swarm.learning.coupling import followed_blocks
from swarm.rounds.state import MAX_GROUP
from swarm.run import VOCABULARY, ModelShape, Objective, Run

if TYPE_CHECKING:
    from swarm.runfile import RunFile

# Two processes with torch and the library pages that they share, hivemind's DHT in one of them,
# p2pd (64 MiB).
RUNTIME_BYTES = 560 << 20
WORKER_BYTES_PER_WEIGHT = 20  # fp32 weights, gradients, two moments of Adam, int32 consensus
# An fp32 vector shared with the node, two snapshots, the trend, room for the next consensus; the
# newest steps, whose size depends on the updates' density; what is put aside of an update, in half
# precision, and for a moment its change to the weights.
EXCHANGE_BYTES_PER_WEIGHT = 38
# A followed block: its int32 consensus, the fp16 version that its copy moves to, and the copy.
# Copies are in full precision one at a time, in memory that the gradients use later.
COPY_BYTES_PER_WEIGHT = 8
LAYER_FLOATS_PER_WIDTH = 18  # kept for the backward pass, per byte of context
HEAD_FLOATS = 2 * VOCABULARY  # the loss of a slice at a time: its logits and their softmax
SAVED_BYTES_PER_WEIGHT = 2 * 16 + 2 * 4  # a checkpoint and the one that replaces it, two snapshots


def block_parameters(run: Run) -> tuple[int, ...]:
    """Parameters of every block of a run, without building one."""
    joint = run.model.width + VOCABULARY if run.denoises else 0  # unknown, byte_prior
    return tuple(n + joint for n in parameter_counts(run.model, run.training.objective))


def parameter_counts(shape: ModelShape, objective: Objective) -> tuple[int, ...]:
    """Parameters of every block of a shape, without the few that joint denoising adds."""
    width, layers = shape.width, shape.layers
    count = VOCABULARY * width + layers * (12 * width**2 + 2 * width)
    if objective == "edm":
        count += 2 * width**2 + width + 1  # z_in, denoised_out, log_scale
        count += (16 + 1) * 64 + (64 + 1) * 4 * layers * width  # the modulation by sigma
    else:
        count += VOCABULARY * (width + 1)  # head
    relay_in = width**2 if shape.relays else 0
    return (count, *(count + relay_in for _ in range(1, shape.blocks)))


def worker_memory_bytes(runfile: RunFile, block: int | None = None) -> int:
    """Memory of a host with one worker; with a GPU, of both memories together."""
    shape, training = runfile.run.model, runfile.run.training
    counts = block_parameters(runfile.run)
    if block is None:  # the last two follow most blocks; the first of these also looks ahead
        last = shape.blocks - 1
        return max(worker_memory_bytes(runfile, b) for b in {max(0, last - 1), last})
    followed = followed_blocks(shape, block)
    own = counts[block] * (WORKER_BYTES_PER_WEIGHT + EXCHANGE_BYTES_PER_WEIGHT)
    copies = sum(counts[other] for other in followed) * COPY_BYTES_PER_WEIGHT
    floats = shape.layers * LAYER_FLOATS_PER_WIDTH * shape.width + HEAD_FLOATS
    through = 2 if block + 1 in followed else 1
    activations = 4 * through * floats * training.batch * shape.context
    return RUNTIME_BYTES + own + copies + activations


def expected_update_bytes(runfile: RunFile, block: int | None = None) -> int:
    """The size of an update, averaged over the run."""
    size = runfile.parameters(block)
    return math.ceil(runfile.codecs.mean(lambda codec: encoded_bytes(codec, size)))


def encoded_bytes(codec: CodecSpec, size: int) -> float:
    """The encoded size of `size` weights; with top-k a kept one costs its value and its gap."""
    if codec.codec != CodecId.TOPK:
        return codec.max_bytes(size)
    kept = codec.max_kept(size)
    return kept * (math.log2(size / kept) + 1.5 + codec.value_bits) / 8


def expected_step_bytes(runfile: RunFile, replicas: int, block: int | None = None) -> int:
    """Bytes of the updates in one step of the log; at most those of the dense weights."""
    dense = 4 * runfile.parameters(block)
    return min(max(1, replicas) * expected_update_bytes(runfile, block), dense)


def expected_gb_per_day(runfile: RunFile, replicas: int, block: int | None = None) -> float:
    """GB in both directions, with `replicas` hosts on every block: updates and followed logs.

    An average host sends as much as it receives.
    """
    shape = runfile.run.model
    worst = shape.blocks - 1 if block is None else block
    pulled = max(0, min(replicas, MAX_GROUP) - 1) * expected_update_bytes(runfile, worst)
    for other in followed_blocks(shape, worst):
        pulled += expected_step_bytes(runfile, replicas, other)
    return 2 * pulled * (86400.0 / runfile.rounds.period_s) / 1e9


def disk_bytes(runfile: RunFile, replicas: int, block: int | None = None) -> int:
    """Bytes of checkpoints and of the log with its snapshots; without the corpus."""
    saved = SAVED_BYTES_PER_WEIGHT * runfile.parameters(block)
    steps = 2 * runfile.exchange.snapshot_every * expected_step_bytes(runfile, replicas, block)
    return saved + steps
