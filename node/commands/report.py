"""The `report` command: finds the event logs of runs, and writes what they say.

Decides which folders belong to a run and the forms CSV and PNG. The figures and the
page are `node.report`'s. matplotlib is needed for PNG only, and imported only there.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from node.commands.options import PathOption
from node.console.amounts import size_words
from node.console.results import print_json
from node.console.terminal import say
from node.host.home import make
from protocol.errors import UsageError

if TYPE_CHECKING:
    from node.report.figures import RunReport, Scale
    from node.report.hosts import RoundRow
    from node.report.logs import Budget

LOG_NAME = "events.jsonl"
MAX_DEPTH = 4  # folders below the one that was named: runs/demo/hosts/seed needs 2
MAX_HOSTS = 1024
MAX_ENTRIES = 100_000


@click.command(short_help="What event logs say: GB per nat, CE, participation.")
@click.argument("folders", nargs=-1, required=True, metavar="FOLDER...", type=PathOption())
@click.option(
    "-o",
    "--out",
    type=PathOption(),
    default=Path("report.html"),
    show_default=True,
    help="The page: one file, with its plots.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option(
    "--csv",
    "csv_file",
    type=PathOption(),
    help="File with a row for every round of every host.",
)
@click.option(
    "--png",
    "png_folder",
    type=PathOption(),
    help='Folder for the plots as files; needs matplotlib: pip install "blockswarm[bench]".',
)
def report(
    folders: tuple[Path, ...],
    out: Path,
    as_json: bool,
    csv_file: Path | None,
    png_folder: Path | None,
) -> None:
    """Make a report from the event logs of one or several runs.

    Each FOLDER is a run: one host's state folder (with events.jsonl), or a folder of several
    hosts' folders, such as runs/demo/hosts. Several FOLDERs are compared. With the logs of all
    hosts, bytes are counted once, where they were sent; with the logs of some, what these hosts
    sent and received is counted.
    """
    from node.report.html import page
    from node.report.logs import Budget

    if png_folder is not None:
        _pyplot()  # say at once that it is missing
    budget = Budget()
    names = _names(folders)
    reports = [load_run(f, n, budget) for f, n in zip(folders, names, strict=True)]
    _write(out, lambda path: path.write_text(page(reports), encoding="utf-8", errors="replace"))
    written = [str(out)]
    if csv_file is not None:
        _write(csv_file, lambda path: write_csv(path, reports))
        written.append(str(csv_file))
    if png_folder is not None:
        written += [str(path) for path in write_pngs(png_folder, reports)]
    facts = {"runs": [one.facts() for one in reports], "written": written}
    if as_json:
        print_json(facts)
    else:
        _print(reports, written)


report_commands = (report,)


# Finding.


def _names(folders: Sequence[Path]) -> list[str]:
    """A folder's own name; the whole path where that is not enough to tell runs apart."""
    short = [folder.resolve().name or str(folder) for folder in folders]
    return [n if short.count(n) == 1 else str(f) for n, f in zip(short, folders, strict=True)]


def find_logs(folder: Path) -> list[Path]:
    """The event logs in a folder and below it. Links to folders are not followed."""
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}", "name the state folder of a host")
    found: list[Path] = []
    entries = 0
    for at, inner, files in os.walk(folder):
        inner.sort()
        entries += len(inner) + len(files)
        if LOG_NAME in files:
            found.append(Path(at) / LOG_NAME)
        if len(Path(at).relative_to(folder).parts) >= MAX_DEPTH:
            inner.clear()
        if entries > MAX_ENTRIES or len(found) > MAX_HOSTS:
            raise UsageError(
                f"{folder} is too large to search: over {MAX_HOSTS} logs or {MAX_ENTRIES} files",
                "name the folder that holds the hosts' folders",
            )
    if not found:
        raise UsageError(
            f"no {LOG_NAME} in {folder} or below it",
            "name a host's state folder (join --folder), or the folder that holds several",
        )
    return found


def load_run(folder: Path, name: str, budget: Budget) -> RunReport:
    """Read all logs of a folder, and its run file if there is one."""
    from node.report.figures import analyse
    from node.report.logs import Log, read_log

    logs: list[Log] = []
    paths = find_logs(folder)
    for path in paths:
        source = str(path.relative_to(folder)) if path != folder else path.name
        try:
            with open(path, "rb") as file:
                logs.append(read_log(file, source, budget))
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from error
    scale, notes = _scale(folder, [path.parent for path in paths])
    return analyse(name, [*logs, Log("run.toml", (), tuple(notes))], scale)


def _scale(folder: Path, hosts: Sequence[Path]) -> tuple[Scale | None, list[str]]:
    """From the run files of the hosts (the seed keeps one), else from that of the whole folder."""
    from node.report.figures import Scale
    from swarm.runfile import RunFileError, parse

    found = {text: host for host in hosts if (text := _run_text(host)) is not None}
    if len(found) > 1:
        raise UsageError(
            f"{folder} holds hosts of different runs: "
            + ", ".join(str(host) for host in list(found.values())[:4]),
            "name a folder for each run; the report compares them",
        )
    text = next(iter(found), None) or _run_text(folder)
    if text is None:
        return None, []
    try:
        run_file = parse(text)
    except RunFileError as error:
        return None, [f"run.toml is not used: {error.message}"]
    training = run_file.run.training
    step_bytes = training.batch * run_file.run.model.context
    return Scale(run_file.name, step_bytes, training.steps_per_round), []


def _run_text(folder: Path) -> bytes | None:
    from swarm.runfile import MAX_TEXT_BYTES

    try:
        with open(folder / "run.toml", "rb") as file:
            return file.read(MAX_TEXT_BYTES + 1)
    except OSError:
        return None


