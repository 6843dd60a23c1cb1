"""An agent's run: what ``train-agent`` makes and goes on with, a folder."""

import inspect
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig
from rich.progress import Progress, TaskID
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.utils import LinearSchedule

from .. import checkpoints
from ..config import CONFIGS, LoggerConfig, register_cores, register_experiments
from ..data.environments import OUR_NAMESPACE, as_picture, find_spec, refused, resized
from ..envs.shared import AgentCopies
from ..errors import UserError, first_line
from ..launch import as_words, command, show_folder, summarise, train_job
from ..logging import RunLog, progress_bar, read_metrics
from ..ranges import AT_LEAST_ONE, SEED, Range, check_ranges
from ..report.tables import show
from ..run import CONFIG, figures_in, read_saved, refuse_links, training_in, write_evaluation
from ..training import flushing_denormals, make_fabric, use_threads
from ..trust import trusting, vet
from . import pictures
from .evaluation import play, summary, table
from .features import FEATURES, SlotFeatures
from .policy import RecurrentPolicy
from .recurrent_ppo import RecurrentPPO
from .vector import VectorEnvAdapter


@dataclass
class AgentEnvConfig:
    """Which environment, and how many copies of it an agent learns from, in all processes together.

    ``resize`` is the (height, width) that its pictures are brought to, or None.

    ``shared`` is for environments with many agents: one policy acts for each of them, seeing what that agent sees; the value
    are the options of ``worldmodels.envs.shared.AgentCopies``. Then steps of training and of a minibatch count every agent's
    steps. None: one policy for the whole environment.
    """

    id: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    resize: Annotated[list[int] | None, AT_LEAST_ONE] = None
    num_envs: Annotated[int, AT_LEAST_ONE] = 16
    shared: dict[str, Any] | None = None


@dataclass
class FeaturesConfig:
    """What a core reads: ``name`` is auto, flatten, nature, combined, babyai, slots or views; ``options`` are its own.

    ``run`` is the folder of a world model whose encoder is taken (slots); ``frozen`` leaves its weights as they are.
    """

    name: str = "auto"
    run: str | None = None
    frozen: bool = False
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class AgentTrainerConfig:
    """How long and where.

    ``steps`` are the environments'; ``anneal`` lets the learning rate fall to 0 along them; checkpoints and lines of metrics
    come every so many rollouts; ``threads`` are the CPU's, 0 leaves torch's choice.
    """

    steps: Annotated[int, AT_LEAST_ONE] = 1_000_000
    anneal: bool = False
    checkpoint_every: Annotated[int, AT_LEAST_ONE] = 20
    log_every: Annotated[int, AT_LEAST_ONE] = 1
    device: str = "auto"
    threads: Annotated[int, Range(0, 1024)] = 1


@dataclass
class AgentEvaluationConfig:
    """Episodes an agent is scored on: ``variants`` maps a name to options of the environment that differ.

    An environment that sets its episodes no limit is given one of ``max_steps`` here, 27,000 as Atari has it.
    """

    episodes: Annotated[int, AT_LEAST_ONE] = 500
    num_envs: Annotated[int, AT_LEAST_ONE] = 64
    deterministic: bool = False
    max_steps: Annotated[int, AT_LEAST_ONE] = 27_000
    seed: Annotated[int, SEED] = 1_000_003
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)


def ppo_options() -> dict[str, Any]:
    """The options of ``RecurrentPPO`` that a config sets, with their defaults."""
    taken = (
        "self",
        "policy",
        "env",
        "core",
        "core_kwargs",
        "tensorboard_log",
        "policy_kwargs",
        "verbose",
        "seed",
        "device",
        "fabric",
        "others",
    )
    parameters = inspect.signature(RecurrentPPO.__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.name not in taken and not p.name.startswith("_")}


