"""Things that pass behind a wall, and come out as what they were, or not: our own scenes in the manner of IntPhys.

Source: Riochet et al. 2019, "IntPhys: A Benchmark for Visual Intuitive Physics Reasoning", whose three blocks SCOFF is tested
on (Goyal et al. 2020, section 5, Table 1). IntPhys' scenes are rendered in three dimensions; ours are flat, and of one thing.

Lengths are in pixels, times in steps; x runs with the columns of a frame and y with its rows.
"""

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from . import random
from .batched import BatchedEnv, Observation, SingleEnv, State, enlarged

BLOCKS = ("possible", "O1", "O2", "O3")
MOVIES = 4
SHAPES = ("disc", "square", "triangle")
COLUMNS = ("x", "y", "v", "radius", "shape", "present", "wall_left", "wall_right")  # of a state
OBSERVATIONS = ("frames", "state")
THING, WALL = 255, 110  # how bright they are


class Occluders(BatchedEnv):
    """A thing moves along one of two shelves and behind a wall. The one action does nothing.

    It enters from one side at a constant speed and leaves at the other; shape, shelf, speed, direction and the wall are drawn
    for each episode. In the block "possible" there may also be nothing but the wall (one episode in four).

    The blocks O1 to O3 are the quadruples of IntPhys: of the same scene two possible movies (0 and 1) and two impossible ones
    (2 and 3), which change from one possible movie to the other while nothing of the thing can be seen. So every frame of
    an impossible movie is a frame of a possible one, and no movie can be told by its frames alone.

    - O1, object permanence: 0 the thing, 1 nothing; 2 it vanishes behind the wall, 3 it appears from behind it.
    - O2, shape constancy: 0 one shape, 1 another; 2 and 3 the shape changes.
    - O3, continuity: 0 the upper shelf, 1 the lower; 2 and 3 it goes in on one and comes out on the other.

    The same seed gives the same scenes for every movie. Observations: "frames" (H, W, 1) uint8; "state" (8,) float32, whose
    columns are ``COLUMNS``. ``frames`` and ``masks`` draw from stored states.

    ``info`` holds "possible" (B,) and "positions" (B, 1, 2).

    Args:
        num_envs: copies B.
        block: "possible", "O1", "O2" or "O3".
        movie: of a block, 0 to 3; None draws one of the two possible ones.
        image_size: pixels on a side.
        observation: "frames" or "state".
        device: where the copies live.
        max_episode_steps: steps after which an episode is truncated; after 40 the thing has left at any speed.
        render_mode: None or "rgb_array".
    """

    def __init__(
        self,
        num_envs: int = 1,
        *,
        block: str = "possible",
        movie: int | None = None,
        image_size: int = 64,
        observation: str = "frames",
        device: str = "cpu",
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
    ):
        for name, value, known in (("block", block, BLOCKS), ("observation", observation, OBSERVATIONS)):
            if value not in known:
                raise ValueError(f"{name} is {value!r}; expected one of {', '.join(known)}")
        if movie is not None and (block == "possible" or not 0 <= movie < MOVIES):
            raise ValueError(f"movie is {movie} of block {block!r}; expected 0 to 3, and a block of O1, O2 and O3")
        if image_size < 16:
            raise ValueError(f"image_size is {image_size}; give at least 16 pixels")
        self.block, self.movie, self.image_size, self.observation = block, movie, image_size, observation
        self.radius = image_size / 9
        self.shelves = image_size * 0.32, image_size * 0.78
        shape = (image_size, image_size, 1)
        self.single_observation_space: gym.Space[Any] = gym.spaces.Box(0, 255, shape, np.uint8)
        if observation == "state":
            bound = np.full(len(COLUMNS), 4.0 * image_size, dtype=np.float32)
            self.single_observation_space = gym.spaces.Box(-bound, bound, dtype=np.float32)
        self.single_action_space = gym.spaces.Discrete(1)
        super().__init__(num_envs, device, max_episode_steps, render_mode)

    def _initial(self, key: Tensor, options: dict[str, Any]) -> State:
        size, radius = self.image_size, self.radius
        draws = random.uniform(random.fold(key, 0), (4,))
        # From a side to the other in 24 to 38 steps, so that it comes in, is hidden and goes out in 40.
        speed = (size + 2 * radius) / (24.0 + 14.0 * draws[:, 0])
        right = draws[:, 1] < 0.5
        x = torch.where(right, -radius, size + radius)
        # The wall hides the whole thing for some steps, and leaves room to see it before and after.
        half = radius * (1.6 + 0.8 * draws[:, 2])
        middle = size * (0.42 + 0.16 * draws[:, 3])
        shapes = random.choice(random.fold(key, 1), len(SHAPES), 2)  # what it is, and what it could become
        shelf = random.integers(random.fold(key, 2), 2, ())
        movie = random.integers(random.fold(key, 3), MOVIES, ())
        if self.block == "possible":  # one of four shows nothing
            first, present = shapes[:, 0], (movie > 0).long()
        else:
            movie = movie % 2 if self.movie is None else torch.full_like(movie, self.movie)
            other = movie % 2  # of the two possible movies, as which it begins
            first = shapes.gather(1, other[:, None])[:, 0] if self.block == "O2" else shapes[:, 0]
            present = 1 - other if self.block == "O1" else torch.ones_like(other)
            shelf = other if self.block == "O3" else shelf
        places = torch.tensor(self.shelves, device=self.device)
        columns = [x, places[shelf], torch.where(right, speed, -speed), torch.full_like(x, radius)]
        columns += [first.float(), present.float(), middle - half, middle + half]
        impossible = movie >= 2 if self.block != "possible" else torch.zeros_like(movie, dtype=torch.bool)
        return {"table": torch.stack(columns, dim=1), "shapes": shapes, "impossible": impossible}

    def _transition(
        self, state: State, actions: Tensor, key: Tensor
    ) -> tuple[State, Tensor, Tensor, dict[str, Tensor]]:
        x, y, v, radius, shape, present, left, right = state["table"].unbind(1)
        middle = (left + right) / 2
        moved = x + v
        crossing = ((x - middle) * (moved - middle) <= 0) & (x != middle) & state["impossible"]
        if self.block == "O1":
            present = torch.where(crossing, 1 - present, present)
        elif self.block == "O2":
            one, other = state["shapes"].float().unbind(1)
            shape = torch.where(crossing, one + other - shape, shape)
        elif self.block == "O3":
            upper, lower = (torch.full_like(y, shelf) for shelf in self.shelves)
            y = torch.where(crossing, torch.where(y == upper, lower, upper), y)
        table = torch.stack([moved, y, v, radius, shape, present, left, right], dim=1)
        none = torch.zeros(len(table), device=self.device)
        return state | {"table": table}, none, none.bool(), {}

    # Views.

    def masks(self, states: Tensor) -> Tensor:
        """Which pixels show the thing, and which the wall.

        Args:
            states: ``(..., 8)``.

        Returns:
            ``(..., 2, H, W)`` bool; the wall hides what is behind it.
        """
        if states.shape[-1] != len(COLUMNS):
            raise ValueError(f"states have shape {tuple(states.shape)}; expected (..., {len(COLUMNS)})")
        x, y, _, radius, shape, present, left, right = states.double()[..., None, None].unbind(-3)
        place = torch.arange(self.image_size, device=states.device, dtype=torch.float64) + 0.5
        across, down = place - x, place[:, None] - y
        inside = torch.stack(
            torch.broadcast_tensors(
                across.square() + down.square() <= radius.square(),
                (across.abs() <= 0.85 * radius) & (down.abs() <= 0.85 * radius),
                (down <= 0.9 * radius) & (across.abs() <= (down + radius) * 0.55),
            )
        )
        thing = inside.gather(0, shape.long().expand(inside.shape[1:])[None])[0] & (present > 0)
        wall = ((place >= left) & (place < right)).expand(thing.shape)
        return torch.stack([thing & ~wall, wall], dim=-3)

    def frames(self, states: Tensor) -> Tensor:
        """Draw whole frames: the thing white, the wall grey before it.

        Args:
            states: ``(..., 8)``.

        Returns:
            ``(..., H, W, 1)`` uint8.
        """
        thing, wall = self.masks(states).unbind(-3)
        return (thing.to(torch.uint8) * THING + wall.to(torch.uint8) * WALL)[..., None]

    def _observe(self, state: State) -> Observation:
        return state["table"].clone() if self.observation == "state" else self.frames(state["table"])

    def _info(self, state: State, events: dict[str, Tensor] | None) -> dict[str, Tensor]:
        return {"possible": ~state["impossible"], "positions": state["table"][:, None, :2].clone()}

    def _image(self, state: State) -> Tensor:
        """The frame, enlarged to about 256 pixels."""
        return enlarged(self.frames(state["table"]))


def make_occluders(**options: Any) -> SingleEnv:
    """One copy of ``Occluders``."""
    return SingleEnv(Occluders(1, **options))
