"""Agents: recurrent PPO on Stable-Baselines3 whose memory is any of the cores."""

from typing import Any

__all__ = [
    "AgentRun",
    "BabyAIFeatures",
    "RecurrentPPO",
    "RecurrentPolicy",
    "SlotFeatures",
    "VectorEnvAdapter",
    "ViewFeatures",
    "load",
    "train",
]

_HOMES = {
    "AgentRun": ("run", "AgentRun"),
    "BabyAIFeatures": ("features", "BabyAIFeatures"),
    "RecurrentPPO": ("recurrent_ppo", "RecurrentPPO"),
    "RecurrentPolicy": ("policy", "RecurrentPolicy"),
    "SlotFeatures": ("features", "SlotFeatures"),
    "VectorEnvAdapter": ("vector", "VectorEnvAdapter"),
    "ViewFeatures": ("features", "ViewFeatures"),
    "load": ("run", "load_agent"),
    "train": ("run", "train"),
}


def __getattr__(name: str) -> Any:
    """Import the public names when they are asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
