"""Agents: recurrent PPO on Stable-Baselines3 whose memory is any of the cores."""

from .policy import RecurrentPolicy
from .recurrent_ppo import RecurrentPPO
from .vector import VectorEnvAdapter

__all__ = ["RecurrentPPO", "RecurrentPolicy", "VectorEnvAdapter"]
