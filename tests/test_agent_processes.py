"""Agents in several processes: the same episodes and the same update as in one, exact resume, one log."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from safetensors.torch import load_file

import worldmodels.envs  # noqa: F401
from worldmodels import agents, checkpoints
from worldmodels.agents import RecurrentPPO, VectorEnvAdapter
from worldmodels.envs.shared import AgentCopies
from worldmodels.errors import UserError
from worldmodels.logging import read_metrics

OURS = {
    "worldmodels/OneBall-v0": {"dynamics": "switching"},
    "worldmodels/Occluders-v0": {"block": "O2"},
    "worldmodels/Sprites-v0": {},
    "worldmodels/Towers-v0": {},
    "worldmodels/Recall-v0": {},
    "worldmodels/CartPole-v0": {},
    "worldmodels/BlockPhysics-v0": {},
    "worldmodels/GoToObjMaze-v0": {"room_size": 4, "num_rows": 2, "num_cols": 2},
    "worldmodels/BouncingBalls-v0": {},
    "worldmodels/Skirmish-v0": {"scenario": "2m"},
}


def each_part(function, *observations):
    if isinstance(observations[0], dict):
        return all(function(*(one[name] for one in observations)) for name in observations[0])
    return function(*observations)


@pytest.mark.parametrize("env_id", OURS)
def test_a_part_of_the_copies_lives_through_the_episodes_of_the_whole(env_id):
    whole, part = (gym.make_vec(env_id, num_envs=number, max_episode_steps=3, **OURS[env_id]) for number in (5, 2))
    whole.action_space.seed(0)
    seen, _ = whole.reset(seed=7)
    other, _ = part.reset(seed=7, options={"first_env": 3})
    for _ in range(8):
        assert each_part(lambda a, b: torch.equal(a[3:], b), seen, other)
        actions = whole.action_space.sample()
        (seen, *told, _), (other, *others, _) = whole.step(actions), part.step(actions[3:])
        assert all(torch.equal(a[3:], b) for a, b in zip(told, others, strict=True))
    for seed in (None, [1, 2]):
        with pytest.raises(ValueError, match="first_env=3 says whose streams of a seed are taken; give one integer"):
            part.reset(seed=seed, options={"first_env": 3})


def test_environments_of_others_have_the_seeds_of_the_whole():
    makers = [lambda: gym.make("CartPole-v1")] * 4
    whole, part = VectorEnvAdapter(SyncVectorEnv(makers)), VectorEnvAdapter(SyncVectorEnv(makers[:2]))
    part.first_env = 2
    for envs in (whole, part):
        envs.seed(5)
    for _ in range(2):  # seeded, then the next episodes
        assert torch.equal(whole.start()[2:], part.start())


def test_first_environments_of_teams_are_counted_in_teams():
    def teams(number):
        return VectorEnvAdapter(AgentCopies(gym.make_vec("worldmodels/Skirmish-v0", num_envs=number, scenario="2m")))

    whole, part = teams(3), teams(1)
    part.first_env = 4
    for envs in (whole, part):
        envs.seed(5)
    assert each_part(lambda a, b: torch.equal(a[4:], b), whole.start(), part.start())


SMOKE = ("size=smoke", "logger.figures=false", "logger.progress=false", "trainer.device=cpu")
RUNS = {
    "recall": (
        "experiment=memory",
        "core=scoff",
        "core.num_slots=2",
        "core.slot_size=8",
        "ppo.sequence_length=4",
        "ppo.batch_size=4",  # one sequence, which one of the processes does not have
        "ppo.critic=own",
    ),
    "carts": (
        "env.id=CartPole-v1",
        "core=gru",
        "core.num_slots=1",
        "core.slot_size=8",
        "ppo.target_kl=1e-5",
        "ppo.learning_rate=3e-3",
    ),
    "battle": ("experiment=skirmish", "core=gru", "core.num_slots=1", "core.slot_size=8", "ppo.batch_size=24"),
}
KILLED = "recall"


def test_two_processes_make_the_updates_of_one(tmp_path):
    """torchrun with two CPU processes, which train every run, are stopped in one, and go on with it."""
    driver = tmp_path / "driver.py"
    driver.write_text(
        f"""
import warnings

from worldmodels import agents
from worldmodels.agents import RecurrentPPO

warnings.filterwarnings("ignore", message="a rollout has")
for name, words in {RUNS!r}.items():
    run = agents.train(*{SMOKE!r}, f"run={tmp_path}/two/{{name}}", *words)
    end = None if run is None else run.model.num_timesteps
    print(f"run {{name}} {{end}}\\n", end="")  # in one piece, as both write to one pipe

real, updates = RecurrentPPO.train, []


def killing(self):
    updates.append(1)
    if len(updates) == 4:  # the last checkpoint was written after two
        raise KeyboardInterrupt
    real(self)


RecurrentPPO.train = killing
try:
    agents.train(*{SMOKE!r}, "run={tmp_path}/cut", *{RUNS[KILLED]!r})
except KeyboardInterrupt:
    RecurrentPPO.train = real
