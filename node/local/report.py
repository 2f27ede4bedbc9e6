"""Results of `eval` and `probe` beyond `node.console.results`: bits and perplexity of every block,
the limit behind a verdict. Must not import torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from node.console import results
from node.console.results import Facts

if TYPE_CHECKING:
    from node.data.corpus import Corpus
    from swarm.learning.evaluate import Evaluation


def evaluation_facts(result: Evaluation, split: str, corpus: Corpus, composition: str) -> Facts:
    return {
        **results.evaluation_facts(result, split, corpus),
        "block_bits_per_byte": list(result.block_bits_per_byte),
        "block_perplexity": [_finite(value) for value in result.block_perplexity],
        "composition": composition,
    }


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


def print_probe(facts: Facts) -> None:
    results.print_probe(facts)
    limit, of_run = facts["leak_limit_nats"], facts["run_leak_limit_nats"]
    if of_run > limit:
        print(f"(the run itself was trained with --leak-limit {of_run:g}; the verdict is not)")


def _figures(ce: float, bits: float, perplexity: float | None) -> str:
    shown = "beyond any number" if perplexity is None else f"{perplexity:.3f}"
    return f"{ce:.4f} nats per byte = {bits:.4f} bits per byte, perplexity {shown}"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
