"""The short form of the campaign of faults in ``benchmarks/reliability.py``."""

import json
import os
import subprocess
import sys

from .conftest import ROOT

CAMPAIGN = ROOT / "benchmarks" / "reliability.py"


def test_no_fault_of_the_short_campaign_is_met_badly(tmp_path):
    words = [sys.executable, str(CAMPAIGN), "--short", "--out", str(tmp_path / "results.json")]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=300, env={**os.environ})
    found = json.loads((tmp_path / "results.json").read_text())
    assert done.returncode == 0 and not found["failures"], done.stderr
    for verdict in ("lost", "silent", "traceback", "hang", "executed"):
        assert sum(row[verdict] for row in found["rows"].values()) == 0
    assert all(row["tried"] for row in found["rows"].values())
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_a_trial_can_be_repeated(tmp_path):
    """The same seed and number make the same trial."""
    words = [sys.executable, str(CAMPAIGN), "--short", "--only", "flipped/1"]
    one, other = (
        subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=300).stderr for _ in range(2)
    )
    assert one == other and one.startswith("flipped/1 ")
