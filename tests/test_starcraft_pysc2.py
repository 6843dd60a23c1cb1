"""StarCraft2 on pysc2: on its own mock, and on a game of our own that speaks the protocol in the game's place.

Where pysc2 is not installed, ``pytest -m slow tests/test_starcraft_pysc2.py`` installs it in an environment of its own,
with protobuf as pinned, and runs the other tests there. None of this is StarCraft II: what the real game does differently
is not tested.
"""

import base64
import hashlib
import importlib.util
import os
import socket
import stat
import subprocess
import sys
import venv
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from worldmodels.envs import starcraft
from worldmodels.envs.polar import UNIT_TYPES

ROOT = Path(__file__).parents[1]
MARINE, ZERGLING, BANELING, MEDIVAC = 48, 105, 9, 54
MOVE, ATTACK, STOP, HEAL = 3794, 3674, 3665, 386
NORTH, SOUTH, EAST, WEST, FIGHT = 2, 3, 4, 5, 6
SPEED, REACH, CLOCK = 0.125, 5.0, 240  # map units a loop, map units, loops

LONELY = 99  # the seed of a game with one marine and the baneling alone

needs_pysc2 = pytest.mark.skipif(
    importlib.util.find_spec("pysc2") is None,
    reason="needs pysc2; -m slow installs it in an environment of its own",
)


