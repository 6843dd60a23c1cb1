"""Views from the game's messages and from SMAC, on real messages where s2clientprotocol is installed; the error lines."""

import importlib
import subprocess
import sys
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest

from worldmodels.envs import starcraft
from worldmodels.envs.polar import CHANNELS, UNIT_TYPES, Divisors, PolarGrid
from worldmodels.envs.skirmish import ACTIONS, COLUMNS

SELF, ALLY, NEUTRAL, ENEMY = 1, 2, 3, 4
FRIENDLY, TYPES, HEALTH, ENERGY, COOLDOWN, SHIELD, HEIGHT = 0, 1, 10, 11, 12, 13, 14
GRID = PolarGrid(num_radii=9, num_angles=16, radial_step=1.0)  # directions 22.5 degrees apart
FLAT = np.zeros((32, 32), dtype=np.float32)


def channel(name):
    return TYPES + UNIT_TYPES.index(name)


class Plain:
    """Messages as bare objects with the attributes that are read."""

    defaults = dict(display_type=1, health=1.0, health_max=1.0, shield=0.0, energy=0.0, weapon_cooldown=0.0, owner=0)

    def unit(self, tag, kind, x, y, alliance=SELF, **fields):
        stats = {**self.defaults, **fields}
        return SimpleNamespace(tag=tag, unit_type=kind, pos=SimpleNamespace(x=x, y=y), alliance=alliance, **stats)

    def observation(self, *units):
        raw = SimpleNamespace(units=list(units))
        return SimpleNamespace(observation=SimpleNamespace(raw_data=raw))

    def start_raw(self, width, height, heights, pathing_bits):
        def size(x, y):
            return SimpleNamespace(x=x, y=y)

        terrain = SimpleNamespace(bits_per_pixel=8 if heights else 0, size=size(width, height), data=heights)
        pathing = SimpleNamespace(bits_per_pixel=pathing_bits)
        return SimpleNamespace(terrain_height=terrain, pathing_grid=pathing, map_size=size(width, height))


class Protocol:
    """The game's own messages, through bytes and back."""

    def __init__(self):
        self.api = starcraft._import_protocol()
        self.raw = importlib.import_module("s2clientprotocol.raw_pb2")

    def unit(self, tag, kind, x, y, alliance=SELF, **fields):
        made = self.raw.Unit(
            tag=tag, unit_type=kind, pos={"x": x, "y": y, "z": 10.0}, alliance=alliance, **{"health": 1.0, **fields}
        )
        return self.raw.Unit.FromString(made.SerializeToString())

    def observation(self, *units):
        made = self.api.ResponseObservation()
        made.observation.game_loop = 8
        made.observation.raw_data.units.extend(units)
        return self.api.ResponseObservation.FromString(made.SerializeToString())

    def start_raw(self, width, height, heights, pathing_bits):
        size = {"x": width, "y": height}
        made = self.raw.StartRaw(map_size=size, pathing_grid={"bits_per_pixel": pathing_bits, "size": size})
        if heights:
            made.terrain_height.bits_per_pixel = 8
            made.terrain_height.size.x, made.terrain_height.size.y = width, height
            made.terrain_height.data = heights
        return self.raw.StartRaw.FromString(made.SerializeToString())


@pytest.fixture(params=["plain", "protocol"])
def messages(request):
    if request.param == "plain":
        return Plain()
    pytest.importorskip("s2clientprotocol", reason="needs the messages: pip install pys2clientprotocol")
    return Protocol()


def lit(image):
    """The pixels in which anything but the ground is drawn."""
    return sorted({(int(i), int(j)) for _, i, j in np.argwhere(image[:HEIGHT])})


