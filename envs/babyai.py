"""BabyAI's GoToObjMaze in torch, thousands of mazes at once, and any MiniGrid or BabyAI id through minigrid itself.

Sources: Chevalier-Boisvert et al. 2019, "BabyAI: A Platform to Study the Sample Efficiency of Grounded Language Learning";
the package minigrid (3.2.0), which makes our levels and draws our tiles.

Step for step and pixel for pixel this is minigrid: the same level and actions give the same pictures, rewards and ends.

Departures:
- Levels come from a pool that is renewed from time to time, because minigrid needs a few milliseconds for each.
  ``info["level_seed"]`` is the seed with which minigrid makes the same level.
- The verifier keeps no list of goal positions. Minigrid notes where the objects that fit the mission stand at the start
  and whenever the agent drops something. No object of the mission can move in between: it is picked up or toggled only
  when faced, facing it ends the episode, and none is next to the agent at the start. So the goal is reached when the
  cell ahead looks like it.
- The mission is a row of word numbers (``VOCABULARY``) without commas; minigrid's "direction" is in info only.
"""

import contextlib
import functools
import io
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from minigrid.core import world_object
from minigrid.core.actions import Actions
from minigrid.core.constants import COLOR_TO_IDX
from minigrid.core.grid import Grid
from minigrid.envs.babyai.goto import GoTo
from minigrid.minigrid_env import MiniGridEnv
from minigrid.wrappers import RGBImgPartialObsWrapper
from torch import Tensor

from . import random
from .batched import BatchedEnv, Observation, SingleEnv, State

# Every word minigrid's missions are made of; 0 fills up.
VOCABULARY = (
    "",
    *"a after and at avoid ball behind blue box door end fetch find from front get go goal green grey hallway in".split(),
    *"key lava left matching maze must near next object of on open opening pick purple put reach red right".split(),
    *"room rooms square the then to traverse unlock up use yellow you your".split(),
)
_NUMBERS = {word: number for number, word in enumerate(VOCABULARY) if word}
LONGEST_MISSION = 72  # words: four tasks of 17, two times "and", once "after you"

# What stands in a cell, as one number: nothing, a wall, 18 doors (colour, state), 18 items (kind, colour).
EMPTY, WALL, DOORS, ITEMS, CELLS = 0, 1, 2, 20, 38
STATES = OPEN, CLOSED, LOCKED = 0, 1, 2
KINDS = ("key", "ball", "box")
COLORS = tuple(COLOR_TO_IDX)
HANDS = 1 + len(KINDS) * len(COLORS)  # what the agent carries: nothing, or an item
_BESIDE_POOLS = -1  # folded into a seed's key before the generation, so that no copy's stream is met


def mission_tokens(text: str, length: int) -> np.ndarray:
    """The words of a mission as numbers (``VOCABULARY``), ``(length,)`` int64, filled up with 0.

    Raises:
        ValueError: a word minigrid does not use, or more words than ``length``.
    """
    words = text.lower().replace(",", " ").split()
    unknown = [word for word in words if word not in _NUMBERS]
    if unknown:
        raise ValueError(
            f"the mission {text!r} has the word {unknown[0]!r}; worldmodels.envs.babyai.VOCABULARY lists ours"
        )
    if len(words) > length:
        raise ValueError(f"the mission {text!r} has {len(words)} words, the length is {length}; give a greater length")
    tokens = np.zeros(length, dtype=np.int64)
    tokens[: len(words)] = [_NUMBERS[word] for word in words]
    return tokens


@contextlib.contextmanager
def _silence() -> Any:
    """Minigrid prints every level it rejects; keep that from the terminal."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def _door(color: int, state: int) -> int:
    return DOORS + len(STATES) * color + state


def _item(kind: int, color: int) -> int:
    return ITEMS + len(COLORS) * kind + color


def _object(code: int) -> Any:
    """Minigrid's object of a cell's number."""
    if code == EMPTY:
        return None
    if code == WALL:
        return world_object.Wall()
    if code < ITEMS:
        color, state = divmod(code - DOORS, len(STATES))
        return world_object.Door(COLORS[color], is_open=state == OPEN, is_locked=state == LOCKED)
    kind, color = divmod(code - ITEMS, len(COLORS))
    return (world_object.Key, world_object.Ball, world_object.Box)[kind](COLORS[color])


@functools.cache
def _codes() -> dict[tuple[int, int, int], int]:
    """The numbers of the cells that hold something, by minigrid's (type, colour, state)."""
    return {_object(code).encode(): code for code in range(CELLS) if code != EMPTY}


