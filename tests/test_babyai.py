import contextlib
import io
from collections import Counter

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from minigrid.core.actions import Actions
from minigrid.core.grid import Grid
from minigrid.minigrid_env import MiniGridEnv
from minigrid.utils.baby_ai_bot import BabyAIBot
from minigrid.wrappers import RGBImgPartialObsWrapper

import worldmodels.envs  # noqa: F401
from worldmodels.envs import babyai
from worldmodels.envs.babyai import VOCABULARY, GoToObjMaze, make_minigrid, mission_tokens

ID = "worldmodels/GoToObjMaze-v0"
SMALL = {"room_size": 4, "num_rows": 2, "num_cols": 2, "agent_view_size": 5}


def quiet(work, *args, **kwargs):
    with contextlib.redirect_stdout(io.StringIO()):
        return work(*args, **kwargs)


def minigrids(**options):
    env = quiet(gym.make, "BabyAI-GoToObjMaze-v0", disable_env_checker=True, **options)
    return RGBImgPartialObsWrapper(env, tile_size=8)


def walk_beside_minigrid(episodes, seed, **options):
    """Whole episodes of ours and of minigrid's, compared at every step; half of the actions are from minigrid's bot.

    Returns:
        How often what happened.
    """
    rng = np.random.default_rng(seed)
    ours = GoToObjMaze(episodes, render_mode="rgb_array", **options)
    theirs = [minigrids(**options) for _ in range(episodes)]
    observation, info = ours.reset(seed=seed)
    bots = []
    for b, env in enumerate(theirs):
        first, _ = quiet(env.reset, seed=int(info["level_seed"][b]))
        assert np.array_equal(first["image"], observation["image"][b].numpy())
        assert mission_tokens(first["mission"], 5).tolist() == observation["mission"][b].tolist()
        assert env.unwrapped.max_steps == ours.max_steps
        bots.append(BabyAIBot(env))
    walking, last = np.ones(episodes, dtype=bool), [None] * episodes
    seen: Counter[str] = Counter()
    for step in range(ours.max_steps):
        actions = rng.choice(7, episodes, p=np.array([1, 1, 1, 3, 1, 4, 1]) / 12)
        for b in np.flatnonzero(walking):
            if bots[b] is not None:
                try:
                    advice = int(bots[b].replan(last[b]))
                    actions[b] = advice if rng.random() < 0.5 else actions[b]
                except Exception:  # the bot gives up on levels that random actions have spoilt
                    bots[b] = None
            last[b] = int(actions[b])
        carried, cells = info["carrying"], ours._state["cells"]
        observation, rewards, terminated, truncated, info = ours.step(actions)
        mazes = ours.render() if step % 25 == 0 else None
        for b in np.flatnonzero(walking):
            env = theirs[b].unwrapped
            expected, reward, done, cut, _ = theirs[b].step(int(actions[b]))
            assert np.array_equal(expected["image"], observation["image"][b].numpy()), (options, b, step)
            assert (np.float32(reward), done, cut) == (rewards[b], terminated[b], truncated[b]), (options, b, step)
            assert info["position"][b].tolist() == [*env.agent_pos] and info["direction"][b] == env.agent_dir
            if mazes is not None:
                assert np.array_equal(mazes[b], env.get_full_render(highlight=True, tile_size=8))
            toggled = actions[b] == Actions.toggle and bool((ours._state["cells"][b] != cells[b]).any())
            seen["box opened"] += toggled and bool((ours._state["cells"][b] == 0).sum() > (cells[b] == 0).sum())
            seen["toggled"] += toggled
            seen["picked up"] += bool(info["carrying"][b] > carried[b])
            seen["dropped"] += bool(info["carrying"][b] < carried[b])
            seen["success"] += done
            seen["truncated"] += cut
            walking[b] = not (done or cut)
        if not walking.any():
            break
    assert not walking.any()
    return seen