# Writing.


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    from node.machine.atomic import write_atomically

    if path.is_dir():
        raise UsageError(f"{path} is a folder", "name a file")
    write_atomically(path, write)


def _cell(text: str) -> str:
    """Peers' text for a spreadsheet: never a formula."""
    text = "".join(c if c.isprintable() else "�" for c in text)
    return "'" + text if text[:1] in ("=", "+", "-", "@") else text


def write_csv(path: Path, reports: Sequence[RunReport]) -> None:
    """A row for every `round` line, in the order of time."""
    rows = [_csv_row(one, row) for one in reports for row in one.rows]
    with open(path, "w", newline="", encoding="utf-8", errors="replace") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else ["run"])
        writer.writeheader()
        writer.writerows(rows)


def _csv_row(one: RunReport, row: RoundRow) -> dict[str, object]:
    event = row.event
    lists = ("in_time", "late", "missing", "refused", "agreed", "left_out")
    return {
        "run": _cell(one.name),
        "peer": _cell(event.peer),
        "block": event.block,
        "round": event.round,
        "seconds": round(row.seconds, 3),
        "outcome": event.outcome,
        "included": event.included,
        **{name: len(getattr(event, name)) for name in lists},
        "voters": event.voters,
        "consensus": _cell(event.consensus),
        "consensus_round": event.consensus_round,
        "first_deadline_s": event.first_deadline_s,
        "update_bytes": event.update_bytes,
        "sent_bytes": row.sent_bytes,
        "received_bytes": row.received_bytes,
        "moved_bytes_so_far": row.moved_bytes,
        "steps": row.steps,
        "seen_bytes": row.steps * one.scale.step_bytes if one.scale else None,
        "local_ce_nats": event.local_ce_nats,
        "consensus_ce_nats": event.consensus_ce_nats,
    }


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UsageError(
            "--png needs matplotlib, which is not installed",
            "pip install 'blockswarm[bench]', or take the plots of the page",
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def write_pngs(folder: Path, reports: Sequence[RunReport]) -> list[Path]:
    """CE over each kind of cost, one file each, and the bytes by purpose of every run."""
    pyplot = _pyplot()
    make(folder, "--png")
    in_bytes = all(one.scale for one in reports)
    plots: dict[str, tuple[str, Callable[[Any], float]]] = {
        "ce_over_gb": ("GB moved", lambda p: p.moved_bytes / 1e9),
        "ce_over_seconds": ("seconds since the first event", lambda p: p.seconds),
        "ce_over_seen": ("MB of text a block saw", lambda p: p.seen_bytes / 1e6)
        if in_bytes
        else ("steps of a block's hosts", lambda p: p.steps),
    }
    written = []
    for name, (label, cost) in plots.items():
        figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
        for index, one in enumerate(reports):
            for series in one.series:
                if series.block is not None and (len(reports) > 1 and len(one.blocks) > 1):
                    continue
                part = "mean" if series.block is None else f"block {series.block}"
                axes.plot(
                    [cost(p) for p in series.points],
                    [p.ce_nats for p in series.points],
                    marker=".",
                    linestyle="-" if series.which == "consensus" else "--",
                    color=f"C{index}" if len(reports) > 1 else _mpl_color(series.block),
                    label=f"{_plain(one.name)}, {part}, {series.which}",
                )
        axes.set(xlabel=label, ylabel="CE, nats per byte")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=7)
        written.append(_save(pyplot, figure, folder / f"{name}.png"))
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for one in reports:
        axes.plot(
            list(one.purposes),
            [n / 1e6 for n in one.purposes.values()],
            "o",
            label=_plain(one.name),
        )
    axes.set(ylabel="MB", ylim=(0, None), title="bytes by purpose")
    axes.legend(fontsize=7)
    written.append(_save(pyplot, figure, folder / "bytes_by_purpose.png"))
    return written


def _save(pyplot: Any, figure: Any, path: Path) -> Path:
    _write(path, lambda half: figure.savefig(half, dpi=120, format="png"))
    pyplot.close(figure)
    return path


def _mpl_color(block: int | None) -> str:
    return "black" if block is None else f"C{block % 10}"


def _plain(text: str) -> str:
    """For matplotlib, which reads $ as mathematics and hides labels that begin with _."""
    return " " + text.replace("$", "S")[:60]


def _print(reports: Sequence[RunReport], written: Sequence[str]) -> None:
    from node.report.html import gb, number_text

    for one in reports:
        hosts = sum(host.logged for host in one.hosts)
        print(f"{_cell(one.name)}: {hosts} hosts, {len(one.blocks)} blocks, {one.seconds:.0f} s")
        first, last = number_text(one.first_ce_nats), number_text(one.last_ce_nats)
        own = number_text(one.last_own_ce_nats)
        print(f"  CE of the consensus {first} -> {last} nats per byte, mean of the blocks")
        print(f"  CE of the hosts' own weights at the end {own}")
        print(f"  moved {size_words(one.moved_bytes)} ({one.counting}: {one.counting_reason})")
        print(
            f"  GB per nat {gb(one.gb_per_nat)} since the first measurement, "
            f"{gb(one.gb_per_nat_from_uniform)} since guessing"
        )
        total = {
            name: sum(getattr(block, name) for block in one.blocks)
            for name in ("decided_rounds", "rounds", "agreed_rounds", "compared_rounds")
        }
        print(
            f"  rounds decided {total['decided_rounds']} of {total['rounds']}; one head in "
            f"{total['agreed_rounds']} of {total['compared_rounds']} compared"
        )
        for note in one.notes:
            say(f"  note: {_cell(note)}")
    print("wrote " + ", ".join(written))
