"""The short form of the campaign of faults in ``benchmarks/reliability.py``."""

import json
import subprocess
import sys

from .conftest import ROOT


def campaign(folder, *words):
    told = folder / "results.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "reliability.py"), "--short", "--out", str(told), *words],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=600,
    )
    assert [path.name for path in folder.iterdir()] == ["results.json"], done.stderr
    return json.loads(told.read_text()), done


def test_no_fault_of_the_short_campaign_is_met_badly(tmp_path):
    found, done = campaign(tmp_path)
    assert sum(row["tried"] for row in found["rows"].values()) > 70
    for name, row in found["rows"].items():
        assert row["tried"] == row["survived"] + row["refused"], f"{name}: {done.stderr}"
    assert f"| {sum(row['tried'] for row in found['rows'].values()):,} |" in done.stdout


def test_a_trial_can_be_repeated(tmp_path):
    found, done = campaign(tmp_path, "--only", "env-check/1")
    assert found["rows"]["env-check"]["tried"] == 1 and done.stderr.startswith("env-check/1 ")
    assert done.stderr == campaign(tmp_path, "--only", "env-check/1")[1].stderr