def battle(messages):
    """A stalker and a zealot of ours against a stalker north-east of the first, and what must not be drawn."""
    return messages.observation(
        messages.unit(7, 73, 10.0, 12.0, health=100.0, shield=30.0),
        messages.unit(5, 74, 10.0, 10.0, health=80.0, shield=40.0, weapon_cooldown=15.0),
        messages.unit(21, 74, 12.0, 12.0, ENEMY, health=60.0, shield=75.0),
        messages.unit(22, 105, 19.0, 10.0, ENEMY, health=35.0),  # nine rings from the stalker: out of view
        messages.unit(23, 105, 11.0, 10.0, ENEMY, health=0.0),  # dead
        messages.unit(24, 105, 9.0, 10.0, ENEMY, health=35.0, display_type=2),  # a memory of one
        messages.unit(25, 341, 10.0, 9.0, NEUTRAL, health=500.0),  # a mineral field
    )


def test_units_of_an_observation(messages):
    observation = battle(messages)
    units = starcraft.units_from_observation(observation)
    assert units.tag.tolist() == [5, 7, 21, 22] and units.num_agents == 2  # agents by tag, the others as they come
    assert units.team.tolist() == [0, 0, 1, 1]
    assert [UNIT_TYPES[kind] for kind in units.type] == ["stalker", "zealot", "stalker", "zergling"]
    assert units.x.tolist() == [10, 10, 12, 19] and units.y.tolist() == [10, 12, 12, 10]
    assert units.health.tolist() == [80, 100, 60, 35] and units.shield.tolist() == [40, 30, 75, 0]
    assert units.cooldown.tolist() == [15, 0, 0, 0]  # the game does not tell the enemies'
    assert units.energy.tolist() == [0, 0, 0, 0]
    assert units.table.shape == (4, len(COLUMNS)) and units.table.dtype == np.float32
    assert units.table[0].tolist() == [0, 3, 10, 10, 80, 0, 15, 40]
    for part in (observation.observation, observation.observation.raw_data):
        again = starcraft.units_from_observation(part)
        assert all(np.array_equal(one, other) for one, other in zip(units, again, strict=True))


def test_a_view_worked_out_by_hand(messages):
    views = starcraft.polar_views(starcraft.units_from_observation(battle(messages)), FLAT, grid=GRID)
    stalker, zealot = views["views"]
    assert views["views"].shape == (2, CHANNELS, 9, 16) and views["views"].dtype == np.float32
    assert views["positions"].tolist() == [[10, 10], [10, 12]] and views["mask"].tolist() == [1, 1]
    # Seen from (10, 10): itself at (0, 0); (10, 12) is 2 away at 90 degrees, 90 / 22.5 = 4; (12, 12) is 2.83 away, so in
    # ring 3, at 45 degrees, 45 / 22.5 = 2; (19, 10) is 9 away, the rings are 0 to 8.
    assert lit(stalker) == [(0, 0), (2, 4), (3, 2)]
    own = np.zeros(CHANNELS)
    own[[FRIENDLY, channel("stalker"), HEALTH, COOLDOWN, SHIELD]] = 1, 1, 80 / 200, 15 / 30, 40 / 150
    assert np.allclose(stalker[:, 0, 0], own)
    friend = np.zeros(CHANNELS)
    friend[[FRIENDLY, channel("zealot"), HEALTH, SHIELD]] = 1, 1, 100 / 200, 30 / 150
    assert np.allclose(stalker[:, 2, 4], friend)
    enemy = np.zeros(CHANNELS)
    enemy[[channel("stalker"), HEALTH, SHIELD]] = 1, 60 / 200, 75 / 150
    assert np.allclose(stalker[:, 3, 2], enemy)
    # From (10, 12): the stalker is 2 away at 270 degrees, 270 / 22.5 = 12; the enemy 2 away at 0; (19, 10) is 9.2 away.
    assert lit(zealot) == [(0, 0), (2, 0), (2, 12)]
    halves = starcraft.polar_views(
        starcraft.units_from_observation(battle(messages)), FLAT, grid=GRID, divisors=Divisors(400, 400, 60, 300)
    )
    assert np.allclose(halves["views"][:, HEALTH:HEIGHT] * 2, views["views"][:, HEALTH:HEIGHT])


