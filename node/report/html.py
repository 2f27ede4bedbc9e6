"""The report as one standalone HTML file, without scripts or requests, in light and dark.

The figures are `figures`', the plots `svg`'s. Text that peers wrote (ids, reasons, details) is
escaped and shortened.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from node.console.amounts import size_words
from node.report.figures import COUNT_SENT, UNIFORM_CE_NATS, CePoint, RunReport
from node.report.hosts import RoundRow
from node.report.svg import Curve, bar_chart, byte_unit, clean, line_chart, strips

MAX_ROWS = 300  # of a table; --json has all
MAX_BLOCK_LINES = 7  # of a plot, beside the mean
AXES = ("moved", "seconds", "seen")
# States of a host in a round, the worst first; they are names of CSS classes.
STATES = ("not-included", "undecided", "away", "nothing-sent", "included")
HEADS = ("three-heads", "two-heads", "one-head")

STYLE = """
:root { color-scheme: light dark; --bg: #fcfcfb; --ink: #1d1f24; --soft: #5c626e; --rule: #dcdee3;
  --card: #ffffff; --c0: #2563c9; --c1: #d0590b; --c2: #0f8a5f; --c3: #b03a8c; --c4: #8a6d00;
  --c5: #0e7f96; --c6: #c23b3b; --c7: #6b57c9; --faint: #a9c4ee; --gray: #a4a9b3; }
@media (prefers-color-scheme: dark) { :root { --bg: #15171b; --ink: #e8e9ec; --soft: #a2a8b4;
  --rule: #343842; --card: #1c1f25; --c0: #6ea3ff; --c1: #ff9a4d; --c2: #4fcf9c; --c3: #ea82c6;
  --c4: #d9b53c; --c5: #4cc3dc; --c6: #ff8080; --c7: #a795ff; --faint: #31507f; --gray: #6b717d; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1140px; padding: 24px 20px 60px; background: var(--bg);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 40px 0 8px; }
h3 { font-size: 15px; margin: 24px 0 6px; } p { margin: 4px 0 10px; max-width: 76ch; }
.soft, .none, td.soft { color: var(--soft); }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 14px 0; }
.tile { background: var(--card); border: 1px solid var(--rule); border-radius: 8px;
  padding: 10px 14px; min-width: 230px; flex: 1; }
.tile b { display: block; font-size: 21px; font-weight: 600; }
.tile span { color: var(--soft); font-size: 13px; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr));
  gap: 16px; }
figure { margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: 8px;
  padding: 12px 14px; } figcaption { font-weight: 600; margin-bottom: 6px; }
figure > svg { width: 100%; height: auto; display: block; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 6px 0 0;
  padding: 0; font-size: 13px; color: var(--soft); }
.swatch { width: 22px; height: 8px; margin-right: 6px; } .key { display: inline-block; width: 12px;
  height: 12px; border-radius: 2px; margin-right: 6px; vertical-align: -1px; }
.scroll { overflow-x: auto; margin: 8px 0 14px; }
table { border-collapse: collapse; font-size: 13px; width: 100%; }
th, td { text-align: right; padding: 4px 5px; border-bottom: 1px solid var(--rule);
  font-variant-numeric: tabular-nums; } th { color: var(--soft); font-weight: 600; }
