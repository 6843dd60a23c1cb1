"""``worldmodels report`` over runs of a task."""

import csv
import json
import os
from pathlib import Path

import pytest

from worldmodels.cli import main
from worldmodels.report.overview import markdown, overview, task_runs
from worldmodels.tasks.relations import Relations


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder, before = tmp_path_factory.mktemp("overview"), Path.cwd()
    os.chdir(folder)
    words = ["train", "experiment=relations", "size=smoke", "logger.progress=false", "logger.figures=false"]
    try:
        for name, more in {
            "relations/a": ["core=relation_network"],
            "relations/b": ["core=relation_network", "seed=1"],
            "relations/c": ["core=transformer", "task.rule=rmts", "task.normalise=false"],
        }.items():
            assert main([*words, *more, f"run={name}"]) == 0
        assert main(["train", "experiment=adding", "core=lstm", "size=smoke", "run=adding"]) == 0
    finally:
        os.chdir(before)
    return folder


def test_a_report_over_rules_and_withheld_symbols(home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    results = {}
    for name, share in (("a", 0.5), ("b", 0.7), ("c", 0.25)):
        result = json.loads((home / "relations" / name / "evaluation.json").read_text())
        results[name] = result | {"test": result["test"] | {"accuracy": share}}
    table = Relations().overview(results, "relations")
    assert [str(column.header) for column in table.columns] == [
        "model",
        "same_different\n95 withheld",
        "rmts\n95 withheld",
    ]
    cells = list(zip(*(column.cells for column in table.columns), strict=True))
    assert cells[0] == ("RelationNetwork", "60.0 ± 14.1 (2)", "") and cells[1] == (
        "Transformer, not normalised",
        "",
        "25.0 (1)",
    )
    assert ("paper: ESBN", "100.0", "95.0") in cells and ("paper: ESBN, not normalised", "49.8", "51.0") in cells
    assert main(["report", "relations", "--out", "out"]) == 0
    said = capsys.readouterr().out
    assert "relation_network" in said and "transformer, not normalised" in said and "out/report.md" in said
    page = (home / "out" / "report.md").read_text()
    assert "worldmodels report relations --out out" in page and "| relation_network |" in page
    with (home / "out" / "report.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 3 and {line["rule"] for line in lines} == {"same_different", "rmts"}
    assert {line["seed"] for line in lines} == {"0", "1"} and all(0 <= float(line["accuracy"]) <= 1 for line in lines)


def test_runs_of_other_tasks_are_reported_by_their_own_table(home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    assert main(["report", "adding"]) == 0
    assert "adding" in capsys.readouterr().out and (home / "adding" / "report.md").is_file()


def test_cores_with_other_options_are_other_models(home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    words = ["train", "experiment=adding", "size=smoke", "logger.progress=false", "logger.figures=false"]
    for name, more in {"gru": ["core=gru"], "two": ["core=scoff"], "again": ["core=scoff", "seed=1"]}.items():
        assert main([*words, *more, f"run=options/{name}"]) == 0
    assert main([*words, "core=scoff", "core.num_schemata=3", "core.communication=snps", "run=options/three"]) == 0
    _, lines = overview(task_runs([Path("options")])[0])
    assert {Path(line["run"]).name: line["core"] for line in lines} == {
        "gru": "gru",
        "two": "scoff, num_schemata=2, communication=attention",
        "again": "scoff, num_schemata=2, communication=attention",
        "three": "scoff, num_schemata=3, communication=snps",
    }


def test_runs_of_two_tasks_make_no_table(home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    assert main(["report", "."]) == 2
    said = capsys.readouterr().err
    assert "Adding, Relations" in said and said.count("\n") == 1


def test_runs_without_an_evaluation_are_named(home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    (home / "relations" / "b" / "evaluation.json").rename(home / "kept.json")
    try:
        assert main(["report", "relations"]) == 0
        assert "not evaluated: relations/b" in capsys.readouterr().out
        evaluated, missing = task_runs(["relations"])
        assert len(evaluated) == 2 and [path.name for path in missing] == ["b"]
        table, lines = overview(evaluated)
        assert len(lines) == 2 and markdown(table).count("\n") == len(table.rows) + 2
    finally:
        (home / "kept.json").rename(home / "relations" / "b" / "evaluation.json")
