"""One scoreboard of many runs: what a setting is worth over seeds, beside the copies and published figures.

``scoreboard`` reads evaluations into plain values; ``markdown``, ``csv_rows``, ``tables`` and ``figure`` show them.
"""

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np
from rich.table import Table
from rich.text import Text

from ..checkpoints import write_aside
from ..config import offered
from ..cores import CORES
from ..errors import UserError, nearest
from ..logging import SECONDS, read_metrics
from ..metrics import probability_of_improvement, seeds_interval
from ..run import CONFIG, EVALUATION, is_agent, read_config
from .figures import COLORS, save

BASELINES = ("gnn", "gru", "lstm")
ENOUGH_SEEDS = 5  # for a bootstrap; fewer are listed
MEASURES = {
    "all": ("h@1", "mrr", "copy_h@1", "copy_mrr", "true_copy_h@1", "true_copy_mrr")
    + ("h@1_reference", "ceiling", "duplicates", "distinct_h@1", "distinct_mrr"),
    "in_episode": ("h@1", "copy_h@1", "chance"),
    "moved": ("h@1", "copy_h@1"),
}

PUBLISHED = """\
game,source,model,seeds,horizon,h@1,h@1_sd,mrr,mrr_sd
pong,"NPS, Table 11",NPS,50,1,44.09,8.30,60.577,7.919
pong,"NPS, Table 11",NPS,50,5,22.25,7.567,38.731,9.005
pong,"NPS, Table 11",NPS,50,10,15.615,5.748,30.154,7.538
pong,"NPS, Table 11",GNN,50,1,30.442,11.178,48.788,10.428
pong,"NPS, Table 11",GNN,50,5,11.596,6.109,25.481,8.331
pong,"NPS, Table 11",GNN,50,10,7.25,4.057,18.942,6.156
space_invaders,"NPS, Table 12",NPS,50,1,61.269,11.576,74.558,9.425
space_invaders,"NPS, Table 12",NPS,50,5,32.827,9.179,52.981,9.073
space_invaders,"NPS, Table 12",NPS,50,10,21.385,7.118,39.173,8.505
space_invaders,"NPS, Table 12",GNN,50,1,68.75,8.44,79.942,5.662
space_invaders,"NPS, Table 12",GNN,50,5,21.673,6.81,39.635,7.395
space_invaders,"NPS, Table 12",GNN,50,10,14.712,4.932,31.0,6.26
"""
"""Papers' figures for Atari in percent, on 100 test episodes of 10 steps; NPS is Goyal et al. 2021, appendix E.3."""

_NOT_COMPARED = (  # settings that say where and how a run works, not what it learns
    "seed",
    "data.dir",
    "data.processes",
    "logger",
    "trainer.checkpoint_every",
    "trainer.log_every",
    "trainer.accelerator",
    "trainer.threads",
)


@dataclass(frozen=True)
class Statistic:
    """A number over seeds.

    Args:
        mean: over them.
        sd: standard deviation (ddof 1); None for one seed.
        interval: 95 % bootstrap interval of the mean, from five seeds on.
        values: of each seed; none of a published figure.
    """

    mean: float
    sd: float | None = None
    interval: tuple[float, float] | None = None
    values: Sequence[float] = ()


@dataclass
class Row:
    """The runs of one value of what is compared.

    Args:
        name: the value.
        seeds: how many runs.
        paths: the runs' folders.
        scores: by horizon and measure, of ``all`` by its name, of others as "in_episode_h@1"; shares of one.
        better: by horizon and baseline, the probability of improvement in H@1 over it.
        probe: by object and measure, "r2", "slot_r2" and "imagined_r2/<steps>".
        core_parameters: of the core, every number that occurs.
        parameters: of all.
        seconds: of training, the mean over runs that tell it.
        collapsed: in how many runs the collapse alarm rang.
        shortcut: in how many the shortcut alarm rang.
        published: whether these are a paper's figures.
    """

    name: str
    seeds: int
    paths: list[str] = field(default_factory=list)
    scores: dict[str, dict[str, Statistic]] = field(default_factory=dict)
    better: dict[str, dict[str, Statistic]] = field(default_factory=dict)
    probe: dict[str, dict[str, Statistic]] = field(default_factory=dict)
    core_parameters: list[int] = field(default_factory=list)
    parameters: list[int] = field(default_factory=list)
    seconds: float | None = None
    collapsed: int = 0
    shortcut: int = 0
    published: bool = False