LEVELS = [
    {"room_size": 4, "num_rows": 2, "num_cols": 2},
    {"room_size": 4, "num_dists": 5, "agent_view_size": 5},
    {"room_size": 5, "num_dists": 9, "agent_view_size": 5},
    {"room_size": 6, "agent_view_size": 5},
    {"room_size": 7, "num_rows": 1, "num_dists": 12, "doors_open": True},
    {"room_size": 8},
    {"room_size": 8, "num_dists": 18, "max_steps": 40},
    {"room_size": 9, "num_rows": 2, "num_cols": 1, "num_dists": 18, "agent_view_size": 3},
    {"room_size": 10, "num_dists": 30},
    {"room_size": 10, "num_rows": 1, "num_cols": 1, "num_dists": 18, "agent_view_size": 11},
]


def test_sixty_episodes_are_minigrids_step_for_step_and_pixel_for_pixel():
    seen = sum((walk_beside_minigrid(6, 0, **options) for options in LEVELS), Counter())
    assert min(seen[what] for what in ("toggled", "box opened", "picked up", "dropped", "success", "truncated")) >= 5, (
        seen
    )


@pytest.mark.slow
@pytest.mark.parametrize("options", LEVELS, ids=str)
def test_a_thousand_episodes_are_minigrids(options):
    assert walk_beside_minigrid(94, 1, **options)["success"] > 30


def test_what_actions_do_is_minigrids_for_all_that_can_stand_ahead_and_be_carried():
    env = GoToObjMaze(1)._levels.maker
    rules = babyai._rules().view(7, babyai.HANDS, babyai.CELLS, 3)
    code = lambda thing: 0 if thing is None else babyai._codes()[thing.encode()]  # noqa: E731
    x, y = 5, 5
    env.gen_obs = lambda: None  # nothing is looked at here
    for hands in range(babyai.HANDS):
        for cell in range(babyai.CELLS):
            for action in range(7):
                env.agent_pos, env.agent_dir = (x - 1, y), 0
                env.carrying = babyai._object(babyai.ITEMS + hands - 1) if hands else None
                env.grid.set(x, y, babyai._object(cell))
                MiniGridEnv.step(env, action)
                after, carried = code(env.grid.get(x, y)), code(env.carrying)
                carried = carried - babyai.ITEMS + 1 if carried else 0
                assert rules[action, hands, cell].tolist() == [after, carried, env.agent_pos == (x, y)]
    clear = GoToObjMaze(1)._clear
    for cell in range(1, babyai.CELLS):
        assert clear[cell] == babyai._object(cell).see_behind()


