"""One table over all runs of a task, which ``worldmodels report`` makes of runs that are no world models'."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from ..checkpoints import write_aside
from ..errors import UserError
from ..run import CONFIG, EVALUATION, build_task, is_agent, read_config, read_evaluation
from ..tasks import TASKS
from ..trust import trusting, vet
from .scoreboard import core_name


def task_runs(paths: Sequence[str | Path]) -> tuple[list[Path], list[Path]]:
    """The runs of a task in some folders, and those of them that were not evaluated; both empty if there are world models'.

    Raises:
        UserError: runs of several tasks, and no world model's.
    """
    found: dict[str, dict[Path, None]] = {}
    for path in map(Path, paths):
        named = (path / CONFIG).is_file()
        for folder in [path] if named else [config.parent for config in sorted(path.rglob(CONFIG))]:
            try:
                task = None if is_agent(folder) else read_config(folder)["task"] or TASKS["transitions"]
            except UserError:
                if named:
                    raise
                continue
            if task is not None:
                found.setdefault(task["_target_"], {})[folder] = None
    if TASKS["transitions"]["_target_"] in found or not found:
        return [], []
    if len(found) > 1:
        names = ", ".join(sorted(name.rpartition(".")[2] for name in found))
        raise UserError(f"a report is of the runs of one task; these are of {names}: name their folders apart")
    (runs,) = found.values()
    return [run for run in runs if (run / EVALUATION).is_file()], [
        run for run in runs if not (run / EVALUATION).is_file()
    ]


def overview(runs: Sequence[Path], trust: Iterable[str] = ()) -> tuple[Table, list[dict[str, Any]]]:
    """The task's own table over its runs, and a line of numbers for each run.

    Args:
        runs: their folders, all of one task.
        trust: see ``load_run``.
    """
    with trusting(trust):
        config = read_config(runs[0])
        vet(runs[0], config)
        task = build_task(config)
    results, lines, cores = {}, [], dict[str, dict[str, Any]]()
    for run in runs:
        result, config = read_evaluation(run), read_config(run)
        if str(config["core"].get("_target_")).rpartition(".")[2] == result["core"]:
            result["core"] = core_name(config["core"])
            cores[run.as_posix()] = config["core"]
        results[run.as_posix()] = result
    for name, differing in _differing({run: str(results[run]["core"]) for run in cores}, cores).items():
        results[name]["core"] += "".join(f", {option}={cores[name].get(option)}" for option in differing)
    for name, result in results.items():
        plain = {key: value for key, value in result.items() if isinstance(value, (str, int, float))}
        lines.append({"run": name, **plain, **result["scores"]})
    table: Any = getattr(task, "overview", task.table)(results, task.name)
    return table, lines


def _differing(names: Mapping[str, str], cores: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Of each run the options in which its core differs from others of that name, so that no two models are averaged."""
    found = {}
    for run, name in names.items():
        alike = [cores[other] for other, its in names.items() if its == name]
        options = dict.fromkeys(option for core in alike for option in core)
        found[run] = [option for option in options if any(core.get(option) != cores[run].get(option) for core in alike)]
    return found


def write(table: Table, lines: Sequence[Mapping[str, Any]], folder: Path, command: str) -> list[Path]:
    """Write ``report.md``, the table, and ``report.csv``, a line a run, into a folder and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    columns = list(dict.fromkeys(column for line in lines for column in line))
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    page = f"# {table.title}\n\n```bash\n{command}\n```\n\n{markdown(table)}"
    for name, content in (("report.md", page), ("report.csv", text.getvalue())):
        write_aside(folder / name, content.encode())
    return [folder / "report.md", folder / "report.csv"]


def markdown(table: Table) -> str:
    """A table of text in Markdown."""
    heads = [str(column.header).replace("\n", " ") for column in table.columns]
    rows = zip(*([str(cell) for cell in column.cells] for column in table.columns), strict=True)
    rules = ["---", *["---:"] * (len(heads) - 1)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (heads, rules, *rows))
