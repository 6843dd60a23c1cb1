"""Flatland: trains on a railway grid, each seen through a small window around it, as one plain Gymnasium environment.

Sources: Mohanty et al. 2020, "Flatland-RL: Multi-Agent Reinforcement Learning on Trains", and the package flatland-rl
(4.2 and 4.3), which makes maps and timetables, moves the trains and rewards them; Rahaman et al. 2020, "S2RMs:
Spatially Structured Recurrent Modules", appendix A: ten trains on 60 x 60 cells, each seen through a crop of 5 x 5, for
at most 128 steps.

Departure: the paper does not say what a cell of a crop shows; ``CHANNELS`` is our choice.

flatland-rl is imported when it is needed and not before, because it holds numpy below 2 and few have it.
"""

import contextlib
import functools
import math
import random
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, MultiBinary, MultiDiscrete

ACTIONS = ("do nothing", "left", "forward", "right", "stop")
DO_NOTHING, LEFT, FORWARD, RIGHT, STOP = range(5)

# What a train is doing.
STATES = ("waiting", "ready to depart", "broken down off the map", "moving", "stopped", "broken down", "arrived")
WAITING, READY, BROKEN_OFF_MAP, MOVING, STOPPED, BROKEN_DOWN, ARRIVED = range(7)

HEADINGS = ("north", "east", "south", "west")
_NEXT = np.array([[-1, 0], [0, 1], [1, 0], [0, -1]])  # the cell to the north, east, ...: rows and columns away

# What a cell shows, each 0 or 255. Beyond the map's border everything is 0.
CHANNELS = (
    *(f"rail: a train that heads {heading} may leave to the {exit}" for heading in HEADINGS for exit in HEADINGS),
    *(f"a train stands here and heads {heading}" for heading in HEADINGS),
    "target of the train whose window this is",
    "target of another train, whether or not that one has arrived",
    "the train that stands here has broken down",
)
RAILS, TRAINS, OWN_TARGET, TARGETS, BROKEN = slice(0, 16), slice(16, 20), 20, 21, 22
ON = 255


