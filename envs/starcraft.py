"""StarCraft II itself: the views of ``polar.py`` from the game's own messages, from SMAC, and as an environment on pysc2.

Sources: the game's protocol (Blizzard/s2client-proto: raw.proto, common.proto, docs/protocol.md); Samvelyan et al. 2019,
"The StarCraft Multi-Agent Challenge", and SMACv2, whose environments' attributes are read; pysc2 4.0.0, which starts the
game; Rahaman et al. 2020, "S2RMs", appendix B.1, for the pictures.

The game is not part of any package. Where it is not at hand, ``worldmodels/Skirmish-v0`` gives observations of the same
form. Nothing here imports pysc2 or s2clientprotocol before it is used; messages and SMAC's environments are read by
their attributes alone, so the pictures need neither.
"""

import ast
import contextlib
import importlib
import importlib.util
import io
import pathlib
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, MultiBinary, MultiDiscrete

from .polar import CHANNELS, UNIT_TYPES, Divisors, PolarGrid, action_image, polar_image
from .skirmish import ACTIONS, ATTACK, EAST, NO_OP, NORTH, SOUTH, STOP, WEST

# What the game calls the nine types (pysc2.lib.units); SMAC's maps have types of their own beside them.
UNIT_TYPE_IDS = {
    48: "marine",
    51: "marauder",
    54: "medivac",
    74: "stalker",
    73: "zealot",
    4: "colossus",
    107: "hydralisk",
    105: "zergling",
    9: "baneling",
}

_DIRECTIONS = {NORTH: (0.0, 1.0), SOUTH: (0.0, -1.0), EAST: (1.0, 0.0), WEST: (-1.0, 0.0)}

# Numbers of raw.proto's DisplayType and Alliance, and of the general abilities (pysc2.lib.actions).
_VISIBLE = 1
_SELF, _ALLY, _ENEMY = 1, 2, 4
_STOP, _MOVE, _ATTACK, _HEAL = 3665, 3794, 3674, 386
_MEDIVAC = UNIT_TYPES.index("medivac")


class Units(NamedTuple):
    """Units as arrays ``(U,)``, the agents first; a dead agent keeps its row, with nothing but its tag.

    Args:
        team: 0 friendly, 1 enemy, int64.
        type: number in ``polar.UNIT_TYPES``, -1 for any other type, int64.
        x: map units to the east, float32.
        y: map units to the north.
        health: hit points; a unit with none is dead.
        energy: points.
        cooldown: game loops until the weapon is ready. The game does not tell the enemies' (raw.proto), which are 0.
        shield: points.
        tag: the game's name of the unit, uint64; 0 for none.
        num_agents: how many of the first rows are agents.
    """

    team: np.ndarray
    type: np.ndarray
    x: np.ndarray
    y: np.ndarray
    health: np.ndarray
    energy: np.ndarray
    cooldown: np.ndarray
    shield: np.ndarray
    tag: np.ndarray
    num_agents: int

    @property
    def table(self) -> np.ndarray:
        """The columns of ``skirmish.COLUMNS``, ``(U, 8)`` float32."""
        return np.stack([np.asarray(column, dtype=np.float32) for column in self[:8]], axis=1)


