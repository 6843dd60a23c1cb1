import gymnasium as gym
import matplotlib
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

import worldmodels.envs  # noqa: F401
from worldmodels.envs.block_physics import _blues_table, make_block_physics_vec, make_shapes_vec

IDS = ("worldmodels/Shapes-v0", "worldmodels/BlockPhysics-v0")
STAY, NORTH, EAST, SOUTH, WEST = range(5)


def physics(positions, weights=(3, 2, 1), **options):
    """One copy of three blocks set by hand."""
    env = make_block_physics_vec(1, num_objects=3, **options)
    env.reset(seed=0, options={"positions": np.array([positions]), "weights": np.array([weights])})
    return env


def act(env, block, direction):
    *_, info = env.step(torch.tensor([block * 5 + direction]))
    return info["positions"][0].tolist(), info["moved"][0].tolist(), bool(info["invalid"][0])


def test_a_heavy_block_pushes_a_light_one():
    env = physics([[2, 1], [2, 2], [0, 0]])
    assert act(env, 0, EAST) == ([[2, 2], [2, 3], [0, 0]], [True, True, False], False)


def test_a_light_block_does_not_push_a_heavy_one():
    env = physics([[2, 2], [2, 1], [0, 0]])
    assert act(env, 1, EAST) == ([[2, 2], [2, 1], [0, 0]], [False] * 3, False)


@pytest.mark.parametrize("third", [1, 3])
def test_a_push_against_a_third_block_is_invalid_whatever_it_weighs(third):
    env = physics([[2, 0], [2, 1], [2, 2]], weights=(4, 2, third))
    assert act(env, 0, EAST) == ([[2, 0], [2, 1], [2, 2]], [False] * 3, True)


def test_too_light_to_push_is_no_invalid_push_even_with_a_third_block():
    env = physics([[2, 0], [2, 1], [2, 2]], weights=(1, 2, 3))
    assert act(env, 0, EAST)[2] is False


def test_nothing_is_pushed_off_the_grid():
    env = physics([[2, 3], [2, 4], [0, 0]])
    assert act(env, 0, EAST) == ([[2, 3], [2, 4], [0, 0]], [False] * 3, False)


@pytest.mark.parametrize(
    ("direction", "cell"), [(STAY, [2, 2]), (NORTH, [1, 2]), (EAST, [2, 3]), (SOUTH, [3, 2]), (WEST, [2, 1])]
)
def test_directions_are_row_and_column(direction, cell):
    env = physics([[2, 2], [0, 0], [4, 4]])
    positions, moved, _ = act(env, 0, direction)
    assert positions[0] == cell and moved == [direction != STAY, False, False]


def test_the_edge_stops_a_block():
    env = physics([[0, 0], [2, 2], [4, 4]])
    assert act(env, 0, NORTH)[0][0] == [0, 0] and act(env, 0, WEST)[0][0] == [0, 0]


def test_four_actions_have_no_stay():
    env = physics([[2, 2], [0, 0], [4, 4]], stay_action=False)
    assert env.single_action_space.n == 12
    *_, info = env.step(torch.tensor([0]))
    assert info["positions"][0, 0].tolist() == [1, 2]


def test_shapes_block_and_never_push():
    env = make_shapes_vec(1, num_objects=3)
    env.reset(seed=0, options={"positions": np.array([[[2, 1], [2, 2], [0, 0]]])})
    *_, info = env.step(torch.tensor([0 * 4 + 1]))
    assert info["positions"][0].tolist() == [[2, 1], [2, 2], [0, 0]] and not info["moved"].any()
    *_, info = env.step(torch.tensor([1 * 4 + 1]))
    assert info["positions"][0].tolist() == [[2, 1], [2, 3], [0, 0]]