class Game:
    """A game for one player on a map of 32 x 32: marines and a medivac against a zergling and a baneling.

    Marines in reach of their target do 6 damage every 15 loops; marines next to the baneling die with it; medivacs heal
    half a point a loop. A dead zergling counts 5 points, a dead marine -1. A dead zergling is replaced by a new one and a new
    marine, on Flat32 it is the victory. The mini-game ends after 240 loops and when no marine is left.
    """

    def __init__(self):
        self.api = starcraft._import_protocol()
        self.status = 1
        self.seed, self.map = 0, ""

    def restart(self):
        self.loop, self.score, self.result = 0, 0.0, None
        self.units, self.orders, self.created = {}, {}, 0
        if self.seed == LONELY:
            self.create(1, MARINE, 10.0, 12.0, 45.0)
            self.create(4, BANELING, 10.0, 15.0, 30.0)
            self.status = 3
            return
        self.create(1, MARINE, 10.0, 10.0, 45.0)
        self.create(1, MARINE, 10.0, 12.0, 45.0)
        self.create(1, MEDIVAC, 8.0, 10.0, 150.0)
        self.create(4, ZERGLING, 16.0 + self.seed % 4 / 4, 10.0, 12.0)
        self.create(4, BANELING, 10.0, 15.0, 30.0)
        self.create(3, 341, 20.0, 20.0, 500.0)
        self.units[2]["health"] = 20.0
        self.status = 3

    def create(self, alliance, kind, x, y, health):
        self.created += 1
        stats = dict(health=health, health_max=health, weapon_cooldown=0.0)
        self.units[self.created] = dict(alliance=alliance, unit_type=kind, x=x, y=y, **stats)

    def advance(self):
        self.loop += 1
        for tag, order in list(self.orders.items()):
            unit = self.units.get(tag)
            if unit is None or unit["unit_type"] not in (MARINE, MEDIVAC):
                continue
            unit["weapon_cooldown"] = max(0.0, unit["weapon_cooldown"] - 1)
            target = self.units.get(order.target_unit_tag)
            if order.ability_id == MOVE:
                self.go(unit, order.target_world_space_pos.x, order.target_world_space_pos.y)
            elif order.ability_id == ATTACK and target is not None:
                if np.hypot(target["x"] - unit["x"], target["y"] - unit["y"]) > REACH:
                    self.go(unit, target["x"], target["y"])
                elif unit["weapon_cooldown"] == 0:
                    target["health"] -= 6
                    unit["weapon_cooldown"] = 15.0
            elif order.ability_id == HEAL and target is not None:
                target["health"] = min(target["health"] + 0.5, target["health_max"])
        bangs = [unit for unit in self.units.values() if unit["unit_type"] == BANELING]
        for unit in list(self.units.values()):
            if unit["unit_type"] == MARINE and any(np.hypot(unit["x"] - b["x"], unit["y"] - b["y"]) < 1 for b in bangs):
                unit["health"] = 0
                for baneling in bangs:
                    baneling["health"] = 0
        for tag, unit in list(self.units.items()):
            if unit["health"] <= 0:
                del self.units[tag]
                if unit["unit_type"] == MARINE:
                    self.score -= 1
                if unit["unit_type"] == ZERGLING:
                    self.score += 5
                    self.create(4, ZERGLING, 16.0, 6.0, 12.0)
                    self.create(1, MARINE, 10.0, 6.0, 45.0)
                    if "Flat32" in self.map:
                        self.result = self.api.Victory
        if not any(unit["unit_type"] == MARINE for unit in self.units.values()):
            self.result = self.api.Defeat
        elif self.loop >= CLOCK and "mini_games" in self.map:
            self.result = self.api.Tie
        if self.result is not None:
            self.status = 5

    def go(self, unit, x, y):
        way = np.array([x - unit["x"], y - unit["y"]])
        far = np.hypot(*way)
        if far > 0:
            unit["x"], unit["y"] = np.array([unit["x"], unit["y"]]) + way * min(1, SPEED / far)

    def answer(self, request):
        """The response to a request."""
        kind = request.WhichOneof("request")
        response = self.api.Response(id=request.id)
        getattr(response, kind).SetInParent()
        if kind == "create_game":
            self.seed, self.map, self.status = (
                request.create_game.random_seed,
                request.create_game.local_map.map_path,
                2,
            )
            assert not request.create_game.disable_fog and request.create_game.local_map.map_data
        elif kind == "join_game":
            assert request.join_game.options.raw and request.join_game.options.score
            self.restart()
            response.join_game.player_id = 1
        elif kind == "restart_game":
            self.restart()
        elif kind == "game_info":
            start, size = response.game_info.start_raw, {"x": 32, "y": 32}
            start.map_size.x = start.map_size.y = 32
            start.pathing_grid.bits_per_pixel = 1
            heights = bytes(x + 4 * y for y in range(32) for x in range(32))
            start.terrain_height.MergeFrom(
                type(start.terrain_height)(bits_per_pixel=8, size=size, data=heights),
            )
            start.playable_area.p0.x = start.playable_area.p0.y = 2
            start.playable_area.p1.x = start.playable_area.p1.y = 30
            response.game_info.player_info.add(player_id=1, type=1, race_requested=4)
        elif kind == "action":
            for action in request.action.actions:
                command = action.action_raw.unit_command
                assert len(command.unit_tags) == 1 and not command.queue_command
                self.orders[command.unit_tags[0]] = command
        elif kind == "step":
            for _ in range(request.step.count):
                if self.result is None:
                    self.advance()
        elif kind == "observation":
            observation = response.observation.observation
            observation.game_loop, observation.score.score = self.loop, int(self.score)
            observation.player_common.player_id = 1
            for tag, unit in self.units.items():
                rest = {name: value for name, value in unit.items() if name not in ("x", "y")}
                if unit["alliance"] != 1:
                    del rest["weapon_cooldown"]
                pos = {"x": unit["x"], "y": unit["y"], "z": 10.0}
                observation.raw_data.units.add(tag=tag, display_type=1, pos=pos, **rest)
            if self.result is not None:
                response.observation.player_result.add(player_id=1, result=self.result)
        elif kind == "quit":
            self.status = 6
        response.status = self.status
        return response