@dataclass
class Section:
    """Rows scored on the same test data: the settings of these, the rows, and what has to be said about them."""

    setting: dict[str, Any]
    rows: list[Row]
    notes: list[str]

    @property
    def title(self) -> str:
        """The environment, or where its episodes lie."""
        name = self.setting.get("env.id") or self.setting.get("data.test.path") or "test episodes"
        kwargs = [f"{k.removeprefix('env.kwargs.')}={_text(v)}" for k, v in self.setting.items() if ".kwargs." in k]
        return ", ".join([str(name), *kwargs])

    @property
    def horizons(self) -> list[str]:
        """All that occur, in steps."""
        return sorted({h for row in self.rows for h in row.scores}, key=int)


@dataclass
class Scoreboard:
    """What ``scoreboard`` found: a section for every setting of test data.

    Args:
        compare: the key whose values are the rows.
        sections: the tables.
        not_evaluated: runs without an evaluation.
    """

    compare: str
    sections: list[Section]
    not_evaluated: list[str]


@dataclass
class _Run:
    path: Path
    config: dict[str, Any]  # by dotted key; "core" is its name
    evaluation: dict[str, Any]
    seconds: float | None

    def value(self, key: str) -> str:
        return _text(self.config[key]) if key in self.config else "not set"


@dataclass
class _Grid:
    """A table before it is rendered; the style of a line is "", "copy", "collapsed" or "published"."""

    title: str
    header: list[str]
    lines: list[tuple[str, list[str]]]
    names: int = 1  # how many columns are names


def core_name(core: Mapping[str, Any]) -> str:
    """The name a core was chosen by: the entry of the table of cores that says most of it, else its class.

    Sizes of slots are free: ``core=gru core.slot_size=32`` is a gru.
    """
    found, most = str(core.get("_target_")).rpartition(".")[2], 0
    for name, entry in offered("cores", CORES).items():
        options = {key: value for key, value in entry.items() if key != "slot_size"}
        if len(options) > most and all(core.get(key) == value for key, value in options.items()):
            found, most = name, len(options)
    return found


def over_seeds(values: Sequence[float]) -> Statistic:
    """Mean, standard deviation and, from five seeds on, 95 % interval of one number a seed."""
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
    interval = seeds_interval(values) if len(values) >= ENOUGH_SEEDS else None
    return Statistic(float(np.mean(values)), sd, interval, values)


def scoreboard(paths: Sequence[str | Path], compare: str = "core") -> Scoreboard:
    """Read world models' runs and put those together that differ in nothing but their seed.

    Args:
        paths: folders; each is a run or is searched for runs.
        compare: what the rows are: "core" for the cores by their names, or a dotted key of the config.

    Raises:
        UserError: no runs, runs of another kind, an unknown key.
    """
    found, not_evaluated = _find(paths)
    runs = [_read(path) for path in found]
    if not runs:
        mend = f"run 'worldmodels evaluate run={not_evaluated[0]}'" if not_evaluated else "give folders of runs"
        given = " or ".join(map(str, paths)) or "no folder"
        raise UserError(f"no evaluated runs in {given}, {len(not_evaluated)} without an evaluation; {mend}")
    known = {key for run in runs for key in run.config}
    if compare not in known:
        raise UserError(f"unknown key compare={compare}; {nearest(compare, known)}")
    sections: dict[str, list[_Run]] = {}
    for run in runs:
        sections.setdefault(json.dumps(_setting(run, compare)), []).append(run)
    return Scoreboard(
        compare,
        [_section(json.loads(setting), members, compare) for setting, members in sections.items()],
        [path.as_posix() for path in not_evaluated],
    )


def _find(paths: Sequence[str | Path]) -> tuple[list[Path], list[Path]]:
    """Run folders with and without an evaluation, each once."""
    folders: dict[Path, Path] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            raise UserError(f"no folder at {path}; give folders of runs, like 'worldmodels report runs'")
        for config in [path / CONFIG] if (path / CONFIG).is_file() else sorted(path.rglob(CONFIG)):
            folders.setdefault(config.parent.resolve(), config.parent)
    evaluated = [folder for folder in folders.values() if (folder / EVALUATION).is_file()]
    return evaluated, [folder for folder in folders.values() if folder not in evaluated]


