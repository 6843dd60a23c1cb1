"""Configurations of ``worldmodels train``, found by Hydra as ``pkg://worldmodels.configs``."""