def serve(port):
    """Play over a websocket (RFC 6455) at a port of this machine, until told to quit."""
    game = Game()
    listening = socket.create_server(("127.0.0.1", port))
    connection, _ = listening.accept()
    stream = connection.makefile("rwb")
    key = b""
    while (line := stream.readline().strip()) != b"":
        if line.lower().startswith(b"sec-websocket-key:"):
            key = line.split(b":")[1].strip()
    accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()).decode()
    head = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    stream.write(f"{head}Sec-WebSocket-Accept: {accept}\r\n\r\n".encode())
    stream.flush()
    while game.status != 6:
        first = stream.read(2)
        if len(first) < 2 or first[0] & 0x0F == 8:
            break
        size = first[1] & 0x7F
        if size >= 126:
            size = int.from_bytes(stream.read(2 if size == 126 else 8), "big")
        mask = stream.read(4)
        data = bytes(byte ^ mask[i % 4] for i, byte in enumerate(stream.read(size)))
        response = game.answer(game.api.Request.FromString(data)).SerializeToString()
        size = len(response)
        length = bytes([size]) if size < 126 else bytes([126]) + size.to_bytes(2, "big")
        stream.write(b"\x82" + length + response)
        stream.flush()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that looks like the game's, with the game above in it."""
    binary = tmp_path / "Versions" / "Base75689" / "SC2_x64"
    binary.parent.mkdir(parents=True)
    binary.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "$@"\n')
    binary.chmod(binary.stat().st_mode | stat.S_IXUSR)
    for name in ("mini_games/DefeatZerglingsAndBanelings", "mini_games/MoveToBeacon", "Melee/Flat32"):
        path = tmp_path / "Maps" / f"{name}.SC2Map"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"a map")
    monkeypatch.setenv("SC2PATH", str(tmp_path))
    return tmp_path


@pytest.fixture
def make(folder):
    """Makes environments, and closes them."""
    made = []

    def new(**options):
        made.append(starcraft.StarCraft2(**options))
        return made[-1]

    yield new
    for env in made:
        env.close()


@pytest.fixture
def mock(folder, monkeypatch):
    """pysc2's own mock in the place of its environment."""
    sc2_env = starcraft.import_pysc2()
    monkeypatch.setattr(sc2_env, "SC2Env", importlib.import_module("pysc2.env.mock_sc2_env").SC2TestEnv)


def run(env, *actions):
    """Step with the first places' actions, the others doing nothing."""
    return env.step(np.array([*actions, *[0] * (env.max_units - len(actions))]))


@needs_pysc2
def test_pysc2_works_and_the_rest_as_before():
    import random

    shuffle = random.shuffle
    sc2_env = starcraft.import_pysc2()
    assert starcraft.import_pysc2() is sc2_env and random.shuffle is shuffle
    from google.protobuf.internal import api_implementation
    from s2clientprotocol import common_pb2, raw_pb2, sc2api_pb2

    assert api_implementation.Type() == "upb"  # protobuf is as fast as ever
    message = sc2api_pb2.ResponseObservation()
    message.observation.raw_data.units.add(tag=3, unit_type=48, pos=common_pb2.Point(x=1, y=2), health=5, alliance=1)
    again = sc2api_pb2.ResponseObservation.FromString(message.SerializeToString())
    assert again == message and isinstance(again.observation.raw_data.units[0], raw_pb2.Unit)
    assert starcraft.units_from_observation(again).tag.tolist() == [3]
    assert raw_pb2.Enemy == 4 and raw_pb2.Visible == 1 and sc2api_pb2.Result.Name(sc2api_pb2.Victory) == "Victory"
    functions = importlib.import_module("pysc2.lib.actions").RAW_FUNCTIONS
    for name, number in dict(Move_pt=MOVE, Attack_unit=ATTACK, Stop_quick=STOP, Effect_Heal_unit=HEAL).items():
        assert functions[name].ability_id == number
    races = [importlib.import_module("pysc2.lib.units")] * 3
    for module, race in zip(races, ("Terran", "Protoss", "Zerg"), strict=True):
        for kind in getattr(module, race):
            if kind.name.lower() in UNIT_TYPES:
                assert starcraft.UNIT_TYPE_IDS[int(kind)] == kind.name.lower()