def _read(path: Path) -> _Run:
    if is_agent(path):
        raise UserError(
            f"{path} is an agent's run; use 'worldmodels evaluate-agent' or 'worldmodels compare runs=[...]'"
        )
    config = read_config(path)
    if config["task"]:
        raise UserError(f"{path} is the run of a task; a table of those is made by 'worldmodels compare runs=[...]'")
    try:
        evaluation = json.loads((path / EVALUATION).read_text(encoding="utf-8"))
        lacks = [key for key in ("all", "episodes", "parameters", "core_parameters") if not evaluation.get(key)]
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path / EVALUATION} is not JSON; run 'worldmodels evaluate run={path}' again") from error
    if lacks:
        raise UserError(f"{path / EVALUATION} lacks {', '.join(lacks)}; run 'worldmodels evaluate run={path}' again")
    name = core_name(config["core"])
    flat = dict(_flat({key: part for key, part in config.items() if key != "model"}))
    seconds = [line[SECONDS] for line in read_metrics(path) if SECONDS in line]
    return _Run(path, {**flat, "core": name}, evaluation, float(seconds[-1]) if seconds else None)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _setting(run: _Run, compare: str) -> dict[str, Any]:
    """What the test data of a run are, but for what is compared."""
    own = ("env.", "data.test.", "data.drop_invalid", "evaluation.burn_in", "evaluation.limit", "memory")
    setting = {key: value for key, value in run.config.items() if key.startswith(own) and key != compare}
    if setting.get("data.test.path") is not None:  # then these have no say
        for key in ("data.test.episodes", "data.test.steps", "data.test.seed", "data.drop_invalid"):
            setting.pop(key, None)
    return dict(sorted(setting.items()))


def _section(setting: dict[str, Any], runs: list[_Run], compare: str) -> Section:
    groups: dict[str, list[_Run]] = {}
    for run in sorted(runs, key=lambda run: _order(run, compare)):
        groups.setdefault(run.value(compare), []).append(run)
    rows = [_row(name, members) for name, members in groups.items()]
    if compare == "core":
        for row in rows:
            row.better = _better(row, [other for other in rows if other.name in BASELINES and other is not row])
    published = _published(setting, runs)
    notes = _notes(groups, rows, compare) + (_tie_note(rows) if published else [])
    return Section(setting, rows + published, notes)


def _order(run: _Run, compare: str) -> tuple[Any, ...]:
    """Cores in the order of their table, numbers by size, all else by its text; then seeds."""
    value, names = run.config.get(compare), list(offered("cores", CORES))
    number = isinstance(value, (int, float))
    place = names.index(value) if compare == "core" and value in names else value if number else len(names)
    return not number, place, run.value(compare), run.config["seed"], str(run.path)


def _row(name: str, runs: list[_Run]) -> Row:
    gathered: dict[str, dict[str, list[float]]] = {}
    probed: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        for part, measures in MEASURES.items():
            for h, entry in run.evaluation.get(part, {}).items():
                for measure in measures:
                    if measure in entry:
                        full = measure if part == "all" else f"{part}_{measure}"
                        gathered.setdefault(h, {}).setdefault(full, []).append(float(entry[measure]))
        for thing, readout in run.evaluation.get("probe", {}).get("objects", {}).items():
            imagined = {f"imagined_r2/{h}": value for h, value in readout.get("imagined_r2", {}).items()}
            for measure, value in {"r2": readout["r2"], "slot_r2": readout["slot_r2"], **imagined}.items():
                if value is not None:  # of an object that hardly moves at this step
                    probed.setdefault(thing, {}).setdefault(measure, []).append(float(value))
    alarms = [{alarm.split(":")[0] for alarm in run.evaluation.get("alarms", ())} for run in runs]
    seconds = [run.seconds for run in runs if run.seconds is not None]
    return Row(
        name,
        len(runs),
        [run.path.as_posix() for run in runs],
        scores={h: {m: over_seeds(values) for m, values in entry.items()} for h, entry in gathered.items()},
        probe={thing: {m: over_seeds(values) for m, values in entry.items()} for thing, entry in probed.items()},
        core_parameters=sorted({run.evaluation["core_parameters"] for run in runs}),
        parameters=sorted({run.evaluation["parameters"] for run in runs}),
        seconds=float(np.mean(seconds)) if seconds else None,
        collapsed=sum("collapse" in rang for rang in alarms),
        shortcut=sum("shortcut" in rang for rang in alarms),
    )


