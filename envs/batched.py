"""The base of our environments: thousands of copies stepped at once by torch code, and their single-copy view.

An environment is three pure functions over a state of tensors whose first axis is the copy. Everything random is a
function of a key made from (seed, copy, episode, step), so a copy's trajectory depends neither on how many others there
are nor on the device.
"""

from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

from . import random

State = dict[str, Tensor]
Observation = Tensor | dict[str, Tensor]

RESET = 0  # folded into an episode's key for its start state; step t folds t = 1, 2, ...


class BatchedEnv(VectorEnv[Observation, Tensor, Tensor]):
    """Steps ``num_envs`` copies at once; observations, rewards and flags are tensors on ``device``.

    The autoreset mode is NEXT_STEP: the step after the end of an episode ignores its action, returns the first
    observation of the next episode and reward 0. A copy can be restarted sooner by ``reset(options={"reset_mask": ...})``.

    A subclass sets ``single_observation_space`` and ``single_action_space`` before it calls this constructor, says in
    ``terminates`` whether an episode can end by itself, and writes ``_initial``, ``_transition``, ``_observe`` and
    ``_info``.

    Args:
        num_envs: number of copies B.
        device: where the copies live, as a string torch understands.
        max_episode_steps: steps after which an episode is truncated; None for never (the single view leaves this to
            Gymnasium's TimeLimit).
        render_mode: None or "rgb_array".
    """

    metadata: dict[str, Any] = {
        "render_modes": ["rgb_array"],
        "render_fps": 10,
        "autoreset_mode": AutoresetMode.NEXT_STEP,
    }
    terminates: ClassVar[bool] = False
    option_names: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, num_envs: int, device: str = "cpu", max_episode_steps: int | None = None, render_mode: str | None = None
    ):
        if num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}; give at least 1")
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f"render_mode is {render_mode!r}; this environment offers None and 'rgb_array'")
        self.num_envs = num_envs
        self.device = torch.device(device)
        self.max_episode_steps = max_episode_steps
        self.render_mode = render_mode
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._state: State | None = None
        self._steps = 0  # of the whole batch since it was seeded
        self._episode = torch.zeros(num_envs, dtype=torch.int64, device=self.device)

    # What a subclass writes.

    def _initial(self, key: Tensor, options: dict[str, Any]) -> State:
        """Start states drawn from one key for each copy that starts, ``(R,)``; with options that is all of them."""
        raise NotImplementedError

    def _start(self, rows: Tensor, options: dict[str, Any]) -> State:
        """Start states of the copies ``rows`` (R,); overridden where they depend on more than the key."""
        return self._initial(self._key(RESET)[rows], options)

    def _transition(
        self, state: State, actions: Tensor, key: Tensor
    ) -> tuple[State, Tensor, Tensor, dict[str, Tensor]]:
        """One step of every copy: next state, reward (B,), terminated (B,), what happened in the step."""
        raise NotImplementedError

    def _observe(self, state: State) -> Observation:
        """The observation of a state."""
        raise NotImplementedError

    def _info(self, state: State, events: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """The truth about a state and about the step that led to it (None: it is a start state)."""
        raise NotImplementedError

    def _image(self, state: State) -> Tensor:
        """What ``render`` shows, (B, H, W, 3) uint8."""
        raise NotImplementedError

    # What Gymnasium calls.

    def reset(
        self, *, seed: int | list[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start a new episode in every copy.

        Args:
            seed: an integer (copy b draws from the stream (seed, b)), a list of one integer per copy (copy b draws
                from the stream (seed[b], 0), like a single environment reset with that seed), or None to go on to the
                next episode of the present streams.
            options: start states set by hand; the environment's page names the keys. Or "reset_mask" ``(B,)`` bool:
                only these copies start their next episode, whether or not the present one has ended. Or, with an integer
                seed, "first_env": copy b draws from the stream (seed, first_env + b), so that several processes can each
                have a part of the copies of one seed.

        Returns:
            Observations and infos, every entry with leading axis B.
        """
        options = dict(options or {})
        mask, first_env = options.pop("reset_mask", None), options.pop("first_env", 0)
        unknown = sorted(set(options) - set(self.option_names))
        if unknown:
            names = ["reset_mask", "first_env", *self.option_names]
            raise ValueError(f"unknown reset option {unknown[0]!r}; this environment takes {names}")
        if first_env and (mask is not None or not isinstance(seed, (int, np.integer))):
            raise ValueError(f"first_env={first_env} says whose streams of a seed are taken; give one integer as seed")
        if mask is not None:
            return self._reset_some(mask, seed, options)
        if seed is not None or self._state is None:
            self._seed(seed, first_env)
        else:
            self._episode = self._episode + 1
        self._elapsed = np.zeros(self.num_envs, dtype=np.int64)
        self._ended = np.zeros(self.num_envs, dtype=bool)
        self._state = self._start(torch.arange(self.num_envs, device=self.device), options)
        return self._observe(self._state), self._info(self._state, None)

    def _reset_some(self, mask: Any, seed: Any, options: dict[str, Any]) -> tuple[Observation, dict[str, Any]]:
        if self._state is None:
            raise gym.error.ResetNeeded(
                "some copies cannot be reset before all were; call reset without reset_mask first"
            )
        if seed is not None or options:
            raise ValueError("reset_mask goes with no other option and no seed; reset all copies for those")
        chosen = np.asarray(mask.cpu() if isinstance(mask, Tensor) else mask)
        if chosen.shape != (self.num_envs,) or chosen.dtype != bool:
            raise ValueError(f"reset_mask is {chosen.dtype} {chosen.shape}; expected bool {(self.num_envs,)}")
        self._restart(chosen)
        self._ended = self._ended & ~chosen
        return self._observe(self._state), self._info(self._state, None)

    def _restart(self, chosen: np.ndarray) -> None:
        """Put the chosen copies into the first state of their next episode."""
        assert self._state is not None
        rows = torch.from_numpy(np.flatnonzero(chosen)).to(self.device)
        if len(rows):
            self._episode = self._episode.index_add(0, rows, torch.ones_like(rows))
            fresh = self._start(rows, {})
            self._state = {name: value.index_copy(0, rows, fresh[name]) for name, value in self._state.items()}
            self._elapsed[chosen] = 0

    def step(self, actions: Any) -> tuple[Observation, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Step every copy; copies whose episode ended at the last step start their next one instead."""
        if self._state is None:
            raise gym.error.ResetNeeded("step was called before reset; call reset first")
        actions = self._checked(actions)
        self._steps += 1
        self._elapsed += 1
        elapsed = torch.from_numpy(self._elapsed).to(self.device)
        self._state, rewards, terminated, events = self._transition(self._state, actions, self._key(elapsed))
        if self._ended.any():
            self._restart(self._ended)
            restarted = torch.from_numpy(self._ended).to(self.device)
            events = {name: value * ~_like(restarted, value) for name, value in events.items()}
            rewards = rewards.masked_fill(restarted, 0.0)
            terminated = terminated & ~restarted
        truncated = np.zeros(self.num_envs, dtype=bool)
        if self.max_episode_steps is not None:
            truncated = self._elapsed >= self.max_episode_steps
        self._ended = truncated | terminated.cpu().numpy() if self.terminates else truncated
        return (
            self._observe(self._state),
            rewards,
            terminated,
            torch.tensor(truncated, device=self.device),
            self._info(self._state, events),
        )

    def render(self) -> np.ndarray | None:  # type: ignore[override]
        """The copies' pictures (B, H, W, 3) uint8, or None if no render mode was asked for."""
        if self.render_mode is None or self._state is None:
            return None
        return self._image(self._state).cpu().numpy()

    def snapshot(self) -> dict[str, Tensor]:
        """Everything the copies' future depends on besides the actions, as tensors by name; see ``restore``."""
        if self._state is None:
            raise gym.error.ResetNeeded("there is nothing to save before the first reset")
        own = {"stream": self._stream, "episode": self._episode}
        own |= {"elapsed": torch.from_numpy(self._elapsed), "ended": torch.from_numpy(self._ended)}
        own["steps"] = torch.tensor(self._steps)
        parts = own | {f"state/{name}": value for name, value in self._state.items()}
        return {name: value.clone() for name, value in parts.items()}

    def restore(self, snapshot: dict[str, Tensor]) -> Observation:
        """Go on exactly where ``snapshot`` was taken, on an environment made with the same arguments.

        Returns:
            The observations of that moment.

        Raises:
            ValueError: taken of another number of copies.
        """
        if len(snapshot["episode"]) != self.num_envs:
            raise ValueError(f"the snapshot has {len(snapshot['episode'])} copies, this environment {self.num_envs}")
        self._stream, self._episode = snapshot["stream"].to(self.device), snapshot["episode"].to(self.device)
        self._elapsed, self._ended = snapshot["elapsed"].numpy().copy(), snapshot["ended"].numpy().copy()
        self._steps = int(snapshot["steps"])
        state = {name: value.to(self.device) for name, value in snapshot.items() if name.startswith("state/")}
        self._state = {name.removeprefix("state/"): value for name, value in state.items()}
        return self._observe(self._state)

    def _seed(self, seed: int | list[int] | None, first_env: int = 0) -> None:
        self._steps = 0
        index = torch.arange(self.num_envs, device=self.device)
        if seed is None:
            seed = int(np.random.SeedSequence().generate_state(1, np.uint64)[0] >> np.uint64(1))
        if isinstance(seed, (int, np.integer)):
            self._np_random, self._np_random_seed = gym.utils.seeding.np_random(int(seed))
            self._stream = random.fold(random.seed_key(int(seed), self.device), first_env + index)
        else:
            if len(seed) != self.num_envs:
                raise ValueError(f"got {len(seed)} seeds for {self.num_envs} environments; give one seed or one each")
            self._stream = random.fold(random.seed_key(torch.tensor(seed), self.device), 0)
        self._episode = torch.zeros_like(index)

    def _key(self, step: int | Tensor) -> Tensor:
        return random.fold(self._stream, self._episode, step)

    def _checked(self, actions: Any) -> Tensor:
        """Actions as a tensor on the device; those that come from the host are checked against the space."""
        if not isinstance(actions, Tensor):
            actions = torch.as_tensor(np.asarray(actions))
        space = self.single_action_space
        expected = (self.num_envs, *(space.shape or ()))
        if tuple(actions.shape) != expected:
            raise ValueError(f"actions have shape {tuple(actions.shape)}; expected {expected} for {space}")
        on_host = actions.device.type == "cpu"
        if (
            isinstance(space, gym.spaces.Discrete)
            and on_host
            and not bool(((actions >= 0) & (actions < space.n)).all())
        ):
            raise ValueError(
                f"actions reach from {int(actions.min())} to {int(actions.max())}; expected 0 to {space.n - 1}"
            )
        return actions.to(self.device)


def _like(mask: Tensor, value: Tensor) -> Tensor:
    """A mask of copies ``(B,)`` with as many axes as a value ``(B, ...)``."""
    return mask.reshape(-1, *(1,) * (value.dim() - 1))


def enlarged(frames: Tensor) -> Tensor:
    """Frames ``(B, H, W, 1 or 3)`` for people: in colour, each pixel a square, about 256 pixels wide."""
    scale = -(-256 // frames.shape[2])
    return frames.expand(-1, -1, -1, 3).repeat_interleave(scale, 1).repeat_interleave(scale, 2)


class SingleEnv(gym.Env[Any, Any]):
    """One copy of a batched environment as a plain Gymnasium environment with numpy observations.

    What its infos call "success" they also call "is_success", the name under which Stable-Baselines3 looks for it.

    Args:
        batched: the environment, with ``num_envs=1`` and no time limit of its own.
    """

    def __init__(self, batched: BatchedEnv):
        self.batched = batched
        self.metadata = batched.metadata
        self.render_mode = batched.render_mode
        self.observation_space = batched.single_observation_space
        self.action_space = batched.single_action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start a new episode; ``options`` are those of the batched environment, with or without the axis B = 1."""
        super().reset(seed=seed)
        observation, info = self.batched.reset(seed=seed, options=options)
        return _first(observation), _told(info)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One step; ``truncated`` is left to Gymnasium's TimeLimit."""
        actions = np.asarray(action)[None]
        observation, reward, terminated, truncated, info = self.batched.step(actions)
        return _first(observation), float(reward[0]), bool(terminated[0]), bool(truncated[0]), _told(info)

    def render(self) -> np.ndarray | None:
        """The picture (H, W, 3) uint8, or None if no render mode was asked for."""
        images = self.batched.render()
        return None if images is None else images[0]


def _told(info: dict[str, Any]) -> dict[str, Any]:
    """The infos of the one copy, its success by both names."""
    told: dict[str, Any] = _first(info)
    return told | ({"is_success": bool(told["success"])} if "success" in told else {})


def _first(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _first(item) for name, item in value.items()}
    return value[0].cpu().numpy()
