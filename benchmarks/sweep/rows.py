"""Rows of the serving benchmark: the time of an output, its quality, many clients; the figures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.harness import Figures, Rows
from benchmarks.sweep.hosts import ServedModel
from benchmarks.sweep.model import Judges, repetition
from benchmarks.sweep.modes import (
    MODES,
    PROMPT_BYTES,
    TEMPERATURE,
    Mode,
    Scale,
    failed,
    lacks,
    troubles,
)
from benchmarks.wan.namespaces import BedFailed
from swarm.writing import denoise
from swarm.writing.generate import Sampling, generate
from swarm.writing.sweep import DraftOrder, Passage, draft, finish, score

HOPS = 4  # client, three hosts, client
NEAR_TIE_NATS = 1e-4


# --- the time of an output ------------------------------------------------------------------------


def timed_rows(
    served: ServedModel, judging: Judges, scale: Scale, rtt_ms: int, compute_s: dict[str, float]
) -> Rows:
    """Every mode at one RTT, sampled; bytes on the wire are the kernels' of all hosts."""
    rows: Rows = []
    served.ask([greeting(judging, scale)], look_again=True)
    for mode in MODES:
        count = scale.timed_per_byte if mode.per_byte else scale.timed
        prompts = [prompt for prompt, _ in judging.prompts(count, PROMPT_BYTES, scale.length)]
        orders = [mode.order(p, scale.length, TEMPERATURE, s) for s, p in enumerate(prompts)]
        after_idle_s = 0.0
        if not mode.per_byte:
            # Afterwards streams are open and TCP's windows have grown, as in steady use.
            # The idle time is what is measured: TCP's windows shrink in it.
            time.sleep(scale.idle_s)
            after_idle_s = served.ask(orders[:1])[0][0]["seconds"]
        before = served.wire_bytes()
        outputs, _ = served.ask(orders)
        wire = served.wire_bytes() - before
        seconds = statistics.median(output["seconds"] for output in outputs)
        traversals = statistics.mean(output["traversals"] for output in outputs)
        row = {
            "kind": "time",
            "name": f"{mode.name}, RTT {rtt_ms} ms",
            "mode": mode.name,
            "rtt_ms": rtt_ms,
            "seconds": seconds,
            "fastest_s": min(output["seconds"] for output in outputs),
            "bytes_per_s": scale.length / seconds,
            "traversals": traversals,
            "wire_kb": wire / len(orders) / 1e3,
            "after_idle_s": after_idle_s,
            **troubles(outputs, mode, scale.length),
        }
        if mode.name in compute_s:
            hops = 2 if mode.leave_out else HOPS
            limit_s = hops * rtt_ms / 2e3 * max(1.0, traversals) + compute_s[mode.name]
            row |= {"compute_s": compute_s[mode.name], "limit_s": limit_s}
            row |= {"limit_ratio": seconds / limit_s}
        rows.append(row)
    return rows


def greeting(judging: Judges, scale: Scale) -> dict[str, Any]:
    """A first output that nobody times: connections are made and latencies measured for it."""
    [(prompt, _)] = judging.prompts(1, PROMPT_BYTES, scale.length)
    return MODES[0].order(prompt, scale.length, TEMPERATURE, 0)


def compute_alone_s(judging: Judges, length: int, repeats: int = 5) -> dict[str, float]:
    """What the blocks' arithmetic of one output takes in one process, with no network.

    CPU time of one thread: an idle machine takes as long, and a busy one is not to blame here.
    """
    [(prompt, _)] = judging.prompts(1, PROMPT_BYTES, length)
    times: dict[str, list[float]] = {}
    for repeat in range(repeats):
        for mode in MODES:
            if mode.draft_length is None:
                began_s = time.process_time()
                if mode.joint:
                    denoise.write(judging.model, prompt, length, Sampling(TEMPERATURE, 0, repeat))
                else:
                    _whole_sweep(judging, prompt, length, mode, repeat)
                times.setdefault(mode.name, []).append(time.process_time() - began_s)
    began_s = time.process_time()
    list(generate(judging.model, prompt, length, Sampling(TEMPERATURE, 0, 0)))
    times["autoregressive"] = [time.process_time() - began_s]
    return {name: statistics.median(each) for name, each in times.items()}


