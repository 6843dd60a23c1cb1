"""Flatland. flatland-rl holds numpy below 2, so most of these tests run in an environment that one of them makes."""

import gc
import importlib.util
import random
import shutil
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import worldmodels.envs  # noqa: F401
from worldmodels.check import check_env as check
from worldmodels.envs import flatland as ours
from worldmodels.envs.flatland import Flatland, shortest_path_policy

from .conftest import ROOT

INSTALLED = importlib.util.find_spec("flatland") is not None
SMALL = {"num_agents": 4, "width": 30, "height": 28, "num_cities": 2}


def inside(test):
    """A test that needs flatland-rl."""
    reason = "needs flatland-rl; test_in_an_environment_of_its_own runs it"
    return pytest.mark.slow(pytest.mark.skipif(not INSTALLED, reason=reason)(test))


@pytest.mark.skipif(INSTALLED, reason="flatland-rl is there")
def test_without_flatland_one_line_says_what_to_install():
    with pytest.raises(
        gym.error.DependencyNotInstalled, match=r"run pip install '\.\[flatland\]' in the checkout"
    ) as caught:
        Flatland()
    assert "numpy 1.26" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.skipif(INSTALLED, reason="already in it")
def test_in_an_environment_of_its_own():
    with tempfile.TemporaryDirectory() as folder:  # 2 GB, so it goes at once
        copy, python = Path(folder) / "worldmodels", Path(folder) / "env" / "bin" / "python"
        copy.mkdir()
        for name in ("worldmodels", "envs", "agents", "configs", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for path in (*ROOT.glob("*.*"), ROOT / "LICENSE"):
            if path.is_file():
                shutil.copy(path, copy)
        install = ["install", "-q", "--no-compile", "-c", "constraints-flatland.txt", ".[dev,flatland]"]
        for command in (
            [sys.executable, "-m", "venv", str(python.parents[1])],
            [str(python), "-m", "pip", "--disable-pip-version-check", *install],
            [str(python), "-m", "pip", "--disable-pip-version-check", "check"],
            [str(python), "-m", "pytest", "-q", "-m", "slow", "-p", "no:cacheprovider", "tests/test_flatland.py"],
        ):
            done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=3600)
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert " passed" in done.stdout and " failed" not in done.stdout


def arrived(info):
    return int((info["state"] == ours.ARRIVED).sum())


def episode(env, seed, policy):
    """Observations, rewards and infos of one whole episode, and how it ended."""
    observation, info = env.reset(seed=seed)
    seen, rewards, infos = [observation], [], [info]
    terminated = truncated = False
    while not (terminated or truncated):
        observation, reward, terminated, truncated, info = env.step(policy(observation, info))
        seen.append(observation)
        rewards.append(reward)
        infos.append(info)
    return seen, rewards, infos, terminated, truncated


def random_policy(seed, n):
    generator = np.random.default_rng(seed)
    return lambda *_: generator.integers(0, 5, n)


@inside
@pytest.mark.parametrize("options", [{}, SMALL | {"malfunctions": 0.01, "info_grid": True, "render_mode": "rgb_array"}])
def test_it_is_what_gymnasium_expects(options):
    env = gym.make("worldmodels/Flatland-v0", **options)
    check_env(env.unwrapped, skip_render_check=not options)
    if not options:
        assert check("worldmodels/Flatland-v0") == ([], [])


@inside
def test_a_seed_says_all_that_happens():
    env, other = (Flatland(**SMALL, malfunctions=0.02) for _ in range(2))
    other.reset(seed=8)
    other.step(np.full(4, ours.FORWARD))  # what was before a seed must not matter
    random.seed(5)
    state = random.getstate()
    first, second = (episode(each, 3, random_policy(0, 4)) for each in (env, other))
    assert random.getstate() == state  # flatland seeds Python's own numbers
    for a, b in zip(first[0], second[0], strict=True):
        assert all(np.array_equal(a[key], b[key]) for key in a)
    for a, b in zip(first[2], second[2], strict=True):
        assert a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)
    assert first[1] == second[1] and first[3:] == second[3:]
    assert any(ours.BROKEN_DOWN in info["state"] for info in first[2])
    next_grids = []
    for each in (env, other):
        each.reset()
        next_grids.append(each.view_at(np.argwhere(np.ones((28, 30)))))
    assert np.array_equal(*next_grids)
    env.reset(seed=4)
    assert not np.array_equal(env.view_at(np.argwhere(np.ones((28, 30)))), next_grids[0])


