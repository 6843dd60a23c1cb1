"""Blocks on a grid: C-SWM's 2D Shapes (no pushing) and the weighted block pushing of Ke et al. (2021).

Sources: Kipf, van der Pol & Welling 2020, "Contrastive Learning of Structured World Models" (Shapes);
Ke et al. 2021, "Systematic Evaluation of Causal Discovery in Visual Model Based Reinforcement Learning" (pushing), which
Goyal et al. 2021, "Neural Production Systems", use as their physics environment.

Departures:
- Sprites. The published scripts fill polygons that include their lower and right edges, so triangles and squares spill
  one pixel into the next cells and blocks drawn later cover it. We cut every sprite at its own 10x10 cell, because then
  the picture does not depend on the drawing order.
- Random numbers come from counters (see random.py), not from numpy's global generator, whose state the published
  environments share with everything else in the process.
"""

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from . import random
from .batched import BatchedEnv, Observation, SingleEnv, State

GRID = 5
CELL = 10
STAY = (0, 0)
DIRECTIONS = ((-1, 0), (0, 1), (1, 0), (0, -1))  # (row, column): north, east, south, west
MODES = ("observed", "unobserved", "fixed_unobserved")

# ColorBrewer's Set1 and Blues, as matplotlib ships them.
SET1 = (
    (228, 26, 28),
    (55, 126, 184),
    (77, 175, 74),
    (152, 78, 163),
    (255, 127, 0),
    (255, 255, 51),
    (166, 86, 40),
    (247, 129, 191),
    (153, 153, 153),
)
BLUES = (
    (247, 251, 255),
    (222, 235, 247),
    (198, 219, 239),
    (158, 202, 225),
    (107, 174, 214),
    (66, 146, 198),
    (33, 113, 181),
    (8, 81, 156),
    (8, 48, 107),
)

_CIRCLE = """
..........
...#####..
..#######.
.#########
.#########
.#########
.#########
.#########
..#######.
...#####..
"""
_TRIANGLE = """
.....#....
.....#....
....###...
....###...
...#####..
...#####..
..#######.
..#######.
.#########
.#########
"""
_SQUARE = """
##########
##########
##########
##########
##########
##########
##########
##########
##########
##########
"""
_DIAMOND = """
.....#....
....###...
...#####..
..#######.
.#########
##########
.#########
..#######.
...#####..
....###...
"""
_CROSS = """
....###...
....###...
....###...
....###...
##########
##########
##########
....###...
....###...
....###...
"""
_PENTAGON = """
.....#....
....###...
...#####..
..#######.
.#########
##########
.#########
.########.
..#######.
..######..
"""
SPRITES = (_CIRCLE, _TRIANGLE, _SQUARE, _DIAMOND, _CROSS, _PENTAGON)


def _sprite_masks() -> Tensor:
    """(6, 10, 10) uint8, 1 where a shape has ink: circle, triangle, square, diamond, cross, pentagon."""
    rows = [[[int(mark == "#") for mark in row] for row in sprite.split()] for sprite in SPRITES]
    return torch.tensor(rows, dtype=torch.uint8)


def _blues_table() -> Tensor:
    """(256, 3) uint8: the nine Blues colours joined by straight lines, as matplotlib's colour map of that name."""
    points = np.linspace(0.0, 1.0, len(BLUES))
    at = np.linspace(0.0, 1.0, 256)
    channels = [np.interp(at, points, np.array(BLUES, dtype=np.float64)[:, c]) for c in range(3)]
    return torch.from_numpy(np.stack(channels, axis=1).astype(np.uint8))