def units_from_observation(
    observation: Any, *, unit_types: Mapping[int, str] | None = None, agents: Sequence[int] | None = None
) -> Units:
    """The units in an observation of the raw interface: all that are visible, alive and not neutral.

    Args:
        observation: a ``ResponseObservation``, its ``observation``, or that one's ``raw_data``.
        unit_types: the names in ``UNIT_TYPES`` of the game's types; None for ``UNIT_TYPE_IDS``. Units of other types are
            drawn without a type.
        agents: tags of the agents in a fixed order, 0 for nobody; one that is not among the player's units is dead. None:
            the player's units of known types, ordered by tag.

    Returns:
        The agents, then the others in the observation's order.

    Raises:
        ValueError: no raw data, or an unknown name of a type.
    """
    numbers = _numbers(UNIT_TYPE_IDS if unit_types is None else unit_types)
    raw = getattr(observation, "observation", observation)
    raw = getattr(raw, "raw_data", raw)
    if not hasattr(raw, "units"):
        raise ValueError(
            f"a {type(observation).__name__} has no raw units; give a ResponseObservation of a game with the raw interface"
        )
    living = [
        unit
        for unit in raw.units
        if unit.health > 0 and unit.display_type == _VISIBLE and unit.alliance in (_SELF, _ALLY, _ENEMY)
    ]
    own = {unit.tag: unit for unit in living if unit.alliance == _SELF}
    if agents is None:
        agents = sorted(tag for tag, unit in own.items() if unit.unit_type in numbers)
    tags = [int(tag) for tag in agents]
    taken = own.keys() & set(tags)
    others = [(int(unit.alliance == _ENEMY), unit) for unit in living if unit.tag not in taken]
    return _units([(tag, own.get(tag)) for tag in tags], others, numbers)


def units_from_smac(env: Any) -> Units:
    """The units of a running SMAC or SMACv2 environment: its agents in its order, then its enemies.

    SMAC keeps the dead in its lists, with health 0 where they fell. Its maps give the agents' units types of their own,
    which are read from the environment (``stalker_id`` and so on; SMACv2 also ``id_to_unit_name_map``).

    Args:
        env: the environment after its reset, or a wrapper with it in ``env``.

    Raises:
        ValueError: it is none.
    """
    env = _smac(env)
    names = dict(UNIT_TYPE_IDS)
    names |= {getattr(env, f"{name}_id", 0): name for name in UNIT_TYPES}
    names |= {number: name for number, name in getattr(env, "id_to_unit_name_map", {}).items() if name in UNIT_TYPES}
    names.pop(0, None)  # a type the map does not have
    agents = [env.agents[i] for i in sorted(env.agents)]
    enemies = [(1, env.enemies[j]) for j in sorted(env.enemies) if env.enemies[j].health > 0]
    return _units([(unit.tag, unit if unit.health > 0 else None) for unit in agents], enemies, _numbers(names))


def actions_from_smac(env: Any) -> np.ndarray:
    """What the agents of a SMAC or SMACv2 environment did last, as numbers in ``skirmish.ACTIONS``, ``(n,)`` int64.

    All targets are one attack, and so is the medivacs' healing, which has the same numbers in SMAC. SMACv2's turning of
    the field of view is ``len(ACTIONS)``, unknown. Before the first step all is no-op.

    Raises:
        ValueError: it is no such environment.
    """
    env = _smac(env)
    chosen = np.asarray(env.last_action).argmax(-1)
    first = getattr(env, "n_actions_no_attack", ATTACK)
    unknown = (chosen >= ATTACK) & (chosen < first)
    return np.where(unknown, len(ACTIONS), np.minimum(chosen, ATTACK)).astype(np.int64)


def terrain_height(start_raw: Any, *, upside_down: bool | None = None) -> np.ndarray:
    """The height of the ground, ``(X, Y)`` float32 from 0 to 1, to be read at ``[int(x), int(y)]``.

    The protocol puts (0, 0) at the lower left, and does not say with which row its pictures begin. Games since 2019
    (about 4.8) begin with the lowest; older ones began with the highest, and are known by a pathing grid of 8 bits a
    pixel, now 1. SMAC makes this difference for the pathing grid and turns the heights over in either case: its
    ``terrain_height`` differs from this one where the ground of a map is not symmetric.

    Args:
        start_raw: ``ResponseGameInfo.start_raw``.
        upside_down: whether the highest row comes first; None to tell by the pathing grid.

    Returns:
        Zeros of the map's size if the message has no heights.

    Raises:
        ValueError: the picture is not of 8 bits a pixel, or has the wrong size.
    """
    image = start_raw.terrain_height
    width, height = image.size.x, image.size.y
    if not image.data:
        return np.zeros((start_raw.map_size.x, start_raw.map_size.y), dtype=np.float32)
    if image.bits_per_pixel != 8 or len(image.data) != width * height:
        raise ValueError(
            f"the terrain has {len(image.data)} bytes of {image.bits_per_pixel} bits a pixel for {width} x {height}; "
            f"expected {width * height} bytes of 8"
        )
    rows = np.frombuffer(image.data, dtype=np.uint8).reshape(height, width)
    if upside_down is None:
        upside_down = start_raw.pathing_grid.bits_per_pixel == 8
    return np.ascontiguousarray((rows[::-1] if upside_down else rows).T, dtype=np.float32) / np.float32(255)


