"""An actor-critic policy of Stable-Baselines3 with one of our cores as its memory."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import CombinedExtractor, MlpExtractor, NatureCNN
from torch import Tensor, nn

from ..core import RecurrentCore, State, Tokens, unroll
from ..cores import CORES, READERS
from ..errors import UserError, nearest
from ..plugins import build_core, constructor, named, offered, options_of, refuse_reader
from ..ranges import check_ranges
from .rollout import Observation, each

CRITICS = ("shared", "own")
_CRITIC = "critic='own' gives the critic a memory of its own, critic='shared' lets it read the actor's"
_HABITS = {  # options of sb3-contrib and nn.LSTM, and what does the same here
    "lstm_hidden_size": "core_kwargs={{'slot_size': {value!r}}} sets the size of each slot; an lstm has one slot",
    "hidden_size": "core_kwargs={{'slot_size': {value!r}}} sets the size of each slot; an lstm has one slot",
    "n_lstm_layers": "a core has one layer, which core_kwargs={{'slot_size': 512}} makes wider",
    "shared_lstm": _CRITIC,
    "enable_critic_lstm": _CRITIC,
    "lstm_kwargs": "core_kwargs={{...}} holds the options of the core",
    "use_sde": "there is no state-dependent exploration here; leave it out",
    "sde_sample_freq": "there is no state-dependent exploration here; leave it out",
}
_GIVEN = ("observation_space", "action_space", "lr_schedule")  # by the algorithm


def unknown_option(owner: str, key: str, value: Any, known: Iterable[str]) -> UserError:
    """The error about an option that its owner does not take: what takes its place here, or the nearest known option."""
    name = key.rpartition(".")[2]
    hint = _HABITS[name].format(value=value) if name in _HABITS else nearest(name, known)
    return UserError(f"{owner} does not take {key}; {hint}")


class Memory(nn.Module):
    """A core between a features extractor and the networks of actor and critic.

    Features become tokens: one token of all features, or, of an extractor that says ``token_shape = (N, F)``, N tokens of F.
    What comes out are the core's slots side by side. A core without a state proposes changes (see ``core.py``), so there the
    slots are the tokens plus their changes. ESBN's controller never sees what it reads, so there the features come along.

    Args:
        core: a name of ``worldmodels cores``.
        options: ``num_slots``, ``slot_size`` and what else the core's constructor takes.
        token_shape: N and F.
    """

    def __init__(self, core: str, options: Mapping[str, Any], token_shape: tuple[int, int]):
        super().__init__()
        known = offered("cores", CORES | READERS)
        if core not in known and "." not in core:
            raise UserError(
                f"unknown core {core!r}; {nearest(core.lower(), known)} One of your own is 'my.module.Name'"
            )
        config = named("cores", CORES | READERS, core, options)
        target = constructor("core", config)
        refuse_reader(target)
        for name in _HABITS.keys() & options.keys() - options_of(target).keys():
            raise unknown_option(target.__name__, f"core.{name}", options[name], ())
        N, F = token_shape
        can = target.capabilities
        default = (1, 256) if can.one_vector else (6, 64) if can.memory else token_shape
        given = {name: value for name in ("num_slots", "slot_size") if (value := options.get(name)) is not None}
        check_ranges("core", build_core, given)
        num_slots, slot_size = given.get("num_slots", default[0]), given.get("slot_size", default[1])
        config = {name: value for name, value in config.items() if name not in ("num_slots", "slot_size")}
        self.token_shape = (N, F)
        self.changes = not can.memory
        self.passes_features = not can.transition
        if self.changes and (num_slots != N or slot_size > F):
            raise UserError(
                f"core {core!r} has no state and changes its tokens, here {N} of size {F}; leave num_slots and slot_size "
                f"out, or set num_slots={N} and slot_size to at most {F}; got num_slots={num_slots} and slot_size={slot_size}"
            )
        self.core: RecurrentCore
        self.core = build_core(config, F, num_slots, slot_size, N)
        self.size = num_slots * slot_size + (N * F if self.passes_features else 0)

    def core_parameters(self) -> Iterator[nn.Parameter]:
        """The core's parameters, without what lies before and after it."""
        assert isinstance(self.core, nn.Module)
        return self.core.parameters()

    def tokens(self, features: Tensor) -> Tokens:
        """Features ``(..., N F)`` as the core's tokens."""
        return Tokens(features.unflatten(-1, self.token_shape))

    def forward(self, features: Tensor, state: State, starts: Tensor) -> tuple[Tensor, State]:
        """What is remembered at every step, ``(T, B, size)``, of features ``(T, B, N F)``; and the last state."""
        tokens = self.tokens(features)
        if self.changes:  # no state, so time is but a batch
            flat = self.core.prepare(Tokens(tokens.features.flatten(0, 1)))
            change, _ = self.core(flat, {})
            slots = tokens.features[..., : self.core.slot_size] + change.unflatten(0, features.shape[:2])
            return slots.flatten(-2), {}
        slots, state = unroll(self.core, tokens, state, starts)
        seen = slots.flatten(-2)
        return torch.cat([seen, features], dim=-1) if self.passes_features else seen, state


