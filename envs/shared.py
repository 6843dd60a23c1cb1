"""One policy for all agents: every agent of a team as one copy of an environment with a single agent.

Sources: Gupta et al. 2017, "Cooperative Multi-Agent Control Using Deep Reinforcement Learning" (agents share parameters);
Samvelyan et al. 2019, "The StarCraft Multi-Agent Challenge" (one reward for all, what the dead see and do).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

_PARTS = ("views", "positions", "mask")
_SUCCESS = ("success", "is_success", "won")


class AgentCopies(VectorEnv[Any, Any, Any]):
    """B teams of n agents as B n copies of an environment with one agent; copy ``b n + i`` is agent i of team b.

    The environment has observations Dict of "views" ``(n, ...)``, "positions" ``(n, P)`` and "mask" ``(n,)``, actions
    ``MultiDiscrete([k] * n)``, and one reward for all. It may be one of ours, whose tensors stay on their device, or any
    other vector environment, such as a ``SyncVectorEnv``, with numpy arrays. A copy has:

    - observation Dict of "view", the agent's own, and "self": its position divided by ``size``, 1 if it is there (0 if it
      is dead or absent), and, if asked for, a one-hot vector of its number in the team. Who is not there sees zeros
      only;
    - action ``Discrete(k)``;
    - the team's reward, ``terminated`` and ``truncated``, the same for all its agents, those included who are dead, as
      SMAC has it.

    Episodes begin and end for a team as a whole. The autoreset mode is the environment's; a "reset_mask" names all agents of
    a team or none. Of the infos "success" is handed on, also under the names "is_success" and "won". ``render`` gives one
    picture a team.

    Args:
        env: the vector environment of B teams.
        size: what positions are divided by, one number or one an axis; None for the upper bounds of their space.
        index: append the one-hot number. Then teams of other sizes have other observations.
        no_op: the action that is taken for who is not there, whatever the policy says; None: the policy's. Trains that
            are not on the map yet have to be told to enter it, the dead have nothing to say.

    Raises:
        ValueError: other spaces, or options that do not fit them.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        *,
        size: float | Sequence[float] | None = None,
        index: bool = False,
        no_op: int | None = None,
    ):
        views, positions, mask = _parts_of(env.single_observation_space)
        n, k = _actions_of(env.single_action_space)
        shapes = [views.shape, positions.shape, mask.shape]
        if {shape[0] for shape in shapes if shape} != {n} or len(positions.shape) != 2 or mask.shape != (n,):
            raise ValueError(f"{n} agents act, but views, positions and mask have the shapes {shapes}")
        if no_op is not None and not 0 <= no_op < k:
            raise ValueError(f"no_op is {no_op}; the actions are 0 to {k - 1}")
        self.env = env
        self.team_size = n
        self.num_envs = env.num_envs * n
        self.metadata, self.render_mode = env.metadata, env.render_mode
        found = getattr(env.unwrapped, "device", None)
        self.device: torch.device | None = found if isinstance(found, torch.device) else None
        self.index, self.no_op = index, no_op
        self._there = torch.ones(env.num_envs, n, dtype=torch.bool, device=self.device)
        low, high = positions.low.min(0), positions.high.max(0)
        scale = np.broadcast_to(np.asarray(high if size is None else size, dtype=np.float32), high.shape)
        if not (np.isfinite(scale) & (scale > 0)).all():
            raise ValueError(f"size is {scale.tolist()}, by which positions cannot be divided; give what they reach to")
        self._size = torch.tensor(scale, device=self.device)
        more = 1 + n * index
        low, high = (np.concatenate([end / scale, np.full(more, i)]) for i, end in enumerate((low, high)))
        own = spaces.Box(np.minimum(low, 0).astype(np.float32), np.maximum(high, 0).astype(np.float32))
        view = spaces.Box(views.low.min(0), views.high.max(0), dtype=views.dtype)
        self.single_observation_space = spaces.Dict({"view": view, "self": own})
        self.single_action_space = spaces.Discrete(k)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(
        self, *, seed: int | list[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode of every team.

        Args:
            seed: of the environment; a list has one a team.
            options: of the environment. Or "reset_mask" ``(B n,)`` bool: only these copies start their next episode.
        """
        if options is not None and "reset_mask" in options:
            options = {**options, "reset_mask": self._whole_teams(options["reset_mask"])}
        observations, info = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        return self._seen(observations), self._told(info)

    def _whole_teams(self, mask: Any) -> np.ndarray:
        chosen = np.asarray(mask.cpu() if isinstance(mask, Tensor) else mask)
        if chosen.shape != (self.num_envs,):
            raise ValueError(f"reset_mask has shape {chosen.shape}; expected {(self.num_envs,)}")
        teams = chosen.reshape(-1, self.team_size)
        if (teams != teams[:, :1]).any():
            raise ValueError("reset_mask names some agents of a team only; a team starts its episode as a whole")
        return teams[:, 0].copy()

    def step(self, actions: Any) -> tuple[dict[str, Any], Any, Any, Any, dict[str, Any]]:
        """Step every team with the actions of its agents, ``(B n,)``."""
        chosen = torch.as_tensor(actions, device=self.device).reshape(-1, self.team_size)
        if self.no_op is not None:
            chosen = torch.where(self._there, chosen, self.no_op)
        given = chosen.numpy() if self.device is None else chosen
        observations, rewards, terminated, truncated, info = self.env.step(given)
        told = self._told(info)
        return self._seen(observations), *(self._to_each(part) for part in (rewards, terminated, truncated)), told

    def _seen(self, observations: dict[str, Any]) -> dict[str, Any]:
        """What the agents see, ``(B n, ...)``, of the teams' observations; and who is there is kept for the next step."""
        seen, self._there = self._split(observations)
        return seen

    def _split(self, observations: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
        views, positions, mask = (torch.as_tensor(observations[name], device=self.device) for name in _PARTS)
        there = mask.bool()
        own = [positions / self._size, there[..., None]]
        if self.index:
            own.append(torch.eye(self.team_size, device=self.device).expand(len(there), -1, -1))
        parts = {"view": views, "self": torch.cat([part.float() for part in own], dim=-1)}
        seen = {
            name: part.masked_fill(~there.reshape(*there.shape, *(1,) * (part.dim() - 2)), 0).flatten(0, 1)
            for name, part in parts.items()
        }
        return (seen if self.device is not None else {name: part.numpy() for name, part in seen.items()}), there

    def _to_each(self, value: Any) -> Any:
        """What is a team's, ``(B, ...)``, for each of its agents, ``(B n, ...)``."""
        if isinstance(value, Tensor):
            return value.repeat_interleave(self.team_size, 0)
        return np.repeat(np.asarray(value), self.team_size, axis=0)

    def _told(self, info: dict[str, Any]) -> dict[str, Any]:
        """The infos of the copies: "success" and, of SAME_STEP, the last observations and infos."""
        told: dict[str, Any] = {}
        for name in _SUCCESS:
            if name in info:
                told["success"] = self._to_each(info[name])
                break
        for name, converted in (("final_obs", self._final), ("final_info", self._told)):
            if name in info:
                told[name] = converted(info[name])
            if f"_{name}" in info:
                told[f"_{name}"] = self._to_each(info[f"_{name}"])
        return told

    def _final(self, observations: Any) -> Any:
        """The last observations of the agents whose episode has ended: a batch, or objects ``(B n,)``, else None."""
        if isinstance(observations, dict):
            return self._split(observations)[0]
        last = np.full(self.num_envs, None, dtype=object)
        for team, observation in enumerate(observations):
            if observation is not None:
                seen, _ = self._split({name: np.asarray(observation[name])[None] for name in _PARTS})
                for agent in range(self.team_size):
                    last[team * self.team_size + agent] = {name: part[agent] for name, part in seen.items()}
        return last

    def render(self) -> Any:
        """What the environment draws: one picture a team, B in all."""
        return self.env.render()

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environment."""
        self.env.close(**kwargs)

    def snapshot(self) -> dict[str, Tensor] | None:
        """Where the teams stand, if the environment can tell (ours can)."""
        taken = getattr(self.env.unwrapped, "snapshot", None)
        return None if taken is None else taken()

    def restore(self, snapshot: dict[str, Tensor]) -> dict[str, Any]:
        """Go on where a snapshot was taken; returns the observations of that moment."""
        return self._seen(self.env.unwrapped.restore(snapshot))  # type: ignore[attr-defined]


def _parts_of(space: Any) -> list[Any]:
    """The spaces of views, positions and mask."""
    if not isinstance(space, spaces.Dict) or not set(_PARTS) <= set(space.spaces):
        raise ValueError(f"observations are {space}; expected a Dict with views, positions and mask")
    parts = [space[name] for name in _PARTS]
    for name, part in zip(_PARTS[:2], parts, strict=False):
        if not isinstance(part, spaces.Box):
            raise ValueError(f"{name} are {part}; expected a Box with one row an agent")
    return parts


def _actions_of(space: Any) -> tuple[int, int]:
    """How many agents act, and how many actions each has."""
    if not isinstance(space, spaces.MultiDiscrete) or space.nvec.ndim != 1 or len(set(space.nvec.tolist())) != 1:
        raise ValueError(f"actions are {space}; expected MultiDiscrete with the same number of actions for every agent")
    return len(space.nvec), int(space.nvec[0])