def _better(row: Row, baselines: Sequence[Row]) -> dict[str, dict[str, Statistic]]:
    result: dict[str, dict[str, Statistic]] = {h: {} for h in row.scores}
    for baseline in baselines:
        for h in (h for h in row.scores if h in baseline.scores):
            ours, theirs = row.scores[h]["h@1"].values, baseline.scores[h]["h@1"].values
            enough = min(len(ours), len(theirs)) >= ENOUGH_SEEDS
            interval = seeds_interval(ours, theirs, statistic=probability_of_improvement) if enough else None
            probability = float(probability_of_improvement(ours, theirs))
            result[h][baseline.name] = Statistic(probability, interval=interval)
    return result


def _published(setting: Mapping[str, Any], runs: Sequence[_Run]) -> list[Row]:
    """The figures of papers for this setting; there are none for others."""
    ours = {"env.id": "worldmodels/Atari-v0", "data.test.path": None, "data.test.steps": 10, "memory": "none"}
    others = {key for key in setting if ".kwargs." in key} - {"env.kwargs.game"}
    if others or any(setting.get(key) != value for key, value in ours.items()):
        return []
    if any(run.evaluation["episodes"] != 100 or run.evaluation.get("burn_in") for run in runs):
        return []
    rows: dict[str, Row] = {}
    for line in csv.DictReader(io.StringIO(PUBLISHED)):
        if line["game"] == setting.get("env.kwargs.game"):
            name = f"{line['model']}: published ({line['source']})"
            row = rows.setdefault(name, Row(name, int(line["seeds"]), published=True))
            row.scores[line["horizon"]] = {
                measure: Statistic(float(line[measure]) / 100, float(line[f"{measure}_sd"]) / 100)
                for measure in ("h@1", "mrr")
            }
    return list(rows.values())


def _notes(groups: Mapping[str, Sequence[_Run]], rows: Sequence[Row], compare: str) -> list[str]:
    """What a reader of a section has to know."""
    notes = []
    for row in rows:
        if row.collapsed:
            notes.append(f"{row.name}: collapsed in {row.collapsed} of {row.seeds} runs")
        if row.shortcut:
            reached = "the latent copy reaches the model's interval at the longest horizon"
            notes.append(f"† {row.name}: shortcut alarm in {row.shortcut} of {row.seeds} runs, {reached}")
    return notes + _differences(groups, compare) + _repetitions(groups) + _duplicates(rows)


def _differences(groups: Mapping[str, Sequence[_Run]], compare: str) -> list[str]:
    """Settings that should be the same and are not, within rows and between them."""
    values: dict[str, dict[str, str]] = {}  # by key and row, what occurs
    notes = []
    for name, runs in groups.items():
        compared = [_compared(run) for run in runs]
        within = {}
        for key in sorted({key for settings in compared for key in settings}):
            found = sorted({settings.get(key, "not set") for settings in compared})
            values.setdefault(key, {})[name] = ", ".join(found)
            if len(found) > 1:
                within[key] = f"{key} ({', '.join(found)})"
        if within:
            notes.append(f"{name}: runs differ in {', '.join(_without_options(within))}")
    between = {}
    for key, told in values.items():
        rows_of: dict[str, list[str]] = {}
        for name in groups:
            rows_of.setdefault(told.get(name, "not set"), []).append(name)
        if len(rows_of) > 1 and key != compare and not (compare == "core" and key.startswith("core.")):
            each = "; ".join(f"{value} of {', '.join(names)}" for value, names in rows_of.items())
            between[key] = f"rows differ in {key} too: {each}"
    return notes + _without_options(between)


def _compared(run: _Run) -> dict[str, str]:
    """The settings that runs should have in common."""
    settings = {
        key: _text(value)
        for key, value in run.config.items()
        if not any(key == part or key.startswith(f"{part}.") for part in _NOT_COMPARED)
    }
    return settings | {
        "episodes scored": str(run.evaluation["episodes"]),
        "burn-in": str(run.evaluation.get("burn_in")),
    }


