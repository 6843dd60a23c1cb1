"""The command line: arguments to calls, no logic."""

import errno
import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from .errors import UserError, first_line, nearest, printable

USAGE = """usage: worldmodels COMMAND [key=value ...] [--debug]

  train            train a world model:      worldmodels train experiment=block_physics core=snps size=cpu seed=0
                   or a core on a task:      worldmodels train experiment=adding core=scoff size=cpu seed=0
  train-agent      train an agent:           worldmodels train-agent experiment=gotoobjmaze core=scoff size=cpu seed=0
  evaluate-agent   play whole episodes:      worldmodels evaluate-agent run=runs/... episodes=1000
  evaluate         score a run:              worldmodels evaluate run=runs/...
  rollout          draw what a run imagines: worldmodels rollout run=runs/... episode=3
  collect          record episodes:          worldmodels collect env=worldmodels/Shapes-v0 path=data/shapes episodes=100
  import-cswm      convert C-SWM's HDF5:     worldmodels import-cswm file=shapes_train.h5 path=data/shapes action_size=20
  compare          one table of runs:        worldmodels compare runs=[runs/a,runs/b]
  report           a scoreboard over seeds:  worldmodels report runs/pong runs/other --compare core
  envs             the environments that can be named
  cores            the cores that can be named
  check            check a plug-in:          worldmodels check pkg:MyEnv-v0   |   worldmodels check core=my.module:MyCore

worldmodels COMMAND --help lists what a command takes. --debug shows the traceback of an error.
"""


@dataclass
class CollectArguments:
    """Record episodes of any Gymnasium environment."""

    env: str = "???"
    path: str = "???"
    episodes: int = 100
    steps: int | None = None
    seed: int = 0
    num_envs: int | None = None
    policy: str | None = None
    drop_invalid: bool = False
    resize: list[int] | None = None
    device: str = "cpu"
    processes: bool = False
    env_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class ImportArguments:
    """Convert episodes in C-SWM's HDF5 format (needs the extra 'data')."""

    file: str = "???"
    path: str = "???"
    action_size: int = 0
    actions_per_object: int | None = None


@dataclass
class EvaluateArguments:
    """Score a run; ``data`` names other episodes than a world model's own test episodes.

    ``trust`` names modules, separated by commas, whose classes and environments a run from elsewhere may use.
    """

    run: str = "???"
    data: str | None = None
    trust: str = ""


@dataclass
class EvaluateAgentArguments:
    """Play whole episodes with agents; ``env`` holds options of the environment that differ from the training.

    ``trust`` names modules, separated by commas, whose classes and environments a run from elsewhere may use.
    """

    run: str | None = None
    runs: list[str] = field(default_factory=list)
    episodes: int | None = None
    env: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    trust: str = ""


@dataclass
class RolloutArguments:
    """Draw a run's pictures for one test episode, or one test example of a task; of an agent a video of an episode.

    ``trust`` names modules, separated by commas, whose classes and environments a run from elsewhere may use.
    """

    run: str = "???"
    episode: int = 0
    trust: str = ""


@dataclass
class CompareArguments:
    """One table of the evaluations of several runs.

    ``trust`` names modules, separated by commas, whose classes and environments runs from elsewhere may use.
    """

    runs: Any = field(default_factory=list)
    trust: str = ""


@dataclass
class ReportArguments:
    """A scoreboard over seeds: ``worldmodels report FOLDER ... [--compare KEY] [--out FOLDER]``.

    Folders are runs or are searched for runs. ``compare`` is ``core`` or any key of the config, like encoder.hidden_size; the
    files scoreboard.md, .csv and .png go into ``out``, or the first folder. Of the runs of a task it makes the task's own
    table, report.md and report.csv. ``trust`` names modules whose classes runs from elsewhere may use.
    """

    runs: list[str] = field(default_factory=list)
    compare: str = "core"
    out: str | None = None
    trust: str = ""


