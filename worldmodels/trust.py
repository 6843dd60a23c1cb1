"""What a run folder may name: our tables and what installed packages offer; other code only if the user trusts it.

A run's ``config.yaml`` names classes and environments, and naming is enough to have code imported and called. A folder may
come from anyone, so what it names is looked at before anything is built. Folders that this user trained on this machine
open without a word: when one is claimed, a fingerprint of its place and of what it names is kept in the user's state folder
(``$XDG_STATE_HOME/worldmodels``), which no folder from elsewhere can bring along.
"""

import contextlib
import hashlib
import importlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from .cores import CORES
from .encoders import ENCODERS
from .errors import UserError
from .plugins import offered
from .tasks import TASKS

_TABLES = {"cores": CORES, "encoders": ENCODERS, "tasks": TASKS}
_NAME = re.compile(r"[A-Za-z_][\w.]*[.:][\w./-]+", re.ASCII)  # module.Name, or module:Name with one colon
_NAMING = ("id", "env_id")  # keys whose values are imported where they have a colon
_said: ContextVar[tuple[str, ...]] = ContextVar("trusted modules", default=())


def listed(words: str) -> list[str]:
    """The modules in ``trust=a,b``."""
    return [word.strip() for word in words.split(",") if word.strip()]


@contextlib.contextmanager
def trusting(modules: Iterable[str]) -> Iterator[None]:
    """Within it, folders may name what these modules hold, by ``module.Name`` or ``module:Name``."""
    token = _said.set((*_said.get(), *modules))
    try:
        yield
    finally:
        _said.reset(token)


def vet(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse a run folder that names code which is neither ours, nor an installed plug-in's, nor trusted.

    Args:
        folder: the run's.
        config: what its ``config.yaml`` says, in plain values.

    Raises:
        UserError: naming the first such class or module, and the word that trusts it.
    """
    foreign = named_elsewhere(config)
    if not foreign:
        return
    own = _fingerprint(folder, foreign) in _fingerprints()
    for key, name in foreign:
        if not _NAME.fullmatch(name):
            raise UserError(f"{folder} names {key}={name!a}, which is no module.Name or module:Name")
        if not own and _module(name) not in _said.get():
            raise UserError(
                f"{folder} names {key}={name}, which is neither ours nor an installed plug-in's, and opening the run would "
                f"execute it; if you trust it, add trust={_module(name)}"
            )
    import_from_here()
    if not own:
        for key, name in foreign:
            _refuse_passing_on(key, name)


def remember(folder: Path, config: Mapping[str, Any]) -> None:
    """Keep in mind that this user claimed a folder with a config that names code from elsewhere."""
    foreign = named_elsewhere(config)
    if not foreign:
        return
    with contextlib.suppress(OSError):  # then trust= has to be said when the run is opened
        file = _state()
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="ascii") as lines:
            lines.write(_fingerprint(folder, foreign) + "\n")


def import_from_here() -> None:
    """Let modules in the current folder be named, after everything installed."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def named_elsewhere(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a config names to be imported beyond our tables and installed entry points: dotted keys and names."""
    ours = {entry["_target_"] for group, table in _TABLES.items() for entry in offered(group, table).values()}
    modules = {entry.value.partition(":")[0] for entry in entry_points(group="worldmodels.envs")} | {"worldmodels"}
    encoders = offered("encoders", ENCODERS)
    found = []
    for key, value in _strings(config):
        if key.endswith("_target_"):
            if value not in ours:
                found.append((key, value))
        elif _imports(key.rpartition(".")[2], value):
            if value.count(":") != 1 or value.partition(":")[0] not in modules:
                found.append((key, value))
        elif key == "encoder.options.encoder" and value not in encoders and value not in ours:  # of an agent
            found.append((key, value))
    return found


def _imports(key: str, value: str) -> bool:
    """Whether a string is ``module:Name``, as the id of an environment or a policy can be."""
    if key in _NAMING:
        return ":" in value
    return key == "policy" or (key != "device" and ":" in value and _NAME.fullmatch(value) is not None)


def _strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """All strings in nested mappings and lists, with the dotted keys they stand under."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inside in value.items():
            yield from _strings(inside, f"{key}.{name}" if key else str(name))
    elif isinstance(value, Sequence):
        for inside in value:
            yield from _strings(inside, key)


def _module(name: str) -> str:
    """The module of ``module:Name`` or ``module.Name``."""
    return name.partition(":")[0] if ":" in name else name.rpartition(".")[0]


def _refuse_passing_on(key: str, name: str) -> None:
    """Refuse what a trusted module has only imported: trusting it is no trust in what it uses.

    Raises:
        UserError: naming it.
    """
    if key.rpartition(".")[2] in _NAMING:  # an id is looked up in Gymnasium's registry, not in the module
        return
    module = _module(name)
    try:
        found = getattr(importlib.import_module(module), name[len(module) + 1 :])
    except Exception as error:  # a user's module may raise anything
        raise UserError(f"{key}={name} cannot be imported: {error!r}") from error
    if getattr(found, "__module__", None) != module:
        raise UserError(
            f"{key}={name} is not defined in {module}; what that module only imports is not trusted with it"
        )


def _state() -> Path:
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "worldmodels" / "claimed"


def _fingerprints() -> set[str]:
    try:
        return set(_state().read_text(encoding="ascii").split())
    except (OSError, UnicodeDecodeError):
        return set()


def _fingerprint(folder: Path, foreign: Sequence[tuple[str, str]]) -> str:
    return hashlib.sha256(json.dumps([str(folder.resolve()), sorted(foreign)]).encode()).hexdigest()