def plain_step(positions, weights, action, per, pushing):
    """The published rules written plainly, one copy at a time."""
    directions = [(0, 0), (-1, 0), (0, 1), (1, 0), (0, -1)][5 - per :]
    block, (dr, dc) = action // per, directions[action % per]
    on_grid = lambda cell: 0 <= cell[0] < 5 and 0 <= cell[1] < 5  # noqa: E731
    at = {tuple(p): i for i, p in enumerate(positions)}
    target = (positions[block][0] + dr, positions[block][1] + dc)
    other = at.get(target)
    new = [list(p) for p in positions]
    if (dr, dc) == (0, 0) or not on_grid(target):
        return new, False
    if other is not None:
        if not pushing or weights[block] <= weights[other]:
            return new, False
        behind = (target[0] + dr, target[1] + dc)
        if behind in at:
            return new, True
        if not on_grid(behind):
            return new, False
        new[other] = list(behind)
    new[block] = list(target)
    return new, False


@pytest.mark.parametrize("maker", [make_shapes_vec, make_block_physics_vec])
def test_steps_equal_the_rules_written_plainly(maker):
    env = maker(64)
    _, info = env.reset(seed=5)
    generator = torch.Generator().manual_seed(0)
    per, pushing = env.actions_per_object, maker is make_block_physics_vec
    seen_push = seen_invalid = 0
    for _ in range(60):
        before, weights = info["positions"].tolist(), info["weights"].tolist()
        actions = torch.randint(0, int(env.single_action_space.n), (64,), generator=generator)
        *_, info = env.step(actions)
        for b in range(64):
            expected, invalid = plain_step(before[b], weights[b], int(actions[b]), per, pushing)
            assert info["positions"][b].tolist() == expected and bool(info["invalid"][b]) == invalid
            changed = [p != q for p, q in zip(before[b], expected, strict=True)]
            assert info["moved"][b].tolist() == changed
            seen_push += sum(changed) == 2
            seen_invalid += invalid
    assert (seen_push > 50 and seen_invalid > 5) == pushing


def test_statistics_match_the_published_environment():
    env = make_block_physics_vec(2000)
    _, info = env.reset(seed=0)
    generator = torch.Generator().manual_seed(0)
    pushes = unchanged = invalid = 0.0
    for _ in range(50):
        *_, info = env.step(torch.randint(0, 25, (2000,), generator=generator))
        kept = ~info["invalid"]
        pushes += float((info["moved"].sum(1) == 2)[kept].float().mean()) / 50
        unchanged += float((~info["moved"].any(1))[kept].float().mean()) / 50
        invalid += float(info["invalid"].float().mean()) / 50
    assert 0.028 < pushes < 0.038 and 0.41 < unchanged < 0.45 and 0.003 < invalid < 0.008


@pytest.mark.parametrize("env_id", IDS)
def test_gymnasium_checker_passes(env_id):
    check_env(gym.make(env_id, render_mode="rgb_array").unwrapped)


@pytest.mark.parametrize("env_id", IDS)
def test_the_single_view_follows_row_zero_of_any_batch(env_id):
    single = gym.make(env_id)
    observation, _ = single.reset(seed=11)
    for B in (1, 3, 17):
        envs = gym.make_vec(env_id, num_envs=B, device="cpu")
        batch, _ = envs.reset(seed=11)
        assert np.array_equal(batch[0].numpy(), observation)
    actions = np.random.default_rng(0).integers(0, single.action_space.n, 20)
    for action in actions:
        observation, *_, info = single.step(action)
        batch, *_ = envs.step(torch.full((17,), int(action)))
        assert np.array_equal(batch[0].numpy(), observation)
        assert set(info) == {"positions", "weights", "moved", "invalid"} and info["positions"].shape == (5, 2)


@pytest.mark.parametrize("env_id", IDS)
def test_seeds_repeat_differ_and_go_on(env_id):
    envs = gym.make_vec(env_id, num_envs=8)
    first = envs.reset(seed=1)[0]
    later = envs.reset()[0]
    assert not torch.equal(first, later)
    assert torch.equal(envs.reset(seed=1)[0], first) and torch.equal(envs.reset()[0], later)
    second = envs.reset(seed=2)[0]
    assert not any(torch.equal(a, b) for a in first for b in second)
    listed = envs.reset(seed=[4, 5, 6, 7, 8, 9, 10, 11])[0]
    assert torch.equal(listed[3], gym.make_vec(env_id, num_envs=1).reset(seed=7)[0][0])