def test_the_ground_in_a_view(messages):
    height = np.zeros((32, 32), dtype=np.float64)
    height[12, 10] = 0.5  # two squares east of the stalker
    height[10, 14] = 0.25  # two north of the zealot
    views = starcraft.polar_views(starcraft.units_from_observation(battle(messages)), height, grid=GRID)["views"]
    assert views[0, HEIGHT, 2, 0] == 0.5 and views[0, HEIGHT, 0].max() == 0
    assert views[1, HEIGHT, 2, 4] == 0.25 and views[1, HEIGHT, 0].max() == 0


def test_agents_in_a_fixed_order(messages):
    units = starcraft.units_from_observation(battle(messages), agents=[7, 6, 5, 0])
    assert units.num_agents == 4 and units.tag.tolist() == [7, 6, 5, 0, 21, 22]
    assert units.table[1].tolist() == units.table[3].tolist() == [0] * len(COLUMNS)
    views = starcraft.polar_views(units, FLAT + 1, grid=GRID)
    assert views["mask"].tolist() == [1, 0, 1, 0]
    assert not views["views"][[1, 3]].any() and not views["positions"][[1, 3]].any()
    usual = starcraft.polar_views(starcraft.units_from_observation(battle(messages)), FLAT + 1, grid=GRID)
    assert np.array_equal(views["views"][[2, 0]], usual["views"])
    # A unit of ours that is no agent is seen all the same.
    alone = starcraft.polar_views(starcraft.units_from_observation(battle(messages), agents=[5]), FLAT + 1, grid=GRID)
    assert np.array_equal(alone["views"], usual["views"][:1])


def test_units_of_other_types_have_none(messages):
    observation = messages.observation(
        messages.unit(1, 48, 5.0, 5.0, health=45.0),
        messages.unit(2, 45, 5.0, 7.0, health=45.0),  # an SCV: ours, but no agent
        messages.unit(3, 110, 7.0, 5.0, ENEMY, health=145.0),  # a roach
        messages.unit(4, 48, 3.0, 5.0, ALLY, health=45.0),  # another player's
    )
    units = starcraft.units_from_observation(observation)
    assert units.num_agents == 1 and units.type.tolist() == [0, -1, -1, 0] and units.team.tolist() == [0, 0, 1, 0]
    (view,) = starcraft.polar_views(units, FLAT, grid=GRID)["views"]
    assert lit(view) == [(0, 0), (2, 0), (2, 4), (2, 8)]
    assert not view[TYPES:HEALTH, 2, 0].any() and view[FRIENDLY, 2, 0] == 0 and view[HEALTH, 2, 0] == np.float32(0.725)
    assert not view[TYPES:HEALTH, 2, 4].any() and view[FRIENDLY, 2, 4] == 1
    assert view[channel("marine"), 2, 8] == 1 and view[FRIENDLY, 2, 8] == 1
    told = starcraft.units_from_observation(observation, agents=[2, 3])  # only the player's can be agents
    assert told.type.tolist() == [-1, 0, 0, -1, 0] and told.health.tolist() == [45, 0, 45, 145, 45]
    named = starcraft.units_from_observation(observation, unit_types={110: "hydralisk", 48: "marine"})
    (view,) = starcraft.polar_views(named, FLAT, grid=GRID)["views"]
    assert view[channel("hydralisk"), 2, 0] == 1


def test_nobody_at_all(messages):
    units = starcraft.units_from_observation(messages.observation())
    assert units.num_agents == 0 and units.table.shape == (0, len(COLUMNS))
    views = starcraft.polar_views(units, FLAT, grid=GRID)
    assert views["views"].shape == (0, CHANNELS, 9, 16) and views["mask"].shape == (0,)
    absent = starcraft.polar_views(starcraft.units_from_observation(messages.observation(), agents=[1, 2]), FLAT)
    assert absent["views"].shape == (2, CHANNELS, 9, 18) and not absent["views"].any() and not absent["mask"].any()


