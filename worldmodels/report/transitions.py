"""Pictures of world models: learning curves, H@1 against the horizon, what is imagined, and what the core chose."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from ..metrics import hits, ranks, reciprocal_ranks
from ..models.world_model import WorldModel
from ..ranking import Imagined
from .choices import choice_map, trace
from .figures import (
    COLORS,
    WIDEST,
    action_text,
    as_losses,
    as_shares,
    blank,
    learning,
    legend,
    pairs,
    save,
    whole_numbers,
)

REFERENCES = 1000  # test episodes whose frames a predicted state may be shown as


def curves(metrics: Sequence[Mapping[str, Any]], path: Path, *, chance: float | None = None) -> Path:
    """Learning curves: the two terms of the loss, and H@1 at each horizon where it was evaluated on the way.

    Args:
        metrics: the lines of ``metrics.jsonl``.
        path: the file to write.
        chance: of the in-episode H@1, if known.
    """
    panels = [
        (title, horizons, f"wm/{kind}", known)
        for title, kind, known in (
            ("H@1 among the test episodes", "hits@1", None),
            ("H@1 among the states of the episode", "in_episode_hits@1", chance),
        )
        if (horizons := _horizons_of(metrics, f"wm/{kind}"))
    ]
    figure = blank(WIDEST / 3 * (1 + len(panels)), 3.6, layout="constrained")
    axes = figure.subplots(1, 1 + len(panels), squeeze=False)[0]
    for name, label, color in (
        ("wm/loss_pos", "positive pairs", COLORS[0]),
        ("wm/loss_neg", "negative pairs", COLORS[1]),
    ):
        learning(axes[0], metrics, name, label=label, color=color)
    as_losses(axes[0])
    axes[0].set(ylabel="loss", title="contrastive loss in training")
    for axis, (title, at, name, known) in zip(axes[1:], panels, strict=True):
        copies = _horizons_of(metrics, "wm/copy_hits@1") if name == "wm/hits@1" else []
        for i, h in enumerate(at):
            learning(axis, metrics, f"{name}/h{h}", color=COLORS[i % 8], label=f"{h} step{'s' * (h != 1)} ahead")
            if h in copies:
                learning(axis, metrics, f"wm/copy_hits@1/h{h}", color=COLORS[i % 8], ls="--")
        if copies:
            pairs(axis, "the model", "its latent copy")
        as_shares(axis, known)
        axis.set(ylabel="H@1, share of test episodes", title=title)
    for axis in axes:
        axis.set_xlabel("gradient step")
        whole_numbers(axis)
        legend(axis)
    return save(figure, path)


def _horizons_of(metrics: Sequence[Mapping[str, Any]], name: str) -> list[int]:
    """The horizons at which a measure was written, as in "wm/hits@1/h5"."""
    names = {key for line in metrics for key in line if key.startswith(f"{name}/h")}
    return sorted(int(key.rpartition("/h")[2]) for key in names)


def horizons(seen: Imagined, name: str, path: Path) -> Path:
    """H@1 and MRR against the horizon, beside the latent copy and chance."""
    figure = blank(9.6, 3.6, layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    at = range(1, len(seen.imagined) + 1)
    first = seen.burn_in
    now = seen.slots[:, first]
    N = len(now)
    for axis, measure, title, chance in (
        (axes[0], lambda r: float(hits(r, 1).mean()), "H@1: how often the true state is ranked first", 1 / N),
        (
            axes[1],
            lambda r: float(reciprocal_ranks(r).mean()),
            "MRR: mean of 1 / rank of the true state",
            float((1 / torch.arange(1, N + 1, dtype=torch.float64)).mean()),
        ),
    ):
        predicted = [measure(ranks(seen.imagined[h - 1], seen.slots[:, first + h])) for h in at]
        copied = [measure(ranks(now, seen.slots[:, first + h])) for h in at]
        axis.plot(at, predicted, marker="o", color=COLORS[0], label=name)
        axis.plot(at, copied, marker="s", mfc="none", color=COLORS[0], ls="--", label="its latent copy")
        as_shares(axis, chance)
        axis.set(xlabel="steps ahead", ylabel=title.partition(":")[0])
        axis.set_title(title, fontsize=10)
        whole_numbers(axis)
        legend(axis)
    figure.suptitle(f"imagined states among those of {N:,} test episodes", fontsize=10)
    return save(figure, path)


def rollout(seen: Imagined, path: Path, *, episode: int = 0) -> Path:
    """A true episode above what the model imagines of it, each imagined state shown as the test frame nearest to it.

    Above each step stands the action that led to it and, if anything was rewarded, the return so far. Observations that are
    no pictures are drawn as lines: true states and nearest test states.
    """
    if episode >= len(seen.index):
        raise UserError(f"there is no episode {episode}; {len(seen.index)} test episodes are long enough to be drawn")
    steps, first = len(seen.imagined), seen.burn_in
    references = seen.slots[seen.present.to(seen.slots.device)].flatten(1).double()
    rows = seen.rows[seen.present]
    imagined = seen.imagined[:, episode].flatten(1).double()
    nearest = rows[torch.cdist(imagined, references).argmin(1).to(rows.device)]
    own = seen.rows[episode, first : first + steps + 1]
    frames = seen.episodes.arrays["observations"]
    true, shown = frames[own], frames[nearest]
    right = [bool((a == b).all()) for a, b in zip(true[1:], shown, strict=True)]
    if true.dim() != 4:
        return save(_lines(true, torch.cat([true[:1], shown])), path)
    columns = min(steps + 1, 11)
    bands = -(-(steps + 1) // columns)
    figure = blank(1.15 * columns, 3.0 * bands)
    parts = figure.subfigures(bands, 1, squeeze=False)[:, 0]
    titles = _titles(seen, own)
    for band, part in enumerate(parts):
        axes = part.subplots(2, columns, squeeze=False)
        part.subplots_adjust(top=0.78, bottom=0.06, hspace=0.12, wspace=0.12)
        for column in range(columns):
            t = band * columns + column
            if t > steps:
                axes[0, column].remove()
                axes[1, column].remove()
                continue
            axes[0, column].imshow(_rgb(true[t]))
            axes[0, column].set_title(titles[t], fontsize=8)
            axes[1, column].imshow(_rgb(true[0] if t == 0 else shown[t - 1]))
            for row in range(2):
                axes[row, column].set(xticks=[], yticks=[])
                for spine in axes[row, column].spines.values():
                    wrong = row == 1 and t > 0 and not right[t - 1]
                    spine.set(color="#d55e00" if wrong else "#bbbbbb", linewidth=2 if wrong else 1)
        axes[0, 0].set_ylabel("true", fontsize=9)
        axes[1, 0].set_ylabel("imagined", fontsize=9)
    note = f"imagined states shown as the nearest of {len(rows):,} test frames; orange: another state than the true one"
    figure.text(0.5, 0.0, note, ha="center", fontsize=8)
    return save(figure, path)


def _titles(seen: Imagined, rows: Tensor) -> list[str]:
    """Of each frame its step, the action that led to it, and the return so far where anything was rewarded."""
    arrays = seen.episodes.arrays
    rewards = arrays["rewards"][rows[:-1]].double().cumsum(0).tolist() if "rewards" in arrays else []
    titles = ["step 0"]
    for t, action in enumerate(arrays["actions"][rows[:-1]]):
        told = f"\nreturn {rewards[t]:.3g}" if any(rewards) else ""
        titles.append(f"step {t + 1}\naction {action_text(action)}{told}")
    return titles


def _rgb(frame: Tensor) -> np.ndarray:
    """The last three channels as colours, or the last one as grey."""
    picture = frame.cpu().numpy()
    return picture[..., -3:] if picture.shape[-1] >= 3 else np.repeat(picture[..., -1:], 3, axis=-1)


def _lines(true: Tensor, shown: Tensor) -> Any:
    true, shown = true.reshape(len(true), -1).cpu(), shown.reshape(len(shown), -1).cpu()
    figure = blank(7, 3.4)
    axis = figure.subplots()
    drawn = min(true.shape[1], 8)
    for i in range(drawn):
        axis.plot(true[:, i], color=COLORS[i], label=f"number {i}")
        axis.plot(shown[:, i], color=COLORS[i], ls="--")
    pairs(axis, "true", "imagined: the\nnearest test state")
    of = f", the first {drawn} of {true.shape[1]} numbers" * (drawn < true.shape[1])
    axis.set(xlabel="step", ylabel="observation", title=f"a test episode and what is imagined of it{of}")
    whole_numbers(axis)
    legend(axis)
    return figure


def choices(model: WorldModel, seen: Imagined, path: Path, *, episode: int = 0) -> Path | None:
    """The choice map of a world model along a test episode, seen with its true slots; None if its core chooses nothing."""
    steps = seen.burn_in + len(seen.imagined)
    slots = seen.slots[episode : episode + 1, :steps].transpose(0, 1)  # (T, 1, K, D)
    actions = seen.episodes.arrays["actions"][seen.rows[episode, :steps]][:, None].to(slots.device)
    return choice_map(explain(model, slots, actions), model.core.num_slots, path)


@torch.no_grad()
def explain(model: WorldModel, slots: Tensor, actions: Tensor) -> dict[str, Tensor]:
    """What a world model's core chooses along one trajectory of slots ``(T, 1, K, D)``, every entry ``(T, ...)``."""
    tokens = model.tokens(slots, actions)
    if model.memory == "carry":
        explained = trace(model.core, tokens, model.initial_state(slots[0]))
        return {name: part[:, 0] for name, part in explained.items()}
    tokens = model.core.prepare(tokens.at((slice(None), 0)))  # every step has a state of its own: steps are rows
    return model.core.explain(tokens, model.initial_state(slots[:, 0]))
