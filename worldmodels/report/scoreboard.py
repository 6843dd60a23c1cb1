"""One scoreboard of many runs: what a setting is worth over seeds, beside the copies and published figures.

``scoreboard`` reads evaluations into plain values; ``scoreboard_pages`` shows them.
"""

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..cores import CORES, READERS
from ..errors import UserError, nearest
from ..logging import SECONDS, read_metrics
from ..metrics import probability_of_improvement, seeds_interval
from ..plugins import offered
from ..run import CONFIG, EVALUATION, is_agent, read_config, read_evaluation
from ..tasks import TASKS

BASELINES = ("gnn", "gru", "lstm")
ENOUGH_SEEDS = 5  # for a bootstrap; fewer are listed
COMPARABLE_SEEDS = 3  # of both, for a probability of improvement
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
_TRAINED = "steps trained"  # what a half-trained run is marked with


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
    """Runs that differ in nothing but their seed.

    Args:
        name: the value of what is compared, with the settings that tell it from other rows of this value.
        seeds: how many runs.
        paths: the runs' folders.
        scores: by horizon and measure, of ``all`` by its name, of others as "in_episode_h@1"; shares of one.
        better: by horizon and baseline, the probability of improvement in H@1 over it.
        probe: by object and measure, "r2", "slot_r2" and "imagined_r2/<steps>"; of the step alone "time_r2" and
            "imagined_time_r2/<steps>".
        core_parameters: of the core, every number that occurs.
        parameters: of all.
        seconds: wall time of training, over runs that tell it.
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
    seconds: Statistic | None = None
    collapsed: int = 0
    shortcut: int = 0
    published: bool = False


@dataclass
class Section:
    """Rows scored on the same test data: the settings of these, the rows, and what has to be said about them."""

    setting: dict[str, Any]
    rows: list[Row]
    notes: list[str]
    episodes: int | None = None  # that every run was scored among: H@1 of chance is one over it

    @property
    def title(self) -> str:
        """The environment, or where its episodes lie."""
        name = self.setting.get("env.id") or self.setting.get("data.test.path") or "test episodes"
        kwargs = [f"{k.removeprefix('env.kwargs.')}={as_text(v)}" for k, v in self.setting.items() if ".kwargs." in k]
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
        foreign: folders that a search found and that hold no world model's run.
    """

    compare: str
    sections: list[Section]
    not_evaluated: list[str]
    foreign: list[str]


@dataclass
class _Run:
    path: Path
    config: dict[str, Any]  # by dotted key; "core" is its name
    evaluation: dict[str, Any]
    seconds: float | None

    def value(self, key: str) -> str:
        return as_text(self.config[key]) if key in self.config else "not set"


