"""What all pictures share: colours, an empty figure, lines against steps, and PNG files."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checkpoints import write_aside

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442", "#000000")


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


def curves(metrics: Sequence[Mapping[str, Any]], path: Path) -> list[Path]:
    """Learning curves of a task: the loss in training, and the scores of the evaluations on the way; none without metrics."""
    if not metrics:
        return []
    names = sorted({name for line in metrics for name in line if name.startswith("task/score/")})
    figure = blank(10 if names else 5.5, 3.6)
    axes = figure.subplots(1, 2 if names else 1, squeeze=False)[0]
    axes[0].plot(*series(metrics, "task/loss"), color=COLORS[0])
    axes[0].set(xlabel="gradient step", ylabel="loss", yscale="log", title="training")
    for i, name in enumerate(names):
        label, ls = name.removeprefix("task/score/"), "-" if i < 4 else "--"
        axes[1].plot(*series(metrics, name), label=label, color=COLORS[i % 4], ls=ls, marker=".")
    if names:
        axes[1].set(xlabel="gradient step", title="test data")
        axes[1].legend(frameon=False, fontsize=8)
    return [save(figure, path)]


def against(
    x: Sequence[int], lines: Mapping[str, Sequence[float]], x_label: str, y_label: str, path: Path, *, log: bool = True
) -> Path:
    """Lines of errors, the model's first."""
    figure = blank(5.5, 3.6)
    axis = figure.subplots()
    for i, (name, values) in enumerate(lines.items()):
        axis.plot(x, values, label=name, color=COLORS[i], ls="-" if i == 0 else "--", marker="o" if i == 0 else None)
    axis.set(xlabel=x_label, ylabel=y_label, yscale="log" if log else "linear")
    axis.legend(frameon=False)
    return save(figure, path)
