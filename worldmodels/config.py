"""The configuration of ``train``: its schema, and the groups made from constructors.

Defaults live in the constructors; the groups ``core``, ``encoder``, ``task``, ``objective`` and ``trainer`` are read off
their signatures, so every option can be set by name and an unknown one is an error. YAML files list differences only.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

import torch
from hydra.core.config_store import ConfigStore
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from hydra.utils import get_class
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from .core import RecurrentCore, Tokens, unroll
from .cores import CORES
from .encoders import ENCODERS
from .errors import UserError, nearest
from .losses import contrastive
from .tasks import TASKS
from .training import TrainerSettings


@dataclass
class EnvConfig:
    """Which environment; ``resize`` is (height, width) of pictures, or None."""

    id: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    resize: list[int] | None = None


@dataclass
class SplitConfig:
    """A data set: a folder, or how to collect it (again and again found by its settings)."""

    path: str | None = None
    episodes: int = 1000
    steps: int | None = 100
    seed: int = 1


@dataclass
class DataConfig:
    """Training and test episodes; ``dir`` is where collected ones are kept, ``processes`` how (see ``collect``)."""

    dir: str = "data"
    train: SplitConfig = field(default_factory=SplitConfig)
    test: SplitConfig = field(default_factory=lambda: SplitConfig(episodes=1000, steps=10, seed=3))
    drop_invalid: bool = False
    num_envs: int | None = None
    processes: bool = False


@dataclass
class EvaluationConfig:
    """What is scored after training; ``limit`` uses the first so many test episodes."""

    horizons: list[int] = field(default_factory=lambda: [1, 5, 10])
    burn_in: int | None = None
    limit: int | None = None


@dataclass
class LoggerConfig:
    """What a run writes besides metrics.jsonl and TensorBoard events."""

    progress: bool = True
    figures: bool = True


@dataclass
class TrainConfig:
    """Everything ``train`` can be told; with a ``task`` it trains on that, otherwise a world model.

    ``jobs`` runs of a sweep are trained at once, each in a process of its own; None: as many as there are cores for.
    """

    experiment: str = "any"
    size: str = "cpu"
    seed: int = 0
    run: str = MISSING
    resume: str = MISSING
    jobs: int | None = None
    env: EnvConfig = field(default_factory=EnvConfig)
    data: DataConfig = field(default_factory=DataConfig)
    encoder: dict[str, Any] = field(default_factory=dict)
    core: dict[str, Any] = field(default_factory=dict)
    task: dict[str, Any] = field(default_factory=dict)
    objective: dict[str, Any] = field(default_factory=dict)
    memory: str = "none"
    action_to: str | None = None
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)


def options_of(target: Any) -> dict[str, Any]:
    """The keyword-only arguments of a callable and their defaults."""
    parameters = inspect.signature(target).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def offered(group: str, table: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Our table of a group and what installed packages add under the entry point ``worldmodels.<group>``."""
    names = {name: dict(entry) for name, entry in table.items()}
    for entry in entry_points(group=f"worldmodels.{group}"):
        names.setdefault(entry.name, {"_target_": entry.value.replace(":", ".")})
    return names


def register(*, transitions: bool = True) -> None:
    """Put schema and groups where Hydra finds them.

    Args:
        transitions: cores begin with the sizes of a world model's transition.
    """
    store = ConfigStore.instance()
    store.store(name="train_schema", node=TrainConfig)
    for name, entry in offered("cores", CORES).items():
        node = {"num_slots": None, "slot_size": None, **constructor_options(entry["_target_"]), **entry}
        node |= {} if transitions else {"slot_size": None}
        store.store(group="core", name=name, node=node)
    for name, entry in offered("encoders", ENCODERS).items():
        node = {"num_slots": 5, "slot_size": 4, **constructor_options(entry["_target_"]), **entry}
        store.store(group="encoder", name=name, node=node)
    store.store(group="task", name="none", node={})
    for name, entry in TASKS.items():
        store.store(group="task", name=name, node={**constructor_options(entry["_target_"]), **entry})
    for group, sizes in (
        ("core", {"num_slots": None, "slot_size": None}),
        ("encoder", {"num_slots": 5, "slot_size": 4}),
    ):
        store.store(group=group, name="custom", node={"_target_": MISSING, **sizes})
    draws = ("episode", "step", "generator")
    objective = {name: value for name, value in options_of(contrastive).items() if name not in draws}
    store.store(group="objective", name="contrastive", node=objective)


