"""Atari as C-SWM and NPS see it: recipes, frames, the console's own coordinates, recording in processes."""

import gymnasium as gym
import numpy as np
import pytest
from ale_py.env import AtariEnv
from gymnasium.utils.env_checker import check_env
from PIL import Image

from worldmodels.cli import main
from worldmodels.data.collect import collect
from worldmodels.data.episodes import Episodes
from worldmodels.envs.atari import RECIPES, Atari
from worldmodels.errors import UserError

GAMES = sorted(RECIPES)


def console(game, frameskip):
    return AtariEnv(game=game, obs_type="rgb", frameskip=frameskip, repeat_action_probability=0.0)


@pytest.mark.parametrize("game", GAMES)
def test_a_game_keeps_gymnasiums_rules(game):
    env = gym.make("worldmodels/Atari-v0", game=game, warm_start=3)
    check_env(env.unwrapped, skip_render_check=True)
    assert env.observation_space == gym.spaces.Box(0, 255, (50, 50, 6), np.uint8) and env.spec.max_episode_steps == 10
    env.reset(seed=0)
    for t in range(10):
        assert env.step(0)[3] == (t == 9)


@pytest.mark.parametrize(
    ("game", "frameskip", "warm", "rows"), [("pong", 4, 58, (35, 190)), ("space_invaders", 3, 50, (30, 200))]
)
def test_frames_are_those_of_a_plain_loop_over_the_console(game, frameskip, warm, rows):
    env = Atari(game)
    seen, info = env.reset(seed=7)
    plain = console(game, frameskip)
    plain.reset(seed=7)
    draw = np.random.default_rng(np.random.PCG64(np.random.SeedSequence(7)))  # Gymnasium's own generator of a seed
    assert int(draw.integers(warm, warm + 1)) == warm
    screens = [plain.step(a)[0] for a in [*draw.integers(plain.action_space.n, size=warm).tolist(), 0]]

    def small(screen):
        return np.asarray(Image.fromarray(screen[slice(*rows)]).resize((50, 50), Image.LANCZOS))

    np.testing.assert_array_equal(seen, np.concatenate([small(screens[-2]), small(screens[-1])], -1))
    for action in (2, 3, 3, 1):
        before, (seen, reward, terminated, _, info) = seen, env.step(action)
        screen, true_reward, *_ = plain.step(action)
        np.testing.assert_array_equal(seen[..., 3:], small(screen))
        np.testing.assert_array_equal(seen[..., :3], before[..., 3:])
        assert (reward, terminated) == (true_reward, False)
        np.testing.assert_array_equal(info["state_id"], plain.ale.getRAM())


def test_no_action_is_repeated_by_chance():
    states = []
    for _ in range(2):
        env = Atari("pong", warm_start=0)
        env.reset(seed=3)
        states.append([env.step(a)[4]["state_id"].tobytes() for a in (2, 3) * 40])
    assert states[0] == states[1]
    sticky = Atari("pong", warm_start=0, repeat_action_probability=0.5)
    sticky.reset(seed=3)
    assert states[0] != [sticky.step(a)[4]["state_id"].tobytes() for a in (2, 3) * 40]


def centers(screens, color, rows, columns=slice(0, 160)):
    """Mean (x, y) of the pixels of one colour in part of each screen, NaN where there are none."""
    found = []
    for screen in screens:
        y, x = np.nonzero((screen[rows, columns] == color).all(-1))
        found.append((x.mean() + columns.start, y.mean() + rows.start) if len(x) else (np.nan, np.nan))
    return np.array(found)


PAINTED = {  # colour and part of the screen in which nothing else has it
    "pong": {
        "ball": ((236, 236, 236), slice(34, 194), slice(0, 160)),
        "player": ((92, 186, 92), slice(34, 194), slice(0, 160)),
        "enemy": ((213, 130, 74), slice(34, 194), slice(0, 160)),
    },
    "breakout": {
        "ball": ((200, 72, 72), slice(93, 189), slice(8, 152)),
        "paddle": ((200, 72, 72), slice(189, 193), slice(8, 152)),
    },
    "space_invaders": {"player": ((50, 132, 50), slice(181, 196), slice(0, 160))},
    "qbert": {"qbert": ((181, 83, 40), slice(30, 210), slice(0, 160))},
    "freeway": {"chicken": ((252, 252, 84), slice(110, 196), slice(40, 60))},
}


@pytest.mark.parametrize("game", sorted(PAINTED))
def test_coordinates_read_from_ram_are_where_the_pixels_are(game):
    env = Atari(game, warm_start=0, render_mode="rgb_array")
    env.reset(seed=1)
    draw = np.random.default_rng(0)
    screens, told = [], []
    for _ in range(400):
        _, _, terminated, _, info = env.step(int(draw.integers(env.action_space.n)))
        screens.append(env.render().copy())
        told.append(np.where(info["visible"], info["objects"], np.nan))
        if terminated:
            env.reset()
    for i, name in enumerate(env.metadata["objects"]):
        thing, axis = name.split()
        if thing not in PAINTED[game]:
            continue
        color, rows, columns = PAINTED[game][thing]
        pixels = centers(screens, color, rows, columns)[:, "xy".index(axis)]
        value = np.array(told)[:, i]
        both = ~np.isnan(pixels) & ~np.isnan(value)
        assert both.sum() > 50
        # Objects are clipped at the borders of the field, and sprites are drawn a moment after the RAM is written.
        off = (pixels - value)[both]
        assert abs(np.median(off)) <= 1.0 and np.median(np.abs(off)) <= 1.5, name
        assert (np.abs(off) <= 6).mean() > 0.75, name
        if name in env.visible:
            assert (np.isnan(pixels) == np.isnan(value)).mean() > 0.97, name