class Flatland(gym.Env[dict[str, Any], np.ndarray]):
    """Trains n that have to reach their targets in time, on rails where they can block one another.

    Observation: "views" ``(n, crop_size, crop_size, 23)`` uint8, the window around each train as a picture whose
    channels are ``CHANNELS``, north up; "positions" ``(n, 2)`` float32, row and column of each train's cell; "mask"
    ``(n,)``, which trains are on the map. The others' views and positions are 0: at first no train is on the map, they
    enter in the course of the episode and leave it at their targets.

    Action ``(n,)``: ``ACTIONS``. A train that is ready enters the map with "forward". "Forward" follows a bend and
    turns round at a dead end; where the rails part to the left and the right alone it cannot be done, and stops the
    train.

    Reward, shared: the mean of flatland's rewards of the trains, each at least minus the episode's step limit, divided
    by the limit. A train is charged for its delay when it arrives; at the limit for the delay it cannot avoid any more,
    or for its whole way if it never departed. So an episode's return is from -1 to 0, and plus 1 it is flatland's
    normalised score.

    An episode is terminated when all trains have arrived, and truncated at the limit. flatland chooses one for every
    timetable: on 60 x 60 cells with six cities 120 to 310 steps.

    Info: "state" ``(n,)`` int8, number in ``STATES``; "action_required" ``(n,)`` bool; "rewards" ``(n,)`` float32,
    flatland's for each train; "shortest_path" ``(n,)`` int8, the action on each train's shortest way to its target; if
    asked "grid" ``(H, W)`` uint16, the rails as flatland keeps them.

    Args:
        num_agents: trains n.
        width: of the map, cells.
        height: of the map.
        crop_size: width and height of a train's window, odd.
        num_cities: at most so many; flatland places fewer where there is no room.
        max_rails_between_cities: tracks that leave a city towards another.
        max_rail_pairs_in_city: pairs of parallel tracks in a city.
        malfunctions: breakdowns of a train in a step, on average.
        malfunction_steps: least and greatest duration of a breakdown.
        max_steps: the greatest step limit; None for the map's own.
        regenerate: draw a new map for every episode; otherwise trains and timetables alone.
        map_seed: of the one map there is without ``regenerate``, whatever the copy or the episode's seed.
        info_grid: put the rails into info.
        render_mode: None or "rgb_array".

    Raises:
        gym.error.DependencyNotInstalled: flatland-rl is not there.
        ValueError: an option is out of range; from ``reset`` also where the map has no room for two cities.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10, "actions": ACTIONS}

    def __init__(
        self,
        num_agents: int = 10,
        *,
        width: int = 60,
        height: int = 60,
        crop_size: int = 5,
        num_cities: int = 6,
        max_rails_between_cities: int = 2,
        max_rail_pairs_in_city: int = 2,
        malfunctions: float = 0.0,
        malfunction_steps: Sequence[int] = (20, 50),
        max_steps: int | None = None,
        regenerate: bool = True,
        map_seed: int = 0,
        info_grid: bool = False,
        render_mode: str | None = None,
    ):
        _check_installed()
        if num_agents < 1 or num_cities < 2:
            raise ValueError(f"num_agents is {num_agents} and num_cities {num_cities}; give at least 1 and 2")
        if crop_size < 1 or crop_size % 2 == 0:
            raise ValueError(f"crop_size is {crop_size}; give an odd number, so that the train is in the middle")
        durations = tuple(malfunction_steps)
        if not 0.0 <= malfunctions < 1.0 or len(durations) != 2 or not 1 <= durations[0] <= durations[1]:
            raise ValueError(
                f"malfunctions is {malfunctions} and malfunction_steps {list(durations)}; give a rate below 1 "
                "(0.002: once in 500 steps), and the least and greatest duration"
            )
        if max_steps is not None and max_steps < 1:
            raise ValueError(f"max_steps is {max_steps}; give at least 1, or None for the map's own limit")
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f"render_mode is {render_mode!r}; this environment offers None and 'rgb_array'")
        self.num_agents, self.width, self.height, self.crop_size = num_agents, width, height, crop_size
        self.cities = {
            "max_num_cities": num_cities,
            "max_rails_between_cities": max_rails_between_cities,
            "max_rail_pairs_in_city": max_rail_pairs_in_city,
        }
        self.malfunctions, self.malfunction_steps = malfunctions, durations
        self.max_steps, self.regenerate, self.map_seed, self.info_grid = max_steps, regenerate, map_seed, info_grid
        self.render_mode = render_mode
        views = (num_agents, crop_size, crop_size, len(CHANNELS))
        furthest = np.tile(np.array([height - 1, width - 1], dtype=np.float32), (num_agents, 1))
        self.observation_space = Dict(
            {
                "views": Box(0, 255, views, np.uint8),
                "positions": Box(np.zeros_like(furthest), furthest, dtype=np.float32),
                "mask": MultiBinary(num_agents),
            }
        )
        self.action_space = MultiDiscrete(np.full(num_agents, len(ACTIONS)))
        self._map: tuple[Any, Any] | None = None  # flatland's rails, and its hints where trains may start and go
        self._rail_env: Any = None
        self._over = True

    # What Gymnasium calls.

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Draw a new episode: a map, unless one is kept, trains on it and their timetable. There are no options."""
        super().reset(seed=seed)
        if options:
            raise ValueError(f"unknown reset option {next(iter(options))!r}; this environment takes none")
        map_seed, train_seed = (int(drawn) for drawn in self.np_random.integers(2**31, size=2))
        with _undisturbed():
            if self.regenerate or self._map is None:
                self._map = self._new_map(map_seed if self.regenerate else self.map_seed)
            self._rail_env = self._new_trains(self._map, train_seed)
        self._begin()
        required = self._rail_env.get_info_dict()["action_required"]
        return self._observe(), self._info(np.zeros(self.num_agents, dtype=np.float32), required)

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Move every train."""
        if self._over:
            raise gym.error.ResetNeeded("there is no episode to go on with; call reset first")
        action = np.asarray(action)
        if action.shape != (self.num_agents,) or not ((action >= 0) & (action < len(ACTIONS))).all():
            raise ValueError(
                f"the action is {action.tolist()}; expected {self.num_agents} numbers from 0 to {STOP}, one a train"
            )
        _, earned, dones, said = self._rail_env.step(dict(enumerate(action.tolist())))
        rewards = np.array([earned[train] for train in range(self.num_agents)], dtype=np.float32)
        self._follow()
        self._over = bool(dones["__all__"])
        terminated = bool((self._state == ARRIVED).all())
        reward = float(np.maximum(rewards, -self.limit).mean()) / self.limit
        info = self._info(rewards, said["action_required"])
        return self._observe(), reward, terminated, self._over and not terminated, info

    def render(self) -> np.ndarray | None:
        """The map ``(9 H, 9 W, 3)`` uint8, or None if no render mode was asked for.

        Trains are arrowheads, black inside where they have broken down; their targets are squares of the same colour.
        What some train sees is darker.
        """
        if self.render_mode is None or self._rail_env is None:
            return None
        return self._picture()

    # What is there to see.

    def view_at(self, positions: np.ndarray) -> np.ndarray:
        """What is to be seen around any cells of the map, by nobody's eyes.

        Args:
            positions: ``(..., 2)``, row and column, whole numbers.

        Returns:
            Views ``(..., crop_size, crop_size, 23)`` uint8. All trains' targets are shown as other trains'.

        Raises:
            ValueError: no such cells.
            gym.error.ResetNeeded: there is no map yet.
        """
        if self._rail_env is None:
            raise gym.error.ResetNeeded("there is no map before the first reset; call reset first")
        cells = np.asarray(positions).astype(np.int64)
        inside = cells.shape[-1:] == (2,) and ((cells >= 0) & (cells < (self.height, self.width))).all()
        if not inside or (cells != positions).any():
            raise ValueError(
                f"positions {np.shape(positions)} are no cells of the map; expected (..., 2), rows from 0 to "
                f"{self.height - 1} and columns from 0 to {self.width - 1}, whole numbers"
            )
        return self._windows(cells)

    def _windows(self, cells: np.ndarray) -> np.ndarray:
        """The windows ``(..., crop_size, crop_size, 23)`` around cells ``(..., 2)``."""
        along = np.arange(self.crop_size)  # the padding at the border puts a window's first row at its cell's number
        rows = cells[..., 0, None, None] + along[:, None]
        columns = cells[..., 1, None, None] + along
        return self._world[rows, columns]

    def _observe(self) -> dict[str, Any]:
        views = self._windows(self._cells)
        offset = self._targets - self._cells + self.crop_size // 2
        (near,) = (self._on_map & ((offset >= 0) & (offset < self.crop_size)).all(axis=1)).nonzero()
        row, column = offset[near].T
        views[near, row, column, OWN_TARGET] = ON
        views[near, row, column, TARGETS] = ON * self._shared[near]
        views[~self._on_map] = 0
        positions = np.where(self._on_map[:, None], self._cells, 0).astype(np.float32)
        return {"views": views, "positions": positions, "mask": self._on_map.astype(np.int8)}

    def _info(self, rewards: np.ndarray, required: dict[int, bool]) -> dict[str, Any]:
        info = {
            "state": self._state.copy(),
            "action_required": np.array([required[train] for train in range(self.num_agents)], dtype=bool),
            "rewards": rewards,
            "shortest_path": self._shortest_path(),
        }
        return info | {"grid": self._grid.copy()} if self.info_grid else info

    def _shortest_path(self) -> np.ndarray:
        """The action that brings each train nearer to its target, ``(n,)`` int8, by flatland's table of distances."""
        train = np.arange(self.num_agents)
        row, column = (self._cells + self.crop_size // 2).T
        rails = self._world[row, column, RAILS].reshape(-1, 4, 4)  # heading, exit
        open_exits = rails[train, self._headings] > 0  # (n, 4)
        ahead = self._cells[:, None] + _NEXT
        row, column = np.clip(ahead, 0, (self.height - 1, self.width - 1)).transpose(2, 0, 1)  # no rail leaves the map
        heading = np.arange(4)  # after leaving to the north one heads north, and so on
        distances = self._distances[train[:, None], row, column, heading]
        turn = (np.where(open_exits, distances, np.inf).argmin(axis=1) - self._headings) % 4
        action = np.array([FORWARD, RIGHT, FORWARD, LEFT], dtype=np.int8)[turn]  # ahead, right, round, left
        action[open_exits.sum(axis=1) == 1] = FORWARD
        action[self._state == ARRIVED] = DO_NOTHING
        return action

    # The episode.

    def _new_map(self, seed: int) -> tuple[Any, Any]:
        from flatland.envs.rail_generators import sparse_rail_generator

        draw = sparse_rail_generator(**self.cities)
        try:
            rail, hints = draw(self.width, self.height, self.num_agents, 0, np.random.RandomState(seed))
        except ValueError as error:
            raise ValueError(
                f"no map of {self.height} x {self.width} cells ({error}); give a larger one or fewer tracks"
            ) from error
        _keep_caches_apart(rail)
        return rail, hints

    def _new_trains(self, rail_and_hints: tuple[Any, Any], seed: int) -> Any:
        """Flatland's environment at the start of an episode; always a new one, so that nothing stays from the last."""
        from flatland.core.env_observation_builder import DummyObservationBuilder
        from flatland.envs.line_generators import sparse_line_generator
        from flatland.envs.rail_env import RailEnv

        rail_env = RailEnv(
            width=self.width,
            height=self.height,
            number_of_agents=self.num_agents,
            rail_generator=lambda *_: rail_and_hints,
            line_generator=sparse_line_generator(),
            obs_builder_object=DummyObservationBuilder(),
            malfunction_generator=_Breakdowns(self.malfunctions, self.malfunction_steps),
            random_seed=seed,
        )
        _keep_caches_apart(rail_env)
        rail_env.reset(random_seed=seed)
        return rail_env

    def _begin(self) -> None:
        """Write down what stays the same in an episode, and where the trains are."""
        rail_env, edge = self._rail_env, self.crop_size // 2
        self.limit = int(rail_env._max_episode_steps)  # steps
        if self.max_steps is not None:
            self.limit = min(self.limit, self.max_steps)
            rail_env._max_episode_steps = self.limit  # where flatland charges the trains that have not arrived
        self._grid = rail_env.rail.grid
        self._distances = rail_env.distance_map.get()  # (n, H, W, 4), by heading
        self._targets = np.array([_target(agent) for agent in rail_env.agents])
        self._shared = (self._targets[:, None] == self._targets).all(axis=2).sum(axis=1) > 1
        world = np.zeros((self.height + 2 * edge, self.width + 2 * edge, len(CHANNELS)), dtype=np.uint8)
        inner = world[edge : edge + self.height, edge : edge + self.width]
        inner[..., RAILS] = ON * (self._grid[..., None] >> np.arange(15, -1, -1) & 1)  # the first bit is north to north
        inner[(*self._targets.T, TARGETS)] = ON
        self._world = world
        start = np.array([_configuration(agent, "initial") for agent in rail_env.agents])
        self._cells, self._headings = start[:, :2], start[:, 2]
        self._on_map = np.zeros(self.num_agents, dtype=bool)
        self._over = False
        self._follow()

    def _follow(self) -> None:
        """Read off where the trains are now; those off the map keep the cell where they start or last were."""
        edge = self.crop_size // 2
        row, column = (self._cells[self._on_map] + edge).T
        self._world[row, column, TRAINS] = 0
        self._world[row, column, BROKEN] = 0
        agents = self._rail_env.agents
        for train, agent in enumerate(agents):
            place = _configuration(agent, "current")
            self._on_map[train] = place is not None
            if place is not None:
                self._cells[train], self._headings[train] = place[:2], place[2]
        self._state = np.array([int(agent.state) for agent in agents], dtype=np.int8)
        row, column = (self._cells[self._on_map] + edge).T
        self._world[row, column, TRAINS.start + self._headings[self._on_map]] = ON
        self._world[row, column, BROKEN] = ON * (self._state[self._on_map] == BROKEN_DOWN)

    def _picture(self) -> np.ndarray:
        cells = np.full((self.height, self.width, _TILE, _TILE, 3), 250, dtype=np.uint8)
        seen = self._cells[self._on_map]
        reach = self.crop_size // 2
        for row, column in seen:
            cells[max(0, row - reach) : row + reach + 1, max(0, column - reach) : column + reach + 1] = 225
        bits = self._grid[..., None] >> np.arange(15, -1, -1) & 1
        rails = (bits.reshape(-1, 16) @ _rail_tiles().reshape(16, -1)).reshape(cells.shape[:-1]) > 0
        cells[rails] = 110
        colors = _colors(self.num_agents)
        for target, color in zip(self._targets, colors, strict=True):
            cells[target[0], target[1], _frame()] = color
        for train in np.flatnonzero(self._on_map):
            row, column = self._cells[train]
            cells[row, column, _arrow(int(self._headings[train]))] = colors[train]
            if self._state[train] == BROKEN_DOWN:
                cells[row, column, 3:6, 3:6] = 0
        return cells.transpose(0, 2, 1, 3, 4).reshape(self.height * _TILE, self.width * _TILE, 3)


def shortest_path_policy(observation: Any, info: dict[str, Any]) -> np.ndarray:
    """Every train on its shortest way, as if it were alone: actions from the infos of one environment or of a batch.

    Where two such trains meet on a single track they block each other for good.
    """
    return np.asarray(info["shortest_path"]).astype(np.int64)


# flatland-rl.


def _check_installed() -> None:
    try:
        import flatland.envs.rail_env  # noqa: F401
    except ModuleNotFoundError as error:
        raise gym.error.DependencyNotInstalled(
            f"Flatland needs flatland-rl, but there is no module {error.name!r}: run pip install '.[flatland]' in the "
            "checkout, best in an environment of its own, because flatland-rl needs numpy 1.26"
        ) from error


class _Breakdowns:
    """When trains break down and for how long: flatland's ``ParamMalfunctionGen`` on the episode's own random numbers.

    Flatland's draws a million numbers at its first step and goes through them ever after, whatever seed comes next.
    """

    def __init__(self, rate: float, steps: Sequence[int]):
        self.rate, self.steps = rate, steps
        self._probability = 1.0 - math.exp(-rate)

    def generate(self, np_random: np.random.RandomState) -> Any:
        """A breakdown, or None; flatland asks once a step for every train."""
        if self.rate == 0.0 or np_random.random_sample() >= self._probability:
            return None
        from flatland.envs.malfunction_generators import Malfunction

        least, greatest = self.steps
        return Malfunction(int(np_random.randint(least, greatest + 1)) + 1)  # one is taken off in the same step

    def get_process_data(self) -> Any:
        """Rate, least and greatest duration, as flatland keeps them."""
        from flatland.envs.malfunction_generators import MalfunctionProcessData

        return MalfunctionProcessData(self.rate, *self.steps)


def _configuration(agent: Any, when: str) -> tuple[int, int, int] | None:
    """Row, column and heading of a train, "current" or "initial"; None off the map. flatland 4.2 changed the names."""
    if hasattr(agent, "current_configuration"):
        found = getattr(agent, f"{when}_configuration")
    elif when == "current":
        found = (agent.position, agent.direction)
    else:
        found = (agent.initial_position, agent.initial_direction)
    if found is None or found[0] is None:
        return None
    (row, column), heading = found
    return int(row), int(column), int(heading)


def _target(agent: Any) -> tuple[int, int]:
    """The cell a train has to reach; newer versions of flatland list it once with each heading that can enter it."""
    row, column = next(iter(agent.targets))[0] if hasattr(agent, "targets") else agent.target
    return int(row), int(column)


def _keep_caches_apart(owner: Any) -> None:
    """Let what flatland caches about a map or an episode go with it.

    Its caches belong to the classes and hold millions of answers, and so every map ever made: 20 MB for each of 60 x 60
    cells.
    """
    for name in dir(type(owner)):
        method = getattr(type(owner), name)
        if hasattr(method, "cache_clear") and not isinstance(method.__wrapped__, staticmethod):
            method.cache_clear()  # what was asked while the map was made; those of others have caches of their own
            setattr(owner, name, functools.cache(functools.partial(method.__wrapped__, owner)))


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep flatland's remarks on a map from the terminal, and its seed from Python's global random numbers."""
    state = random.getstate()
    try:
        with warnings.catch_warnings():
            for said in ("Could not set all required cities", r"\[WARNING\]"):
                warnings.filterwarnings("ignore", message=said, category=UserWarning)
            yield
    finally:
        random.setstate(state)


# Pictures.

_TILE = 9  # pixels of a cell's edge


@functools.cache
def _rail_tiles() -> np.ndarray:
    """For each of the 16 transitions the pixels ``(9, 9)`` from the side where a train comes in to where it leaves."""
    middle, last = _TILE // 2, _TILE - 1
    sides = np.array([[0, middle], [middle, last], [last, middle], [middle, 0]])
    tiles = np.zeros((4, 4, _TILE, _TILE), dtype=np.int64)
    for heading in range(4):
        for exit in range(4):
            begin = sides[(heading + 2) % 4]
            end = np.array([middle, middle]) if exit == (heading + 2) % 4 else sides[exit]
            for part in np.linspace(0.0, 1.0, 3 * _TILE):
                row, column = np.rint((1 - part) * begin + part * end).astype(np.int64)
                tiles[heading, exit, row, column] = 1
    return tiles.reshape(16, _TILE, _TILE)


def _arrow(heading: int) -> np.ndarray:
    """An arrowhead ``(9, 9)``."""
    forward, aside = np.mgrid[_TILE // 2 : -_TILE // 2 : -1, -(_TILE // 2) : _TILE // 2 + 1]
    return np.rot90(2 * np.abs(aside) <= _TILE // 2 - forward, -heading)


@functools.cache
def _frame() -> np.ndarray:
    """The edge of a tile, two pixels thick."""
    frame = np.ones((_TILE, _TILE), dtype=bool)
    frame[2:-2, 2:-2] = False
    return frame


def _colors(count: int) -> np.ndarray:
    """Colours ``(count, 3)`` spread over the circle of hues, dark enough for a white ground."""
    hue = 6.0 * np.arange(count)[:, None] / count
    return (200 * np.clip(np.abs((hue + np.array([0.0, 4.0, 2.0])) % 6.0 - 3.0) - 1.0, 0.0, 1.0)).astype(np.uint8)