@dataclass
class AgentConfig:
    """Everything ``train-agent`` can be told; ``label`` is the name of runs that differ in their seed only.

    ``jobs`` runs of a sweep are trained at once, each in a process of its own; None: as many as there are cores for.
    ``trust`` names modules, separated by commas, that a run folder from elsewhere may name; see ``trust.py``.
    """

    experiment: str = "any"
    size: str = "cpu"
    label: str = ""
    seed: Annotated[int, SEED] = 0
    run: str = MISSING
    resume: str = MISSING
    trust: str = ""
    jobs: Annotated[int | None, AT_LEAST_ONE] = None
    env: AgentEnvConfig = field(default_factory=AgentEnvConfig)
    encoder: FeaturesConfig = field(default_factory=FeaturesConfig)
    core: dict[str, Any] = field(default_factory=dict)
    net_arch: list[int] | None = None
    ppo: dict[str, Any] = field(default_factory=ppo_options)
    trainer: AgentTrainerConfig = field(default_factory=AgentTrainerConfig)
    evaluation: AgentEvaluationConfig = field(default_factory=AgentEvaluationConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)


def make_envs(
    env_id: str,
    num_envs: int,
    kwargs: Mapping[str, Any],
    device: str,
    shared: Mapping[str, Any] | None = None,
    *,
    resize: Sequence[int] | None = None,
    max_steps: int | None = None,
) -> VectorEnvAdapter:
    """Vector environments of any id, as an agent sees them: ours in one batch on the device, Atari in ale-py's own.

    MiniGrid and BabyAI ids get RGB pictures of the agent's view and the mission as words. With options of ``shared``, if only
    ``{}``, every agent of a team is an environment of its own. Pictures of others become bytes, see ``as_picture``.

    Args:
        env_id: any Gymnasium id.
        num_envs: copies.
        kwargs: keyword arguments of the environment.
        device: where ours run.
        shared: options of ``AgentCopies``.
        resize: (height, width) to which pictures of other environments are brought.
        max_steps: an episode's limit in those of other environments that have none.

    Raises:
        UserError: no such environment, or it refuses the options.
    """
    spec = find_spec(env_id)
    options = dict(kwargs)
    if resize is not None and spec.vector_entry_point is not None and spec.id.startswith((OUR_NAMESPACE, "ALE/")):
        raise UserError(
            f"env.resize is for pictures of other environments; {spec.id} has options of its own for their size"
        )
    try:
        if spec.id.startswith(OUR_NAMESPACE) and spec.vector_entry_point is not None:
            vector = gym.make_vec(
                spec.id, num_envs=num_envs, vectorization_mode="vector_entry_point", device=device, **options
            )
        elif spec.id.startswith("ALE/"):
            vector = gym.make_vec(spec.id, num_envs=num_envs, vectorization_mode="vector_entry_point", **options)
        else:
            if spec.id.startswith(("MiniGrid-", "BabyAI-")):
                env_id, options = "worldmodels/MiniGrid-v0", {"env_id": spec.id, **options}
            elif spec.max_episode_steps is None and max_steps is not None:
                options = {"max_episode_steps": max_steps, **options}
            makers = [lambda: _resized(as_picture(gym.make(env_id, **options)), resize)] * num_envs
            vector = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
        if shared is not None:
            vector = AgentCopies(vector, **shared)
    except UserError:
        raise
    except Exception as error:  # a stranger's constructor may raise anything
        raise refused(env_id, options, error) from error
    return VectorEnvAdapter(vector)


def _resized(env: gym.Env[Any, Any], size: Sequence[int] | None) -> gym.Env[Any, Any]:
    """An environment whose pictures ``(H, W, C)`` are brought to a size."""
    if size is None:
        return env
    space = env.observation_space

    def small(observation: Any) -> np.ndarray:
        return np.asarray(resized(torch.as_tensor(np.asarray(observation))[None], (size[0], size[1]))[0])

    if not isinstance(space, spaces.Box) or len(space.shape) != 3 or space.dtype != np.uint8:
        raise UserError(f"env.resize is for pictures (H, W, C); the environment observes {space}")
    return gym.wrappers.TransformObservation(
        env, small, spaces.Box(0, 255, (size[0], size[1], space.shape[2]), np.uint8)
    )


def _configured(
    config: Mapping[str, Any],
    device: str,
    num_envs: int | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    max_steps: int | None = None,
) -> VectorEnvAdapter:
    """The environments of a config; their number and some of their options may differ from it."""
    env = config["env"]
    number = env["num_envs"] if num_envs is None else num_envs
    kwargs = {**env["kwargs"], **(options or {})}
    return make_envs(env["id"], number, kwargs, device, env["shared"], resize=env["resize"], max_steps=max_steps)