def _enterable(code: int) -> bool:
    """Whether the agent can stand in such a cell, and see beyond a door there."""
    return code == EMPTY or (DOORS <= code < ITEMS and (code - DOORS) % len(STATES) == OPEN)


@functools.cache
def _rules() -> Tensor:
    """What an action does to the cell ahead, to the hands, and whether the agent enters the cell.

    Returns:
        int64 ``(actions * HANDS * CELLS, 3)``: by action, what is carried and what is ahead.
    """
    rules = np.zeros((len(Actions), HANDS, CELLS, 3), dtype=np.int64)
    for hands in range(HANDS):
        carried = ITEMS + hands - 1 if hands else EMPTY
        for cell in range(CELLS):
            is_item = cell >= ITEMS
            rules[:, hands, cell] = cell, hands, 0
            rules[Actions.forward, hands, cell, 2] = _enterable(cell)
            if is_item and not hands:
                rules[Actions.pickup, hands, cell, :2] = EMPTY, cell - ITEMS + 1
            if cell == EMPTY and hands:
                rules[Actions.drop, hands, cell, :2] = carried, 0
            if DOORS <= cell < ITEMS:
                color, state = divmod(cell - DOORS, len(STATES))
                after = CLOSED if state == OPEN else OPEN
                if state == LOCKED and carried != _item(KINDS.index("key"), color):
                    after = LOCKED
                rules[Actions.toggle, hands, cell, 0] = _door(color, after)
            elif cell >= _item(KINDS.index("box"), 0):  # in these levels a box is empty
                rules[Actions.toggle, hands, cell, 0] = EMPTY
    return torch.from_numpy(rules.reshape(-1, 3))


@functools.cache
def _spread(view: int) -> Tensor:
    """How sight spreads within one row of the agent's view, and from it to the next row.

    A seen cell that can be looked through shows its neighbours left and right, and the three cells before these in the
    next row. So what spreads is every run of clear cells with a seen one among them, and one cell more at both ends.

    Returns:
        int32 ``(4 ** view,)``: by ``seen << view | clear``, two rows of bits, the bits of the spread.
    """
    row = torch.arange(1 << (2 * view), dtype=torch.int32)
    clear = row & ((1 << view) - 1)
    active = (row >> view) & clear
    for _ in range(view - 1):
        active |= (active << 1 | active >> 1) & clear
    return (active | active << 1 | active >> 1) & ((1 << view) - 1)


def _tile(code: int, agent: int | None, lit: bool, tile_size: int) -> Tensor:
    picture = Grid.render_tile(_object(code), agent_dir=agent, highlight=lit, tile_size=tile_size)
    return torch.from_numpy(picture.astype(np.uint8))


@functools.cache
def _view_tiles(tile_size: int) -> Tensor:
    """What the agent's view is laid of: the unseen cell, CELLS lit cells, the agent with HANDS things. (., S, S, 3)."""
    tiles = [_tile(EMPTY, None, False, tile_size)]
    tiles += [_tile(code, None, True, tile_size) for code in range(CELLS)]
    tiles += [_tile(code, 3, True, tile_size) for code in (EMPTY, *range(ITEMS, CELLS))]
    return torch.stack(tiles)


@functools.cache
def _maze_tiles(tile_size: int) -> Tensor:
    """What the whole maze is laid of: CELLS dark cells, CELLS lit ones, CELLS with the agent in each direction."""
    tiles = [_tile(code, None, lit, tile_size) for lit in (False, True) for code in range(CELLS)]
    tiles += [
        _tile(code if _enterable(code) else EMPTY, agent, True, tile_size)
        for agent in range(4)
        for code in range(CELLS)
    ]
    return torch.stack(tiles)


def _lay(tiles: Tensor, chosen: Tensor) -> Tensor:
    """Pictures laid of tiles (., S, S, 3) by their numbers, int32 ``(B, rows, columns)``."""
    S = tiles.shape[1]
    B, rows, columns = chosen.shape
    strips = chosen[:, :, None] * S + torch.arange(S, dtype=torch.int32, device=chosen.device)[:, None]
    return tiles.view(-1, 3 * S).index_select(0, strips.flatten()).view(B, rows * S, columns * S, 3)