@pytest.mark.parametrize("view", [3, 5, 7, 9, 11])
def test_sight_is_minigrids_through_any_clutter(view):
    env = GoToObjMaze(32, room_size=6, agent_view_size=view)
    env.reset(seed=0)
    generator = torch.Generator().manual_seed(view)
    shape = env._state["cells"].shape
    clutter = torch.randint(0, babyai.CELLS, shape, generator=generator)
    clutter = torch.where(torch.rand(shape, generator=generator) < 0.5, 0, clutter).to(torch.uint8)
    env._state["cells"] = clutter.scatter(1, env._state["place"][:, None], 0)
    index, codes, seen = env._sight(env._state)
    assert torch.equal(env._state["cells"].gather(1, index), codes.to(torch.uint8))
    for b in range(32):
        grid = Grid(view, view)
        grid.grid = [babyai._object(code) for code in codes[b].tolist()]
        assert np.array_equal(grid.process_vis((view // 2, view - 1)).T, seen[b].numpy())


def test_levels_of_given_seeds_and_the_limits_of_the_registered_ids():
    for name, options in {
        "BabyAI-GoToObjMaze-v0": {},
        "BabyAI-GoToObjMazeOpen-v0": {"doors_open": True},
        "BabyAI-GoToObjMazeS4R2-v0": {"room_size": 4, "num_rows": 2, "num_cols": 2},
        "BabyAI-GoToObjMazeS6-v0": {"room_size": 6},
    }.items():
        theirs = RGBImgPartialObsWrapper(quiet(gym.make, name, disable_env_checker=True))
        ours = gym.make_vec(ID, num_envs=2, **options)
        observation, info = ours.reset(seed=0, options={"level_seeds": np.array([7, 8])})
        assert info["level_seed"].tolist() == [7, 8]
        for b in range(2):
            assert np.array_equal(quiet(theirs.reset, seed=7 + b)[0]["image"], observation["image"][b].numpy())
            assert theirs.unwrapped.max_steps == ours.max_steps
    single = gym.make(ID)
    observation, _ = single.reset(options={"level_seeds": 5})
    expected, _ = quiet(minigrids().reset, seed=5)
    assert np.array_equal(observation["image"], expected["image"])
    assert " ".join(VOCABULARY[n] for n in observation["mission"]).strip() == expected["mission"]


def trace(env, steps, actions=None):
    """What copy 0 (or the given one) sees in every step, and its levels."""
    generator, kept = np.random.default_rng(0), []
    for _ in range(steps):
        action = generator.integers(0, 7)
        observation, reward, terminated, truncated, info = env.step(torch.full((env.num_envs,), int(action)))
        kept.append((observation["image"], reward, terminated, truncated, info["level_seed"], info["carrying"]))
    return kept


def same(a, b, copy_a, copy_b):
    return all(torch.equal(x[copy_a], y[copy_b]) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True))


POOL = {**SMALL, "pool_size": 5, "renew_every": 16, "max_episode_steps": 5}


def test_a_copys_levels_hang_on_seed_copy_and_episode_alone():
    batches = {}
    for B in (1, 3, 8):
        batches[B] = gym.make_vec(ID, num_envs=B, **POOL)
        batches[B].reset(seed=11)
        batches[B] = trace(batches[B], 40)
    assert same(batches[1], batches[8], 0, 0) and same(batches[3], batches[8], 2, 2)
    assert not same(batches[8], batches[8], 0, 1)
    listed = gym.make_vec(ID, num_envs=4, **POOL)
    listed.reset(seed=[4, 11, 6, 11])
    listed = trace(listed, 40)
    assert same(listed, batches[1], 1, 0) and same(listed, batches[1], 3, 0) and not same(listed, batches[1], 0, 0)
    single = gym.make(ID, **{name: value for name, value in POOL.items() if name != "max_episode_steps"})
    observation, info = single.reset(seed=11)
    expected, _ = gym.make_vec(ID, num_envs=6, **POOL).reset(seed=11)
    assert torch.equal(expected["image"][0], torch.from_numpy(observation["image"])) and info["level_seed"].shape == ()


def test_pools_are_small_lazy_and_renewed():
    env = GoToObjMaze(64, **POOL)
    _, info = env.reset(seed=0)
    first = set(info["level_seed"].tolist())
    assert len(first) == 5 and env._levels.made == 5
    again = {seed for step in trace(env, 15) for seed in step[4].tolist()}
    assert again == first
    later = {seed for step in trace(env, 16)[6:] for seed in step[4].tolist()}
    assert not later & first and len(later) == 5
    env = GoToObjMaze(2, **SMALL)
    env.reset(seed=0)
    assert env._levels.made == 2 and env._levels.pool_size == 4096
    assert len({GoToObjMaze(1, **SMALL).reset(seed=s)[1]["level_seed"].item() for s in range(20)}) == 20


@pytest.mark.parametrize("seed", [3, [5, 6, 5, 8]])
def test_a_snapshot_goes_on_across_a_renewal(seed):
    env = GoToObjMaze(4, **POOL)
    env.reset(seed=seed)
    trace(env, 12)
    saved = env.snapshot()
    expected = trace(env, 30)
    assert len({level for step in expected for level in step[4].tolist()}) > 6
    other = GoToObjMaze(4, **POOL)
    other.restore(saved)
    env.restore(saved)
    for again in (trace(other, 30), trace(env, 30)):
        assert all(same(expected, again, b, b) for b in range(4))
    assert torch.equal(other.reset()[1]["level_seed"], env.reset()[1]["level_seed"])


def test_seeds_repeat_differ_and_go_on():
    envs = gym.make_vec(ID, num_envs=6, **SMALL)
    first = envs.reset(seed=1)[0]["image"]
    later = envs.reset()[0]["image"]
    assert not torch.equal(first, later)
    assert torch.equal(envs.reset(seed=1)[0]["image"], first) and torch.equal(envs.reset()[0]["image"], later)
    envs.reset()
    mask = np.array([True, False] * 3)
    before = envs._state["level_seed"]
    _, info = envs.reset(options={"reset_mask": mask})
    assert (info["level_seed"] == before).tolist() == (~mask).tolist()


def test_next_step_autoreset_is_honoured_and_the_limit_is_the_levels_own():
    envs = gym.make_vec(ID, num_envs=3, room_size=4, num_rows=1, num_cols=1)
    assert envs.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP and envs.max_steps == 16
    envs.reset(seed=0)
    for step in range(1, 17):
        _, rewards, terminated, truncated, _ = envs.step(torch.full((3,), int(Actions.done)))
        assert not terminated.any() and not rewards.any() and bool(truncated.all()) == (step == 16)
    first, rewards, terminated, truncated, info = envs.step(torch.zeros(3, dtype=torch.int64))
    assert not truncated.any() and not rewards.any() and not info["success"].any()
    fresh = gym.make_vec(ID, num_envs=3, room_size=4, num_rows=1, num_cols=1)
    fresh.reset(seed=0)
    assert torch.equal(fresh.reset()[0]["image"], first["image"])
    single = gym.make(ID, room_size=4, num_rows=1, num_cols=1)
    single.reset(seed=0)
    assert [single.step(int(Actions.done))[3] for _ in range(16)] == [False] * 15 + [True]
    assert gym.make_vec(ID, num_envs=1, max_episode_steps=7).max_episode_steps == 7
    assert gym.make_vec(ID, num_envs=1, max_episode_steps=9999).max_episode_steps == 576


def test_what_a_step_returns_is_the_users_to_change():
    envs = gym.make_vec(ID, num_envs=2, **SMALL)
    envs.reset(seed=0)
    observation, _, terminated, _, info = envs.step(torch.zeros(2, dtype=torch.int64))
    tokens, steps = envs._state["mission"].clone(), envs._state["steps"].clone()
    for value in (*observation.values(), terminated, *info.values()):
        value.zero_()
    assert torch.equal(envs._state["mission"], tokens) and torch.equal(envs._state["steps"], steps)
    assert envs._state["level_seed"].all() and envs._state["place"].all()


@pytest.mark.parametrize("options", [{}, {**SMALL, "num_dists": 3}])
def test_gymnasium_checker_passes(options):
    check_env(gym.make(ID, render_mode="rgb_array", **options).unwrapped)


def test_rejected_levels_are_rejected_in_silence(capsys):
    options = {"room_size": 4, "num_dists": 4}
    theirs, seeds = minigrids(**options), range(12)
    for seed in seeds:
        theirs.reset(seed=seed)
    assert "Sampling rejected" in capsys.readouterr().out
    ours = GoToObjMaze(12, **options)
    ours.reset(seed=0, options={"level_seeds": list(seeds)})
    wrapped = make_minigrid("BabyAI-GoTo-v0", **options)
    for seed in seeds:
        wrapped.reset(seed=seed)
    assert capsys.readouterr().out == ""


def test_missions_become_numbers_and_back():
    text = "put the red ball on your left next to a box in front of you, then open the grey door behind you"
    tokens = mission_tokens(text, 30)
    assert tokens.dtype == np.int64 and tokens.shape == (30,) and not tokens[22:].any() and tokens[:22].all()
    assert " ".join(VOCABULARY[n] for n in tokens if n) == text.replace(",", "")
    assert len(set(VOCABULARY)) == len(VOCABULARY) and VOCABULARY[0] == ""
    assert not mission_tokens("", 3).any()
    with pytest.raises(ValueError, match="the word 'teapot'"):
        mission_tokens("go to the teapot", 5)
    with pytest.raises(ValueError, match="has 5 words, the length is 4"):
        mission_tokens("go to the red ball", 4)


@pytest.mark.parametrize(
    ("env_id", "view", "mission"),
    [
        ("MiniGrid-Empty-5x5-v0", 5, "get to the green goal square"),
        ("MiniGrid-Fetch-5x5-N2-v0", None, None),
        ("BabyAI-BossLevel-v0", 7, None),
    ],
)
def test_any_minigrid_id_goes_through_minigrid(env_id, view, mission):
    env = gym.make("worldmodels/MiniGrid-v0", env_id=env_id, agent_view_size=view)
    observation, _ = env.reset(seed=0)
    side = 8 * (view or 7)
    assert env.observation_space["image"].shape == (side, side, 3)
    plain = quiet(gym.make, env_id, **({} if view is None else {"agent_view_size": view}))
    expected, _ = quiet(plain.reset, seed=0)
    text = " ".join(VOCABULARY[n] for n in observation["mission"] if n)
    assert text == expected["mission"].replace(",", "") and mission in (None, text)
    for action in (2, 1, 2, 0, 5):
        assert observation in env.observation_space
        assert np.array_equal(observation["image"], plain.unwrapped.get_frame(tile_size=8, agent_pov=True))
        observation, reward, terminated, truncated, _ = env.step(action)
        assert (reward, terminated, truncated) == plain.step(action)[1:4]
    with pytest.raises(ValueError, match="none of minigrid's"):
        make_minigrid("CartPole-v1")


def test_minigrid_ids_can_be_vectorised():
    envs = gym.make_vec(
        "worldmodels/MiniGrid-v0", num_envs=2, vectorization_mode="sync", env_id="BabyAI-GoToLocal-v0", mission_length=5
    )
    observation, _ = envs.reset(seed=0)
    assert observation["image"].shape == (2, 56, 56, 3) and observation["mission"].shape == (2, 5)
    envs.step(np.array([2, 2]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_registered_mission_is_covered():
    ids = [name for name in gym.registry if name.startswith(("MiniGrid-", "BabyAI-"))]
    tried = 0
    for name in ids:
        env = make_minigrid(name, agent_view_size=5)
        try:
            for seed in range(5):
                observation, _ = env.reset(seed=seed)
                assert observation in env.observation_space, name
                env.step(2)
        except gym.error.DependencyNotInstalled:  # the "wave function collapse" mazes need imageio
            continue
        tried += 1
    assert tried > 150


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"agent_view_size": 4}, "agent_view_size is 4; give 3, 5, 7, 9 or 11"),
        ({"room_size": 3}, "room_size is 3; give at least 4"),
        ({"num_dists": 0}, "num_dists is 0; give at least 1"),
        ({"pool_size": 0}, "pool_size is 0; give at least 1"),
        ({"mission_length": 4}, "mission_length is 4; give at least 5"),
        ({"render_mode": "human"}, "render_mode is 'human'"),
    ],
)
def test_impossible_options_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        GoToObjMaze(1, **options)


def test_impossible_level_seeds_are_refused():
    env = GoToObjMaze(2, **SMALL)
    with pytest.raises(ValueError, match="expected 2 numbers from 0 up"):
        env.reset(options={"level_seeds": [1]})
    with pytest.raises(ValueError, match="unknown reset option 'levels'"):
        env.reset(options={"levels": [1, 2]})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cpu_and_gpu_walk_the_same_way():
    options = {**POOL, "num_dists": 5}
    here, there = (gym.make_vec(ID, num_envs=64, device=device, **options) for device in ("cpu", "cuda"))
    assert torch.equal(here.reset(seed=3)[0]["image"], there.reset(seed=3)[0]["image"].cpu())
    for _ in range(60):
        actions = torch.randint(0, 7, (64,))
        a, b = here.step(actions), there.step(actions.cuda())
        assert torch.equal(a[0]["image"], b[0]["image"].cpu()) and torch.equal(a[1], b[1].cpu())
        assert torch.equal(a[2], b[2].cpu()) and torch.equal(a[3], b[3].cpu())