td { white-space: nowrap; } td.text, th.text { text-align: left; }
td.wrap { white-space: normal; overflow-wrap: anywhere; } code { font-size: 12.5px; }
.grid { stroke: var(--rule); stroke-width: 1; } .axis { stroke: var(--soft); stroke-width: 1; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); } svg .label { fill: var(--ink); }
.line { fill: none; stroke-width: 2; } .dashed { stroke-dasharray: 5 4; } .dot { stroke: none; }
.bar { fill: var(--c0); } .ink { --c: var(--ink); }
.line { stroke: var(--c); } .dot { fill: var(--c); } .line.ink { stroke-width: 2.6; }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); }
.c4 { --c: var(--c4); } .c5 { --c: var(--c5); } .c6 { --c: var(--c6); } .c7 { --c: var(--c7); }
.included, .one-head { fill: var(--c0); background: var(--c0); }
.nothing-sent { fill: var(--faint); background: var(--faint); }
.undecided, .two-heads { fill: var(--c4); background: var(--c4); }
.away { fill: var(--gray); background: var(--gray); }
.not-included, .three-heads { fill: var(--c6); background: var(--c6); }
"""


def page(reports: Sequence[RunReport]) -> str:
    """Render reports as one standalone HTML document."""
    body = ["<h1>blockswarm report</h1>", _summary(reports)]
    if len(reports) > 1:
        body.append(_plots([(_label(r), _mean_lines(r)) for r in reports]))
    body += [_run(report) for report in reports]
    body.append(_reading())
    title = clean(", ".join(report.name for report in reports))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # Should something slip through the escaping, nothing is run and nothing is fetched.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">"
        f"<title>blockswarm report: {title}</title><style>{STYLE}</style></head><body>"
        + "\n".join(body)
        + "</body></html>\n"
    )


def number_text(value: float | None, digits: str = ".4f") -> str:
    return "–" if value is None else format(value, digits)


def gb(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def short(peer: str) -> str:
    """The end of a peer id: ids share their beginnings."""
    return peer if len(peer) <= 10 else "…" + peer[-8:]


def _label(report: RunReport) -> str:
    named = report.scale.run_name if report.scale else ""
    return f"{report.name} ({named})" if named and named != report.name else report.name


def _summary(reports: Sequence[RunReport]) -> str:
    if len(reports) == 1:
        return ""
    rows = [
        [
            clean(_label(r)),
            str(sum(h.logged for h in r.hosts)),
            f"{r.seconds:.0f}",
            number_text(r.first_ce_nats),
            number_text(r.last_ce_nats),
            size_words(r.moved_bytes),
            r.counting,
            gb(r.gb_per_nat),
            gb(r.gb_per_nat_from_uniform),
            _share(r),
        ]
        for r in reports
    ]
    head = "run|hosts|seconds|first CE|last CE|moved|counted|GB per nat|from guessing|included"
    return "<h2>Runs compared</h2>" + _table(head, rows, text_columns=1)


def _share(report: RunReport) -> str:
    included = sum(h.included for h in report.hosts)
    known = included + sum(h.not_included for h in report.hosts)
    return f"{included} of {known}"


def _run(report: RunReport) -> str:
    agreed = sum(b.agreed_rounds for b in report.blocks)
    compared = sum(b.compared_rounds for b in report.blocks)
    decided = sum(b.decided_rounds for b in report.blocks)
    rounds = sum(b.rounds for b in report.blocks)
    tiles = [
        (gb(report.gb_per_nat), "GB per nat, since the first measurement"),
        (gb(report.gb_per_nat_from_uniform), "GB per nat, since guessing bytes"),
        (
            f"{number_text(report.first_ce_nats, '.3f')} → "
            f"{number_text(report.last_ce_nats, '.3f')}",
            "CE of the consensus, nats per byte, mean of the blocks",
        ),
        (size_words(report.moved_bytes), _counted(report)),
        (f"{decided} of {rounds}", "rounds decided, over all blocks"),
        (f"{agreed} of {compared}", "rounds in which all hosts named one head"),
        (_share(report), "own updates included, of those known"),
        (
            f"{report.seconds:.0f} s",
            f"{sum(h.logged for h in report.hosts)} hosts, "
            f"{len(report.blocks)} blocks, {_seen_text(report)}",
        ),
    ]
    cards = "".join(f'<div class="tile"><b>{b}</b><span>{s}</span></div>' for b, s in tiles)
    notes = "".join(f"<li>{clean(note)}</li>" for note in report.notes[:MAX_ROWS])
    return "".join(
        [
            f"<h2>{clean(_label(report))}</h2>",
            f'<p class="soft">Bytes: {_counted(report)}; {clean(report.counting_reason)}.</p>',
            f'<div class="tiles">{cards}</div>',
            f"<h3>Notes</h3><ul>{notes}</ul>" if notes else "",
            _plots([(_label(report), _block_lines(report))], report),
            _participation(report),
            _blocks(report),
            _timeline(report),
        ]
    )


def _counted(report: RunReport) -> str:
    if report.counting == COUNT_SENT:
        return "sent by all hosts, each byte counted once"
    return "sent and received by the hosts logged here"


def _seen_text(report: RunReport) -> str:
    if report.seen_bytes is None:
        return f"{report.steps} steps"
    return f"{size_words(report.seen_bytes)} of text seen in {report.steps} steps"


# Plots of CE.

Series = tuple[str, int, bool, Sequence[CePoint]]


def _mean_lines(report: RunReport) -> list[Series]:
    """One line for the consensus of a run, one for the running weights of its hosts."""
    out: list[Series] = []
    for which in ("consensus", "local"):
        found = [s for s in report.series if s.which == which]
        if found:  # the mean comes first; a run of one block has no other
            out.append((which, -1, which == "local", found[0].points))
    return out


def _block_lines(report: RunReport) -> list[Series]:
    out = [
        (f"{which}, mean of the blocks" if len(report.blocks) > 1 else which, c, d, points)
        for which, c, d, points in _mean_lines(report)
    ]
    blocks = [s for s in report.series if s.which == "consensus" and s.block is not None]
    if len(blocks) > 1:
        out += [
            (f"block {s.block}", i, False, s.points) for i, s in enumerate(blocks[:MAX_BLOCK_LINES])
        ]
    return out


def _plots(groups: Sequence[tuple[str, list[Series]]], report: RunReport | None = None) -> str:
    """CE over each kind of cost, and for a single run its bytes by purpose."""
    several = len(groups) > 1
    every = [p for _, series in groups for _, _, _, points in series for p in points]
    in_bytes = all(p.seen_bytes is not None for p in every)
    figures = []
    for axis in AXES:
        largest = max((_cost(p, axis, in_bytes) for p in every), default=0.0)
        factor, label = _axis(axis, largest, in_bytes)
        lines = [
            Curve(
                f"{name}, {which}" if several else which,
                index if several else color,
                [(_cost(p, axis, in_bytes) / factor, p.ce_nats) for p in points],
                dashed,
            )
            for index, (name, series) in enumerate(groups)
            for which, color, dashed, points in series
        ]
        caption = f"CE over {label}"
        figures.append(_figure(caption, line_chart(label, "CE, nats per byte", lines)))
    if report is not None:
        factor, unit = byte_unit(max(report.purposes.values(), default=0))
        bars = {name: count / factor for name, count in report.purposes.items()}
        figures.append(_figure("Bytes by purpose", bar_chart(bars, unit)))
    return f'<div class="plots">{"".join(figures)}</div>'


def _cost(point: CePoint, axis: str, in_bytes: bool) -> float:
    if axis == "moved":
        return point.moved_bytes
    if axis == "seconds":
        return point.seconds
    return (point.seen_bytes or 0.0) if in_bytes else point.steps


def _axis(axis: str, largest: float, in_bytes: bool) -> tuple[float, str]:
    if axis == "seconds":
        return 1.0, "seconds since the first event"
    if axis == "seen" and not in_bytes:
        return 1.0, "steps of a block's hosts"
    factor, unit = byte_unit(largest)
    return factor, f"{unit} moved by the run" if axis == "moved" else f"{unit} of text a block saw"


def _figure(caption: str, plot: str) -> str:
    return f"<figure><figcaption>{clean(caption)}</figcaption>{plot}</figure>"


# Who took part.


def state(row: RoundRow) -> str:
    """A host's state in a round: one of STATES."""
    event = row.event
    if event.outcome in ("syncing", "missed"):
        return "away"
    if event.included is False:
        return "not-included"
    if event.outcome != "decided":
        return "undecided"
    return "included" if event.included else "nothing-sent"