@inside
def test_trains_come_and_go():
    env = Flatland()
    observation, info = env.reset(seed=0)
    assert not observation["mask"].any() and not observation["views"].any() and not observation["positions"].any()
    assert set(info["state"].tolist()) <= {ours.WAITING, ours.READY} and not info["rewards"].any()
    seen, _, infos, *_ = episode(env, 0, shortest_path_policy)
    masks = np.stack([observation["mask"] for observation in seen]).astype(bool)
    states = np.stack([info["state"] for info in infos])
    assert np.array_equal(masks, (states >= ours.MOVING) & (states <= ours.BROKEN_DOWN))
    assert masks.sum(1).max() >= 4 and arrived(infos[-1]) > 0
    left = masks[:-1] & ~masks[1:]
    assert (states[1:][left] == ours.ARRIVED).all()  # a train leaves the map at its target alone
    for observation in seen:
        off = observation["mask"] == 0
        assert not observation["views"][off].any() and not observation["positions"][off].any()
        standing = observation["views"][~off, 2, 2, ours.TRAINS]  # in the middle of its window stands the train
        assert (standing > 0).sum() == (~off).sum()
    steps = np.abs(np.diff([observation["positions"] for observation in seen], axis=0)).sum(-1)
    assert (steps[masks[:-1] & masks[1:]] <= 1).all()


