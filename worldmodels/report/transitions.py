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
from .figures import COLORS, blank, save, series

REFERENCES = 1000  # test episodes whose frames a predicted state may be shown as


def curves(metrics: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Learning curves: the two terms of the loss, and H@1 at each horizon where it was evaluated on the way."""
    names = {name for line in metrics for name in line if name.startswith(("wm/hits@1/", "wm/in_episode"))}
    scored = sorted(names, key=lambda name: (name.split("/h")[0], int(name.rpartition("/h")[2])))
    figure = blank(10 if scored else 5.5, 3.6)
    axes = figure.subplots(1, 2 if scored else 1, squeeze=False)[0]
    for name, label, color in (("wm/loss_pos", "positive", COLORS[0]), ("wm/loss_neg", "negative", COLORS[1])):
        axes[0].plot(*series(metrics, name), label=label, color=color)
    axes[0].set(xlabel="gradient step", ylabel="loss", yscale="log", title="contrastive loss")
    axes[0].legend(frameon=False)
    if scored:
        for i, name in enumerate(scored):
            kind, _, h = name.removeprefix("wm/").rpartition("/h")
            inside = kind.startswith("in_episode")
            label = f"{h} step{'s' * (h != '1')}{', in-episode' * inside}"
            axes[1].plot(
                *series(metrics, name), label=label, color=COLORS[i % 8], ls="--" if inside else "-", marker="."
            )
        axes[1].set(xlabel="gradient step", ylabel="H@1", ylim=(0, 1.02), title="held-out episodes")
        axes[1].legend(frameon=False, fontsize=8)
    return save(figure, path)


def horizons(seen: Imagined, name: str, path: Path) -> Path:
    """H@1 and MRR against the horizon, beside the latent copy."""
    figure = blank(9, 3.4)
    axes = figure.subplots(1, 2, sharey=True)
    at = range(1, len(seen.imagined) + 1)
    first = seen.burn_in
    now = seen.slots[:, first]
    for axis, measure, title in (
        (axes[0], lambda r: float(hits(r, 1).mean()), "H@1"),
        (axes[1], lambda r: float(reciprocal_ranks(r).mean()), "MRR"),
    ):
        predicted = [measure(ranks(seen.imagined[h - 1], seen.slots[:, first + h])) for h in at]
        copied = [measure(ranks(now, seen.slots[:, first + h])) for h in at]
        axis.plot(at, predicted, marker="o", color=COLORS[0], label=name)
        axis.plot(at, copied, marker="s", color=COLORS[1], ls="--", label="latent copy")
        axis.set(xlabel="steps ahead", title=title, ylim=(0, 1.02))
    axes[0].legend(frameon=False)
    figure.suptitle(f"among {len(now)} test episodes", fontsize=9)
    return save(figure, path)


def rollout(seen: Imagined, path: Path, *, episode: int = 0) -> Path:
    """A true episode above what the model imagines of it, each imagined state shown as the test frame nearest to it.

    Observations that are no pictures are drawn as lines: true states and nearest test states.
    """
    if episode >= len(seen.index):
        raise UserError(f"there is no episode {episode}; {len(seen.index)} test episodes are long enough to be drawn")
    steps, first = len(seen.imagined), seen.burn_in
    references = seen.slots[seen.present.to(seen.slots.device)].flatten(1).double()
    rows = seen.rows[seen.present]
    imagined = seen.imagined[:, episode].flatten(1).double()
    nearest = rows[torch.cdist(imagined, references).argmin(1).to(rows.device)]
    frames = seen.episodes.arrays["observations"]
    true, shown = frames[seen.rows[episode, first : first + steps + 1]], frames[nearest]
    right = [bool((a == b).all()) for a, b in zip(true[1:], shown, strict=True)]
    if true.dim() != 4:
        return save(_lines(true, torch.cat([true[:1], shown])), path)
    figure = blank(1.15 * (steps + 1), 2.6)
    axes = figure.subplots(2, steps + 1)
    for t in range(steps + 1):
        axes[0, t].imshow(_rgb(true[t]))
        axes[0, t].set_title(f"t={t}", fontsize=8)
        axes[1, t].imshow(_rgb(true[0] if t == 0 else shown[t - 1]))
        for row in range(2):
            axes[row, t].set(xticks=[], yticks=[])
            for spine in axes[row, t].spines.values():
                wrong = row == 1 and t > 0 and not right[t - 1]
                spine.set(color="#d55e00" if wrong else "#bbbbbb", linewidth=2 if wrong else 1)
    axes[0, 0].set_ylabel("true", fontsize=9)
    axes[1, 0].set_ylabel("imagined", fontsize=9)
    note = f"imagined states shown as the nearest of {len(rows):,} test frames; orange: another state than the true one"
    figure.text(0.5, 0.0, note, ha="center", fontsize=8)
    return save(figure, path)


def _rgb(frame: Tensor) -> np.ndarray:
    """The last three channels as colours, or the last one as grey."""
    picture = frame.cpu().numpy()
    return picture[..., -3:] if picture.shape[-1] >= 3 else np.repeat(picture[..., -1:], 3, axis=-1)


def _lines(true: Tensor, shown: Tensor) -> Any:
    true, shown = true.reshape(len(true), -1).cpu(), shown.reshape(len(shown), -1).cpu()
    figure = blank(7, 3.4)
    axis = figure.subplots()
    for i in range(min(true.shape[1], 8)):
        axis.plot(true[:, i], color=COLORS[i], label=f"feature {i}")
        axis.plot(shown[:, i], color=COLORS[i], ls="--")
    axis.set(xlabel="step", title="true (solid) and imagined, as the nearest test state (dashed)")
    axis.legend(frameon=False, fontsize=7)
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