def named(group: str, table: Mapping[str, Mapping[str, Any]], name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What to build of a group: an entry by its name, or a class by its path, with all its options."""
    entry = offered(group, table).get(name, {"_target_": name})
    return {**constructor_options(entry["_target_"]), **entry, **options}


def constructor_options(path: str) -> dict[str, Any]:
    """The options of the class a path names; none if it cannot be imported."""
    try:
        return options_of(get_class(path))
    except (ImportError, ValueError, TypeError, AttributeError):
        return {}  # a broken plug-in must not stop those who do not use it; using it gives the import error


def plain(config: Any) -> dict[str, Any]:
    """A composed config as plain values, without the keys that only say where it runs."""
    values: dict[str, Any] = OmegaConf.to_container(config, resolve=True, enum_to_str=True)  # type: ignore[assignment]
    return {key: value for key, value in values.items() if key not in ("run", "resume", "jobs", "hydra")}


def build(what: str, config: Mapping[str, Any], *sizes: Any, **more: Any) -> Any:
    """Call the constructor a config's ``_target_`` names.

    Raises:
        UserError: no such thing, an option it does not take, or a value it refuses.
    """
    options = {key: value for key, value in config.items() if key != "_target_"} | more
    path = config.get("_target_")
    if not path or path == MISSING:
        raise UserError(f"{what}._target_ is not set; give the path of a class, like {what}._target_=my.module.Name")
    try:
        target = get_class(path)
    except (ImportError, ValueError, AttributeError) as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise UserError(f"{what}._target_={path} cannot be imported: {reason}") from error
    known = options_of(target)
    for key in options:
        if key not in known:
            raise UserError(f"{target.__name__} does not take {what}.{key}; {nearest(key, known)}")
    try:
        return target(*sizes, **options)
    except (ValueError, TypeError, RuntimeError, ZeroDivisionError) as error:
        raise UserError(f"{what} {target.__name__}: {str(error).splitlines()[0]}") from error


def build_core(
    config: Mapping[str, Any],
    token_size: int,
    num_slots: int,
    slot_size: int,
    num_tokens: int,
    position_size: int | None = None,
) -> RecurrentCore:
    """A core for so many tokens, tried on two steps of zeros, so that what cannot work is refused before training.

    Args:
        config: the core's name and options.
        token_size: F.
        num_slots: K.
        slot_size: D.
        num_tokens: N.
        position_size: P, if tokens have positions, for cores that know where.

    Raises:
        UserError: naming what the core said.
    """
    if config.get("num_tokens", None) not in (None, num_tokens):
        raise UserError(f"core.num_tokens={config['num_tokens']}, but a step has {num_tokens} tokens; leave it out")
    more = {"num_tokens": num_tokens} if "num_tokens" in config else {}
    positions = None
    if position_size is not None and "position_size" in config:
        if config["position_size"] not in (None, position_size):
            raise UserError(
                f"core.position_size={config['position_size']}, but positions have {position_size}; leave it out"
            )
        more["position_size"] = position_size
        positions = torch.zeros(2, 1, num_tokens, position_size)
    core: RecurrentCore = build("core", config, token_size, num_slots, slot_size, **more)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            unroll(core, Tokens(torch.zeros(2, 1, num_tokens, token_size), positions), core.initial_state(1))
    except (RuntimeError, ValueError, IndexError, ZeroDivisionError) as error:
        line = (str(error) or repr(error)).splitlines()[0]
        raise UserError(f"core {type(core).__name__} cannot take a step of {num_tokens} tokens: {line}") from error
    return core


def user_error(error: BaseException) -> UserError | None:
    """Hydra's and OmegaConf's errors about what the user wrote, as one line; None if it is something else."""
    if not isinstance(error, (HydraException, OmegaConfBaseException)):
        return None
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MissingConfigException) and cause.options is not None:
            asked = str(cause.missing_cfg_file)
            return UserError(f"unknown choice {asked!r}; {nearest(asked.split('/')[-1], cause.options)}")
        if isinstance(cause, (ConfigKeyError, ConfigAttributeError)):
            parent = cause.parent_node
            known = [str(key) for key in parent] if parent is not None and OmegaConf.is_dict(parent) else []
            hint = nearest(str(cause.key), known)
            if str(cause.full_key).startswith("env.kwargs."):
                hint = f"an environment's own option is added with a plus: +{cause.full_key}=..."
            return UserError(f"unknown key {cause.full_key or cause.key!r}; {hint}")
        cause = cause.__cause__ or cause.__context__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    full_key = getattr(error, "full_key", None)
    key = f"{full_key}: " if full_key else ""
    hint = " (check the spelling of the override)" if isinstance(error, ConfigCompositionException) else ""
    return UserError(f"{key}{lines[0] if lines else type(error).__name__}{hint}")
