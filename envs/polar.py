"""What a unit sees of the units around it, as a picture in polar coordinates: the views of the paper's StarCraft task.

Source: Rahaman et al. 2020, "S2RMs: Spatially Structured Recurrent Modules", section 6 and appendix B.1.

A view has I rings and J directions. Its pixel (i, j) stands for the place at distance ``i * radial_step`` and angle
``j * 2 pi / J`` from the observer (equations 12 and 13), j = 0 to the east (+x) and counted towards the north (+y). A
unit is drawn in the pixel nearest to it: ``i = floor(r / radial_step + 0.5)``, ``j = floor(angle / step + 0.5) mod J``.
The observer's own pixel is (0, j), with j = 0 for a unit exactly where the observer stands.

Where two living units fall into one pixel, it shows one of them in all its channels: the one nearest to the place the
pixel stands for, and of equally near ones the one with the lower index. The paper says nothing of this.

The pixels of units are found with additions, multiplications, divisions and roots only, which round alike everywhere:
the same units give the same picture in any batch, and on any device.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# The nine types of the StarCraft Multi-Agent Challenge; a unit's type is its number in this list.
UNIT_TYPES = ("marine", "marauder", "medivac", "stalker", "zealot", "colossus", "hydralisk", "zergling", "baneling")

# The channels of a view: friendly, the types, health, energy, cooldown, shield, height of the ground.
FRIENDLY, TYPES, STATS, HEIGHT = 0, 1, 1 + len(UNIT_TYPES), 5 + len(UNIT_TYPES)
CHANNELS = HEIGHT + 1

_FAR = 1e30  # farther than any unit from the place of its pixel, in square map units
_HALF_WAY = 1e-5  # of a direction: an angle so near to half-way counts as half-way, as straight north does with J = 18
_VIEWS_AT_ONCE = 1024  # so many views' distances and indices fit into a core's cache


class PolarGrid(NamedTuple):
    """The pixels of a view; the paper gives no sizes, these are ours.

    Args:
        num_radii: rings I.
        num_angles: directions J.
        radial_step: map units from ring to ring; units up to half a step beyond the last ring are still drawn.
    """

    num_radii: int = 9
    num_angles: int = 18
    radial_step: float = 1.0

    @property
    def angular_step(self) -> float:
        """Radians from direction to direction."""
        return 2 * math.pi / self.num_angles

    @property
    def field_of_view(self) -> float:
        """The paper's radius of what is seen, I times the radial step, in map units."""
        return self.num_radii * self.radial_step

    def offsets(self, device: torch.device | str = "cpu") -> Tensor:
        """Where the pixels' places lie from the observer: x and y in map units, ``(2, I * J)`` float32."""
        return _offsets(self, torch.device(device))


class Divisors(NamedTuple):
    """What a unit's stats are divided by, the same for all types, so that a hit point is worth the same everywhere.

    The paper divides by "a fixed value" and gives none. Ours are the most any of the nine types has: the colossus's
    health and shield, the medivac's energy, and the stalker's cooldown in game loops of 1 / 22.4 s.
    """

    health: float = 200.0
    energy: float = 200.0
    cooldown: float = 30.0
    shield: float = 150.0


