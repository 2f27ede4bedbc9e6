"""What `benchmarks.averaging` makes of its rounds: rows, and the figures of all rows."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks import harness
from protocol.codec import DEFAULT_CODEC

MB = 1_000_000
DENSE = "int8"


def link_words(link: int | None) -> str:
    return "" if link is None else f", {link} Mbit/s"


def row(
    system: str,
    codec: str,
    count: int,
    size_mb: int,
    link: int | None,
    found: list[dict[str, Any]],
) -> dict[str, Any]:
    keys = ("seconds", "cpu_s", "bytes")
    middle = {key: statistics.median(f[key] for f in found) for key in keys}
    result: dict[str, Any] = {
        "name": f"{system} {codec}, {count} peers, {size_mb} MB{link_words(link)}",
        "seconds": round(middle["seconds"], 3),
        "cpu_s_per_peer": round(middle["cpu_s"], 3),
        "mb_per_peer": round(middle["bytes"] / MB, 3),
        "error": max(f["error"] for f in found),
        "included": min(f["included"] for f in found),
        "peers": count,
        "size_mb": size_mb,
        "link_mbit": link or 0,
        "system": system,
        "codec": codec,
        "seconds_each": [round(f["seconds"], 3) for f in found],
    }
    if "cpu_later_s" in found[-1]:
        result["cpu_s_later_per_peer"] = round(found[-1]["cpu_later_s"], 3)
    for key, scale in (("matchmaking", 1.0), ("ledger", MB)):
        if key in found[0]:
            unit = {"matchmaking": "matchmaking_s", "ledger": "ledger_mb_per_peer"}[key]
            result[unit] = round(statistics.median(f[key] for f in found) / scale, 3)
    return result


def figures_of(rows: harness.Rows) -> harness.Figures:
    """Against fp16, of the sizes the worst one. Speed-ups without a name are those of loopback."""
    timed = [r for r in rows if "system" in r]
    figures: harness.Figures = {}
    for count in sorted({r["peers"] for r in timed}):
        for link, codec, words in (
            (0, DEFAULT_CODEC, ""),
            (0, DENSE, "int8_"),
            (100, DEFAULT_CODEC, "100mbit_"),
        ):
            here = [r for r in timed if (r["peers"], r["link_mbit"]) == (count, link)]
            fp16 = {r["size_mb"]: r for r in here if r["codec"] == "fp16"}
            ours = {r["size_mb"]: r for r in here if r["codec"] == codec}
            if not ours:
                continue
            ratios = {
                key: min(fp16[size][key] / mine[key] for size, mine in ours.items())
                for key in ("seconds", "mb_per_peer", "cpu_s_per_peer")
            }
            figures[f"speedup_{words}{count}"] = ratios["seconds"]
            figures[f"speedup_round_{words}{count}"] = min(
                (fp16[size]["seconds"] + fp16[size]["matchmaking_s"]) / mine["seconds"]
                for size, mine in ours.items()
            )
            if link == 0:
                figures[f"bytes_ratio_{words}{count}"] = ratios["mb_per_peer"]
                figures[f"cpu_ratio_{words}{count}"] = ratios["cpu_s_per_peer"]
    for system in ("ours", "hivemind"):
        codec = {"ours": DENSE, "hivemind": "fp16"}[system]
        errors = [r["error"] for r in rows if r.get("killed") == system and r["codec"] == codec]
        if errors:
            figures[f"killed_error_{system}"] = max(errors)
    return figures