def test_the_invaders_begin_where_the_ram_says():
    env = Atari("space_invaders", warm_start=0, render_mode="rgb_array")
    env.reset(seed=0)
    places = set()
    for _ in range(150):
        _, _, _, _, info = env.step(0)  # nothing is shot
        columns = np.flatnonzero((env.render() == (134, 134, 29)).all(-1).any(0))
        assert columns.min() == info["objects"][1]
        places.add(int(columns.min()))
    assert len(places) > 5


def test_a_lost_warm_start_begins_another_game():
    env = Atari("breakout", warm_start=(120, 260))
    for seed in range(4):
        env.reset(seed=seed)
        assert not env.console.ale.game_over()
    with pytest.raises(ValueError, match="20 games were lost within warm_start=\\[600, 600\\]; give fewer actions"):
        Atari("breakout", warm_start=600).reset(seed=0)


def test_warm_starts_of_varying_length_begin_at_varying_moments():
    def cars(warm_start):
        env = Atari("freeway", warm_start=warm_start)
        return {env.reset(seed=seed)[1]["state_id"][108:118].tobytes() for seed in range(6)}

    assert len(cars(50)) == 1 and len(cars((50, 150))) > 3


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"game": "pnog"}, "no game 'pnog'; did you mean .*pong"),
        ({"warm_start": (5, 3)}, "warm_start is \\(5, 3\\); give a number of actions, or \\[fewest, most\\]"),
        ({"crop": (190, 35)}, "crop is \\(190, 35\\); give \\[first, last \\+ 1\\] of the screen's 210 rows"),
        ({"crop": (1, 50, 100)}, "crop is \\(1, 50, 100\\); give"),
        ({"stack": 0}, "stack 0 and frameskip"),
        ({"size": (50,)}, "size is \\(50,\\)"),
        ({"repeat_action_probability": 2.0}, "repeat_action_probability is 2.0; expected 0 to 1"),
        ({"render_mode": "human"}, "this environment offers None and 'rgb_array'"),
    ],
)
def test_bad_options_are_one_line(options, line):
    with pytest.raises(ValueError, match=line):
        Atari(**options)


def test_recording_in_processes_gives_the_same_data(tmp_path):
    settings = {"episodes": 5, "steps": 4, "seed": 1, "num_envs": 2, "env_kwargs": {"game": "pong", "warm_start": 10}}
    one = collect("worldmodels/Atari-v0", tmp_path / "one", **settings)
    told = []
    two = collect(
        "worldmodels/Atari-v0", tmp_path / "two", processes=True, progress=lambda *count: told.append(count), **settings
    )
    assert sorted(one.arrays) == sorted(two.arrays)
    assert {"info/state_id", "info/objects", "info/visible"} <= set(one.arrays)
    for name, array in one.arrays.items():
        np.testing.assert_array_equal(array.numpy(), two.arrays[name].numpy())
    assert one.about == two.about and one.about["objects"] == ["ball x", "ball y", "player y", "enemy y"]
    assert told == [(n, 5) for n in range(1, 6)] and one.lengths.tolist() == [4] * 5
    starts = one.arrays["info/state_id"][one.starts].numpy()
    assert len({start.tobytes() for start in starts}) > 1
    with pytest.raises(UserError, match="did you mean .*pong"):
        collect("worldmodels/Atari-v0", tmp_path / "no", episodes=2, processes=True, env_kwargs={"game": "pnog"})
    assert not (tmp_path / "no").exists()


def test_a_world_model_of_a_game_is_trained_probed_and_told_of_duplicates(tmp_path, capsys):
    run = tmp_path / "run"
    words = ["env=pong", "+env.kwargs.warm_start=20", "core=snps", "size=smoke", "seed=0", f"data.dir={tmp_path}"]
    assert main(["train", "experiment=atari", f"run={run}", *words]) == 0
    printed = capsys.readouterr().out
    assert "held-out episodes" in printed
    import worldmodels

    result = worldmodels.load(run).evaluate()
    for entry in result["all"].values():
        assert 0.0 <= entry["duplicates"] <= 1.0 and entry["distinct_h@1"] >= entry["h@1"] - 1e-9
    assert set(result["probe"]["objects"]) <= {"ball x", "ball y", "player y", "enemy y"}
    assert {"player y"} <= set(result["probe"]["objects"])
    data = next(tmp_path.glob("worldmodels-Atari-v0-train-*"))
    assert Episodes.load(data).observation_shape == (50, 50, 6)