def _whole_sweep(judging: Judges, prompt: bytes, length: int, mode: Mode, seed: int) -> None:
    model = judging.model
    order = DraftOrder(mode.drafts, length, Sampling(TEMPERATURE, 0, seed), model.temperature)
    passage = Passage(torch.tensor(list(prompt)), torch.zeros(0, 0, dtype=torch.int64))
    for index, (block, weight) in enumerate(zip(model.blocks, model.weights, strict=True)):
        if index in mode.leave_out:
            continue
        assert block is not None
        weight = 1.0 if mode.leave_out else weight
        if index == 0:
            [passage] = draft(block, [passage], [order], weight, False)
        else:
            [passage] = score(block, [passage], weight, False)
        if not model.run.model.relays:
            passage = replace(passage, hidden_context=None, hidden_drafts=None)
    finish(passage, model.temperature)


# --- the quality of an output ---------------------------------------------------------------------


def judged_rows(served: ServedModel, judging: Judges, scale: Scale) -> Rows:
    """Sampled outputs of every mode, judged. Autoregression is sampled locally: it would be hours
    on the wire, and `exact_row` checks that what is served is the same model."""
    pairs = judging.prompts(scale.judged, PROMPT_BYTES, scale.length)
    own = judging.composed_samples(
        [prompt for prompt, _ in pairs], scale.length, Sampling(TEMPERATURE, 0, 1)
    )
    own_ce = judging.ce_composed([prompt for prompt, _ in pairs], own)
    rows = [_judged(judging, "the true text", pairs, own_ce)]
    for mode in MODES:
        if mode.per_byte:
            written = [(prompt, text) for (prompt, _), text in zip(pairs, own, strict=True)]
            rows.append({**_judged(judging, mode.name, written, own_ce), "bytes_per_traversal": 1})
            continue
        orders = [
            mode.order(prompt, scale.length, TEMPERATURE, 100 + seed)
            for seed, (prompt, _) in enumerate(pairs)
        ]
        outputs, _ = served.ask(orders, at_once=2)
        good = [
            (prompt, output)
            for (prompt, _), output in zip(pairs, outputs, strict=True)
            if not failed(output, scale.length) and not lacks(output, mode)
        ]
        if not good:
            raise BedFailed(f"{mode.name}: no output came back", outputs[0]["error"])
        written = [(prompt, bytes.fromhex(output["hex"])) for prompt, output in good]
        traversals = statistics.mean(output["traversals"] for _, output in good)
        row = _judged(judging, mode.name, written, own_ce)
        row["bytes_per_traversal"] = scale.length / traversals
        rows.append({**row, **troubles(outputs, mode, scale.length)})
    return rows


def _judged(
    judging: Judges, name: str, written: Sequence[tuple[bytes, bytes]], own_ce: float
) -> dict[str, Any]:
    prompts, outputs = [p for p, _ in written], [text for _, text in written]
    composed = judging.ce_composed(prompts, outputs)
    return {
        "kind": "text",
        "name": name,
        "ce_reference": judging.ce_reference(prompts, outputs),
        "ce_composed": composed,
        "from_composed_nats": composed - own_ce,  # of its own samples; 0: no difference is seen
        "repetition": repetition(prompts, outputs),
        "judged": len(outputs),
    }