def test_next_step_autoreset_is_declared_and_honoured():
    envs = gym.make_vec("worldmodels/BlockPhysics-v0", num_envs=4, max_episode_steps=3)
    assert envs.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
    envs.reset(seed=0)
    for step in range(1, 4):
        last, _, terminated, truncated, _ = envs.step(torch.zeros(4, dtype=torch.int64))
        assert not terminated.any() and bool(truncated.all()) == (step == 3)
    first, rewards, terminated, truncated, info = envs.step(torch.zeros(4, dtype=torch.int64))
    assert not truncated.any() and not rewards.any() and not info["moved"].any()
    assert not any(torch.equal(a, b) for a, b in zip(first, last, strict=True))
    fresh = gym.make_vec("worldmodels/BlockPhysics-v0", num_envs=4)
    fresh.reset(seed=0)
    assert torch.equal(fresh.reset()[0], first)  # the next episode is the one an explicit reset would give
    truncations = [bool(envs.step(torch.zeros(4, dtype=torch.int64))[3].all()) for _ in range(4)]
    assert truncations == [False, False, True, False]


def test_what_a_step_returns_is_the_users_to_change():
    envs = gym.make_vec("worldmodels/Shapes-v0", num_envs=2, max_episode_steps=1)
    envs.reset(seed=0)
    _, _, _, truncated, info = envs.step(torch.zeros(2, dtype=torch.int64))
    truncated.zero_(), info["positions"].zero_(), info["weights"].zero_()
    envs.step(torch.zeros(2, dtype=torch.int64))
    assert (envs._elapsed == 0).all() and envs._state["positions"].any() and envs._state["weights"].any()


def test_gymnasium_make_truncates_by_time_limit():
    env = gym.make("worldmodels/Shapes-v0", max_episode_steps=2)
    env.reset(seed=0)
    assert env.step(0)[3] is False and env.step(0)[3] is True


def test_pictures_show_the_blocks():
    env = make_shapes_vec(1, render_mode="rgb_array")
    observation, _ = env.reset(seed=0, options={"positions": np.array([[[0, 0], [0, 4], [2, 2], [4, 0], [4, 4]]])})
    picture = observation[0]
    assert picture.shape == (50, 50, 3) and picture.dtype == torch.uint8
    cells = picture.view(5, 10, 5, 10, 3).permute(0, 2, 1, 3, 4)
    drawn = cells.flatten(2).any(-1)
    assert drawn.nonzero().tolist() == [[0, 0], [0, 4], [2, 2], [4, 0], [4, 4]]
    assert cells[0, 0, 5, 5].tolist() == [228, 26, 28] and cells[2, 2].reshape(-1, 3).unique(dim=0).tolist() == [
        [77, 175, 74]
    ]
    assert np.array_equal(env.render()[0], picture.numpy())


def test_blues_are_matplotlibs():
    ours = _blues_table().numpy().astype(int)
    theirs = (matplotlib.colormaps["Blues"](np.arange(256))[:, :3] * 255).astype(int)
    assert np.abs(ours - theirs).max() <= 1


def test_observed_blocks_are_the_darker_the_heavier():
    env = make_block_physics_vec(200)
    _, info = env.reset(seed=0)
    brightness = env._state["colors"].float().sum(-1)
    assert (brightness.diff(dim=1) > 0).all()  # object 0 is the darkest ...
    assert info["weights"][0].tolist() == [5, 4, 3, 2, 1]  # ... and the heaviest
    assert len(env._state["colors"][:, 2].unique(dim=0)) > 10  # and looks different from episode to episode


def test_unobserved_colours_tell_weights_and_fixed_shapes_do():
    env = make_block_physics_vec(300, mode="unobserved")
    _, info = env.reset(seed=0)
    assert (info["weights"].diff(dim=1) > 0).all() and info["weights"].min() == 1 and info["weights"].max() == 9
    for weight in range(1, 10):
        assert len(env._state["colors"][info["weights"] == weight].unique(dim=0)) == 1
    env = make_block_physics_vec(300, mode="fixed_unobserved")
    env.reset(seed=0)
    assert (env._state["shapes"] == torch.arange(5)).all()
    assert len(env._state["colors"][:, 0].unique(dim=0)) == 9


