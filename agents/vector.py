"""Gymnasium's vector environments, ours among them, as Stable-Baselines3 knows environments."""

import sys
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.preprocessing import is_image_space, is_image_space_channels_first
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from ..data.environments import faults_of, refuse_not_finite
from ..errors import UserError
from .rollout import Observation, each, stacked


class Step(NamedTuple):
    """What one step of B environments led to.

    ``starts`` and ``empty`` speak of the step that comes next: whether its observation is the first of an episode, and
    whether its action will be ignored, because the environment then only starts the next episode.
    """

    observations: Observation
    rewards: Tensor  # (B,), as are all below
    terminated: Tensor
    truncated: Tensor
    starts: Tensor
    empty: Tensor
    success: Tensor | None = None  # of environments that tell
    final: tuple[Tensor, Observation] | None = None  # rows cut off here and restarted at once, and what they saw last


class VectorEnvAdapter(VecEnv):
    """A ``gymnasium.vector.VectorEnv`` in any of the three autoreset modes, seen as an SB3 ``VecEnv``.

    ``RecurrentPPO`` calls ``start`` and ``advance``, which hand on tensors and say what the autoreset mode does. Everything
    else of SB3 (``evaluate_policy``, callbacks, wrappers) sees a ``VecEnv`` as usual: numpy arrays, the next episode started
    in the step that ends one, ``terminal_observation`` in its info and ``episode`` as ``Monitor`` writes it.

    Pictures with channels last are handed on with channels first, as SB3's networks expect them.

    ``team_size`` is the number of neighbouring environments that live through the same episodes: the agents of a team where
    each is an environment of its own (``worldmodels.envs.shared``), else 1.

    Args:
        env: the vector environment.

    Attributes:
        first_env: how many environments come before these, in other processes; with one seed for all, every process then
            lives through the episodes of its own part.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]):
        self.first_env = 0
        mode = env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        self.vector_env = env
        self.mode = AutoresetMode(mode)
        self.takes_tensors = isinstance(getattr(env.unwrapped, "device", None), torch.device)
        self.team_size = int(getattr(env.unwrapped, "team_size", 1))
        single = getattr(env.unwrapped, "envs", [env])[0]
        self.name = getattr(env.spec or single.spec, "id", None) or type(single.unwrapped).__name__
        self._steps = 0
        _refuse_spaces(self.name, env.single_observation_space, env.single_action_space)
        self._pictures = _pictures(env.single_observation_space)
        super().__init__(
            env.num_envs, _channels_first(env.single_observation_space, self._pictures), env.single_action_space
        )

    # What RecurrentPPO uses.

    def start(self) -> Observation:
        """Start an episode everywhere: the first observations as tensors."""
        seed, options, before = self._seeds[0], None, self.first_env // self.team_size
        if before and seed is not None:
            if self.takes_tensors:
                options = {"first_env": before}
            else:  # environments of others take the seed of the first one plus their number
                seed += before
        observations = self._begin(seed=seed, options=options)
        self._reset_seeds()
        self._ended = torch.zeros(self.num_envs, dtype=torch.bool, device=getattr(self.vector_env, "device", "cpu"))
        self._returns, self._lengths = np.zeros(self.num_envs), np.zeros(self.num_envs, dtype=int)
        return self._tensors(observations)

    def advance(self, actions: Tensor) -> Step:
        """Step every environment with ``actions (B, ...)``."""
        before = self._ended
        observations, rewards, terminated, truncated, infos = self._step(actions)
        ended = terminated | truncated
        success = _success(infos)
        if self.mode == AutoresetMode.NEXT_STEP:
            self._ended = ended
            return Step(self._tensors(observations), rewards, terminated, truncated, before, ended, success)
        last = infos.get("final_obs")
        if self.mode == AutoresetMode.DISABLED and bool(ended.any()):
            last = observations
            observations = self._begin(options={"reset_mask": ended.numpy()})
        rows = (truncated & ~terminated).nonzero()[:, 0]
        final = (rows, self._tensors(_rows(last, rows))) if len(rows) else None
        never = torch.zeros_like(ended)
        return Step(self._tensors(observations), rewards, terminated, truncated, ended, never, success, final)

    def snapshot(self) -> dict[str, Tensor] | None:
        """Where the environments stand, if they can tell (ours can); see ``restore``."""
        take = getattr(self.vector_env.unwrapped, "snapshot", None)
        taken = None if take is None else take()
        return None if taken is None else {**taken, "adapter_ended": self._ended.clone()}

    def restore(self, snapshot: dict[str, Tensor]) -> Observation:
        """Go on where a snapshot was taken; returns the observations of that moment."""
        own = dict(snapshot)
        self.start()
        self._ended = own.pop("adapter_ended").to(self._ended.device)
        return self._tensors(self.vector_env.unwrapped.restore(own))  # type: ignore[attr-defined]

    def _begin(self, **how: Any) -> Any:
        with faults_of(self.name, "in reset"):
            observations, _ = self.vector_env.reset(**how)
        self._refuse_not_finite("in reset", observations)
        return observations

    def _refuse_not_finite(self, when: str, observations: Any, **more: np.ndarray) -> None:
        if self.takes_tensors:  # our own, batched on a device, are tested; reading from it would stop it
            return
        parts = observations if isinstance(observations, dict) else {"observations": observations}
        told = {name: part for name, part in {**more, **parts}.items() if isinstance(part, np.ndarray)}
        refuse_not_finite(self.name, when, told)

    def _step(self, actions: Any) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        if not self.takes_tensors and isinstance(actions, Tensor):
            actions = actions.cpu().numpy()
        self._steps += 1
        when = f"in step {self._steps}"
        with faults_of(self.name, when):
            observations, rewards, terminated, truncated, infos = self.vector_env.step(actions)
        with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused as that
            told = {} if self.takes_tensors else {"rewards": np.asarray(rewards, np.float32)}
        self._refuse_not_finite(when, observations, **told)
        rewards, terminated, truncated = (torch.as_tensor(part) for part in (rewards, terminated, truncated))
        return observations, rewards.float(), terminated.bool(), truncated.bool(), infos

    def _tensors(self, observations: Any) -> Observation:
        """Observations as tensors, channels first."""
        if isinstance(observations, dict):
            return {name: self._tensor(part, name) for name, part in observations.items()}
        return self._tensor(observations, None)

    def _tensor(self, part: Any, name: str | None) -> Tensor:
        tensor = torch.as_tensor(part)
        return tensor.movedim(-1, 1) if name in self._pictures else tensor

    # What the rest of SB3 uses.

    def reset(self) -> Any:
        """The first observations as numpy arrays."""
        return each(lambda part: part.cpu().numpy(), self.start())

    def step_async(self, actions: np.ndarray) -> None:
        """Keep the actions for ``step_wait``."""
        self._actions = torch.as_tensor(actions) if self.takes_tensors else actions

    def step_wait(self) -> Any:
        """Observations, rewards, dones and infos, with the next episode started where one has ended."""
        observations, rewards, terminated, truncated, infos = self._step(self._actions)
        ended = terminated | truncated
        dones = ended.cpu().numpy()
        self._returns += rewards.cpu().numpy()
        self._lengths += 1
        told: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        if dones.any():
            last = infos.get("final_obs")
            success = _success(infos)
            if self.mode != AutoresetMode.SAME_STEP:
                last = observations
                observations = self._begin(options={"reset_mask": dones})
            rows = torch.from_numpy(np.flatnonzero(dones))
            final = each(lambda part: part.cpu().numpy(), self._tensors(_rows(last, rows)))
            for i, row in enumerate(rows.tolist()):
                told[row]["terminal_observation"] = each(itemgetter(i), final)
                told[row]["TimeLimit.truncated"] = bool(truncated[row] and not terminated[row])
                told[row]["episode"] = {"r": float(self._returns[row]), "l": int(self._lengths[row]), "t": 0.0}
                if success is not None:
                    told[row]["is_success"] = bool(success[row])
            self._returns[dones], self._lengths[dones] = 0.0, 0
        seen = each(lambda part: part.cpu().numpy(), self._tensors(observations))
        return seen, rewards.cpu().numpy(), dones, told

    def close(self) -> None:
        """Close the vector environment; what it raises then is said, since all that was to be done with it is done."""
        try:
            with faults_of(self.name, "when it was closed"):
                self.vector_env.close()
        except UserError as error:
            print(f"worldmodels: {error}", file=sys.stderr)

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """An attribute for each of the environments asked for."""
        count = len(list(self._get_indices(indices)))
        if hasattr(self.vector_env, "get_attr") and not hasattr(self.vector_env, attr_name):
            values = self.vector_env.get_attr(attr_name)
            return [values[i] for i in self._get_indices(indices)]
        return [getattr(self.vector_env, attr_name)] * count

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set an attribute of every environment, where the vector environment has single ones, or else of itself."""
        if indices is not None:
            raise ValueError(f"{attr_name!r} can be set for all environments at once only; leave out indices")
        if hasattr(self.vector_env, "set_attr") and not hasattr(self.vector_env, attr_name):
            self.vector_env.set_attr(attr_name, [value] * self.num_envs)
        else:
            setattr(self.vector_env, attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        """Call a method in every environment, where the vector environment can do that."""
        if not hasattr(self.vector_env, "call"):
            raise AttributeError(f"{self.vector_env!r} has no single environments to call {method_name!r} of")
        values = self.vector_env.call(method_name, *args, **kwargs)
        return [values[i] for i in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper[Any, Any, Any, Any]], indices: Any = None) -> list[bool]:
        """True for ``Monitor``, whose statistics of episodes this adapter gives."""
        return [issubclass(wrapper_class, Monitor)] * len(list(self._get_indices(indices)))

    def get_images(self) -> Sequence[np.ndarray | None]:
        """What the environments draw."""
        images = self.vector_env.render()
        return [None] * self.num_envs if images is None else [np.asarray(image) for image in images]