_CHECK_SECONDS = 120.0  # of all checks of an environment together


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, or 2 for something the user can mend."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    given = [word for word in given if word != "--debug"]
    if not given or given[0] in ("-h", "--help", "help"):
        with suppress(BrokenPipeError):
            print(USAGE, end="", flush=True)
        return 0
    if given[0] == "--version":
        from importlib.metadata import version

        with suppress(BrokenPipeError):
            print(version("structured-worldmodels"), flush=True)
        return 0
    name, rest = given[0], given[1:]
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed before we began
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115
    if not faulthandler.is_enabled():  # a data file cut short while it is read ends in a bus error, which this explains
        with suppress(OSError, ValueError, AttributeError, RuntimeError):  # there is no stderr, or not a real one
            faulthandler.enable()
    try:
        if name not in COMMANDS:
            raise UserError(f"unknown command {name!r}; {nearest(name, COMMANDS)}")
        if name in ("collect", "check"):  # their words may name modules in the current folder, as those of train may
            sys.path.append(os.getcwd())
        COMMANDS[name](rest)
        return 0
    except KeyboardInterrupt:
        line = (
            "interrupted; what was saved is whole: go on with resume=<the run folder>, with a sweep by its own command"
            if name.startswith("train")
            else "interrupted"
        )
        if debug:
            raise
    except UserError as error:
        line = str(error)
        if debug:
            raise
    except ModuleNotFoundError as error:
        line = f"the module {error.name!r} is not installed; {_extra(error.name)}"
        if debug:
            raise
    except OSError as error:
        full = {
            errno.ENOSPC: "the disk is full",
            errno.EDQUOT: "the disk quota is used up",
            errno.EFBIG: "a file is too large",
        }
        if debug:
            raise
        where = f" ({error.filename})" if error.filename else ""
        line = f"{error.strerror or error}{where}; choose a path that can be read and written"
        if error.errno in full:
            what = full[error.errno]
            line = f"{what}{where}; make room and go on with resume=<the run folder>; older checkpoints are whole"
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
        MemoryError,
    ) as error:
        said = first_line(error)
        signs = ("allocate memory", "out of memory", "can't start new thread", "enforce fail")
        full_memory = isinstance(error, MemoryError) or any(sign in said for sign in signs)
        if debug or not (full_memory or name in READING):
            raise
        line = f"memory is used up ({said}); give smaller batches or fewer environments; what was saved is whole"
        if not full_memory:
            where = "--debug shows where it failed"
            line = f"what was read is damaged or not ours ({type(error).__name__}: {said}); {where}"
    print(f"worldmodels: {printable(' '.join(line.split()))}", file=sys.stderr)
    return 2


def _extra(module: str | None) -> str:
    return "run pip install '.[data]' in the checkout" if module == "h5py" else f"pip install {module}"


