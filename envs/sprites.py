"""Sprites that enter, cross and leave: our own scenes in the manner of Sprites-MOT.

Source: He et al. 2019, "Tracking by Animation: Unsupervised Learning of Multi-Object Attentive Trackers", appendix, as it is
scored by Weis et al. 2020, "Benchmarking Unsupervised Object Representations for Video Sequences", and by NPS (Goyal et al.
2021, Table 5).

Departures, from what the authors' generator does: theirs moves whole pixels of a frame of 128 x 128, ours is drawn at any
size from exact places. Theirs cuts one endless video into pieces; each of our episodes begins with every row of its table
anywhere between one sprite's entry and the next. Theirs calls all that pass through a row by one name; here a sprite that
enters is a new one.

Lengths are in pixels, times in steps; x runs with the columns of a frame and y with its rows.
"""

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from . import random
from .batched import BatchedEnv, Observation, SingleEnv, State, enlarged

SHAPES = ("disc", "rectangle", "triangle", "diamond")
PALETTE = ((0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0))
COLUMNS = ("x", "y", "vx", "vy", "width", "height", "shape", "red", "green", "blue", "present", "number")  # of a sprite
SHAPE, RED, PRESENT, NUMBER = 6, 7, 10, 11
OBSERVATIONS = ("frames", "state")


