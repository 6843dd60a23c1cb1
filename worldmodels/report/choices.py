"""What a core chose, step by step: collecting it, and one picture of it."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core import RecurrentCore, State, Tokens, reset_where
from .figures import COLORS, WIDEST, blank, rgb, save

_PALE = np.array([0.94, 0.94, 0.94])
_DARK = rgb(COLORS[0])
_CELLS = 50  # side by side; more go on below


@torch.no_grad()
def trace(core: RecurrentCore, tokens: Tokens, state: State, starts: Tensor | None = None) -> dict[str, Tensor]:
    """What a core chooses over a sequence: ``explain`` at every step of ``unroll``.

    Args:
        core: the core; put it in evaluation mode first.
        tokens: unprepared tokens with leading axes ``(T, B)``.
        state: the state before the first step.
        starts: ``(T, B)``, True where an episode begins; None if none begins inside.

    Returns:
        Every entry of ``explain`` with a leading axis of time, ``(T, B, ...)``; empty if the core chooses nothing.
    """
    initial = core.initial_state(tokens.features.shape[1]) if starts is not None else {}
    steps = []
    for t, tokens_t in enumerate(core.prepare(tokens).steps()):
        if starts is not None:
            state = reset_where(starts[t], initial, state)
        steps.append(core.explain(tokens_t, state))
        _, state = core(tokens_t, state)
    return {name: torch.stack([step[name] for step in steps]) for name in steps[0]}


def choice_map(explained: Mapping[str, Tensor], num_slots: int, path: Path) -> Path | None:
    """Draw what a core chose over time, one panel for each kind of choice; a long sequence goes on below.

    Args:
        explained: what ``trace`` returns, for one row: every entry ``(T, ...)``. "rule", "context" and "primary" are drawn as
            the rule applied to each slot and the slot it looked at; "schema" as a coloured number for each object file;
            "active", "gate", "memory_read", "memory_write", "rate" and "confidence" as how dark a cell is; "input_attention"
            ``(T, K, N)`` and "communication" ``(T, K, K)`` as the number of the token or slot that got most attention, the
            darker the more.
        num_slots: K.
        path: the PNG file.

    Returns:
        The path; None if the core chooses nothing.
    """
    parts = {name: part.detach().cpu() for name, part in explained.items()}
    panels = _panels(parts, num_slots)
    if not panels:
        return None
    T = len(next(iter(parts.values())))
    most = max(panel.columns for panel in panels)
    times = -(-T * most // _CELLS)
    length = -(-T // times)  # steps that stand side by side
    heights = [0.36 * panel.rows + 0.75 for panel in panels] * times
    width = min(0.42, (WIDEST - 2.2) / (length * most)) * length * most
    figure = blank(max(6.5, width + 2.0), sum(heights) + 0.3, layout="constrained")
    grid = figure.subplots(len(heights), 2, squeeze=False, height_ratios=heights, width_ratios=(40, 1))
    every = max(1, length // 25)
    for i, (axis, scale) in enumerate(grid):
        panel, first = panels[i % len(panels)], i // len(panels) * length
        shades = panel.draw(axis, slice(first, first + length))
        if shades is None:
            scale.remove()
        else:
            figure.colorbar(shades, cax=scale, ticks=(0, 0.5, 1))
            scale.set_ylabel(panel.scale, fontsize=9)
        steps = range(first, min(first + length, T), every)
        axis.set_xticks([((t - first) + 0.5) * panel.columns - 0.5 for t in steps], map(str, steps))
        axis.set_yticks(range(0, panel.rows, max(1, panel.rows // 12)))
        axis.set(xlim=(-0.5, length * panel.columns - 0.5), ylim=(panel.rows - 0.5, -0.5), ylabel=panel.row)
        axis.set_title(panel.title, fontsize=10)
        if (i + 1) % len(panels) == 0:
            axis.set_xlabel(f"step{f', each with {most} rule applications' if most > 1 else ''}")
    return save(figure, path)


class _Panel(NamedTuple):
    """``draw`` fills the axes with some steps, and returns what a colour scale is of, if anything is shaded."""

    rows: int
    row: str
    title: str
    draw: Callable[[Any, slice], Any]
    scale: str = ""
    columns: int = 1  # of a step


def _panels(parts: Mapping[str, Tensor], num_slots: int) -> list[_Panel]:
    """A panel for each kind of choice."""
    panels = []
    active = parts.get("active")
    if "rule" in parts and "context" in parts:
        title, stages = (
            "colour and number: the rule applied to that slot; ring: the slot it looked at",
            parts["rule"].shape[1],
        )
        panels.append(_Panel(num_slots, "slot", title, partial(_rules, parts=parts, K=num_slots), columns=stages))
    if "schema" in parts:
        title = "colour and number: the schema of each object file" + "; faded: not active" * (active is not None)
        panels.append(
            _Panel(num_slots, "object file", title, partial(_schemata, schema=parts["schema"], active=active))
        )
    elif active is not None:
        panels.append(_Panel(num_slots, "module", "the active modules", partial(_shades, shown=active), "active: 1"))
    for name, title, row, scale in (
        ("gate", "how far the gate of each memory is open", "memory", "open"),
        ("memory_read", "where the memory is read", "place", "share of the reading"),
        ("memory_write", "where the memory is written", "place", "share of the writing"),
        ("rate", "how strongly the memory is rewritten", "memory", "rate"),
        ("confidence", "how well each place of the memory matches", "place", "confidence"),
    ):
        if name in parts:
            used = (parts[name] > 0).any(0).nonzero().flatten().tolist()
            shown = parts[name][:, : max(used, default=0) + 1]
            panels.append(_Panel(shown.shape[1], row, title, partial(_shades, shown=shown), scale))
    for name, title in (
        ("input_attention", "number: the token each slot reads most"),
        ("communication", "number: the slot each slot hears most"),
    ):
        if name in parts and (name, num_slots) != ("communication", 1):
            largest, index = parts[name].max(-1)
            alone = parts[name].shape[2] == 1
            title = "how much of the only token each slot reads" if alone else title
            draw = partial(_shades, shown=largest, numbers=None if alone else index)
            panels.append(_Panel(num_slots, "slot", title, draw, "attention"))
    return panels


def _rules(axis: Any, at: slice, parts: Mapping[str, Tensor], K: int) -> None:
    """One column a rule application: a cell is the slot that was changed, the ring marks the slot it looked at."""
    rule, context = parts["rule"][at], parts["context"][at]  # (T, stages) or (T, stages, K)
    T, stages = rule.shape[:2]
    if rule.dim() == 2:  # one slot a stage: spread it over the slots
        changed = torch.nn.functional.one_hot(parts["primary"][at], K).bool()
        rule = torch.where(changed, rule[..., None], -1)
        context = torch.where(changed, context[..., None], -1)
    grid = np.tile(_PALE, (K, T * stages, 1))
    for t, s, k in (rule >= 0).nonzero().tolist():
        chosen, looked, column = int(rule[t, s, k]), int(context[t, s, k]), t * stages + s
        grid[k, column] = rgb(COLORS[chosen % 8])
        axis.text(column, k, str(chosen), ha="center", va="center", color="white", fontsize=8)
        if looked != k:
            axis.plot([column, column], [k, looked], color="#555555", lw=0.8, alpha=0.6, zorder=2)
        axis.scatter(column, looked, s=70, facecolors="none", edgecolors="black", linewidths=1.2, zorder=3)
    axis.imshow(grid, aspect="auto", zorder=0)
    for t in range(1, T):
        axis.axvline(t * stages - 0.5, color="white", lw=2)


def _schemata(axis: Any, at: slice, schema: Tensor, active: Tensor | None) -> None:
    schema = schema[at]
    T, K = schema.shape
    grid = np.zeros((K, T, 3))
    for t in range(T):
        for k in range(K):
            faded = active is not None and not bool(active[at][t, k])
            color = rgb(COLORS[int(schema[t, k]) % 8])
            grid[k, t] = 0.15 * color + 0.85 * _PALE if faded else color
            if not faded:
                axis.text(t, k, str(int(schema[t, k])), ha="center", va="center", color="white", fontsize=8)
    axis.imshow(grid, aspect="auto")


def _shades(axis: Any, at: slice, shown: Tensor, numbers: Tensor | None = None) -> Any:
    """``(T, rows)`` from 0, pale, to 1, dark; with a number in every cell that is not 0, if there are any."""
    from matplotlib.colors import LinearSegmentedColormap

    shown = shown[at].float()
    if numbers is not None:
        for (t, k), number in np.ndenumerate(numbers[at].numpy()):
            if float(shown[t, k]) > 0:
                color = "white" if float(shown[t, k]) > 0.5 else "black"
                axis.text(t, k, str(number), ha="center", va="center", color=color, fontsize=8)
    shades = LinearSegmentedColormap.from_list("shades", [_PALE, _DARK])
    return axis.imshow(shown.T.numpy(), cmap=shades, vmin=0, vmax=1, aspect="auto")


def draw_choices(core: RecurrentCore, tokens: Tokens, folder: Path) -> list[Path]:
    """The choice map of a core over one sequence of tokens ``(T, 1, ...)``; none if it chooses nothing."""
    chosen = trace(core, tokens, core.initial_state(1))
    drawn = choice_map({name: part[:, 0] for name, part in chosen.items()}, core.num_slots, folder / "choices.png")
    return [drawn] if drawn else []
