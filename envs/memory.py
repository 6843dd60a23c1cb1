"""Tasks that cannot be done without memory: a cue to recall, and a cart-pole whose velocities cannot be seen."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from . import random
from .batched import BatchedEnv, SingleEnv, State


class Recall(BatchedEnv):
    """A cue is shown once; after a delay, the action must name it.

    Observation ``(num_cues + 1,)``: at the first step one-hot for the cue, then zeros, and at the last step a one at the end,
    the question. Reward 1 and "success" if the action at that step is the cue's number, 0 otherwise; other actions do
    nothing. An episode has ``delay + 2`` steps. Without memory an agent is right once in ``num_cues`` times.

    ``reset(options={"cue": (B,)})`` sets the cues.

    Args:
        num_envs: copies B.
        num_cues: cues and actions.
        delay: steps between cue and question in which nothing is seen.
        device: where the copies live.
        max_episode_steps: steps after which an episode is truncated.
        render_mode: None or "rgb_array".
    """

    terminates = True
    option_names = ("cue",)

    def __init__(
        self,
        num_envs: int = 1,
        *,
        num_cues: int = 4,
        delay: int = 8,
        device: str = "cpu",
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
    ):
        if num_cues < 2 or delay < 0:
            raise ValueError(
                f"num_cues is {num_cues} and delay {delay}; give at least 2 cues and a delay of at least 0"
            )
        self.num_cues, self.delay = num_cues, delay
        self.single_observation_space = gym.spaces.Box(0.0, 1.0, (num_cues + 1,), np.float32)
        self.single_action_space = gym.spaces.Discrete(num_cues)
        super().__init__(num_envs, device, max_episode_steps, render_mode)

    def _initial(self, key: Tensor, options: dict[str, Any]) -> State:
        cue = random.integers(random.fold(key, 0), self.num_cues, ())
        if "cue" in options:
            cue = torch.as_tensor(options["cue"], dtype=torch.int64, device=self.device).reshape(len(key))
        return {"cue": cue, "time": torch.zeros_like(cue)}

    def _transition(
        self, state: State, actions: Tensor, key: Tensor
    ) -> tuple[State, Tensor, Tensor, dict[str, Tensor]]:
        asked = state["time"] > self.delay
        success = asked & (actions == state["cue"])
        return {**state, "time": state["time"] + 1}, success.float(), asked, {"success": success}

    def _observe(self, state: State) -> Tensor:
        shown = torch.nn.functional.one_hot(state["cue"], self.num_cues) * (state["time"] == 0)[:, None]
        return torch.cat([shown, (state["time"] == self.delay + 1)[:, None]], dim=1).float()

    def _info(self, state: State, events: dict[str, Tensor] | None) -> dict[str, Tensor]:
        success = torch.zeros_like(state["cue"], dtype=torch.bool) if events is None else events["success"]
        return {"cue": state["cue"].clone(), "success": success}

    def _image(self, state: State) -> Tensor:
        """The observation as a row of squares of 16 pixels, white for one."""
        row = (self._observe(state) * 255).to(torch.uint8)
        return row[:, None, :, None].expand(-1, 1, -1, 3).repeat_interleave(16, 1).repeat_interleave(16, 2)


class CartPole(BatchedEnv):
    """Barto, Sutton & Anderson 1983, as in Gymnasium's ``CartPole-v1``, of which only positions are seen.

    Observation ``(2,)``: place of the cart and angle of the pole; with ``velocities=True`` ``(4,)`` as in Gymnasium. Reward 1
    a step; the episode ends when the cart is more than 2.4 from the middle or the pole leans more than 12 degrees.

    ``reset(options={"state": (B, 4)})`` sets place, velocity, angle, angular velocity.

    Args:
        num_envs: copies B.
        velocities: show them after all.
        device: where the copies live.
        max_episode_steps: steps after which an episode is truncated.
        render_mode: None or "rgb_array".
    """

    terminates = True
    option_names = ("state",)
    metadata = {**BatchedEnv.metadata, "render_fps": 50, "actions": ("push left", "push right")}

    GRAVITY, CART, POLE, HALF_LENGTH, FORCE, STEP = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02  # m/s^2, kg, kg, m, N, s
    PLACE_LIMIT, ANGLE_LIMIT = 2.4, 12 * 2 * torch.pi / 360

    def __init__(
        self,
        num_envs: int = 1,
        *,
        velocities: bool = False,
        device: str = "cpu",
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
    ):
        self.velocities = velocities
        high = np.array([2 * self.PLACE_LIMIT, np.inf, 2 * self.ANGLE_LIMIT, np.inf], dtype=np.float32)
        high = high if velocities else high[[0, 2]]
        self.single_observation_space = gym.spaces.Box(-high, high, dtype=np.float32)
        self.single_action_space = gym.spaces.Discrete(2)
        super().__init__(num_envs, device, max_episode_steps, render_mode)

    def _initial(self, key: Tensor, options: dict[str, Any]) -> State:
        physics = 0.1 * random.uniform(random.fold(key, 0), (4,)) - 0.05
        if "state" in options:
            given = torch.as_tensor(options["state"], dtype=torch.float32, device=self.device)
            physics = given.expand(len(key), 4).clone()
        return {"physics": physics}

    def _transition(
        self, state: State, actions: Tensor, key: Tensor
    ) -> tuple[State, Tensor, Tensor, dict[str, Tensor]]:
        place, speed, angle, spin = state["physics"].unbind(-1)
        force = (2 * actions - 1) * self.FORCE
        mass, moment = self.CART + self.POLE, self.POLE * self.HALF_LENGTH
        cos, sin = torch.cos(angle), torch.sin(angle)
        push = (force + moment * spin.square() * sin) / mass
        turn = (self.GRAVITY * sin - cos * push) / (self.HALF_LENGTH * (4.0 / 3.0 - self.POLE * cos.square() / mass))
        pull = push - moment * turn * cos / mass
        step = self.STEP
        physics = torch.stack([place + step * speed, speed + step * pull, angle + step * spin, spin + step * turn], -1)
        fallen = (physics[:, 0].abs() > self.PLACE_LIMIT) | (physics[:, 2].abs() > self.ANGLE_LIMIT)
        return {"physics": physics}, torch.ones_like(place), fallen, {}

    def _observe(self, state: State) -> Tensor:
        return state["physics"].clone() if self.velocities else state["physics"][:, [0, 2]]

    def _info(self, state: State, events: dict[str, Tensor] | None) -> dict[str, Tensor]:
        return {"state": state["physics"].clone()}

    def _image(self, state: State) -> Tensor:
        """A picture of 100 x 150: the cart dark on a line, the pole from it upwards."""
        B = len(state["physics"])
        place, angle = state["physics"][:, 0], state["physics"][:, 2]
        y, x = torch.meshgrid(
            torch.arange(100.0, device=self.device), torch.arange(150.0, device=self.device), indexing="ij"
        )
        middle = (75 + place * 75 / self.PLACE_LIMIT)[:, None, None]
        canvas = torch.full((B, 100, 150, 3), 255, dtype=torch.uint8, device=self.device)
        canvas[:, 80] = 120
        across, up = x - middle, 76 - y
        along = across * torch.sin(angle)[:, None, None] + up * torch.cos(angle)[:, None, None]
        aside = across * torch.cos(angle)[:, None, None] - up * torch.sin(angle)[:, None, None]
        canvas[(across.abs() < 10) & ((y - 80).abs() < 5)] = 40
        canvas[(along > 0) & (along < 55) & (aside.abs() < 2)] = torch.tensor(
            [202, 152, 101], dtype=torch.uint8, device=self.device
        )
        return canvas


def make_recall(**options: Any) -> SingleEnv:
    """One copy of ``Recall``."""
    return SingleEnv(Recall(1, **options))


def make_cart_pole(**options: Any) -> SingleEnv:
    """One copy of ``CartPole``."""
    return SingleEnv(CartPole(1, **options))
