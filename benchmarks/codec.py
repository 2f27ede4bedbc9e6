"""Codecs on a 40 MB float32 update, one core, beside hivemind's own in the same run.

Every round times each codec once, in turn, so that a slow moment of the machine hits all of them;
a codec's time is its best round. Times are CPU seconds of this process (torch is held to one
thread), because the machine may be shared. Two inputs: a Gaussian update whose rows have
different scales, and one like a trained Transformer's: heavy tails, scales by row, by column and
by tensor. Figures are the worse of the two.

Knows nothing of training: what a codec costs in CE is another benchmark's question.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from protocol.codec import DEFAULT_CODEC, decode, encode

SEED = 0
OURS = [
    "fp32",
    "bf16",
    "int8",
    "int4",
    "fp32+zstd",
    "bf16+zstd",
    "int8+zstd",
    "int4+zstd",
    "topk:0.01:8",
    "topk:0.01:4",
    "topk:0.01:2",
    "topk:0.01:1",
    "topk:0.02:8",
    "topk:0.02:4",
    "topk:0.02:2",
    "topk:0.02:1",
    "topk:0.02:2:65536",
    "topk:0.02:2:overall",
    "topk:0.02:1:overall",
]
PEERS = ["Float16Compression", "Uniform8BitQuantization", "BlockwiseQuantization"]
UNIFORM8 = "hivemind Uniform8BitQuantization"


@dataclass(frozen=True)
class Candidate:
    """One way to make bytes of a vector: sizes are of the payload, with all of its headers."""

    name: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], np.ndarray[Any, Any]]
    size_bytes: Callable[[Any], int]
    kept: Callable[[Any], int]


def gaussian_update(size: int) -> np.ndarray[Any, Any]:
    """Rows of 1000 coordinates, each with its own scale."""
    random = np.random.default_rng(SEED)
    rows = np.exp(0.5 * random.standard_normal((size // 1000, 1))).astype(np.float32)
    values = random.standard_normal((size // 1000, 1000), dtype=np.float32)
    return (values * rows * np.float32(1e-3)).ravel()


def heavy_tailed_update(size: int) -> np.ndarray[Any, Any]:
    """Ten tensors of rows of 1000: Student's t with 4 degrees, scales by row, column, tensor."""
    random = np.random.default_rng(SEED + 1)
    height = size // 10_000
    shape = (10, height, 1000)
    scale = np.exp(
        0.5 * random.standard_normal((10, 1, 1))
        + 0.4 * random.standard_normal((10, height, 1))
        + 0.4 * random.standard_normal((10, 1, 1000))
    ).astype(np.float32)
    values = random.standard_t(4, shape).astype(np.float32)
    return (values * scale * np.float32(1e-3)).ravel()


def _our_candidate(text: str, size: int) -> Candidate:
    return Candidate(
        text,
        lambda vector: encode(vector, text),
        lambda encoded: decode(encoded.data, size).dense(),
        lambda encoded: len(encoded.data),
        lambda encoded: len(decode(encoded.data, size).values),
    )


def _peer_candidate(name: str) -> Candidate:
    import hivemind.compression as peers

    peer = getattr(peers, name)()
    return Candidate(
        f"hivemind {name}",
        lambda vector: peer.compress(torch.from_numpy(vector), _info(vector)),
        lambda message: peer.extract(message).numpy(),
        lambda message: len(message.SerializeToString()),
        lambda message: int(np.prod(tuple(message.size))),
    )


def _info(vector: np.ndarray[Any, Any]) -> Any:
    from hivemind.compression import CompressionInfo

    return CompressionInfo.from_tensor(torch.from_numpy(vector))


def _candidates(size: int) -> tuple[list[Candidate], list[str]]:
    """What can run here, and which of hivemind's cannot (Blockwise needs bitsandbytes)."""
    found, missing = [], []
    for name in PEERS:
        candidate = _peer_candidate(name)
        try:
            candidate.encode(np.ones(8192, dtype=np.float32))
            found.append(candidate)
        except ImportError:
            missing.append(candidate.name)
    return found + [_our_candidate(text, size) for text in OURS], missing


