"""Rows of docs/results.md from the evaluations of runs: mean over seeds, and each seed.

python benchmarks/summary.py runs/shapes-gnn-0 runs/shapes-gnn-1 ...     (folders named <experiment>-<core>-<seed>)
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

COLUMNS = (
    ("H@1, 10 steps", "all", "h@1"),
    ("its latent copy", "all", "copy_h@1"),
    ("MRR, 10 steps", "all", "mrr"),
    ("in-episode H@1, 10 steps", "in_episode", "h@1"),
    ("its latent copy", "in_episode", "copy_h@1"),
    ("with a push, H@1, 10 steps", "moved", "h@1"),
)


def main() -> None:
    """Print one Markdown table."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for path in sys.argv[1:]:
        evaluation = json.loads((Path(path) / "evaluation.json").read_text(encoding="utf-8"))
        groups[Path(path).name.rpartition("-")[0]].append(evaluation)
    print("| run | seeds | " + " | ".join(name for name, *_ in COLUMNS) + " |")
    print("| --- | --- | " + " | ".join("---:" for _ in COLUMNS) + " |")
    for name, evaluations in groups.items():
        cells = []
        for _, section, key in COLUMNS:
            values = [100 * e[section]["10"][key] for e in evaluations if "10" in e[section]]
            mean = f"**{sum(values) / len(values):.1f}**" if values else ""
            each = " (" + ", ".join(f"{value:.1f}" for value in values) + ")" if len(values) > 1 else ""
            cells.append(mean + each)
        print(f"| {name} | {len(evaluations)} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
