"""Results of local commands: facts for `--json`, and the same facts printed as text.

Must not import torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from node.console.amounts import duration_words, size_words

if TYPE_CHECKING:
    from node.data.corpus import Corpus
    from swarm.learning.evaluate import Evaluation
    from swarm.run import Run

Facts = dict[str, Any]


def print_json(facts: Facts) -> None:
    print(json.dumps(facts), flush=True)


def table_lines(
    head: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str] = ()
) -> list[str]:
    """A table with aligned columns; those in `left` are left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if name in left else cell.rjust(width)
            for name, cell, width in zip(head, row, widths, strict=True)
        ).rstrip()
        for row in (head, *rows)
    ]


def plan_line(run: Run, corpus: Corpus, device: str, steps_done: int) -> str:
    shape, training = run.model, run.training
    seen_bytes = training.steps * training.batch * shape.context
    resumed = f"; going on at step {steps_done}" if steps_done else ""
    return (
        f"{shape.blocks} x {shape.layers} layers, width {shape.width}, "
        f"{shape.coupling}, {training.objective}, "
        f"sigma {run.noise.sigma_min:g} to {run.noise.sigma_max:g}; "
        f"{size_words(seen_bytes)} of {corpus.name} for each block, on {device}{resumed}"
    )


def evaluation_facts(result: Evaluation, split: str, corpus: Corpus) -> Facts:
    return {
        "ce_nats": result.ce_nats,
        "bits_per_byte": result.bits_per_byte,
        "perplexity": result.perplexity if math.isfinite(result.perplexity) else None,
        "block_ce_nats": list(result.block_ce_nats),
        "size_bytes": result.size_bytes,
        "split": split,
        "data": corpus.name,
        "data_sha256": corpus.sha256,
    }


def print_training(facts: Facts) -> None:
    print(
        f"trained in {duration_words(facts['seconds'])}: "
        f"CE {facts['ce_before_nats']:.3f} -> {facts['ce_nats']:.3f} nats per byte"
    )
    print_evaluation(facts)
    print(f"model folder: {facts['model']}")


def print_evaluation(facts: Facts) -> None:
    print(f"honest CE over {facts['size_bytes']} bytes of {facts['data']}, {facts['split']} split:")
    for index, ce in enumerate(facts["block_ce_nats"]):
        value = "left out" if ce is None else f"{ce:.4f} nats per byte"
        print(f"  block {index:<3}  {value}")
    print(
        f"  composed   {facts['ce_nats']:.4f} nats per byte = {facts['bits_per_byte']:.4f} bits "
        f"per byte, perplexity {_shown(facts['perplexity'])}"
    )


def _shown(perplexity: float | None) -> str:
    return "beyond any number" if perplexity is None else f"{perplexity:.3f}"


def print_probe(facts: Facts) -> None:
    head = ("block", "sigma", "teacher-forced CE", "honest CE", "difference")
    rows = [
        (
            str(row["block"]),
            f"{row['sigma_low']:.3f} to {row['sigma_high']:.3f}",
            *(f"{row[ce]:.4f}" for ce in ("teacher_forced_ce_nats", "honest_ce_nats", "leak_nats")),
        )
        for row in facts["rows"]
    ]
    for line in table_lines(head, rows, left=("sigma",)):
        print(line)
    leaking = ", ".join(map(str, facts["leaking_blocks"]))
    verdict = (
        f"these blocks read their target: {leaking}" if leaking else "no block reads its target"
    )
    print(f"{verdict} (limit: a difference of {facts['leak_limit_nats']:g} nats)")
