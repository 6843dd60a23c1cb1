import subprocess
import sys
import time

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from worldmodels.data import collect as collecting
from worldmodels.data.collect import collect, collected
from worldmodels.data.environments import find_spec, make_envs
from worldmodels.data.episodes import Episodes
from worldmodels.errors import UserError


class Counter(VectorEnv):
    """Counts its steps; copy b ends after 3 + b steps, by truncation if b is even. Observation: (episode, step)."""

    def __init__(self, mode, num_envs=3):
        self.mode, self.num_envs = mode, num_envs
        self.metadata = {"autoreset_mode": mode}
        self.single_observation_space = gym.spaces.Box(0, 1000, (2,), np.float32)
        self.single_action_space = gym.spaces.Discrete(7)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def _obs(self):
        return np.stack([self.episode, self.count], 1).astype(np.float32)

    def _info(self):
        return {"double": 2 * self.count.copy(), "_double": np.ones(self.num_envs, bool)}

    def reset(self, *, seed=None, options=None):
        if options and "reset_mask" in options:
            mask = options["reset_mask"]
            self.episode[mask] += 1
            self.count[mask] = 0
        else:
            self.episode, self.count = np.zeros(self.num_envs, int), np.zeros(self.num_envs, int)
        self.over = np.zeros(self.num_envs, bool)
        return self._obs(), self._info()

    def step(self, actions):
        if self.mode == AutoresetMode.DISABLED:
            assert not self.over.any(), "stepped after the end"
        restart = self.over if self.mode == AutoresetMode.NEXT_STEP else np.zeros(self.num_envs, bool)
        self.episode[restart] += 1
        self.count = np.where(restart, 0, self.count + 1)
        done = self.count >= 3 + np.arange(self.num_envs)
        even = np.arange(self.num_envs) % 2 == 0
        info, obs = self._info(), self._obs()
        self.over = done
        if self.mode == AutoresetMode.SAME_STEP and done.any():
            final = np.empty(self.num_envs, object)
            final[:] = [row if end else None for row, end in zip(obs, done, strict=True)]
            kept = {"double": np.where(done, info["double"], 0), "_double": done}
            self.episode[done] += 1
            self.count = np.where(done, 0, self.count)
            info = self._info() | {"final_obs": final, "_final_obs": done, "final_info": kept, "_final_info": done}
            obs = self._obs()
        return obs, np.where(restart, 0.0, 1.0), done & ~even, done & even, info


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_all_autoreset_modes_give_the_same_episodes(mode, tmp_path, monkeypatch):
    gym.register("Counter-v0", entry_point=lambda: None, max_episode_steps=10)
    try:
        monkeypatch.setattr(collecting, "make_envs", lambda env_id, n, **_: Counter(mode, n))
        episodes = collect("Counter-v0", tmp_path / "a", episodes=7, steps=10, num_envs=3)
    finally:
        del gym.registry["Counter-v0"]
    assert sorted(episodes.lengths.tolist()) == [3, 3, 3, 4, 4, 5, 5]
    for e, n in enumerate(episodes.lengths.tolist()):
        rows = episodes.rows("observations", torch.full((n + 1,), e), torch.arange(n + 1))
        assert rows[:, 1].tolist() == list(range(n + 1)) and len(rows[:, 0].unique()) == 1
        double = episodes.rows("info/double", torch.full((n + 1,), e), torch.arange(n + 1))
        assert double.tolist() == [2 * t for t in range(n + 1)]
        rewards = episodes.rows("rewards", torch.full((n + 1,), e), torch.arange(n + 1))
        assert rewards.tolist() == [1.0] * n + [0.0]
        for name, even in (("truncated", True), ("terminated", False)):
            flags = episodes.rows(name, torch.full((n + 1,), e), torch.arange(n + 1)).tolist()
            assert flags == [t == n - 1 and ((n % 2 == 1) == even) for t in range(n + 1)]


