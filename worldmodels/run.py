"""A run: what ``train`` makes and ``load`` opens again, a folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn
from yaml import YAMLError

from . import checkpoints
from .config import TrainConfig, build, build_core, plain
from .data.collect import collected, resized
from .data.episodes import Episodes
from .errors import UserError
from .evaluation import Encoded, burn_in_steps, evaluate
from .logging import progress_bar, read_metrics
from .report import choices, figures
from .report import tasks as task_figures
from .tasks import Task
from .training import TrainerSettings, check_settings, fit, make_fabric, train
from .view_tasks import PartialViews
from .world_model import WorldModel, attached_size

CONFIG = "config.yaml"
EVALUATION = "evaluation.json"


def build_model(config: Mapping[str, Any], observation_shape: tuple[int, ...], action: Mapping[str, Any]) -> WorldModel:
    """The world model a config describes, for data of this shape.

    Raises:
        UserError: an encoder that cannot take these observations, an unknown option.
    """
    encoder_config, core_config = dict(config["encoder"]), dict(config["core"])
    num_slots, slot_size = encoder_config.pop("num_slots"), encoder_config.pop("slot_size")
    encoder = build("encoder", encoder_config, tuple(observation_shape), num_slots, slot_size)
    action_to = config["action_to"] or ("slot" if action.get("per_object") else "copy")
    token_size = slot_size + attached_size(action, action_to, num_slots)
    core_slots = core_config.pop("num_slots", None) or num_slots
    core_slot_size = core_config.pop("slot_size", None) or slot_size
    core = build_core(core_config, token_size, core_slots, core_slot_size, num_slots)
    return WorldModel(encoder, core, action=action, action_to=action_to, memory=config["memory"])


def build_task(config: Mapping[str, Any]) -> tuple[Task, nn.Module]:
    """The task a config names and the network around its core.

    Raises:
        UserError: a core that cannot do the task, an option that is not a task's.
    """
    task: Task = build("task", config["task"])
    core_config = dict(config["core"])
    num_slots = core_config.pop("num_slots", None) or task.num_slots
    slot_size = core_config.pop("slot_size", None) or task.slot_size
    position_size = getattr(task, "position_size", None)
    core = build_core(core_config, task.token_size, num_slots, slot_size, task.num_tokens, position_size)
    return task, task.model(core)


def split(config: Mapping[str, Any], which: str, *, quiet: bool = False) -> Episodes:
    """The "train" or "test" episodes of a config: opened, or collected if these settings never were.

    Raises:
        UserError: missing or damaged data, an unknown environment.
    """
    data, env = config["data"], config["env"]
    chosen = data[which]
    if chosen["path"] is not None:
        return Episodes.load(chosen["path"])
    if env["id"] is None:
        raise UserError("no environment was named; give env.id=<a Gymnasium id>, or experiment=block_physics")
    steps = chosen["steps"]
    if which == "test" and steps is not None:  # a carried state is filled before the steps that are scored
        steps += burn_in_steps(config["evaluation"]["burn_in"], config["memory"])
    settings = {
        "env_id": env["id"],
        "env_kwargs": env["kwargs"],
        "resize": tuple(env["resize"]) if env["resize"] else None,
        "episodes": chosen["episodes"],
        "steps": steps,
        "seed": chosen["seed"],
        "drop_invalid": data["drop_invalid"],
        "num_envs": data["num_envs"],
    }
    with progress_bar(f"collecting {which}") as bar:
        bar.disable |= quiet
        task = bar.add_task("", total=chosen["episodes"], note="episodes", visible=False)
        return collected(
            data["dir"],
            which,
            settings,
            processes=data["processes"],
            progress=lambda done, _: bar.update(task, completed=done, visible=True),
        )


def collect_data(config: Mapping[str, Any]) -> None:
    """Collect the data that a config names if they never were, else verify them.

    Raises:
        UserError: see ``split`` and the task.
    """
    if config["trainer"]["threads"] > 0:
        torch.set_num_threads(config["trainer"]["threads"])
    if not config["task"]:
        for which in ("train", "test"):
            split(config, which, quiet=not config["logger"]["progress"])
    elif isinstance(task := build("task", config["task"]), PartialViews):
        task.record()


def claim(path: Path, config: str) -> None:
    """Make a run's folder ours by creating its config, which succeeds for one process only."""
    path.mkdir(parents=True, exist_ok=True)
    try:
        with (path / CONFIG).open("x", encoding="utf-8") as file:
            file.write(config)
    except FileExistsError as error:
        raise UserError(f"{path} was taken by another run this moment; choose another folder with run=") from error


