"""Elastic balls in a closed box: the frames of SCOFF's bouncing balls and the crops of S2RM's.

Sources: Goyal et al. 2020, "Object Files and Schemata" (SCOFF: 4Balls, 678Balls, Curtain, Coloured 678Balls), whose data
are those of van Steenkiste et al. 2018, "Relational Neural Expectation Maximization" (R-NEM); Rahaman et al. 2020,
"Spatially Structured Recurrent Modules" (S2RM: crops of 48x48 frames, a fixed ball in the middle).

Departures:
- The generators of these data sets were not published. Radii, speed and the place of the curtain are ours.
- Curtain. R-NEM calls it invisible: nothing shows but that balls vanish behind it. SCOFF calls it central. Ours is a
  black square in the middle, half as wide as the frame.
- Pixels are 0 or 255 without soft edges.

Lengths are in pixels, times in steps. The box is the frame, x runs with its columns and y with its rows, and the pixel
(row, column) has its centre at x = column + 1/2, y = row + 1/2.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from . import random
from .batched import BatchedEnv, Observation, SingleEnv, State, enlarged

COLUMNS = ("x", "y", "vx", "vy", "radius", "present", "red", "green", "blue", "fixed")  # of a state table
RADIUS, PRESENT, RED, FIXED = 4, 5, 6, 9
MAX_BALLS = 8
OBSERVATIONS = ("frames", "state", "crops")
PALETTE = (  # the first n are told apart best; each channel is k / 255
    (230, 25, 75),
    (60, 180, 75),
    (0, 130, 200),
    (255, 225, 25),
    (245, 130, 48),
    (145, 30, 180),
    (70, 240, 240),
    (240, 50, 230),
)

DEFAULTS: dict[str, Any] = {
    "num_balls": 3,
    "radius": None,
    "fixed_ball": False,
    "curtain": False,
    "colours": False,
    "image_size": 48,
    "observation": "frames",
}
PRESETS: dict[str, dict[str, Any]] = {  # what differs from the defaults
    "4balls": {"num_balls": 4, "radius": (4.0, 8.0), "image_size": 64},
    "678balls": {"num_balls": (6, 7, 8), "radius": (4.0, 8.0), "image_size": 64},
    "curtain": {"num_balls": 3, "curtain": True, "image_size": 64},
    "coloured": {"num_balls": (6, 7, 8), "radius": (4.0, 8.0), "image_size": 64, "colours": 4},
    "s2rm": {"num_balls": 3, "fixed_ball": True, "image_size": 48, "observation": "crops"},
}

_MAX_EVENTS = 256  # of one copy in one step; a copy that has more stands still for the rest of the step
_MAX_ROUNDS = 100  # of drawing start positions; then the balls stand on a grid
_ANGLES = 4096
_CACHED = 1 << 17  # pixel rows of balls drawn at a time on the CPU: more would leave its cache


class BouncingBalls(BatchedEnv):
    """Balls that fly straight and bounce off each other and the walls without loss, seen from above.

    The one action does nothing. The mass of a ball is its radius squared. All balls start at the same speed in random
    directions, at places uniform among those where they do not overlap (each ball in turn given the others before it; on
    a random grid where 100 rounds of draws do not suffice).

    Observations: "frames" (H, W, C) uint8, C = 3 with ``colours``, else 1; "state", the table (rows, 10) float32 whose
    columns are ``COLUMNS``; "crops", a dict of "views" (N, crop_size, crop_size, C) uint8 around random pixels drawn at
    every step, their "positions" (N, 2) float32 row and column, and "mask" (N,) int8, all ones. The table has a row for
    every ball an episode may have, zeros for those it has not, and last the fixed ball, if any. ``frames``,
    ``masks`` and ``crops`` draw from stored tables.

    ``reset(options={"state": (B, rows, 10)})`` sets the table. ``info`` holds "positions" (B, rows, 2), x and y.

    Args:
        num_envs: copies B.
        num_balls: 1 to 8, or several numbers of which each episode draws one; None: the preset's, else 3.
        radius: one number, or (low, high) from which each ball draws its own; None: the preset's, else 5/48 of the frame.
        fixed_ball: an additional ball in the middle that nothing moves; None: the preset's, else no.
        curtain: a black square hides the middle of the frame; None: the preset's, else no.
        colours: frames are RGB; True: every ball has a colour of its own, n: the balls share n colours; None: the preset's,
            else no.
        image_size: pixels on a side; None: the preset's, else 48.
        speed: pixels a step at the start; None: a twentieth of the frame.
        observation: "frames", "state" or "crops"; None: the preset's, else frames.
        num_crops: crops N of a step.
        crop_size: pixels on a side of a crop, odd.
        preset: "4balls", "678balls", "curtain", "coloured" (SCOFF) or "s2rm"; options given beside it win.
        device: where the copies live.
        max_episode_steps: steps after which an episode is truncated.
        render_mode: None or "rgb_array".
    """

    option_names = ("state",)

    def __init__(
        self,
        num_envs: int = 1,
        *,
        num_balls: int | Sequence[int] | None = None,
        radius: float | int | Sequence[float | int] | None = None,
        fixed_ball: bool | None = None,
        curtain: bool | None = None,
        colours: bool | int | None = None,
        image_size: int | None = None,
        speed: float | int | None = None,
        observation: str | None = None,
        num_crops: int = 10,
        crop_size: int = 11,
        preset: str | None = None,
        device: str = "cpu",
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
    ):
        if preset is not None and preset not in PRESETS:
            raise ValueError(f"preset is {preset!r}; expected one of {list(PRESETS)}")
        chosen = DEFAULTS | PRESETS.get(preset or "", {})
        given = {
            "num_balls": num_balls,
            "radius": radius,
            "fixed_ball": fixed_ball,
            "curtain": curtain,
            "colours": colours,
            "image_size": image_size,
            "observation": observation,
        }
        chosen |= {name: value for name, value in given.items() if value is not None}
        size = chosen["image_size"]
        if size < 8:
            raise ValueError(f"image_size is {size}; give at least 8 pixels")
        counts = chosen["num_balls"]
        self.counts = (counts,) if isinstance(counts, int) else tuple(counts)
        if not self.counts or not all(1 <= count <= MAX_BALLS for count in self.counts):
            raise ValueError(f"num_balls is {counts}; give 1 to {MAX_BALLS}, or several such numbers")
        if chosen["observation"] not in OBSERVATIONS:
            raise ValueError(f"observation is {chosen['observation']!r}; expected one of {list(OBSERVATIONS)}")
        if num_crops < 1 or not 1 <= crop_size <= 63 or crop_size % 2 == 0:
            raise ValueError(
                f"num_crops is {num_crops} and crop_size {crop_size}; give at least one crop of an odd size up to 63"
            )
        colours_given = chosen["colours"]
        colour_count = len(PALETTE) * colours_given if isinstance(colours_given, bool) else colours_given
        if colours_given is not False and not 1 <= colour_count <= len(PALETTE):
            raise ValueError(f"colours is {chosen['colours']}; give True, False or a number of 1 to {len(PALETTE)}")
        self.speed = size / 20 if speed is None else float(speed)
        if not 0 <= self.speed <= size:
            raise ValueError(f"speed is {speed}; give 0 to {size} pixels a step, the size of the frame")
        extent = chosen["radius"]
        if extent is None:
            extent = size * 5 / 48
        low, high = (extent, extent) if isinstance(extent, (int, float)) else extent if len(extent) == 2 else (0, 0)
        self.image_size = size
        self.radius = float(low), float(high)
        self.fixed_ball, self.curtain = bool(chosen["fixed_ball"]), bool(chosen["curtain"])
        self.num_colours = colour_count
        self.channels = 3 if colour_count else 1
        self.observation = chosen["observation"]
        self.num_crops, self.crop_size = num_crops, crop_size
        self.rows = max(self.counts) + self.fixed_ball
        cells = self._cells()
        if not 0 < low <= high or len(cells) < max(self.counts):
            raise ValueError(
                f"radius is {extent}; give a number above 0 or (low, high) at which {max(self.counts)} balls"
                f"{' and a fixed one' * self.fixed_ball} fit a square grid in a frame of {size} pixels"
            )
        self.single_observation_space = self._space()
        self.single_action_space = gym.spaces.Discrete(1)
        super().__init__(num_envs, device, max_episode_steps, render_mode)

        def on_device(values: Any, dtype: torch.dtype) -> Tensor:
            return torch.as_tensor(values, dtype=dtype, device=self.device)

        angles = np.arange(_ANGLES) * (2 * np.pi / _ANGLES)
        self._directions = on_device(np.stack([np.cos(angles), np.sin(angles)], axis=1), torch.float32)
        self._grid = on_device(cells, torch.float32)
        self._counts = on_device(self.counts, torch.int64)
        self._palette = on_device(PALETTE, torch.float32) / 255
        first, second = np.triu_indices(self.rows, 1)
        self._pairs = on_device(first, torch.int64), on_device(second, torch.int64)
        index = np.tile(np.arange(self.rows), 2)  # of the ball an event is about: walls in x, in y, then pairs
        self._first = on_device(np.concatenate([index, first]), torch.int64)
        self._second = on_device(np.concatenate([index, second]), torch.int64)
        kind = np.repeat([0, 1, 2], [self.rows, self.rows, len(first)])
        self._walls = on_device(np.eye(3)[:2, kind], torch.float64)  # (2, events): the wall's normal, 0 for a pair
        before = np.tril(np.ones((self.rows, self.rows), dtype=bool), -1)
        if self.fixed_ball:
            before[:, -1], before[-1] = True, False
            before[-1, -1] = False
        self._before = on_device(before, torch.bool)
        self._curtain = size // 4, size - size // 4
        bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") * np.uint8(255)
        self._pixels = on_device(bits.view(np.int64)[:, 0], torch.int64)  # (256,) eight bits as eight pixels ...
        rgb = np.ascontiguousarray(bits.repeat(3, axis=1).view(np.int64).T)
        self._rgb_pixels = on_device(rgb, torch.int64)  # (3, 256) of three channels, in three words
        self._first_pixel = torch.arange(0, size, 64, device=self.device)  # of each word
        self._from_pixel = on_device([-1 << pixel for pixel in range(64)] + [0], torch.int64)  # bits from a pixel on
        self._open = torch.full((size, len(self._first_pixel)), -1, device=self.device)  # bits the curtain leaves
        if self.curtain:
            start, stop = self._curtain
            begin, end = (self._from_pixel[(pixel - self._first_pixel).clamp(0, 64)] for pixel in self._curtain)
            self._open[start:stop] = ~(begin & ~end)

    def _cells(self) -> np.ndarray:
        """Places (cells, 2) where balls of the greatest radius stand without overlap, clear of the fixed ball."""
        size, high = self.image_size, self.radius[1]
        side = int(np.ceil(size / (2 * high))) - 1 if high > 0 else 0  # cells a little wider than a ball
        if side == 0:
            return np.zeros((0, 2))
        line = (np.arange(side) + 0.5) * (size / side)
        cells = np.stack(np.meshgrid(line, line), axis=-1).reshape(-1, 2)
        if self.fixed_ball:
            cells = cells[np.linalg.norm(cells - size / 2, axis=1) >= 2 * high]
        return cells

    def _space(self) -> gym.Space[Any]:
        size, crop, N = self.image_size, self.crop_size, self.num_crops
        if self.observation == "frames":
            return gym.spaces.Box(0, 255, (size, size, self.channels), np.uint8)
        if self.observation == "crops":
            return gym.spaces.Dict(
                {
                    "views": gym.spaces.Box(0, 255, (N, crop, crop, self.channels), np.uint8),
                    "positions": gym.spaces.Box(0.0, size - 1.0, (N, 2), np.float32),
                    "mask": gym.spaces.MultiBinary(N),
                }
            )
        low, high = self.radius
        fastest = 1.001 * self.speed * self.rows**0.5 * high / low + 1e-6  # one ball has all the energy
        top = np.array([size, size, fastest, fastest, size / 2, 1, 1, 1, 1, 1], dtype=np.float32)
        bottom = np.array([0, 0, -fastest, -fastest, 0, 0, 0, 0, 0, 0], dtype=np.float32)
        return gym.spaces.Box(np.tile(bottom, (self.rows, 1)), np.tile(top, (self.rows, 1)), dtype=np.float32)

    # Start states.

    def _initial(self, key: Tensor, options: dict[str, Any]) -> State:
        table = self._table_from(options["state"]) if "state" in options else self._draw_table(key)
        return self._with_centres(table, key)

    def _with_centres(self, table: Tensor, key: Tensor) -> State:
        """The state of a table; with crops the pixels they are drawn around belong to it."""
        if self.observation != "crops":
            return {"table": table}
        return {"table": table, "centres": random.integers(random.fold(key, 0), self.image_size, (self.num_crops, 2))}

    def _draw_table(self, key: Tensor) -> Tensor:
        B, rows = len(key), self.rows
        count = self._counts[random.integers(random.fold(key, 1), len(self.counts), ())]
        present = torch.arange(rows, device=self.device) < count[:, None]
        fixed = torch.zeros_like(present)
        if self.fixed_ball:
            fixed[:, -1] = present[:, -1] = True
        low, high = self.radius
        radius = (low + (high - low) * random.uniform(random.fold(key, 2), (rows,))) * present
        heading = self._directions[random.integers(random.fold(key, 3), _ANGLES, (rows,))]
        velocity = self.speed * heading * (present & ~fixed)[..., None]
        colour = torch.ones(B, rows, 3, device=self.device)
        if self.num_colours:
            order = random.choice(random.fold(key, 4), self.num_colours, self.num_colours)
            colour = self._palette[order[:, torch.arange(rows, device=self.device) % self.num_colours]]
            colour = colour.masked_fill(fixed[..., None], 1.0)
        place = self._places(random.fold(key, 5), radius, present, fixed)
        columns = [velocity, radius[..., None], present[..., None], colour * present[..., None], fixed[..., None]]
        return torch.cat([place, *(column.to(torch.float32) for column in columns)], dim=-1)

    def _places(self, key: Tensor, radius: Tensor, present: Tensor, fixed: Tensor) -> Tensor:
        """Places (B, rows, 2) without overlap: balls that overlap one before them are drawn again, round by round."""
        place = self._uniform_places(random.fold(key, 0), radius, fixed)
        left = torch.arange(len(key), device=self.device)
        for turn in range(1, _MAX_ROUNDS + 1):
            bad = self._overlap(place[left], radius[left], present[left])
            unsettled = bad.any(-1)
            left, bad = left[unsettled], bad[unsettled]
            if len(left) == 0:
                return place
            again = self._uniform_places(random.fold(key[left], turn), radius[left], fixed[left])
            place[left] = torch.where(bad[..., None], again, place[left])
        cells = random.choice(random.fold(key[left], 0, 1), len(self._grid), max(self.counts))
        place[left, : max(self.counts)] = self._grid[cells]
        return place * present[..., None]

    def _uniform_places(self, key: Tensor, radius: Tensor, fixed: Tensor) -> Tensor:
        place = radius[..., None] + (self.image_size - 2 * radius[..., None]) * random.uniform(key, (self.rows, 2))
        return torch.where(fixed[..., None], self.image_size / 2, place) * (radius > 0)[..., None]

    def _overlap(self, place: Tensor, radius: Tensor, present: Tensor) -> Tensor:
        """Whether a ball (B, rows) overlaps one before it; the fixed ball is before all."""
        apart = place[:, :, None] - place[:, None]
        reach = radius[:, :, None] + radius[:, None]
        near = apart[..., 0].square() + apart[..., 1].square() < reach.square()
        return (near & present[:, :, None] & present[:, None] & self._before).any(-1)

    def _table_from(self, value: Any) -> Tensor:
        table = torch.as_tensor(value, dtype=torch.float32, device=self.device).clone()
        table = table[None] if table.dim() == 2 else table
        expected = (self.num_envs, self.rows, len(COLUMNS))
        if table.shape != expected:
            raise ValueError(f"state has shape {tuple(table.shape)}; expected {expected}, columns {', '.join(COLUMNS)}")
        if not bool(table.isfinite().all()):
            raise ValueError("state has entries that are not finite; give numbers")
        flags = table[..., [PRESENT, FIXED]]
        if not bool(((flags == 0) | (flags == 1)).all()):
            raise ValueError("state's columns present and fixed must be 0 or 1")
        present, radius = table[..., PRESENT] == 1, table[..., RADIUS]
        table = table * present[..., None]
        if not bool((radius[present] > 0).all()):
            raise ValueError("state has a ball of radius 0 or less; give a radius above 0, or present 0")
        beyond = (table[..., :2] - self.image_size / 2).abs() + table[..., RADIUS, None] - self.image_size / 2
        if bool((beyond > 1e-3).any()):
            raise ValueError(
                f"state has a ball beyond the walls; x and y are radius to {self.image_size} - radius in this frame"
            )
        if bool(self._overlap(table[..., :2], table[..., RADIUS] - 1e-3, present).any()):
            raise ValueError("state has balls that overlap; keep centres the sum of the radii apart")
        table[..., 2:4] *= 1 - table[..., FIXED, None]
        return table

    # Motion.

    def _transition(
        self, state: State, actions: Tensor, key: Tensor
    ) -> tuple[State, Tensor, Tensor, dict[str, Tensor]]:
        table = self._move(state["table"])
        rewards = torch.zeros(self.num_envs, device=self.device)
        terminated = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        return self._with_centres(table, key), rewards, terminated, {}

    def _move(self, table: Tensor) -> Tensor:
        """One step, from bounce to bounce: every copy flies to its next bounce, whose two parties then bounce.

        Of bounces at the same moment one comes after the other. Copies whose step is over drop out (finding out which is
        one wait for the device a bounce). Only single IEEE operations are used, so a copy's values do not depend on
        the others in the batch.
        """
        half = self.image_size / 2
        x, y, vx, vy, radius, *_, fixed = table.to(torch.float64).permute(2, 1, 0)  # each (rows, copies)
        lightness = (1 - fixed) / (radius * radius)  # one over the mass
        balls = torch.stack([x - half, y - half, vx, vy, radius, lightness])
        left, copies, moved = balls.new_ones(len(table)), torch.arange(len(table), device=self.device), balls
        for turn in range(_MAX_EVENTS):
            waits = self._waits(balls)
            wait = waits.amin(0)
            balls[:2] += balls[2:4] * torch.minimum(wait, left)
            if turn:
                moved.index_copy_(2, copies, balls)
            bouncing = (wait < left).nonzero()[:, 0]
            if len(bouncing) == 0:
                break
            event = waits.index_select(1, bouncing).argmin(0)
            copies = copies[bouncing]
            left = (left - wait)[bouncing]
            balls = self._bounced(balls.index_select(2, bouncing), event)
        else:
            moved.index_copy_(2, copies, balls)
        moved[:2] += half
        return torch.cat([moved[:4].permute(2, 1, 0).to(torch.float32), table[..., 4:]], dim=-1)

    def _waits(self, balls: Tensor) -> Tensor:
        """Time (events, copies) to each bounce if it came first: walls in x, walls in y, pairs; inf for never."""
        place, velocity, radius = balls[:2], balls[2:4], balls[4]
        walls = (self.image_size / 2 - radius - place * velocity.sign()) / velocity.abs()
        one, other = balls[:5].index_select(1, self._pairs[0]), balls[:5].index_select(1, self._pairs[1])
        apart = one[:4] - other[:4]
        reach = one[4] + other[4]
        towards = apart[:2] * apart[2:]
        towards = towards[0] + towards[1]
        x2, y2, vx2, vy2 = apart * apart
        gap = x2 + y2 - reach * reach
        chance = towards * towards - (vx2 + vy2) * gap
        wait = gap.clamp_(min=0.0) / (chance.clamp(min=0.0).sqrt_() - towards)  # the smaller root, without cancellation
        return torch.cat(
            [walls.clamp_(min=0.0).flatten(0, 1), wait.masked_fill_((towards >= 0) | (chance < 0), torch.inf)]
        )

    def _bounced(self, balls: Tensor, event: Tensor) -> Tensor:
        """The balls after each copy's event (copies,); a wall is a party of infinite mass."""
        copies = torch.arange(len(event), device=self.device)
        i = self._first[event] * len(event) + copies
        j = self._second[event] * len(event) + copies
        wall = self._walls.index_select(1, event)
        at_wall = i == j
        flat = balls.flatten(1)
        one, other = flat.index_select(1, i), flat.index_select(1, j)
        normal = torch.where(at_wall, wall, one[:2] - other[:2])
        length2 = normal * normal
        pull = torch.where(at_wall, one[2:4], one[2:4] - other[2:4]) * normal
        light_i, light_j = one[5], other[5].masked_fill(at_wall, 0.0)
        strength = 2 * (pull[0] + pull[1]) / ((length2[0] + length2[1]) * (light_i + light_j))
        impulse = strength * normal
        velocity = flat[2:4]
        velocity.index_copy_(1, j, other[2:4] + light_j * impulse)
        velocity.index_copy_(1, i, one[2:4] - light_i * impulse)
        return balls

    # Views.

    def frames(self, states: Tensor) -> Tensor:
        """Draw whole frames: a pixel is lit if its centre lies in a ball, later balls in front, the curtain before all.

        Args:
            states: tables (..., rows, 10).

        Returns:
            (..., H, W, C) uint8 on the tables' device.
        """
        tables, axes = self._flat(states)
        size = self.image_size
        words = tables.new_empty((len(tables), size, _octets(size), self.channels), dtype=torch.int64)  # of eight bytes
        for part in self._parts(tables, size):
            bits = self._bits(tables[part])
            if self.num_colours:
                self._paint(bits, tables[part], words[part])
            else:
                torch.index_select(self._pixels, 0, _numbers(bits[0], size), out=words[part].view(-1))
        return _bytes(words, size).view(*axes, size, size, self.channels)

    def masks(self, states: Tensor) -> Tensor:
        """Which pixels of the frames show which ball; of balls behind others, or behind the curtain, what is seen of them.

        Args:
            states: tables (..., rows, 10).

        Returns:
            (..., rows, H, W) bool on the tables' device.
        """
        tables, axes = self._flat(states)
        size = self.image_size
        words = tables.new_empty((self.rows, len(tables), size, _octets(size), 1), dtype=torch.int64)
        for part in self._parts(tables, size):
            numbers = _numbers(self._bits(tables[part], apart=True), size)
            words[:, part] = self._pixels.index_select(0, numbers).view(words[:, part].shape)
        return (_bytes(words, size)[..., 0] > 0).movedim(0, 1).reshape(*axes, self.rows, size, size)

    def crops(self, states: Tensor, positions: Tensor) -> Tensor:
        """Draw squares of ``crop_size`` cut from the frames, without the frames; beyond the frame all is 0.

        Args:
            states: tables (..., rows, 10).
            positions: middle pixels (..., N, 2), whole numbers, row and column.

        Returns:
            (..., N, crop_size, crop_size, C) uint8 on the tables' device.
        """
        tables, axes = self._flat(states)
        if positions.dim() < 2 or positions.shape[:-2] != axes or positions.shape[-1] != 2:
            raise ValueError(f"positions have shape {tuple(positions.shape)}; expected {(*axes, 'N', 2)}")
        size, N = self.crop_size, positions.shape[-2]
        corners = positions.to(torch.int64).reshape(-1, N, 2) - size // 2
        words = tables.new_empty((len(tables), N, size, _octets(size), self.channels), dtype=torch.int64)
        for part in self._parts(tables, max(N * size, self.image_size)):
            bits = self._cut(self._bits(tables[part]), corners[part])  # (balls, M, N, crop_size, 1)
            if self.num_colours:
                for c, plane in enumerate(self._planes(_numbers(bits, size), tables[part])):
                    words[part, ..., c] = plane.sum(0).view(words[part, ..., c].shape)  # at most one is seen in a pixel
            else:
                torch.index_select(self._pixels, 0, _numbers(bits[0], size), out=words[part].view(-1))
        return _bytes(words, size).view(*axes, N, size, size, self.channels)

    def _flat(self, states: Tensor) -> tuple[Tensor, torch.Size]:
        if states.dim() < 2 or states.shape[-2:] != (self.rows, len(COLUMNS)):
            raise ValueError(f"states have shape {tuple(states.shape)}; expected (..., {self.rows}, {len(COLUMNS)})")
        return states.reshape(-1, self.rows, len(COLUMNS)), states.shape[:-2]

    def _parts(self, tables: Tensor, lines: int) -> Iterator[slice]:
        """The parts of the tables drawn at a time, at ``lines`` rows of pixels for each ball."""
        numbers = _CACHED if tables.device.type == "cpu" else 32 * _CACHED
        each = max(1, numbers // (self.rows * lines))
        return (slice(start, start + each) for start in range(0, len(tables), each))

    def _bits(self, tables: Tensor, *, apart: bool = False) -> Tensor:
        """Bits (balls, M, H, words) of the pixels that show a ball; without colours one "ball" stands for all, if not apart.

        In each row of pixels a ball lights one run. Float64 leaves no doubt about a pixel of a float32 state.
        """
        x, y, radius, present = (tables[..., c].t().to(torch.float64)[..., None] for c in (0, 1, RADIUS, PRESENT))
        row = self._lines(tables)
        square = torch.where(present > 0, radius * radius, -1.0) - (row - (y - 0.5)).square_()  # of half the run
        half = square.clamp(min=0.0).sqrt_()
        start = (x - 0.5 - half).ceil_()
        stop = (x + 0.5 + half).floor_().clamp_(max=self.image_size).masked_fill_(square < 0, 0.0)
        begin, end = ((pixel[..., None] - self._first_pixel).to(torch.int32).clamp_(0, 64) for pixel in (start, stop))
        runs = self._from_pixel.index_select(0, begin.flatten()) & ~self._from_pixel.index_select(0, end.flatten())
        runs = runs.view(begin.shape)  # (rows, M, lines, words)
        bits = runs.new_zeros(*row.shape[:2], self.image_size, len(self._first_pixel))
        bits.scatter_(2, row[..., None].expand(runs.shape), runs)
        bits = _in_front(bits) if self.num_colours or apart else _any(bits)
        return bits & self._open if self.curtain else bits

    def _lines(self, tables: Tensor) -> Tensor:
        """The rows of pixels (rows, M, lines) a ball can reach, as many for all balls."""
        count = min(self.image_size, int(2 * self._reach(tables)) + 1)
        y, radius = (tables[..., c].t().to(torch.float64) for c in (1, RADIUS))
        top = (y - radius - 0.5).ceil_().clamp_(0, self.image_size - count).to(torch.int64)
        return top[..., None] + torch.arange(count, device=tables.device)

    def _reach(self, tables: Tensor) -> float:
        """What no ball's radius exceeds; a loose bound where the true one would have to be waited for."""
        return float(tables[..., RADIUS].max()) if tables.device.type == "cpu" else float(self.image_size)

    def _cut(self, bits: Tensor, corners: Tensor) -> Tensor:
        """Bits (balls, M, N, crop_size, 1) of the crops from ``corners`` (M, N, 2) on, of the bits of frames."""
        balls, M, size, words = bits.shape
        row = corners[..., :1] + torch.arange(self.crop_size, device=bits.device)  # (M, N, crop_size)
        line = row.clamp(0, size - 1) + torch.arange(0, M * size, size, device=bits.device)[:, None, None]
        lines = bits.flatten(1, 2).index_select(1, line.flatten()).view(balls, *row.shape, words)
        lines = lines.masked_fill_(((row < 0) | (row >= size))[..., None], 0)
        right = corners[..., 1, None, None] - self._first_pixel  # (M, N, 1, words): where in each word the crop begins
        kept = ~self._from_pixel[64 - right.clamp(0, 64)]  # without the sign bits that >> moves in
        lines = (lines >> right.clamp(0, 63) & kept) << (-right).clamp(0, 63)
        return _any(lines.movedim(-1, 0))[0][..., None]

    def _planes(self, numbers: Tensor, tables: Tensor) -> Iterator[Tensor]:
        """Octets, in the order (balls, M, ...), as coloured pixels: three words of eight bytes each, word by word."""
        colour = (tables[..., RED : RED + 3] * 255).round_().clamp_(0, 255).to(torch.uint8)
        colour = colour.transpose(0, 1).repeat(1, 1, 8).view(torch.int64)  # (balls, M, 3)
        for pixels, word in zip(self._rgb_pixels, colour.unbind(-1), strict=True):
            yield pixels.index_select(0, numbers).view(*word.shape, -1) & word[..., None]

    def _paint(self, bits: Tensor, tables: Tensor, canvas: Tensor) -> None:
        """Add each ball's box, cut from its bits, to black frames (M, H, octets, 3)."""
        M, size, octets, _ = canvas.shape
        count = min(octets, int(2 * self._reach(tables) + 7) // 8 + 1)
        x, radius = (tables[..., c].t().to(torch.float64) for c in (0, RADIUS))
        left = ((x - radius - 0.5).ceil_() / 8).floor_().clamp_(0, octets - count).to(torch.int64)
        column = left[..., None, None] + torch.arange(count, device=tables.device)  # (balls, M, 1, count)
        row = self._lines(tables)[..., None]
        lines = bits.gather(2, row.expand(*row.shape[:3], bits.shape[-1])).view(torch.uint8)
        numbers = lines.gather(3, column.expand(*row.shape[:3], count)).to(torch.int32).flatten()
        line = row + torch.arange(0, M * size, size, device=tables.device)[:, None, None]
        place = (line * octets + column).flatten()
        canvas.zero_()
        for c, plane in enumerate(self._planes(numbers, tables)):
            canvas.view(-1, 3)[:, c].scatter_add_(0, place, plane.flatten())

    # What is seen.

    def _observe(self, state: State) -> Observation:
        table = state["table"]
        if self.observation == "state":
            return table.clone()
        if self.observation == "frames":
            return self.frames(table)
        centres = state["centres"]
        mask = torch.ones(centres.shape[:2], dtype=torch.int8, device=self.device)
        return {"views": self.crops(table, centres), "positions": centres.to(torch.float32), "mask": mask}

    def _info(self, state: State, events: dict[str, Tensor] | None) -> dict[str, Tensor]:
        return {"positions": state["table"][..., :2].clone()}

    def _image(self, state: State) -> Tensor:
        """The frame, enlarged to about 256 pixels; the curtain grey."""
        frames = self.frames(state["table"]).expand(-1, -1, -1, 3).clone()
        if self.curtain:
            start, stop = self._curtain
            frames[:, start:stop, start:stop] = 60
        return enlarged(frames)


def _any(bits: Tensor) -> Tensor:
    """The or over the first axis, kept with length 1; ``bits`` is used up."""
    while len(bits) > 1:
        half = len(bits) // 2
        bits[:half] |= bits[-half:]
        bits = bits[: len(bits) - half]
    return bits


def _in_front(bits: Tensor) -> Tensor:
    """Of each entry of the first axis the bits no later entry has."""
    covered, step = bits, 1
    while step < len(bits):
        longer = covered.clone()
        longer[:-step] |= covered[step:]
        covered, step = longer, 2 * step
    bits[:-1] &= ~covered[1:]
    return bits


def _octets(size: int) -> int:
    """How many times eight pixels it takes to hold ``size``."""
    return -(-size // 8)


def _numbers(bits: Tensor, size: int) -> Tensor:
    """Bits (..., words) as one row of numbers 0 to 255, each of eight pixels."""
    return bits.view(torch.uint8)[..., : _octets(size)].to(torch.int32).flatten()


def _bytes(words: Tensor, size: int) -> Tensor:
    """Pixels (..., size, C) of words (..., octets, C) that hold eight pixels in C words."""
    *axes, octets, channels = words.shape
    pixels = words.view(torch.uint8).view(*axes, 8 * octets, channels)
    return pixels[..., :size, :].contiguous()


def make_bouncing_balls(**options: Any) -> SingleEnv:
    """One copy of ``BouncingBalls``."""
    return SingleEnv(BouncingBalls(1, **options))