def _participation(report: RunReport) -> str:
    cells: dict[str, dict[int, str]] = defaultdict(dict)
    for row in report.rows:
        cells[row.event.peer][row.event.round] = state(row)
    # Ids that end alike would share a row.
    ends = Counter(short(h.peer) for h in report.hosts)
    names = {
        h.peer: short(h.peer) if ends[short(h.peer)] == 1 else f"{short(h.peer)} {i}"
        for i, h in enumerate(report.hosts[:MAX_ROWS])
    }
    shown = {names[h.peer]: cells[h.peer] for h in report.hosts[:MAX_ROWS] if cells[h.peer]}
    head = (
        "host|block|rounds|decided|undecided|away|included|share|in time|late|missing|refused|"
        "left out|excluded|steps|sent|received"
    )
    rows = [
        [
            f"<code>{clean(names[h.peer])}</code>" + ("" if h.logged else " (no log)"),
            ", ".join(map(str, h.blocks[:8])),
            str(h.rounds),
            str(h.outcomes.get("decided", 0)),
            str(h.outcomes.get("undecided", 0) + h.outcomes.get("empty", 0)),
            str(h.outcomes.get("syncing", 0) + h.outcomes.get("missed", 0)),
            f"{h.included} of {h.included + h.not_included}",
            "–" if h.included_share is None else f"{h.included_share:.0%}",
            *map(str, (h.in_time, h.late, h.missing, h.refused, h.left_out_rounds, h.exclusions)),
            str(h.steps),
            size_words(h.sent_bytes),
            size_words(h.received_bytes),
        ]
        for h in report.hosts[:MAX_ROWS]
    ]
    return (
        "<h3>Hosts, round by round</h3>"
        + _figure("Each cell is a round of a host", strips(shown, STATES) + _keys(STATES[::-1]))
        + "<h3>Participation</h3><p class='soft'>Rounds and inclusion are from a host's own log; "
        "in time, late, missing and refused count the lines in which the other hosts of its block "
        "say so of its updates; left out: rounds in which the robust rule dropped it.</p>"
        + _table(head, rows, text_columns=1)
        + _more(len(report.hosts))
    )


