"""A run: what ``train`` makes and ``load`` opens again, a folder."""

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from filelock import FileLock, Timeout
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn

from . import checkpoints
from .config import TrainConfig, plain
from .data.episodes import Episodes
from .errors import UserError, first_line, printable
from .logging import read_metrics
from .plugins import build, constructor, core_builder, options_of
from .ranges import check_ranges
from .tasks import TASKS, Task
from .training import TrainerSettings, check_settings, fit, make_fabric, use_threads
from .trust import remember, trusting, vet

CONFIG = "config.yaml"
EVALUATION = "evaluation.json"
_LARGEST_EVALUATION = 1 << 26  # bytes
_LARGEST_CONFIG, _MOST_BRACKETS, _DEEPEST_CONFIG = 1 << 17, 1000, 100  # bytes, brackets, columns: YAML is slow in more
_MOVED = {  # where tasks lay before, in the configs of old runs
    "worldmodels.tasks.Adding": "adding",
    "worldmodels.tasks.CoordinateArithmetic": "arithmetic",
    "worldmodels.tasks.GridWorld": "gridworld",
    "worldmodels.view_tasks.PartialViews": "views",
}


def build_task(config: Mapping[str, Any]) -> Task:
    """The task a config describes; parts of the config that it asks for are handed on.

    Raises:
        UserError: a value out of its range, an option, an environment or data that the task does not take.
    """
    check_ranges("", TrainConfig, config)
    options = config["task"] or TASKS["transitions"]
    sections = constructor("task", options).sections
    _refuse_what_is_not_read(options["_target_"], sections, config)
    task: Task = build("task", options, **{name: config[name] for name in sections})
    return task


def _refuse_what_is_not_read(path: str, sections: tuple[str, ...], config: Mapping[str, Any]) -> None:
    """Refuse settings of other tasks that change what a user expects of this one.

    Raises:
        UserError: an environment, data or memory that the task does not take.
    """
    name = next((name for name, entry in TASKS.items() if entry["_target_"] == path), path.rpartition(".")[2])
    data, trainer = config["data"], config["trainer"]
    own_data = config["env"]["id"] is not None or data["train"]["path"] or data["test"]["path"]
    if not {"env", "data"} & set(sections) and own_data:
        raise UserError(f"the {name} task makes its own sequences; leave out env= and data=")
    carried = (config["memory"], config["action_to"], config["slot_ids"], trainer["window"], trainer["imagine"])
    if "memory" not in sections and carried != ("none", None, False, 1, False):
        raise UserError(
            "memory=, action_to=, slot_ids=, trainer.window= and trainer.imagine= are for world models; leave them out of "
            f"the {name} task, where a core's state is carried through every sequence"
        )


