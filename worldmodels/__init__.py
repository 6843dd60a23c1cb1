"""Structured world models and agents.

>>> import worldmodels
>>> run = worldmodels.train("experiment=block_physics", "core=snps", "size=cpu")  # doctest: +SKIP
>>> run.evaluate()["in_episode"]["10"]["h@1"]  # doctest: +SKIP
"""

from typing import Any

__all__ = ["Episodes", "UserError", "WorldModel", "collect", "load", "train"]

_HOMES = {
    "Episodes": "data.episodes",
    "UserError": "errors",
    "WorldModel": "models.world_model",
    "collect": "data.collect",
    "load": "run",
    "train": "launch",
}


def __getattr__(name: str) -> Any:
    """Import the public names when they are asked for, so that ``import worldmodels.envs`` stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