def _refuse_spaces(name: str, observations: spaces.Space[Any], actions: spaces.Space[Any]) -> None:
    """Refuse spaces that SB3's policies understand otherwise than they are meant, or not at all.

    Raises:
        UserError: naming the space and what to wrap.
    """
    parts = list(observations.spaces.values()) if isinstance(observations, spaces.Dict) else [observations]
    known = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    if not all(isinstance(part, known) and 0 not in (part.shape or ()) for part in parts) or any(
        isinstance(part, spaces.Box) and part.shape == () for part in parts
    ):
        raise UserError(
            f"environment {name} observes {observations}; wrap it so that every part is an array of numbers"
        )
    if any(isinstance(part, spaces.Discrete) and part.start != 0 for part in parts):
        raise UserError(f"environment {name} observes {observations}; wrap it so that numbers start at 0")
    if isinstance(actions, spaces.Discrete) and actions.start != 0:
        raise UserError(f"environment {name} has actions {actions}; wrap it so that they start at 0")
    if isinstance(actions, spaces.Box) and (len(actions.shape) != 1 or 0 in actions.shape):
        raise UserError(f"environment {name} has actions {actions}; wrap it so that they are a vector")


def _success(infos: dict[str, Any]) -> Tensor | None:
    """Whether each environment's task was done in this step; None where it does not say."""
    infos = infos.get("final_info", infos)  # of SAME_STEP; beside it stands what the next episode began with
    told = infos.get("success", infos.get("is_success"))
    if isinstance(told, np.ndarray) and told.dtype.kind in "bif":
        told = torch.as_tensor(told)
    return told.bool() if isinstance(told, Tensor) else None


