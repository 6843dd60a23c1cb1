"""What ``worldmodels check`` finds in environments that Gymnasium's own checker lets pass."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from worldmodels.check import check_env
from worldmodels.cli import main
from worldmodels.errors import UserError


class Dice(gym.Env):
    """Fair at reset, but its steps draw from numpy's global generator."""

    observation_space, action_space = gym.spaces.Box(0, 1, (1,), np.float32), gym.spaces.Discrete(2)
    metadata = {"render_modes": [], "render_fps": 1}
    render_mode = None
    draws_badly = True

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.np_random.random(1).astype(np.float32), {}

    def step(self, action):
        self.count += 1
        # The checker compares the first steps after a reset only.
        bad = self.draws_badly and self.count > 3
        draw = np.random.random(1) if bad else self.np_random.random(1)
        return draw.astype(np.float32), 0.0, False, False, {}


class FairDice(Dice):
    draws_badly = False


class Mislabelled(SyncVectorEnv):
    """Says what it does not do."""

    def __init__(self, num_envs=1, mode=AutoresetMode.SAME_STEP, max_episode_steps=None):
        super().__init__([lambda: gym.make("Test/Fair-v0", max_episode_steps=max_episode_steps)] * num_envs)
        self.metadata = {**self.metadata, "autoreset_mode": mode}


class Endless(SyncVectorEnv):
    """Does not hand on the step limit."""

    def __init__(self, num_envs=1, max_episode_steps=None):
        super().__init__([lambda: gym.make("Test/Fair-v0")] * num_envs)


@pytest.fixture
def ids():
    gym.register("Test/Fair-v0", entry_point=FairDice, max_episode_steps=50)
    gym.register("Test/Dice-v0", entry_point=Dice, max_episode_steps=50)
    gym.register("Test/Wrong-v0", entry_point=FairDice, vector_entry_point=Mislabelled, max_episode_steps=50)
    gym.register("Test/Endless-v0", entry_point=FairDice, vector_entry_point=Endless, max_episode_steps=50)
    yield
    for name in ("Fair", "Dice", "Wrong", "Endless"):
        del gym.registry[f"Test/{name}-v0"]


def test_a_fair_environment_passes(ids):
    assert check_env("Test/Fair-v0") == ([], [])


@pytest.mark.parametrize(
    ("env_id", "says"),
    [
        ("Test/Dice-v0", "two resets with one seed"),
        ("Test/Wrong-v0", "declares SAME_STEP but gives no info"),
        ("Test/Endless-v0", "does not truncate its vector form"),
    ],
)
def test_faults_are_found(ids, env_id, says):
    found = check_env(env_id)
    assert len(found.mend) == 1 and says in found.mend[0] and not found.advice, found


def test_what_gymnasium_recommends_is_advice(ids, capsys):
    class Wide(FairDice):
        action_space = gym.spaces.Box(-2, 2, (1,), np.float32)

    gym.register("Test/Wide-v0", entry_point=Wide, max_episode_steps=50)
    try:
        assert main(["check", "Test/Wide-v0"]) == 0
    finally:
        del gym.registry["Test/Wide-v0"]
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("ADVICE Gymnasium's checker: For Box action spaces, we recommend")
    assert told[1:] == ["Test/Wide-v0: all checks passed"]


def test_what_breaks_training_is_a_fault_though_gymnasium_only_warns(ids, capsys):
    class Stubborn(FairDice):
        def reset(self, *, seed=3, options=None):
            return super().reset(seed=seed, options=options)

    gym.register("Test/Stubborn-v0", entry_point=Stubborn, max_episode_steps=50)
    try:
        assert main(["check", "Test/Stubborn-v0"]) == 2
    finally:
        del gym.registry["Test/Stubborn-v0"]
    assert "MEND Gymnasium's checker: The default seed argument" in capsys.readouterr().out


@pytest.mark.parametrize("env_id", ["CartPole-v1", "MiniGrid-Empty-5x5-v0", "worldmodels/BlockPhysics-v0"])
def test_known_environments_pass(env_id):
    assert check_env(env_id) == ([], [])


def test_a_vector_form_without_a_step_limit_is_not_blamed():
    mend, advice = check_env("ALE/Pong-v5")
    assert not mend and len(advice) == 1 and "takes no max_episode_steps" in advice[0]


def test_unknown_environments_are_refused():
    with pytest.raises(UserError, match="unknown environment"):
        check_env("Nothing-v0")
