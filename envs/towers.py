"""Towers of blocks that may fall, seen from the side: our own scenes in the manner of ShapeStacks.

Source: Groth et al. 2018, "ShapeStacks: Learning Vision-Based Physical Intuition for Generalised Object Stacking", as RPIN
(Qi et al. 2021, "Learning Long-term Visual Dynamics with Region Proposal Interaction Networks") and NPS (Goyal et al. 2021,
Table 3) use it. ShapeStacks is rendered in three dimensions and has cylinders and spheres; ours is flat and has blocks only.

The mechanics are those of rigid bodies with friction and without bounce, in small steps (Macklin et al. 2019, "Small Steps in
Physics Simulation"). Contacts are the corners of one block in or near another or the floor, and all are solved at once. For
this to converge, each of n contacts of a block sees an n-th of its mass (Tonge et al. 2012, "Mass Splitting for Jitter-Free
Parallel Rigid Body Simulation"), and begins with the impulse of the step before.

Lengths are in pixels of a frame of 64 pixels, times in steps; x runs to the right and y upwards from the floor, which is
``FLOOR`` pixels above the lower edge of the frame.
"""

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from . import random
from .batched import BatchedEnv, Observation, SingleEnv, State, enlarged

COLUMNS = ("x", "y", "angle", "vx", "vy", "spin", "width", "height", "red", "green", "blue")  # of a block
SIZES, RED = slice(6, 8), 8
PALETTE = ((230, 25, 75), (60, 180, 75), (0, 130, 200), (255, 225, 25), (145, 30, 180), (70, 240, 240))
OBSERVATIONS = ("frames", "state")
FLOOR = 4.0
GRAVITY = 0.3  # pixels a step squared: a block falls by 34 pixels in 15 steps
FRICTION = 0.6

_FRAME = 64.0
_SUBSTEPS, _ROUNDS = 20, 8  # of impulses in each substep
_SETTLING = 100  # substeps in which the impulses of a tower at rest are found
_NEAR = 0.5  # pixels within which corners are contacts
_SLOP, _RECOVERY = 0.02, 0.2  # depth that is left alone, and the share of the rest that is pushed out in a substep,
_GENTLE = 0.2  # though not faster than this
_MAX_BLOCKS = len(PALETTE)