def _policy(config: Mapping[str, Any], space: spaces.Space[Any]) -> tuple[str, dict[str, Any]]:
    """SB3's name of a policy for an observation space, and its keyword arguments.

    Raises:
        UserError: an encoder that is not known.
    """
    chosen = config["encoder"]
    name = "slots" if chosen["run"] else chosen["name"]
    arch = {} if config["net_arch"] is None else {"net_arch": list(config["net_arch"])}
    is_dict = isinstance(space, spaces.Dict)
    policy = "MultiInputPolicy" if is_dict else "CnnPolicy" if len(space.shape or ()) == 3 else "MlpPolicy"
    if name == "auto" and is_dict and {"image", "mission"} <= set(space.spaces):  # type: ignore[attr-defined]
        name = "babyai"
    if name == "auto" and is_dict and set(space.spaces) == {"view", "self"}:  # type: ignore[attr-defined]
        name = "views"
    if name in FEATURES:
        options = dict(chosen["options"])
        if FEATURES[name] is SlotFeatures:
            options |= {"run": chosen["run"], "frozen": chosen["frozen"]}
        return policy, arch | {"features_extractor_class": FEATURES[name], "features_extractor_kwargs": options}
    usual = {"flatten": "MlpPolicy", "nature": "CnnPolicy", "combined": "MultiInputPolicy", "auto": policy}
    if name not in usual:
        raise UserError(f"encoder.name={name}; expected auto, flatten, nature, combined, {', '.join(FEATURES)}")
    return usual[name], arch


def build_agent(config: Mapping[str, Any], envs: VectorEnvAdapter, fabric: Any = None) -> RecurrentPPO:
    """The agent a config describes; with ``fabric`` of several processes it learns from the environments of all.

    Raises:
        UserError: options that do not fit together.
    """
    policy, policy_kwargs = _policy(config, envs.observation_space)
    core, ppo = dict(config["core"]), dict(config["ppo"])
    if config["trainer"]["anneal"]:
        ppo["learning_rate"] = LinearSchedule(ppo["learning_rate"], 0.0, 1.0)
    try:
        return RecurrentPPO(
            policy,
            envs,
            core.pop("_target_"),
            core,
            **ppo,
            policy_kwargs=policy_kwargs,
            seed=config["seed"],
            device=config["trainer"]["device"] if fabric is None else fabric.device,
            fabric=fabric,
        )
    except UserError:
        raise
    except (ValueError, TypeError, AssertionError, RuntimeError, LookupError, AttributeError) as error:
        line = first_line(error)
        if "Kernel size" in line:
            line = f"pictures {envs.observation_space.shape} are too small for this encoder; set env.resize=[64,64]"
        raise UserError(f"an agent for {envs.name}: {line}") from error


class _Writer(KVWriter):
    """SB3's logger into the files of a run."""

    def __init__(self, log: RunLog):
        self.log = log

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, Any], step: int = 0) -> None:
        """One line of metrics."""
        values = {
            name: float(value) for name, value in key_values.items() if isinstance(value, (int, float, np.number))
        }
        if "time/fps" in values:
            values["time/steps_per_second"] = values.pop("time/fps")
        self.log.write(step, values)

    def close(self) -> None:
        """The run closes its log itself."""


class _Checkpoints(BaseCallback):
    """Saves a run every so many rollouts and at the end, and moves the progress bar of the process that has the log."""

    def __init__(self, path: Path, every: int, log: RunLog | None):
        super().__init__()
        self.path, self.every, self.log = path, every, log

    def _on_training_start(self) -> None:
        self.rollouts, self.saved = 0, self.model.num_timesteps

    def _on_rollout_start(self) -> None:
        self._advance()
        if self.rollouts and self.rollouts % self.every == 0:
            self._save()
        self.rollouts += 1

    def _on_step(self) -> bool:
        return True

    def _on_training_end(self) -> None:
        self._advance()
        self._save()

    def _advance(self) -> None:
        if self.log is not None:
            self.log.advance(self.model.num_timesteps)

    def _save(self) -> None:
        if self.model.num_timesteps > self.saved:
            assert isinstance(self.model, RecurrentPPO)
            model = self.model
            checkpoints.save(self.path, model.num_timesteps, model.policy, state_of(model), model.fabric)
            self.saved = self.model.num_timesteps