def _pictures(space: spaces.Space[Any]) -> set[str | None]:
    """Which parts of an observation are pictures with channels last; None stands for an observation without parts."""
    parts: dict[Any, Any] = dict(space.spaces) if isinstance(space, spaces.Dict) else {None: space}
    return {
        name
        for name, part in parts.items()
        if isinstance(part, spaces.Box) and is_image_space(part) and not is_image_space_channels_first(part)
    }


def _channels_first(space: spaces.Space[Any], pictures: set[str | None]) -> spaces.Space[Any]:
    if isinstance(space, spaces.Dict):
        moved = {name: _channels_first(part, {None} if name in pictures else set()) for name, part in space.items()}
        return spaces.Dict(moved)
    if None not in pictures:
        return space
    assert isinstance(space, spaces.Box)
    return spaces.Box(np.moveaxis(space.low, -1, 0), np.moveaxis(space.high, -1, 0), dtype=np.uint8)


def _rows(observations: Any, rows: Tensor) -> Any:
    """Some rows of a batch of observations, or of an object array with one observation a row."""
    if isinstance(observations, np.ndarray) and observations.dtype == object:
        return stacked([observations[row] for row in rows.tolist()])
    return each(lambda part: torch.as_tensor(part)[rows.to(torch.as_tensor(part).device)], observations)