class _Levels:
    """Levels made by minigrid, each when it is first drawn, kept for one generation.

    Args:
        maker: minigrid's environment.
        pad: walls to set around the grid on each side.
        pool_size: levels in a pool.
        length: words of a mission.
        device: where the levels are kept.
    """

    def __init__(self, maker: Any, pad: int, pool_size: int, length: int, device: torch.device):
        self.maker = maker
        self.pad = pad
        self.pool_size = pool_size
        self.length = length
        self.device = device
        self.generation = -1
        self._set_pools(np.zeros(0, dtype=np.int64), 0)

    def _set_pools(self, seeds: np.ndarray, generation: int) -> None:
        """Have one empty pool for each seed (different, sorted)."""
        self.seeds, self.generation = seeds, generation
        self.made = 0
        self._row = np.full((len(seeds), self.pool_size), -1, dtype=np.int32)
        self._store: State = {}

    def draw(self, all_seeds: np.ndarray, generation: int, seeds: np.ndarray, index: np.ndarray) -> State:
        """The levels at ``index`` of the pools of ``seeds``.

        Args:
            all_seeds: the seeds in use, different and sorted.
            generation: how many times the pools have been renewed.
            seeds: of them, one for each level wanted, ``(R,)``.
            index: 0 to pool_size - 1, ``(R,)``.
        """
        if generation != self.generation or not np.array_equal(all_seeds, self.seeds):
            self._set_pools(all_seeds, generation)
        pool = np.searchsorted(self.seeds, seeds)
        missing = np.flatnonzero(self._row[pool, index] < 0)
        if len(missing):
            places, first = np.unique(pool[missing] * self.pool_size + index[missing], return_index=True)
            missing = missing[first]
            key = random.seed_key(torch.from_numpy(seeds[missing]))
            keys = random.fold(key, _BESIDE_POOLS, generation, torch.from_numpy(index[missing]))
            self._keep(self.make(keys & ((1 << 63) - 1)))
            self._row.reshape(-1)[places] = np.arange(self.made - len(places), self.made)
        rows = torch.from_numpy(self._row[pool, index]).to(self.device)
        return {name: value.index_select(0, rows) for name, value in self._store.items()}

    def _keep(self, levels: State) -> None:
        new = len(levels["place"])
        if not self._store or self.made + new > len(self._store["place"]):
            room = max(256, 2 * (self.made + new))
            kept, self._store = self._store, {}
            for name, value in levels.items():
                self._store[name] = value.new_empty((room, *value.shape[1:]))
                if kept:
                    self._store[name][: self.made] = kept[name][: self.made]
        for name, value in levels.items():
            self._store[name][self.made : self.made + new] = value
        self.made += new

    def make(self, seeds: Tensor) -> State:
        """The levels minigrid makes of its own seeds, ``(R,)``."""
        with _silence():
            levels = [self._make(seed) for seed in seeds.tolist()]
        parts = {name: torch.from_numpy(np.stack([level[name] for level in levels])) for name in levels[0]}
        return {name: value.to(self.device) for name, value in (parts | {"level_seed": seeds}).items()}

    def _make(self, seed: int) -> dict[str, Any]:
        maker, pad = self.maker, self.pad
        maker.reset(seed=seed)
        codes = _codes()
        cells = np.array(
            [EMPTY if thing is None else codes[thing.encode()] for thing in maker.grid.grid], dtype=np.uint8
        )
        cells = np.pad(cells.reshape(maker.height, maker.width), pad, constant_values=WALL)
        goal = maker.instrs.desc
        x, y = maker.agent_pos
        return {
            "cells": cells.reshape(-1),
            "place": np.int64((y + pad) * cells.shape[1] + x + pad),
            "direction": np.int64(maker.agent_dir),
            "goal": np.int64(_item(KINDS.index(goal.type), COLOR_TO_IDX[goal.color])),
            "mission": mission_tokens(maker.mission, self.length),
        }