def test_shuffled_objects_are_acted_on_where_they_stand():
    env = make_block_physics_vec(100, shuffle_objects=True)
    _, info = env.reset(seed=0)
    assert env.single_action_space.n == 125 and "actions_per_object" not in env.metadata
    orders = {tuple(row) for row in info["weights"].tolist()}
    assert len(orders) > 50
    assert len(env._state["colors"][info["weights"] == 5].unique(dim=0)) < 40  # looks go with weights, not with order
    before = info["positions"]
    cell = before[:, 3] @ torch.tensor([5, 1])
    *_, info = env.step(cell * 5 + EAST)
    assert not info["moved"][:, :3][~info["moved"][:, 3]].any() and info["moved"][:, 3].float().mean() > 0.5
    empty = torch.tensor(
        [next(c for c in range(25) if c not in set(row.tolist())) for row in info["positions"] @ torch.tensor([5, 1])]
    )
    *_, info = env.step(empty * 5 + EAST)
    assert not info["moved"].any()


def test_goal_reward_is_minus_the_mean_manhattan_distance():
    env = make_block_physics_vec(50, goal=True)
    observation, info = env.reset(seed=0)
    assert observation["image"].shape == observation["goal"].shape == (50, 50, 50, 3)
    _, rewards, *_, info = env.step(torch.zeros(50, dtype=torch.int64))
    distance = (info["positions"] - info["goal_positions"]).abs().sum(-1).float().mean(-1)
    assert torch.equal(rewards, -distance) and 0.2 < float(distance.mean()) < 2.0
    check_env(gym.make("worldmodels/BlockPhysics-v0", goal=True, shuffle_objects=True).unwrapped)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"positions": np.zeros((1, 3, 2), int)}, "a cell of its own"),
        ({"positions": np.full((1, 3, 2), 7)}, "leave the grid"),
        ({"weights": np.array([[1, 1, 2]])}, "different integers"),
        ({"weights": np.array([[1, 2]])}, "expected (1, 3)"),
        ({"colour": 1}, "unknown reset option 'colour'"),
    ],
)
def test_impossible_states_are_refused(options, says):
    env = make_block_physics_vec(1, num_objects=3)
    with pytest.raises(ValueError, match=says.replace("(", r"\(").replace(")", r"\)")):
        env.reset(options=options)


def test_impossible_options_and_actions_are_refused():
    with pytest.raises(ValueError, match="mode is 'seen'"):
        make_block_physics_vec(1, mode="seen")
    with pytest.raises(ValueError, match="takes 3 to 5"):
        make_block_physics_vec(1, num_objects=9)
    with pytest.raises(ValueError, match="at least 1"):
        make_shapes_vec(0)
    env = make_shapes_vec(2)
    with pytest.raises(gym.error.ResetNeeded):
        env.step(torch.zeros(2, dtype=torch.int64))
    env.reset(seed=0)
    with pytest.raises(ValueError, match="expected 0 to 19"):
        env.step(torch.tensor([0, 20]))
    with pytest.raises(ValueError, match="expected \\(2,\\)"):
        env.step(torch.tensor([0]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    ("env_id", "options"),
    [(env_id, {}) for env_id in IDS] + [(IDS[1], {"shuffle_objects": True}), (IDS[1], {"mode": "unobserved"})],
)
def test_cpu_and_gpu_walk_the_same_way(env_id, options):
    here = gym.make_vec(env_id, num_envs=64, **options)
    there = gym.make_vec(env_id, num_envs=64, device="cuda", **options)
    assert torch.equal(here.reset(seed=3)[0], there.reset(seed=3)[0].cpu())
    for _ in range(120):
        actions = torch.randint(0, int(here.single_action_space.n), (64,))
        a, b = here.step(actions), there.step(actions.cuda())
        assert torch.equal(a[0], b[0].cpu()) and torch.equal(a[3], b[3].cpu())
