"""Block physics by plans: a trained world model beside the same planner on a copy and on the true simulator, and no plans.

Goals are what one to five random moves lead to, every one of which moves a block. All play for ten steps; a copy has
succeeded if it stood at its goal after one of them. The slots that are aimed at are those of the picture of the goal.

worldmodels train experiment=block_physics core=rules size=cpu seed=0 run=runs/rules
python benchmarks/planning.py --run runs/rules [--episodes 100] [--out FILE.json]
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import worldmodels
from worldmodels.data.environments import make_envs
from worldmodels.metrics import mean_interval
from worldmodels.planning import Imagination, Planner, Simulator, States, reach

STEPS = 10
POSITIONS = "state/positions"


def goals_of(envs: Any, moves: int, seed: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Snapshots and pictures after so many moves of each copy, and which copies saw a push; the copies stay as they were."""
    before, generator = envs.snapshot(), torch.Generator().manual_seed(seed)
    count = torch.zeros(envs.num_envs, dtype=torch.int64)
    pushed = torch.zeros(envs.num_envs, dtype=torch.bool)
    while bool((count < moves).any()):
        drawn = torch.randint(int(envs.single_action_space.n), (envs.num_envs,), generator=generator)
        observations, _, _, _, info = envs.step(torch.where(count < moves, drawn, 0))  # 0: the first block stays
        count, pushed = count + info["moved"].any(1), pushed | (info["moved"].sum(1) > 1)
    reached = {name: part for name, part in envs.snapshot().items() if name != "steps"}
    envs.restore(before)
    return reached, observations, pushed


def distance(states: States, goals: States) -> Tensor:
    """Cells that blocks are away from where they should be, summed."""
    return (states[POSITIONS] - goals[POSITIONS]).abs().sum((1, 2)).float()


def played(
    kind: str, envs: Any, reached: dict[str, Tensor], picture: Tensor, model: Any, make: Any, seed: int
) -> tuple:
    """At which step each copy was at its goal first (-1: never), how far it was at the end, and seconds a step of all."""
    generator = torch.Generator().manual_seed(seed)
    there = lambda info: (info["positions"] == reached[POSITIONS]).all((1, 2))  # noqa: E731
    start = time.perf_counter()
    if kind in ("random actions", "staying"):
        first = torch.full((envs.num_envs,), -1)
        for step in range(STEPS):
            drawn = torch.randint(int(envs.single_action_space.n), (envs.num_envs,), generator=generator)
            info = envs.step(torch.zeros_like(drawn) if kind == "staying" else drawn)[4]
            first = torch.where((first < 0) & there(info), step + 1, first)
    else:
        method = "shooting" if kind == "the model, random shooting" else "icem" if kind == "the model, iCEM" else "cem"
        planner = Planner(envs.single_action_space, horizon=5, candidates=128, rounds=3, elites=12, method=method)
        if kind == "the true simulator":
            dynamics: Any = Simulator(envs, make, distance)
            goals: States = reached
        else:
            dynamics = Imagination(model, copies=kind == "a copy of the present")
            goals = dynamics.encode(picture)
        first, info = reach(envs, dynamics, planner, goals, there, steps=STEPS, generator=generator)
    took = (time.perf_counter() - start) / STEPS
    return first, distance({POSITIONS: info["positions"]}, reached), took


def main() -> None:
    """Play, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", required=True)
    parser.add_argument("--episodes", type=int, default=100, help="for each number of moves")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    run = worldmodels.load(arguments.run)
    env = run.config["env"]

    def make(copies: int) -> Any:
        return make_envs(env["id"], copies, env_kwargs=env["kwargs"])

    kinds = ["random actions", "staying", "a copy of the present", "the model", "the model, iCEM"]
    kinds += ["the model, random shooting", "the true simulator"]
    found: dict[str, dict[str, list[Any]]] = {kind: {"first": [], "distance": [], "seconds": []} for kind in kinds}
    pushes: list[bool] = []
    for moves in range(1, 6):
        envs = make(arguments.episodes)
        envs.reset(seed=100 + moves)
        reached, picture, pushed = goals_of(envs, moves, seed=moves)
        apart = distance(envs.snapshot(), reached) > 0  # a walk may lead back
        pushes += pushed[apart].tolist()
        start = envs.snapshot()
        for kind in kinds:
            envs.restore(start)
            first, far, took = played(kind, envs, reached, picture, run.model, make, seed=1000 + moves)
            found[kind]["first"] += first[apart].tolist()
            found[kind]["distance"] += far[apart].tolist()
            found[kind]["seconds"].append(took)
            print(
                f"{moves} moves, {kind}: {float((first[apart] > 0).float().mean()):.3f}, {took:.2f} s a step",
                flush=True,
            )
    table = Table("played by", title=f"{len(pushes)} goals one to five moves away, {STEPS} steps", title_justify="left")
    for heading in ("success, %", "without a push", "with a push", "cells away at the end", "s a step"):
        table.add_column(heading, justify="right")
    for kind, parts in found.items():
        success = torch.tensor(parts["first"]) > 0
        pushed = torch.tensor(pushes)
        low, high = mean_interval(success.double().numpy())
        groups = [f"{100 * float(success[which].float().mean()):.1f}" for which in (~pushed, pushed)]
        mean = f"{100 * float(success.float().mean()):.1f} ({100 * low:.1f} to {100 * high:.1f})"
        seconds = sum(parts["seconds"]) / len(parts["seconds"])
        table.add_row(kind, mean, *groups, f"{sum(parts['distance']) / len(pushes):.2f}", f"{seconds:.2f}")
    Console(width=130).print(table)
    if arguments.out:
        Path(arguments.out).write_text(json.dumps({"goals": len(pushes), "pushes": pushes, **found}, indent=1))


if __name__ == "__main__":
    main()