def test_the_height_of_the_ground(messages):
    heights = bytes([0, 51, 102, 153, 204, 255])  # two rows of three, from the lowest
    found = starcraft.terrain_height(messages.start_raw(3, 2, heights, pathing_bits=1))
    assert found.dtype == np.float32 and np.allclose(found, [[0, 0.6], [0.2, 0.8], [0.4, 1.0]])  # [x, y]
    before = starcraft.terrain_height(messages.start_raw(3, 2, heights, pathing_bits=8))  # from the highest
    assert np.allclose(before, found[:, ::-1])
    told = starcraft.terrain_height(messages.start_raw(3, 2, heights, pathing_bits=8), upside_down=False)
    assert np.array_equal(told, found)
    assert starcraft.terrain_height(messages.start_raw(3, 2, b"", pathing_bits=1)).tolist() == [[0, 0]] * 3
    with pytest.raises(ValueError, match="5 bytes of 8 bits a pixel for 3 x 2"):
        starcraft.terrain_height(messages.start_raw(3, 2, heights[:5], pathing_bits=1))


class Smac:
    """What SMAC's StarCraft2Env shows after a few steps of 1c3s5z, cut short: two of three agents alive."""

    def __init__(self, messages, first=1936):
        self.colossus_id, self.stalker_id, self.zealot_id = first, first + 1, first + 2
        self.marine_id = self.marauder_id = self.medivac_id = self.hydralisk_id = 0
        self.zergling_id = self.baneling_id = 0
        self.n_agents, self.n_enemies, self.n_actions_no_attack = 3, 2, 6
        self.agents = {
            0: messages.unit(11, first, 8.0, 16.0, health=200.0, shield=75.0, weapon_cooldown=12.0, owner=1),
            1: messages.unit(12, first + 1, 9.0, 16.0, health=0.0, owner=1),  # it fell here
            2: messages.unit(13, first + 2, 8.0, 14.0, health=50.0, owner=1),
        }
        self.enemies = {
            0: messages.unit(31, 73, 11.0, 16.0, ENEMY, health=20.0, owner=2),
            1: messages.unit(32, 4, 8.0, 17.0, ENEMY, health=0.0, owner=2),
        }
        self.terrain_height = np.full((32, 32), 0.5)
        self.last_action = np.zeros((3, 8))

    def get_unit_by_id(self, i):
        return self.agents[i]


def test_smac(messages):
    env = Smac(messages)
    units = starcraft.units_from_smac(env)
    assert units.num_agents == 3 and units.tag.tolist() == [11, 12, 13, 31]
    assert [UNIT_TYPES[kind] for kind in units.type[[0, 2, 3]]] == ["colossus", "zealot", "zealot"]
    views = starcraft.polar_views(units, env.terrain_height, grid=GRID)
    assert views["mask"].tolist() == [1, 0, 1]
    assert views["positions"].tolist() == [[8, 16], [0, 0], [8, 14]]
    assert not views["views"][1].any()
    # From the colossus at (8, 16): itself; the zealot 2 away at 270 degrees, 270 / 22.5 = 12; the enemy 3 to the east. The
    # dead beside them are not drawn.
    colossus = views["views"][0]
    assert lit(colossus) == [(0, 0), (2, 12), (3, 0)]
    own = np.zeros(CHANNELS)
    own[[FRIENDLY, channel("colossus"), HEALTH, COOLDOWN, SHIELD, HEIGHT]] = 1, 1, 1, 12 / 30, 75 / 150, 0.5
    assert np.allclose(colossus[:, 0, 0], own)
    enemy = np.zeros(CHANNELS)
    enemy[[channel("zealot"), HEALTH, HEIGHT]] = 1, 20 / 200, 0.5
    assert np.allclose(colossus[:, 3, 0], enemy)
    wrapped = starcraft.units_from_smac(SimpleNamespace(env=SimpleNamespace(env=env), agents=["agent_0"]))
    assert np.array_equal(wrapped.table, units.table)


def test_smacs_second_version_names_types_in_a_table(messages):
    env = Smac(messages)
    env.zealot_id = 1950  # as its maps of marines have it: the number and the table differ
    env.id_to_unit_name_map = {1938: "zealot", 1999: "ghost"}
    kinds = starcraft.units_from_smac(env).type
    assert [UNIT_TYPES[kind] for kind in kinds[[0, 2]]] == ["colossus", "zealot"]


