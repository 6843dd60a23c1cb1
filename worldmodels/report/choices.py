"""What a core chose, step by step: collecting it, and one picture of it."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core import RecurrentCore, State, Tokens, reset_where
from .figures import COLORS, blank, rgb, save

_PALE = np.array([0.94, 0.94, 0.94])
_DARK = rgb(COLORS[0])


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
    """Draw what a core chose over time, one panel for each kind of choice.

    Args:
        explained: what ``trace`` returns, for one row: every entry ``(T, ...)``. "rule", "context" and "primary" are drawn as
            the rule applied to each slot and the slot it looked at; "schema" as a coloured number for each object file;
            "active", "gate", "memory_read" and "confidence" as how dark a cell is; "input_attention" ``(T, K, N)`` and
            "communication" ``(T, K, K)`` as the token or slot that got most attention, the stronger the more.
        num_slots: K.
        path: the PNG file.

    Returns:
        The path; None if the core chooses nothing.
    """
    parts = {name: part.detach().cpu() for name, part in explained.items()}
    active = parts.get("active")
    panels: list[tuple[int, Callable[[Any], None]]] = []  # how many rows, and what draws them
    if "rule" in parts and "context" in parts:
        panels.append((num_slots, lambda axis: _rules(axis, parts, num_slots)))
    if "schema" in parts:
        panels.append((num_slots, lambda axis: _schemata(axis, parts["schema"], active)))
    elif active is not None:
        panels.append((num_slots, lambda axis: _shades(axis, active, "dark: the active modules", "module")))
    for name, title, row in (
        ("gate", "how far the gate of each memory is open", "memory"),
        ("memory_read", "where the memory is read", "place"),
        ("confidence", "how well each place of the memory matches", "place"),
    ):
        if name in parts:
            used = (parts[name] > 0).any(0).nonzero().flatten().tolist()
            shown = parts[name][:, : max(used, default=0) + 1]
            panels.append((shown.shape[1], partial(_shades, shown=shown, title=title, row=row)))
    for name, title, row in (
        ("input_attention", "the token each slot reads most; stronger: more of its attention", "slot"),
        ("communication", "the slot each slot hears most; stronger: more of its attention", "slot"),
    ):
        if name in parts:
            alone = parts[name].shape[2] == 1
            title = "how much of the only token each slot reads" if alone and name == "input_attention" else title
            panels.append((num_slots, partial(_attention, weights=parts[name], title=title, row=row)))
    if not panels:
        return None
    T = len(next(iter(parts.values())))
    stages = parts["rule"].shape[1] if "rule" in parts else 1
    heights = [0.36 * rows + 0.7 for rows, _ in panels]
    figure = blank(max(5.0, 0.42 * T * stages + 1.6), sum(heights), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axis, (_, draw) in zip(axes, panels, strict=True):
        draw(axis)
    axes[-1].set_xlabel(f"step{f' (each with {stages} rule applications)' if stages > 1 else ''}")
    return save(figure, path)


def _ticks(axis: Any, T: int, rows: int, row: str, title: str, width: int = 1) -> None:
    every = max(1, T // 25)
    axis.set_xticks([t * width + (width - 1) / 2 for t in range(0, T, every)], [str(t) for t in range(0, T, every)])
    axis.set_yticks(range(0, rows, max(1, rows // 12)))
    axis.set_ylabel(row)
    axis.set_title(title, fontsize=8)


def _rules(axis: Any, parts: Mapping[str, Tensor], K: int) -> None:
    """One column a rule application: a cell is the slot that was changed, the ring marks the slot it looked at."""
    rule, context = parts["rule"], parts["context"]  # (T, stages) or (T, stages, K)
    T, stages = rule.shape[:2]
    if rule.dim() == 2:  # one slot a stage: spread it over the slots
        changed = torch.nn.functional.one_hot(parts["primary"], K).bool()
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
    title = "colour and number: the rule applied to that slot; ring: the slot it looked at"
    _ticks(axis, T, K, "slot", title, stages)


def _schemata(axis: Any, schema: Tensor, active: Tensor | None) -> None:
    T, K = schema.shape
    grid = np.zeros((K, T, 3))
    for t in range(T):
        for k in range(K):
            faded = active is not None and not bool(active[t, k])
            color = rgb(COLORS[int(schema[t, k]) % 8])
            grid[k, t] = 0.15 * color + 0.85 * _PALE if faded else color
            if not faded:
                axis.text(t, k, str(int(schema[t, k])), ha="center", va="center", color="white", fontsize=8)
    axis.imshow(grid, aspect="auto")
    title = "colour and number: the schema of each object file" + ("; faded: not active" if active is not None else "")
    _ticks(axis, T, K, "object file", title)


def _shades(axis: Any, shown: Tensor, title: str, row: str) -> None:
    """``(T, rows)`` from 0, pale, to 1, dark."""
    T, rows = shown.shape
    share = shown.float().clamp(0, 1).T.numpy()[..., None]
    axis.imshow(share * _DARK + (1 - share) * _PALE, aspect="auto")
    _ticks(axis, T, rows, row, title)


def _attention(axis: Any, weights: Tensor, title: str, row: str) -> None:
    """``(T, K, N)``: the number and colour of the one of N with the largest weight; of a single token the weight alone."""
    T, K, N = weights.shape
    if N == 1:
        _shades(axis, weights[..., 0], title, row)
        return
    largest, index = weights.max(-1)
    share = largest.clamp(0, 1).T.numpy()[..., None]
    palette = np.array([rgb(color) for color in COLORS])
    axis.imshow(share * palette[index.T.numpy() % 8] + (1 - share) * _PALE, aspect="auto")
    for t in range(T):
        for k in range(K):
            if float(largest[t, k]) > 0:
                color = "white" if float(largest[t, k]) > 0.5 else "black"
                axis.text(t, k, str(int(index[t, k])), ha="center", va="center", color=color, fontsize=7)
    _ticks(axis, T, K, row, title)


def draw_choices(core: RecurrentCore, tokens: Tokens, folder: Path) -> list[Path]:
    """The choice map of a core over one sequence of tokens ``(T, 1, ...)``; none if it chooses nothing."""
    chosen = trace(core, tokens, core.initial_state(1))
    drawn = choice_map({name: part[:, 0] for name, part in chosen.items()}, core.num_slots, folder / "choices.png")
    return [drawn] if drawn else []