def _repetitions(groups: Mapping[str, Sequence[_Run]]) -> list[str]:
    """Runs that are no seeds of their own."""
    notes = []
    for name, runs in groups.items():
        same: dict[str, list[str]] = {}
        for run in runs:
            key = json.dumps([run.config["seed"], sorted(_compared(run).items())])
            same.setdefault(key, []).append(run.path.as_posix())
        notes += [
            f"{name}: {' and '.join(paths)} have the same seed and config and count as {len(paths)} seeds"
            for paths in same.values()
            if len(paths) > 1
        ]
    return notes


def _without_options(differing: Mapping[str, str]) -> list[str]:
    """What is said of each key; where the cores themselves differ, nothing of their options."""
    return [said for key, said in differing.items() if "core" not in differing or not key.startswith("core.")]


def _duplicates(rows: Sequence[Row]) -> list[str]:
    """How many test states occur more than once, what can be scored at most, and H@1 without the rivals in the same state."""
    at = sorted({h for row in rows for h, entry in row.scores.items() if "duplicates" in entry}, key=int)
    if not at:
        return []

    def told(measure: str) -> str:
        found = [[row.scores[h][measure].mean for row in rows if measure in row.scores.get(h, {})] for h in at]
        return "/".join(f"{100 * np.mean(values):.1f}" if values else "-" for values in found)

    note = f"after {'/'.join(at)} steps {told('duplicates')} % of the test states occur more than once"
    if all(
        row.scores[h]["duplicates"].mean == 0.0 for row in rows for h in at if "duplicates" in row.scores.get(h, {})
    ):
        return [note]
    distinct = [f"{row.name} {'/'.join(_mean(row, h, 'distinct_h@1') for h in at)}" for row in rows]
    note += f", so that H@1 can be {told('ceiling')} at most; with rivals in the same state left out it is"
    return [f"{note} {', '.join(distinct)}"]


def _tie_note(rows: Sequence[Row]) -> list[str]:
    """H@1 as the published figures count it, where these stand beside ours."""
    at = sorted({h for row in rows for h in row.scores if "h@1_reference" in row.scores[h]}, key=int)
    each = [f"{row.name} {'/'.join(_mean(row, h, 'h@1_reference') for h in at)}" for row in rows]
    return [f"published figures count ties in favour of the truth; then ours is {', '.join(each)}"] if at else []


def _mean(row: Row, horizon: str, measure: str) -> str:
    found = row.scores.get(horizon, {}).get(measure)
    return "-" if found is None else f"{100 * found.mean:.1f}"


def _cell(row: Row, horizon: str, measure: str, *, spread: bool = True) -> str:
    """Percent: "44.1 ± 8.3 [40.1, 48.3]", or below five seeds "44.1 ± 8.3 (40.0, 48.2)"."""
    found = row.scores.get(horizon, {}).get(measure)
    if found is None:
        return "-"
    text = f"{100 * found.mean:.1f}" + (f" ± {100 * found.sd:.1f}" if found.sd is not None else "")
    if not spread or len(found.values) < 2:
        return text
    if found.interval is not None:
        return text + f" [{100 * found.interval[0]:.1f}, {100 * found.interval[1]:.1f}]"
    return text + f" ({', '.join(f'{100 * value:.1f}' for value in found.values)})"


def _steps(horizon: str) -> str:
    return f"{horizon} step{'s' * (horizon != '1')}"


def _style(row: Row) -> str:
    return "published" if row.published else "collapsed" if row.collapsed else ""


def _label(row: Row) -> str:
    return row.name + " †" * (row.shortcut > 0)


def _grids(section: Section, compare: str) -> list[_Grid]:
    """The tables of a section."""
    at = section.horizons
    header = [f"{name}, {_steps(h)}" for name in ("H@1", "MRR") for h in at]
    main = _Grid("H@1 and MRR, percent", [compare, "seeds", *header], [])
    copies = {"copy_": "its latent copy", "true_copy_": "copy of the true state"}
    for row in section.rows:
        cells = [_cell(row, h, measure) for measure in ("h@1", "mrr") for h in at]
        main.lines.append((_style(row), [_label(row), str(row.seeds), *cells]))
        for prefix, name in copies.items():
            cells = [_cell(row, h, f"{prefix}{m}", spread=False) for m in ("h@1", "mrr") for h in at]
            if set(cells) != {"-"}:
                main.lines.append(("copy", [name, "", *cells]))
    ours = [row for row in section.rows if not row.published]
    return [main, _about(ours, compare, at), *_further(ours, compare, at), *_readout(ours, compare, at)]