def test_smacs_actions(messages):
    env = Smac(messages)
    assert starcraft.actions_from_smac(env).tolist() == [0, 0, 0]  # before the first step
    env.last_action = np.eye(8)[[7, 0, 3]]  # attack the second enemy, no-op, south
    actions = starcraft.actions_from_smac(env)
    assert [ACTIONS[action] for action in actions] == ["attack", "no-op", "south"]
    images = starcraft.polar_actions(starcraft.units_from_smac(env), actions, grid=GRID)
    assert images.shape == (3, len(ACTIONS) + 1, 9, 16) and images.dtype == np.float32
    colossus = images[0]
    assert (colossus.sum(0) == 1).all() and not images[1].any()
    seen = {(0, 0): "attack", (2, 12): "south", (3, 0): "unknown"}
    for (i, j), name in seen.items():
        assert colossus[:, i, j].argmax() == [*ACTIONS, "unknown"].index(name)
    assert colossus[0].sum() == 9 * 16 - len(seen)  # no-op where nobody is
    # SMACv2 with a limited field of view has turns between the moves and the attacks.
    env.n_actions_no_attack, env.last_action = 18, np.eye(20)[[6, 17, 18]]
    assert starcraft.actions_from_smac(env).tolist() == [len(ACTIONS), len(ACTIONS), ACTIONS.index("attack")]
    images = starcraft.polar_actions(starcraft.units_from_smac(env), starcraft.actions_from_smac(env), grid=GRID)
    assert images[0, len(ACTIONS), 0, 0] == 1 and images[0, ACTIONS.index("attack"), 2, 12] == 1


def test_healing_is_an_attack(messages):
    env = Smac(messages)
    env.medivac_id, env.zealot_id = env.zealot_id, 0
    env.last_action = np.eye(8)[[0, 0, 6]]  # the medivac heals agent 0
    env.agents[2] = messages.unit(13, env.medivac_id, 8.0, 14.0, health=150.0, energy=50.0)
    units = starcraft.units_from_smac(env)
    assert UNIT_TYPES[units.type[2]] == "medivac" and units.energy.tolist() == [0, 0, 50, 0]
    assert ACTIONS[starcraft.actions_from_smac(env)[2]] == "attack"
    view = starcraft.polar_views(units, FLAT, grid=GRID)["views"][2]
    assert view[ENERGY, 0, 0] == 50 / 200


def test_what_is_refused(messages):
    units = starcraft.units_from_observation(battle(messages))
    with pytest.raises(ValueError, match=r"shape \(3,\); expected \(2,\)"):
        starcraft.polar_actions(units, np.zeros(3, dtype=int))
    with pytest.raises(ValueError, match="unit_types has 'roach'; expected one of marine"):
        starcraft.units_from_observation(battle(messages), unit_types={110: "roach"})
    with pytest.raises(ValueError, match="has no raw units; give a ResponseObservation"):
        starcraft.units_from_observation(SimpleNamespace(observation=SimpleNamespace()))
    with pytest.raises(ValueError, match="a SimpleNamespace has no dictionary of agents; give a SMAC"):
        starcraft.units_from_smac(SimpleNamespace(env=SimpleNamespace()))
    env = Smac(messages)
    env.agents = {}
    with pytest.raises(ValueError, match="call its reset first"):
        starcraft.units_from_smac(env)