class BlockWorld(BatchedEnv):
    """Coloured blocks on a 5x5 grid, seen as 50x50 RGB pictures; one block is moved at each step.

    Action ``object * per + direction``; with ``shuffle_objects`` it is ``(row * 5 + column) * per + direction`` instead,
    because then an object's index cannot be seen in the picture, so the acted block is marked by where it stands (an
    empty cell: nothing happens).

    ``reset(options={"positions": (B, K, 2), "weights": (B, K)})`` sets a state; either may be left out.
    ``info`` holds "positions" (B, K, 2) row and column, "weights" (B, K), "moved" (B, K) whether the block changed its
    cell in this step, "invalid" (B,) whether a push was blocked by a third block, and with ``goal`` "goal_positions".
    """

    option_names = ("positions", "weights")

    def __init__(
        self,
        num_envs: int,
        *,
        num_objects: int,
        pushing: bool,
        mode: str,
        stay_action: bool,
        shuffle_objects: bool,
        goal: bool,
        device: str,
        max_episode_steps: int | None,
        render_mode: str | None,
    ):
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}; expected one of {list(MODES)}")
        self.num_objects = num_objects
        self.pushing = pushing
        self.mode = mode
        self.shuffle_objects = shuffle_objects
        self.goal = goal
        directions = (STAY, *DIRECTIONS) if stay_action else DIRECTIONS
        self.actions_per_object = len(directions)
        picture = gym.spaces.Box(0, 255, (GRID * CELL, GRID * CELL, 3), np.uint8)
        self.single_observation_space = gym.spaces.Dict({"image": picture, "goal": picture}) if goal else picture
        acted = GRID * GRID if shuffle_objects else num_objects
        self.single_action_space = gym.spaces.Discrete(acted * len(directions))
        if not shuffle_objects:
            self.metadata = {**self.metadata, "actions_per_object": len(directions)}
        super().__init__(num_envs, device, max_episode_steps, render_mode)
        self._directions = torch.tensor(directions, device=self.device)
        self._masks = _sprite_masks().to(self.device)
        self._blues = _blues_table().to(self.device)
        self._set1 = torch.tensor(SET1, dtype=torch.uint8, device=self.device)
        self._rows = torch.arange(num_envs, device=self.device)[:, None]

    def _initial(self, key: Tensor, options: dict[str, Any]) -> State:
        B, K = len(key), self.num_objects
        cells = random.choice(random.fold(key, 0), GRID * GRID, K)
        positions = torch.stack([cells // GRID, cells % GRID], dim=-1)
        weights = self._draw_weights(random.fold(key, 1))
        shapes = random.integers(random.fold(key, 2), 3, (K,))
        if not self.pushing:
            shapes = (torch.arange(K, device=self.device) % 3).expand(B, K)
        if self.shuffle_objects:
            order = random.choice(random.fold(key, 3), K, K)
            weights = weights.gather(1, order)
        if "positions" in options:
            positions = self._positions_from(options["positions"])
        if "weights" in options:
            weights = self._weights_from(options["weights"])
        rank = (weights[:, :, None] > weights[:, None, :]).sum(-1)
        if self.pushing and self.mode == "fixed_unobserved":
            shapes = rank
        state = {
            "positions": positions,
            "weights": weights,
            "shapes": shapes,
            "colors": self._colors(random.fold(key, 4), weights, rank),
        }
        if self.goal:
            reached = state
            for step in range(10):
                cell_count = int(self.single_action_space.n)  # type: ignore[attr-defined]
                action = random.integers(random.fold(key, 5, step), cell_count, ())
                if self.shuffle_objects:
                    acted = random.integers(random.fold(key, 6, step), K, (1,))
                    cell = _cell(reached["positions"].gather(1, acted[..., None].expand(B, 1, 2))[:, 0])
                    action = cell * self.actions_per_object + action % self.actions_per_object
                reached, _ = self._move(reached, action)
            state["goal_positions"] = reached["positions"]
        return state

    def _draw_weights(self, key: Tensor) -> Tensor:
        """(B, K) int64. Observed: K .. 1, object 0 the heaviest. Unobserved: K of 1 .. 9, rising. Fixed: 1 .. K."""
        K = self.num_objects
        rising = torch.arange(1, K + 1, device=self.device).expand(len(key), K)
        if not self.pushing or self.mode == "fixed_unobserved":
            return rising
        if self.mode == "observed":
            return rising.flip(1)
        return random.choice(key, len(SET1), K).sort(dim=1).values + 1

    def _colors(self, key: Tensor, weights: Tensor, rank: Tensor) -> Tensor:
        """(B, K, 3) uint8. Observed: the darker the heavier. Unobserved: one colour a weight. Fixed: any colours."""
        K = self.num_objects
        if not self.pushing:
            return self._set1[:K].expand(len(key), K, 3)
        if self.mode == "unobserved":
            return self._set1[weights - 1]
        if self.mode == "fixed_unobserved":
            return self._set1[random.choice(key, len(SET1), K)]
        spacing = 1.0 / (K - 1)
        jitter = (2.0 * random.uniform(key, (K,)) - 1.0) * spacing / 8.0
        intensity = rank * spacing + jitter
        intensity = torch.where(rank == 0, jitter.abs(), intensity)
        intensity = torch.where(rank == K - 1, 1.0 - jitter.abs(), intensity)
        return self._blues[(intensity * 256).to(torch.int64).clamp(0, 255)]

    def _positions_from(self, value: Any) -> Tensor:
        positions = torch.as_tensor(value, dtype=torch.int64, device=self.device)
        positions = positions.reshape(self.num_envs, self.num_objects, 2) if positions.dim() == 2 else positions
        if positions.shape != (self.num_envs, self.num_objects, 2):
            raise ValueError(
                f"positions have shape {tuple(positions.shape)}; expected {(self.num_envs, self.num_objects, 2)}"
            )
        if not bool(((positions >= 0) & (positions < GRID)).all()):
            raise ValueError(f"positions leave the grid; rows and columns are 0 to {GRID - 1}")
        cells = _cell(positions).sort(dim=1).values
        if bool((cells[:, 1:] == cells[:, :-1]).any()):
            raise ValueError("two blocks stand in one cell; give every block a cell of its own")
        return positions

    def _weights_from(self, value: Any) -> Tensor:
        weights = torch.as_tensor(value, dtype=torch.int64, device=self.device)
        weights = weights[None] if weights.dim() == 1 else weights
        if weights.shape != (self.num_envs, self.num_objects):
            raise ValueError(f"weights have shape {tuple(weights.shape)}; expected {(self.num_envs, self.num_objects)}")
        ranked = weights.sort(dim=1).values
        if bool((ranked[:, 1:] == ranked[:, :-1]).any()) or not bool(((ranked >= 1) & (ranked <= len(SET1))).all()):
            raise ValueError(f"weights must be different integers from 1 to {len(SET1)} within each copy")
        return weights

    def _transition(
        self, state: State, actions: Tensor, key: Tensor
    ) -> tuple[State, Tensor, Tensor, dict[str, Tensor]]:
        state, events = self._move(state, actions)
        rewards = torch.zeros(self.num_envs, device=self.device)
        if self.goal:
            distance = (state["positions"] - state["goal_positions"]).abs().sum(-1)
            rewards = -distance.to(torch.float32).mean(-1)
        return state, rewards, torch.zeros(self.num_envs, dtype=torch.bool, device=self.device), events

    def _move(self, state: State, actions: Tensor) -> tuple[State, dict[str, Tensor]]:
        """Move the acted block, and the one it pushes.

        Block A moves into B's cell only if w_A > w_B and the cell behind B is free; then both move one cell. If a third
        block stands behind B the push is invalid and nothing moves. There are no chains.
        """
        positions, weights = state["positions"], state["weights"]
        place = torch.div(actions, self.actions_per_object, rounding_mode="floor")
        offset = self._directions[actions % self.actions_per_object]  # (B, 2)
        if self.shuffle_objects:
            acted = _cell(positions) == place[:, None]
            start = torch.stack([place // GRID, place % GRID], dim=-1)
        else:
            acted = torch.arange(self.num_objects, device=self.device) == place[:, None]
            start = positions[self._rows[: len(positions), 0], place]
        target = start + offset
        blocker = (positions == target[:, None]).all(-1) & ~acted  # (B, K)
        blocked = blocker.any(-1)
        may_move = _on_grid(target) & ~blocked
        invalid = torch.zeros_like(blocked)
        moved = acted & may_move[:, None]
        if self.pushing:
            behind = target + offset
            heavier = ((weights * acted).sum(-1) > (weights * blocker).sum(-1)) & blocked
            third = (positions == behind[:, None]).all(-1).any(-1)
            invalid = heavier & third
            pushes = heavier & ~third & _on_grid(behind)
            moved = moved | ((acted | blocker) & pushes[:, None])
        moved = moved & offset.any(-1)[:, None]
        next_state = {**state, "positions": positions + moved[..., None] * offset[:, None]}
        return next_state, {"moved": moved, "invalid": invalid}

    def _observe(self, state: State) -> Observation:
        if self.goal:
            return {"image": self._image(state), "goal": self._image({**state, "positions": state["goal_positions"]})}
        return self._image(state)

    def _image(self, state: State) -> Tensor:
        """(B, 50, 50, 3) uint8 on black: one sprite a block, copied into its cell."""
        B = self.num_envs
        sprites = self._masks[state["shapes"]][..., None] * state["colors"][:, :, None, None, :]
        canvas = torch.zeros(B, GRID, CELL, GRID, CELL, 3, dtype=torch.uint8, device=self.device)
        row, column = state["positions"].unbind(-1)
        canvas[self._rows, row, :, column] = sprites
        return canvas.view(B, GRID * CELL, GRID * CELL, 3)

    def _info(self, state: State, events: dict[str, Tensor] | None) -> dict[str, Tensor]:
        if events is None:
            none = torch.zeros_like(state["weights"], dtype=torch.bool)
            events = {"moved": none, "invalid": none[:, 0].clone()}
        names = ("positions", "weights", "goal_positions") if self.goal else ("positions", "weights")
        return {**{name: state[name].clone() for name in names}, **events}


def _cell(positions: Tensor) -> Tensor:
    """The number of a cell, row * 5 + column."""
    return positions[..., 0] * GRID + positions[..., 1]


def _on_grid(cell: Tensor) -> Tensor:
    return ((cell >= 0) & (cell < GRID)).all(-1)


def make_shapes_vec(
    num_envs: int = 1,
    *,
    num_objects: int = 5,
    device: str = "cpu",
    max_episode_steps: int | None = None,
    render_mode: str | None = None,
) -> BlockWorld:
    """C-SWM's 2D Shapes, batched: a block moves unless the grid ends or another block is in the way.

    Object i has the i-th colour of Set1 and the shape i mod 3 (circle, triangle, square) in every episode; actions are
    ``4 * object + direction`` with directions north, east, south, west.

    Args:
        num_envs: copies B.
        num_objects: blocks K, 1 to 9.
        device: where the copies live.
        max_episode_steps: steps after which an episode is truncated.
        render_mode: None or "rgb_array".
    """
    if not 1 <= num_objects <= len(SET1):
        raise ValueError(f"num_objects is {num_objects}; Shapes takes 1 to {len(SET1)}")
    return BlockWorld(
        num_envs,
        num_objects=num_objects,
        pushing=False,
        mode="observed",
        stay_action=False,
        shuffle_objects=False,
        goal=False,
        device=device,
        max_episode_steps=max_episode_steps,
        render_mode=render_mode,
    )


def make_block_physics_vec(
    num_envs: int = 1,
    *,
    mode: str = "observed",
    num_objects: int = 5,
    stay_action: bool = True,
    shuffle_objects: bool = False,
    goal: bool = False,
    device: str = "cpu",
    max_episode_steps: int | None = None,
    render_mode: str | None = None,
) -> BlockWorld:
    """Weighted block pushing, batched: a block pushes a lighter one if the cell behind that is free.

    Args:
        num_envs: copies B.
        mode: "observed" (the darker the heavier, colours jitter from episode to episode; shapes are random),
            "unobserved" (each of nine colours has its weight; shapes are random) or "fixed_unobserved" (the shape tells
            the weight; colours are random).
        num_objects: blocks K, 3 to 5.
        stay_action: five actions a block, the first of them "stay", as the authors' data scripts have; False: the four
            directions the NPS paper names.
        shuffle_objects: draw the order of the objects anew in every episode. In the published order an object's index
            tells its weight.
        goal: reward -(mean Manhattan distance to a goal layout reached from the start by ten random actions); the
            observation becomes {"image", "goal"}.
        device: where the copies live.
        max_episode_steps: steps after which an episode is truncated.
        render_mode: None or "rgb_array".
    """
    if not 3 <= num_objects <= 5:
        raise ValueError(f"num_objects is {num_objects}; BlockPhysics takes 3 to 5")
    return BlockWorld(
        num_envs,
        num_objects=num_objects,
        pushing=True,
        mode=mode,
        stay_action=stay_action,
        shuffle_objects=shuffle_objects,
        goal=goal,
        device=device,
        max_episode_steps=max_episode_steps,
        render_mode=render_mode,
    )


def make_shapes(**options: Any) -> SingleEnv:
    """One copy of Shapes with the options of ``make_shapes_vec``."""
    return SingleEnv(make_shapes_vec(1, **options))


def make_block_physics(**options: Any) -> SingleEnv:
    """One copy of BlockPhysics with the options of ``make_block_physics_vec``."""
    return SingleEnv(make_block_physics_vec(1, **options))
