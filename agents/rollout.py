"""What a policy lived through, on one device: the steps of all environments, and the advantages made of them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from jaxtyping import Bool, Float
from torch import Tensor

from ..core import State

Observation = Tensor | dict[str, Tensor]


def each(function: Callable[[Any], Any], observation: Any) -> Any:
    """A function on every part of an observation."""
    if isinstance(observation, dict):
        return {name: function(part) for name, part in observation.items()}
    return function(observation)


def stacked(observations: Sequence[Any]) -> Any:
    """Single observations, numpy arrays or dicts of them, as a batch."""
    if isinstance(observations[0], dict):
        return {name: np.stack([one[name] for one in observations]) for name in observations[0]}
    return np.stack(observations)


def advantages(
    rewards: Float[Tensor, "T B"],
    values: Float[Tensor, "T B"],
    next_values: Float[Tensor, "T B"],
    terminated: Bool[Tensor, "T B"],
    truncated: Bool[Tensor, "T B"],
    gamma: float,
    gae_lambda: float,
) -> Float[Tensor, "T B"]:
    """Generalised advantage estimates (Schulman et al. 2016, equation 16).

    ``delta_t = r_t + gamma V(s_{t+1}) - V(s_t)``, ``A_t = delta_t + gamma lambda A_{t+1}``; nothing follows a terminal
    state, and an episode that was cut off is worth the value of its last observation.

    Args:
        rewards: r_t.
        values: V(s_t).
        next_values: V(s_{t+1}) of the observation that step t led to, before any reset.
        terminated: whether step t ended the episode by itself.
        truncated: whether step t was its last because time was up.
        gamma: discount, 0 to 1.
        gae_lambda: lambda, 0 to 1.

    Returns:
        A_t.
    """
    delta = rewards + gamma * next_values * ~terminated - values
    carry = gamma * gae_lambda * ~(terminated | truncated)
    result = torch.empty_like(delta)
    following = torch.zeros_like(delta[0])
    for t in range(len(delta) - 1, -1, -1):
        following = delta[t] + carry[t] * following
        result[t] = following
    return result


class Minibatch(NamedTuple):
    """Whole sequences, time first: ``L`` steps of ``n`` of them.

    ``valid`` is False where nothing can be learned: the step after an episode's end in environments that then start the
    next one and ignore the action.
    """

    observations: Observation  # (L, n, ...)
    actions: Tensor  # (L, n, ...)
    log_probs: Tensor  # (L, n), as are all below
    values: Tensor
    advantages: Tensor
    returns: Tensor
    starts: Tensor
    valid: Tensor
    state: State  # before the first step, (n, ...)


class Rollout:
    """Room for T steps of B environments; tensors are made once and filled again and again.

    Args:
        num_steps: T.
        num_envs: B.
        sequence_length: L, steps of a training sequence; divides T. The policy's state is kept at the start of each.
        observation_space: of one environment.
        action_space: of one environment.
        device: where everything lives.
        first_env: how many environments come before these, in other processes.
        all_envs: the environments of all processes; None for B.
    """

    def __init__(
        self,
        num_steps: int,
        num_envs: int,
        sequence_length: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device,
        first_env: int = 0,
        all_envs: int | None = None,
    ):
        shape = (num_steps, num_envs)
        self.num_steps, self.num_envs, self.sequence_length = num_steps, num_envs, sequence_length
        self.first_env, self.all_envs = first_env, all_envs or num_envs
        self.observations = _room(observation_space, shape, device)
        self.actions = _room(action_space, shape, device)
        if not isinstance(action_space, (spaces.Discrete, spaces.MultiDiscrete)):
            self.actions = self.actions.float()  # as they were drawn, whatever the environment makes of them
        self.log_probs, self.values, self.next_values, self.rewards, self.advantages = (
            torch.zeros(shape, device=device) for _ in range(5)
        )
        self.starts, self.valid, self.terminated, self.truncated, self.success = (
            torch.zeros(shape, dtype=torch.bool, device=device) for _ in range(5)
        )
        self.states: list[State] = []

    @property
    def returns(self) -> Tensor:
        """What the value is trained towards, ``A_t + V(s_t)``."""
        return self.advantages + self.values

    def minibatches(self, batch_size: int) -> Iterator[Minibatch]:
        """One pass over all sequences in random order.

        All processes draw the same order of the sequences of all, and each is given those of a minibatch that are its own:
        now more, now fewer, at times none. So a minibatch does not depend on the number of processes.

        Args:
            batch_size: steps of a minibatch of all processes together; whole sequences, so a multiple of their length.
        """
        L = self.sequence_length
        sequences = self.num_steps // L * self.all_envs
        state = {name: torch.cat([kept[name] for kept in self.states]) for name in self.states[0]}
        for chosen in torch.randperm(sequences, device=self.rewards.device).split(max(1, batch_size // L)):
            part, env = torch.div(chosen, self.all_envs, rounding_mode="floor"), chosen % self.all_envs
            if self.all_envs > self.num_envs:
                env = env - self.first_env
                own = (env >= 0) & (env < self.num_envs)
                part, env = part[own], env[own]

            def of(whole: Tensor, part: Tensor = part, env: Tensor = env) -> Tensor:
                if L == self.num_steps:
                    return whole[:, env]
                return whole.unflatten(0, (-1, L))[part, :, env].transpose(0, 1)

            yield Minibatch(
                each(of, self.observations),
                of(self.actions),
                of(self.log_probs),
                of(self.values),
                of(self.advantages),
                of(self.returns),
                of(self.starts),
                of(self.valid),
                {name: leaf[part * self.num_envs + env] for name, leaf in state.items()},
            )


def _room(space: spaces.Space[Any], shape: tuple[int, int], device: torch.device) -> Any:
    """Zeros for observations or actions of a space at every step."""
    if isinstance(space, spaces.Dict):
        return {name: _room(part, shape, device) for name, part in space.spaces.items()}
    dtype = torch.int64 if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)) else None
    if dtype is None:
        kind = space.dtype.name if space.dtype is not None else "float32"
        dtype = torch.float32 if kind == "float64" else getattr(torch, kind, torch.float32)
    return torch.zeros(*shape, *(space.shape or ()), dtype=dtype, device=device)
