"""Environments of others: what they observe, what they raise, and data of theirs that are found again."""

import importlib
import os
import subprocess
import sys
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch

from worldmodels.agents.run import make_envs as agent_envs
from worldmodels.check import check_env
from worldmodels.cli import main
from worldmodels.data.collect import collect, collected
from worldmodels.data.environments import find_spec, make_envs
from worldmodels.data.origin import origin
from worldmodels.errors import UserError

BOX = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)


class Strange(gym.Env):
    """Behaves as its options say: at step ``at`` of an episode (0: in reset) it does ``fault``."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, fault=None, at=2, space=BOX, render_mode=None):
        self.fault, self.at, self.observation_space = fault, at, space
        if at < 0:
            self._answer()

    def _answer(self):
        seen = np.zeros(self.observation_space.shape or (), self.observation_space.dtype)
        fault = self.fault if self.count == self.at else None
        if isinstance(fault, type) and issubclass(fault, Exception):
            raise fault("it broke")
        if fault == "shape":
            seen = np.zeros(5, np.float32)
        if fault == "observation":
            seen = seen + np.nan
        reward = {"none": None, "nan": float("nan"), "infinite": float("inf")}.get(fault, 1.0)
        ended = self.count >= 4 and self.fault != "endless"
        told = {3: "a number is no name"} if self.fault == "info" else {}
        whole = (seen, reward, np.array([True, False]) if fault == "two" else ended, False, told)
        return whole[:4] if fault == "four" else whole

    count = -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self._answer()[0], {}

    def step(self, action):
        self.count += 1
        return self._answer()


@pytest.fixture(autouse=True)
def ids():
    gym.register("Strange-v0", entry_point=Strange)
    yield
    del gym.registry["Strange-v0"]


FAULTS = [
    ({"fault": KeyError, "at": -1}, "KeyError"),
    ({"fault": RuntimeError, "at": 0}, "in its first reset: RuntimeError: it broke"),
    ({"fault": ZeroDivisionError}, "in step 2: ZeroDivisionError: it broke"),
    ({"fault": KeyError, "at": 1}, "in step 1: KeyError"),
    ({"fault": "shape"}, "in step 2: ValueError"),
    ({"fault": "four", "at": 3}, "in step 3: ValueError: not enough values to unpack"),
    ({"fault": "nan"}, "rewards hold nan"),
    ({"fault": "none"}, "rewards hold nan"),
    ({"fault": "infinite", "at": 4}, "rewards hold inf"),
    ({"fault": "observation", "at": 0}, "observations hold nan"),
]


@pytest.mark.parametrize(("options", "says"), FAULTS, ids=str)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_what_breaks_a_recording_is_told_in_one_line(tmp_path, options, says):
    with pytest.raises(UserError, match="Strange-v0") as caught:
        collect("Strange-v0", tmp_path / "a", episodes=4, steps=5, num_envs=2, env_kwargs=options)
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"space": gym.spaces.Box(0, 1, (0,))}, "which holds no numbers"),
        ({"fault": "no actions"}, "action space Box.* is not supported"),
    ],
)
def test_spaces_without_numbers_are_refused(tmp_path, monkeypatch, env, says):
    if env.get("fault"):
        monkeypatch.setattr(Strange, "action_space", gym.spaces.Box(0, 1, (0,)))
    with pytest.raises(UserError, match=says):
        collect("Strange-v0", tmp_path / "a", episodes=4, steps=5, env_kwargs=env)
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("processes", [False, True])
def test_what_no_reader_understands_is_refused_or_left_out_in_other_processes_too(tmp_path, processes):
    record = partial(collect, "Strange-v0", episodes=4, steps=5, num_envs=2, processes=processes)
    with pytest.raises(UserError, match="environment Strange-v0.* in step 2"):
        record(tmp_path / "a", env_kwargs={"fault": "two"})
    if processes:  # without them Gymnasium itself refuses it
        assert set(record(tmp_path / "b", env_kwargs={"fault": "info"}).arrays) >= {"observations", "rewards"}
        assert not [name for name in record(tmp_path / "c", env_kwargs={"fault": "info"}).arrays if "3" in name]


@pytest.mark.parametrize(("options", "says"), [(o, s) for o, s in FAULTS if o.get("at") != 0], ids=str)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_what_breaks_an_agents_experience_is_told_in_one_line(options, says):
    with pytest.raises(UserError, match="Strange-v0") as caught:
        envs = agent_envs("Strange-v0", 2, options, "cpu")
        envs.start()
        for _ in range(5):
            envs.advance(torch.zeros(2, dtype=torch.int64))
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_first_observations_of_an_agent_are_finite():
    envs = agent_envs("Strange-v0", 2, {"fault": "observation", "at": 0}, "cpu")
    with pytest.raises(UserError, match="environment Strange-v0: observations hold nan in reset"):
        envs.start()


def test_what_an_environment_raises_when_it_is_closed_is_said(monkeypatch, capsys):
    def close(self):
        raise OSError("it would not")

    envs = agent_envs("Strange-v0", 1, {}, "cpu")
    monkeypatch.setattr(Strange, "close", close)
    envs.close()
    said = "worldmodels: environment Strange-v0 failed when it was closed: OSError: it would not\n"
    assert capsys.readouterr().err == said
    monkeypatch.undo()


def test_an_environment_that_fails_at_once_leaves_no_run_behind(tmp_path, capsys):
    words = [
        "env.id=Strange-v0",
        "+env.kwargs.fault=four",
        "size=smoke",
        "logger.progress=false",
        "logger.figures=false",
    ]
    assert main(["train-agent", *words, "+env.kwargs.at=1", f"run={tmp_path / 'run'}"]) == 2
    assert "environment Strange-v0 failed in step 1" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert main(["train-agent", *words, "+env.kwargs.at=9", f"run={tmp_path / 'run'}"]) == 0


def test_an_agents_environment_without_a_limit_is_given_one():
    envs = agent_envs("Strange-v0", 1, {"fault": "endless"}, "cpu", max_steps=7)
    envs.start()
    ends = [bool(envs.advance(torch.zeros(1, dtype=torch.int64)).truncated) for _ in range(14)]
    assert [i for i, end in enumerate(ends) if end] == [6, 13]
    assert not [line for line in check_env("Strange-v0").advice if "no limit" in line]  # it ends by itself
    gym.register("Endless-v0", entry_point=Strange, kwargs={"fault": "endless"})
    try:
        (line,) = [line for line in check_env("Endless-v0").advice if "no limit" in line]
    finally:
        del gym.registry["Endless-v0"]
    assert "in 1,000 random steps none ended" in line and "max_episode_steps=" in line


@pytest.mark.parametrize(
    ("space", "actions", "says"),
    [
        (gym.spaces.Box(0, 1, ()), gym.spaces.Discrete(2), "every part is an array of numbers"),
        (gym.spaces.Box(0, 1, (0,)), gym.spaces.Discrete(2), "every part is an array of numbers"),
        (gym.spaces.Text(3), gym.spaces.Discrete(2), "every part is an array of numbers"),
        (gym.spaces.OneOf([BOX, BOX]), gym.spaces.Discrete(2), "every part is an array of numbers"),
        (BOX, gym.spaces.Discrete(2, start=5), "so that they start at 0"),
        (BOX, gym.spaces.Box(-1, 1, (2, 3)), "so that they are a vector"),
    ],
)
def test_spaces_that_no_policy_understands(monkeypatch, space, actions, says):
    monkeypatch.setattr(Strange, "action_space", actions)
    with pytest.raises(UserError, match="Strange-v0") as caught:
        agent_envs("Strange-v0", 2, {"space": space}, "cpu")
    assert says in str(caught.value)


PICTURE = gym.spaces.Box(0, 255, (6, 5, 3), np.uint8)
UNDERSTOOD = [
    (PICTURE, (6, 5, 3), np.uint8),
    (gym.spaces.Box(0, 255, (3, 6, 5), np.uint8), (6, 5, 3), np.uint8),
    (gym.spaces.Box(0, 255, (6, 5), np.uint8), (6, 5, 1), np.uint8),
    (gym.spaces.Box(0, 5, (6, 5), np.uint8), (6, 5), np.uint8),  # a board, not a picture
    (gym.spaces.Box(0.0, 1.0, (6, 5, 3), np.float32), (6, 5, 3), np.uint8),
    (gym.spaces.Box(-1.0, 1.0, (1, 6, 5), np.float32), (6, 5, 1), np.uint8),
    (gym.spaces.Box(-np.inf, np.inf, (6, 5, 3), np.float32), (6, 5, 3), np.float32),
    (gym.spaces.MultiBinary(4), (4,), np.int8),
    (gym.spaces.Discrete(3), (3,), np.int64),
]


@pytest.mark.parametrize(("space", "shape", "dtype"), UNDERSTOOD, ids=str)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_observations_that_are_understood(tmp_path, space, shape, dtype):
    envs = make_envs("Strange-v0", 2, env_kwargs={"space": space})
    assert (envs.single_observation_space.shape, envs.single_observation_space.dtype) == (shape, dtype)
    seen, _ = envs.reset(seed=0)
    assert seen.shape == (2, *shape) and seen.dtype == dtype
    envs.close()


def test_numbers_between_bounds_become_bytes():
    space = gym.spaces.Box(-1.0, 1.0, (3, 6, 5), np.float32)
    envs = make_envs("Strange-v0", 1, env_kwargs={"space": space})
    envs.envs[0].unwrapped._answer = lambda: (np.linspace(-1, 1, 90, dtype=np.float32).reshape(3, 6, 5), 0.0, False)
    seen, _ = envs.reset(seed=0)
    assert seen[0, 0, 0, 0] == 0 and seen[0, 5, 4, 2] == 255 and seen[0, 0, 0, 1] == round(30 / 89 * 255)


def test_an_agent_sees_small_pictures_in_another_size():
    envs = agent_envs("Strange-v0", 2, {"space": PICTURE}, "cpu", resize=[12, 10])
    assert envs.observation_space.shape == (3, 12, 10) and tuple(envs.start().shape) == (2, 3, 12, 10)
    with pytest.raises(UserError, match="env.resize is for pictures"):
        agent_envs("Strange-v0", 2, {}, "cpu", resize=[12, 10])
    with pytest.raises(UserError, match="options of its own"):
        agent_envs("worldmodels/Shapes-v0", 2, {}, "cpu", resize=[12, 10])


def test_what_of_a_dict_is_left_out_is_said(tmp_path, capsys):
    space = gym.spaces.Dict(image=PICTURE, compass=gym.spaces.Discrete(4), score=BOX)

    class Both(Strange):
        def __init__(self):
            super().__init__()
            self.observation_space = space

        def _answer(self):
            return space.sample(), 0.0, False, False, {}

    gym.register("Both-v0", entry_point=Both)
    try:
        collect("Both-v0", tmp_path / "a", episodes=2, steps=3)
        line = "of what Both-v0 observes the image is recorded, not compass, score"
        assert capsys.readouterr().err.splitlines() == [f"worldmodels: {line}"]
    finally:
        del gym.registry["Both-v0"]


ENVIRONMENT = """
import gymnasium as gym
import numpy as np
from {sizes} import SIZE