def polar_views(
    units: Units,
    height: np.ndarray,
    *,
    grid: PolarGrid = PolarGrid(),  # noqa: B008  a tuple of numbers
    divisors: Divisors = Divisors(),  # noqa: B008
) -> dict[str, np.ndarray]:
    """What each agent sees, in the form of Skirmish's observation.

    Args:
        units: from ``units_from_observation`` or ``units_from_smac``.
        height: of the ground, ``(X, Y)``, from ``terrain_height`` or SMAC's.
        grid: the pixels.
        divisors: what the stats are divided by.

    Returns:
        "views" ``(n, 15, I, J)`` float32 (see ``polar.polar_image``), "positions" ``(n, 2)`` float32 in map units and
        "mask" ``(n,)`` int8, who is alive; the dead are 0 in all three.
    """
    n = units.num_agents
    if not n:
        views = np.zeros((0, CHANNELS, grid.num_radii, grid.num_angles), dtype=np.float32)
        return {"views": views, "positions": np.zeros((0, 2), np.float32), "mask": np.zeros(0, np.int8)}
    alive = units.health[:n] > 0
    team, kind, x, y, health, energy, cooldown, shield = (torch.from_numpy(column) for column in units[:8])
    ground = torch.from_numpy(np.asarray(height, dtype=np.float32))

    def drawn(stand_in: int) -> np.ndarray:
        views = polar_image(
            team,
            torch.where(kind < 0, stand_in, kind),
            x,
            y,
            health,
            energy,
            cooldown,
            shield,
            ground,
            observers_x=x[:n],
            observers_y=y[:n],
            grid=grid,
            divisors=divisors,
        )
        return views.numpy()

    views = drawn(0)
    if (units.type < 0).any():  # a unit of another type has what two drawings under different names agree in
        views = np.minimum(views, drawn(1))
    positions = np.stack([units.x[:n], units.y[:n]], axis=1)
    views[~alive] = 0
    positions[~alive] = 0
    return {"views": views, "positions": positions, "mask": alive.astype(np.int8)}


def polar_actions(
    units: Units,
    actions: np.ndarray,
    *,
    grid: PolarGrid = PolarGrid(),  # noqa: B008
) -> np.ndarray:
    """What each agent sees the units around it do, ``(n, 8, I, J)`` float32: one-hot over ``skirmish.ACTIONS`` and unknown.

    Args:
        units: as for ``polar_views``.
        actions: of the agents, ``(n,)``, from ``actions_from_smac`` or given to ``StarCraft2``.
        grid: the pixels.

    Returns:
        See ``polar.action_image``; 0 for the dead.

    Raises:
        ValueError: not one action for each agent.
    """
    n = units.num_agents
    if np.shape(actions) != (n,):
        raise ValueError(f"actions have shape {np.shape(actions)}; expected {(n,)}, one for each agent")
    if not n:
        return np.zeros((0, len(ACTIONS) + 1, grid.num_radii, grid.num_angles), dtype=np.float32)
    known = torch.full((len(units.tag),), len(ACTIONS))  # an ally that is no agent may do anything
    known[:n] = torch.as_tensor(np.asarray(actions, dtype=np.int64))
    team, x, y, health = (torch.from_numpy(units[column]) for column in (0, 2, 3, 4))
    images = action_image(
        team, x, y, health, known, len(ACTIONS), observers_x=x[:n], observers_y=y[:n], grid=grid
    ).numpy()
    images[units.health[:n] <= 0] = 0
    return images