def test_recorded_transitions_can_be_replayed(tmp_path):
    episodes = collect("worldmodels/BlockPhysics-v0", tmp_path / "a", episodes=6, steps=5, seed=9)
    envs = make_envs("worldmodels/BlockPhysics-v0", 6)
    first, _ = envs.reset(seed=9)
    paths = episodes.paths(torch.arange(6), torch.zeros(6, dtype=torch.int64), 5)
    assert torch.equal(paths.observations[0], first)
    for t in range(5):
        observation, *_, info = envs.step(paths.actions[t])
        assert torch.equal(paths.observations[t + 1], observation)
        assert torch.equal(episodes.rows("info/moved", torch.arange(6), torch.tensor(t + 1)), info["moved"])


def test_seeds_repeat_and_more_episodes_than_copies(tmp_path):
    options = {"episodes": 5, "steps": 4, "num_envs": 2}
    a = collect("worldmodels/Shapes-v0", tmp_path / "a", seed=1, **options)
    b = collect("worldmodels/Shapes-v0", tmp_path / "b", seed=1, **options)
    c = collect("worldmodels/Shapes-v0", tmp_path / "c", seed=2, **options)
    assert torch.equal(a.arrays["observations"], b.arrays["observations"])
    assert not torch.equal(a.arrays["observations"], c.arrays["observations"])
    assert a.lengths.tolist() == [4] * 5
    starts = {row.numpy().tobytes() for row in a.rows("observations", torch.arange(5), torch.zeros(5).long())}
    assert len(starts) == 5


def test_invalid_transitions_can_be_dropped(tmp_path):
    options = {"episodes": 300, "steps": 20, "env_kwargs": {"num_objects": 5}}
    kept = collect("worldmodels/BlockPhysics-v0", tmp_path / "a", **options)
    dropped = collect("worldmodels/BlockPhysics-v0", tmp_path / "b", drop_invalid=True, **options)
    assert kept.arrays["info/invalid"].sum() > 10 and dropped.arrays["info/invalid"].sum() == 0
    assert dropped.lengths.tolist() == [20] * 300
    assert dropped.rows("truncated", torch.arange(300), dropped.lengths - 1).all()
    with pytest.raises(UserError, match="no 'invalid'"):
        collect("CartPole-v1", tmp_path / "c", episodes=1, drop_invalid=True)


def test_vectors_pictures_and_minigrid(tmp_path):
    cart = collect("CartPole-v1", tmp_path / "a", episodes=20, seed=0)
    assert cart.observation_shape == (4,) and cart.about["action"] == {"kind": "discrete", "sizes": [2]}
    assert 5 < cart.lengths.float().mean() < 60
    ends = cart.rows("terminated", torch.arange(20), cart.lengths - 1)
    assert ends.all() and cart.arrays["terminated"].sum() == 20
    pole = cart.rows("observations", torch.arange(20), cart.lengths)
    assert ((pole[:, 2].abs() > 0.2) | (pole[:, 0].abs() > 2.4)).all()  # the last row is where it fell
    grid = collect("MiniGrid-Empty-5x5-v0", tmp_path / "b", episodes=2, steps=6, resize=(28, 28))
    assert grid.observation_shape == (28, 28, 3) and grid.arrays["observations"].dtype == torch.uint8
    assert grid.arrays["observations"].float().std() > 10
    box = collect("Pendulum-v1", tmp_path / "c", episodes=2, steps=5)
    assert box.about["action"] == {"kind": "box", "sizes": [1]} and box.arrays["actions"].shape == (12, 1)


def test_neighbouring_seeds_of_foreign_environments_share_no_episode(tmp_path):
    starts = []
    for seed in (1, 3):
        episodes = collect("CartPole-v1", tmp_path / str(seed), episodes=32, steps=3, seed=seed)
        first = episodes.rows("observations", torch.arange(32), torch.zeros(32).long())
        starts.append({tuple(row) for row in first.tolist()})
    assert len(starts[0]) == len(starts[1]) == 32 and not starts[0] & starts[1]


class Chatty(gym.Env):
    """Its infos change type, appear late, and are words."""

    observation_space, action_space = gym.spaces.Box(0, 9, (1,), np.float32), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        self.times = getattr(self, "times", 0) + 1
        return np.zeros(1, np.float32), {"prob": 1}

    def step(self, action):
        self.count += 1
        late = {"success": True} if self.times > 1 else {}
        return np.full(1, self.count, np.float32), 0.0, False, False, {"prob": 0.25, "word": "x", **late}