class GoToObjMaze(BatchedEnv):
    """A maze of rooms joined by doors; the agent is to go to the object the mission names, and sees what is before it.

    Actions: turn left, turn right, move forward, pick up, drop, toggle (open and close a door, unlock it with a key of
    its colour, open a box, which vanishes), done (nothing). Reaching the object gives 1 - 0.9 steps / max_steps and ends
    the episode; so do max_steps steps, with reward 0. The observation is a Dict of "image", the agent's view
    ``(8 V, 8 V, 3)`` uint8, and "mission" ``(L,)``, the numbers of its words.

    Info: "position" (B, 2) and "direction" (B,) of the agent as in minigrid, "carrying" (B,) (0, or 1 + 6 kind + colour),
    "success" (B,), "level_seed" (B,). Reset takes "level_seeds" (B,): the levels minigrid makes of these seeds.

    Args:
        num_envs: copies B.
        room_size: cells of a room's side with both walls, at least 4.
        num_rows: rows of rooms.
        num_cols: columns of rooms.
        num_dists: objects in the maze, at least 1; one of them is the goal.
        doors_open: all doors are open at the start.
        agent_view_size: cells V of the side of what the agent sees: 3, 5, 7, 9 or 11.
        tile_size: pixels of a cell's side.
        mission_length: words L of a mission.
        max_steps: of an episode; None for minigrid's room_size ** 2 * num_rows * num_cols.
        pool_size: levels in a pool.
        renew_every: vector steps after which new levels are made.
        device: where the copies live.
        max_episode_steps: steps after which an episode is truncated, if fewer than max_steps; the reward stays.
        render_mode: None or "rgb_array", the whole maze with what the agent sees lit.
    """

    terminates: ClassVar[bool] = True
    option_names: ClassVar[tuple[str, ...]] = ("level_seeds",)
    metadata = {**BatchedEnv.metadata, "actions": tuple(action.name for action in Actions)}

    def __init__(
        self,
        num_envs: int = 1,
        *,
        room_size: int = 8,
        num_rows: int = 3,
        num_cols: int = 3,
        num_dists: int = 1,
        doors_open: bool = False,
        agent_view_size: int = 7,
        tile_size: int = 8,
        mission_length: int = 5,
        max_steps: int | None = None,
        pool_size: int = 4096,
        renew_every: int = 4096,
        device: str = "cpu",
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
    ):
        least = {"room_size": (room_size, 4), "num_rows": (num_rows, 1), "num_cols": (num_cols, 1)}
        least |= {"num_dists": (num_dists, 1), "tile_size": (tile_size, 1), "mission_length": (mission_length, 5)}
        least |= {"pool_size": (pool_size, 1), "renew_every": (renew_every, 1)}
        for name, (value, minimum) in least.items():
            if value < minimum:
                raise ValueError(f"{name} is {value}; give at least {minimum}")
        if agent_view_size not in (3, 5, 7, 9, 11):
            raise ValueError(f"agent_view_size is {agent_view_size}; give 3, 5, 7, 9 or 11")
        self.agent_view_size = V = agent_view_size
        self.tile_size = tile_size
        self.renew_every = renew_every
        self.single_observation_space = Dict(
            {
                "image": Box(0, 255, (V * tile_size, V * tile_size, 3), np.uint8),
                "mission": MultiDiscrete([len(VOCABULARY)] * mission_length),
            }
        )
        self.single_action_space = Discrete(len(Actions))
        with _silence():
            maker = GoTo(
                room_size=room_size,
                num_rows=num_rows,
                num_cols=num_cols,
                num_dists=num_dists,
                doors_open=doors_open,
                max_steps=max_steps,
            )
            maker.reset(seed=0)
        self.max_steps = int(maker.max_steps)
        limit = self.max_steps if max_episode_steps is None else min(self.max_steps, max_episode_steps)
        super().__init__(num_envs, device, limit, render_mode)
        self._pad = V - 2  # the agent never stands in the outer wall, so it sees no further than this beyond the grid
        self._levels = _Levels(maker, self._pad, pool_size, mission_length, self.device)
        self._shape = (maker.height + 2 * self._pad, maker.width + 2 * self._pad)

        right, down = 1, self._shape[1]
        ahead = torch.tensor([right, down, -right, -down])
        row, column = torch.meshgrid(torch.arange(V), torch.arange(V), indexing="ij")
        offsets = (V - 1 - row) * ahead[:, None, None] + (column - V // 2) * ahead.roll(-1)[:, None, None]
        self._ahead = ahead.to(self.device)  # (4,) from a cell to the one before it, by direction
        self._offsets = offsets.flatten(1).to(self.device)  # (4, V * V) from the agent's cell to those of its view
        self._turn = torch.tensor([3, 1, 0, 0, 0, 0, 0], device=self.device)
        self._rules = _rules().to(self.device)
        self._clear = torch.tensor([code >= ITEMS or _enterable(code) for code in range(CELLS)]).float().to(self.device)
        self._columns = torch.arange(V, dtype=torch.int32, device=self.device)
        self._bits = (1 << self._columns).float()
        self._spread = _spread(V).to(self.device)
        self._tiles = _view_tiles(tile_size).to(self.device)

    def _seed(self, seed: int | list[int] | None, first_env: int = 0) -> None:
        super()._seed(seed, first_env)
        one = seed is None or isinstance(seed, (int, np.integer))
        seeds = torch.as_tensor(self._np_random_seed if one else seed, dtype=torch.int64, device=self.device)
        self._set_seeds(seeds.expand(self.num_envs))

    def _set_seeds(self, seeds: Tensor) -> None:
        self._seeds = seeds
        self._seeds_on_host = seeds.cpu().numpy()
        self._different_seeds = np.unique(self._seeds_on_host)

    def restore(self, snapshot: dict[str, Tensor]) -> Observation:
        """Go on exactly where ``snapshot`` was taken, on an environment made with the same arguments."""
        observation = super().restore(snapshot)
        assert self._state is not None
        self._set_seeds(self._state["seed"])
        return observation

    def _start(self, rows: Tensor, options: dict[str, Any]) -> State:
        if "level_seeds" in options:
            levels = self._levels.make(self._level_seeds_from(options["level_seeds"]))
        else:
            index = random.integers(self._key(0)[rows], self._levels.pool_size, ()).cpu().numpy()
            generation = self._steps // self.renew_every
            seeds = self._seeds_on_host[rows.cpu().numpy()]
            levels = self._levels.draw(self._different_seeds, generation, seeds, index)
        zeros = torch.zeros_like(rows)
        return {**levels, "seed": self._seeds[rows], "hands": zeros, "steps": zeros.clone()}

    def _level_seeds_from(self, value: Any) -> Tensor:
        seeds = torch.as_tensor(value, dtype=torch.int64).reshape(-1)
        if seeds.shape != (self.num_envs,) or bool((seeds < 0).any()):
            raise ValueError(f"level_seeds are {seeds.tolist()}; expected {self.num_envs} numbers from 0 up")
        return seeds

    def _transition(
        self, state: State, actions: Tensor, key: Tensor
    ) -> tuple[State, Tensor, Tensor, dict[str, Tensor]]:
        cells, place, actions = state["cells"], state["place"], actions.to(torch.int64)
        front = place + self._ahead[state["direction"]]
        cell = cells.gather(1, front[:, None])[:, 0]
        rule = self._rules[(actions * HANDS + state["hands"]) * CELLS + cell]
        changed, hands, enters = rule.unbind(1)
        cells = cells.scatter(1, front[:, None], changed[:, None].to(torch.uint8))
        place = torch.where(enters > 0, front, place)
        direction = (state["direction"] + self._turn[actions]) % 4
        steps = state["steps"] + 1
        front = place + self._ahead[direction]
        success = cells.gather(1, front[:, None])[:, 0] == state["goal"]
        rewards = (1 - 0.9 * (steps.to(torch.float64) / self.max_steps)) * success
        moved = {"cells": cells, "place": place, "direction": direction, "hands": hands, "steps": steps}
        return {**state, **moved}, rewards.to(torch.float32), success, {"success": success.clone()}

    def _sight(self, state: State) -> tuple[Tensor, Tensor, Tensor]:
        """The agent's view, agent at the middle of the last row: indices of the cells, what stands there, what is seen.

        Returns:
            int64 ``(B, V * V)``, int32 ``(B, V * V)`` and bool ``(B, V, V)``.
        """
        V = self.agent_view_size
        index = state["place"][:, None] + self._offsets[state["direction"]]
        codes = state["cells"].gather(1, index).to(torch.int32)
        clear = self._clear.index_select(0, codes.flatten()).view(-1, V)
        clear_bits = (clear @ self._bits).to(torch.int32).view(-1, V)
        seen = torch.full_like(clear_bits[:, 0], 1 << V // 2)
        rows = []
        for row in range(V - 1, -1, -1):
            spread = self._spread.index_select(0, seen << V | clear_bits[:, row])
            rows.append(seen | spread)
            seen = spread
        seen_bits = torch.stack(rows[::-1], dim=1)
        return index, codes, (seen_bits[:, :, None] >> self._columns & 1).bool()

    def _observe(self, state: State) -> Observation:
        V = self.agent_view_size
        _, codes, seen = self._sight(state)
        tiles = (codes.view(-1, V, V) + 1) * seen
        tiles[:, V - 1, V // 2] = 1 + CELLS + state["hands"].to(torch.int32)
        return {"image": _lay(self._tiles, tiles), "mission": state["mission"].clone()}

    def _image(self, state: State) -> Tensor:
        """The whole maze, what the agent sees lit, as minigrid's own ``render`` shows it at this tile size."""
        index, _, seen = self._sight(state)
        lit = torch.zeros_like(state["cells"]).scatter(1, index, seen.flatten(1).to(torch.uint8))
        tiles = state["cells"].to(torch.int32) + CELLS * lit
        agent = state["place"][:, None]
        tiles.scatter_add_(1, agent, (CELLS * (1 + state["direction"][:, None])).to(torch.int32))
        pad = self._pad
        maze = tiles.view(-1, *self._shape)[:, pad : self._shape[0] - pad, pad : self._shape[1] - pad]
        return _lay(_maze_tiles(self.tile_size).to(self.device), maze)

    def _info(self, state: State, events: dict[str, Tensor] | None) -> dict[str, Tensor]:
        x, y = state["place"] % self._shape[1] - self._pad, state["place"] // self._shape[1] - self._pad
        success = torch.zeros_like(x, dtype=torch.bool) if events is None else events["success"]
        return {
            "position": torch.stack([x, y], dim=1),
            "direction": state["direction"].clone(),
            "carrying": state["hands"].clone(),
            "level_seed": state["level_seed"].clone(),
            "success": success,
        }


def make_goto_obj_maze(**options: Any) -> SingleEnv:
    """One copy of GoToObjMaze with the options of ``GoToObjMaze``."""
    return SingleEnv(GoToObjMaze(1, **options))


class _Words(gym.Wrapper[Any, Any, Any, Any]):
    """Minigrid's environment without its prints, its mission as numbers."""

    def __init__(self, env: gym.Env[Any, Any], mission_length: int):
        super().__init__(env)
        self.mission_length = mission_length
        assert isinstance(env.observation_space, Dict)
        mission = MultiDiscrete([len(VOCABULARY)] * mission_length)
        self.observation_space = Dict({"image": env.observation_space["image"], "mission": mission})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start a new episode."""
        with _silence():
            observation, info = self.env.reset(seed=seed, options=options)
        return self._observation(observation), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """One step."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._observation(observation), reward, terminated, truncated, info

    def _observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        tokens = mission_tokens(observation["mission"], self.mission_length)
        return {"image": observation["image"], "mission": tokens}


def make_minigrid(
    env_id: str,
    *,
    agent_view_size: int | None = None,
    tile_size: int = 8,
    mission_length: int = LONGEST_MISSION,
    **options: Any,
) -> gym.Env[Any, Any]:
    """Any MiniGrid or BabyAI id through minigrid: a Dict of "image", the agent's view in RGB, and "mission", word numbers.

    Args:
        env_id: an id such as "BabyAI-BossLevel-v0".
        agent_view_size: cells of the side of what the agent sees, odd; None for the id's own.
        tile_size: pixels of a cell's side.
        mission_length: words of a mission; shorter ones are filled up with 0.
        options: go to minigrid's environment.

    Raises:
        ValueError: the id is none of minigrid's.
    """
    if agent_view_size is not None:
        options["agent_view_size"] = agent_view_size
    with _silence():
        env = gym.make(env_id, disable_env_checker=True, **options)
    if not isinstance(env.unwrapped, MiniGridEnv):
        raise ValueError(
            f"env_id is {env_id!r}, which is none of minigrid's; give one that starts MiniGrid- or BabyAI-"
        )
    return _Words(RGBImgPartialObsWrapper(env, tile_size), mission_length)