def _keys(names: Iterable[str]) -> str:
    items = "".join(
        f'<li><span class="key {name}"></span>{name.replace("-", " ")}</li>' for name in names
    )
    return f'<ul class="legend">{items}</ul>'


def _blocks(report: RunReport) -> str:
    cells: dict[str, dict[int, str]] = defaultdict(dict)
    for (block, round_), heads in report.heads.items():
        cells[f"block {block}"][round_] = HEADS[-min(heads, len(HEADS))]
    head = "block|hosts|rounds|decided|compared|one head|most heads|first CE|last CE|best CE|own CE"
    rows = [
        [
            str(b.block),
            str(b.hosts),
            str(b.rounds),
            str(b.decided_rounds),
            str(b.compared_rounds),
            str(b.agreed_rounds),
            str(b.most_heads),
            number_text(b.first_ce_nats),
            number_text(b.last_ce_nats),
            number_text(b.best_ce_nats),
            number_text(b.last_own_ce_nats),
        ]
        for b in report.blocks
    ]
    outcomes = ", ".join(f"{count} {clean(name)}" for name, count in report.outcomes.items())
    keys = _keys(HEADS[::-1]).replace("three heads", "three heads or more")
    return (
        "<h3>Blocks and their consensus</h3>"
        f"<p class='soft'>Lines by outcome: {outcomes or 'none'}. Compared: rounds for which two "
        "or more hosts named the head of the consensus; all should name one.</p>"
        + _figure("Distinct heads of each block, by round", strips(cells, HEADS) + keys)
        + _table(head, rows, text_columns=0)
    )


def _timeline(report: RunReport) -> str:
    rows = [
        [f"{m.seconds:.0f}", f"<code>{clean(short(m.peer))}</code>", clean(m.what), clean(m.detail)]
        for m in report.moments[:MAX_ROWS]
    ]
    return (
        "<h3>Restarts, moves, exclusions</h3>"
        + _table("second|host|what|detail", rows, text_columns=(1, 2, 3))
        + _more(len(report.moments))
    )


def _more(count: int) -> str:
    return (
        f'<p class="none">and {count - MAX_ROWS} more: see --json</p>' if count > MAX_ROWS else ""
    )


def _table(head: str, rows: Sequence[Sequence[str]], text_columns: int | tuple[int, ...]) -> str:
    """A table of HTML cells. `text_columns` are left-aligned: these columns, or so many first."""
    left = range(text_columns) if isinstance(text_columns, int) else text_columns

    def css(column: int) -> str:
        # Only a last column of text is long enough to be broken into lines.
        wrap = " wrap" if column == head.count("|") else ""
        return f' class="text{wrap}"' if column in left else ""

    def cells(values: Iterable[str], tag: str) -> str:
        return "".join(f"<{tag}{css(i)}>{v}</{tag}>" for i, v in enumerate(values))

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{cells(head.split("|"), "th")}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _reading() -> str:
    return (
        "<h2>How to read this</h2><p>CE is in nats per byte of held-out text, without the target "
        "in the input, as the hosts measured it. Consensus: the weights that a block's hosts agree "
        "on. Local: a host's running weights. GB per nat divides all bytes of the logs by the "
        "nats gained: since each block's first measurement, which leaves out what was learned "
        f"before it, and since guessing every byte alike (ln 256 = {UNIFORM_CE_NATS:.3f}), where "
        "untrained weights stand.</p><p>Bytes are frames on the wire as the hosts' ledgers count "
        "them, without TCP and encryption. With the logs of all hosts, what was sent is summed, so "
        "each byte counts once; with some of the logs, what those hosts sent and received is "
        "summed: what the run cost them. Bytes after a host's last round are in no log. Hosts "
        "write their own logs: a report is as honest as they are.</p>"
    )