def test_files_generated_for_an_old_protobuf_are_built_anew(tmp_path):
    """A copy of s2clientprotocol as protobuf 3.6 wrote it, which protobuf refuses."""
    pytest.importorskip("s2clientprotocol", reason="needs the messages: pip install pys2clientprotocol")
    starcraft._import_protocol()
    package = tmp_path / "s2clientprotocol"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for name in "common data debug error query raw sc2api score spatial ui".split():
        described = importlib.import_module(f"s2clientprotocol.{name}_pb2").DESCRIPTOR
        lines = ["from google.protobuf import descriptor as d", "_b = lambda x: x.encode('latin1')"]
        for needed in described.dependencies:
            lines.append(f"import {needed.name.replace('/', '.').removesuffix('.proto')}_pb2")
        lines.append(f"DESCRIPTOR = d.FileDescriptor(name={described.name!r}, package={described.package!r},")
        lines.append(f"  serialized_pb=_b({described.serialized_pb.decode('latin1')!r}))")
        fields = "message_type=None, enum_type=None, containing_type=None, is_extension=False, extension_scope=None"
        kind = "type=5, cpp_type=1, label=1, has_default_value=False, default_value=0"
        lines.append(f"d.FieldDescriptor(name='x', full_name='m.x', index=0, number=1, {kind}, {fields})")
        (package / f"{name}_pb2.py").write_text("\n".join(lines))
    code = """
import sys
sys.path.insert(0, sys.argv[1])
from worldmodels.envs import starcraft
try:
    import s2clientprotocol.sc2api_pb2
except TypeError as error:
    print("refused" if "Descriptors cannot be created directly" in str(error) else error)
api = starcraft._import_protocol()
from s2clientprotocol import raw_pb2, sc2api_pb2
assert api is sc2api_pb2 is starcraft._import_protocol()
message = api.ResponseObservation()
message.observation.raw_data.units.append(raw_pb2.Unit(tag=9, unit_type=48, alliance=raw_pb2.Self, health=5))
message = api.ResponseObservation.FromString(message.SerializeToString())
print(starcraft.units_from_observation(message).tag, api.__file__)
"""
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["refused", "[9]", str(package / "sc2api_pb2.py")]


def test_random_is_as_before_after_pysc2s_shuffle():
    import random

    shuffle = random.shuffle
    with starcraft._random_shuffle():
        items = list(range(5))
        random.shuffle(items, lambda: 0.5)  # Python 3.10 gives this
        assert items == [0, 3, 1, 4, 2]
        random.shuffle(items)
        assert sorted(items) == [0, 1, 2, 3, 4]
    assert random.shuffle is shuffle


def test_without_pysc2_one_line_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "pysc2"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pysc2", None)
    with pytest.raises(
        gym.error.DependencyNotInstalled, match=r"run pip install '\.\[starcraft\]' in the checkout$"
    ) as raised:
        starcraft.StarCraft2()
    assert "\n" not in str(raised.value) and "pysc2" in str(raised.value)


def test_numbers_that_make_no_sense_are_refused_first():
    with pytest.raises(ValueError, match="max_units=0"):
        starcraft.StarCraft2(max_units=0)
    with pytest.raises(ValueError, match="shows nothing"):
        starcraft.StarCraft2(num_angles=0)
    with pytest.raises(ValueError, match="render_mode is 'human'"):
        starcraft.StarCraft2(render_mode="human")
    with pytest.raises(ValueError, match="unit_types has 'roach'"):
        starcraft.StarCraft2(unit_types={110: "roach"})


def test_importing_the_module_imports_neither():
    code = "import sys, worldmodels.envs.starcraft; print([m for m in sys.modules if m[:5] in ('pysc2', 's2cli')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_views_are_skirmishs(messages):
    env = gym.make_vec("worldmodels/Skirmish-v0", num_envs=1, scenario="1c2s1z1m")
    env.reset(seed=3)
    for _ in range(4):
        seen, _, _, _, info = env.step(np.full((1, 5), 6))  # all attack the first enemy
    numbers = {name: number for number, name in starcraft.UNIT_TYPE_IDS.items()}
    units = []
    for tag, (team, kind, x, y, health, energy, cooldown, shield) in enumerate(info["units"][0].tolist(), start=1):
        stats = dict(health=health, energy=energy, weapon_cooldown=cooldown, shield=shield)
        units.append(messages.unit(tag, numbers[UNIT_TYPES[int(kind)]], x, y, ENEMY if team else SELF, **stats))
    observation = messages.observation(*reversed(units))
    ours = starcraft.polar_views(
        starcraft.units_from_observation(observation, agents=[1, 2, 3, 4, 5]), env.height.numpy(), grid=env.grid
    )
    assert seen["views"][0, :, COOLDOWN].any() and seen["views"][0, :, SHIELD].any()
    for name, value in ours.items():
        assert np.array_equal(value, seen[name][0].numpy()), name
