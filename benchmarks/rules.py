"""Rules against the GNN and SNPS on true slots: trained on five blocks, run on three and eight; and what a step costs.

A slot is a block's row, column and weight, so nothing has to be found in a picture; what is left is the transition.

python benchmarks/rules.py [--seeds 0,1,2] [--steps 3000] [--out FILE.json]
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from speed import seconds
from torch import Tensor, nn

from worldmodels.core import Tokens
from worldmodels.cores.gnn import GNN
from worldmodels.cores.nps import SNPS
from worldmodels.cores.rules import Rules
from worldmodels.envs.block_physics import BlockWorld
from worldmodels.training import Annealed

SLOT, ACTIONS, GRID = 3, 5, 5
CORES = {
    "rules": lambda K: Rules(SLOT + ACTIONS, K, SLOT, num_stages=2),
    "gnn": lambda K: GNN(SLOT + ACTIONS, K, SLOT, hidden_size=128, edge_actions=True),
    "snps": lambda K: SNPS(SLOT + ACTIONS, K, SLOT, num_stages=2, temperature=0.5),
    "snps, gradient through outputs": lambda K: SNPS(
        SLOT + ACTIONS, K, SLOT, num_stages=2, temperature=0.5, gradient="outputs"
    ),
}


def transitions(seed: int, number: int, num_objects: int) -> tuple[Tensor, Tensor]:
    """Tokens ``(number, K, 8)`` and how the blocks move, ``(number, K, 2)``.

    In half of the rows block 1 begins beside block 0, which is acted upon, so that pushes are not rare; weights are any of
    1 to 9.
    """
    generator = torch.Generator().manual_seed(seed)
    cells = torch.rand(number, GRID * GRID, generator=generator).argsort(1)[:, :num_objects]
    positions = torch.stack([cells // GRID, cells % GRID], dim=-1)
    offsets = torch.tensor([[-1, 0], [0, 1], [1, 0], [0, -1]])[torch.randint(4, (number,), generator=generator)]
    beside = positions[:, 0] + offsets
    free = (beside >= 0).all(-1) & (beside < GRID).all(-1)
    free &= ~(positions[:, 2:] == beside[:, None]).all(-1).any(-1) & (torch.arange(number) % 2 == 0)
    positions[:, 1] = torch.where(free[:, None], beside, positions[:, 1])
    actions = torch.randint(ACTIONS * num_objects, (number,), generator=generator)
    actions = torch.where(free, actions % ACTIONS, actions)
    weights = torch.rand(number, 9, generator=generator).argsort(1)[:, :num_objects] + 1
    envs = BlockWorld(
        number,
        num_objects=num_objects,
        pushing=True,
        mode="unobserved",
        stay_action=True,
        shuffle_objects=False,
        goal=False,
        device="cpu",
        max_episode_steps=None,
        render_mode=None,
    )
    envs.reset(seed=seed, options={"positions": positions, "weights": weights})
    *_, after = envs.step(actions)
    done = F.one_hot(actions, ACTIONS * num_objects).float().unflatten(1, (num_objects, ACTIONS))
    slots = torch.cat([positions / 2.0 - 1.0, weights[..., None] / 5.0 - 1.0], dim=-1)
    return torch.cat([slots, done], dim=-1), (after["positions"] - positions).float()


def train(core: nn.Module, seed: int, steps: int) -> None:
    """The mean squared error of the changes of five blocks, in batches of 256."""
    tokens, moves = transitions(seed, 32768, 5)
    target = F.pad(moves / 2.0, (0, 1))
    optimizer = torch.optim.Adam(core.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps, pct_start=0.05)
    for step in range(steps):
        if isinstance(core, Annealed):
            core.anneal(step / steps)
        rows = torch.randint(len(tokens), (256,))
        change = core(Tokens(tokens[rows]), {})[0]
        optimizer.zero_grad()
        (target[rows] - change).square().sum((1, 2)).mean().backward()
        torch.nn.utils.clip_grad_norm_(core.parameters(), 1.0)
        optimizer.step()
        schedule.step()


@torch.no_grad()
def right(core: nn.Module, num_objects: int) -> tuple[float, float]:
    """The share of transitions in which every block's move is told right, and of those with a push."""
    tokens, moves = transitions(10_000 + num_objects, 8192, num_objects)
    told = (core.eval()(Tokens(tokens), {})[0][..., :2] * 2.0).round()
    same = (told == moves).all(-1).all(-1).float()
    pushes = (moves != 0).any(-1).sum(-1) == 2
    return float(same.mean()), float(same[pushes].mean())


def cost(core: nn.Module, num_objects: int, batch: int = 64, repeats: int = 6) -> tuple[float, float]:
    """Milliseconds of a training step (forward and backward) and of a step at evaluation, medians."""
    tokens, device = Tokens(torch.randn(batch, num_objects, SLOT + ACTIONS)), torch.device("cpu")
    core.train()
    training = seconds(lambda: core(tokens, {})[0].sum().backward(), device, repeats)
    core.eval()
    with torch.no_grad():
        return 1000 * training, 1000 * seconds(lambda: core(tokens, {}), device, repeats)


def main() -> None:
    """Train what was asked for and print two Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"right": [], "cost": []}
    print(
        "| core | parameters | seed | 5 blocks, pushes | 3 blocks, pushes | 8 blocks, pushes |\n|---|---|---|---|---|---|"
    )
    for seed in map(int, options.seeds.split(",")):
        for name, make in CORES.items():
            torch.manual_seed(seed)
            core = make(5)
            train(core, seed, options.steps)
            row = {str(K): right(core, K) for K in (5, 3, 8)}
            parameters = sum(parameter.numel() for parameter in core.parameters())
            results["right"].append({"core": name, "seed": seed, "parameters": parameters, **row})
            shares = " | ".join(f"{100 * every:.1f}, {100 * pushes:.1f}" for every, pushes in row.values())
            print(f"| {name} | {parameters:,} | {seed} | {shares} |", flush=True)
            if options.out:
                options.out.write_text(json.dumps(results, indent=1))
    print("\n| blocks | rules, training | gnn, training | rules, evaluation | gnn, evaluation |\n|---|---|---|---|---|")
    for K in (5, 10, 20, 50):
        rules, gnn = (cost(CORES[name](K), K) for name in ("rules", "gnn"))
        results["cost"].append({"blocks": K, "rules": rules, "gnn": gnn})
        print(f"| {K} | {rules[0]:.1f} ms | {gnn[0]:.1f} ms | {rules[1]:.1f} ms | {gnn[1]:.1f} ms |", flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
