"""Does a schema come to stand for a law? SCOFF in the smallest world of switching dynamics, from true positions.

A token is where the ball is, its last four displacements and the two lamps, so nothing has to be found in a picture; one
object file of 32 says the next position. With one schema there is nothing to choose: what it reaches shows whether two laws
need two.

python benchmarks/schemata.py [--schemata 1,2] [--seeds 0,1,2] [--steps 3000] [--out FILE.json]
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldmodels.core import Tokens, unroll
from worldmodels.cores.scoff import SCOFF
from worldmodels.envs.one_ball import OneBall
from worldmodels.report.choices import trace
from worldmodels.tasks.video import agreement

SIZE, BACK, STEPS, BATCH = 32, 4, 50, 32


def videos(number: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens ``(51, number, 1, 12)``, positions ``(51, number, 2)`` of order one, and laws ``(51, number)``."""
    env = OneBall(number, dynamics="switching", image_size=SIZE, observation="state")
    states = [env.reset(seed=seed)[0]]
    for _ in range(STEPS):
        states.append(env.step(torch.zeros(number, dtype=torch.long))[0])
    recorded = torch.stack(states)
    places, laws = (recorded[..., :2] - SIZE / 2) / (SIZE / 4), env.laws(recorded)
    before = [torch.cat([places[:1].expand(k, -1, -1), places[:-k]]) - places for k in range(1, BACK + 1)]
    return torch.cat([places, F.one_hot(laws, 2), *before], dim=-1)[..., None, :], places, laws


class Ball(nn.Module):
    """One object file, and a readout of where the ball goes from here."""

    def __init__(self, num_schemata: int):
        super().__init__()
        sizes = {"num_schemata": num_schemata, "schema_keys": "each", "communication": "none", "value_size": 64}
        self.core = SCOFF(4 + 2 * BACK, 1, 32, **sizes)
        self.readout = nn.Sequential(nn.Linear(32, 64), nn.ELU(), nn.Linear(64, 2))

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        """The mean squared error of the next positions."""
        files, _ = unroll(self.core, Tokens(tokens[:-1]), self.core.initial_state(tokens.shape[1]))
        error: Tensor = (places[:-1] + self.readout(files[:, :, 0]) - places[1:]).square().mean()
        return error


Recorded = tuple[Tensor, Tensor, Tensor]


def measure(train: Recorded, test: Recorded, num_schemata: int, seed: int, steps: int) -> dict[str, Any]:
    """Train and test one model."""
    tokens, places, _ = train
    torch.manual_seed(seed)
    model = Ball(num_schemata)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    annealed = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        chosen = torch.randint(tokens.shape[1], (BATCH,))
        optimiser.zero_grad()
        model(tokens[:, chosen], places[:, chosen]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        annealed.step()
    model.eval()
    tokens, places, laws = test
    with torch.no_grad():
        error = float(model(tokens, places))
        schema = trace(model.core, Tokens(tokens[:-1]), model.core.initial_state(tokens.shape[1]))["schema"]
    return {"schemata": num_schemata, "seed": seed, "error": error} | agreement(schema, laws[:-1], 2, 0)


def main() -> None:
    """Train and test all models, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemata", default="1,2")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    train, test = videos(1000, seed=1), videos(200, seed=3)
    rows = []
    print(
        "| schemata | seed | error x 1000 | schema is the law's, % | right after a switch, % | frames by schema and law |"
    )
    print("| ---: | ---: | ---: | ---: | ---: | --- |")
    for num_schemata in map(int, given.schemata.split(",")):
        for seed in map(int, given.seeds.split(",")):
            row = measure(train, test, num_schemata, seed, given.steps)
            rows.append(row)
            table = " / ".join(" ".join(map(str, part)) for part in row["table"])
            shares = f"{100 * row['agreement']:.1f} | {100 * row['after_switch']:.1f}"
            print(f"| {num_schemata} | {seed} | {1000 * row['error']:.2f} | {shares} | {table} |", flush=True)
            if given.out:
                given.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