@contextlib.contextmanager
def training_in(path: Path, config: Mapping[str, Any], *, resume: bool = False) -> Iterator[None]:
    """Keep other processes from training in a run's folder meanwhile, and have its config.yaml say what is trained.

    A new run that fails before it has logged a line or written a checkpoint takes back what it wrote there, so that the
    corrected command can have the folder. What is interrupted stays, to be gone on with.

    Args:
        path: the run's folder.
        config: what is trained there.
        resume: it holds the run already; of its config the number of steps may have changed.

    Raises:
        UserError: another process is training there, or it holds a run.
    """
    path.mkdir(parents=True, exist_ok=True)
    before = set(path.iterdir())
    lock = FileLock(path / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(f"another process is training in {path}; wait for it, or choose another folder") from error
    try:
        if resume:
            _note_steps(path, config)
        else:
            _claim(path, config)
        try:
            yield
        except Exception:
            if not resume and checkpoints.latest(path) is None and not read_metrics(path):
                for file in set(path.iterdir()) - before:
                    if file.is_file():
                        file.unlink()
            raise
    finally:
        lock.release()


def _claim(path: Path, config: Mapping[str, Any]) -> None:
    if (path / CONFIG).exists():
        raise UserError(f"{path} was taken by another run this moment; choose another folder with run=")
    checkpoints.write_aside(path / CONFIG, OmegaConf.to_yaml(OmegaConf.create(dict(config))).encode())
    remember(path, config)


def longer(path: Path, config: Mapping[str, Any], steps: str) -> dict[str, Any]:
    """A run's config with another number of steps, to go on with it after its end or to another one.

    Raises:
        UserError: it has done as many already.
    """
    newest = checkpoints.latest(path)
    done = checkpoints.step_of(newest) if newest else 0
    try:
        number = int(steps)
    except ValueError:
        number = -1
    if number <= done:
        raise UserError(f"trainer.steps={steps}; {path} has done {done:,} steps, so expected a whole number above that")
    return {**config, "trainer": {**config["trainer"], "steps": number}}


def _note_steps(path: Path, config: Mapping[str, Any]) -> None:
    saved = _read_yaml(path / CONFIG)
    if saved["trainer"].get("steps") != config["trainer"]["steps"]:
        saved["trainer"]["steps"] = config["trainer"]["steps"]
        checkpoints.write_aside(path / CONFIG, OmegaConf.to_yaml(OmegaConf.create(saved)).encode())


def figures_in(path: Path) -> Path:
    """The folder for a run's pictures.

    Raises:
        UserError: it leads elsewhere.
    """
    folder = path / "figures"
    refuse_links(folder)
    folder.mkdir(exist_ok=True)
    return folder


def refuse_links(folder: Path) -> None:
    """Refuse to write where a link in a run's folder, which may be from anyone, leads.

    Raises:
        UserError: naming the link.
    """
    for one in (folder, *(folder.iterdir() if folder.is_dir() else ())):
        if one.is_symlink():
            raise UserError(
                f"{one} is a link to {one.resolve()}; remove it, so that nothing is written outside of the run"
            )


class Run:
    """A trained model, what it was trained on, and their folder.

    Args:
        path: the folder.
        config: what it was trained with.
        task: what it was trained on.
        model: the network around the core.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], task: Task, model: nn.Module):
        self.path = path
        self.config = config
        self.task = task
        self.model = model

    def evaluate(self, data: str | Path | Episodes | None = None, *, quiet: bool = True) -> dict[str, Any]:
        """Score the model on the task's test data and write ``evaluation.json``; see the task's ``evaluate``.

        Args:
            data: other episodes or their folder, which are scored without writing; None for the task's own test data.
            quiet: no progress bar.
        """
        task = self.task
        if data is not None:
            task = self._offered("on")(data if isinstance(data, Episodes) else Episodes.load(data))
        newest = checkpoints.latest(self.path)
        counts = {name: parameter.numel() for name, parameter in self.model.named_parameters()}
        result = {
            "task": self.task.name,
            "core": type(getattr(self.model, "core", self.model)).__name__,
            "seed": self.config["seed"],
            "parameters": sum(counts.values()),
            "core_parameters": sum(count for name, count in counts.items() if ".core." in f".{name}"),
            "step": checkpoints.step_of(newest) if newest else 0,
            **task.evaluate(self.model.eval(), quiet=quiet),
        }
        before = self.config["model"].get("data", {}) if "model" in self.config else {}
        if (
            data is None
            and hasattr(task, "episodes")
            and before.get("test") not in (None, task.episodes("test").checksum)
        ):
            line = "the test data were recorded anew and differ: the environment is another than it was in training"
            print(f"worldmodels: {line}", file=sys.stderr)
        if data is None:
            write_evaluation(self.path, result)
        return result

    def draw(self, *, quiet: bool = True, episode: int = 0) -> list[Path]:
        """Write the run's pictures, one of them of a test episode or example, into ``figures/`` and return their paths."""
        if episode < 0:
            raise UserError(f"episode={episode}; episodes and examples are numbered from 0")
        folder = figures_in(self.path)
        scored = (self.path / EVALUATION).is_file()
        result = read_evaluation(self.path) if scored else self.evaluate(quiet=quiet)
        return self.task.draw(self.model.eval(), result, read_metrics(self.path), folder, episode)

    def rollout(self, observations: Any, actions: Any) -> Tensor:
        """Imagine from observations: predicted slots after each action; see the task's ``rollout``, if it has one."""
        imagined: Tensor = self._offered("rollout")(self.model.eval(), observations, actions)
        return imagined

    def _offered(self, name: str) -> Any:
        """A method that only some tasks have.

        Raises:
            UserError: this one has not.
        """
        method = getattr(self.task, name, None)
        if method is None:
            what = {"on": "makes its own test data; leave out data=", "rollout": "imagines nothing from an observation"}
            raise UserError(f"the {self.task.name} task {what[name]}")
        return method


def train_run(config: Mapping[str, Any], path: Path, *, resume: bool = False) -> Run | None:
    """Train what a config describes; missing data are collected first, and the folder is claimed when all is built.

    Args:
        config: a composed config in plain values.
        path: the run's folder.
        resume: go on with the run in that folder.

    Returns:
        The run; None in all processes but the first.

    Raises:
        UserError: something the user can mend.
    """
    if not resume and (path / CONFIG).exists():
        raise UserError(f"{path} holds a run already; go on with resume={path}, or choose another folder")
    settings = TrainerSettings(**config["trainer"])
    fabric = make_fabric(settings.accelerator, settings.precision)
    check_settings(settings, fabric.world_size)
    use_threads(settings.threads)  # for collecting data as well
    path = Path(fabric.broadcast(str(path)))
    quiet = not config["logger"]["progress"] or not fabric.is_global_zero
    found = _with_data_as_found(config)
    task = build_task(config if fabric.is_global_zero else found)
    with fabric.rank_zero_first():
        task.collect(quiet=quiet)
    config, about = found, task.about()
    if resume:
        refuse_links(path / "checkpoints")
        _refuse_other_data(path, config.get("model", {}), about)
    torch.manual_seed(config["seed"])
    model = task.model(core_builder(config["core"]), about)
    draw = task.batches(settings.batch_size // fabric.world_size, fabric.device)

    def losses(wrapped: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
        return task.losses(wrapped, draw(generator), generator)

    def score(model: nn.Module) -> dict[str, float]:
        scores = task.evaluate(model.eval(), settings.evaluate_episodes)["scores"]
        return {f"{task.tags[1]}/{name}": value for name, value in scores.items()}

    held = training_in(path, {**config, "model": about}, resume=resume)
    with held if fabric.is_global_zero else contextlib.nullcontext():
        fit(
            model,
            losses,
            settings,
            path,
            fabric=fabric,
            seed=config["seed"],
            tag=task.tags[0],
            unit=task.unit,
            evaluate=score,
            resume=resume,
            quiet=quiet,
        )
    return Run(path, config, task, model.eval()) if fabric.is_global_zero else None


def _with_data_as_found(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config that does not ask for data to be recorded anew, for whoever reads it later."""
    task = config["task"] | ({"fresh": False} if "fresh" in config["task"] else {})
    return {**config, "data": {**config["data"], "fresh": False}, "task": task}


def _refuse_other_data(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with a run on other data than it began with.

    Raises:
        UserError: naming them.
    """
    for which, checksum in before.get("data", {}).items():
        if now.get("data", {}).get(which) != checksum:
            raise UserError(
                f"the {which} data of {path} are not those it began with; bring these back, or start a new run with run="
            )


def collect_data(config: Mapping[str, Any]) -> None:
    """Collect the data that a config names if they never were, else verify them.

    Raises:
        UserError: see the task.
    """
    use_threads(config["trainer"]["threads"])
    build_task(config).collect(quiet=not config["logger"]["progress"])


def load(path: str | Path, *, device: str = "cpu", trust: Iterable[str] = ()) -> Any:
    """Open the folder of any run, a ``Run`` or of an agent an ``AgentRun``; see ``load_run`` for the arguments."""
    if is_agent(Path(path)):
        from .agents.run import load_agent

        return load_agent(path, device=device, trust=trust)
    return load_run(path, device=device, trust=trust)


def load_run(path: str | Path, *, device: str = "cpu", trust: Iterable[str] = ()) -> Run:
    """Open a run folder: its config, and the model at its newest checkpoint, on a device.

    Nothing that the folder names is imported or called beyond our tables, installed plug-ins, and what ``trust`` names; runs
    that were trained by you on this machine open as they are. Data that have to be recorded again go into the folder.

    Args:
        path: the folder.
        device: where the model is wanted.
        trust: modules whose classes and environments the run may name, like ``["my.module"]``.

    Raises:
        UserError: no run there, a damaged or foreign one, or one that names code which is not trusted.
    """
    path = Path(path)
    with trusting(trust):
        config = read_config(path)
        vet(path, config)
        try:
            task = build_task(_kept_inside(path, config))
            model = task.model(core_builder(config["core"]), config["model"])
        except UserError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UserError(f"{path / CONFIG} is not the config of a run of ours (it lacks {error})") from error
    newest = checkpoints.newest(path)
    if newest is None:
        raise UserError(f"{path} has no checkpoint yet; start it again with resume={path}")
    checkpoints.load_weights(newest, model)
    return Run(path, config, task, model.to(device).eval())


def read_config(path: Path) -> dict[str, Any]:
    """The config of a run's folder.

    Raises:
        UserError: no such run there, or not a config.
    """
    config = read_saved(path, TrainConfig)
    moved = _MOVED.get(config["task"].get("_target_"))
    return config | {"task": config["task"] | TASKS[moved]} if moved else config


def write_evaluation(path: Path, result: Mapping[str, Any]) -> None:
    """Write a run's ``evaluation.json``: the scores, the checksum of the weights that were scored, and its own."""
    newest = checkpoints.latest(path)
    weights = checkpoints.weights_checksum(newest) if newest else None
    told = {**result, "weights": weights}
    told["checksum"] = checkpoints.checksum_of(told)
    checkpoints.write_aside(path / EVALUATION, json.dumps(told, indent=1).encode())


def read_evaluation(path: Path) -> dict[str, Any]:
    """What a run's ``evaluation.json`` says, without characters that a terminal would obey.

    Raises:
        UserError: it is not JSON, damaged, or of other weights than those of the run's newest checkpoint.
    """
    file = path / EVALUATION
    try:
        result = json.loads(checkpoints.read_plain(file, _LARGEST_EVALUATION))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON; run 'worldmodels evaluate run={path}' again") from error
    if not isinstance(result, dict):
        raise UserError(f"{file} holds no scores; run 'worldmodels evaluate run={path}' again")
    newest = checkpoints.latest(path)
    weights, checksum = result.pop("weights", None), result.pop("checksum", None)  # older releases wrote neither
    if checksum is not None and checksum != checkpoints.checksum_of({**result, "weights": weights}):
        raise UserError(
            f"{file} does not match its checksum: it is damaged; run 'worldmodels evaluate run={path}' again"
        )
    if weights is not None and newest is not None and weights != checkpoints.weights_checksum(newest):
        raise UserError(f"{file} is of other weights than {newest}; run 'worldmodels evaluate run={path}' again")
    told: dict[str, Any] = _printable(result)
    return told


def _printable(value: Any) -> Any:
    """Nested values with nothing but printable characters in their strings."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {_printable(key): _printable(inside) for key, inside in value.items()}
    return [_printable(inside) for inside in value] if isinstance(value, list) else value


def is_agent(path: Path) -> bool:
    """Whether a folder holds an agent's run."""
    try:
        return "ppo" in _read_yaml(path / CONFIG)
    except UserError:
        return False


def read_saved(path: Path, schema: type) -> dict[str, Any]:
    """The config in a run's folder, by the schema it was composed with; "model" says what the run is of.

    Raises:
        UserError: no run there, a run of another kind, or not a config.
    """
    saved = _read_yaml(path / CONFIG)
    try:
        about = saved.pop("model")
        if ("ppo" in saved) != hasattr(schema(), "ppo"):
            kind, command = ("an agent", "-agent") if "ppo" in saved else ("no agent", "")
            raise UserError(f"{path} is the run of {kind}; the command for it is train{command} or evaluate{command}")
        return {**plain(OmegaConf.merge(OmegaConf.structured(schema), saved)), "model": about}
    except UserError:
        raise
    except (OmegaConfBaseException, AttributeError, KeyError, TypeError, ValueError) as error:
        raise _not_ours(path / CONFIG, first_line(error)) from error


def _read_yaml(file: Path) -> dict[str, Any]:
    """A saved config as it stands: plain values, nothing that would be looked up or grow when it is read.

    Raises:
        UserError: no such file, or another kind.
    """
    if not file.is_file():
        raise UserError(
            f"no run at {file.parent}: it has no {CONFIG}; give the folder that 'worldmodels train' printed"
        )
    try:
        text = checkpoints.read_plain(file, _LARGEST_CONFIG).decode()
        if text.count("[") + text.count("{") > _MOST_BRACKETS or _indented(text) > _DEEPEST_CONFIG:
            raise _not_ours(file, "it is nested too deep")
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise _not_ours(file, "it has aliases")
        saved = OmegaConf.to_container(OmegaConf.create(text))
        if "${" in json.dumps(saved):
            raise _not_ours(file, "it has ${...}, which would be looked up on this machine")
    except UserError:
        raise
    except (OmegaConfBaseException, yaml.YAMLError, OSError, ValueError, TypeError, RecursionError) as error:
        raise _not_ours(file, first_line(error)) from error
    if not isinstance(saved, dict):
        raise _not_ours(file, f"it holds a {type(saved).__name__}")
    return {str(key): value for key, value in saved.items()}


def _indented(text: str) -> int:
    """Columns before the first word of a line, the most of all lines."""
    return max((len(line) - len(line.lstrip(" -?")) for line in text.splitlines()), default=0)


def _not_ours(file: Path, why: str) -> UserError:
    return UserError(f"{file} is not the config of a run of ours ({why})")


def _kept_inside(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The config of a run that is opened to be read: missing data are recorded in its folder, not where it says.

    Raises:
        UserError: that would lead elsewhere.
    """
    refuse_links(path / "data")
    data, task = config["data"], config["task"]
    inside = {"data": data | {"dir": [path / "data", data["dir"]]}}
    if "data_dir" in options_of(constructor("task", task or TASKS["transitions"])):
        inside["task"] = task | {"data_dir": [path / "data", task.get("data_dir", "data")]}
    return config | inside