class Run:
    """A trained world model and its folder.

    Args:
        path: the folder.
        config: what it was trained with.
        model: the model.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], model: WorldModel):
        self.path = path
        self.config = config
        self.model = model

    def evaluate(self, data: str | Path | Episodes | None = None, *, quiet: bool = True) -> dict[str, Any]:
        """Score the model on held-out episodes and write ``evaluation.json``.

        Args:
            data: episodes or their folder; None for the test episodes of the run's config (other episodes are scored
                without writing).
            quiet: no progress bar.

        Returns:
            The scores, see ``worldmodels.evaluation.evaluate``.
        """
        own = data is None
        episodes = split(self.config, "test", quiet=quiet) if data is None else data
        if not isinstance(episodes, Episodes):
            episodes = Episodes.load(episodes)
        require_same_kind(self.model, episodes)
        with progress_bar("encoding") as bar:
            bar.disable |= quiet
            task = bar.add_task("", total=None, note="frames")
            result = evaluate(
                self.model,
                episodes,
                **self.config["evaluation"],
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
        newest = checkpoints.latest(self.path)
        result["step"] = checkpoints.step_of(newest) if newest else 0
        if own:
            checkpoints.write_aside(self.path / EVALUATION, json.dumps(result, indent=1).encode())
        return result

    @torch.no_grad()
    def rollout(self, observations: Any, actions: Any) -> Tensor:
        """Imagine from observations: predicted slots after each action.

        Args:
            observations: the present, one frame ``(...)`` or a batch ``(B, ...)``, as the environment gives them.
            actions: ``(T,)`` or ``(T, B)`` integers, or with an action axis, as the environment takes them.

        Returns:
            Slots ``(T, K, D)``, or ``(T, B, K, D)`` for a batch.
        """
        device = next(self.model.parameters()).device
        seen = observations["image"] if isinstance(observations, Mapping) else observations
        frames, moves = (
            (x if isinstance(x, Tensor) else torch.as_tensor(np.asarray(x))).to(device) for x in (seen, actions)
        )
        single = frames.dim() == len(self.model.encoder.observation_shape)
        if single:
            frames, moves = frames[None], moves.reshape(len(moves) if moves.dim() else 1, 1, *moves.shape[1:])
        if self.config["env"]["resize"] is not None:
            frames = resized(frames, tuple(self.config["env"]["resize"]))
        sizes = self.model.action["sizes"]
        width = () if self.model.action["kind"] == "discrete" and len(sizes) == 1 else (moves.shape[-1],)
        if len(moves) == 0 or moves.shape[1:2] != (len(frames),) or moves.dim() != 2 + len(width):
            raise UserError(
                f"{len(frames)} observations, but actions of shape {tuple(moves.shape)}; expected (T, {len(frames)}, ...)"
            )
        if self.model.action["kind"] == "discrete":
            largest = moves.reshape(-1, len(sizes)).amax(0).tolist()
            if int(moves.min()) < 0 or any(m >= n for m, n in zip(largest, sizes, strict=True)):
                raise UserError(f"actions reach {largest}; this model knows actions below {sizes}")
        imagined = self.model.rollout(self.model.encode(frames), moves)
        return imagined[:, 0] if single else imagined

    def draw(self, *, quiet: bool = True, episode: int = 0) -> list[Path]:
        """Write the run's pictures into ``figures/`` and return their paths."""
        folder = self.path / "figures"
        folder.mkdir(exist_ok=True)
        horizons = self.config["evaluation"]["horizons"]
        episodes = split(self.config, "test", quiet=quiet)
        if episode < 0:
            raise UserError(f"episode={episode}; episodes are numbered from 0")
        wait = burn_in_steps(self.config["evaluation"]["burn_in"], self.model.memory)
        with torch.no_grad():
            limit = max(figures.REFERENCES, episode + 1)
            seen = Encoded(self.model, episodes, max(horizons), burn_in=wait, limit=limit)
        written = [figures.rollout(seen, folder / "rollout.png", episode=episode)]
        written.append(figures.horizons(seen, type(self.model.core).__name__, folder / "horizons.png"))
        metrics = read_metrics(self.path)
        if metrics:
            written.append(figures.curves(metrics, folder / "curves.png"))
        drawn = choices.choices(self.model, seen, folder / "choices.png", episode=episode)
        return written + ([drawn] if drawn else [])


