"""Memory and speed of training from data of 200 MB and ten times as much: read from disk, mapped, or held in memory.

Every row of the table is a process of its own with one thread. Peak is the most that was ever resident in it (VmHWM: what it
allocated and the pages it had of files, its libraries included); "of files" are the latter alone at the end (RssFile).
Transitions a second are of the median step, of 1,024 transitions each: trained, and only drawn, with the data in the system's
cache or (cold) dropped from it before.

python benchmarks/memory.py [--megabytes 200] [--bound 64] [--steps 20] [--dir FOLDER]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from worldmodels.cores.gnn import GNN
from worldmodels.data.episodes import Episodes, EpisodesWriter, Paths
from worldmodels.encoders import CSWMEncoder
from worldmodels.losses import contrastive
from worldmodels.world_model import WorldModel

B, K, D, LENGTH, SHAPE = 1024, 5, 2, 100, (50, 50, 3)
ACTION = {"kind": "discrete", "sizes": [20], "per_object": 4}


def write(path: Path, megabytes: int) -> None:
    """Episodes of random pictures, so many megabytes of them."""
    generator = np.random.default_rng(0)
    with EpisodesWriter(path, {"action": ACTION}) as writer:
        for _ in range(max(1, round(megabytes * 1e6 / (LENGTH + 1) / np.prod(SHAPE)))):
            writer.append(
                {
                    "observations": generator.integers(0, 256, (LENGTH + 1, *SHAPE), dtype=np.uint8),
                    "actions": generator.integers(0, 20, LENGTH + 1),
                }
            )


def drop(path: Path) -> None:
    """Take the files of a folder out of the system's cache."""
    for file in path.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident(kind: str) -> float:
    """Megabytes of this process by the name that Linux has for them."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:")) * 1024 / 1e6


def measure(path: Path, kept: str, bound: int, steps: int) -> dict[str, float]:
    """Training steps and draws of one process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = WorldModel(
        CSWMEncoder(SHAPE, K, D, hidden_size=64), GNN(D + 4, K, D, hidden_size=64), action=ACTION, action_to="slot"
    )
    optimizer = torch.optim.Adam(model.parameters())
    result = {"before": resident("VmRSS")}
    memory = {"read": bound * 10**6, "mapped": sys.maxsize, "held": 0}[kept]
    data = Episodes.load(path, verify=False, memory=memory)
    if kept == "held":
        data = Episodes({name: array[:] for name, array in data.arrays.items()}, data.lengths, data.about)

    def draw() -> Paths:
        return data.paths_unchecked(torch.randint(len(data), (B,)), torch.randint(LENGTH, (B,)), 1)

    def step() -> None:
        paths = draw()
        slots, pred_slots = model(paths.observations, paths.actions, False)
        optimizer.zero_grad()
        contrastive(slots[0], pred_slots[0], slots[1]).total.backward()
        optimizer.step()

    for name, work, times in (("trained", step, steps), ("drawn", draw, 60), ("cold", draw, 10)):
        if name == "cold":
            del data
            drop(path)
            data = Episodes.load(path, verify=False, memory=memory)
        else:
            work()
        seconds = []
        for _ in range(times):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
        result[name] = B / sorted(seconds)[times // 2]
        if name == "drawn":
            result |= {"peak": resident("VmHWM"), "files": resident("RssFile")}
    return result


def main() -> None:
    """Write both data sets, measure each way of keeping them, and print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=200, help="of the smaller data set")
    parser.add_argument(
        "--bound", type=int, default=64, help="megabytes of the arrays that may lie in memory when read"
    )
    parser.add_argument("--steps", type=int, default=20, help="of training, 1,024 transitions each")
    parser.add_argument(
        "--dir", type=Path, help="where the data are written for the while; the system's own by default"
    )
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)  # a folder of data, and how it is kept
    given = parser.parse_args()
    if given.measure:
        path, kept = given.measure
        print(json.dumps(measure(Path(path), kept, given.bound, given.steps)))
        return
    told = {
        "read": f"read, at most {given.bound} MB held",
        "mapped": "mapped",
        "held": "held in memory",
    }
    print("| data, MB | kept | before the data, MB | peak, MB | of files, MB | trained/s | drawn/s | drawn/s, cold |")
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        for megabytes in (given.megabytes, 10 * given.megabytes):
            path = Path(folder) / str(megabytes)
            write(path, megabytes)
            for kept, words in told.items():
                options = ["--bound", str(given.bound), "--steps", str(given.steps), "--measure", str(path), kept]
                done = subprocess.run([sys.executable, __file__, *options], capture_output=True, text=True, check=True)
                found = json.loads(done.stdout)
                cold = "" if kept == "held" else f"{found['cold']:,.0f}"
                cells = [f"{found[name]:,.0f}" for name in ("before", "peak", "files", "trained", "drawn")]
                print(f"| {megabytes:,} | {words} | {' | '.join(cells)} | {cold} |", flush=True)


if __name__ == "__main__":
    main()