class Towers(BatchedEnv):
    """A tower of blocks, each put down somewhere on the one below; where the blocks above stand over an edge, they fall.

    The one action does nothing. Widths and heights are 7 to 14 pixels, and the middle of each block is at most ``overhang``
    of half the width of the one below to a side of it. Everything begins at rest.

    Observations: "frames" (H, W, 3) uint8; "state" (num_blocks, 11) float32 from the lowest block up, whose columns are
    ``COLUMNS`` (angle in radians, counterclockwise). ``frames`` and ``masks`` draw from stored states, ``boxes`` tells where
    each block is, ``stands`` whether a tower at rest will stand.

    ``info`` holds "positions" (B, num_blocks, 2), x and y.

    Args:
        num_envs: copies B.
        num_blocks: of a tower, 1 to 6; 3 in RPIN's training, 4 in its transfer.
        overhang: 0 to 1.5; above 1 a block may be put down where it cannot lie.
        image_size: pixels on a side.
        observation: "frames" or "state".
        device: where the copies live.
        max_episode_steps: steps after which an episode is truncated.
        render_mode: None or "rgb_array".
    """

    def __init__(
        self,
        num_envs: int = 1,
        *,
        num_blocks: int = 3,
        overhang: float | int = 1.2,
        image_size: int = 64,
        observation: str = "frames",
        device: str = "cpu",
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
    ):
        if observation not in OBSERVATIONS:
            raise ValueError(f"observation is {observation!r}; expected one of {', '.join(OBSERVATIONS)}")
        if not 1 <= num_blocks <= _MAX_BLOCKS or image_size < 16 or not 0 <= overhang <= 1.5:
            raise ValueError(
                f"num_blocks is {num_blocks}, image_size {image_size} and overhang {overhang}; give 1 to {_MAX_BLOCKS}, "
                "at least 16 pixels, and 0 to 1.5"
            )
        self.num_blocks, self.overhang = num_blocks, float(overhang)
        self.image_size, self.observation = image_size, observation
        shape = (image_size, image_size, 3)
        self.single_observation_space: gym.Space[Any] = gym.spaces.Box(0, 255, shape, np.uint8)
        if observation == "state":
            bound = np.full((num_blocks, len(COLUMNS)), 1e4, dtype=np.float32)
            self.single_observation_space = gym.spaces.Box(-bound, bound, dtype=np.float32)
        self.single_action_space = gym.spaces.Discrete(1)
        super().__init__(num_envs, device, max_episode_steps, render_mode)

        def on_device(values: Any, dtype: torch.dtype) -> Tensor:
            return torch.as_tensor(values, dtype=dtype, device=self.device)

        self._palette = on_device(PALETTE, torch.float32) / 255
        self._corners = on_device([[-1, -1], [1, -1], [1, 1], [-1, 1]], torch.float64) / 2
        # A corner of one block and another block, or the floor, which is the last body.
        one, corner, other = np.meshgrid(np.arange(num_blocks), np.arange(4), np.arange(num_blocks + 1), indexing="ij")
        apart = one != other
        self._one, self._corner, self._other = (on_device(part[apart], torch.int64) for part in (one, corner, other))
        self._floor = self._other == num_blocks
        whose = torch.eye(num_blocks + 1, dtype=torch.float64, device=self.device)[:, :num_blocks]
        self._of_one, self._of_other = whose[self._one], whose[self._other]

    def _initial(self, key: Tensor, options: dict[str, Any]) -> State:
        blocks = (self.num_blocks,)
        sizes = 7.0 + 7.0 * random.uniform(random.fold(key, 0), (*blocks, 2))
        width, height = sizes.unbind(-1)
        aside = self.overhang * (2.0 * random.uniform(random.fold(key, 1), blocks) - 1.0) * 0.5
        aside = aside * torch.cat([width[:, :1], width[:, :-1]], dim=1)
        aside[:, 0] = 12.0 * (random.uniform(random.fold(key, 2), ()) - 0.5)
        x = _FRAME / 2 + aside.cumsum(1)
        y = height.cumsum(1) - height / 2
        order = random.choice(random.fold(key, 3), len(PALETTE), self.num_blocks)
        still = torch.zeros(len(key), self.num_blocks, 4, device=self.device)
        table = torch.cat([x[..., None], y[..., None], still, sizes, self._palette[order]], dim=-1)
        return {"table": table, "impulses": self._at_rest(table.double())}

    def _at_rest(self, table: Tensor) -> Tensor:
        """The impulses with which a tower that does not move yet bears its weight."""
        impulses = table.new_zeros(len(table), len(self._one), 2)
        for _ in range(_SETTLING):
            impulses = self._substep(table, impulses)[2]
        return impulses

    def _transition(
        self, state: State, actions: Tensor, key: Tensor
    ) -> tuple[State, Tensor, Tensor, dict[str, Tensor]]:
        table, impulses = state["table"].double(), state["impulses"]
        for _ in range(_SUBSTEPS):
            pose, speed, impulses = self._substep(table, impulses)
            table = torch.cat([pose, speed, table[..., 6:]], dim=-1)
        none = torch.zeros(len(key), device=self.device)
        return {"table": table.float(), "impulses": impulses}, none, none.bool(), {}

    def _substep(self, table: Tensor, impulses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pull, solve the contacts, and move.

        Args:
            table: ``(B, blocks, 11)`` float64.
            impulses: of contacts in the substep before, along the normal and across it, ``(B, contacts, 2)``.

        Returns:
            Pose and speed ``(B, blocks, 3)``, and the impulses.
        """
        h = 1.0 / _SUBSTEPS
        pose, size = table[..., :3], table[..., SIZES]
        mass = size.prod(-1)
        turning = 12.0 / (mass * size.square().sum(-1))
        inverse = torch.stack([1.0 / mass, 1.0 / mass, turning], dim=-1)[:, None]  # (B, 1, blocks, 3)
        speed = table[..., 3:6].clone()
        speed[..., 1] -= GRAVITY * h
        speed = speed.flatten(1)[..., None]
        depth, jacobian = self._contacts(pose, size)
        back = (
            (jacobian * inverse[:, :, None]).flatten(3).flatten(1, 2).transpose(1, 2)
        )  # what unit impulses do, (B, 3 blocks, 2 C)
        flat = jacobian.flatten(3).flatten(1, 2)  # (B, 2 C, 3 blocks)
        # Along the normal a contact may come as near as its gap allows; what is too deep comes out a little at a time.
        aim = torch.where(depth < 0, depth, _RECOVERY * (depth - _SLOP).clamp(min=0.0)) / h
        target = torch.stack([aim.clamp(max=_GENTLE), torch.zeros_like(aim)], dim=-1)
        impulses = torch.where((depth > -_NEAR)[..., None], impulses, 0.0)
        speed = speed + back @ impulses.flatten(1)[..., None]
        nearing = (flat @ speed)[..., 0].unflatten(1, depth.shape[1:] + (2,))[..., 0] < aim
        active = (depth > -_NEAR) & ((impulses[..., 0] > 0) | nearing)
        touches = (jacobian.abs().amax((2, 4)) > 0) & active[..., None]  # (B, C, blocks)
        shared = (
            touches.sum(1, keepdim=True).clamp(min=1)[..., None] * inverse
        )  # each contact sees its part of the mass
        share = 1.0 / (jacobian.square() * shared[:, :, None]).sum((3, 4)).clamp(min=1e-12)  # (B, C, 2)
        for _ in range(_ROUNDS):
            wanted = impulses + share * (target - (flat @ speed)[..., 0].unflatten(1, depth.shape[1:] + (2,)))
            along = wanted[..., 0].clamp(min=0.0) * active
            across = torch.minimum(torch.maximum(wanted[..., 1], -FRICTION * along), FRICTION * along)
            wanted = torch.stack([along, across], dim=-1)
            speed = speed + back @ (wanted - impulses).flatten(1)[..., None]
            impulses = wanted
        moved = speed[..., 0].unflatten(1, pose.shape[1:])
        return pose + h * moved, moved, impulses

    def _contacts(self, pose: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        """Of every corner and other body: how deep it is within, and how they part as blocks move.

        Depth ``(B, C)``, below zero for a gap; and what the speed of every block adds to that at which the two part, along
        the way out and across it, ``(B, C, 2, blocks, 3)``.
        """
        arms = _turned(self._corners * size[..., None, :], pose[..., 2, None])  # (B, blocks, 4, 2)
        arm = arms[:, self._one, self._corner]
        corner = pose[:, self._one, :2] + arm
        others = torch.nn.functional.pad(pose, (0, 0, 0, 1))[:, self._other]  # the floor is the last
        from_other = corner - others[..., :2]
        within = _turned(from_other, -others[..., 2])
        room = torch.nn.functional.pad(size, (0, 0, 0, 1))[:, self._other] / 2 - within.abs()
        depth, side = room.min(-1)
        axis = torch.nn.functional.one_hot(side, 2) * torch.where(within < 0, -1.0, 1.0)
        up = torch.tensor([0.0, 1.0], dtype=pose.dtype, device=pose.device)
        normal = torch.where(self._floor[:, None], up, _turned(axis, others[..., 2]))
        depth = torch.where(self._floor, -corner[..., 1], depth)
        frame = torch.stack([normal, torch.stack([-normal[..., 1], normal[..., 0]], dim=-1)], dim=-2)  # (B, C, 2, 2)
        parts = [_motion(frame, arm), -_motion(frame, from_other)]
        parting = torch.einsum("bcdi,ck->bcdki", parts[0], self._of_one)
        return depth, parting + torch.einsum("bcdi,ck->bcdki", parts[1], self._of_other)

    # What is known of a state.

    def stands(self, states: Tensor) -> Tensor:
        """Whether a tower at rest would stand: above each block the middle of all that lies there is above the block.

        Args:
            states: ``(..., num_blocks, 11)``, as at the start of an episode.

        Returns:
            ``(...)`` bool.
        """
        x, size = states[..., 0].double(), states[..., SIZES].double()
        mass = size.prod(-1)
        above = (mass * x).flip(-1).cumsum(-1).flip(-1) / mass.flip(-1).cumsum(-1).flip(-1)  # block k and all above it
        left = torch.maximum(x[..., :-1] - size[..., :-1, 0] / 2, x[..., 1:] - size[..., 1:, 0] / 2)
        right = torch.minimum(x[..., :-1] + size[..., :-1, 0] / 2, x[..., 1:] + size[..., 1:, 0] / 2)
        return ((above[..., 1:] >= left) & (above[..., 1:] <= right)).all(-1)

    def boxes(self, states: Tensor) -> Tensor:
        """The smallest upright boxes around the blocks of states ``(..., num_blocks, 11)``, in pixels of the frame.

        Returns:
            ``(..., num_blocks, 4)``: left, top, right and bottom, as columns and rows; what is outside the frame included.
        """
        self._refuse_others(states)
        cos, sin = states[..., 2].double().cos().abs(), states[..., 2].double().sin().abs()
        width, height = states[..., 6].double(), states[..., 7].double()
        half = torch.stack([cos * width + sin * height, sin * width + cos * height], dim=-1) / 2
        scale = self.image_size / _FRAME
        middle = torch.stack([states[..., 0].double(), _FRAME - FLOOR - states[..., 1].double()], dim=-1)
        return (torch.cat([middle - half, middle + half], dim=-1) * scale).float()

    def masks(self, states: Tensor) -> Tensor:
        """Which pixels show which block, ``(..., num_blocks, H, W)`` bool, of states ``(..., num_blocks, 11)``."""
        self._refuse_others(states)
        x, y, angle, width, height = states.double()[..., [0, 1, 2, 6, 7]][..., None, None].unbind(-3)
        pixel = (
            (torch.arange(self.image_size, device=states.device, dtype=torch.float64) + 0.5) * _FRAME / self.image_size
        )
        across, up = pixel - x, _FRAME - FLOOR - pixel[:, None] - y
        cos, sin = angle.cos(), angle.sin()
        inside = ((cos * across + sin * up).abs() <= width / 2) & ((cos * up - sin * across).abs() <= height / 2)
        before = inside.cumsum(-3) - inside.long()  # where two touch, the lower one is seen
        return inside & (before == 0)

    def frames(self, states: Tensor) -> Tensor:
        """Draw whole frames, ``(..., H, W, 3)`` uint8, of states ``(..., num_blocks, 11)``: blocks, and a grey floor."""
        colour = (255 * states[..., RED : RED + 3]).round().to(torch.uint8)
        drawn = (self.masks(states)[..., None] * colour[..., None, None, :]).sum(-4, dtype=torch.uint8)
        floor = round(FLOOR * self.image_size / _FRAME)
        drawn[..., self.image_size - floor :, :, :] = 90
        return drawn

    def _refuse_others(self, states: Tensor) -> None:
        if states.shape[-2:] != (self.num_blocks, len(COLUMNS)):
            raise ValueError(
                f"states have shape {tuple(states.shape)}; expected (..., {self.num_blocks}, {len(COLUMNS)})"
            )

    def _observe(self, state: State) -> Observation:
        return state["table"].clone() if self.observation == "state" else self.frames(state["table"])

    def _info(self, state: State, events: dict[str, Tensor] | None) -> dict[str, Tensor]:
        return {"positions": state["table"][..., :2].clone()}

    def _image(self, state: State) -> Tensor:
        """The frame, enlarged to about 256 pixels."""
        return enlarged(self.frames(state["table"]))


def _motion(frame: Tensor, arm: Tensor) -> Tensor:
    """What speed and spin add to how a point at ``arm (..., 2)`` moves along directions ``(..., 2, 2)``: ``(..., 2, 3)``."""
    turn = arm[..., None, 0] * frame[..., 1] - arm[..., None, 1] * frame[..., 0]
    return torch.cat([frame, turn[..., None]], dim=-1)


def _turned(vectors: Tensor, angle: Tensor) -> Tensor:
    """Vectors ``(..., 2)`` turned counterclockwise by angles ``(...)``."""
    cos, sin = angle.cos(), angle.sin()
    x, y = vectors[..., 0], vectors[..., 1]
    return torch.stack([cos * x - sin * y, sin * x + cos * y], dim=-1)


def make_towers(**options: Any) -> SingleEnv:
    """One copy of ``Towers``."""
    return SingleEnv(Towers(1, **options))
