"""The configuration of ``train``: its schema, and the groups made from constructors.

Defaults live in the constructors; the groups ``core``, ``encoder``, ``task``, ``objective`` and ``trainer`` are read off
their signatures, so every option can be set by name and an unknown one is an error. YAML files list differences only.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Annotated, Any

from hydra.core.config_store import ConfigStore
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from .cores import CORES, READERS
from .encoders import ENCODERS
from .errors import UserError, nearest
from .losses import contrastive
from .plugins import constructor_options, offered, options_of
from .ranges import AT_LEAST_ONE, NOT_NEGATIVE, SEED, Range
from .tasks import TASKS
from .training import TrainerSettings

CONFIGS = files("worldmodels.configs")
SIZES = ("smoke", "cpu", "paper")


@dataclass
class EnvConfig:
    """Which environment; ``resize`` is (height, width) of pictures, or None."""

    id: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    resize: Annotated[list[int] | None, AT_LEAST_ONE] = None


@dataclass
class SplitConfig:
    """A data set: a folder, or how to collect it (again and again found by its settings)."""

    path: str | None = None
    episodes: Annotated[int, AT_LEAST_ONE] = 1000
    steps: Annotated[int | None, AT_LEAST_ONE] = 100
    seed: Annotated[int, SEED] = 1


@dataclass
class DataConfig:
    """Training and test episodes; ``dir`` is where collected ones are kept, ``processes`` how (see ``collect``).

    ``fresh`` collects them anew, in the place of those that are found there.
    """

    dir: str = "data"
    fresh: bool = False
    train: SplitConfig = field(default_factory=SplitConfig)
    test: SplitConfig = field(default_factory=lambda: SplitConfig(episodes=1000, steps=10, seed=3))
    drop_invalid: bool = False
    num_envs: Annotated[int | None, AT_LEAST_ONE] = None
    processes: bool = False


@dataclass
class EvaluationConfig:
    """What is scored after training; ``limit`` uses the first so many test episodes."""

    horizons: Annotated[list[int], AT_LEAST_ONE] = field(default_factory=lambda: [1, 5, 10])
    burn_in: Annotated[int | None, NOT_NEGATIVE] = None
    limit: Annotated[int | None, Range(2)] = None


@dataclass
class LoggerConfig:
    """What a run writes besides metrics.jsonl and TensorBoard events."""

    progress: bool = True
    figures: bool = True


@dataclass
class TrainConfig:
    """Everything ``train`` can be told; with a ``task`` it trains on that, otherwise a world model.

    ``jobs`` runs of a sweep are trained at once, each in a process of its own; None: as many as there are cores for.
    ``trust`` names modules, separated by commas, that a run folder from elsewhere may name; see ``trust.py``.
    """

    experiment: str = "any"
    size: str = "cpu"
    seed: Annotated[int, SEED] = 0
    run: str = MISSING
    resume: str = MISSING
    trust: str = ""
    jobs: Annotated[int | None, AT_LEAST_ONE] = None
    env: EnvConfig = field(default_factory=EnvConfig)
    data: DataConfig = field(default_factory=DataConfig)
    encoder: dict[str, Any] = field(default_factory=dict)
    core: dict[str, Any] = field(default_factory=dict)
    task: dict[str, Any] = field(default_factory=dict)
    objective: dict[str, Any] = field(default_factory=dict)
    memory: str = "none"
    action_to: str | None = None
    slot_ids: bool = False
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)


def register(words: Iterable[str] | None = None) -> None:
    """Put what ``train`` composes where Hydra finds it.

    Args:
        words: see ``register_experiments``.
    """
    store = ConfigStore.instance()
    store.store(name="train_schema", node=TrainConfig)
    register_cores(transitions=True)
    slots = {"num_slots": 5, "slot_size": 4}
    encoders = {"custom": {"_target_": MISSING, **slots}}
    for name, entry in offered("encoders", ENCODERS).items():
        encoders[name] = {**slots, **constructor_options(entry["_target_"]), **entry}
    for name, node in encoders.items():
        store.store(group="encoder", name=name, node=node)
    for name, entry in offered("tasks", TASKS).items():
        store.store(group="task", name=name, node={**constructor_options(entry["_target_"]), **entry})
    store.store(group="task", name="none", node=TASKS["transitions"])  # its older name
    draws = ("episode", "step", "generator", "acted")
    objective = {name: value for name, value in options_of(contrastive).items() if name not in draws}
    store.store(group="objective", name="contrastive", node=objective)
    for name, node in _read(CONFIGS / "env.yaml").items():
        store.store(group="env", name=name, node=node)
    register_experiments(CONFIGS, words, encoders)


def register_cores(*, transitions: bool) -> None:
    """Put the cores and their options where Hydra finds them.

    Args:
        transitions: cores begin with the sizes of a world model's transition.
    """
    store = ConfigStore.instance()
    sizes = {"num_slots": None, "slot_size": None}
    for name, entry in offered("cores", CORES).items():
        node = {**sizes, **constructor_options(entry["_target_"]), **entry}
        store.store(group="core", name=name, node=node if transitions else node | {"slot_size": None})
    for name, entry in READERS.items():
        store.store(group="core", name=name, node={**constructor_options(entry["_target_"]), **entry})
    store.store(group="core", name="custom", node={"_target_": MISSING, **sizes})


def register_experiments(
    folder: Traversable,
    words: Iterable[str] | None = None,
    encoders: Mapping[str, Collection[str]] | None = None,
) -> None:
    """Put ``train.yaml`` and the experiments of a folder where Hydra finds them, those of another folder away.

    Of an experiment's file its ``sizes`` become the group sizes/<experiment>, and its ``cores`` the group
    options/<experiment>, named <core> where they are for any size, else <core>-<size>. What it says of an encoder is said
    to those encoders that have such an option: the group encoding/<experiment>, named <encoder>-<size>, and
    <encoder>-<size>-<core> for what a core needs.

    Args:
        folder: with ``train.yaml`` and a folder of experiments.
        words: of the command; of experiments that they do not name only the names are registered, which saves a second. None
            for all.
        encoders: names, and what can be set of each; None where "encoder" is not the one of a world model.
    """
    store = ConfigStore.instance()
    for group in ("experiment", "sizes", "options", "encoding"):
        store.repo.pop(group, None)
    store.store(name="train", node=_read(folder / "train.yaml"))
    for size in SIZES:
        store.store(group="size", name=size, node={"size": size}, package="_global_")
    said = None if words is None else " ".join(("any", *words))
    for name in experiments(folder):
        whole = {} if said is not None and name not in said else experiment(folder, name)
        sizes, cores = whole.pop("sizes", {}), whole.pop("cores", {})
        if encoders is not None:
            _register_encoding(name, encoders, whole, sizes, cores)
        store.store(group="experiment", name=name, node=whole | {"experiment": name}, package="_global_")
        for size, node in sizes.items():
            store.store(group=f"sizes/{name}", name=size, node=node, package="_global_")
        for core, by_size in cores.items():
            for size, node in by_size.items():
                option = core if size == "any" else f"{core}-{size}"
                store.store(group=f"options/{name}", name=option, node=node, package="_global_")


def _register_encoding(
    name: str,
    encoders: Mapping[str, Collection[str]],
    whole: dict[str, Any],
    sizes: Mapping[str, dict[str, Any]],
    cores: Mapping[str, Mapping[str, dict[str, Any]]],
) -> None:
    """Take what an experiment says of its encoder out of it, and register that for each encoder that has such an option."""
    store = ConfigStore.instance()
    always = whole.pop("encoder", {})
    by_size = {size: {**always, **sizes.get(size, {}).pop("encoder", {})} for size in SIZES}
    by_core = {
        core: {size: node.pop("encoder") for size, node in options.items() if "encoder" in node}
        for core, options in cores.items()
    }
    for encoder, known in encoders.items():
        for size in SIZES:
            said = {"": by_size[size]}
            for core, needed in by_core.items():
                said[f"-{core}"] = {**needed.get("any", {}), **needed.get(size, {})}
            for of_core, values in said.items():
                node = {"encoder": {key: value for key, value in values.items() if key in known}}
                store.store(group=f"encoding/{name}", name=f"{encoder}-{size}{of_core}", node=node, package="_global_")


def experiments(folder: Traversable) -> list[str]:
    """The names of the experiments of a folder."""
    return sorted(file.name.removesuffix(".yaml") for file in (folder / "experiment").iterdir())


def experiment(folder: Traversable, name: str) -> dict[str, Any]:
    """An experiment's file; one that is ``like`` another holds what that holds and it does not say itself."""
    own = _read(folder / "experiment" / f"{name}.yaml")
    like = own.pop("like", None)
    return own if like is None else _over(experiment(folder, like), own)


def _over(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Nested mappings, what ``own`` says in place of what ``base`` does."""
    both = {
        key: _over(base[key], own[key])
        for key in base
        if isinstance(base[key], dict) and isinstance(own.get(key), dict)
    }
    return base | own | both


def _read(file: Traversable) -> dict[str, Any]:
    values: dict[str, Any] = OmegaConf.to_container(OmegaConf.create(file.read_text(encoding="utf-8")))  # type: ignore[assignment]
    return values


def plain(config: Any) -> dict[str, Any]:
    """A composed config as plain values, without the keys that only say where it runs."""
    values: dict[str, Any] = OmegaConf.to_container(config, resolve=True, enum_to_str=True)  # type: ignore[assignment]
    return {key: value for key, value in values.items() if key not in ("run", "resume", "trust", "jobs", "hydra")}


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