def _about(rows: Sequence[Row], compare: str, horizons: Sequence[str]) -> _Grid:
    last = horizons[-1]
    baselines = [name for name in BASELINES if any(name in row.better.get(last, {}) for row in rows)]
    better = [f"P(better than {name}), {_steps(last)}" for name in baselines]
    header = [compare, "parameters of the core", "of all", "training, h:mm:ss", *better]
    lines = []
    for row in rows:
        counts = [" to ".join(f"{n:,}" for n in sorted({c[0], c[-1]})) for c in (row.core_parameters, row.parameters)]
        time = "-" if row.seconds is None else str(timedelta(seconds=round(row.seconds)))
        cells = [_probability(row.better.get(last, {}).get(name)) for name in baselines]
        lines.append((_style(row), [_label(row), *counts, time, *cells]))
    return _Grid("Size, time and probability of improvement in H@1", header, lines)


def _probability(found: Statistic | None) -> str:
    if found is None:
        return ""
    return f"{found.mean:.2f}" + (f" [{found.interval[0]:.2f}, {found.interval[1]:.2f}]" if found.interval else "")


def _further(rows: Sequence[Row], compare: str, horizons: Sequence[str]) -> list[_Grid]:
    """H@1 in the episode and on paths with a push, each beside its copy."""
    grids = []
    parts = {
        "in_episode": ("In-episode H@1, percent", {"copy_h@1": "its latent copy", "chance": "chance"}),
        "moved": ("H@1 on paths with a push, percent", {"copy_h@1": "its latent copy"}),
    }
    for part, (title, beside) in parts.items():
        grid = _Grid(title, [compare, *map(_steps, horizons)], [])
        for row in rows:
            cells = [_cell(row, h, f"{part}_h@1") for h in horizons]
            if set(cells) != {"-"}:
                grid.lines.append((_style(row), [_label(row), *cells]))
                for measure, name in beside.items():
                    copied = [_cell(row, h, f"{part}_{measure}", spread=False) for h in horizons]
                    grid.lines.append(("copy", [name, *copied]))
        grids += [grid] if grid.lines else []
    return grids


def _readout(rows: Sequence[Row], compare: str, horizons: Sequence[str]) -> list[_Grid]:
    """R² of true coordinates read linearly from slots."""
    measures = {"r2": "all slots", "slot_r2": "best slot"}
    measures |= {f"imagined_r2/{h}": f"imagined, {_steps(h)}" for h in horizons}
    lines = []
    for thing in dict.fromkeys(thing for row in rows for thing in row.probe):
        for row in (row for row in rows if thing in row.probe):
            cells = [f"{row.probe[thing][m].mean:.2f}" if m in row.probe[thing] else "-" for m in measures]
            lines.append((_style(row), [thing, _label(row), *cells]))
    title = "R² of objects' true coordinates read linearly from slots, mean over seeds"
    return [_Grid(title, ["object", compare, *measures.values()], lines, names=2)] if lines else []


def _about_data(section: Section) -> str:
    """The setting as the words that choose it."""
    return " ".join(f"{k}={_text(v)}" for k, v in section.setting.items() if v is not None and v is not False)


def markdown(board: Scoreboard, command: str) -> str:
    """The scoreboard as Markdown; collapsed rows are in italics.

    Args:
        board: from ``scoreboard``.
        command: what made it.
    """
    parts = [
        "# Scoreboard",
        f"Made by `{command}`.",
        "Mean ± standard deviation over seeds, with the 95 % bootstrap interval of the mean from five seeds on; fewer are "
        "listed in brackets. What is measured is in docs/metrics.md.",
    ]
    for section in board.sections:
        parts += [f"## {section.title}", f"Test data: `{_about_data(section)}`"]
        grids = _grids(section, board.compare)
        for i, grid in enumerate(grids):
            parts += [f"### {grid.title}"] * (i > 0) + [_markdown_table(grid)]
            if i == 0 and section.notes:
                parts.append("\n".join(f"- {note}" for note in section.notes))
        parts.append("Runs:\n\n" + "\n".join(f"- {r.name}: {', '.join(r.paths)}" for r in section.rows if r.paths))
    if board.not_evaluated:
        parts.append("Not evaluated: " + ", ".join(board.not_evaluated))
    return "\n\n".join(parts) + "\n"