@needs_pysc2
def test_tensorboard_still_works_in_the_same_process(tmp_path):
    starcraft.import_pysc2()
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("reward", 1.0, 0)
    assert any(tmp_path.iterdir())


@needs_pysc2
def test_on_pysc2s_mock(mock):
    env = gym.make("worldmodels/StarCraft2-v0", max_units=3, num_radii=4, num_angles=8)
    check_env(env.unwrapped, skip_render_check=True)
    seen, info = env.reset(seed=0)
    assert not seen["mask"].any() and not seen["views"].any() and info["game_loop"] == 0
    for step in range(1, 11):
        seen, reward, terminated, truncated, info = env.step(env.action_space.sample())
        assert env.observation_space.contains(seen) and reward == 0
        assert terminated == (step == 10) and not truncated  # nobody is alive: the game is lost
    with pytest.raises(gym.error.ResetNeeded, match="call reset first"):
        env.unwrapped.step(env.action_space.sample())
    env.reset()
    env.step(env.action_space.sample())
    env.close()
    env.close()


@needs_pysc2
def test_our_checks_pass_on_pysc2s_mock(mock):
    from worldmodels.check import check_env as check

    assert check("worldmodels/StarCraft2-v0") == ([], [])


@needs_pysc2
def test_units_are_seen_and_do_what_they_are_told(make):
    env = make(max_units=4)
    seen, info = env.reset(seed=0)
    assert seen["mask"].tolist() == [1, 1, 1, 0] and info == {"game_loop": 0, "score": 0.0}
    assert seen["positions"].tolist() == [[10, 10], [10, 12], [8, 10], [0, 0]]
    first = seen["views"][0]
    assert first[0].sum() == 3 and first[1 + UNIT_TYPES.index("medivac"), 2, 9] == 1
    assert first[1 + UNIT_TYPES.index("zergling"), 6, 0] == 1 and first[10, 6, 0] == np.float32(12 / 200)
    assert np.isclose(first[14, 0, 0], (10 + 4 * 10) / 255) and np.isclose(first[14, 3, 0], (13 + 4 * 10) / 255)
    for action, way in ((EAST, (1, 0)), (SOUTH, (0, -1)), (WEST, (-1, 0)), (NORTH, (0, 1))):
        before = seen["positions"][0]
        seen, reward, terminated, truncated, info = run(env, action)
        assert np.allclose(seen["positions"][0], before + way, atol=1e-5) and reward == 0
        assert not terminated and not truncated
    assert info["game_loop"] == 4 * 8
    seen, *_ = run(env, 0)  # no-op: on to the point 2 units away it was sent to
    assert np.allclose(seen["positions"][0], [10, 11], atol=1e-5)
    seen, *_ = run(env, 1)
    assert np.allclose(seen["positions"][0], [10, 11], atol=1e-5)
    run(env, WEST)
    stopped, *_ = run(env, 1)
    later, *_ = run(env, 0)
    assert np.array_equal(stopped["positions"][0], later["positions"][0])
    # The second marine is nearer to the baneling at (10, 15), 3 away and within reach.
    seen, *_ = run(env, 0, FIGHT)
    assert env.units.health[env.units.tag == 5] == 24 and env.units.health[env.units.tag == 4] == 12
    assert seen["views"][1, 12, 0, 0] == np.float32(8 / 30)  # it shot in the first of eight loops
    # The medivac heals the hurt one: 20 of 45.
    seen, *_ = run(env, 0, 0, FIGHT)
    assert env.units.health.tolist()[:3] == [45, 24, 150]


