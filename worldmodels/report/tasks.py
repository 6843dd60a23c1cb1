"""Pictures of the sequence tasks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np
from torch import Tensor

from .figures import COLORS, save, series


def curves(metrics: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Learning curves: the loss in training, and the scores of the evaluations on the way."""
    names = sorted({name for line in metrics for name in line if name.startswith("task/score/")})
    figure = matplotlib.figure.Figure(figsize=(10, 3.6) if names else (5.5, 3.6))
    axes = figure.subplots(1, 2 if names else 1, squeeze=False)[0]
    axes[0].plot(*series(metrics, "task/loss"), color=COLORS[0])
    axes[0].set(xlabel="gradient step", ylabel="loss", yscale="log", title="training")
    for i, name in enumerate(names):
        label, ls = name.removeprefix("task/score/"), "-" if i < 4 else "--"
        axes[1].plot(*series(metrics, name), label=label, color=COLORS[i % 4], ls=ls, marker=".")
    if names:
        axes[1].set(xlabel="gradient step", title="test data")
        axes[1].legend(frameon=False, fontsize=8)
    return save(figure, path)


def against(
    x: Sequence[int], lines: Mapping[str, Sequence[float]], x_label: str, y_label: str, path: Path, *, log: bool = True
) -> Path:
    """Lines of errors, the model's first."""
    figure = matplotlib.figure.Figure(figsize=(5.5, 3.6))
    axis = figure.subplots()
    for i, (name, values) in enumerate(lines.items()):
        axis.plot(x, values, label=name, color=COLORS[i], ls="-" if i == 0 else "--", marker="o" if i == 0 else None)
    axis.set(xlabel=x_label, ylabel=y_label, yscale="log" if log else "linear")
    axis.legend(frameon=False)
    return save(figure, path)


def running_sum(true: Tensor, said: Tensor, marked: Tensor, path: Path) -> Path:
    """What a model says on its way through a sequence, beside the sum so far; ``(T,)`` each."""
    figure = matplotlib.figure.Figure(figsize=(8, 3))
    axis = figure.subplots()
    axis.step(range(len(true)), true, where="post", color=COLORS[1], label="sum so far")
    axis.plot(said, color=COLORS[0], label="what the readout says")
    axis.scatter(np.flatnonzero(marked), true[marked], s=18, color=COLORS[1], label="marked number", zorder=3)
    axis.set(xlabel="step")
    axis.legend(frameon=False, fontsize=8)
    return save(figure, path)


def rule_table(operations: Sequence[str], uses: Sequence[Sequence[int]], path: Path) -> Path:
    """How often each rule was used for each operation, shaded by its share of the operation."""
    counts = np.asarray(uses)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    figure = matplotlib.figure.Figure(figsize=(0.9 * counts.shape[1] + 2, 0.6 * len(operations) + 1))
    axis = figure.subplots()
    axis.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for (o, r), count in np.ndenumerate(counts):
        axis.text(r, o, str(count), ha="center", va="center", color="white" if shares[o, r] > 0.5 else "black")
    axis.set_xticks(range(counts.shape[1]), [f"rule {r + 1}" for r in range(counts.shape[1])])
    axis.set_yticks(range(len(operations)), operations)
    axis.xaxis.tick_top()
    return save(figure, path)


def story(lines: Sequence[str], where: Tensor, answers: Tensor, path: Path) -> Path:
    """A story as text, and on its grid the agents' paths with the model's answers after the last statement.

    Args:
        lines: the statements.
        where: ``(T, 2, 2)``, the cells of both agents after each.
        answers: ``(T - 3, 2, 2)``, the cells the model names after each from the fourth on.
        path: the file to write.
    """
    figure = matplotlib.figure.Figure(figsize=(8.5, 4.2))
    text, axis = figure.subplots(1, 2, width_ratios=(1, 1.6))
    text.axis("off")
    shown = lines if len(lines) <= 20 else [*lines[:10], "...", *lines[-9:]]
    text.text(0, 1, "\n".join(shown), va="top", family="monospace", fontsize=8)
    for agent in range(2):
        path_x, path_y = where[:, agent].float().T + 0.12 * (2 * agent - 1)
        axis.plot(path_x, path_y, color=COLORS[agent], marker=".", label=f"agent{agent + 1}, from circle to square")
        axis.scatter(path_x[0], path_y[0], s=60, facecolors="none", edgecolors=COLORS[agent])
        axis.scatter(path_x[-1], path_y[-1], s=70, marker="s", color=COLORS[agent])
        named = answers[-1, agent]
        if int(named.min()) > 0:
            axis.scatter(
                *named, s=160, marker="x", color=COLORS[agent], label=f"where the model says agent{agent + 1} is"
            )
    right = (answers == where[3:]).all(-1).float().mean()
    axis.set(xlim=(0.4, 10.6), ylim=(0.4, 10.6), xticks=range(1, 11), yticks=range(1, 11), aspect="equal")
    axis.set_title(f"asked after every statement from the fourth on: {100 * right:.0f} % right", fontsize=9)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    return save(figure, path)
