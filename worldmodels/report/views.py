"""Pictures of models that see in parts: where modules look, who talks to whom, what is imagined, polar images."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..attention import embed_position
from ..losses import UNIT_TYPES, polar_parts, polar_truth
from .figures import COLORS, WIDEST, as_measure, blank, legend, pairs, rgb, save, whole_numbers

_SHORT = ("ma", "md", "me", "st", "ze", "co", "hy", "zl", "ba")  # the nine types, as letters in a picture


def against_share(
    views: Mapping[str, Mapping[str, Mapping[str, float]]],
    path: Path,
    *,
    copied: Mapping[str, Mapping[str, float]] | None = None,
) -> Path:
    """Every measure against the share of the views that report, a colour for each variant.

    Args:
        views: by variant and share, the measures.
        path: the file to write.
        copied: by variant, the same measures of a copy of the present, which sees all pixels: dashed.
    """
    measures = list(next(iter(next(iter(views.values())).values())))
    figure = blank(min(WIDEST, 3.4 * len(measures) + 1.8), 3.6, layout="constrained")
    axes = figure.subplots(1, len(measures), squeeze=False)[0]
    for axis, measure in zip(axes, measures, strict=True):
        for i, (variant, by_share) in enumerate(views.items()):
            shares = [100 * float(share) for share in by_share]
            values = [measured[measure] for measured in by_share.values()]
            axis.plot(shares, values, marker="o", color=COLORS[i % 8], label=variant)
            if copied and measure in copied.get(variant, {}):
                axis.axhline(copied[variant][measure], color=COLORS[i % 8], ls="--", lw=1)
        if copied:
            pairs(axis, "the model", "a copy of the present,\nwhich sees all pixels")
        as_measure(axis, measure)
        axis.set(xlabel="views that report, %", ylabel=measure.replace("_", " "), xlim=(-2, 102))
    handles, labels = axes[0].get_legend_handles_labels()  # with chance, if any measure has one
    legend(axes[-1], handles=handles, labels=labels)
    figure.suptitle("test data: how well the next views are predicted when only some views report", fontsize=10)
    return save(figure, path)


def against_removed(removed: Mapping[str, Mapping[str, Mapping[str, float]]], path: Path) -> Path:
    """The first measure against the number of modules taken away, a line for each variant (the paper's figure 7)."""
    figure = blank(5, 3.4)
    axis = figure.subplots()
    measure = next(iter(next(iter(next(iter(removed.values())).values()))))
    for i, (variant, by_count) in enumerate(removed.items()):
        values = [measured[measure] for measured in by_count.values()]
        axis.plot([int(count) for count in by_count], values, marker="o", color=COLORS[i % 8], label=variant)
    as_measure(axis, measure)
    axis.set(xlabel="modules taken away", ylabel=measure.replace("_", " "), title="test data: with fewer modules")
    whole_numbers(axis)
    legend(axis)
    return save(figure, path)


@torch.no_grad()
def enclaves(core: Any, extent: tuple[float, float], scale: float, path: Path) -> Path:
    """Where each module of an S2RM core looks (eq. 11), and which modules hear each other (the paper's figures 5 and 9).

    Args:
        core: with ``places`` and a kernel.
        extent: how far positions reach along both axes.
        scale: what positions are multiplied by before they reach the core.
        path: the file to write.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    places = torch.nn.functional.normalize(core.places, dim=-1)
    first = torch.arange(0.0, extent[0], extent[0] / 60, device=places.device)
    second = torch.arange(0.0, extent[1], extent[1] / 60, device=places.device)
    here = embed_position(scale * torch.cartesian_prod(first, second), places.shape[-1])
    maps = core.reach(here).unflatten(1, (len(first), len(second))).cpu()
    links = core.reach(places).cpu()
    M = len(maps)
    columns = min(5, M)
    lines = -(-M // columns)
    figure = blank(1.7 * columns + 4.4, max(1.9 * lines, 3.8), layout="constrained")
    panels: Any = figure.subfigures(1, 2, width_ratios=(1.7 * columns, 4.4))
    left, right = panels
    grid = left.subplots(lines, columns, squeeze=False).flatten()
    for m, axis in enumerate(grid):
        axis.set(xticks=[], yticks=[])
        axis.axis("on" if m < M else "off")
        if m < M:
            image = axis.imshow(maps[m].numpy(), vmin=0, vmax=1, cmap="viridis")
            axis.set_title(f"module {m}", fontsize=8)
    title = "where each module looks: positions "
    title += " and ".join(f"0 to {end:g} {way}" for end, way in zip(extent, ("down", "across"), strict=True))
    left.suptitle(title, fontsize=10)
    left.colorbar(image, ax=grid.tolist(), shrink=0.8, label="how much of it the module sees")
    axis = right.subplots()
    angle = 2 * np.pi * np.arange(M) / M
    x, y = np.cos(angle), np.sin(angle)
    shade = ScalarMappable(Normalize(0, 1), "gray_r")
    for a in range(M):
        for b in range(a + 1, M):
            strength = float(links[a, b])
            if strength > 0:
                axis.plot(x[[a, b]], y[[a, b]], color=str(1.0 - strength), lw=2.5 * strength, zorder=strength)
    axis.scatter(x, y, s=220, color=COLORS[5], zorder=3)
    for m in range(M):
        axis.text(x[m], y[m], str(m), ha="center", va="center", fontsize=8, zorder=4)
    axis.set(aspect="equal", xlim=(-1.2, 1.2), ylim=(-1.2, 1.2))
    axis.axis("off")
    right.suptitle("which modules hear each other", fontsize=10)
    right.colorbar(shade, ax=axis, shrink=0.8, label="how much they hear of each other")
    return save(figure, path)


def rollouts(shown: Mapping[str, tuple[Tensor, Tensor]], path: Path, *, every: int = 3) -> Path:
    """Stitched rollouts under the truth (the paper's figures 3 and 15 to 19).

    Args:
        shown: for each variant true and imagined frames, ``(S, H, W)`` in [0, 1].
        path: the file to write.
        every: of how many steps one is shown.
    """
    steps = list(range(0, len(next(iter(shown.values()))[0]), every))
    rows = 2 * len(shown)
    figure = blank(min(WIDEST, 0.95 * len(steps) + 1.2), 0.95 * rows + 0.5, layout="constrained")
    axes = figure.subplots(rows, len(steps), squeeze=False)
    for i, (variant, pair) in enumerate(shown.items()):
        for row, (name, frames) in enumerate(zip((f"{variant},\ntrue", "imagined"), pair, strict=True)):
            for column, t in enumerate(steps):
                axis = axes[2 * i + row, column]
                axis.imshow(frames[t].cpu().numpy(), cmap="gray", vmin=0, vmax=1)
                axis.set(xticks=[], yticks=[])
                if i == 0 and row == 0:
                    axis.set_title(f"step {t + 1}", fontsize=8)
            axes[2 * i + row, 0].set_ylabel(name, fontsize=8)
    figure.suptitle("true frames, and below them\nwhat the model imagines", fontsize=9)
    return save(figure, path)


def along_rollout(rollout: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> Path:
    """Balanced accuracy of the stitched frames along a rollout, beside a copy of the last frame seen."""
    figure = blank(5.5, 3.6)
    axis = figure.subplots()
    for i, (variant, lines) in enumerate(rollout.items()):
        at = range(1, len(lines["model"]) + 1)
        axis.plot(at, lines["model"], color=COLORS[i % 8], label=variant)
        axis.plot(at, lines["copy"], color=COLORS[i % 8], ls="--", linewidth=1)
    pairs(axis, "the model", "a copy of the last\nframe seen")
    as_measure(axis, "balanced_accuracy")
    axis.set(xlabel="imagined step", ylabel="balanced accuracy of pixels", title="test data: frames imagined in a row")
    whole_numbers(axis)
    legend(axis)
    return save(figure, path)


def polar_pair(truth: Tensor, said: Tensor, path: Path, *, count: int = 4) -> Path:
    """Polar images as a person reads them, above what a model said of them.

    A view is a disc with its observer in the middle and east to the right: the height as grey, friendly units blue, others
    orange, each with two letters for its type and darker the healthier it is.

    Args:
        truth: images ``(M, 15, I, J)``.
        said: predicted maps ``(M, 15, I, J)``, see ``losses.polar_loss``.
        path: the file to write.
        count: how many views, spread over all M.
    """
    chosen = torch.linspace(0, len(truth) - 1, min(count, len(truth))).long()
    figure = blank(3.1 * len(chosen) + 0.6, 7.0, layout="constrained")
    axes = figure.subplots(2, len(chosen), squeeze=False, subplot_kw={"projection": "polar"})
    friendly, types, hecs = polar_truth(truth[chosen.to(truth.device)].cpu())
    ground = truth[chosen.to(truth.device)].cpu()[:, -1] if truth.shape[1] >= 15 else torch.zeros_like(friendly)
    guess_friendly, guess_types, guess_hecs = polar_parts(said[chosen.to(said.device)].cpu())
    for column in range(len(chosen)):
        image = _disc(axes[0, column], ground[column], friendly[column] > 0.5, types[column], hecs[column, 0])
        says = guess_types[column].argmax(0)
        _disc(axes[1, column], ground[column], guess_friendly[column] > 0.0, says, guess_hecs[column, 0])
        axes[0, column].set_title(f"view {int(chosen[column]) + 1}: seen", fontsize=9)
        axes[1, column].set_title("predicted a step before", fontsize=9)
    figure.colorbar(image, ax=axes, shrink=0.5, label="height of the ground (both rows: the true one)")
    note = ", ".join(f"{short} {name}" for short, name in zip(_SHORT, _NAMES, strict=True))
    figure.suptitle(
        "what units see around them (top), and what the model said a step before (bottom)\n"
        f"the observer is in the middle, east is right; blue: friendly, orange: not; the stronger, the healthier\n{note}",
        fontsize=9,
    )
    return save(figure, path)


_NAMES = ("marine", "marauder", "medivac", "stalker", "zealot", "colossus", "hydralisk", "zergling", "baneling")


def _disc(axis: Any, ground: Tensor, friendly: Tensor, types: Tensor, health: Tensor) -> Any:
    """One view ``(I, J)`` as a disc; returns the ground, for its colour scale."""
    rings, directions = types.shape
    angles = (np.arange(directions + 1) - 0.5) * 2 * np.pi / directions
    radii = np.concatenate([[0.0], np.arange(rings) + 0.5])
    image = axis.pcolormesh(angles, radii, ground.numpy(), cmap="Greys", vmin=-0.3, vmax=2.0, shading="flat")
    for i, j in (types < UNIT_TYPES).nonzero().tolist():
        color = rgb(COLORS[0] if friendly[i, j] else COLORS[1])
        strength = 0.35 + 0.65 * float(health[i, j].clamp(0, 1)) ** 0.5
        axis.scatter(
            j * 2 * np.pi / directions,
            i,
            s=90,
            color=[tuple(1 - strength * (1 - color))],
            edgecolors="black",
            linewidths=0.4,
            zorder=3,
        )
        axis.text(
            j * 2 * np.pi / directions, i, _SHORT[int(types[i, j])], ha="center", va="center", fontsize=6, zorder=4
        )
    axis.set(ylim=(0, rings - 0.5), xticks=[], yticks=[])
    return image