class TaskRun:
    """A core trained on a sequence task, and its folder.

    Args:
        path: the folder.
        config: what it was trained with.
        task: the task.
        model: the network around the core.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], task: Task, model: nn.Module):
        self.path = path
        self.config = config
        self.task = task
        self.model = model

    def evaluate(self, *, quiet: bool = True) -> dict[str, Any]:
        """Score the model on the task's test data and write ``evaluation.json``; see the task's ``evaluate``."""
        about = {"task": self.task.name, "core": type(self.model.core).__name__, "seed": self.config["seed"]}
        about["parameters"] = sum(p.numel() for p in self.model.parameters())
        result = about | self.task.evaluate(self.model.eval())
        checkpoints.write_aside(self.path / EVALUATION, json.dumps(result, indent=1).encode())
        return result

    def draw(self, *, quiet: bool = True, episode: int = 0) -> list[Path]:
        """Write the run's pictures, one of them of a test example, into ``figures/`` and return their paths."""
        folder = self.path / "figures"
        folder.mkdir(exist_ok=True)
        if episode < 0:
            raise UserError(f"episode={episode}; examples are numbered from 0")
        saved = self.path / EVALUATION
        result = json.loads(saved.read_text(encoding="utf-8")) if saved.is_file() else self.evaluate()
        written = self.task.draw(self.model.eval(), result, folder, episode)
        metrics = read_metrics(self.path)
        return written + ([task_figures.curves(metrics, folder / "curves.png")] if metrics else [])


def require_same_kind(model: WorldModel, episodes: Episodes) -> None:
    """Refuse data whose observations or actions are not the model's.

    Raises:
        UserError: they differ.
    """
    expected = tuple(model.encoder.observation_shape)
    if episodes.observation_shape != expected:
        raise UserError(f"the data show {episodes.observation_shape}, the model takes {expected}")
    if episodes.about.get("action") != model.action:
        raise UserError(f"the data have actions {episodes.about.get('action')}, the model takes {model.action}")


def _check_evaluation(config: Mapping[str, Any], test: Episodes) -> None:
    """Refuse an evaluation that cannot be, before anything is trained.

    Raises:
        UserError: no horizons, too few episodes, or episodes too short for them.
    """
    horizons, limit = config["evaluation"]["horizons"], config["evaluation"]["limit"]
    if not horizons or min(horizons) < 1 or (limit is not None and limit < 2):
        raise UserError(f"evaluation.horizons={horizons} and limit={limit}; give horizons of at least 1 and 2 episodes")
    if config["memory"] == "carry" and config["trainer"]["window"] < 2:
        raise UserError("memory=carry trains on windows of several steps; set trainer.window=4 or more")
    needed = burn_in_steps(config["evaluation"]["burn_in"], config["memory"]) + max(horizons)
    enough = int((test.lengths >= needed).sum())
    if enough < 2:
        raise UserError(
            f"{enough} of {len(test)} test episodes reach the {needed} steps that evaluation.horizons={horizons} need (the "
            f"longest has {int(test.lengths.max())}); give smaller horizons, like evaluation.horizons=[1,5]"
        )