class Mine(gym.Env):
    observation_space = gym.spaces.Box(0, 9, (SIZE,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.full(SIZE, {value}, np.float32), {{}}

    def step(self, action):
        return np.full(SIZE, {value}, np.float32), 0.0, False, False, {{}}

gym.register("{name}:Mine-v0".split(":")[1], entry_point="{name}:Mine", max_episode_steps=3)
"""


def test_data_are_found_again_while_the_environments_code_is_as_it_was(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = {"env_id": "mine_env:Mine-v0", "episodes": 2, "steps": 2}

    def recorded(value, size, **more):
        (tmp_path / "mine_env.py").write_text(ENVIRONMENT.format(name="mine_env", sizes="mine_sizes", value=value))
        (tmp_path / "mine_sizes.py").write_text(f"SIZE = {size}\n")
        for name in ("mine_sizes", "mine_env"):
            sys.modules.pop(name, None)
        gym.registry.pop("Mine-v0", None)
        importlib.invalidate_caches()
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        episodes = collected(tmp_path / "data", "train", settings, again="data.fresh=true", **more)
        return float(episodes.arrays["observations"][0].sum()), capsys.readouterr().out

    assert recorded(1, 2) == (2.0, "")
    found, said = recorded(1, 2)
    assert found == 2.0 and said.startswith(f"train data: {tmp_path / 'data'}/mine-env-Mine-v0-train-")
    assert said.endswith("; data.fresh=true records all anew\n") and said.count("\n") == 1
    assert recorded(3, 2) == (6.0, "")  # other code
    assert recorded(3, 4) == (12.0, "")  # other code that it imports
    assert recorded(1, 2)[0] == 2.0 and len(list((tmp_path / "data").iterdir())) == 3
    before = {path.name: path.stat().st_ino for path in (tmp_path / "data").iterdir()}
    assert recorded(1, 2, fresh=True) == (2.0, "")
    after = {path.name: path.stat().st_ino for path in (tmp_path / "data").iterdir()}
    assert before.keys() == after.keys() and sum(before[name] != after[name] for name in before) == 1
    gym.registry.pop("Mine-v0", None)


def test_of_installed_code_the_version_counts():
    assert origin(find_spec("CartPole-v1"))["packages"].keys() == {"gymnasium"}
    assert origin(find_spec("BabyAI-GoToObj-v0"))["packages"].keys() == {"minigrid"}
    ours = origin(find_spec("worldmodels/Shapes-v0"))
    installed = "worldmodels" in ours["packages"]
    assert installed or {"worldmodels.envs.block_physics", "worldmodels.envs.batched"} <= ours["sources"].keys()


def test_what_a_killed_process_left_is_removed(tmp_path):
    import socket

    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for number in (dead.pid, os.getppid()):
        (tmp_path / f".a.{socket.gethostname()}.{number}.partial").mkdir()
    (tmp_path / f".a.elsewhere.{dead.pid}.partial").mkdir()
    collect("Strange-v0", tmp_path / "a", episodes=2, steps=3)
    left = {f".a.{socket.gethostname()}.{os.getppid()}.partial", f".a.elsewhere.{dead.pid}.partial"}
    assert {path.name for path in tmp_path.iterdir()} == left | {"a"}


def test_check_ends_what_hangs():
    code = "import time; from worldmodels import cli\nwith cli._at_most(0.1, 'Stuck-v0'): time.sleep(100)"
    ended = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and ended.stderr.startswith("worldmodels: environment Stuck-v0 hangs")
    assert ended.stderr.count("\n") == 1