@needs_pysc2
def test_rewards_deaths_and_newcomers(make):
    env = make(max_units=4)
    seen, _ = env.reset(seed=0)
    zergling = env.units.x[env.units.tag == 4]
    assert zergling == 16
    rewards = []
    while sum(rewards) == 0:  # the first marine goes to the zergling and shoots twice
        env.units = env.units._replace(x=np.where(env.units.tag == 5, 30, env.units.x).astype(np.float32))
        seen, reward, terminated, truncated, info = run(env, FIGHT)
        rewards.append(reward)
    assert rewards[-1] == 5 == info["score"] and set(rewards[:-1]) == {0}
    assert seen["mask"].tolist() == [1, 1, 1, 1] and env.units.tag[:4].tolist() == [1, 2, 3, 8]  # a new marine
    while reward == 5 or sum(rewards) == 5:  # the second marine walks into the baneling
        seen, reward, terminated, truncated, info = run(env, 1, NORTH)
        rewards.append(reward)
    assert rewards[-1] == -1 and info["score"] == 4
    assert seen["mask"].tolist() == [1, 0, 1, 1] and not seen["views"][1].any() and not seen["positions"][1].any()
    while info["score"] == 4:  # the new zergling dies too, and the next marine takes the place of the dead one
        seen, reward, terminated, truncated, info = run(env, FIGHT, 0, 0, FIGHT)
    assert seen["mask"].tolist() == [1, 1, 1, 1] and env.units.tag[:4].tolist() == [1, 10, 3, 8]
    assert not terminated and not truncated
    # A fourth marine and no place left: seen, but nobody's.
    while info["score"] == 9:
        seen, reward, terminated, truncated, info = run(env, FIGHT, FIGHT, 0, FIGHT)
    assert env.units.tag[:4].tolist() == [1, 10, 3, 8] and 12 in env.units.tag and env.units.num_agents == 4