class Sprites(BatchedEnv):
    """Sprites cross a black frame, each from a side to the opposite one, in front of each other. The one action does nothing.

    Each enters at a random place of a random side, flies straight to a random place of the opposite one and is gone when its
    middle comes within half a sprite of the border. Its place in the table then stays empty for ``gap`` steps, and after that
    the next sprite enters with probability ``birth`` at every step. Shape (of four), colour (of six), scale (0.9 to 1.1) and
    the ratio of width and height (0.8 to 1.25) are drawn for each. Later rows of the table are in front.

    Observations: "frames" (H, W, 3) uint8; "state" (num_sprites, 12) float32, whose columns are ``COLUMNS`` ("number" counts
    the sprites that were in that row). ``frames`` and ``masks`` draw from stored states, ``identities`` tells who is who.

    ``info`` holds "positions" (B, num_sprites, 2), x and y, and "identities" (B, num_sprites).

    Args:
        num_envs: copies B.
        num_sprites: at most, at a time.
        image_size: pixels on a side.
        sprite_size: pixels on a side, before scale and ratio; None for 21 of 128.
        speed: pixels a step; None for 5.3 of 128.
        gap: steps for which a row stays empty.
        birth: probability of a sprite at each step after that.
        observation: "frames" or "state".
        device: where the copies live.
        max_episode_steps: steps after which an episode is truncated.
        render_mode: None or "rgb_array".
    """

    def __init__(
        self,
        num_envs: int = 1,
        *,
        num_sprites: int = 3,
        image_size: int = 64,
        sprite_size: float | int | None = None,
        speed: float | int | None = None,
        gap: int = 5,
        birth: float | int = 0.5,
        observation: str = "frames",
        device: str = "cpu",
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
    ):
        if observation not in OBSERVATIONS:
            raise ValueError(f"observation is {observation!r}; expected one of {', '.join(OBSERVATIONS)}")
        if num_sprites < 1 or image_size < 8:
            raise ValueError(
                f"num_sprites is {num_sprites} and image_size {image_size}; give at least 1, and at least 8 pixels"
            )
        self.num_sprites, self.image_size, self.observation = num_sprites, image_size, observation
        self.sprite_size = image_size * 21 / 128 if sprite_size is None else float(sprite_size)
        self.speed = image_size * 5.3 / 128 if speed is None else float(speed)
        if not 0 < self.sprite_size <= image_size / 2 or not 0 < self.speed <= image_size / 2:
            raise ValueError(
                f"sprite_size is {self.sprite_size:g} and speed {self.speed:g}; give both above 0 and at most half of the "
                f"{image_size} pixels of a frame"
            )
        if gap < 0 or not 0 < birth <= 1:
            raise ValueError(f"gap is {gap} and birth {birth}; give at least 0 steps, and a probability above 0")
        self.gap, self.birth = gap, float(birth)
        shape = (image_size, image_size, 3)
        self.single_observation_space: gym.Space[Any] = gym.spaces.Box(0, 255, shape, np.uint8)
        if observation == "state":
            bound = np.full((num_sprites, len(COLUMNS)), 2.0 * image_size, dtype=np.float32)
            bound[:, NUMBER] = np.inf
            self.single_observation_space = gym.spaces.Box(-bound, bound, dtype=np.float32)
        self.single_action_space = gym.spaces.Discrete(1)
        super().__init__(num_envs, device, max_episode_steps, render_mode)
        self._palette = torch.tensor(PALETTE, dtype=torch.float32, device=self.device)

    def _initial(self, key: Tensor, options: dict[str, Any]) -> State:
        table, crossing = self._entering(random.fold(key, 0))
        cycle = crossing + self.gap + 1.0 / self.birth  # steps from an entry to the next, on average
        passed = (cycle * random.uniform(random.fold(key, 1), (self.num_sprites,))).floor()
        table[..., :2] += passed[..., None] * table[..., 2:4]
        table[..., NUMBER] = 1.0
        here = passed <= crossing
        empty = torch.where(here, 0.0, passed - crossing - 1.0).clamp(max=self.gap)
        return {"table": torch.where(here[..., None], table, 0.0), "empty": empty.long()}

    def _transition(
        self, state: State, actions: Tensor, key: Tensor
    ) -> tuple[State, Tensor, Tensor, dict[str, Tensor]]:
        none = torch.zeros(len(key), device=self.device)
        return self._next(state, key), none, none.bool(), {}

    def _next(self, state: State, key: Tensor) -> State:
        """Move what is there, take away what has come to the border, and let in what is due."""
        table, empty = state["table"], state["empty"]
        present = table[..., PRESENT] > 0
        place = table[..., :2] + table[..., 2:4]
        margin = self.sprite_size / 2
        stays = present & ((place >= margin) & (place <= self.image_size - margin)).all(-1)
        due = ~present & (empty >= self.gap)
        enters = due & (random.uniform(random.fold(key, 0), (self.num_sprites,)) < self.birth)
        moved = torch.cat([place, table[..., 2:]], dim=-1)
        table = torch.where(stays[..., None], moved, 0.0)
        table[..., NUMBER] = state["table"][..., NUMBER]
        fresh, _ = self._entering(random.fold(key, 1))
        fresh[..., NUMBER] = table[..., NUMBER] + 1.0
        table = torch.where(enters[..., None], fresh, table)
        return {"table": table, "empty": torch.where(present | enters, 0, empty + 1)}

    def _entering(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """A sprite for every row where it enters, ``(B, num_sprites, 12)``, and the steps it takes to cross."""
        rows = (self.num_sprites,)
        margin, room = self.sprite_size / 2, self.image_size - self.sprite_size
        side = random.integers(random.fold(key, 0), 4, rows)
        u = random.uniform(random.fold(key, 1), (self.num_sprites, 4))
        along, across = margin + room * u[..., :2], torch.zeros_like(u[..., :2])
        across[..., 0] = torch.where(side % 2 == 0, margin, margin + room)  # where it enters, and where it leaves
        across[..., 1] = 2 * margin + room - across[..., 0]
        horizontal = (side < 2)[..., None]  # from left or right
        x, y = torch.where(horizontal, across, along), torch.where(horizontal, along, across)
        way = torch.stack([x[..., 1] - x[..., 0], y[..., 1] - y[..., 0]], dim=-1)
        distance = way.square().sum(-1, keepdim=True).sqrt()
        velocity = self.speed * way / distance
        scale, ratio = 0.9 + 0.2 * u[..., 2], (0.8 + 0.4 * u[..., 3]).sqrt()
        height, width = self.sprite_size * scale * ratio, self.sprite_size * scale / ratio
        shape = random.integers(random.fold(key, 2), len(SHAPES), rows).float()
        colour = self._palette[random.integers(random.fold(key, 3), len(PALETTE), rows)]
        told = torch.stack([x[..., 0], y[..., 0]], dim=-1)
        sizes = torch.stack([width, height, shape], dim=-1)
        table = torch.cat([told, velocity, sizes, colour, torch.ones_like(told)], dim=-1)
        return table, (distance[..., 0] / self.speed).floor()

    # Views.

    def masks(self, states: Tensor) -> Tensor:
        """Which pixels show which sprite; of those behind others what is seen of them.

        Args:
            states: ``(..., num_sprites, 12)``.

        Returns:
            ``(..., num_sprites, H, W)`` bool.
        """
        self._refuse_others(states)
        x, y, _, _, width, height, shape, _, _, _, present, _ = states.double()[..., None, None].unbind(-3)
        pixel = torch.arange(self.image_size, device=states.device, dtype=torch.float64) + 0.5
        across = (pixel - x) / (width / 2).clamp(min=1e-6)  # -1 to 1 within the sprite, (..., 1, W)
        down = (pixel[:, None] - y) / (height / 2).clamp(min=1e-6)
        within = (across.abs() <= 1) & (down.abs() <= 1)
        inside = torch.stack(
            torch.broadcast_tensors(
                across.square() + down.square() <= 1,
                within,
                within & (across.abs() <= (down + 1) / 2),
                across.abs() + down.abs() <= 1,
            )
        )
        alone = inside.gather(0, shape.long().expand(inside.shape[1:])[None])[0] & (present > 0)
        covered = alone.flip(-3).cumsum(-3).flip(-3) - alone.long()  # by how many in front
        return alone & (covered == 0)

    def frames(self, states: Tensor) -> Tensor:
        """Draw whole frames.

        Args:
            states: ``(..., num_sprites, 12)``.

        Returns:
            ``(..., H, W, 3)`` uint8.
        """
        colour = (255 * states[..., RED : RED + 3]).round().to(torch.uint8)
        return (self.masks(states)[..., None] * colour[..., None, None, :]).sum(-4, dtype=torch.uint8)

    def identities(self, states: Tensor) -> Tensor:
        """Who is in each row of states ``(..., num_sprites, 12)``: from 1 on, ``(..., num_sprites)``; 0 for nobody."""
        self._refuse_others(states)
        row = torch.arange(1, self.num_sprites + 1, device=states.device)
        return torch.where(states[..., PRESENT] > 0, row + self.num_sprites * (states[..., NUMBER].long() - 1), 0)

    def _refuse_others(self, states: Tensor) -> None:
        if states.shape[-2:] != (self.num_sprites, len(COLUMNS)):
            raise ValueError(
                f"states have shape {tuple(states.shape)}; expected (..., {self.num_sprites}, {len(COLUMNS)})"
            )

    def _observe(self, state: State) -> Observation:
        return state["table"].clone() if self.observation == "state" else self.frames(state["table"])

    def _info(self, state: State, events: dict[str, Tensor] | None) -> dict[str, Tensor]:
        table = state["table"]
        return {"positions": table[..., :2].clone(), "identities": self.identities(table)}

    def _image(self, state: State) -> Tensor:
        """The frame, enlarged to about 256 pixels."""
        return enlarged(self.frames(state["table"]))


def make_sprites(**options: Any) -> SingleEnv:
    """One copy of ``Sprites``."""
    return SingleEnv(Sprites(1, **options))