def _parsed(schema: type, words: list[str]) -> Any:
    """key=value words as an instance of a schema; ``--help`` prints it."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if any(word in ("-h", "--help") for word in words):
        print(schema.__doc__)
        for item in fields(schema):
            default = "required" if item.default == "???" else item.default
            default = "" if not isinstance(default, (str, int, float, bool, type(None))) else f"  ({default})"
            print(f"  {item.name}={default}")
        raise SystemExit(0)
    config = OmegaConf.structured(schema)
    known = [item.name for item in fields(schema)]
    for word in words:
        key, separator, _ = word.partition("=")
        if not separator:
            raise UserError(f"got {word!r}; expected key=value with one of {', '.join(known)}")
        if key.split(".")[0] not in known:
            raise UserError(f"unknown key {key!r}; {nearest(key, known)}")
    try:
        merged = OmegaConf.merge(config, OmegaConf.from_dotlist(words))
        missing = OmegaConf.missing_keys(merged)
        if missing:
            raise UserError(f"{sorted(missing)[0]}= is missing; see --help")
        return OmegaConf.to_object(merged)
    except (OmegaConfBaseException, YAMLError, RecursionError) as error:
        where = getattr(error, "full_key", " ".join(words)[:100])
        raise UserError(f"{where}: {first_line(error)}") from error


def _train(words: list[str]) -> None:
    from .launch import show_run, train_command

    runs = train_command(words, show_run)
    if len(runs) > 1 and all(run.task.tags[0] == "wm" for run in runs):
        print(f"all in one table: worldmodels report {os.path.commonpath([run.path for run in runs])} --compare core")


def _evaluate(words: list[str]) -> None:
    from .report.tables import show
    from .run import EVALUATION, load_run
    from .trust import listed

    arguments = _parsed(EvaluateArguments, words)
    run = load_run(arguments.run, trust=listed(arguments.trust))
    result = run.evaluate(arguments.data, quiet=False)
    show(run.task.table({result["core"].lower(): result}, arguments.run))
    if arguments.data is None:
        print(run.path / EVALUATION)


def _train_agent(words: list[str]) -> None:
    from .agents.run import show_agent_run, train_agent_command

    train_agent_command(words, show_agent_run)


def _evaluate_agent(words: list[str]) -> None:
    from .agents.run import load_agent
    from .trust import listed

    arguments = _parsed(EvaluateAgentArguments, words)
    paths = [*([arguments.run] if arguments.run else []), *arguments.runs]
    if not paths:
        raise UserError("no run was named; give run=runs/a, or runs=[runs/a,runs/b]")
    variants = {"env": arguments.env} if arguments.env else None
    evaluations = {}
    for path in paths:
        run = load_agent(path, device=arguments.device, trust=listed(arguments.trust))
        evaluations[path] = run.evaluate(episodes=arguments.episodes, variants=variants, quiet=False)
    _show_agents(evaluations, over_seeds=len(paths) > 1)


def _show_agents(evaluations: dict[str, dict[str, Any]], *, over_seeds: bool) -> None:
    from .agents.evaluation import by_core, table
    from .report.tables import show

    show(table(evaluations, "whole episodes, 95 % intervals over them"))
    if over_seeds:
        show(by_core(list(evaluations.values()), "over seeds"))


def _compare(words: list[str]) -> None:
    from .report.tables import show
    from .run import EVALUATION, load_run, read_evaluation
    from .trust import listed

    arguments = _parsed(CompareArguments, words)
    evaluations = {}
    paths = [arguments.runs] if isinstance(arguments.runs, str) else list(arguments.runs)
    for path in paths:
        file = Path(path) / EVALUATION
        if not file.is_file():
            raise UserError(f"{file} does not exist; run 'worldmodels evaluate run={path}' first")
        evaluations[path] = read_evaluation(Path(path))
    if not evaluations:
        raise UserError("no runs were named; give runs=[runs/a,runs/b]")
    if all("agent" in evaluation for evaluation in evaluations.values()):
        _show_agents(evaluations, over_seeds=True)
        return
    if any("agent" in evaluation for evaluation in evaluations.values()):
        raise UserError("agents and other runs stand in no table together; name runs of one kind")
    trust = listed(arguments.trust)
    runs = {path: load_run(path, trust=trust) for path in evaluations}
    names = {run.task.name for run in runs.values()}
    if len(names) > 1:
        raise UserError(f"runs of one task make a table; these are of {sorted(names)}")
    data = {path: run.config["model"].get("data", {}) for path, run in runs.items()}
    others = [path for path in data if data[path].get("test") != data[paths[0]].get("test")]
    if others:
        print(f"worldmodels: other test data than those of {paths[0]}: {', '.join(others)}", file=sys.stderr)
    show(runs[paths[0]].task.table(evaluations, names.pop()))


def _report(words: list[str]) -> None:
    import shlex

    from .report.overview import overview, task_runs
    from .report.overview import write as write_overview
    from .report.scoreboard import scoreboard
    from .report.scoreboard_pages import tables, write
    from .report.tables import show
    from .trust import listed

    folders, options, rest = [], [], iter(words)
    for word in rest:
        if word in ("--compare", "--out"):
            word += f"={next(rest, '')}"
        key, separator, value = word.removeprefix("--").partition("=")
        if separator and not value:
            raise UserError(f"{word.partition('=')[0]} needs a value, like --compare core or --out reports")
        if word.startswith("-") or (separator and key.isidentifier() and not Path(word).exists()):
            options.append(word.removeprefix("--") if separator else word)
        else:
            folders.append(word)
    arguments = _parsed(ReportArguments, options)
    folders += arguments.runs
    if not folders:
        raise UserError("no folder was named; give folders of runs, like 'worldmodels report runs --compare core'")
    command = shlex.join(["worldmodels", "report", *words])
    of_task, unfinished = task_runs(folders)
    if of_task:
        table, lines = overview(of_task, listed(arguments.trust))
        show(table)
        if unfinished:
            print(f"not evaluated: {', '.join(path.as_posix() for path in unfinished)}")
        for path in write_overview(table, lines, Path(arguments.out or folders[0]), command):
            print(path)
        return
    board = scoreboard(folders, arguments.compare)
    for table in tables(board):
        show(table)
    if board.not_evaluated:
        print(f"not evaluated: {', '.join(board.not_evaluated)}")
    if board.foreign:
        print(f"not a world model's run: {', '.join(board.foreign)}")
    for path in write(board, Path(arguments.out or folders[0]), command):
        print(path)


def _rollout(words: list[str]) -> None:
    from .run import is_agent, load_run
    from .trust import listed

    arguments = _parsed(RolloutArguments, words)
    trust = listed(arguments.trust)
    if is_agent(Path(arguments.run)):
        from .agents.run import load_agent

        written = load_agent(arguments.run, trust=trust).draw(episode=arguments.episode)
    else:
        written = load_run(arguments.run, trust=trust).draw(quiet=False, episode=arguments.episode)
    for path in written:
        print(path)


def _collect(words: list[str]) -> None:
    from .data.collect import collect
    from .logging import progress_bar

    arguments = _parsed(CollectArguments, words)
    policy = _imported(arguments.policy) if arguments.policy else None
    with progress_bar("collecting") as bar:
        task = bar.add_task("", total=arguments.episodes, note="episodes")
        episodes = collect(
            arguments.env,
            arguments.path,
            episodes=arguments.episodes,
            steps=arguments.steps,
            seed=arguments.seed,
            num_envs=arguments.num_envs,
            policy=policy,
            drop_invalid=arguments.drop_invalid,
            resize=tuple(arguments.resize) if arguments.resize else None,
            env_kwargs=arguments.env_kwargs,
            device=arguments.device,
            processes=arguments.processes,
            progress=lambda done, _: bar.update(task, completed=done),
        )
    print(f"{arguments.path}: {len(episodes)} episodes, {episodes.num_transitions} transitions")


def _import_cswm(words: list[str]) -> None:
    from .data.importers import import_cswm

    arguments = _parsed(ImportArguments, words)
    episodes = import_cswm(
        arguments.file,
        arguments.path,
        action_size=arguments.action_size,
        actions_per_object=arguments.actions_per_object,
    )
    print(f"{arguments.path}: {len(episodes)} episodes, {episodes.num_transitions} transitions")


def _imported(path: str) -> Callable[..., Any]:
    """What ``module:name`` names."""
    import importlib

    module, separator, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # a user's module may raise anything
        raise UserError(f"{path!r} cannot be imported ({error!r}); write module:name") from error


def _plugin(kind: str, name: str) -> Callable[..., Any]:
    """A core or an encoder by its name, or by ``module:Class``."""
    if ":" in name:
        return _imported(name)
    from .cores import CORES, READERS
    from .encoders import ENCODERS
    from .plugins import constructor, offered, refuse_reader

    known = offered("cores", CORES | READERS) if kind == "core" else offered("encoders", ENCODERS)
    if name not in known:
        raise UserError(f"unknown {kind} {name!r}; {nearest(name, known)} Your own is {kind}=module:Class")
    own = {key: value for key, value in known[name].items() if key not in ("_target_", "slot_size")}
    target = constructor(kind, known[name])
    if kind == "core":
        refuse_reader(target)
    return partial(target, **own)


def _envs(words: list[str]) -> None:
    import gymnasium as gym
    from rich.table import Table

    from .data.environments import register_plugins
    from .report.tables import show

    before = set(gym.registry)
    register_plugins()
    shown = sorted(name for name in gym.registry if name.startswith("worldmodels/") or name not in before)
    table = Table("id", "from", "step limit")
    for name in shown:
        spec = gym.spec(name)
        table.add_row(name, str(spec.entry_point).split(":")[0], str(spec.max_episode_steps))
    show(table)
    print(f"and any other Gymnasium id ({len(gym.registry)} registered here), or package:Id-v0")


def _cores(words: list[str]) -> None:
    from hydra.utils import get_class
    from rich.table import Table

    from .cores import CORES, READERS
    from .plugins import offered, options_of
    from .report.tables import show

    table = Table("name", "what it is", "options")
    for name, entry in offered("cores", CORES | READERS).items():
        try:
            core = get_class(entry["_target_"])
        except (ImportError, ValueError, AttributeError) as error:
            table.add_row(name, f"cannot be imported: {first_line(error.__cause__ or error)}", "")
            continue
        options = ", ".join(f"{key}={value}" for key, value in options_of(core).items())
        first = next(iter((core.__doc__ or "").strip().splitlines()), "")
        table.add_row(name, first.split(":")[0], options)
    show(table)


def _check(words: list[str]) -> None:
    from .check import Findings, check_core, check_encoder, check_env

    if words in (["-h"], ["--help"]):
        print("worldmodels check ENV    an environment's id, also package:Id-v0")
        print("worldmodels check core=NAME    a name of 'worldmodels cores', or module:Class")
        print("worldmodels check encoder=NAME    a name of encoder=, or module:Class")
        return
    if len(words) != 1:
        raise UserError(
            "give one thing to check: an environment's id, or core= or encoder= with a name or module:Class"
        )
    kind, separator, path = words[0].partition("=")
    if separator and kind == "core":
        found = Findings(check_core(_plugin(kind, path)), [])
    elif separator and kind == "encoder":
        found = check_encoder(_plugin(kind, path))
    else:
        with _at_most(_CHECK_SECONDS, words[0]):
            found = check_env(words[0].removeprefix("env="))
    for line in found.advice:
        print(f"ADVICE {line}")
    for line in found.mend:
        print(f"MEND {line}")
    if found.mend:
        raise UserError(f"{words[0]}: {len(found.mend)} thing{'s' * (len(found.mend) > 1)} to mend")
    print(f"{words[0]}: all checks passed")


@contextmanager
def _at_most(seconds: float, env: str) -> Iterator[None]:
    """End this process with a line when a stranger's environment does not come back."""

    def end() -> None:
        print(
            f"worldmodels: environment {env} hangs: its checks take seconds and are not done after {seconds:g}",
            file=sys.stderr,
        )
        os._exit(2)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


READING = ("evaluate", "evaluate-agent", "rollout", "compare", "report")
"""Commands that open folders which may be from anyone."""

COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": _train,
    "train-agent": _train_agent,
    "evaluate-agent": _evaluate_agent,
    "evaluate": _evaluate,
    "rollout": _rollout,
    "collect": _collect,
    "import-cswm": _import_cswm,
    "compare": _compare,
    "report": _report,
    "envs": _envs,
    "cores": _cores,
    "check": _check,
}