def expected_view(env, row, column, train):
    """A window by plain loops over what flatland says, ``train`` None for nobody's."""
    rail_env, size = env._rail_env, env.crop_size
    places = [agent.current_configuration for agent in rail_env.agents]
    targets = [next(iter(agent.targets))[0] for agent in rail_env.agents]
    view = np.zeros((size, size, 23), dtype=np.uint8)
    for i in range(size):
        for j in range(size):
            cell = (row + i - size // 2, column + j - size // 2)
            if not (0 <= cell[0] < env.height and 0 <= cell[1] < env.width):
                continue
            for heading in range(4):
                for exit, open_ in enumerate(rail_env.rail.get_transitions((cell, heading))):
                    view[i, j, 4 * heading + exit] = 255 * open_
            for agent, place in zip(rail_env.agents, places, strict=True):
                if place is not None and place[0] == cell:
                    view[i, j, 16 + place[1]] = 255
                    view[i, j, 22] = 255 * agent.malfunction_handler.in_malfunction
            for other, target in enumerate(targets):
                if target == cell:
                    view[i, j, 20 if other == train else 21] = 255
    return view


@inside
@pytest.mark.parametrize("crop_size", [5, 31])
def test_windows_against_plain_loops(crop_size):
    """A window of 31 x 31 always reaches beyond the border of this map."""
    env = Flatland(**SMALL, crop_size=crop_size, malfunctions=0.01, malfunction_steps=(2, 6))
    steps = compared = own = broken = 0
    for seed in (1, 2):
        observation, info = env.reset(seed=seed)
        over = False
        while not over:
            if steps % 4 == 0:
                for train in np.flatnonzero(observation["mask"]):
                    row, column = observation["positions"][train].astype(int)
                    expected = expected_view(env, row, column, train)
                    if not any(agent.malfunction_handler.in_malfunction for agent in env._rail_env.agents):
                        assert np.array_equal(observation["views"][train], expected)
                    # flatland counts down after the step, so in its last step a broken-down train counts as whole
                    assert np.array_equal(observation["views"][train, ..., :22], expected[..., :22])
                    compared += 1
                    own += int(expected[..., 20].any())
            broken += int(observation["views"][..., 22].any())
            observation, _, terminated, truncated, info = env.step(shortest_path_policy(observation, info))
            over, steps = terminated or truncated, steps + 1
            shown = observation["views"][:, crop_size // 2, crop_size // 2, 22] > 0
            assert np.array_equal(shown, info["state"] == ours.BROKEN_DOWN)
    assert compared > 30 and own > 0 and broken > 0


@inside
def test_what_is_to_be_seen_anywhere():
    env = Flatland(**SMALL)
    with pytest.raises(gym.error.ResetNeeded, match="call reset first"):
        env.view_at(np.zeros((1, 2)))
    observation, info = env.reset(seed=0)
    while observation["mask"].sum() < 2:
        observation, *_, info = env.step(shortest_path_policy(observation, info))
    cells = np.array([[[0, 0], [0, 29], [27, 0]], [[27, 29], [13, 14], [0, 7]]])
    views = env.view_at(cells.astype(np.float32))
    assert views.shape == (2, 3, 5, 5, 23) and views.dtype == np.uint8 and views.flags.owndata
    for index in np.ndindex(2, 3):
        assert np.array_equal(views[index], expected_view(env, *cells[index], None))
    everything = env.view_at(np.argwhere(np.ones((28, 30)))).reshape(28, 30, 5, 5, 23)
    assert not everything[..., 20].any() and not everything[0, :, :2].any() and not everything[:, -1, :, 3:].any()
    assert everything[:, :, 2, 2, 16:20].astype(bool).sum() == observation["mask"].sum()
    there = observation["mask"].astype(bool)
    same = env.view_at(observation["positions"][there])
    assert np.array_equal(same[..., :20], observation["views"][there, ..., :20])
    own = observation["views"][there, ..., 20] | observation["views"][there, ..., 21]
    assert np.array_equal(same[..., 21], own)
    for wrong in ([[0, 30]], [[-1, 0]], [[0.5, 1.0]], [1, 2, 3]):
        with pytest.raises(ValueError, match="rows from 0 to 27 and columns from 0 to 29"):
            env.view_at(np.array(wrong))


@inside
def test_rewards_and_endings():
    env = Flatland()
    with pytest.raises(gym.error.ResetNeeded, match="call reset"):
        env.step(np.zeros(10, dtype=int))
    for policy in (random_policy(0, 10), shortest_path_policy):
        _, rewards, infos, terminated, truncated = episode(env, 0, policy)
        assert truncated and not terminated and len(rewards) == env.limit
        each = np.stack([info["rewards"] for info in infos])
        assert each.dtype == np.float32 and (each <= 0).all()
        assert np.allclose(each[1:].clip(-env.limit, 0).sum(1) / (10 * env.limit), rewards)
        score = env._rail_env.rewards.normalize(*each.sum(0), num_agents=10, max_episode_steps=env.limit)
        assert np.isclose(sum(rewards) + 1, score)
        home = infos[-1]["state"] == ours.ARRIVED
        assert (each[-1][~home] <= 0).all() and each[-1][~home].any() and not each[-1][home].any()
        with pytest.raises(gym.error.ResetNeeded, match="call reset"):
            env.step(np.zeros(10, dtype=int))
    own_limit = env.limit
    short = Flatland(max_steps=12)
    _, rewards, _, terminated, truncated = episode(short, 0, random_policy(0, 10))
    assert len(rewards) == 12 and truncated and not terminated and rewards[-1] < 0
    long = Flatland(max_steps=10_000)
    long.reset(seed=0)
    assert long.limit == own_limit


@inside
def test_a_lone_train_goes_the_shortest_way():
    env = Flatland(**SMALL | {"num_agents": 1})
    for seed in range(6):
        env.reset(seed=seed)
        agent = env._rail_env.agents[0]
        (row, column), heading = agent.initial_configuration
        distance = env._rail_env.distance_map.get()[0, row, column, heading]
        seen, rewards, infos, terminated, truncated = episode(env, seed, shortest_path_policy)
        assert terminated and not truncated and arrived(infos[-1]) == 1 and len(rewards) < env.limit
        assert sum(observation["mask"].sum() for observation in seen) == distance and not any(rewards)


@inside
def test_the_shortest_way_brings_more_trains_home_than_chance():
    """On six maps at least twice as many, and at least a quarter of all."""
    env, home = Flatland(), {}
    for name, policy in (("random", random_policy(1, 10)), ("shortest", shortest_path_policy)):
        home[name] = sum(arrived(episode(env, seed, policy)[2][-1]) for seed in range(6))
    assert home["shortest"] >= max(2 * home["random"], 15), home


@inside
def test_copies_side_by_side():
    envs = gym.vector.SyncVectorEnv([lambda: Flatland(**SMALL, max_steps=6)] * 3)
    single = Flatland(**SMALL, max_steps=6)
    observation, info = single.reset(seed=1)
    observations, infos = envs.reset(seed=0)
    assert np.array_equal(infos["shortest_path"][1], info["shortest_path"])
    for _ in range(6):
        actions = shortest_path_policy(observations, infos)
        assert actions.shape == (3, 4) and actions in envs.action_space
        observations, *_, truncated, infos = envs.step(actions)
        observation, *_, info = single.step(shortest_path_policy(observation, info))
        assert all(np.array_equal(observations[key][1], observation[key]) for key in observation)
        assert all(infos[key].shape == (3, 4) for key in ("state", "action_required", "rewards", "shortest_path"))
    assert truncated.all()
    observations, rewards, *_ = envs.step(actions)  # the first observation of the next episode
    assert not rewards.any() and not observations["mask"].any()


@inside
def test_collected(tmp_path):
    from worldmodels.data.collect import collect

    episodes = collect(
        "worldmodels/Flatland-v0",
        tmp_path / "trains",
        episodes=3,
        steps=20,
        num_envs=2,
        policy=shortest_path_policy,
        env_kwargs=SMALL,
    )
    assert len(episodes) == 3
    shapes = {name: tuple(array.shape[1:]) for name, array in episodes.arrays.items()}
    assert shapes["observations"] == (4, 5, 5, 23) and shapes["positions"] == (4, 2) and shapes["mask"] == (4,)
    assert shapes["actions"] == shapes["info/state"] == shapes["info/rewards"] == (4,)
    mask = np.asarray(episodes.arrays["mask"]).astype(bool)
    assert mask.any() and not np.asarray(episodes.arrays["observations"])[~mask].any()


@inside
def test_one_map_for_all():
    options = SMALL | {"regenerate": False, "info_grid": True, "map_seed": 3}
    env, other = Flatland(**options), Flatland(**options)
    grids, starts = [], []
    for each, seed in ((env, 0), (env, 1), (other, 0), (env, 0)):
        _, info = each.reset(seed=seed)
        grids.append(info["grid"])
        starts.append([(agent.initial_configuration, agent.earliest_departure) for agent in each._rail_env.agents])
    assert grids[0].dtype == np.uint16 and grids[0].shape == (28, 30)
    assert all(np.array_equal(grids[0], grid) for grid in grids)
    assert starts[0] == starts[2] == starts[3] != starts[1]
    _, info = Flatland(**options | {"map_seed": 4}).reset(seed=0)
    assert not np.array_equal(grids[0], info["grid"])
    first, second = (episode(each, 5, random_policy(0, 4)) for each in (env, other))
    assert first[1] == second[1]
    assert np.array_equal(first[0][-1]["views"], second[0][-1]["views"])


@inside
def test_a_map_goes_when_its_episode_does():
    env, gone = Flatland(**SMALL), []
    for seed in range(3):
        episode(env, seed, shortest_path_policy)
        gone += [weakref.ref(env._rail_env), weakref.ref(env._rail_env.rail)]
    env.reset(seed=3)
    gc.collect()
    assert all(reference() is None for reference in gone)


@inside
def test_breakdowns():
    env = Flatland(**SMALL, malfunctions=0.05, malfunction_steps=(3, 5))
    _, _, infos, *_ = episode(env, 0, shortest_path_policy)
    states = np.stack([info["state"] for info in infos])
    lengths = []
    for train in states.T:
        down = np.flatnonzero(np.diff(np.concatenate([[0], np.isin(train, (2, 5)), [0]])))
        lengths += [end - begin for begin, end in down.reshape(-1, 2) if end < len(train)]
    assert len(lengths) > 5 and min(lengths) >= 3
    assert np.isin(states, (2, 5)).any() and not np.isin(states, (2, 5)).all()


@inside
def test_the_picture():
    env = Flatland(**SMALL, render_mode="rgb_array")
    assert env.render() is None and Flatland(**SMALL).render() is None
    observation, info = env.reset(seed=0)
    empty = env.render()
    assert empty.shape == (28 * 9, 30 * 9, 3) and empty.dtype == np.uint8
    rails = env.view_at(np.argwhere(np.ones((28, 30))))[:, 2, 2, :16].any(-1).reshape(28, 30)
    drawn = (empty != 250).any(-1).reshape(28, 9, 30, 9).any((1, 3))
    assert np.array_equal(drawn, rails)  # no train yet: rails, and targets on rails
    while not observation["mask"].any():
        observation, *_, info = env.step(shortest_path_policy(observation, info))
    picture, colors = env.render(), ours._colors(4)
    train = int(observation["mask"].argmax())
    row, column = (9 * observation["positions"][train] + 4).astype(int)
    assert np.array_equal(picture[row, column], colors[train])


@inside
@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_agents": 0}, "give at least 1"),
        ({"num_cities": 1}, "give at least 1 and 2"),
        ({"crop_size": 4}, "odd"),
        ({"malfunctions": 1.0}, "a rate below 1"),
        ({"malfunction_steps": (5, 2)}, "the least and greatest duration"),
        ({"max_steps": 0}, "None for the map's own limit"),
        ({"render_mode": "human"}, "offers None and 'rgb_array'"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Flatland(**options)


@inside
def test_refused_later():
    with pytest.raises(ValueError, match="no map of 10 x 12 cells .* give a larger one"):
        Flatland(width=12, height=10).reset(seed=0)
    env = Flatland(**SMALL)
    with pytest.raises(ValueError, match="takes none"):
        env.reset(options={"map": 1})
    env.reset(seed=0)
    for action in (np.zeros(3), np.full(4, 5), np.full(4, -1)):
        with pytest.raises(ValueError, match="expected 4 numbers from 0 to 4"):
            env.step(action)
