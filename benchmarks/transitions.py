"""Every core as the transition of a world model on block physics, at one small budget: runs what is missing, prints a table.

python benchmarks/transitions.py [--runs runs/transitions] [--seeds 0,1,2] [--jobs 2]
"""

import argparse
import json
import os
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from hydra.utils import get_class

from worldmodels.core import RecurrentCore
from worldmodels.cores import CORES

COMMON = (
    "experiment=block_physics",
    "size=cpu",
    "trainer.steps=1000",
    "trainer.threads=1",
    "trainer.evaluate_every=0",
    "evaluation.limit=1000",
    "logger.figures=false",
    "logger.progress=false",
)
COLUMNS = (
    ("H@1, 1 step", "all", "1", "h@1"),
    ("H@1, 10 steps", "all", "10", "h@1"),
    ("its latent copy", "all", "10", "copy_h@1"),
    ("in-episode H@1, 1 step", "in_episode", "1", "h@1"),
    ("in-episode H@1, 10 steps", "in_episode", "10", "h@1"),
    ("its latent copy", "in_episode", "10", "copy_h@1"),
)


def remembers(name: str) -> bool:
    """Whether a core of the table has a state."""
    core: RecurrentCore = get_class(CORES[name]["_target_"])(4, 2, 4)
    return bool(core.initial_state(1))


def jobs(seeds: list[int]) -> list[tuple[str, str, int]]:
    """(memory, core, seed), one seed of all cores before the next."""
    names = [name for name in CORES if name != "esbn"]
    none = [("none", name, seed) for seed in seeds for name in names]
    return none + [("carry", name, seed) for seed in seeds for name in names if remembers(name)]


def main() -> None:
    """Train what has no evaluation yet, several side by side, and print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/transitions"))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    todo = jobs([int(seed) for seed in arguments.seeds.split(",")])
    queue: SimpleQueue[tuple[str, str, int]] = SimpleQueue()
    for job in todo:
        queue.put(job)

    def work() -> None:
        while True:
            try:
                memory, core, seed = queue.get_nowait()
            except Empty:
                return
            run = arguments.runs / f"{memory}-{core}-{seed}"
            if (run / "evaluation.json").exists():
                continue
            options = [*COMMON, f"core={core}", f"seed={seed}", f"run={run}", f"memory={memory}"]
            words = [f"resume={run}"] if (run / "config.yaml").exists() else options
            done = subprocess.run(
                [sys.executable, "-P", "-m", "worldmodels", "train", *words],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
            )
            print(run, "ok" if done.returncode == 0 else done.stderr.strip(), file=sys.stderr, flush=True)

    workers = [threading.Thread(target=work) for _ in range(arguments.jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for memory, core, seed in todo:
        file = arguments.runs / f"{memory}-{core}-{seed}" / "evaluation.json"
        if file.exists():
            groups[memory, core].append(json.loads(file.read_text(encoding="utf-8")))
    print("| memory | core | parameters | seeds | " + " | ".join(name for name, *_ in COLUMNS) + " |")
    print("| --- | --- | ---: | --- | " + " | ".join("---:" for _ in COLUMNS) + " |")
    for (memory, core), evaluations in groups.items():
        cells = []
        for _, section, horizon, key in COLUMNS:
            values = [100 * e[section][horizon][key] for e in evaluations]
            each = ", ".join(f"{value:.1f}" for value in values)
            cells.append(f"**{sum(values) / len(values):.1f}** ({each})")
        count = f"{evaluations[0]['core_parameters']:,}"
        print(f"| {memory} | {core} | {count} | {len(evaluations)} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
