"""Videos: episodes kept as states, whose frames are drawn on the device when they are needed."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..encoders import halvings, pixels
from ..errors import UserError
from .environments import make_envs
from .episodes import Episodes, draw_starts


class Videos:
    """The episodes of an environment that draws frames of its states, by a method ``frames(states)``.

    Args:
        episodes: what was recorded, states as observations.
        env: the environment, on the same device.
    """

    def __init__(self, episodes: Episodes, env: Any):
        self.episodes, self.env = episodes, env

    def drawn(self, states: Tensor) -> Tensor:
        """Frames of states ``(..., *state)`` as floats in [0, 1], ``(..., C, H, W)``."""
        return pixels(self.env.frames(states))

    def windows(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """Frames of ``count`` random stretches of ``length`` steps, ``(length, count, C, H, W)``."""
        episode, step = draw_starts(self.episodes, count, length - 1, generator=generator)
        time = torch.arange(length, device=self.episodes.device)[:, None]
        return self.drawn(self.episodes.arrays["observations"][self.episodes.starts[episode] + step + time])

    def whole(self, length: int, at_once: int, limit: int | None = None) -> Iterator[Tensor]:
        """States of the first ``length`` steps of every episode, ``(length, b, *state)``, ``at_once`` episodes at a time."""
        starts = self.episodes.starts[:limit]
        time = torch.arange(length, device=self.episodes.device)[:, None]
        for part in starts.split(at_once):
            yield self.episodes.arrays["observations"][part + time]


Shape = tuple[int, int, int]


def frame_shape(env_id: str, env_kwargs: Mapping[str, Any], check: Callable[[Shape], object] = halvings) -> Shape:
    """``(C, H, W)`` of the frames that an environment draws of its states.

    Args:
        env_id: of the environment.
        env_kwargs: its keyword arguments.
        check: refuses sizes that what sees the frames does not take; a ``FrameEncoder``'s.

    Raises:
        UserError: it draws none, or of a size that is refused, or it records something else than its states.
    """
    env: Any = make_envs(env_id, 1, env_kwargs=env_kwargs)
    states, _ = env.reset(seed=0)
    draws = hasattr(env, "frames") and isinstance(states, Tensor) and states.dtype.is_floating_point
    if not draws:
        raise UserError(
            f"{env_id} records {env.single_observation_space}; videos are drawn from states by an environment with a method "
            "frames(states), such as worldmodels/BouncingBalls-v0 with env.kwargs.observation=state"
        )
    height, width, channels = env.frames(states).shape[1:]
    env.close()
    check((channels, height, width))
    return channels, height, width