def test_infos_that_change_are_kept_or_left_out(tmp_path):
    gym.register("Chatty-v0", entry_point=Chatty)
    try:
        episodes = collect("Chatty-v0", tmp_path / "a", episodes=3, steps=2, num_envs=1)
    finally:
        del gym.registry["Chatty-v0"]
    assert episodes.rows("info/prob", torch.zeros(3).long(), torch.arange(3)).tolist() == [1.0, 0.25, 0.25]
    assert {name for name in episodes.arrays if name.startswith("info/")} == {"info/prob"}
    assert len(Episodes.load(tmp_path / "a")) == 3


def test_a_policy_can_be_given(tmp_path):
    episodes = collect(
        "worldmodels/Shapes-v0", tmp_path / "a", episodes=3, steps=4, policy=lambda obs, info: torch.full((3,), 6)
    )
    assert (episodes.rows("actions", torch.arange(3), torch.zeros(3).long()) == 6).all()


SLOW = """
import os, sys, time
from pathlib import Path
import numpy as np
from worldmodels.data.collect import collected
folder, processes = Path(sys.argv[1]), bool(sys.argv[2:])

def policy(observations, infos):
    (folder / f"acted-{os.getpid()}").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
    return np.zeros(2, np.int64)

settings = {"env_id": "CartPole-v1", "episodes": 2, "steps": 2, "policy": policy}
print(collected(folder / "data", "train", settings, processes=processes).num_transitions)
"""


def slow(folder, *words):
    """A process that collects, once the folder holds a file "go"."""
    command = [sys.executable, "-P", "-c", SLOW, str(folder), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def acted(folder, count):
    """Wait until so many processes have begun to collect in a folder; their numbers."""
    while len(found := sorted(folder.glob("acted-*"))) < count:
        time.sleep(0.01)
    return {int(file.name.removeprefix("acted-")) for file in found}


def test_a_second_process_waits_for_the_data_that_the_first_collects(tmp_path):
    first = slow(tmp_path)
    acted(tmp_path, 1)
    second = slow(tmp_path)
    line = second.stderr.readline()
    assert line.startswith("worldmodels: waiting for another process that collects ") and str(tmp_path / "data") in line
    (tmp_path / "go").touch()
    for process in (first, second):
        out, error = process.communicate(timeout=100)
        assert (process.returncode, out, error) == (0, "4\n", "")
    assert acted(tmp_path, 1) == {first.pid} and len(list((tmp_path / "data").iterdir())) == 1


def test_a_second_process_collects_when_the_first_dies(tmp_path):
    first = slow(tmp_path, "processes")  # whose own processes hold the lock's file open as well
    acted(tmp_path, 1)
    second = slow(tmp_path)
    assert "waiting" in second.stderr.readline()
    first.kill()
    first.communicate()
    (tmp_path / "go").touch()
    out, error = second.communicate(timeout=100)
    assert (second.returncode, out, error) == (0, "4\n", "")
    assert acted(tmp_path, 2) == {first.pid, second.pid}


def test_data_in_a_folder_that_cannot_be_written_are_opened(tmp_path, monkeypatch):
    settings = {"env_id": "CartPole-v1", "episodes": 2, "steps": 2}
    assert len(collected(tmp_path / "data", "train", settings)) == 2
    (tmp_path / "data").chmod(0o500)
    monkeypatch.setattr(collecting, "FileLock", None)  # permissions do not stop root
    try:
        assert len(collected(tmp_path / "data", "train", settings)) == 2
    finally:
        (tmp_path / "data").chmod(0o700)


def test_user_mistakes(tmp_path):
    with pytest.raises(UserError, match="did you mean 'CartPole-v1'"):
        find_spec("CartPol-v1")
    with pytest.raises(UserError, match="no module 'nothere'"):
        find_spec("nothere:Env-v0")
    with pytest.raises(UserError, match="mode is 'seen'"):
        make_envs("worldmodels/BlockPhysics-v0", 2, env_kwargs={"mode": "seen"})
    with pytest.raises(UserError, match="colour"):
        make_envs("worldmodels/BlockPhysics-v0", 2, env_kwargs={"colour": 1})
    with pytest.raises(UserError, match="seed is -1"):
        collect("CartPole-v1", tmp_path / "a", episodes=1, seed=-1)
    with pytest.raises(UserError, match="at least 1"):
        collect("CartPole-v1", tmp_path / "a", episodes=0)
    gym.register("Endless-v0", entry_point="gymnasium.envs.classic_control.cartpole:CartPoleEnv")
    try:
        with pytest.raises(UserError, match="steps="):
            collect("Endless-v0", tmp_path / "b", episodes=1)
    finally:
        del gym.registry["Endless-v0"]
    with pytest.raises(UserError, match="resize is for pictures"):
        collect("CartPole-v1", tmp_path / "c", episodes=1, resize=(5, 5))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("env_id", "near"),
    [
        ("Pong-v5", "'ALE/Pong-v5'"),
        ("BlockPhysics-v0", "'worldmodels/BlockPhysics-v0'"),
        ("minigrid-empty-5x5-v0", "'MiniGrid-Empty-5x5-v0'"),
        ("CartPole-v7", "'CartPole-v1', 'CartPole-v0' or"),
        ("worldmodels/Block-v0", "'worldmodels/BlockPhysics-v0'"),
        ("gymnasium:CartPol-v1", "'CartPole-v1'"),
    ],
)
def test_an_unknown_environment_is_told_in_one_line_with_those_nearest_to_it(env_id, near):
    with pytest.raises(UserError, match=f"unknown environment '{env_id}'; did you mean {near}") as caught:
        find_spec(env_id)
    line = str(caught.value)
    assert "\n" not in line and line.count("'") <= 8
    assert (f"write package:{env_id}" in line) == (":" not in env_id)
    with pytest.raises(UserError, match="unknown environment 'Qxzzz'. If a package registers it, write package:Qxzzz"):
        find_spec("Qxzzz")