def exact_row(served: ServedModel, judging: Judges, scale: Scale) -> dict[str, Any]:
    """Greedy `exact` on the wire beside local greedy generation from the assembled model."""
    mode = next(mode for mode in MODES if mode.name == "exact")
    pairs = judging.prompts(scale.exact, PROMPT_BYTES, scale.length)
    orders = [mode.order(prompt, scale.length, 0.0, 0) for prompt, _ in pairs]
    outputs, _ = served.ask(orders, at_once=2)
    mismatches = ties = 0
    for (prompt, _), output in zip(pairs, outputs, strict=True):
        wanted = bytes(generate(judging.model, prompt, scale.length, Sampling(0.0)))
        got = bytes.fromhex(output["hex"])
        if failed(output, scale.length) or lacks(output, mode):
            continue  # counted below, as what it is
        if got != wanted:
            near = _near_tie(judging, prompt, wanted, got)
            ties, mismatches = ties + near, mismatches + (not near)
    greedy = statistics.mean(output["traversals"] for output in outputs)
    return {
        "kind": "exact",
        "name": "greedy, beside local generation",
        "mismatches": mismatches,
        "near_ties": ties,
        "bytes_per_traversal": scale.length / max(greedy, 1e-9),
        **troubles(outputs, mode, scale.length),
    }


def _near_tie(judging: Judges, prompt: bytes, wanted: bytes, got: bytes) -> bool:
    """Whether two greedy outputs part where the two likeliest bytes are as good as equal."""
    same = next((i for i, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b), None)
    if same is None:
        return False
    text = torch.tensor([list(prompt + wanted[:same])])
    best = judging.model.log_probs(text)[0, -1].topk(2).values
    return bool(best[0] - best[1] < NEAR_TIE_NATS)


# --- many clients ---------------------------------------------------------------------------------


def client_rows(served: ServedModel, judging: Judges, scale: Scale) -> Rows:
    """One-sweep outputs asked for at the same time, at RTT 20 ms, by one node for all clients."""
    rows: Rows = []
    mode = MODES[0]
    for clients in scale.clients:
        pairs = judging.prompts(clients * scale.waves, PROMPT_BYTES, scale.length)
        orders = [
            mode.order(prompt, scale.length, TEMPERATURE, seed)
            for seed, (prompt, _) in enumerate(pairs)
        ]
        outputs, spent_s = served.ask(orders, at_once=clients)
        seconds = sorted(output["seconds"] for output in outputs)
        counted = troubles(outputs, mode, scale.length)
        good = counted["outputs"] - counted["failures"]
        rows.append(
            {
                "kind": "clients",
                "name": f"{clients} clients",
                "clients": clients,
                "bytes_per_s": good * scale.length / spent_s,
                "p50_s": seconds[len(seconds) // 2],
                "p99_s": seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))],
                **counted,
            }
        )
    return rows


# --- figures --------------------------------------------------------------------------------------


def figures(rows: Rows) -> Figures:
    time_of = {(r["mode"], r["rtt_ms"]): r for r in rows if r["kind"] == "time"}
    text_of = {r["name"]: r for r in rows if r["kind"] == "text"}
    exact = next(r for r in rows if r["kind"] == "exact")
    most = max((r for r in rows if r["kind"] == "clients"), key=lambda r: int(r["clients"]))
    one, slow = time_of["one-sweep", 100], time_of["autoregressive", 100]
    return {
        "speedup_rtt100": slow["seconds"] / one["seconds"],
        "limit_ratio_rtt100": one["limit_ratio"],
        "seconds_one_sweep_rtt100": one["seconds"],
        "seconds_autoregressive_rtt100": slow["seconds"],
        "seconds_denoise_rtt100": time_of["denoise", 100]["seconds"],
        "ce_one_sweep": text_of["one-sweep"]["ce_reference"],
        "ce_host_one_alone": text_of["host 1 alone"]["ce_reference"],
        "ce_denoise": text_of["denoise"]["ce_reference"],
        "ce_autoregressive": text_of["autoregressive"]["ce_reference"],
        "ce_true_text": text_of["the true text"]["ce_reference"],
        "from_composed_one_sweep": text_of["one-sweep"]["from_composed_nats"],
        "from_composed_host_one_alone": text_of["host 1 alone"]["from_composed_nats"],
        "from_composed_denoise": text_of["denoise"]["from_composed_nats"],
        "exact_bytes_per_traversal": text_of["exact"]["bytes_per_traversal"],
        "exact_mismatches": exact["mismatches"],
        f"failures_{most['clients']}_clients": most["failures"],
    }
