"""What all pictures share: colours, an empty figure, lines, axes and legends, and PNG files."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checkpoints import write_aside

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442", "#000000")
WIDEST = 13.0  # inches of a picture, 1,560 pixels

_SCORE = "task/score/"
_SHARES = ("accuracy", "f1", "hits@1", "purity", "matched", "slot", "error")  # last words of measures that are shares


def blank(width: float | int, height: float | int, **options: Any) -> "Figure":
    """An empty figure, in inches; matplotlib is imported here, because it takes a second that most commands do not need."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), **options)


def rgb(color: str) -> np.ndarray:
    """A colour like "#0072b2" as three numbers from 0 to 1."""
    return np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])


def save(figure: "Figure", path: Path) -> Path:
    """Write a figure to a PNG file and return its path."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, bbox_inches="tight")
    write_aside(path, picture.getvalue())
    return path


def series(metrics: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """The steps at which a metric was written, and its values."""
    lines = [line for line in metrics if name in line]
    return [line["step"] for line in lines], [line[name] for line in lines]


def learning(axis: Any, metrics: Sequence[Mapping[str, Any]], name: str, **style: Any) -> None:
    """Draw a metric against steps; a few values are marked, so that a single one is seen."""
    steps, values = series(metrics, name)
    axis.plot(steps, values, marker="o" if len(values) < 30 else None, markersize=4, **style)


def as_shares(axis: Any, chance: float | None = None) -> None:
    """Show shares of one on an axis from 0 to 1, with a line for chance where it is known."""
    axis.set_ylim(-0.02, 1.02)
    if chance is not None:
        axis.axhline(chance, color="#888888", ls=":", lw=1.2, label=f"chance, {chance:.3g}", zorder=1)


def as_losses(axis: Any) -> None:
    """A logarithmic axis where the lines reach over more than a factor of ten, else a linear one."""
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axis.lines] or [np.ones(1)])
    values = values[np.isfinite(values)]
    if len(values) and values.min() > 0 and values.max() > 10 * values.min():
        axis.set_yscale("log")


def whole_numbers(axis: Any) -> None:
    """Ticks of steps and counts are whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))


def legend(axis: Any, **options: Any) -> None:
    """The legend right of the axes, where it hides nothing."""
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0), **options)


def pairs(axis: Any, solid: str, dashed: str) -> None:
    """Say once in the legend what solid and dashed lines are, where lines of a colour belong together."""
    axis.plot([], [], color="#444444", label=solid)
    axis.plot([], [], color="#444444", ls="--", label=dashed)


def action_text(action: Any, names: Sequence[str] = ()) -> str:
    """An action in a caption: its name, if there is one, else its numbers."""
    values = np.asarray(action.cpu() if hasattr(action, "cpu") else action).reshape(-1)
    if len(values) == 1 and np.issubdtype(values.dtype, np.integer) and 0 <= values[0] < len(names):
        return names[int(values[0])]
    shown = ", ".join(f"{value:.3g}" for value in values.tolist()[:6])
    return shown + ", ..." * (len(values) > 6)


def curves(metrics: Sequence[Mapping[str, Any]], path: Path, *, of: str | None = None) -> list[Path]:
    """Learning curves of a task: the loss in training, and one panel for each score of the evaluations on the way.

    Args:
        metrics: the lines of ``metrics.jsonl``; without any there is no picture.
        path: the file to write.
        of: what the scores of a panel differ in, above their legend.
    """
    if not metrics:
        return []
    panels: dict[str, list[str]] = {}  # a score's name is "measure" or "measure/of what"
    for name in dict.fromkeys(name for line in metrics for name in line if name.startswith(_SCORE)):
        panels.setdefault(name.removeprefix(_SCORE).partition("/")[0], []).append(name)
    columns = min(3, 1 + len(panels))
    rows = -(-(1 + len(panels)) // columns)
    figure = blank(WIDEST / 3 * columns, 3.2 * rows, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    learning(axes[0], metrics, "task/loss", color=COLORS[0])
    as_losses(axes[0])
    axes[0].set(ylabel="loss", title="loss in training")
    for axis, (measure, names) in zip(axes[1:], panels.items(), strict=False):
        labels = [name.removeprefix(f"{_SCORE}{measure}").removeprefix("/") for name in names]
        if len({label.partition("/")[2] for label in labels}) == 1:  # what all have in common
            labels = [label.partition("/")[0] for label in labels]
        for i, (name, label) in enumerate(zip(names, labels, strict=True)):
            learning(axis, metrics, name, color=COLORS[i % 8], ls=("-", "--", ":")[i // 8 % 3], label=label or None)
        as_measure(axis, measure)
        axis.set(ylabel=measure.replace("_", " "), title=f"{measure.replace('_', ' ')} on test data")
        legend(axis, title=of)
    for axis in axes:
        axis.set_xlabel("gradient step")
        whole_numbers(axis)
    for axis in axes[1 + len(panels) :]:
        axis.remove()
    return [save(figure, path)]


def as_measure(axis: Any, measure: str) -> None:
    """Shares from 0 to 1, with chance where a measure has one; other measures as they fall."""
    if measure.rpartition("_")[2] in _SHARES:
        as_shares(axis, 0.5 if measure == "balanced_accuracy" else None)


def against(
    x: Sequence[int],
    lines: Mapping[str, Sequence[float]],
    x_label: str,
    y_label: str,
    path: Path,
    *,
    share: bool = False,
) -> Path:
    """Lines of errors, the model's first, solid, and what it is held against, dashed; ``share``: from 0 to 1."""
    figure = blank(5.5, 3.6)
    axis = figure.subplots()
    for i, (name, values) in enumerate(lines.items()):
        axis.plot(x, values, label=name, color=COLORS[i], ls="-" if i == 0 else "--", marker="o" if i == 0 else None)
    if share:
        as_shares(axis)
    else:
        as_losses(axis)
    axis.set(xlabel=x_label, ylabel=y_label, title=f"test data: {y_label.partition(' at ')[0]} by {x_label}")
    whole_numbers(axis)
    legend(axis)
    return save(figure, path)