def _markdown_table(grid: _Grid) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    lines = [line(grid.header), line(["---" if i < grid.names else "---:" for i in range(len(grid.header))])]
    for style, cells in grid.lines:
        slanted = style == "collapsed"
        lines.append(line([f"*{cell}*" if slanted and cell else cell for cell in cells]))
    return "\n".join(lines)


def csv_rows(board: Scoreboard) -> list[dict[str, Any]]:
    """One line for every setting, value of what is compared and horizon; shares of one, not percent."""
    lines = []
    for section in board.sections:
        for row in section.rows:
            for h in sorted(row.scores, key=int):
                line: dict[str, Any] = {
                    "section": section.title,
                    "test_data": _about_data(section),
                    board.compare: row.name,
                    "horizon": int(h),
                    "seeds": row.seeds,
                }
                for measure, found in row.scores[h].items():
                    listed = {f"{measure}_seeds": _joined(found.values)} if measure in ("h@1", "mrr") else {}
                    line |= _columns(measure, found) | listed
                for name, found in row.better.get(h, {}).items():
                    line |= _columns(f"better_than_{name}", found)
                for thing, readout in row.probe.items():
                    kept = {m.partition("/")[0]: r for m, r in readout.items() if m.partition("/")[2] in ("", h)}
                    line |= {f"probe_{thing}_{measure}": found.mean for measure, found in kept.items()}
                if not row.published:
                    line |= {
                        "core_parameters": _joined(row.core_parameters),
                        "parameters": _joined(row.parameters),
                        "training_seconds": "" if row.seconds is None else row.seconds,
                        "collapsed_runs": row.collapsed,
                        "shortcut_runs": row.shortcut,
                        "runs": _joined(row.paths),
                    }
                lines.append(line)
    return lines


def _columns(name: str, found: Statistic) -> dict[str, float]:
    columns = {name: found.mean}
    if found.sd is not None:
        columns[f"{name}_sd"] = found.sd
    if found.interval is not None:
        columns[f"{name}_low"], columns[f"{name}_high"] = found.interval
    return columns


def _joined(values: Iterable[Any]) -> str:
    return " ".join(map(str, values))


def tables(board: Scoreboard) -> list[Table]:
    """The scoreboard for a terminal; copies and collapsed rows are dim."""
    shown = []
    for section in board.sections:
        for i, grid in enumerate(_grids(section, board.compare)):
            heading = f"{section.title}\n{_about_data(section)}" if i == 0 else f"\n{grid.title}"
            notes = "\n".join(section.notes) if i == 0 and section.notes else None
            table = Table(title=Text(heading), title_justify="left", caption_justify="left")
            table.caption = None if notes is None else Text(notes)
            for j, name in enumerate(grid.header):
                title = Text(name.replace(", ", "\n", 1))
                table.add_column(title, justify="left" if j < grid.names else "right", no_wrap=j == 0)
            for style, (name, *cells) in grid.lines:
                texts = [Text(cell) for cell in (name.replace("published (", "published\n("), *cells)]
                table.add_row(*texts, style="dim" if style in ("copy", "collapsed") else None)
            shown.append(table)
    return shown


