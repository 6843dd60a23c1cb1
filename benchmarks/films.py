"""The worlds that videos are made of, side by side in one film.

python benchmarks/films.py     (writes docs/worlds.gif)
"""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from PIL import Image, ImageDraw

import worldmodels.envs  # noqa: F401  (registers the ids)

OUT = Path(__file__).parent.parent / "docs/worlds.gif"
STEPS, SEED, COLUMNS, SIDE, ABOVE = 40, 7, 3, 128, 14
WORLDS: dict[str, tuple[str, dict[str, Any]]] = {
    "4balls": ("BouncingBalls", {"preset": "4balls"}),
    "coloured": ("BouncingBalls", {"preset": "coloured"}),
    "curtain": ("BouncingBalls", {"preset": "curtain"}),
    "sprites": ("Sprites", {}),
    "single_ball": ("OneBall", {"dynamics": "fixed"}),
    "switching": ("OneBall", {"dynamics": "switching"}),
    "towers": ("Towers", {}),
    "occluders, possible": ("Occluders", {"block": "O2", "movie": 0}),
    "occluders, impossible": ("Occluders", {"block": "O2", "movie": 2}),
}


def played(name: str, options: dict[str, Any]) -> list[Image.Image]:
    """What rendering an episode shows."""
    env = gym.make_vec(
        f"worldmodels/{name}-v0", num_envs=1, render_mode="rgb_array", max_episode_steps=STEPS + 1, **options
    )
    env.reset(seed=SEED)
    shown = []
    for _ in range(STEPS):
        shown.append(Image.fromarray(np.asarray(env.render())[0]).resize((SIDE, SIDE), Image.Resampling.NEAREST))
        env.step(torch.zeros(1, dtype=torch.long))
    return shown


def main() -> None:
    """Play an episode of each, and lay them out with their names above."""
    films = {label: played(*world) for label, world in WORLDS.items()}
    width, height = COLUMNS * (SIDE + 4) - 4, -(-len(films) // COLUMNS) * (SIDE + ABOVE + 4) - 4
    pages = []
    for t in range(STEPS):
        page = Image.new("RGB", (width, height), (70, 70, 70))
        pen = ImageDraw.Draw(page)
        for i, (label, frames) in enumerate(films.items()):
            x, y = i % COLUMNS * (SIDE + 4), i // COLUMNS * (SIDE + ABOVE + 4)
            page.paste(frames[t], (x, y + ABOVE))
            pen.text((x + 3, y + 1), label, fill=(255, 255, 255))
        pages.append(page.quantize(64))
    pages[0].save(OUT, save_all=True, append_images=pages[1:], duration=120, loop=0)
    print(f"{OUT}: {OUT.stat().st_size / 1024:.0f} kB")


if __name__ == "__main__":
    main()
