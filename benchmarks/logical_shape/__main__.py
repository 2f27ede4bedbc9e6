"""Serving a model of 75.80 billion parameters, by its shapes: one sweep beside a byte a traversal.

Three hosts, one block each, and a client, on the emulated WAN (RTT 100 ms, 100 Mbit). Shapes are
real, in every product, cache and parcel. The weights are not: layers of a block share those of a
few physical ones, which are random, so the text means nothing; what is measured is the serving. A
full output of joint denoising is one traversal, with one pass through every block, and is written
whole at all sizes. Autoregression passes all layers for every byte: at the largest size some bytes
are timed and the rest is extrapolated, and labelled so. docs/logical-shape.md says more.
"""

from __future__ import annotations

from benchmarks import harness
from benchmarks.logical_shape.bed import LINE_MBIT, RTT_MS
from benchmarks.logical_shape.rows import FULL, PROMPT, QUICK, figures, measure
from benchmarks.wan.namespaces import check_rights, or_skipped


def main() -> None:
    options = harness.parse("logical_shape")
    variants = QUICK if options.quick else FULL
    with or_skipped():
        check_rights()
    minutes = sum(variant.minutes for variant in variants if options.only in variant.name)
    print(f"logical_shape: about {minutes:.0f} minutes for all rows", flush=True)
    facts = {
        "note": "weights are random and shared between layers: the text means nothing. "
        "ar_extrapolated, draft_extrapolated: those seconds were not measured whole.",
        "wan": {"rtt_ms": RTT_MS, "line_mbit": LINE_MBIT},
        "prompt_bytes": len(PROMPT),
        "seeds": list(range(max(variant.repeats for variant in variants))),
    }
    harness.measure_rows(options, "logical_shape", variants, measure, figures, facts)


if __name__ == "__main__":
    main()
