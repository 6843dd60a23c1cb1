"""Configurations of ``worldmodels train-agent``, found by Hydra as ``pkg://worldmodels.configs.agents``."""
