"""What an environment is: recorded data are found again only while its code, package and options stay as they were."""

import ast
import functools
import hashlib
import importlib.metadata
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gymnasium.envs.registration import EnvSpec

_EVERYWHERE = {*sys.stdlib_module_names, "torch", "numpy", "gymnasium"}
"""What every environment is made of: a new version of these does not record all data anew."""


def origin(spec: EnvSpec, *others: Any) -> dict[str, Any]:
    """What an environment, and the policy that acts in it, are made of.

    Of code that is installed the version of its package counts; of other code the text of the module and of all modules it
    imports, and so on. Not found: what is imported by a name that is computed, files that are not Python, and the code of
    a notebook.

    Args:
        spec: the environment's.
        others: functions or classes beside it.

    Returns:
        The spec's own options, "packages" with their versions, "sources" with the hash of each module's text; JSON.
    """
    targets = [spec.entry_point, spec.vector_entry_point, *others]
    packages, sources = _made_of(target for target in (_module(target) for target in targets) if target)
    return {
        "entry_points": [_name(target) for target in targets if target is not None],
        "kwargs": json.dumps(spec.kwargs, sort_keys=True, default=_name),
        "max_episode_steps": spec.max_episode_steps,
        "wrappers": [str(wrapper.entry_point) for wrapper in spec.additional_wrappers or ()],
        "packages": packages,
        "sources": sources,
    }


def _module(target: Any) -> str:
    return target.partition(":")[0] if isinstance(target, str) else getattr(target, "__module__", "")


def _name(target: Any) -> str:
    if isinstance(target, str):
        return target
    return f"{_module(target)}:{getattr(target, '__qualname__', type(target).__qualname__)}"


def _made_of(modules: Iterator[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Versions of installed packages, and hashes of the text of other modules, that these modules are made of."""
    packages: dict[str, str] = {}
    sources: dict[str, str] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        top = name.partition(".")[0]
        file = None if name in sources or top in packages else _file(name)
        if file is None:
            continue
        if _installed(file):
            packages[top] = _version(top)
            continue
        text = file.read_bytes()
        sources[name] = hashlib.sha256(text).hexdigest()
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        imported = _imports(text, package) if file.suffix == ".py" else []
        waiting += [other for other in imported if other.partition(".")[0] not in _EVERYWHERE]
    return packages, sources


def _imports(text: bytes, package: str) -> list[str]:
    """The modules that a module's text names in import statements, wherever these stand in it."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # of another version of Python
        return []
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            if base.partition(".")[0] in _EVERYWHERE:
                continue
            inside = [f"{base}.{alias.name}" for alias in node.names]
            modules = [name for name in inside if _file(name) is not None]
            names += modules if len(modules) == len(inside) else [*modules, base]
    return names


@functools.cache
def _file(name: str) -> Path | None:
    """Where a module lies; None for one that is not there or has no file. Nothing is imported."""
    loaded = getattr(sys.modules.get(name), "__file__", None)
    if loaded is not None:
        return Path(loaded)
    path = None
    for end in range(1, name.count(".") + 2):
        part = ".".join(name.split(".")[:end])
        found = (finder.find_spec(part, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next((one for one in found if one is not None), None)
        if spec is None or (path := spec.submodule_search_locations) is None:
            break
    return Path(spec.origin) if spec is not None and spec.name == name and spec.has_location and spec.origin else None


def _installed(file: Path) -> bool:
    places = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib", "stdlib")}
    return not places.isdisjoint(file.resolve().parents) or "site-packages" in file.parts


@functools.cache
def _version(top: str) -> str:
    names = importlib.metadata.packages_distributions().get(top, [])
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in sorted(set(names)))