def figure(board: Scoreboard, path: Path) -> Path:
    """H@1 of every row at every horizon: each seed, the mean with its spread, the latent copy and published figures.

    Args:
        board: from ``scoreboard``.
        path: the file to write.
    """
    sizes = [0.42 * len(section.rows) + 1.3 for section in board.sections]
    most = max(len(section.horizons) for section in board.sections)
    drawn = matplotlib.figure.Figure(figsize=(3.1 * most + 2.0, sum(sizes)))
    panels: Any = drawn.subfigures(len(sizes), 1, squeeze=False, height_ratios=sizes)
    for part, section, size in zip(panels[:, 0], board.sections, sizes, strict=True):
        axes = part.subplots(1, len(section.horizons), sharey=True, squeeze=False)[0]
        part.subplots_adjust(top=1 - 0.62 / size, bottom=0.5 / size, wspace=0.08)
        part.suptitle(section.title, fontsize=10, y=1 - 0.08 / size)
        for axis, h in zip(axes, section.horizons, strict=True):
            _panel(axis, section, h)
            axis.set_title(_steps(h), fontsize=9)
        axes[0].set_yticks(range(len(section.rows)), [_tick(row) for row in section.rows], fontsize=8)
        for label, row in zip(axes[0].get_yticklabels(), section.rows, strict=True):
            label.set_color("#999999" if row.collapsed else "black")
        _beside(axes[-1], section)
    note = "dot: one seed; bar: mean with its 95 % interval, or ± sd where so marked; square: its latent copy"
    rows = [row for section in board.sections for row in section.rows]
    note += "; grey: collapsed" * any(row.collapsed for row in rows) + "; dotted: published, ± sd" * any(
        row.published for row in rows
    )
    drawn.text(0.5, -0.12 / sum(sizes), note, ha="center", fontsize=8)
    return save(drawn, path)


def _tick(row: Row) -> str:
    if row.published:
        return f"{row.name.replace(': ', chr(10))}"
    n = row.seeds
    spread = "" if n == 1 else ", 95 %" if n >= ENOUGH_SEEDS else ", ± sd"
    return f"{_label(row)}\n{n} seed{'s' * (n > 1)}{spread}"


def _panel(axis: Any, section: Section, horizon: str) -> None:
    top = 0.0
    for y, row in enumerate(section.rows):
        entry = row.scores.get(horizon, {})
        if "h@1" not in entry:
            continue
        found = entry["h@1"]
        color = "#aaaaaa" if row.collapsed else "black" if row.published else COLORS[y % 6]
        mean, sd = 100 * found.mean, 100 * (found.sd or 0.0)
        low, high = (100 * edge for edge in found.interval) if found.interval else (max(mean - sd, 0.0), mean + sd)
        thin = {"lw": 0.8, "ls": ":"} if row.published else {"lw": 2.0}
        axis.plot([low, high], [y, y], color=color, solid_capstyle="butt", **thin)
        axis.plot(
            [mean], [y], color=color, marker="|", markersize=9 if row.published else 14, mew=1 if row.published else 2.5
        )
        values = [100 * value for value in found.values]
        axis.scatter(values, [y + 0.22] * len(values), s=12, color=color, alpha=0.7, linewidths=0)
        if "copy_h@1" in entry:
            copied = 100 * entry["copy_h@1"].mean
            axis.plot([copied], [y], color=color, marker="s", markersize=5, mfc="none", mew=1)
            top = max(top, copied)
        top = max(top, high, *values, mean)
    axis.set(xlim=(-0.02 * top, max(1.06 * top, 1.0)), ylim=(len(section.rows) - 0.5, -0.5))
    axis.set_xlabel("H@1, %", fontsize=8)
    axis.grid(axis="x", alpha=0.3)
    axis.tick_params(labelsize=8)
    axis.tick_params(axis="y", length=0)


def _beside(axis: Any, section: Section) -> None:
    """The probabilities of improvement at the last horizon, right of its panel."""
    last = section.horizons[-1]
    baselines = [name for name in BASELINES if any(name in row.better.get(last, {}) for row in section.rows)]
    place = axis.get_yaxis_transform()
    for column, name in enumerate(baselines):
        x = 1.17 + 0.31 * column
        axis.text(x, -0.62, f"P(better\nthan {name})", transform=place, ha="center", va="bottom", fontsize=7)
        for y, row in enumerate(section.rows):
            text = _probability(row.better.get(last, {}).get(name)).replace(" [", "\n[")
            axis.text(x, y, text, transform=place, ha="center", va="center", fontsize=7)


def write(board: Scoreboard, folder: Path, command: str) -> list[Path]:
    """Write ``scoreboard.md``, ``scoreboard.csv`` and ``scoreboard.png`` into a folder and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    lines, text = csv_rows(board), io.StringIO()
    columns = list(dict.fromkeys(column for line in lines for column in line))
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    for name, content in (("scoreboard.md", markdown(board, command)), ("scoreboard.csv", text.getvalue())):
        write_aside(folder / name, content.encode())
    return [folder / "scoreboard.md", folder / "scoreboard.csv", figure(board, folder / "scoreboard.png")]
