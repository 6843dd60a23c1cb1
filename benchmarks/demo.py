"""The main job in five minutes on two cores: SNPS and a GNN learn block physics, and one table says how well.

python benchmarks/demo.py     (or: make demo)
"""

import shutil
import time
from pathlib import Path

import worldmodels
from worldmodels.report.tables import scores, show

HOME = Path("demo")
STEPS = {"snps": 3000, "gnn": 3000}


def main() -> None:
    """Collect, train both, print the table, draw the pictures."""
    start = time.perf_counter()
    evaluations, pictures = {}, []
    for core, steps in STEPS.items():
        folder = HOME / core
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier demo
        print(f"training {core} for {steps} steps ...", flush=True)
        run = worldmodels.train(
            "experiment=block_physics",
            f"core={core}",
            "size=cpu",
            f"run={folder}",
            f"data.dir={HOME / 'data'}",
            f"trainer.steps={steps}",
            "trainer.evaluate_every=0",
            "data.test.episodes=2000",
        )
        evaluations[core] = run.evaluate(quiet=False)
        pictures += run.draw()
    show(scores(evaluations, "Block physics, held-out episodes, percent"))
    for path in pictures:
        print(path)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