def state_of(model: RecurrentPPO) -> dict[str, Any]:
    """Everything an agent needs to go on between two updates besides its weights: tensors and plain values."""
    envs = model.env
    numbers = {name: float(value) for name, value in model.logger.name_to_value.items()}
    return {
        "optimizer": model.policy.optimizer.state_dict(),
        **checkpoints.random_states(torch.device(model.device)),
        "envs": envs.snapshot() if isinstance(envs, VectorEnvAdapter) else None,
        "state": model._state,
        "starts": model._last_episode_starts,
        "empty": model._empty,
        "returns": model._returns.tolist(),
        "lengths": model._lengths.tolist(),
        "episodes": [(info["r"], info["l"]) for info in model.ep_info_buffer or ()],
        "successes": [bool(value) for value in model.ep_success_buffer or ()],
        "updates": model._n_updates,
        "logged": numbers,
    }


def go_on(model: RecurrentPPO, steps: int, state: Mapping[str, Any]) -> bool:
    """Bring an agent to where ``state_of`` found it, after so many environment steps.

    Returns:
        Whether its environments stand there too; those that cannot save where they are begin new episodes.
    """
    envs = model.env
    assert isinstance(envs, VectorEnvAdapter)
    model.policy.optimizer.load_state_dict(state["optimizer"])
    model.num_timesteps, model._n_updates = steps, state["updates"]
    window = model._stats_window_size
    model.ep_info_buffer = deque(({"r": r, "l": length} for r, length in state["episodes"]), maxlen=window)
    model.ep_success_buffer = deque(state["successes"], maxlen=window)
    for name, value in state["logged"].items():
        model.logger.name_to_value[name] = value
    device = model.device
    exact = state["envs"] is not None
    if exact:
        model._last_obs = envs.restore(state["envs"])  # type: ignore[assignment]
        model._state = {name: leaf.to(device) for name, leaf in state["state"].items()}
        model._last_episode_starts = state["starts"].to(device)
        model._empty = state["empty"].to(device)
        model._returns, model._lengths = np.array(state["returns"]), np.array(state["lengths"])
    else:
        model._last_obs = envs.start()  # type: ignore[assignment]
        model.forget()
    checkpoints.set_random_states(dict(state))
    return exact


def _same_spaces(variant: str, envs: VectorEnvAdapter, policy: RecurrentPolicy) -> None:
    for what in ("observation", "action"):
        given, expected = (getattr(one, f"{what}_space") for one in (envs, policy))
        if given != expected:
            raise UserError(f"variant {variant!r} has {what}s {given}; the agent was trained with {expected}")


def _advance(bar: Progress, task: TaskID, done: int) -> None:
    bar.update(task, completed=done)