def _measure(
    candidates: list[Candidate], vector: np.ndarray[Any, Any], rounds: int
) -> list[dict[str, Any]]:
    encode_s = {c.name: float("inf") for c in candidates}
    decode_s = dict(encode_s)
    rows: dict[str, dict[str, Any]] = {}
    norm = float(np.linalg.norm(vector))
    for round_number in range(rounds):
        for candidate in candidates:
            before = time.process_time()
            encoded = candidate.encode(vector)
            between = time.process_time()
            decoded = candidate.decode(encoded)
            after = time.process_time()
            encode_s[candidate.name] = min(encode_s[candidate.name], between - before)
            decode_s[candidate.name] = min(decode_s[candidate.name], after - between)
            if round_number == 0:
                size_bytes, kept = candidate.size_bytes(encoded), candidate.kept(encoded)
                rows[candidate.name] = {
                    "codec": candidate.name,
                    "bytes": size_bytes,
                    "ratio": round(vector.nbytes / size_bytes, 3),
                    "bits_per_kept": round(8 * size_bytes / kept, 3),
                    "relative_error": round(float(np.linalg.norm(decoded - vector)) / norm, 6),
                }
    megabytes = vector.nbytes / 1e6
    for name, row in rows.items():
        row["encode_mb_per_s"] = round(megabytes / encode_s[name], 1)
        row["decode_mb_per_s"] = round(megabytes / decode_s[name], 1)
    return list(rows.values())


def _index_bits(row: dict[str, Any], size: int, chunk: int = 4096) -> dict[str, float]:
    """Of a 1-bit top-k: what an index costs, beside the entropy of independent coordinates."""
    kept = 8 * row["bytes"] / row["bits_per_kept"]
    rate = kept / size
    bound = -np.log2(rate) - (1 - rate) / rate * np.log2(1 - rate)
    index = row["bits_per_kept"] - 1 - 8 * (size / chunk) / kept
    return {"index_bits": round(float(index), 3), "index_entropy_bits": round(float(bound), 3)}


def run(quick: bool) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """(figures, rows)."""
    size, rounds = 10_000_000, 2 if quick else 7  # smaller inputs fit into the cache
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    worst: dict[str, list[float]] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hivemind uses torch functions that are deprecated
            candidates, missing = _candidates(size)
            for data, make in (
                ("gaussian", gaussian_update),
                ("heavy-tailed", heavy_tailed_update),
            ):
                measured = _measure(candidates, make(size), rounds)
                rows += [{"data": data, **row} for row in measured]
                for name, value in _figures({row["codec"]: row for row in measured}).items():
                    worst.setdefault(name, []).append(value)
                for row in rows[-len(measured) :]:
                    if row["codec"] in ("topk:0.01:1", "topk:0.02:1"):
                        row.update(_index_bits(row, size))
    finally:
        torch.set_num_threads(threads)
    rows += [{"codec": name, "note": "not measured: bitsandbytes is missing"} for name in missing]
    largest_is_worst = {"int8_error_vs_hivemind"}
    return {n: (max if n in largest_is_worst else min)(v) for n, v in worst.items()}, rows


def _figures(by_name: dict[str, dict[str, Any]]) -> dict[str, float]:
    uniform, int8, topk = by_name[UNIFORM8], by_name["int8"], by_name[DEFAULT_CODEC]
    return {
        "int8_encode_vs_hivemind": int8["encode_mb_per_s"] / uniform["encode_mb_per_s"],
        "int8_decode_vs_hivemind": int8["decode_mb_per_s"] / uniform["decode_mb_per_s"],
        "int8_error_vs_hivemind": int8["relative_error"] / uniform["relative_error"],
        "topk_encode_vs_hivemind": topk["encode_mb_per_s"] / uniform["encode_mb_per_s"],
        "topk_ratio": topk["ratio"],
    }


if __name__ == "__main__":
    from benchmarks.harness import main

    main("codec", run, seeds=[SEED, SEED + 1])
