"""What the built-in heuristics are worth in battles: the rows beside a trained policy's.

python benchmarks/battles.py [--scenario 2s3z] [--enemy 3s5z] [--steps 120] [--episodes 500]
"""

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from worldmodels.agents.evaluation import summary
from worldmodels.envs.skirmish import ACTIONS, ATTACK, Skirmish, focus_nearest

Policy = Callable[[Any, dict[str, Any]], Tensor]


def at_random(observation: Any, info: dict[str, Any]) -> Tensor:
    """Every action as often as any other."""
    return torch.randint(0, len(ACTIONS), info["targets"].shape)


def attack_nearest(observation: Any, info: dict[str, Any]) -> Tensor:
    """Always attack whoever is nearest, which need not be whom one attacked before."""
    return torch.full(info["targets"].shape, ATTACK)


POLICIES: dict[str, tuple[Policy, str]] = {  # and what they can attack
    "random": (at_random, "nearest"),
    "attack the nearest": (attack_nearest, "nearest"),
    "focus_nearest": (focus_nearest, "each"),
}


def fight(policy: Policy, envs: Skirmish) -> dict[str, np.ndarray]:
    """One battle in every copy."""
    observation, info = envs.reset(seed=1_000_003)
    total, length = torch.zeros(envs.num_envs), torch.zeros(envs.num_envs)
    going, won = (torch.full((envs.num_envs,), start) for start in (True, False))
    while going.any():
        observation, rewards, terminated, truncated, info = envs.step(policy(observation, info))
        total += rewards * going
        length += going
        over = (terminated | truncated) & going
        won |= over & info["won"]
        going &= ~over
    return {"success": won.numpy(), "return": total.numpy(), "length": length.numpy()}


def main() -> None:
    """Play and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", default="2s3z")
    parser.add_argument("--enemy", default=None)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--episodes", type=int, default=500)
    options = parser.parse_args()
    torch.manual_seed(0)
    against = options.enemy or options.scenario
    table = Table("policy", title=f"{options.scenario} against {against}, {options.episodes} battles")
    for name in ("won, %", "return", "steps"):
        table.add_column(f"{name}\n95 %", justify="right")
    for name, (policy, targets) in POLICIES.items():
        envs = Skirmish(
            options.episodes,
            scenario=options.scenario,
            enemy=options.enemy,
            observation="units",
            targets=targets,
            max_episode_steps=options.steps,
        )
        cells = []
        for measure, result in summary(fight(policy, envs)).items():
            if measure != "episodes":
                mean, low, high = (
                    result[part] * (100 if measure == "success" else 1) for part in ("mean", "low", "high")
                )
                cells.append(f"{mean:.1f}\n{low:.1f}..{high:.1f}")
        table.add_row(name, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
