"""Environment steps a second of recurrent PPO beside sb3-contrib's, with equal networks and settings, in turns in one run.

python benchmarks/agents.py [--rounds 3] [--out FILE.json]
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import torch
from rich.console import Console
from rich.table import Table
from sb3_contrib import RecurrentPPO as ContribPPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecMonitor

import worldmodels.envs  # noqa: F401
from worldmodels.agents import BabyAIFeatures, RecurrentPPO, VectorEnvAdapter

SETTINGS: dict[str, Any] = {"n_steps": 128, "batch_size": 256, "n_epochs": 4, "seed": 0, "device": "cpu"}
MAZE: dict[str, Any] = {"room_size": 6, "agent_view_size": 5}
FEATURES: dict[str, Any] = {
    "features_extractor_class": BabyAIFeatures,
    "features_extractor_kwargs": {"features_dim": 128, "channels": 16, "words": 16},
    "net_arch": [],
}
MATCHED = {  # about as many parameters of the core as an LSTM of 256 on 128 features, 395,000
    "lstm": {},
    "gru": {"num_slots": 1, "slot_size": 304},
    "scoff": {"num_slots": 4, "slot_size": 112},
    "rims": {"num_slots": 4, "slot_size": 58},
}


def cartpole() -> Any:
    """Eight of Gymnasium's cart-poles as SB3 makes them."""
    return make_vec_env("CartPole-v1", 8, seed=0)


def maze() -> Any:
    """Eight of our mazes as an SB3 ``VecEnv`` in an SB3 wrapper, so that both see numpy arrays and infos."""
    return VecMonitor(VectorEnvAdapter(gym.make_vec("worldmodels/GoToObjMaze-v0", num_envs=8, **MAZE)))


def contrib(policy: str, envs: Any, **kwargs: Any) -> ContribPPO:
    """sb3-contrib's with one LSTM of 256 for actor and critic."""
    lstm = {"lstm_hidden_size": 256, "shared_lstm": True, "enable_critic_lstm": False}
    return ContribPPO(policy, envs, policy_kwargs=lstm | kwargs, **SETTINGS)


def batched(core: str, num_envs: int) -> RecurrentPPO:
    """Ours on mazes that never leave the device; minibatches are an eighth of a rollout, as above."""
    envs = gym.make_vec("worldmodels/GoToObjMaze-v0", num_envs=num_envs, **MAZE)
    settings = SETTINGS | {"n_steps": 32, "batch_size": 32 * num_envs // 4}
    return RecurrentPPO("MultiInputPolicy", envs, core, MATCHED[core], policy_kwargs=FEATURES, **settings)


def rate(model: Any, steps: int) -> float:
    """Environment steps a second over so many of them, after a rollout to warm up."""
    model.learn(1)
    before, start = model.num_timesteps, time.perf_counter()
    model.learn(steps, reset_num_timesteps=False)
    return (model.num_timesteps - before) / (time.perf_counter() - start)


def main() -> None:
    """Measure everything in turns, keep the best of each, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3072)
    parser.add_argument("--out", default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    flat = {"net_arch": [64, 64]}
    models: dict[str, Callable[[], Any]] = {
        "CartPole, sb3-contrib LSTM 256": lambda: contrib("MlpLstmPolicy", cartpole(), **flat),
        "CartPole, ours LSTM 256": lambda: RecurrentPPO("MlpPolicy", cartpole(), policy_kwargs=flat, **SETTINGS),
        "maze x 8, sb3-contrib LSTM 256": lambda: contrib("MultiInputLstmPolicy", maze(), **FEATURES),
        "maze x 8, ours LSTM 256": lambda: RecurrentPPO("MultiInputPolicy", maze(), policy_kwargs=FEATURES, **SETTINGS),
    }
    for core in MATCHED:
        models[f"maze x 256 batched, ours {core}"] = lambda core=core: batched(core, 256)
    models["maze x 512 batched, ours lstm"] = lambda: batched("lstm", 512)
    made = {name: make() for name, make in models.items()}
    best: dict[str, float] = dict.fromkeys(models, 0.0)
    for _ in range(arguments.rounds):
        for name, model in made.items():
            best[name] = max(best[name], rate(model, arguments.steps))
    table = Table("", "core's parameters", "steps/s", "x sb3-contrib")
    for name, value in best.items():
        base = best["CartPole, sb3-contrib LSTM 256" if "CartPole" in name else "maze x 8, sb3-contrib LSTM 256"]
        policy = made[name].policy
        core = policy.memory.core if hasattr(policy, "memory") else policy.lstm_actor
        count = sum(p.numel() for p in core.parameters())
        table.add_row(name, f"{count:,}", f"{value:,.0f}", f"{value / base:.2f}")
    Console(width=110).print(table)
    if arguments.out:
        with open(arguments.out, "w", encoding="utf-8") as file:
            json.dump(best, file, indent=1)


if __name__ == "__main__":
    main()