def core_name(core: Mapping[str, Any]) -> str:
    """The name a core was chosen by: the entry of the table of cores that says most of it, else its class.

    Sizes of slots are free: ``core=gru core.slot_size=32`` is a gru.
    """
    found, most = str(core.get("_target_")).rpartition(".")[2], 0
    for name, entry in offered("cores", CORES | READERS).items():
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
        paths: folders; each is a run or is searched for runs, and what such a search finds of other kinds is left out.
        compare: what the rows are: "core" for the cores by their names, or a dotted key of the config.

    Raises:
        UserError: no runs, runs of another kind, an unknown key.
    """
    found, not_evaluated, foreign = _find(paths)
    runs = [_read(path, config) for path, config in found.items()]
    if not runs:
        mend = f"run 'worldmodels evaluate run={not_evaluated[0]}'" if not_evaluated else "give folders of runs"
        given = " or ".join(map(str, paths)) or "no folder"
        others = f"{len(not_evaluated)} without an evaluation, {len(foreign)} not a world model's"
        raise UserError(f"no evaluated runs in {given}, {others}; {mend}")
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
        [path.as_posix() for path in foreign],
    )


def _find(paths: Sequence[str | Path]) -> tuple[dict[Path, dict[str, Any]], list[Path], list[Path]]:
    """Run folders, each once: evaluated ones with their config, those without an evaluation, those of another kind."""
    folders: dict[Path, tuple[Path, bool]] = {}  # by the true folder, and whether it was named
    for path in map(Path, paths):
        if not path.is_dir():
            raise UserError(f"no folder at {path}; give folders of runs, like 'worldmodels report runs'")
        named = (path / CONFIG).is_file()
        for folder in [path] if named else [config.parent for config in sorted(path.rglob(CONFIG))]:
            if named or folder.resolve() not in folders:
                folders[folder.resolve()] = folder, named
    evaluated: dict[Path, dict[str, Any]] = {}
    not_evaluated, foreign = [], []
    for folder, named in folders.values():
        try:
            config = _config(folder)
        except UserError:
            if named:
                raise
            foreign.append(folder)
            continue
        if (folder / EVALUATION).is_file():
            evaluated[folder] = config
        else:
            not_evaluated.append(folder)
    return evaluated, not_evaluated, foreign


def _config(path: Path) -> dict[str, Any]:
    if is_agent(path):
        raise UserError(
            f"{path} is an agent's run; use 'worldmodels evaluate-agent' or 'worldmodels compare runs=[...]'"
        )
    config = read_config(path)
    if config["task"] and config["task"]["_target_"] != TASKS["transitions"]["_target_"]:
        raise UserError(f"{path} is the run of a task; a table of those is made by 'worldmodels compare runs=[...]'")
    return config


def _read(path: Path, config: Mapping[str, Any]) -> _Run:
    evaluation = read_evaluation(path)
    lacks = [key for key in ("all", "episodes", "parameters", "core_parameters") if not evaluation.get(key)]
    if lacks:
        raise UserError(f"{path / EVALUATION} lacks {', '.join(lacks)}; run 'worldmodels evaluate run={path}' again")
    name = core_name(config["core"])
    flat = dict(_flat({key: part for key, part in config.items() if key != "model"}))
    seconds = [line[SECONDS] for line in read_metrics(path) if isinstance(line.get(SECONDS), (int, float))]
    return _Run(path, {**flat, "core": name}, evaluation, float(seconds[-1]) if seconds else None)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def as_text(value: Any) -> str:
    """A value of a config as it is written on the command line."""
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
    groups = _groups(runs, compare)
    rows = {name: _row(name, members) for name, members in groups.items()}
    if compare == "core":
        for name, row in rows.items():
            row.better = _better(row, {core: rows[other] for core, other in _baselines(name, groups).items()})
    ours, published = list(rows.values()), _published(runs)
    notes = _notes(groups, ours, compare) + (_tie_note(ours) if published else [])
    episodes = {run.evaluation["episodes"] for run in runs}
    return Section(setting, ours + published, notes, episodes.pop() if len(episodes) == 1 else None)


def _groups(runs: Sequence[_Run], compare: str) -> dict[str, list[_Run]]:
    """Runs that differ in nothing but their seed, by the name of their row."""
    found: dict[str, dict[str, list[_Run]]] = {}  # by value, then by all other settings
    for run in sorted(runs, key=lambda run: _order(run, compare)):
        settings = {key: value for key, value in _compared(run).items() if key != compare}
        found.setdefault(run.value(compare), {}).setdefault(json.dumps(settings, sort_keys=True), []).append(run)
    return {
        value + label: members
        for value, alike in found.items()
        for label, members in zip(_labels([json.loads(settings) for settings in alike]), alike.values(), strict=True)
    }


def _labels(groups: Sequence[Mapping[str, str]]) -> list[str]:
    """What tells groups of one value apart, of each: three settings at most, unless it takes more; "" where there is one."""
    differing = sorted(
        {k for group in groups for k in group if len({other.get(k) for other in groups}) > 1} - {_TRAINED}
    )

    def kinds(keys: Sequence[str]) -> int:
        return len({tuple(group.get(key) for key in keys) for group in groups})

    needed = [_TRAINED]
    for key in differing:
        needed += [key] if kinds([*needed, key]) > kinds(needed) else []
    told = [key for key in differing if key not in needed and not ("core" in differing and key.startswith("core."))]
    shown = needed + told[: max(0, 4 - len(needed))]
    own = ("core.", _TRAINED)  # of some only
    dots = ", ..." if len(shown) < len(needed) + len(told) else ""
    return [
        "".join(f", {key}={group.get(key, 'not set')}" for key in shown if key in group or not key.startswith(own))
        + dots
        for group in groups
    ]


def _baselines(name: str, groups: Mapping[str, Sequence[_Run]]) -> dict[str, str]:
    """By baseline the row that another is held against: the one that differs in the core alone, else the only one."""

    def outside(runs: Sequence[_Run]) -> dict[str, str]:
        return {key: value for key, value in _compared(runs[0]).items() if key.partition(".")[0] != "core"}

    found = {}
    for core in BASELINES:
        named = [other for other, runs in groups.items() if runs[0].config["core"] == core]
        alike = [other for other in named if outside(groups[other]) == outside(groups[name])] or named
        if len(alike) == 1 and name not in alike:
            found[core] = alike[0]
    return found


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
            told = {measure: readout.get(measure) for measure in ("r2", "slot_r2", "time_r2")}
            for part in ("imagined_r2", "imagined_time_r2"):
                told |= {f"{part}/{h}": value for h, value in readout.get(part, {}).items()}
            for measure, value in told.items():
                if value is not None:  # the object is not seen at that step
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
        seconds=over_seeds(seconds) if seconds else None,
        collapsed=sum("collapse" in rang for rang in alarms),
        shortcut=sum("shortcut" in rang for rang in alarms),
    )


def _better(row: Row, baselines: Mapping[str, Row]) -> dict[str, dict[str, Statistic]]:
    result: dict[str, dict[str, Statistic]] = {h: {} for h in row.scores}
    for core, baseline in baselines.items():
        for h in (h for h in row.scores if h in baseline.scores):
            ours, theirs = row.scores[h]["h@1"].values, baseline.scores[h]["h@1"].values
            if min(len(ours), len(theirs)) < COMPARABLE_SEEDS:
                continue
            enough = min(len(ours), len(theirs)) >= ENOUGH_SEEDS
            interval = seeds_interval(ours, theirs, statistic=probability_of_improvement) if enough else None
            probability = float(probability_of_improvement(ours, theirs))
            result[h][core] = Statistic(probability, interval=interval)
    return result


def _published(runs: Sequence[_Run]) -> list[Row]:
    """The figures of papers for the test data of these runs; there are none for others."""
    theirs: dict[str, Any] = {
        "env.id": "worldmodels/Atari-v0",
        "env.resize": None,
        "memory": "none",
        "data.drop_invalid": False,
    }
    theirs |= {"data.test.path": None, "data.test.steps": 10}
    more = {key for run in runs for key in run.config if key.startswith("env.kwargs.")} - {"env.kwargs.game"}
    games = {run.config.get("env.kwargs.game") for run in runs}
    if more or len(games) > 1 or any(run.config.get(key) != value for run in runs for key, value in theirs.items()):
        return []
    if any(run.evaluation["episodes"] != 100 or run.evaluation.get("burn_in") for run in runs):
        return []
    rows: dict[str, Row] = {}
    for line in csv.DictReader(io.StringIO(PUBLISHED)):
        if line["game"] in games:
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
            reached = "the latent copy is as good as the model at the longest horizon"
            notes.append(f"† {row.name}: shortcut alarm in {row.shortcut} of {row.seeds} runs, {reached}")
    return notes + _differences(groups, compare) + _repetitions(groups) + _duplicates(rows)


def _differences(groups: Mapping[str, Sequence[_Run]], compare: str) -> list[str]:
    """Settings in which rows differ beside what is compared, and that not each name of a row tells."""
    compared = {name: _compared(runs[0]) for name, runs in groups.items()}
    cores = {settings["core"] for settings in compared.values()}
    notes = []
    for key in sorted({key for settings in compared.values() for key in settings} - {compare, _TRAINED}):
        rows_of: dict[str, list[str]] = {}
        for name, settings in compared.items():
            rows_of.setdefault(settings.get(key, "not set"), []).append(name)
        options = key.startswith("core.") and (compare == "core" or len(cores) > 1)
        if len(rows_of) > 1 and not options and not all(f", {key}=" in name for name in groups):
            each = "; ".join(f"{value} of {' and '.join(names)}" for value, names in rows_of.items())
            notes.append(f"rows differ in {key} too: {each}")
    return notes


def _compared(run: _Run) -> dict[str, str]:
    """The settings that runs of a row have in common; the steps trained are told of half-trained runs only."""
    settings = {
        key: as_text(value)
        for key, value in run.config.items()
        if not any(key == part or key.startswith(f"{part}.") for part in _NOT_COMPARED)
    }
    step, steps = run.evaluation.get("step"), run.config["trainer.steps"]
    return settings | {
        "episodes scored": str(run.evaluation["episodes"]),
        "burn-in": str(run.evaluation.get("burn_in")),
        **({_TRAINED: f"{step} of {steps}"} if step is not None and step < steps else {}),
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


def _duplicates(rows: Sequence[Row]) -> list[str]:
    """How many test states occur more than once, what can be scored at most, and H@1 without the rivals in the same state."""
    at = sorted({h for row in rows for h, entry in row.scores.items() if "duplicates" in entry}, key=int)
    if not at:
        return []

    def told(measure: str) -> str:
        found = [[row.scores[h][measure].mean for row in rows if measure in row.scores.get(h, {})] for h in at]
        return "/".join(f"{100 * np.mean(values):.1f}" if values else "-" for values in found)

    note = f"after {'/'.join(at)} steps {told('duplicates')} % of the test states occur more than once"
    note += " (same observation or same state_id)"
    if all(
        row.scores[h]["duplicates"].mean == 0.0 for row in rows for h in at if "duplicates" in row.scores.get(h, {})
    ):
        return [note]
    distinct = [f"{row.name} {'/'.join(_mean(row, h, 'distinct_h@1') for h in at)}" for row in rows]
    note += f"; H@1 of no model can exceed {told('ceiling')}, the share of different observations"
    return [f"{note}; with rivals in the same state left out it is {'; '.join(distinct)}"]


def _tie_note(rows: Sequence[Row]) -> list[str]:
    """H@1 as the published figures count it, where these stand beside ours."""
    at = sorted({h for row in rows for h in row.scores if "h@1_reference" in row.scores[h]}, key=int)
    each = [f"{row.name} {'/'.join(_mean(row, h, 'h@1_reference') for h in at)}" for row in rows]
    return [f"published figures count ties in favour of the truth; then ours is {'; '.join(each)}"] if at else []


def _mean(row: Row, horizon: str, measure: str) -> str:
    found = row.scores.get(horizon, {}).get(measure)
    return "-" if found is None else f"{100 * found.mean:.1f}{fewer(row, found)}"


def fewer(row: Row, found: Statistic) -> str:
    """How many values there are, where that is fewer than the row has seeds."""
    return f" (n={len(found.values)})" if 0 < len(found.values) < row.seeds else ""
