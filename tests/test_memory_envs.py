"""Recall and the cart-pole without velocities."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

import worldmodels.envs  # noqa: F401
from worldmodels.check import check_env as check


@pytest.mark.parametrize("env_id", ["worldmodels/Recall-v0", "worldmodels/CartPole-v0"])
def test_they_are_what_gymnasium_expects(env_id):
    check_env(gym.make(env_id).unwrapped, skip_render_check=True)
    assert check(env_id) == ([], [])


def test_recall_step_by_step():
    env = gym.make_vec("worldmodels/Recall-v0", num_envs=3, num_cues=3, delay=2)
    seen, _ = env.reset(seed=0, options={"cue": [0, 1, 2]})
    assert torch.equal(seen, torch.cat([torch.eye(3), torch.zeros(3, 1)], 1))
    for _ in range(2):
        seen, rewards, terminated, _, _ = env.step(torch.tensor([0, 1, 2]))
        assert not seen.any() and not rewards.any() and not terminated.any()
    seen, rewards, terminated, _, _ = env.step(torch.tensor([0, 1, 2]))
    assert torch.equal(seen, torch.tensor([[0.0, 0.0, 0.0, 1.0]]).expand(3, 4)) and not rewards.any()
    _, rewards, terminated, truncated, info = env.step(torch.tensor([0, 1, 1]))
    assert rewards.tolist() == [1, 1, 0] and terminated.all() and not truncated.any()
    assert info["success"].tolist() == [True, True, False]
    seen, rewards, terminated, _, info = env.step(torch.tensor([0, 0, 0]))  # the next episode begins
    assert (seen[:, :3].sum(1) == 1).all() and not rewards.any() and not terminated.any() and not info["success"].any()


def test_recall_draws_every_cue_equally():
    env = gym.make_vec("worldmodels/Recall-v0", num_envs=4000)
    _, info = env.reset(seed=1)
    assert (torch.bincount(info["cue"], minlength=4) / 4000 - 0.25).abs().max() < 0.03


def test_cart_pole_is_gymnasiums():
    theirs = gym.make("CartPole-v1")
    ours = gym.make_vec("worldmodels/CartPole-v0", num_envs=1, velocities=True)
    generator = np.random.default_rng(0)
    ends = 0
    for episode in range(5):
        seen, _ = theirs.reset(seed=episode)
        state, _ = ours.reset(seed=0, options={"state": seen[None]})
        assert np.allclose(state[0], seen)
        for _ in range(200):
            action = int(generator.integers(2))
            seen, reward, terminated, _, _ = theirs.step(action)
            state, our_reward, our_terminated, _, _ = ours.step(np.array([action]))
            assert np.allclose(state[0], seen, atol=1e-4) and float(our_reward) == reward
            assert bool(our_terminated) == terminated
            if terminated:
                ends += 1
                break
    assert ends == 5
    hidden = gym.make_vec("worldmodels/CartPole-v0", num_envs=2)
    shown, info = hidden.reset(seed=0)
    assert torch.equal(shown, info["state"][:, [0, 2]])


def test_pictures():
    for env_id in ("worldmodels/Recall-v0", "worldmodels/CartPole-v0"):
        env = gym.make(env_id, render_mode="rgb_array")
        env.reset(seed=0)
        image = env.render()
        assert image.dtype == np.uint8 and image.shape[-1] == 3 and len(np.unique(image.reshape(-1, 3), axis=0)) > 1


def test_refused():
    with pytest.raises(ValueError, match="at least 2 cues"):
        gym.make_vec("worldmodels/Recall-v0", num_envs=1, num_cues=1)
