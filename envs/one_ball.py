"""One ball that moves by one law at a time: SCOFF's videos of a single object, with fixed and with switching dynamics.

Source: Goyal et al. 2020, "Factorizing Declarative and Procedural Knowledge in Structured, Dynamical Environments" (SCOFF),
section 5 and appendix F. Its generators were not published; sizes, speeds and what happens at walls are ours.

Lengths are in pixels, times in steps; x runs with the columns of a frame and y with its rows.
"""

import math
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from . import random
from .batched import BatchedEnv, Observation, SingleEnv, State, enlarged
from .bouncing_balls import BouncingBalls

LAWS = {"fixed": ("accelerates", "drifts", "walks at random"), "switching": ("horizontal", "vertical")}
COLUMNS = ("x", "y", "vx", "vy", "law")  # of a state
OBSERVATIONS = ("frames", "state")


class OneBall(BatchedEnv):
    """A ball in a box, whose law is drawn for an episode or changes once within it. The one action does nothing.

    - "fixed": three laws, one for an episode. The ball "accelerates" along its path, "drifts" at a constant velocity, or
      "walks at random", in a new direction at every step, at a constant speed. Nothing in a frame tells which.
    - "switching": two laws, "horizontal" and "vertical": the ball moves at a constant speed between two opposite walls, and
      at ``switch_step`` changes from one law to the other. Two lamps in the lower left corner, one for each law, tell
      which one holds now: the frame of step t shows the law by which the ball moves from there to step t + 1.

    Walls reflect the ball. Observations: "frames" (H, W, 1) uint8, 0 or 255; "state" (5,) float32, whose columns are
    ``COLUMNS`` (law: its number in ``LAWS``). ``frames`` and ``masks`` draw from stored states, ``laws`` reads them.

    ``info`` holds "law" (B,) and "positions" (B, 1, 2), x and y.

    Args:
        num_envs: copies B.
        dynamics: "fixed" or "switching".
        image_size: pixels on a side.
        radius: of the ball; None for a tenth of the frame.
        speed: pixels a step at the start; None for a twentieth of the frame.
        acceleration: pixels a step squared; None for a tenth of the speed.
        switch_step: at which the law changes; the middle of 51 frames.
        observation: "frames" or "state".
        device: where the copies live.
        max_episode_steps: steps after which an episode is truncated.
        render_mode: None or "rgb_array".
    """

    def __init__(
        self,
        num_envs: int = 1,
        *,
        dynamics: str = "fixed",
        image_size: int = 64,
        radius: float | int | None = None,
        speed: float | int | None = None,
        acceleration: float | int | None = None,
        switch_step: int = 25,
        observation: str = "frames",
        device: str = "cpu",
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
    ):
        for name, value, known in (("dynamics", dynamics, tuple(LAWS)), ("observation", observation, OBSERVATIONS)):
            if value not in known:
                raise ValueError(f"{name} is {value!r}; expected one of {', '.join(known)}")
        if switch_step < 1:
            raise ValueError(f"switch_step is {switch_step}; give at least 1")
        self.radius = image_size / 10 if radius is None else float(radius)
        self._painter = BouncingBalls(1, num_balls=1, image_size=image_size, radius=self.radius, device=device)
        self.speed = image_size / 20 if speed is None else float(speed)
        self.acceleration = self.speed / 10 if acceleration is None else float(acceleration)
        if not 0 < self.speed <= image_size / 4 or self.acceleration < 0:
            raise ValueError(
                f"speed is {self.speed:g} and acceleration {self.acceleration:g}; give a speed above 0, at most a quarter of "
                f"the frame of {image_size} pixels, and an acceleration of at least 0"
            )
        self.dynamics, self.image_size, self.switch_step = dynamics, image_size, switch_step
        self.law_names = LAWS[dynamics]
        self.observation = observation
        shape = (image_size, image_size, 1)
        self.single_observation_space: gym.Space[Any] = gym.spaces.Box(0, 255, shape, np.uint8)
        if observation == "state":
            low = np.array([0, 0, -np.inf, -np.inf, 0], dtype=np.float32)
            high = np.array([image_size, image_size, np.inf, np.inf, len(self.law_names) - 1], dtype=np.float32)
            self.single_observation_space = gym.spaces.Box(low, high, dtype=np.float32)
        self.single_action_space = gym.spaces.Discrete(1)
        super().__init__(num_envs, device, max_episode_steps, render_mode)

    def _initial(self, key: Tensor, options: dict[str, Any]) -> State:
        law = random.integers(random.fold(key, 0), len(self.law_names), ())
        place = self.radius + (self.image_size - 2 * self.radius) * random.uniform(random.fold(key, 1), (2,))
        if self.dynamics == "switching":
            sign = 2.0 * random.integers(random.fold(key, 2), 2, (2,)).float() - 1.0
            return {"table": self._table(place, self.speed * sign * _along(law), law), "other": sign}
        velocity = self.speed * _heading(random.fold(key, 2))
        return {"table": self._table(place, velocity, law), "other": torch.zeros_like(velocity)}

    @staticmethod
    def _table(place: Tensor, velocity: Tensor, law: Tensor) -> Tensor:
        return torch.cat([place, velocity, law[:, None].float()], dim=1)

    def _transition(
        self, state: State, actions: Tensor, key: Tensor
    ) -> tuple[State, Tensor, Tensor, dict[str, Tensor]]:
        place, velocity, law = state["table"].split([2, 2, 1], dim=1)
        law = law[:, 0].long()
        if self.dynamics == "fixed":
            pace = velocity.norm(dim=1, keepdim=True)
            faster = velocity * (1.0 + self.acceleration / pace)
            anew = self.speed * _heading(key)
            velocity = torch.where((law == 0)[:, None], faster, torch.where((law == 2)[:, None], anew, velocity))
        # A wall reflects as if the ball flew on in a mirrored box: a triangle wave.
        low, room = self.radius, self.image_size - 2 * self.radius
        unfolded = torch.remainder(place - low + velocity, 2 * room)
        place = low + room - (room - unfolded).abs()
        velocity = torch.where(unfolded > room, -velocity, velocity)
        heading = state["other"]
        if self.dynamics == "switching":
            heading = torch.where(velocity == 0, heading, velocity.sign())
            elapsed = torch.from_numpy(self._elapsed).to(self.device)
            law = torch.where(elapsed == self.switch_step, 1 - law, law)
            velocity = self.speed * heading * _along(law)
        none = torch.zeros(len(place), device=self.device)
        table = self._table(place, velocity, law)
        return {"table": table, "other": heading}, none, none.bool(), {}

    def laws(self, states: Tensor) -> Tensor:
        """By which law the ball moves on from states ``(..., 5)``: numbers ``(...)``, of ``law_names``."""
        return states[..., 4].long()

    def frames(self, states: Tensor) -> Tensor:
        """Draw whole frames.

        Args:
            states: ``(..., 5)``.

        Returns:
            ``(..., H, W, 1)`` uint8.
        """
        drawn = self._painter.frames(self._as_balls(states))
        if self.dynamics == "switching":
            law, side = self.laws(states)[..., None, None, None], max(2, self.image_size // 16)
            lamp, edge = torch.full_like(drawn[..., :side, :side, :], 255), self.image_size - 1
            for number in range(2):
                column = slice(1 + number * (side + 1), 1 + number * (side + 1) + side)
                drawn[..., edge - side : edge, column, :] = torch.where(law == number, lamp, 0)
        return drawn

    def masks(self, states: Tensor) -> Tensor:
        """Which pixels are the ball's, of states ``(..., 5)``: ``(..., 1, H, W)`` bool; the lamps hide nothing of it."""
        return self._painter.masks(self._as_balls(states))

    def _as_balls(self, states: Tensor) -> Tensor:
        """States as tables of one ball ``(..., 1, 10)``."""
        if states.shape[-1] != len(COLUMNS):
            raise ValueError(f"states have shape {tuple(states.shape)}; expected (..., {len(COLUMNS)})")
        ones = torch.ones_like(states[..., :1])
        rest = [self.radius * ones, *[ones] * 4, 0 * ones]
        return torch.cat([states[..., :4], *rest], dim=-1)[..., None, :]

    def _observe(self, state: State) -> Observation:
        return state["table"].clone() if self.observation == "state" else self.frames(state["table"])

    def _info(self, state: State, events: dict[str, Tensor] | None) -> dict[str, Tensor]:
        table = state["table"]
        return {"law": self.laws(table), "positions": table[:, None, :2].clone()}

    def _image(self, state: State) -> Tensor:
        """The frame, enlarged to about 256 pixels."""
        return enlarged(self.frames(state["table"]))


def _heading(key: Tensor) -> Tensor:
    """Random unit vectors ``(B, 2)``, from a whole number of angles, so that they are the same on every device."""
    angle = random.integers(key, 4096, ()) * (2 * math.pi / 4096)
    return torch.stack([angle.double().cos(), angle.double().sin()], dim=-1).float()


def _along(law: Tensor) -> Tensor:
    """(1, 0) for the horizontal law, (0, 1) for the vertical: ``(B, 2)``."""
    return torch.stack([law == 0, law == 1], dim=-1).float()


def make_one_ball(**options: Any) -> SingleEnv:
    """One copy of ``OneBall``."""
    return SingleEnv(OneBall(1, **options))
