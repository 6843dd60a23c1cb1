"""A scoreboard's pages: Markdown, CSV, tables for a terminal and a picture."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from ..checkpoints import write_aside
from .figures import COLORS, WIDEST, blank, save
from .scoreboard import BASELINES, ENOUGH_SEEDS, Row, Scoreboard, Section, Statistic, as_text, fewer

DAGGER = "†: shortcut alarm in some of its runs, the latent copy is as good as the model at the longest horizon"


@dataclass
class _Grid:
    """A table before it is rendered; the style of a line is "", "copy", "collapsed" or "published"."""

    title: str
    header: list[str]
    lines: list[tuple[str, list[str]]]
    names: int = 1  # how many columns are names


def _cell(row: Row, horizon: str, measure: str, *, spread: bool = True) -> str:
    """Percent: "44.1 ± 8.3 [40.1, 48.3]", below five seeds "44.1 ± 8.3 (40.0, 48.2)"; " (n=2)" where some seeds lack it."""
    found = row.scores.get(horizon, {}).get(measure)
    if found is None:
        return "-"
    text = f"{100 * found.mean:.1f}" + (f" ± {100 * found.sd:.1f}" if found.sd is not None else "")
    if spread and found.interval is not None:
        text += f" [{100 * found.interval[0]:.1f}, {100 * found.interval[1]:.1f}]"
    elif spread and len(found.values) > 1:
        text += f" ({', '.join(f'{100 * value:.1f}' for value in found.values)})"
    return text + fewer(row, found)


def _steps(horizon: str) -> str:
    return f"{horizon} step{'s' * (horizon != '1')}"


def _style(row: Row) -> str:
    return "published" if row.published else "collapsed" if row.collapsed else ""


def _label(row: Row) -> str:
    return row.name + " †" * (row.shortcut > 0)


def _marked(grid: _Grid) -> bool:
    return any(cell.endswith(" †") for _, cells in grid.lines for cell in cells[: grid.names])


def _grids(section: Section, compare: str) -> list[_Grid]:
    """The tables of a section."""
    at = section.horizons
    header = [f"{name}, {_steps(h)}" for name in ("H@1", "MRR") for h in at]
    main = _Grid("H@1 and MRR, percent", [compare, "seeds", *header], [])
    copies = {"copy_": "its latent copy", "true_copy_": "copy of the true state"}
    for row in section.rows:
        cells = [_cell(row, h, measure) for measure in ("h@1", "mrr") for h in at]
        main.lines.append((_style(row), [_label(row), str(row.seeds), *cells]))
        for prefix, name in copies.items():
            cells = [_cell(row, h, f"{prefix}{m}", spread=False) for m in ("h@1", "mrr") for h in at]
            if set(cells) != {"-"}:
                main.lines.append(("copy", [name, "", *cells]))
    ours = [row for row in section.rows if not row.published]
    return [main, _about(ours, compare, at), *_further(ours, compare, at), *_readout(ours, compare, at)]


def _about(rows: Sequence[Row], compare: str, horizons: Sequence[str]) -> _Grid:
    last = horizons[-1]
    baselines = [name for name in BASELINES if any(name in row.better.get(last, {}) for row in rows)]
    better = [f"P(better than {name}), {_steps(last)}" for name in baselines]
    time = "wall time of training (beside whatever else ran), h:mm:ss"
    header = [compare, "parameters of the core", "of all", time, *better]
    lines = []
    for row in rows:
        counts = [" to ".join(f"{n:,}" for n in sorted({c[0], c[-1]})) for c in (row.core_parameters, row.parameters)]
        time = "-"
        if row.seconds is not None:
            time = f"{timedelta(seconds=round(row.seconds.mean))}{fewer(row, row.seconds)}"
        cells = [_probability(row.better.get(last, {}).get(name)) for name in baselines]
        lines.append((_style(row), [_label(row), *counts, time, *cells]))
    title = "Size, time" + f" and probability of improvement in H@1 at {_steps(last)}" * bool(baselines)
    return _Grid(title, header, lines)


def _probability(found: Statistic | None) -> str:
    if found is None:
        return ""
    return f"{found.mean:.2f}" + (f" [{found.interval[0]:.2f}, {found.interval[1]:.2f}]" if found.interval else "")


def _further(rows: Sequence[Row], compare: str, horizons: Sequence[str]) -> list[_Grid]:
    """H@1 in the episode and on paths with a push, each beside its copy."""
    grids = []
    parts = {
        "in_episode": ("In-episode H@1, percent", {"copy_h@1": "its latent copy", "chance": "chance"}),
        "moved": ("H@1 on paths with a push, percent", {"copy_h@1": "its latent copy"}),
    }
    for part, (title, beside) in parts.items():
        grid = _Grid(title, [compare, *map(_steps, horizons)], [])
        for row in rows:
            cells = [_cell(row, h, f"{part}_h@1") for h in horizons]
            if set(cells) != {"-"}:
                grid.lines.append((_style(row), [_label(row), *cells]))
                for measure, name in beside.items():
                    copied = [_cell(row, h, f"{part}_{measure}", spread=False) for h in horizons]
                    grid.lines.append(("copy", [name, *copied]))
        grids += [grid] if grid.lines else []
    return grids


def _readout(rows: Sequence[Row], compare: str, horizons: Sequence[str]) -> list[_Grid]:
    """R² of true coordinates read linearly from slots."""
    measures = {"r2": "all slots", "slot_r2": "best slot"}
    measures |= {f"imagined_r2/{h}": f"imagined, {_steps(h)}" for h in horizons}
    alone = ["time_r2", "", *(f"imagined_time_r2/{h}" for h in horizons)]
    lines = []
    for thing in dict.fromkeys(thing for row in rows for thing in row.probe):
        probes = [(row, row.probe[thing]) for row in rows if thing in row.probe]
        for row, probe in probes:
            cells = [f"{probe[m].mean:.2f}{fewer(row, probe[m])}" if m in probe else "-" for m in measures]
            lines.append((_style(row), [thing, _label(row), *cells]))
        told = [[probe[m].mean for _, probe in probes if m in probe] for m in alone]
        if any(told):  # the same of all rows, as it knows no slot
            cells = [f"{np.mean(values):.2f}" if values else "-" for values in told]
            lines.append(("copy", [thing, "the step alone", *cells]))
    title = "R² of objects' true coordinates read linearly from slots, mean over seeds"
    title += "; a readout is worth something only above the step alone, the mean at each step without slots"
    return [_Grid(title, ["object", compare, *measures.values()], lines, names=2)] if lines else []


def _about_data(section: Section) -> str:
    """The setting as the words that choose it."""
    return " ".join(f"{k}={as_text(v)}" for k, v in section.setting.items() if v is not None and v is not False)


def markdown(board: Scoreboard, command: str) -> str:
    """The scoreboard as Markdown; collapsed rows are in italics.

    Args:
        board: from ``scoreboard``.
        command: what made it.
    """
    parts = [
        "# Scoreboard",
        f"Made by `{command}`.",
        "Mean ± standard deviation over seeds, with the 95 % bootstrap interval of the mean from five seeds on; fewer are "
        "listed in brackets. (n=2): only so many runs of the row have the number. P(better) needs three seeds of both. What "
        "is measured is in docs/metrics.md.",
    ]
    for section in board.sections:
        parts += [f"## {section.title}", f"Test data: `{_about_data(section)}`"]
        grids = _grids(section, board.compare)
        for i, grid in enumerate(grids):
            parts += [f"### {grid.title}"] * (i > 0) + [_markdown_table(grid)] + [DAGGER] * (i > 0 and _marked(grid))
            if i == 0 and section.notes:
                parts.append("\n".join(f"- {note}" for note in section.notes))
        parts.append("Runs:\n\n" + "\n".join(f"- {r.name}: {', '.join(r.paths)}" for r in section.rows if r.paths))
    if board.not_evaluated:
        parts.append("Not evaluated: " + ", ".join(board.not_evaluated))
    if board.foreign:
        parts.append("Not a world model's run: " + ", ".join(board.foreign))
    return "\n\n".join(parts) + "\n"


def _markdown_table(grid: _Grid) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    lines = [line(grid.header), line(["---" if i < grid.names else "---:" for i in range(len(grid.header))])]
    for style, cells in grid.lines:
        slanted = style == "collapsed"
        lines.append(line([f"*{cell}*" if slanted and cell else cell for cell in cells]))
    return "\n".join(lines)


def csv_rows(board: Scoreboard) -> list[dict[str, Any]]:
    """One line for every setting, value of what is compared and horizon; shares of one, not percent."""
    lines = []
    for section in board.sections:
        for row in section.rows:
            for h in sorted(row.scores, key=int):
                line: dict[str, Any] = {
                    "section": section.title,
                    "test_data": _about_data(section),
                    board.compare: row.name,
                    "horizon": int(h),
                    "seeds": row.seeds,
                }
                for measure, found in row.scores[h].items():
                    listed = {f"{measure}_seeds": _joined(found.values)} if measure in ("h@1", "mrr") else {}
                    line |= _columns(row, measure, found) | listed
                for name, found in row.better.get(h, {}).items():
                    line |= _columns(row, f"better_than_{name}", found)
                for thing, readout in row.probe.items():
                    kept = {m.partition("/")[0]: r for m, r in readout.items() if m.partition("/")[2] in ("", h)}
                    for measure, found in kept.items():
                        line |= _columns(row, f"probe_{thing}_{measure}", found)
                if not row.published:
                    line |= {
                        "core_parameters": _joined(row.core_parameters),
                        "parameters": _joined(row.parameters),
                        "training_seconds": "" if row.seconds is None else row.seconds.mean,
                        "collapsed_runs": row.collapsed,
                        "shortcut_runs": row.shortcut,
                        "runs": _joined(row.paths),
                    }
                lines.append(line)
    return lines


def _columns(row: Row, name: str, found: Statistic) -> dict[str, float]:
    columns = {name: found.mean}
    if fewer(row, found):
        columns[f"{name}_n"] = len(found.values)
    if found.sd is not None:
        columns[f"{name}_sd"] = found.sd
    if found.interval is not None:
        columns[f"{name}_low"], columns[f"{name}_high"] = found.interval
    return columns


def _joined(values: Iterable[Any]) -> str:
    return " ".join(map(str, values))


def tables(board: Scoreboard) -> list[Table]:
    """The scoreboard for a terminal; copies and collapsed rows are dim."""
    shown = []
    for section in board.sections:
        for i, grid in enumerate(_grids(section, board.compare)):
            heading = f"{section.title}\n{_about_data(section)}" if i == 0 else f"\n{grid.title}"
            notes = (
                DAGGER if i > 0 and _marked(grid) else "\n".join(section.notes) if i == 0 and section.notes else None
            )
            table = Table(title=Text(heading), title_justify="left", caption_justify="left")
            table.caption = None if notes is None else Text(notes)
            for j, name in enumerate(grid.header):
                title = Text(name.replace(", ", "\n", 1))
                table.add_column(title, justify="left" if j < grid.names else "right", no_wrap=j == 0)
            for style, (name, *cells) in grid.lines:
                broken = name.replace("d (", "d\n(") if style == "published" else name.replace(", ", ",\n")
                texts = [Text(cell) for cell in (broken, *cells)]
                table.add_row(*texts, style="dim" if style in ("copy", "collapsed") else None)
            shown.append(table)
    return shown


def figure(board: Scoreboard, path: Path) -> Path:
    """H@1 of every row at every horizon: each seed, the mean with its spread, the latent copy, chance, published figures.

    Args:
        board: from ``scoreboard``.
        path: the file to write.
    """
    sizes = [0.42 * len(section.rows) + 1.3 for section in board.sections]
    most = max(len(section.horizons) for section in board.sections)
    drawn = blank(min(WIDEST - 3.0, 3.1 * most + 1.0), sum(sizes))
    panels: Any = drawn.subfigures(len(sizes), 1, squeeze=False, height_ratios=sizes)
    for part, section, size in zip(panels[:, 0], board.sections, sizes, strict=True):
        axes = part.subplots(1, len(section.horizons), sharey=True, squeeze=False)[0]
        part.subplots_adjust(top=1 - 0.62 / size, bottom=0.5 / size, wspace=0.08)
        part.suptitle(section.title, fontsize=10, y=1 - 0.08 / size)
        for axis, h in zip(axes, section.horizons, strict=True):
            _panel(axis, section, h)
            axis.set_title(f"{_steps(h)} ahead", fontsize=9)
        axes[0].set_yticks(range(len(section.rows)), [_tick(row) for row in section.rows], fontsize=8)
        for label, row in zip(axes[0].get_yticklabels(), section.rows, strict=True):
            label.set_color("#999999" if row.collapsed else "black")
        _beside(axes[-1], section)
    drawn.text(0.5, -0.12 / sum(sizes), "\n".join(_legend(board)), ha="center", va="top", fontsize=8)
    return save(drawn, path)


def _legend(board: Scoreboard) -> list[str]:
    """What the marks of the picture mean, those that occur."""
    rows = [row for section in board.sections for row in section.rows]
    said = "dot: one seed; bar: mean with its 95 % interval, or ± sd where so marked; square: its latent copy"
    said += "; dotted bar: published, ± sd" * any(row.published for row in rows)
    said += "; grey dotted line: chance" * any(section.episodes for section in board.sections)
    said += "; grey: collapsed" * any(row.collapsed for row in rows)
    lines = [said]
    if any(row.shortcut for row in rows):
        lines.append("shortcut alarm: the latent copy is as good as the model at the longest horizon")
    if any(better for row in rows for better in row.better.values()):
        lines.append("P(better than X): how probable it is that a seed of the row has a higher H@1 than a seed of X")
    return lines


def _tick(row: Row) -> str:
    if row.published:
        return f"{row.name.replace(': ', chr(10))}"
    n = row.seeds
    spread = "" if n == 1 else ", 95 %" if n >= ENOUGH_SEEDS else ", ± sd"
    dead = f", collapsed in {row.collapsed} of {n}" if row.collapsed else ""
    copied = f"\nshortcut alarm in {row.shortcut} of {n}" if row.shortcut else ""
    return f"{row.name}\n{n} seed{'s' * (n > 1)}{spread}{dead}{copied}"


def _panel(axis: Any, section: Section, horizon: str) -> None:
    """Percent from 0 to 100; a single seed is a dot without mean or spread."""
    if section.episodes:
        axis.axvline(100 / section.episodes, color="#888888", ls=":", lw=1, zorder=0)
    for y, row in enumerate(section.rows):
        entry = row.scores.get(horizon, {})
        if "h@1" not in entry:
            continue
        found = entry["h@1"]
        color = "#aaaaaa" if row.collapsed else "black" if row.published else COLORS[y % 6]
        values = [100 * value for value in found.values]
        single = len(values) == 1
        if not single:
            mean, sd = 100 * found.mean, 100 * (found.sd or 0.0)
            low, high = (100 * edge for edge in found.interval) if found.interval else (max(mean - sd, 0.0), mean + sd)
            thin = {"lw": 0.8, "ls": ":"} if row.published else {"lw": 2.0}
            size = {"markersize": 9, "mew": 1} if row.published else {"markersize": 14, "mew": 2.5}
            axis.plot([low, high], [y, y], color=color, solid_capstyle="butt", **thin)
            axis.plot([mean], [y], color=color, marker="|", **size)
        at = y if single else y + 0.22
        axis.scatter(values, [at] * len(values), s=30 if single else 12, color=color, alpha=0.7, linewidths=0)
        if "copy_h@1" in entry:
            copied = 100 * entry["copy_h@1"].mean
            axis.plot([copied], [y], color=color, marker="s", markersize=5, mfc="none", mew=1)
    axis.set(xlim=(-2, 102), xticks=range(0, 101, 20), ylim=(len(section.rows) - 0.5, -0.5))
    axis.set_xlabel("H@1, %", fontsize=8)
    axis.grid(axis="x", alpha=0.3)
    axis.tick_params(labelsize=8)
    axis.tick_params(axis="y", length=0)


def _beside(axis: Any, section: Section) -> None:
    """The probabilities of improvement at the last horizon, right of its panel."""
    last = section.horizons[-1]
    baselines = [name for name in BASELINES if any(name in row.better.get(last, {}) for row in section.rows)]
    place = axis.get_yaxis_transform()
    for column, name in enumerate(baselines):
        x = 1.17 + 0.31 * column
        heading = f"P(better\nthan {name},\n{_steps(last)})"
        axis.text(x, -0.62, heading, transform=place, ha="center", va="bottom", fontsize=7)
        for y, row in enumerate(section.rows):
            text = _probability(row.better.get(last, {}).get(name)).replace(" [", "\n[")
            axis.text(x, y, text, transform=place, ha="center", va="center", fontsize=7)


def write(board: Scoreboard, folder: Path, command: str) -> list[Path]:
    """Write ``scoreboard.md``, ``scoreboard.csv`` and ``scoreboard.png`` into a folder and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    lines, text = csv_rows(board), io.StringIO()
    columns = list(dict.fromkeys(column for line in lines for column in line))
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    for name, content in (("scoreboard.md", markdown(board, command)), ("scoreboard.csv", text.getvalue())):
        write_aside(folder / name, content.encode())
    return [folder / "scoreboard.md", folder / "scoreboard.csv", figure(board, folder / "scoreboard.png")]