def _numbers(names: Mapping[int, str]) -> dict[int, int]:
    """The game's numbers of types to ours."""
    for name in names.values():
        if name not in UNIT_TYPES:
            raise ValueError(f"unit_types has {name!r}; expected one of {', '.join(UNIT_TYPES)}")
    return {int(number): UNIT_TYPES.index(name) for number, name in names.items()}


def _smac(env: Any) -> Any:
    inner = env
    while inner is not None and not isinstance(getattr(inner, "agents", None), Mapping):
        inner = getattr(inner, "env", None)
    if inner is None:
        raise ValueError(f"a {type(env).__name__} has no dictionary of agents; give a SMAC or SMACv2 environment")
    if not inner.agents:
        raise ValueError("the SMAC environment has no agents yet; call its reset first")
    return inner


def _units(agents: Sequence[tuple[int, Any]], others: Iterable[tuple[int, Any]], numbers: Mapping[int, int]) -> Units:
    """The arrays of agents, (tag, unit or None), and others, (team, unit)."""
    rows = [(0, tag, unit) for tag, unit in agents] + [(team, unit.tag, unit) for team, unit in others]
    team = np.array([row[0] for row in rows], dtype=np.int64)
    kind = np.array([0 if unit is None else numbers.get(unit.unit_type, -1) for *_, unit in rows], dtype=np.int64)
    tags = np.array([row[1] for row in rows], dtype=np.uint64)
    stats = np.zeros((6, len(rows)), dtype=np.float32)
    for i, (_, _, unit) in enumerate(rows):
        if unit is not None:
            stats[:, i] = unit.pos.x, unit.pos.y, unit.health, unit.energy, unit.weapon_cooldown, unit.shield
    x, y, health, energy, cooldown, shield = stats
    return Units(team, kind, x, y, health, energy, cooldown, shield, tags, len(agents))


def import_pysc2() -> Any:
    """The module ``pysc2.env.sc2_env``, made to work where pysc2 4.0.0 by itself does not.

    SMAC imports pysc2 too: where ``import smac`` fails, call this before it.

    Two things break from Python 3.11 and protobuf 4 on. ``pysc2.lib.colors`` gives ``random.shuffle`` a second argument,
    gone since Python 3.11; it gets it while it is imported. And the classes in s2clientprotocol were generated for
    protobuf 3, which later releases refuse. They are built anew from the descriptions in the same files. Others' ways
    have a price for everything else in the process or the environment: protobuf 3.20 shuts out present tensorboards,
    and like PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python it reads every message in plain Python, some 40 times slower;
    the package pys2clientprotocol takes the place of one that pysc2 requires. Where such a way was taken already,
    nothing is built.

    Raises:
        gymnasium.error.DependencyNotInstalled: pysc2 or what it needs is not installed.
    """
    try:
        # pygame greets on import, and what pysc2 makes videos with imports what scipy will drop.
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(), _random_shuffle():
            warnings.simplefilter("ignore")
            _import_protocol()
            for name in ("pysc2.maps", "pysc2.run_configs", "pysc2.lib.protocol", "pysc2.lib.remote_controller"):
                importlib.import_module(name)
            sc2_env = importlib.import_module("pysc2.env.sc2_env")
            flags = importlib.import_module("absl.flags").FLAGS
    except ModuleNotFoundError as error:
        raise gym.error.DependencyNotInstalled(
            f"StarCraft II needs pysc2, and the module {error.name!r} is not installed: "
            "run pip install '.[starcraft]' in the checkout"
        ) from None
    if not flags.is_parsed():
        flags.mark_as_parsed()  # pysc2 reads its command line options, of which there are none here
    return sc2_env