class RecurrentPolicy(ActorCriticPolicy):
    """SB3's actor-critic policy with a core after its features extractor; "MlpPolicy" of ``RecurrentPPO``.

    The policy stays in evaluation mode while it learns: choices are the argmax, with the straight-through gradient, and
    neither dropout nor batch statistics act. SB3 puts a policy into training mode for its update; then choices would be
    drawn anew there and PPO's first ratio would not be one.

    ``forward``, ``predict_values``, ``evaluate_actions`` and ``get_distribution`` are SB3's, but ask for the memory as well,
    as those of sb3-contrib's recurrent policies do; ``predict`` is as in SB3.

    Args:
        observation_space: of one environment, pictures with channels first.
        action_space: of one environment.
        lr_schedule: learning rate against the share of training that is left.
        core: a name of ``worldmodels cores``, or the path of a class.
        core_kwargs: its ``num_slots``, ``slot_size`` and options. Without sizes lstm, gru and esbn have one slot of 256,
            other cores with a state 6 of 64, and cores without a state the tokens' own.
        critic: "shared": actor and critic read the same core, which both train; "own": the critic has one of its own.
        kwargs: as for SB3's ``ActorCriticPolicy``.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        lr_schedule: Any,
        *,
        core: str = "lstm",
        core_kwargs: Mapping[str, Any] | None = None,
        critic: str = "shared",
        **kwargs: Any,
    ):
        if critic not in CRITICS:
            raise UserError(f"critic is {critic!r}; expected one of {', '.join(CRITICS)}")
        known = [name for name in inspect.signature(ActorCriticPolicy).parameters if name not in _GIVEN]
        for name, value in kwargs.items():
            if name not in known:
                raise unknown_option(type(self).__name__, f"policy_kwargs.{name}", value, known)
        self.core_name, self.core_kwargs, self.critic = core, dict(core_kwargs or {}), critic
        super().__init__(observation_space, action_space, lr_schedule, **kwargs)
        self.train(False)

    def _build_mlp_extractor(self) -> None:
        """Called by SB3 between the features extractor and the networks of actor and critic."""
        token_shape = getattr(self.features_extractor, "token_shape", (1, self.features_dim))
        self.memory = Memory(self.core_name, self.core_kwargs, token_shape)
        self.critic_memory = None
        if self.critic == "own":
            self.critic_memory = Memory(self.core_name, self.core_kwargs, token_shape)
        elif not self.share_features_extractor:
            raise UserError("share_features_extractor=False gives the critic features of its own; add critic='own'")
        self.mlp_extractor = MlpExtractor(
            self.memory.size, net_arch=self.net_arch, activation_fn=self.activation_fn, device=self.device
        )

    def _get_constructor_parameters(self) -> dict[str, Any]:
        more = {"core": self.core_name, "core_kwargs": self.core_kwargs, "critic": self.critic}
        return super()._get_constructor_parameters() | more

    def set_training_mode(self, mode: bool) -> None:
        """Stay in evaluation mode, see above."""
        self.train(False)

    def initial_state(self, batch_size: int) -> State:
        """The state at the start of an episode, of both cores if the critic has its own."""
        state = dict(self.memory.core.initial_state(batch_size))
        if self.critic_memory is not None:
            state |= {f"critic/{k}": v for k, v in self.critic_memory.core.initial_state(batch_size).items()}
        return state

    def extract_features(self, obs: Any, features_extractor: Any = None) -> Any:
        """Features of observations, preprocessed by SB3 unless an extractor says that it ``takes_raw`` ones."""
        if self.share_features_extractor and getattr(self.features_extractor, "takes_raw", False):
            return self.features_extractor(obs)
        return super().extract_features(obs, features_extractor)

    def remember(self, observations: Observation, state: State, starts: Tensor) -> tuple[Tensor, Tensor, State]:
        """What actor and critic read at every step.

        Args:
            observations: ``(T, B, ...)``.
            state: before the first step.
            starts: ``(T, B)`` bool, True where an episode begins.

        Returns:
            Latents of actor and of critic ``(T, B, ...)``, and the last state.
        """
        T, B = starts.shape
        features = self.extract_features(each(lambda part: part.flatten(0, 1), observations))
        pi, vf = features if isinstance(features, tuple) else (features, features)
        pi, vf = pi.unflatten(0, (T, B)), vf.unflatten(0, (T, B))
        pi, next_state = self.memory(pi, _actor(state), starts)
        if self.critic_memory is not None:
            other = {k.removeprefix("critic/"): v for k, v in state.items() if k.startswith("critic/")}
            vf, other = self.critic_memory(vf, other, starts)
            next_state = next_state | {f"critic/{name}": leaf for name, leaf in other.items()}
        else:
            vf = pi
        return self.mlp_extractor.forward_actor(pi), self.mlp_extractor.forward_critic(vf), next_state

    def explain(self, observations: Observation, state: State) -> dict[str, Tensor]:
        """What the actor's core chooses at one step of B environments, see ``RecurrentCore.explain``."""
        features = self.extract_features(observations)
        tokens = self.memory.tokens(features[0] if isinstance(features, tuple) else features)
        return self.memory.core.explain(self.memory.core.prepare(tokens), _actor(state))

    def forward(  # type: ignore[override]
        self,
        observations: Observation,
        state: State,
        starts: Tensor,
        deterministic: bool = False,
        among: tuple[int, int] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, State]:
        """One step of B environments.

        Args:
            observations: ``(B, ...)``.
            state: before the step; ``initial_state(B)`` if there was none.
            starts: ``(B,)`` bool, where an episode begins; these rows forget.
            deterministic: the most probable actions instead of drawn ones.
            among: (first, total): actions are drawn as if the B were rows first, first + 1, ... of so many, so that the noise
                of a row does not depend on how the rows are shared out to processes.

        Returns:
            Actions ``(B, ...)``, values ``(B,)``, log probabilities ``(B,)`` and the next state.
        """
        pi, vf, state = self.remember(each(lambda part: part[None], observations), state, starts[None])
        latent, own = pi[0], slice(None)
        if among is not None:
            first, total = among
            own = slice(first, first + len(latent))
            latent = latent.new_zeros(total, *latent.shape[1:])
            latent[own] = pi[0]
        distribution = self._get_action_dist_from_latent(latent)
        actions = distribution.get_actions(deterministic=deterministic)
        values = self.value_net(vf[0])[..., 0]
        log_probs = distribution.log_prob(actions)[own]
        return actions[own].reshape(-1, *(self.action_space.shape or ())), values, log_probs, state

    def get_distribution(  # type: ignore[override]
        self, observations: Observation, state: State, starts: Tensor
    ) -> tuple[Distribution, State]:
        """What the actions of one step of B environments are drawn from, and the next state; arguments as of ``forward``."""
        pi, _, state = self.remember(each(lambda part: part[None], observations), state, starts[None])
        return self._get_action_dist_from_latent(pi[0]), state

    def predict_values(  # type: ignore[override]
        self, observations: Observation, state: State, starts: Tensor
    ) -> Tensor:
        """V of one step of B environments, ``(B,)``; arguments as of ``forward``."""
        _, vf, _ = self.remember(each(lambda part: part[None], observations), state, starts[None])
        return self.value_net(vf[0])[..., 0]

    def evaluate_actions(  # type: ignore[override]
        self, observations: Observation, actions: Tensor, state: State, starts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """What the policy now makes of actions that were taken.

        Args:
            observations: ``(T, B, ...)``, sequences as they were lived through.
            actions: ``(T, B, ...)``.
            state: before the first step.
            starts: ``(T, B)`` bool, where an episode begins.

        Returns:
            Values, log probabilities, and entropies where they have a formula, ``(T, B)`` each.
        """
        T, B = starts.shape
        pi, vf, _ = self.remember(observations, state, starts)
        distribution = self._get_action_dist_from_latent(pi.flatten(0, 1))
        log_probs = distribution.log_prob(actions.flatten(0, 1)).unflatten(0, (T, B))
        entropy = distribution.entropy()
        return self.value_net(vf)[..., 0], log_probs, None if entropy is None else entropy.unflatten(0, (T, B))

    @torch.no_grad()
    def predict(  # type: ignore[override]
        self,
        observation: Any,
        state: Mapping[str, Any] | None = None,
        episode_start: Any = None,
        deterministic: bool = False,
    ) -> tuple[Any, dict[str, Any]]:
        """The action for an observation, and the state to hand in with the next one.

        Args:
            observation: as the environment gives it, one or a batch; numpy arrays, or tensors for tensors in return.
            state: what the last call returned; None for the start of an episode.
            episode_start: ``(B,)`` bool, where an episode begins; these rows forget. None: nowhere, if there is a state.
            deterministic: the most probable action instead of a drawn one.

        Returns:
            The actions, and the state as a dict of arrays ``(B, ...)``.
        """
        parts = list(observation.values()) if isinstance(observation, dict) else [observation]
        tensors = isinstance(parts[0], Tensor)
        if tensors:
            seen, batched = each(lambda part: part.to(self.device), self._channels_first(observation)), True
        else:
            if isinstance(observation, tuple):
                raise ValueError("predict takes an observation; env.reset() of Gymnasium returns (observation, info)")
            seen, batched = self.obs_to_tensor(observation)
        B = len(next(iter(seen.values()))) if isinstance(seen, dict) else len(seen)
        if state is None:
            remembered, starts = self.initial_state(B), torch.ones(B, dtype=torch.bool, device=self.device)
        else:
            remembered = {name: torch.as_tensor(leaf, device=self.device) for name, leaf in state.items()}
            given = np.zeros(B, dtype=bool) if episode_start is None else episode_start
            starts = torch.as_tensor(given, device=self.device).bool().reshape(B)
        actions, _, _, remembered = self(seen, remembered, starts, deterministic)
        actions = self.bounded(actions)
        if tensors:
            return actions, remembered
        numbers = actions.cpu().numpy()
        return numbers if batched else numbers[0], {k: leaf.cpu().numpy() for k, leaf in remembered.items()}

    def _channels_first(self, observation: Observation) -> Observation:
        """A batch of tensors with pictures as the networks take them, whichever way the environment gives them."""
        if isinstance(observation, dict):
            parts = self.observation_space.spaces  # type: ignore[attr-defined]
            return {name: _as_space(part, parts[name].shape) for name, part in observation.items()}
        return _as_space(observation, self.observation_space.shape)

    def bounded(self, actions: Tensor) -> Tensor:
        """Actions cut at the bounds of a box, within which a Gaussian does not stay by itself."""
        if not isinstance(self.action_space, spaces.Box):
            return actions
        low, high = (
            torch.as_tensor(edge, device=actions.device) for edge in (self.action_space.low, self.action_space.high)
        )
        return actions.clamp(low, high)


def _actor(state: State) -> State:
    """The part of a policy's state that is not the critic's own."""
    return {name: leaf for name, leaf in state.items() if not name.startswith("critic/")}


def _as_space(part: Tensor, shape: tuple[int, ...] | None) -> Tensor:
    """Pictures ``(B, H, W, C)`` as ``(B, C, H, W)`` if that is the shape of the space."""
    channels_last = part.dim() == 4 and part.shape[1:] != shape and part.movedim(-1, 1).shape[1:] == shape
    return part.movedim(-1, 1) if channels_last else part


class RecurrentCnnPolicy(RecurrentPolicy):
    """``RecurrentPolicy`` for pictures, with SB3's Nature CNN; "CnnPolicy" of ``RecurrentPPO``."""

    def __init__(self, observation_space: Any, action_space: Any, lr_schedule: Any, **kwargs: Any):
        kwargs.setdefault("features_extractor_class", NatureCNN)
        super().__init__(observation_space, action_space, lr_schedule, **kwargs)


class RecurrentMultiInputPolicy(RecurrentPolicy):
    """``RecurrentPolicy`` for dict observations, with SB3's combined extractor; "MultiInputPolicy" of ``RecurrentPPO``."""

    def __init__(self, observation_space: Any, action_space: Any, lr_schedule: Any, **kwargs: Any):
        kwargs.setdefault("features_extractor_class", CombinedExtractor)
        super().__init__(observation_space, action_space, lr_schedule, **kwargs)
