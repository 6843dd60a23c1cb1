"""Whether commands that run for long take more and more memory or file descriptors.

python benchmarks/growth.py [--minutes 10] [--jobs 2] [--out growth.json]

Each command trains or records until it is ended; it evaluates and writes checkpoints on its way. Its own
resident memory (without mapped files) and its open descriptors are read every second from /proc, so this needs Linux.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

ALWAYS = "size=smoke trainer.steps=1000000000 trainer.threads=1 logger.progress=false run=run".split()
OFTEN = "trainer.evaluate_every=500 trainer.checkpoint_every=500 trainer.log_every=20".split()
COMMANDS = {
    "train, a world model": ["train", "experiment=block_physics", "core=rules", *ALWAYS, *OFTEN],
    "train, a task": ["train", "experiment=adding", "core=scoff", *ALWAYS, *OFTEN],
    "train-agent": ["train-agent", "experiment=memory", "core=scoff", *ALWAYS],
    "collect": ["collect", "env=worldmodels/BlockPhysics-v0", "episodes=1000000", "path=data"],
}


def watch(words: list[str], minutes: float) -> list[tuple[float, float, int]]:
    """Seconds, megabytes and descriptors of a command, once a second."""
    samples = []
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": folder}
        with open(f"{folder}/printed", "w+b") as printed:
            process = subprocess.Popen(
                [sys.executable, "-m", "worldmodels", *words], cwd=folder, env=environ, stdout=printed, stderr=printed
            )
            began = time.monotonic()
            while (seconds := time.monotonic() - began) < 60 * minutes:
                time.sleep(1)
                if process.poll() is not None:
                    printed.seek(0)
                    sys.exit(f"{' '.join(words)} ended after {seconds:.0f} s: {printed.read().decode()[-1000:]}")
                with contextlib.suppress(ProcessLookupError, FileNotFoundError, IndexError):  # it has just ended
                    status = Path(f"/proc/{process.pid}/status").read_text()
                    own = int(status.partition("RssAnon:")[2].split()[0]) / 1024
                    samples.append((seconds, own, len(os.listdir(f"/proc/{process.pid}/fd"))))
            process.kill()
            process.wait()
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--jobs", type=int, default=1, help="commands that run side by side")
    parser.add_argument("--out", type=Path, help="where the samples are written, as JSON")
    given = parser.parse_args()
    with ThreadPoolExecutor(given.jobs) as pool:
        found = dict(zip(COMMANDS, pool.map(partial(watch, minutes=given.minutes), COMMANDS.values()), strict=True))
    if given.out:
        given.out.write_text(json.dumps(found))
    third = "MB after a third", "MB after two thirds", "MB at the end"
    table = Table("command", *third, "MB a minute, last two thirds", "descriptors, same three")
    for name, samples in found.items():
        seconds, own, files = np.array(samples).T
        late = seconds > seconds[-1] / 3
        a_minute = 60 * np.polyfit(seconds[late], own[late], 1)[0]
        three = [len(samples) // 3, 2 * len(samples) // 3, -1]
        table.add_row(
            name,
            *(f"{own[at]:.1f}" for at in three),
            f"{a_minute:+.2f}",
            ", ".join(f"{files[at]:.0f}" for at in three),
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
