"""Seconds of a sweep of four short runs through each launcher, two at a time, everything included.

python benchmarks/launchers.py [--rounds 2] [--beside PYTHON]

The data are collected before. Ray trains with num_cpus=2, submitit in batches of two, since its local form has no limit. What
is not installed is left out. ``--beside`` times the default launcher of another installation too.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

SWEEP = (
    "experiment=block_physics size=smoke core=gnn trainer.threads=1 logger.figures=false logger.progress=false".split()
)
RAY = "hydra/launcher=ray +hydra.launcher.ray.init.num_cpus=2 +hydra.launcher.ray.remote.num_cpus=1"
LAUNCHERS = {  # the module each needs, and its words
    "one after another": ("worldmodels", "jobs=1"),
    "side by side": ("worldmodels", "jobs=2"),
    "side by side, as a search": (
        "optuna",
        "hydra/sweeper=tune hydra.sweeper.n_trials=4 hydra.sweeper.n_jobs=2 jobs=2",
    ),
    "joblib": ("hydra_plugins.hydra_joblib_launcher", "hydra/launcher=joblib hydra.launcher.n_jobs=2"),
    "submitit_local": (
        "hydra_plugins.hydra_submitit_launcher",
        "hydra/launcher=submitit_local hydra.sweeper.max_batch_size=2",
    ),
    "ray": ("hydra_plugins.hydra_ray_launcher", f"{RAY} +hydra.launcher.ray.init.include_dashboard=false"),
}


def seconds(python: str, words: list[str], folder: Path) -> float:
    command = [python, "-m", "worldmodels", "train", *SWEEP, *words]
    began = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--beside", help="the Python of another installation")
    arguments = parser.parse_args()
    rows = [(name, sys.executable, words) for name, (module, words) in LAUNCHERS.items() if _there(module)]
    if arguments.beside:
        rows.insert(2, (f"side by side, {arguments.beside}", arguments.beside, "jobs=2"))
    took: dict[str, list[float]] = {name: [] for name, _, _ in rows}
    with tempfile.TemporaryDirectory() as folder:
        seconds(sys.executable, ["run=first", "trainer.steps=1"], Path(folder))
        for turn in range(arguments.rounds):
            for number, (name, python, words) in enumerate(rows):
                sweep = ["-m", "seed=0,1,2,3", *words.split(), f"run=runs/{turn}-{number}"]
                took[name].append(seconds(python, sweep, Path(folder)))
    table = Table("four runs, two at a time", "seconds, best of the rounds", "each round")
    for name, times in took.items():
        table.add_row(name, f"{min(times):.1f}", ", ".join(f"{t:.1f}" for t in times))
    Console().print(table)


def _there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    main()