class AgentRun:
    """A trained agent and its folder.

    Args:
        path: the folder.
        config: what it was trained with.
        model: the agent.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], model: RecurrentPPO):
        self.path = path
        self.config = config
        self.model = model

    def evaluate(
        self,
        *,
        episodes: int | None = None,
        variants: Mapping[str, Mapping[str, Any]] | None = None,
        quiet: bool = True,
    ) -> dict[str, Any]:
        """Play whole episodes of the environment and its variants, and write ``evaluation.json``.

        Args:
            episodes: of each variant; None for the config's.
            variants: options of the environment that differ, by name; None for the config's.
            quiet: no progress bar.

        Returns:
            The scores with 95 % intervals over episodes, by variant; "as trained" is the first.
        """
        settings = self.config["evaluation"]
        episodes = settings["episodes"] if episodes is None else episodes
        if episodes < 1:
            raise UserError(f"episodes={episodes}; give at least 1")
        chosen = {"as trained": {}, **(settings["variants"] if variants is None else variants)}
        core = self.model.policy.memory.core
        result: dict[str, Any] = {
            "agent": True,
            "env": self.config["env"]["id"],
            "core": type(core).__name__,
            "label": self.config["label"] or type(core).__name__.lower(),
            "seed": self.config["seed"],
            "steps": self.model.num_timesteps,
            "parameters": sum(p.numel() for p in self.model.policy.parameters()),
            "core_parameters": sum(p.numel() for p in self.model.policy.memory.core_parameters()),
            "deterministic": settings["deterministic"],
            "variants": {},
        }
        for name, options in chosen.items():
            number = min(settings["num_envs"], episodes)
            envs = _configured(self.config, str(self.model.device), number, options, max_steps=settings["max_steps"])
            _same_spaces(name, envs, self.model.policy)
            with progress_bar(f"playing {name}") as bar:
                bar.disable |= quiet
                task = bar.add_task("", total=episodes, note="episodes")
                played = play(
                    self.model.policy,
                    envs,
                    episodes,
                    deterministic=settings["deterministic"],
                    seed=settings["seed"],
                    progress=partial(_advance, bar, task),
                )
            envs.close()
            result["variants"][name] = {**summary(played), "options": dict(options)}
        write_evaluation(self.path, result)
        return result

    def draw(self, *, episode: int = 0) -> list[Path]:
        """Write the learning curve and a video of an episode into ``figures/`` and return their paths."""
        if episode < 0:
            raise UserError(f"episode={episode}; episodes are numbered from 0")
        folder = figures_in(self.path)
        written = []
        metrics = read_metrics(self.path)
        if metrics:
            written.append(pictures.curves(metrics, folder / "curves.png"))
        limit = self.config["evaluation"]["max_steps"]
        try:
            envs = _configured(self.config, "cpu", 1, {"render_mode": "rgb_array"}, max_steps=limit)
        except UserError:  # it does not draw itself
            envs = _configured(self.config, "cpu", 1, max_steps=limit)
        seed = self.config["evaluation"]["seed"] + episode
        return written + pictures.episode(self.model.policy, envs, folder, seed=seed)


def train_agent_run(config: Mapping[str, Any], path: Path, *, resume: bool = False) -> AgentRun | None:
    """Train the agent a config describes, or go on with it, writing into a run folder.

    Of several processes, started by torchrun, each has its part of the environments, and the first writes the log.

    Returns:
        The run; None in all processes but the first.

    Raises:
        UserError: something the user can mend.
    """
    if not resume and (path / CONFIG).exists():
        raise UserError(f"{path} holds a run already; go on with resume={path}, or choose another folder")
    if config["env"]["id"] is None:
        raise UserError("no environment was named; give env.id=<a Gymnasium id>, or experiment=gotoobjmaze")
    _check(config)
    if resume:
        refuse_links(path / "checkpoints")
    settings = config["trainer"]
    use_threads(settings["threads"])
    device = _device(settings["device"])
    fabric, rank, processes = None, 0, int(os.environ.get("WORLD_SIZE", 1))
    number = config["env"]["num_envs"]
    if number % processes:
        raise UserError(f"env.num_envs={number} is no multiple of the {processes} processes, which share them")
    if processes > 1:
        if torch.device(device).index is not None:
            raise UserError(
                f"trainer.device={device} is one device, but there are {processes} processes; give its kind only"
            )
        fabric = make_fabric(torch.device(device).type)
        rank, device, path = fabric.global_rank, str(fabric.device), Path(fabric.broadcast(str(path)))
    envs = _configured(config, device, number // processes)
    model = build_agent(config, envs, fabric)
    with training_in(path, {**config, "model": {"agent": True}}, resume=resume) if rank == 0 else nullcontext():
        restored = checkpoints.restore(path, model.policy, rank, processes) if resume else None
        done = restored[0] if restored else 0
        log = RunLog(path, done, settings["steps"], quiet=not config["logger"]["progress"]) if rank == 0 else None
        model.set_logger(Logger(None, [] if log is None else [_Writer(log)]))
        try:
            if restored:
                with checkpoints.reading(checkpoints.folder(path, done)):
                    exact = go_on(model, done, restored[1])
                if not exact and log is not None:
                    log.say("the environments cannot save where they are: their episodes begin anew")
            if done < settings["steps"]:
                callback = _Checkpoints(path, settings["checkpoint_every"], log)
                with flushing_denormals():
                    model.learn(
                        settings["steps"] - done, callback, settings["log_every"], reset_num_timesteps=not restored
                    )
        finally:
            if log is not None:
                log.close()
            envs.close()
    return AgentRun(path, config, model) if rank == 0 else None


def _check(config: Mapping[str, Any]) -> None:
    """Refuse values out of their range.

    Raises:
        UserError: naming the first.
    """
    check_ranges("", AgentConfig, config)
    check_ranges("ppo", RecurrentPPO, config["ppo"])


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {name!r} cannot be used here: {first_line(error)}") from error
    return name


def load_agent(path: str | Path, *, device: str = "cpu", trust: Iterable[str] = ()) -> AgentRun:
    """Open an agent's run folder: its config, and the agent at its newest checkpoint, on a device.

    Args:
        path: the folder.
        device: where the agent is wanted.
        trust: modules whose classes and environments the run may name, see ``worldmodels.load``.

    Raises:
        UserError: no run of an agent there, a damaged one, or one that names code which is not trusted.
    """
    path = Path(path)
    config = read_saved(path, AgentConfig)
    newest = checkpoints.newest(path)
    if newest is None:
        raise UserError(f"{path} has no checkpoint yet; start it again with resume={path}")
    device = _device(device)
    _check(config)
    with trusting(trust):
        vet(path, config)
        envs = _configured(config, device)
        model = build_agent({**config, "trainer": {**config["trainer"], "device": device}}, envs)
    checkpoints.load_weights(newest, model.policy)
    model.num_timesteps = int(checkpoints.read_meta(newest)["step"])
    return AgentRun(path, config, model)


def register_agents(words: Iterable[str] | None = None) -> None:
    """Put the schema and the groups of ``train-agent`` where Hydra finds them."""
    ConfigStore.instance().store(name="agent_schema", node=AgentConfig)
    register_cores(transitions=False)
    register_experiments(CONFIGS / "agents", words)


def _reopened(path: Path) -> AgentRun:
    """A run that another process trained, its environments closed as after training."""
    run = load_agent(path)
    assert run.model.env is not None
    run.model.env.close()
    return run


def train_agent_command(words: Sequence[str], after: Callable[[AgentRun], Any] | None = None) -> list[AgentRun]:
    """Train agents: overrides, ``-m`` for a sweep, ``resume=<folder>`` to go on with a run."""
    return command(
        words,
        after,
        program="train-agent",
        prepare=register_agents,
        run=train_agent_run,
        job=train_one,
        read=_read,
        load=_reopened,
    )


def train_one(config: DictConfig) -> float:
    """A job of a sweep; see ``worldmodels.launch.train_one``."""
    return train_job(config, run=train_agent_run, read=_read, score=lambda run: objective(show_agent_run(run)))


def objective(result: Mapping[str, Any]) -> float:
    """What a sweep is for: the success rate where the environment tells it, else the mean return."""
    played = next(iter(result["variants"].values()))
    return float(played["success" if "success" in played else "return"]["mean"])


def show_agent_run(run: AgentRun) -> dict[str, Any]:
    """Score the run of an agent that has just ended, and draw its pictures."""
    result = run.evaluate(quiet=not run.config["logger"]["progress"])
    show(table({str(run.path): result}, f"{result['env']} after {result['steps']:,} steps"))
    show_folder(run)
    return result


def _read(path: Path) -> dict[str, Any]:
    return read_saved(path, AgentConfig)


def train(*overrides: str | Mapping[str, Any], **more: Any) -> AgentRun | None:
    """Train an agent from Python, with the arguments of ``worldmodels.train``; returns the run (of a sweep the last one).

    Under torchrun it returns None in all processes but the first.

    >>> worldmodels.agents.train("experiment=gotoobjmaze", "size=cpu", core="scoff", seed=3)  # doctest: +SKIP
    """
    runs = train_agent_command(as_words(overrides, more), summarise)
    return runs[-1] if runs else None
