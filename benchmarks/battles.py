"""What the built-in heuristics are worth in battles: the rows beside a trained policy's.

python benchmarks/battles.py [--scenario 2s3z] [--enemy 3s5z] [--steps 120] [--rounds 5]
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

COPIES = 100

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


def fight(policy: Policy, envs: Skirmish, rounds: int) -> dict[str, np.ndarray]:
    """So many battles in every copy: those that ``evaluate-agent`` plays with as many environments."""
    played: dict[str, list[Tensor]] = {"success": [], "return": [], "length": []}
    for turn in range(rounds):
        observation, info = envs.reset(seed=1_000_003 if turn == 0 else None)
        total, length = torch.zeros(envs.num_envs), torch.zeros(envs.num_envs)
        going, won = (torch.full((envs.num_envs,), start) for start in (True, False))
        while going.any():
            observation, rewards, terminated, truncated, info = envs.step(policy(observation, info))
            total += rewards * going
            length += going
            over = (terminated | truncated) & going
            won |= over & info["won"]
            going &= ~over
        for name, value in (("success", won), ("return", total), ("length", length)):
            played[name].append(value)
    return {name: torch.cat(values).numpy() for name, values in played.items()}


def main() -> None:
    """Play and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", default="2s3z")
    parser.add_argument("--enemy", default=None)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=5, help=f"of {COPIES} battles at once")
    options = parser.parse_args()
    torch.manual_seed(0)
    against = options.enemy or options.scenario
    table = Table("policy", title=f"{options.scenario} against {against}, {COPIES * options.rounds} battles")
    for name in ("won, %", "return", "steps"):
        table.add_column(f"{name}\n95 %", justify="right")
    for name, (policy, targets) in POLICIES.items():
        envs = Skirmish(
            COPIES,
            scenario=options.scenario,
            enemy=options.enemy,
            observation="units",
            targets=targets,
            max_episode_steps=options.steps,
        )
        cells = []
        for measure, result in summary(fight(policy, envs, options.rounds)).items():
            if measure != "episodes":
                mean, low, high = (
                    result[part] * (100 if measure == "success" else 1) for part in ("mean", "low", "high")
                )
                cells.append(f"{mean:.1f}\n{low:.1f}..{high:.1f}")
        table.add_row(name, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
