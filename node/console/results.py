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


def evaluation_facts(result: Evaluation, split: str, corpus: Corpus, composition: str) -> Facts:
    return {
        "ce_nats": result.ce_nats,
        "bits_per_byte": result.bits_per_byte,
        "perplexity": _finite(result.perplexity),
        "block_ce_nats": list(result.block_ce_nats),
        "block_bits_per_byte": list(result.block_bits_per_byte),
        "block_perplexity": [_finite(value) for value in result.block_perplexity],
        "composition": composition,
        "size_bytes": result.size_bytes,
        "split": split,
        "data": corpus.name,
        "data_sha256": corpus.sha256,
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def print_training(facts: Facts) -> None:
    print(
        f"trained in {duration_words(facts['seconds'])}: "
        f"CE {facts['ce_before_nats']:.3f} -> {facts['ce_nats']:.3f} nats per byte"
    )
    print_evaluation(facts)
    print(f"model folder: {facts['model']}")


def print_evaluation(facts: Facts) -> None:
    how = "" if facts["composition"] == "logit" else f", {facts['composition']} composition"
    what = f"{facts['size_bytes']} bytes of {facts['data']}, {facts['split']} split{how}"
    print(f"honest CE over {what}:")
    columns = (facts["block_ce_nats"], facts["block_bits_per_byte"], facts["block_perplexity"])
    for index, (ce, bits, perplexity) in enumerate(zip(*columns, strict=True)):
        value = "left out" if ce is None else _figures(ce, bits, perplexity)
        print(f"  block {index:<3}  {value}")
    composed = _figures(facts["ce_nats"], facts["bits_per_byte"], facts["perplexity"])
    print(f"  composed   {composed}")


def _figures(ce: float, bits: float, perplexity: float | None) -> str:
    shown = "beyond any number" if perplexity is None else f"{perplexity:.3f}"
    return f"{ce:.4f} nats per byte = {bits:.4f} bits per byte, perplexity {shown}"


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
    limit, of_run = facts["leak_limit_nats"], facts["run_leak_limit_nats"]
    if of_run > limit:
        print(f"(the run itself was trained with --leak-limit {of_run:g}; the verdict is not)")