def _import_protocol() -> Any:
    """The module ``s2clientprotocol.sc2api_pb2``."""
    try:
        return importlib.import_module("s2clientprotocol.sc2api_pb2")
    except TypeError as error:  # only protobuf's refusal is one
        if "Descriptors cannot" not in str(error):
            raise
    _rebuild_protocol()
    return importlib.import_module("s2clientprotocol.sc2api_pb2")


def _rebuild_protocol() -> None:
    """Build the modules of s2clientprotocol from the serialized descriptions in their source."""
    builder = importlib.import_module("google.protobuf.internal.builder")
    pool = importlib.import_module("google.protobuf.descriptor_pool").Default()
    description = importlib.import_module("google.protobuf.descriptor_pb2").FileDescriptorProto
    package = importlib.import_module("s2clientprotocol")
    found = {}
    for path in pathlib.Path(package.__path__[0]).glob("*_pb2.py"):
        serialized = _serialized(path.read_text(encoding="utf-8"))
        found[description.FromString(serialized).name] = path.stem, serialized

    def build(file: str) -> None:
        name, serialized = found.pop(file)
        for needed in description.FromString(serialized).dependency:
            if needed in found:
                build(needed)
        full = f"s2clientprotocol.{name}"
        spec = importlib.util.find_spec(full)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        vars(module)["DESCRIPTOR"] = descriptor = pool.AddSerializedFile(serialized)
        builder.BuildMessageAndEnumDescriptors(descriptor, vars(module))
        builder.BuildTopDescriptorsAndMessages(descriptor, full, vars(module))
        sys.modules[full] = module
        setattr(package, name, module)

    while found:
        build(next(iter(found)))