agents.train("resume={tmp_path}/cut")
"""
    )
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(driver)], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = sorted(line for line in done.stdout.splitlines() if line.startswith("run "))
    expected = sorted(f"run {name} {end}" for name in RUNS for end in (128, None))  # the first process has the run
    assert told == expected, done.stdout + done.stderr

    for name, words in RUNS.items():
        with pytest.warns(UserWarning, match="a rollout has") if name == "battle" else nullcontext():
            agents.train(*SMOKE, f"run={tmp_path}/one/{name}", *words)
        one, two = (checkpoints.latest(tmp_path / which / name) for which in ("one", "two"))
        assert json.loads((two / "meta.json").read_text())["processes"] == 2
        weights, others = (load_file(last / "model.safetensors") for last in (one, two))
        apart = max(float((value - others[key]).abs().max()) for key, value in weights.items())
        assert apart < 1e-5, f"{name}: weights are {apart} apart"
        whole = torch.load(one / "trainer_0.pt", weights_only=True)
        parts = [torch.load(two / f"trainer_{rank}.pt", weights_only=True) for rank in (0, 1)]
        for key, value in (whole["envs"] or {}).items():  # the environments stand where they do in one process
            joined = [part["envs"][key] for part in parts]
            joined = joined[0] if value.dim() == 0 else torch.cat(joined)
            assert torch.allclose(joined, value, atol=1e-5) if value.is_floating_point() else torch.equal(joined, value)
        assert torch.equal(parts[0]["noise"], whole["noise"]) and torch.equal(parts[1]["noise"], whole["noise"])
        for part in parts:  # each knows the episodes of all
            assert part["episodes"] == whole["episodes"] and part["successes"] == whole["successes"]
            for moments, own in zip(
                whole["optimizer"]["state"].values(), part["optimizer"]["state"].values(), strict=True
            ):
                assert torch.allclose(moments["exp_avg"], own["exp_avg"], atol=1e-4)
        logs = [read_metrics(tmp_path / which / name) for which in ("one", "two")]
        assert len(logs[0]) == len(logs[1]) and ((logs[0][-1]["train/n_updates"] < 6) == (name == "carts"))  # it stops
        for line, other in zip(*logs, strict=True):
            for key in line:
                if not key.startswith("time/"):
                    assert other[key] == pytest.approx(line[key], rel=1e-3, abs=1e-4), key

    last, cut = (checkpoints.latest(tmp_path / which) for which in (f"two/{KILLED}", "cut"))
    weights, others = (load_file(one / "model.safetensors") for one in (last, cut))
    assert all(torch.equal(value, others[key]) for key, value in weights.items())
    steps = [[line["step"] for line in read_metrics(tmp_path / which)] for which in (f"two/{KILLED}", "cut")]
    assert steps[0] == steps[1] == [32, 64, 96, 128]
    with pytest.raises(UserError, match="was written by 2 processes, here are 1; resume with as many"):
        agents.train(f"resume={tmp_path}/cut")


def test_environments_that_cannot_be_shared_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match="env.num_envs=4 is no multiple of the 3 processes"):
        agents.train(*SMOKE, *RUNS["recall"], f"run={tmp_path}/run")
    assert not (tmp_path / "run" / "config.yaml").exists()

    class Two:
        world_size, global_rank = 2, 1

    for env, seed in (("CartPole-v1", 0), (gym.make_vec("worldmodels/Recall-v0", num_envs=2), None)):
        with pytest.raises(
            ValueError, match="2 processes learn together; give each a gymnasium.vector.VectorEnv and the"
        ):
            RecurrentPPO("MlpPolicy", env, "gru", seed=seed, n_steps=8, batch_size=8, device="cpu", fabric=Two())
    env = gym.make_vec("worldmodels/Recall-v0", num_envs=2)
    model = RecurrentPPO("MlpPolicy", env, "gru", seed=0, n_steps=8, batch_size=16, device="cpu", fabric=Two())
    assert model.env.first_env == 2 and model.rollout_buffer.all_envs == 4
    model.save(tmp_path / "agent.zip")
    assert RecurrentPPO.load(tmp_path / "agent.zip", device="cpu").fabric is None


@pytest.mark.parametrize(
    "space", [gym.spaces.Discrete(3), gym.spaces.Box(-1, 1, (2,)), gym.spaces.MultiDiscrete([2, 3])]
)
def test_actions_are_drawn_as_among_all_rows(space):
    class Acting(gym.Env):
        observation_space = gym.spaces.Box(0.0, 1.0, (4,), np.float32)
        action_space = space

    model = RecurrentPPO("MlpPolicy", SyncVectorEnv([Acting] * 5), "gru", n_steps=8, batch_size=8, device="cpu")
    seen, starts = torch.rand(5, 4), torch.ones(5, dtype=torch.bool)
    state = model.initial_state(5)
    torch.manual_seed(1)
    actions, values, log_probs, _ = model.policy(seen, state, starts)
    torch.manual_seed(1)
    rows = {name: leaf[3:] for name, leaf in state.items()}
    some, some_values, some_log_probs, _ = model.policy(seen[3:], rows, starts[3:], among=(3, 5))
    for part, whole in ((some, actions), (some_values, values), (some_log_probs, log_probs)):
        assert torch.allclose(part, whole[3:], atol=1e-6)