def train_run(config: Mapping[str, Any], path: Path, *, resume: bool = False) -> Run | TaskRun | None:
    """Train what a config describes: a core on a task, or a world model, for which missing data are collected first.

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
    fabric = make_fabric(settings)
    if settings.threads > 0:  # for collecting data as well
        torch.set_num_threads(settings.threads)
    path = Path(fabric.broadcast(str(path)))
    quiet = not config["logger"]["progress"] or not fabric.is_global_zero
    if config["task"]:
        return _train_task(config, path, settings, fabric, resume=resume, quiet=quiet)
    with fabric.rank_zero_first():
        data = split(config, "train", quiet=quiet)
        test = split(config, "test", quiet=quiet)
    if "action" not in data.about:
        raise UserError("these data do not say what their actions are; collect or import them again")
    _check_evaluation(config, test)
    torch.manual_seed(config["seed"])
    model = build_model(config, data.observation_shape, data.about["action"])
    require_same_kind(model, test)
    if not resume and fabric.is_global_zero:
        about = {"observation_shape": list(data.observation_shape), "action": data.about["action"]}
        claim(path, OmegaConf.to_yaml(OmegaConf.create({**config, "model": about})))

    def score(model: WorldModel) -> dict[str, float]:
        result = evaluate(model, test, **(config["evaluation"] | {"limit": settings.evaluate_episodes}))
        values: dict[str, float] = {}
        for h, entry in result["all"].items():
            values |= {
                f"wm/hits@1/h{h}": entry["h@1"],
                f"wm/mrr/h{h}": entry["mrr"],
                f"wm/copy_hits@1/h{h}": entry["copy_h@1"],
            }
            values[f"wm/in_episode_hits@1/h{h}"] = result["in_episode"][h]["h@1"]
        return values

    train(
        model,
        data,
        settings,
        path,
        fabric=fabric,
        objective=dict(config["objective"]),
        seed=config["seed"],
        evaluate=score,
        resume=resume,
        quiet=quiet,
    )
    return Run(path, config, model.eval()) if fabric.is_global_zero else None


def _train_task(
    config: Mapping[str, Any], path: Path, settings: TrainerSettings, fabric: Fabric, *, resume: bool, quiet: bool
) -> TaskRun | None:
    """Train a core on a task; see ``train_run``."""
    torch.manual_seed(config["seed"])
    task, model = build_task(config)
    _refuse_world_model_options(task.name, config, settings)
    check_settings(settings, fabric.world_size)
    if not resume and fabric.is_global_zero:
        claim(path, OmegaConf.to_yaml(OmegaConf.create({**config, "model": {"task": task.name}})))
    draw = task.batches(settings.batch_size // fabric.world_size, fabric.device)

    def losses(wrapped: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
        return task.losses(wrapped, draw(generator))

    def score(model: nn.Module) -> dict[str, float]:
        scores = task.evaluate(model.eval(), settings.evaluate_episodes)["scores"]
        return {f"task/score/{name}": value for name, value in scores.items()}

    fit(
        model,
        losses,
        settings,
        path,
        fabric=fabric,
        seed=config["seed"],
        kind="task",
        unit="sequences",
        evaluate=score,
        resume=resume,
        quiet=quiet,
    )
    return TaskRun(path, config, task, model.eval()) if fabric.is_global_zero else None


def _refuse_world_model_options(name: str, config: Mapping[str, Any], settings: TrainerSettings) -> None:
    """Refuse settings of a world model that change what a user expects of the task of this name.

    Raises:
        UserError: an environment, data or memory of a world model.
    """
    if config["env"]["id"] is not None or config["data"]["train"]["path"] or config["data"]["test"]["path"]:
        raise UserError(f"the {name} task makes its own sequences; leave out env= and data=")
    if (config["memory"], config["action_to"], settings.window, settings.imagine) != ("none", None, 1, False):
        raise UserError(
            f"memory=, action_to=, trainer.window= and trainer.imagine= are for world models; leave them out of the {name} "
            "task, where a core's state is carried through every sequence"
        )


def load(path: str | Path, *, device: str = "cpu") -> Run | TaskRun:
    """Open a run folder: its config, and the model at its newest checkpoint, on a device.

    Raises:
        UserError: no run there, or a damaged or foreign one.
    """
    path = Path(path)
    config = read_config(path)
    task: Task | None = None
    model: nn.Module
    try:
        about = config["model"]
        if config["task"]:
            task, model = build_task(config)
        else:
            model = build_model(config, tuple(about["observation_shape"]), about["action"])
    except UserError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{path / CONFIG} is not the config of a run of ours (it lacks {error})") from error
    newest = checkpoints.latest(path)
    if newest is None:
        raise UserError(f"{path} has no checkpoint yet; start it again with resume={path}")
    checkpoints.load_weights(newest, model)
    model = model.to(device).eval()
    if isinstance(model, WorldModel):
        return Run(path, config, model)
    assert task is not None
    return TaskRun(path, config, task, model)


def read_config(path: Path) -> dict[str, Any]:
    """The config of a world model's or a task's run.

    Raises:
        UserError: no such run there, or not a config.
    """
    return read_saved(path, TrainConfig)


def is_agent(path: Path) -> bool:
    """Whether a folder holds an agent's run."""
    try:
        return (path / CONFIG).is_file() and "ppo" in OmegaConf.load(path / CONFIG)
    except (OmegaConfBaseException, YAMLError, OSError):
        return False


def read_saved(path: Path, schema: type) -> dict[str, Any]:
    """The config in a run's folder, by the schema it was composed with; "model" says what the run is of.

    Raises:
        UserError: no run there, a run of another kind, or not a config.
    """
    if not (path / CONFIG).is_file():
        raise UserError(f"no run at {path}: it has no {CONFIG}; give the folder that 'worldmodels train' printed")
    try:
        saved: dict[str, Any] = OmegaConf.to_container(OmegaConf.load(path / CONFIG))  # type: ignore[assignment]
        about = saved.pop("model")
        if ("ppo" in saved) != hasattr(schema(), "ppo"):
            kind, command = ("an agent", "-agent") if "ppo" in saved else ("no agent", "")
            raise UserError(f"{path} is the run of {kind}; the command for it is train{command} or evaluate{command}")
        return {**plain(OmegaConf.merge(OmegaConf.structured(schema), saved)), "model": about}
    except UserError:
        raise
    except (OmegaConfBaseException, YAMLError, OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path / CONFIG} is not the config of a run of ours ({(str(error) or repr(error)).splitlines()[0]})"
        ) from error