@needs_pysc2
def test_the_clock_truncates_and_defeat_terminates(make):
    env = make(max_units=3)
    for _ in range(2):  # the second time pysc2 restarts the same game
        seen, info = env.reset()
        assert info["game_loop"] == 0 and seen["positions"].tolist() == [[10, 10], [10, 12], [8, 10]]
        for step in range(1, CLOCK // 8 + 1):
            seen, _, terminated, truncated, info = run(env)
            assert not terminated and truncated == (step == CLOCK // 8)
        assert info["game_loop"] == CLOCK and "success" not in info
    env.reset(seed=LONELY)
    assert run(env, NORTH)[1:4] == (0, False, False)
    seen, reward, terminated, truncated, _ = run(env, NORTH)  # into the baneling
    assert reward == 0 and not terminated
    seen, reward, terminated, truncated, _ = run(env, NORTH)
    assert reward == -1 and terminated and not truncated and not seen["mask"].any()
    short = make(max_units=3, game_loops=24)
    short.reset()
    assert [run(short)[2:4] for _ in range(3)] == [(False, False), (False, False), (False, True)]


@needs_pysc2
def test_a_seed_makes_the_same_game_again(make):
    env = make()
    runs = []
    for seed in (2, 3, 2):
        first, _ = env.reset(seed=seed)
        after = [run(env, FIGHT, EAST)[0] for _ in range(5)]
        runs.append([env.units.x[env.units.tag == 4].item(), *(seen["views"] for seen in (first, *after))])
    assert runs[0][0] == 16.5 and runs[1][0] == 16.75
    assert all(np.array_equal(one, other) for one, other in zip(runs[0], runs[2], strict=True))
    env.reset(seed=2**32 + 3)
    assert env.units.x[env.units.tag == 4] == 16.75


@needs_pysc2
def test_a_map_for_two_players(make):
    env = make(map_name="Flat32", race="terran", opponent="zerg", difficulty="easy")
    env.reset(seed=0)
    steps = 0
    terminated = truncated = False
    while not (terminated or truncated):
        env.units = env.units._replace(x=np.where(env.units.tag == 5, 30, env.units.x).astype(np.float32))
        seen, reward, terminated, truncated, info = run(env, FIGHT)
        steps += 1
    assert terminated and not truncated and reward == 1 and info["success"] is True and seen["mask"][0]
    env.reset()
    assert run(env)[2:4] == (False, False)


@needs_pysc2
def test_a_game_that_dies_is_one_line_and_started_again_by_reset(make):
    env = make()
    env.reset()
    env._game._sc2_procs[0]._proc.kill()
    env._game._sc2_procs[0]._proc.wait()
    with pytest.raises(gym.error.Error, match="StarCraft II failed, and the next reset starts it again") as raised:
        run(env)
    assert "\n" not in str(raised.value)
    with pytest.raises(gym.error.ResetNeeded):
        run(env)
    env.reset()
    run(env)


@needs_pysc2
def test_what_is_missing_or_wrong_is_one_line(folder, make, monkeypatch):
    def line(kind, **options):
        with pytest.raises(kind) as raised:
            make(**options)
        assert type(raised.value) is kind and "\n" not in str(raised.value)
        return str(raised.value)

    missing = gym.error.DependencyNotInstalled
    assert "pysc2 has no map '2s3z'; its mini-games are BuildMarines" in line(ValueError, map_name="2s3z")
    assert "race is 'orc'; expected one of random, protoss" in line(ValueError, race="orc")
    assert "difficulty is 'mild'; expected one of very_easy" in line(ValueError, difficulty="mild")
    assert "Unknown game version: 1.2.0" in line(ValueError, version="1.2")
    assert "#get-the-maps" in line(missing, map_name="DefeatRoaches")
    assert "#map-packs" in line(missing, map_name="Flat64")
    env = make()
    env.reset()
    with pytest.raises(ValueError, match="expected 16 numbers below 7"):
        env.step(np.full(16, 7))
    with pytest.raises(ValueError, match="expected 16 numbers below 7"):
        env.step(np.zeros(3, dtype=int))
    with pytest.raises(ValueError, match="unknown reset option 'map'"):
        env.reset(options={"map": 1})
    (folder / "Versions" / "Base75689" / "SC2_x64").unlink()
    gone = make()
    with pytest.raises(gym.error.Error, match="No SC2 binary found"):
        gone.reset()
    monkeypatch.setenv("SC2PATH", str(folder / "nowhere"))
    assert "download it from https://github.com/Blizzard/s2client-proto#downloads" in line(missing)


@pytest.mark.slow
def test_with_pysc2_in_an_environment_of_its_own(tmp_path):
    """What ``pip install '.[starcraft]'`` adds, with protobuf as pinned; the rest from this environment."""
    house = tmp_path / "env"
    venv.create(house, with_pip=True)
    python = str(house / "bin" / "python")
    site = next(house.glob("lib/python*/site-packages"))
    command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*command, "pysc2==4.0.0"], check=True, capture_output=True)
    # The checkout in the shape it has when installed, and after it this environment's libraries.
    package = site / "worldmodels"
    package.mkdir()
    for path in (ROOT / "worldmodels").iterdir():
        (package / path.name).symlink_to(path)
    for name in ("envs", "agents", "configs"):
        (package / name).symlink_to(ROOT / name)
    libraries = next(Path(sys.prefix).glob("lib/python*/site-packages"))
    (site / "libraries.pth").write_text(f"import sys; sys.path.append({str(libraries)!r})\n")
    tests = [str(ROOT / "tests" / name) for name in ("test_starcraft_pysc2.py", "test_starcraft.py")]
    options = ["-q", "-m", "not slow", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "-c", str(ROOT / "setup.cfg")]
    home = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [python, "-m", "pytest", *options, *tests], cwd=tmp_path, env=home, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout and "skipped" not in done.stdout, done.stdout


if __name__ == "__main__":  # as the game
    serve(int(sys.argv[sys.argv.index("-port") + 1]))
