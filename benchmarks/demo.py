"""The main job in five minutes on two cores: rules and a GNN learn block physics side by side, and one table says how well.

python benchmarks/demo.py     (or: make demo)
"""

import json
import shutil
import time
from pathlib import Path

from worldmodels.launch import train_command
from worldmodels.report.tables import scores, show
from worldmodels.run import EVALUATION

HOME = Path("demo")
WORDS = ("experiment=block_physics", "size=cpu", "trainer.steps=3000", "trainer.evaluate_every=0")


def main() -> None:
    """Collect, train both at once on a thread each, print the table, draw the pictures."""
    start = time.perf_counter()
    shutil.rmtree(HOME / "runs", ignore_errors=True)  # of an earlier demo
    print("training rules and gnn side by side, 3,000 steps each ...", flush=True)
    own = ("data.test.episodes=2000", f"data.dir={HOME / 'data'}", f"run={HOME / 'runs'}", "trainer.threads=1")
    runs = train_command(["-m", "core=rules,gnn", "jobs=2", *WORDS, *own])
    evaluations = {
        type(run.model.core).__name__.lower(): json.loads((run.path / EVALUATION).read_text()) for run in runs
    }
    show(scores(evaluations, "Block physics, held-out episodes, percent"))
    for run in runs:
        print(f"pictures: {run.path / 'figures'}")
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
