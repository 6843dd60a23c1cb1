"""What people look at: learning curves of an agent, and its episodes with what its core chose under them."""

from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from ..report.choices import choice_map
from ..report.figures import COLORS, action_text, as_shares, blank, learning, rgb, save, whole_numbers
from .policy import RecurrentPolicy
from .rollout import each
from .vector import VectorEnvAdapter

_PALE = (240, 240, 240)
_WIDTH = 320  # pixels of a video
_ROW = 16  # pixels of an object file's row in the strip
_LINE = 15  # pixels of a line of text
_LONGEST = 1000  # steps of a video


def curves(metrics: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Return, and success where the environment tells it, against environment steps; in words if no episode ended."""
    names = [
        (name, label)
        for name, label in (
            ("rollout/ep_rew_mean", "return"),
            ("rollout/success_rate", "success, share of episodes"),
        )
        if any(name in line for line in metrics)
    ]
    figure = blank(5 * max(1, len(names)), 3.6, layout="constrained")
    axes = figure.subplots(1, max(1, len(names)), squeeze=False)[0]
    for axis, (name, label) in zip(axes, names, strict=False):
        learning(axis, metrics, name, color=COLORS[0])
        axis.set(xlabel="environment steps", ylabel=label)
        axis.set_title(f"{label.partition(',')[0]} in training, mean of the latest episodes", fontsize=10)
        whole_numbers(axis)
        if name == "rollout/success_rate":
            as_shares(axis)
    if not names:
        axes[0].axis("off")
        steps = max((line["step"] for line in metrics), default=0)
        said = f"No curves: no episode ended in the {steps:,} environment steps of training."
        axes[0].text(0.5, 0.5, said, ha="center", va="center", wrap=True)
    return save(figure, path)


@torch.no_grad()
def episode(policy: RecurrentPolicy, envs: VectorEnvAdapter, folder: Path, *, seed: int) -> list[Path]:
    """Play an episode; a video with the core's choices so far as a strip under it, and the choice map of the whole.

    Under a frame stand its step, the action taken there, and the return so far with this action's reward. In the strip a
    row is an object file and a column a step: the colour is the schema (or rule) it used, pale where it was not active, as
    in SCOFF's Figures 3 and 13.

    Args:
        policy: the agent's policy.
        envs: one environment or one team, able to draw itself or showing pictures; of a team the choices are the first
            agent's.
        folder: where ``episode.gif`` and ``choices.png`` are written.
        seed: of the environment.

    Returns:
        The paths; no video where there is nothing to see, no choice map where nothing is chosen.
    """
    envs.seed(seed)
    num_slots, B = policy.memory.core.num_slots, envs.num_envs
    observations, state = envs.start(), policy.initial_state(B)
    starts = torch.ones(B, dtype=torch.bool)
    frames: list[np.ndarray] = []
    captions: list[list[str]] = []
    explained: list[dict[str, torch.Tensor]] = []
    names, whose, so_far = _action_names(envs), " of the first agent" * (envs.team_size > 1), 0.0
    for t in range(_LONGEST):
        frame = _frame(envs, observations)
        if frame is not None:
            frames.append(frame)
        here = each(lambda part: part.to(policy.device), observations)
        explained.append({name: part[0].cpu() for name, part in policy.explain(here, state).items()})
        actions, _, _, state = policy(here, state, starts.to(policy.device))
        taken = policy.bounded(actions)
        step = envs.advance(taken)
        so_far += float(step.rewards[0])
        captions.append([f"step {t}   return {so_far:.3g}", f"action{whose}: {action_text(taken[0], names)}"])
        observations, starts = step.observations, torch.zeros(B, dtype=torch.bool)
        if bool((step.terminated | step.truncated)[0]):
            break
    chosen = {name: torch.stack([part[name] for part in explained]) for name in explained[0]}
    written = []
    if frames:
        strip = _strip(chosen, num_slots)
        if strip is not None:
            captions = [[*caption, f"below, step by step: {_strip_title(chosen)}"] for caption in captions]
        shown = [
            Image.fromarray(_with_strip(frame, strip, t + 1, caption))
            for t, (frame, caption) in enumerate(zip(frames, captions, strict=True))
        ]
        path = folder / "episode.gif"
        shown[0].save(path, save_all=True, append_images=shown[1:], duration=120, loop=0)
        written.append(path)
    drawn = choice_map({name: part[:60] for name, part in chosen.items()}, num_slots, folder / "choices.png")
    return written + ([drawn] if drawn else [])


def _action_names(envs: VectorEnvAdapter) -> Sequence[str]:
    """The names of the actions, where the environment tells them as ours, ALE's or MiniGrid's do; else none."""
    vector = envs.vector_env.unwrapped
    single = getattr(vector, "envs", [vector])[0].unwrapped
    for told in (vector.metadata.get("actions"), single.metadata.get("actions")):
        if told is not None:
            return list(told)
    meanings, actions = getattr(single, "get_action_meanings", None), getattr(single, "actions", None)
    if callable(meanings):
        return list(meanings())
    return [action.name for action in actions] if isinstance(actions, type) and issubclass(actions, Enum) else []


def _frame(envs: VectorEnvAdapter, observations: Any) -> np.ndarray | None:
    """What the environment draws, or a picture among what the agent sees, (H, W, 3) uint8."""
    drawn = envs.get_images()[0] if envs.render_mode == "rgb_array" else None
    if drawn is not None:
        return np.asarray(drawn)
    parts = list(observations.values()) if isinstance(observations, dict) else [observations]
    for part in parts:
        if part.dim() == 4 and part.dtype == torch.uint8:
            picture = part[0].movedim(0, -1).cpu().numpy()
            return picture[..., :3] if picture.shape[-1] >= 3 else np.repeat(picture[..., -1:], 3, -1)
    return None


def _strip(chosen: Mapping[str, torch.Tensor], num_slots: int) -> np.ndarray | None:
    """Colours of what each slot did at each step, (K, T, 3) uint8; None if the core chooses nothing of this kind."""
    colors = (255 * np.array([rgb(color) for color in COLORS])).astype(np.uint8)
    active = chosen.get("active")
    if "schema" in chosen:
        choice = chosen["schema"]
    elif "rule" in chosen and "primary" in chosen:  # (T, stages): the last stage that changed a slot
        choice = torch.full((len(chosen["rule"]), num_slots), -1)
        for stage in range(chosen["rule"].shape[1]):
            choice.scatter_(1, chosen["primary"][:, stage, None], chosen["rule"][:, stage, None])
    elif active is not None:
        choice = torch.zeros(active.shape, dtype=torch.long)
    else:
        return None
    hidden = choice < 0 if active is None else (choice < 0) | ~active.bool()
    picture = colors[choice.clamp(min=0).numpy() % len(colors)]
    picture[hidden.numpy()] = _PALE
    return picture.transpose(1, 0, 2)


def _strip_title(chosen: Mapping[str, torch.Tensor]) -> str:
    kinds = {"schema": "each file's schema", "rule": "each slot's rule", "active": "which slots are active"}
    return next(title for name, title in kinds.items() if name in chosen)


def _with_caption(frame: np.ndarray, lines: Sequence[str]) -> np.ndarray:
    """A frame above lines of text."""
    font = ImageFont.load_default(12)
    below = Image.new("RGB", (frame.shape[1], _LINE * len(lines) + 4), "white")
    pen = ImageDraw.Draw(below)
    for i, line in enumerate(lines):
        pen.text((4, 2 + _LINE * i), line, fill="black", font=font)
    return np.concatenate([frame, np.asarray(below)])


def _with_strip(frame: np.ndarray, strip: np.ndarray | None, steps: int, caption: Sequence[str]) -> np.ndarray:
    """A frame, enlarged by whole pixels, above its caption and the strip of the first steps."""
    scale = -(-_WIDTH // frame.shape[1])
    large = _with_caption(frame.repeat(scale, 0).repeat(scale, 1), caption)
    if strip is None:
        return large
    K, T, _ = strip.shape
    seen = strip.copy()
    seen[:, steps:] = 255
    columns = np.minimum(np.arange(large.shape[1]) * T // large.shape[1], T - 1)
    below = seen[:, columns].repeat(_ROW, 0)
    return np.concatenate([large, below])