def test_cswm_files_are_imported(tmp_path):
    h5py = pytest.importorskip("h5py")
    from worldmodels.data.importers import import_cswm

    episodes = collect("worldmodels/Shapes-v0", tmp_path / "ours", episodes=12, steps=3, seed=4)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for e in range(12):
            paths = episodes.paths(torch.tensor([e]), torch.tensor([0]), 3)
            frames = paths.observations[:, 0].numpy().transpose(0, 3, 1, 2).astype(np.float32) / 255.0
            group = file.create_group(str(e))
            group["obs"], group["next_obs"], group["action"] = frames[:-1], frames[1:], paths.actions[:, 0].numpy()
    imported = import_cswm(tmp_path / "x.h5", tmp_path / "a", action_size=20, actions_per_object=4)
    assert torch.equal(imported.arrays["observations"], episodes.arrays["observations"])
    assert torch.equal(imported.arrays["actions"], episodes.arrays["actions"])
    assert torch.equal(imported.arrays["truncated"], episodes.arrays["truncated"])
    assert imported.about["action"] == episodes.about["action"]
    assert torch.equal(Episodes.load(tmp_path / "a").lengths, episodes.lengths)

    with pytest.raises(UserError, match="up to 4"):
        import_cswm(tmp_path / "x.h5", tmp_path / "b", action_size=5)
    with pytest.raises(UserError, match="action_size="):
        import_cswm(tmp_path / "x.h5", tmp_path / "b", action_size=0)
    (tmp_path / "bad.h5").write_bytes(b"no HDF5")
    with pytest.raises(UserError, match="cannot be read as HDF5"):
        import_cswm(tmp_path / "bad.h5", tmp_path / "b", action_size=5)
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file.create_group("weights")
    with pytest.raises(UserError, match="not numbered episodes"):
        import_cswm(tmp_path / "other.h5", tmp_path / "b", action_size=5)
    with h5py.File(tmp_path / "part.h5", "w") as file:
        file.create_group("0")["obs"] = np.zeros((2, 3, 4, 4))
    with pytest.raises(UserError, match="lacks 'obs'"):
        import_cswm(tmp_path / "part.h5", tmp_path / "b", action_size=5)
    assert not (tmp_path / "b").exists()