def polar_image(
    team: Tensor,
    unit_type: Tensor,
    x: Tensor,
    y: Tensor,
    health: Tensor,
    energy: Tensor,
    cooldown: Tensor,
    shield: Tensor,
    height: Tensor,
    *,
    observers_x: Tensor,
    observers_y: Tensor,
    observer_team: int = 0,
    grid: PolarGrid = PolarGrid(),  # noqa: B008  a tuple of numbers
    divisors: Divisors = Divisors(),  # noqa: B008
    height_scale: float = 1.0,
) -> Tensor:
    """What observers at any places see of U units and of the ground.

    Args:
        team: whose the units are, integers ``(..., U)``.
        unit_type: their numbers in ``UNIT_TYPES``, integers ``(..., U)``.
        x: map units to the east, ``(..., U)``.
        y: map units to the north, ``(..., U)``.
        health: hit points, ``(..., U)``; units with none left are dead and not drawn.
        energy: ``(..., U)``.
        cooldown: until the weapon is ready, ``(..., U)``, in the unit of the divisor.
        shield: ``(..., U)``.
        height: of the ground over squares of one map unit, ``(X, Y)`` or ``(..., X, Y)``, read at ``[int(x), int(y)]``;
            0 outside the map.
        observers_x: places to see from, ``(..., A)``; there need not be a unit.
        observers_y: ``(..., A)``.
        observer_team: the team drawn as friendly.
        grid: the pixels.
        divisors: what the stats are divided by.
        height_scale: what the height is multiplied by.

    Returns:
        ``(..., A, 15, I, J)`` float32: friendly, nine types, health, energy, cooldown, shield, height.
    """
    lead, (team, unit_type), (x, y, health, energy, cooldown, shield), (ox, oy) = _flat(
        (team, unit_type), (x, y, health, energy, cooldown, shield), (observers_x, observers_y)
    )
    (N, U), A, P = x.shape, ox.shape[1], grid.num_radii * grid.num_angles
    scales = x.new_tensor(divisors)[:, None]
    own = (team == observer_team).to(x.dtype)
    marks = torch.cat(
        [torch.stack([own, torch.ones_like(own)], 1), torch.stack([health, energy, cooldown, shield], 1) / scales], 1
    )  # (N, 6, U)
    channel = torch.arange(STATS - 2, STATS + 4, device=x.device)[:, None].repeat(N, 1, U)
    channel[:, 0], channel[:, 1] = FRIENDLY, TYPES + unit_type
    first = channel * P
    ground = _bordered(height.to(x.dtype) * height_scale)
    images = _zeros((N, A, CHANNELS * P), x.device)
    rows = max(1, _VIEWS_AT_ONCE // max(A, 1))
    for start in range(0, N, rows):
        part = slice(start, start + rows)
        pixel, drawn = _place(grid, x[part], y[part], health[part] > 0, ox[part], oy[part])
        index = first[part, None] + pixel[:, :, None]  # (n, A, 6, U)
        value = marks[part, None] * drawn[:, :, None]
        images[part].scatter_add_(2, index.flatten(2), value.flatten(2))
        images[part, :, HEIGHT * P :] = _heights(grid, ground, ox[part], oy[part], start)
    return images.view(*lead, A, CHANNELS, grid.num_radii, grid.num_angles)


def action_image(
    team: Tensor,
    x: Tensor,
    y: Tensor,
    health: Tensor,
    actions: Tensor,
    num_actions: int,
    *,
    observers_x: Tensor,
    observers_y: Tensor,
    observer_team: int = 0,
    grid: PolarGrid = PolarGrid(),  # noqa: B008
) -> Tensor:
    """What the units in view do, as in appendix B.1.1: friendly units' actions, "unknown" for other living units.

    Args:
        team: whose the units are, integers ``(..., U)``.
        x: map units to the east, ``(..., U)``.
        y: map units to the north, ``(..., U)``.
        health: hit points, ``(..., U)``.
        actions: 0 (no-op) to num_actions - 1, integers ``(..., U)``; those of other teams are not read.
        num_actions: actions there are.
        observers_x: places to see from, ``(..., A)``.
        observers_y: ``(..., A)``.
        observer_team: the team whose actions are known.
        grid: the pixels.

    Returns:
        ``(..., A, num_actions + 1, I, J)`` float32, one-hot at each pixel: no-op (channel 0) where no living unit is,
        the last channel for "unknown". Where units share a pixel, the same one counts as in ``polar_image``.
    """
    lead, (team, actions), (x, y, health), (ox, oy) = _flat((team, actions), (x, y, health), (observers_x, observers_y))
    N, A, P = x.shape[0], ox.shape[1], grid.num_radii * grid.num_angles
    channel = torch.where(team == observer_team, actions, num_actions)
    images = _zeros((N, A, (num_actions + 1) * P), x.device)
    images[:, :, :P] = 1
    pixel, drawn = _place(grid, x, y, health > 0, ox, oy)
    value = drawn.to(x.dtype)
    index = torch.cat([pixel, pixel + channel[:, None] * P], 2)
    images.scatter_add_(2, index, torch.cat([-value, value], 2))
    return images.view(*lead, A, num_actions + 1, grid.num_radii, grid.num_angles)


def _flat(
    labels: tuple[Tensor, ...], amounts: tuple[Tensor, ...], observers: tuple[Tensor, ...]
) -> tuple[torch.Size, tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The leading axes, then everything with these as one: int64 ``(N, U)``, float32 ``(N, U)``, float32 ``(N, A)``."""
    units, places = torch.broadcast_tensors(*labels, *amounts), torch.broadcast_tensors(*observers)
    lead = torch.broadcast_shapes(units[0].shape[:-1], places[0].shape[:-1])

    def flat(values: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
        return tuple(value.expand(*lead, value.shape[-1]).reshape(-1, value.shape[-1]).to(dtype) for value in values)

    kinds, stats = units[: len(labels)], units[len(labels) :]
    return lead, flat(kinds, torch.int64), flat(stats, torch.float32), flat(places, torch.float32)


def _zeros(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Zeros. On the CPU numpy's: it asks for large pages, which take a quarter of the time to fill."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, dtype=np.float32))
    return torch.zeros(shape, device=device)


@functools.lru_cache(maxsize=32)
def _offsets(grid: PolarGrid, device: torch.device) -> Tensor:
    radius = torch.arange(grid.num_radii, dtype=torch.float64)[:, None] * grid.radial_step
    angle = torch.arange(grid.num_angles, dtype=torch.float64) * grid.angular_step
    places = torch.stack([(radius * torch.cos(angle)).flatten(), (radius * torch.sin(angle)).flatten()])
    return places.round(decimals=9).float().to(device)  # rounded: straight down is 0 and not -1e-16 to the east


def _place(grid: PolarGrid, x: Tensor, y: Tensor, alive: Tensor, ox: Tensor, oy: Tensor) -> tuple[Tensor, Tensor]:
    """The pixel of each unit in each view, and whether it is drawn there.

    Args:
        grid: the pixels.
        x: of the units, ``(N, U)``.
        y: ``(N, U)``.
        alive: ``(N, U)`` bool.
        ox: of the observers, ``(N, A)``.
        oy: ``(N, A)``.

    Returns:
        ``(N, A, U)`` int64 (0 for a unit out of view) and ``(N, A, U)`` bool.
    """
    J = grid.num_angles
    dx, dy = x[:, None] - ox[:, :, None], y[:, None] - oy[:, :, None]
    distance = (dx * dx).add_(dy * dy).sqrt_()
    ring = (distance / grid.radial_step).add_(0.5).floor_()
    in_view = (ring < grid.num_radii) & alive[:, None]
    seen = in_view.to(x.dtype)
    turn = _angle(dx, dy, distance).div_(grid.angular_step).add_(0.5 + _HALF_WAY).floor_()
    turn -= (turn / J).floor_().mul_(J)
    pixel = ring.mul_(J).add_(turn).mul_(seen).long()
    centre_x, centre_y = (centre.index_select(0, pixel.flatten()).view_as(dx) for centre in grid.offsets(x.device))
    off = (dx - centre_x).square_().add_((dy - centre_y).square_())
    off.add_(seen.mul_(-_FAR).add_(_FAR))  # units out of view come last
    # Distances are not negative, so their bits as an integer have their order; the index below them settles ties.
    U = x.shape[1]
    rank = off.view(torch.int32).long().mul_(U).add_(torch.arange(U, device=x.device))
    best = rank.new_full((*dx.shape[:2], grid.num_radii * J), torch.iinfo(torch.int64).max)
    best.scatter_reduce_(2, pixel, rank, "amin")
    return pixel, in_view & (best.gather(2, pixel) == rank)


def _angle(dx: Tensor, dy: Tensor, distance: Tensor) -> Tensor:
    """The direction of (dx, dy) in radians, -pi / 2 to 3 pi / 2, to about 1e-6; 0 for the zero vector.

    Half the angle from the x-axis, east or west, has the tangent dy / (distance + |dx|), whose arc the polynomial gives:
    Abramowitz & Stegun's 4.4.49. ``torch.atan2`` is as fast, but its last bit depends on where in the tensor a number
    stands.
    """
    tangent = dy / (dx.abs() + distance).clamp_(min=torch.finfo(dx.dtype).tiny)
    square = tangent * tangent
    series = torch.full_like(square, 0.0028662257)
    for coefficient in (-0.0161657367, 0.0429096138, -0.0752896400, 0.1065626393, -0.1420889944, 0.1999355085):
        series.mul_(square).add_(coefficient)
    angle = series.mul_(square).add_(-0.3333314528).mul_(square).add_(1.0).mul_(tangent).mul_(2)
    west = (dx < 0).to(dx.dtype)
    return angle.mul_(1 - 2 * west).add_(west.mul_(math.pi))


def _bordered(height: Tensor) -> Tensor:
    """Heights ``(X, Y)`` or ``(..., X, Y)`` with a border of zeros of one square, as ``(1 or N, X + 2, Y + 2)``."""
    return torch.nn.functional.pad(height.reshape(-1, *height.shape[-2:]), (1, 1, 1, 1))


def _heights(grid: PolarGrid, ground: Tensor, ox: Tensor, oy: Tensor, start: int) -> Tensor:
    """The ground's height at the places of the pixels, ``(N, A, I * J)``; ``start``: the first row's number in ``ground``."""
    X, Y = ground.shape[1] - 2, ground.shape[2] - 2
    east, north = grid.offsets(ox.device)
    column = (ox[:, :, None] + east).clamp_(-1, X).floor_()
    row = (oy[:, :, None] + north).clamp_(-1, Y).floor_()
    index = column.mul_(Y + 2).add_(row).add_(Y + 3).long()
    if len(ground) > 1:
        index += ((torch.arange(len(ox), device=ox.device) + start) * ground[0].numel())[:, None, None]
    return ground.flatten().index_select(0, index.flatten()).view(index.shape)