def _serialized(source: str) -> bytes:
    """The bytes given as ``serialized_pb`` in a generated file, there as text in latin-1 or as bytes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg == "serialized_pb":
            for leaf in ast.walk(node.value):
                if isinstance(leaf, ast.Constant) and isinstance(leaf.value, (str, bytes)):
                    return leaf.value if isinstance(leaf.value, bytes) else leaf.value.encode("latin-1")
    raise ImportError("a file of s2clientprotocol has no description in it; reinstall s2clientprotocol")


@contextlib.contextmanager
def _random_shuffle() -> Iterator[None]:
    """``random.shuffle`` with its old second argument, the source of numbers from 0 to 1."""
    module = importlib.import_module("random")
    shuffle = module.shuffle

    def with_source(items: Any, source: Any = None) -> None:
        if source is None:
            shuffle(items)
            return
        for i in range(len(items) - 1, 0, -1):
            j = int(source() * (i + 1))
            items[i], items[j] = items[j], items[i]

    vars(module)["shuffle"] = with_source
    try:
        yield
    finally:
        vars(module)["shuffle"] = shuffle


class StarCraft2(gym.Env[Any, Any]):
    """A map of StarCraft II, played through pysc2: each of the player's units of the nine types is an agent.

    pysc2 has no scenarios of SMAC's kind, but the mini-games of Vinyals et al. 2017. The default is the one of two
    mixed teams in which all units are of types the views know: nine marines against six zerglings and four banelings,
    5 points for each killed, 1 lost for each marine; a team that is dead is replaced by a new one, with four more
    marines, until two minutes of the game are over or no marine is left. Any other of pysc2's maps can be played; on
    those for two players the opponent is the game's own.

    Observation: Dict of "views" ``(n, 15, I, J)``, "positions" ``(n, 2)`` in map units and "mask" ``(n,)``, n being
    ``max_units``; see ``polar_views``. A unit keeps its place until it is dead. New ones get places never used, then
    those of the longest dead; more than ``max_units`` are seen by the others, and cannot be told what to do.

    Actions of a unit, ``skirmish.ACTIONS``: 0 no-op (it goes on with what it does), 1 stop, 2 to 5 move north, south,
    east, west, 6 attack the nearest visible enemy, going there if needed (medivacs: heal the nearest hurt friend).
    Actions of empty places are not read.

    Reward: what the map's score rose by, or, on maps for two players, 1 for a victory and -1 for a defeat.

    An episode is terminated when the game has a result. Two things truncate it: ``game_loops``, and a mini-game's clock,
    which pysc2 reports as a result like any other; it is the clock if any agent is still alive.

    The game is started by the first reset. It takes a seed only with a new game, so ``reset(seed=...)`` starts it
    again, which takes seconds; resets without a seed do not. With a seed the game is deterministic (docs/protocol.md).

    Info: "game_loop", "score"; at the end on maps for two players "success", also as "is_success". The attribute ``units``
    has all units of the last observation (``Units``).

    Args:
        map_name: one of pysc2's maps.
        max_units: places for agents n.
        step_mul: game loops in a step (22.4 make a second at the speed "faster").
        move: map units a move aims at.
        num_radii: rings of a view.
        num_angles: directions of a view.
        radial_step: map units from ring to ring.
        unit_types: names in ``polar.UNIT_TYPES`` for further numbers of types, such as {110: "hydralisk"} for roaches.
        race: of the player, on maps for two: "random", "protoss", "terran", "zerg".
        opponent: the opponent's race.
        difficulty: of the opponent, as pysc2 names it.
        game_loops: after which an episode is truncated; 0 for none, None for what pysc2 says of the map.
        fog: whether enemies out of sight are hidden.
        version: of the game, such as "4.10"; None for the latest there is.
        render_mode: None; the game draws its own window where it has one.

    Raises:
        gymnasium.error.DependencyNotInstalled: no pysc2, no game, or not this map.
        ValueError: an unknown map, race or difficulty, or a number that makes no sense.
    """

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(
        self,
        map_name: str = "DefeatZerglingsAndBanelings",
        *,
        max_units: int = 16,
        step_mul: int = 8,
        move: float = 2.0,
        num_radii: int = 9,
        num_angles: int = 18,
        radial_step: float = 1.0,
        unit_types: Mapping[int, str] | None = None,
        race: str = "random",
        opponent: str = "random",
        difficulty: str = "very_easy",
        game_loops: int | None = None,
        fog: bool = True,
        version: str | None = None,
        render_mode: str | None = None,
    ):
        if max_units < 1 or step_mul < 1 or move <= 0 or (game_loops or 0) < 0:
            raise ValueError(
                f"max_units={max_units}, step_mul={step_mul}, move={move}, game_loops={game_loops}; give at least 1, 1, "
                "more than 0, and 0 or more"
            )
        if num_radii < 1 or num_angles < 1 or radial_step <= 0:
            raise ValueError(f"a view of {num_radii} x {num_angles} pixels, rings {radial_step} apart, shows nothing")
        if render_mode is not None:
            raise ValueError(f"render_mode is {render_mode!r}; this environment offers None")
        self.render_mode = None
        self.max_units, self.step_mul, self.move, self.game_loops, self.fog = max_units, step_mul, move, game_loops, fog
        self.grid = PolarGrid(num_radii, num_angles, radial_step)
        self.unit_types = UNIT_TYPE_IDS | {int(number): name for number, name in (unit_types or {}).items()}
        _numbers(self.unit_types)
        self._sc2 = sc2 = import_pysc2()
        self._protocol = _import_protocol()
        self._races = [_member(sc2.Race, name, "race") for name in (race, opponent)]
        self._difficulty = _member(sc2.Difficulty, difficulty, "difficulty")
        self.map_name, self.version = map_name, version
        self._single_player = self._find_map().players == 1
        n = max_units
        # Stats over their divisors pass 1 for other types (a hive's health is 12.5); no map is larger than 256.
        views = Box(0.0, 64.0, (n, CHANNELS, num_radii, num_angles), np.float32)
        positions = Box(0.0, 256.0, (n, 2), np.float32)
        self.observation_space = Dict({"views": views, "positions": positions, "mask": MultiBinary(n)})
        self.action_space = MultiDiscrete([len(ACTIONS)] * n)
        self._game: Any = None
        self._ended = True

    def _find_map(self) -> Any:
        """The map's entry in pysc2, once the game's folder and the map in it have been found."""
        sc2 = self._sc2
        known = sc2.maps.get_maps()
        if self.map_name not in known:
            games = ", ".join(sorted(name for name, entry in known.items() if entry.players == 1))
            raise ValueError(f"pysc2 has no map {self.map_name!r}; its mini-games are {games}")
        game_map = sc2.maps.get(self.map_name)
        try:
            config = sc2.run_configs.get(version=self.version)
        except (OSError, importlib.import_module("pysc2.lib.sc_process").SC2LaunchError) as error:
            raise gym.error.DependencyNotInstalled(
                f"StarCraft II is not installed ({_line(error)}): download it from "
                "https://github.com/Blizzard/s2client-proto#downloads and unpack it to ~/StarCraftII, or set SC2PATH to its "
                "folder; worldmodels/Skirmish-v0 needs no game"
            ) from None
        except ValueError as error:
            raise ValueError(_line(error)) from None
        try:
            game_map.data(config)
        except (ValueError, OSError) as error:
            raise gym.error.DependencyNotInstalled(
                f"{_line(error)} Get the map from {game_map.download} and put it there as {game_map.path}"
            ) from None
        return game_map

    def _start(self, seed: int | None) -> None:
        """Start the game and create the first episode in it."""
        sc2 = self._sc2
        players = [sc2.Agent(self._races[0], "worldmodels")]
        if not self._single_player:
            players.append(sc2.Bot(self._races[1], self._difficulty))
        with self._failures():
            # With InterfaceOptions pysc2 hands over the game's own messages and takes the game's own actions.
            self._game = sc2.SC2Env(
                map_name=self.map_name,
                players=players,
                agent_interface_format=self._protocol.InterfaceOptions(raw=True, score=True),
                step_mul=self.step_mul,
                game_steps_per_episode=self.game_loops,
                random_seed=None if seed is None else seed % 2**32,
                disable_fog=not self.fog,
                version=self.version,
            )
        start = self._game.game_info[0].start_raw
        self._height = terrain_height(start)
        area = start.playable_area
        self._low = np.array([area.p0.x, area.p0.y], dtype=np.float32)
        self._high = np.array([area.p1.x, area.p1.y], dtype=np.float32)
        if (self._high <= self._low).any():
            self._high = np.array(self._height.shape, dtype=np.float32)

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """One line where the game does not start or stops answering; the next reset starts it again."""
        errors = [("protocol", "ConnectionError"), ("protocol", "ProtocolError"), ("sc_process", "SC2LaunchError")]
        errors += [("remote_controller", "ConnectError"), ("remote_controller", "RequestError")]
        kinds = tuple(getattr(importlib.import_module(f"pysc2.lib.{module}"), name) for module, name in errors)
        try:
            yield
        except kinds as error:
            self.close()
            raise gym.error.Error(f"StarCraft II failed, and the next reset starts it again: {_line(error)}") from None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Start the next episode; with a seed, or the first time, the game itself."""
        super().reset(seed=seed)
        if options:
            raise ValueError(f"unknown reset option {sorted(options)[0]!r}; this environment takes none")
        if seed is not None:
            self.close()
        if self._game is None:
            self._start(seed)
        with self._failures():
            (step,) = self._game.reset()
        self._tags = np.zeros(self.max_units, dtype=np.uint64)
        self._seen = np.full(self.max_units, -1)  # the last step in which each place's unit was alive
        self._steps = 0
        self._ended = False
        return self._observe(step.observation), self._info(step.observation)

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """Give the units their commands, and let the game go on by ``step_mul`` loops."""
        if self._ended:
            raise gym.error.ResetNeeded("step was called before reset, or after the episode's end; call reset first")
        action = np.asarray(action)
        if action.dtype.kind not in "iu" or not self.action_space.contains(action.astype(self.action_space.dtype)):
            raise ValueError(f"the action is {action.tolist()}; expected {self.max_units} numbers below {len(ACTIONS)}")
        commands = [self._protocol.Action(action_raw={"unit_command": command}) for command in self._commands(action)]
        with self._failures():
            (step,) = self._game.step([commands])
        self._steps += 1
        observation, info = self._observe(step.observation), self._info(step.observation)
        self._ended = bool(step.last())
        result = self._ended and step.discount == 0
        if result and not self._single_player:
            info["success"] = info["is_success"] = bool(step.reward > 0)
        terminated = result and not (self._single_player and bool(observation["mask"].any()))
        return observation, float(step.reward), terminated, self._ended and not terminated, info

    def close(self) -> None:
        """End the game."""
        game, self._game, self._ended = self._game, None, True
        if game is not None:
            game.close()

    def _observe(self, message: Any) -> dict[str, np.ndarray]:
        own = [unit for unit in message.observation.raw_data.units if unit.alliance == _SELF and unit.health > 0]
        self._hurt = np.array([unit.tag for unit in own if unit.health < unit.health_max], dtype=np.uint64)
        living = np.array([unit.tag for unit in own], dtype=np.uint64)
        found = units_from_observation(message, unit_types=self.unit_types)
        for tag in found.tag[: found.num_agents]:
            empty = ~np.isin(self._tags, living)
            if tag not in self._tags and empty.any():
                self._tags[np.where(empty, self._seen, self._steps + 1).argmin()] = tag
        self._seen[np.isin(self._tags, living)] = self._steps
        self.units = units_from_observation(message, unit_types=self.unit_types, agents=self._tags.tolist())
        return polar_views(self.units, self._height, grid=self.grid)

    def _info(self, message: Any) -> dict[str, Any]:
        return {"game_loop": int(message.observation.game_loop), "score": float(message.observation.score.score)}

    def _commands(self, action: np.ndarray) -> Iterator[dict[str, Any]]:
        """The agents' actions as fields of ``ActionRawUnitCommand``."""
        units = self.units
        for place, choice in zip(range(self.max_units), action.tolist(), strict=True):
            if units.health[place] <= 0 or choice == NO_OP:
                continue
            command = {"unit_tags": [int(units.tag[place])]}
            if choice == STOP:
                yield command | {"ability_id": _STOP}
            elif choice in _DIRECTIONS:
                here = np.array([units.x[place], units.y[place]])
                there = np.clip(here + self.move * np.array(_DIRECTIONS[choice]), self._low, self._high)
                yield command | {
                    "ability_id": _MOVE,
                    "target_world_space_pos": {"x": float(there[0]), "y": float(there[1])},
                }
            elif (target := self._target(place)) is not None:
                heals = units.type[place] == _MEDIVAC
                yield command | {"ability_id": _HEAL if heals else _ATTACK, "target_unit_tag": target}

    def _target(self, place: int) -> int | None:
        """The tag of the nearest enemy, or of the nearest friend a medivac can heal."""
        units = self.units
        wanted = (units.team == 1) & (units.health > 0)
        if units.type[place] == _MEDIVAC:
            wanted = np.isin(units.tag, self._hurt) & (units.type != _MEDIVAC)
        if not wanted.any():
            return None
        distance = (units.x - units.x[place]) ** 2 + (units.y - units.y[place]) ** 2
        return int(units.tag[np.where(wanted, distance, np.inf).argmin()])


def _member(kinds: Any, name: str, what: str) -> Any:
    """An entry of one of pysc2's enumerations by its name."""
    known = [kind.name for kind in kinds]
    if name not in known:
        raise ValueError(f"{what} is {name!r}; expected one of {', '.join(known)}")
    return kinds[name]


def _line(error: BaseException) -> str:
    """What an exception says, in one line."""
    return " ".join(str(error).split())
