"""Polar views against a plain loop over units and pixels, and by hand."""

import math

import pytest
import torch

from worldmodels.envs import polar
from worldmodels.envs.polar import (
    CHANNELS,
    HEIGHT,
    STATS,
    TYPES,
    UNIT_TYPES,
    Divisors,
    PolarGrid,
    action_image,
    polar_image,
)

STALKER, ZEALOT = UNIT_TYPES.index("stalker"), UNIT_TYPES.index("zealot")
NAMES = ("team", "unit_type", "x", "y", "health", "energy", "cooldown", "shield")


def crowd(*lead, units=7, spread=4.0, seed=0):
    """Random units around (8, 8), a fifth of them dead, and a height for each group."""
    draw = torch.Generator().manual_seed(seed)

    def uniform(most):
        return most * torch.rand(*lead, units, generator=draw)

    table = {
        "team": torch.randint(0, 2, (*lead, units), generator=draw),
        "unit_type": torch.randint(0, 9, (*lead, units), generator=draw),
        "x": 8 + spread * torch.randn(*lead, units, generator=draw),
        "y": 8 + spread * torch.randn(*lead, units, generator=draw),
        "health": uniform(250.0) - 50,
        "energy": uniform(200.0),
        "cooldown": uniform(30.0),
        "shield": uniform(150.0),
    }
    return table, torch.rand(*lead, 16, 12, generator=draw)


def pixel_of(dx, dy, grid):
    """Ring and direction, by the definition."""
    angle = math.atan2(dy, dx) / grid.angular_step
    return math.floor(math.hypot(dx, dy) / grid.radial_step + 0.5), math.floor(angle + 0.5) % grid.num_angles


def shown_at(table, ox, oy, grid):
    """For one observer: which unit each pixel shows."""
    shown = {}
    for u in range(len(table["x"])):
        dx, dy = float(table["x"][u] - ox), float(table["y"][u] - oy)
        i, j = pixel_of(dx, dy, grid)
        if table["health"][u] <= 0 or i >= grid.num_radii:
            continue
        centre_x = i * grid.radial_step * math.cos(j * grid.angular_step)
        centre_y = i * grid.radial_step * math.sin(j * grid.angular_step)
        off = math.hypot(dx - centre_x, dy - centre_y)
        if (i, j) not in shown or off < shown[i, j][0]:
            shown[i, j] = off, u
    return {pixel: u for pixel, (_, u) in shown.items()}


def image_by_hand(table, height, ox, oy, grid, observer_team=0, divisors=Divisors()):  # noqa: B008
    image = torch.zeros(CHANNELS, grid.num_radii, grid.num_angles)
    for (i, j), u in shown_at(table, ox, oy, grid).items():
        image[0, i, j] = float(table["team"][u] == observer_team)
        image[TYPES + int(table["unit_type"][u]), i, j] = 1
        for channel, name in enumerate(("health", "energy", "cooldown", "shield")):
            image[STATS + channel, i, j] = float(table[name][u]) / getattr(divisors, name)
    for i in range(grid.num_radii):
        for j in range(grid.num_angles):
            x = ox + i * grid.radial_step * math.cos(j * grid.angular_step)
            y = oy + i * grid.radial_step * math.sin(j * grid.angular_step)
            if 0 <= x < height.shape[0] and 0 <= y < height.shape[1]:
                image[HEIGHT, i, j] = height[int(x), int(y)]
    return image


@pytest.mark.parametrize(
    "grid", [PolarGrid(), PolarGrid(5, 7, 0.75), PolarGrid(12, 4, 2.0), PolarGrid(1, 1, 3.0)], ids=str
)
def test_is_the_loop_over_units_and_pixels(grid):
    table, height = crowd(20, units=12)
    ox, oy = table["x"][:, :5] + 0.3, table["y"][:, :5] - 0.2  # beside units
    ox[:, 4], oy[:, 4] = table["x"][:, 4], table["y"][:, 4]  # at a unit
    ox[:, 3] = torch.linspace(-30, 30, 20)  # at the border and off the map
    kwargs = {"observer_team": 1, "grid": grid, "divisors": Divisors(90.0, 80.0, 20.0, 60.0)}
    images = polar_image(**table, height=height, observers_x=ox, observers_y=oy, **kwargs)
    assert images.shape == (20, 5, CHANNELS, *grid[:2]) and images.dtype == torch.float32
    for n in range(20):
        one = {name: value[n] for name, value in table.items()}
        for a in range(5):
            expected = image_by_hand(one, height[n], float(ox[n, a]), float(oy[n, a]), **kwargs)
            assert torch.allclose(images[n, a], expected, atol=1e-6), (n, a)


def test_pixels_by_hand():
    grid = PolarGrid()
    places = {  # offset of a unit from the observer: its pixel
        (0.0, 0.0): (0, 0),
        (3.0, 0.0): (3, 0),
        (-3.0, 0.0): (3, 9),
        (0.0, 2.0): (2, 5),  # 90 degrees are 4.5 directions: half-way goes on, unlike Python's round
        (0.0, -2.0): (2, 14),
        (0.0, 0.49): (0, 5),
        (1.5, 2.0): (3, 3),  # r = 2.5, 53.1 degrees
        (8.49, 0.0): (8, 0),
        (4.0, -0.5): (4, 0),  # -7.1 degrees
        (4.0, -1.0): (4, 17),  # -14.0 degrees
    }
    height = torch.zeros(32, 32)
    for (dx, dy), (i, j) in places.items():
        for ox, oy in ((16.0, 16.0), (7.25, 9.5), (0.0, 0.0), (-3.0, 40.0)):
            unit = dict.fromkeys(NAMES, torch.ones(1)) | {"x": torch.tensor([ox + dx]), "y": torch.tensor([oy + dy])}
            observer = {"observers_x": torch.tensor([ox]), "observers_y": torch.tensor([oy])}
            image = polar_image(**unit, height=height, **observer)[0]
            drawn = image[TYPES : TYPES + 9].sum(0)
            assert drawn.nonzero().tolist() == [[i, j]], (dx, dy, ox, oy)
            assert image[0].sum() == 0  # team 1 is not the observer's
    far = unit | {"x": torch.tensor([8.5]), "y": torch.zeros(1)}
    image = polar_image(**far, height=height, observers_x=torch.zeros(1), observers_y=torch.zeros(1))
    assert not image.any()
    assert grid.field_of_view == 9.0 and grid.angular_step == pytest.approx(math.radians(20))


def test_stats_and_height_by_hand():
    unit = {
        "team": [0],
        "unit_type": [STALKER],
        "health": [50.0],
        "energy": [20.0],
        "cooldown": [15.0],
        "shield": [30.0],
    }
    unit = {name: torch.tensor(value) for name, value in unit.items()}
    unit |= {"x": torch.tensor([10.0]), "y": torch.tensor([7.0])}
    height = torch.arange(256.0).view(16, 16) / 256
    observer = {"observers_x": torch.tensor([8.0]), "observers_y": torch.tensor([7.0])}
    image = polar_image(**unit, height=height, **observer, height_scale=2.0)[0]
    column = image[:, 2, 0]
    expected = torch.zeros(CHANNELS)
    expected[0], expected[TYPES + STALKER] = 1, 1
    expected[STATS:HEIGHT] = torch.tensor([50 / 200, 20 / 200, 15 / 30, 30 / 150])
    expected[HEIGHT] = 2 * height[10, 7]
    assert torch.allclose(column, expected)
    assert image[HEIGHT, 0].unique().tolist() == [2 * float(height[8, 7])]  # the middle of all directions
    assert image[HEIGHT, 7, 0] == 2 * height[15, 7] and image[HEIGHT, 8, 0] == 0  # x = 16 is off the map
    assert image[HEIGHT, 8, 9] == 2 * height[0, 7]  # x = 0 is on it
    assert (image[:HEIGHT] != 0).sum() == 6


def test_who_is_shown_where_two_share_a_pixel():
    table = dict.fromkeys(NAMES, torch.ones(3))
    table["unit_type"] = torch.tensor([STALKER, ZEALOT, 0])
    table["shield"] = torch.tensor([10.0, 20.0, 30.0])
    table["team"] = torch.tensor([0, 1, 0])
    table["y"] = torch.zeros(3)
    see = {"height": torch.zeros(4, 4), "observers_x": torch.zeros(1), "observers_y": torch.zeros(1)}

    def shown(x):
        column = polar_image(**(table | {"x": torch.tensor(x)}), **see)[0, :, 3, 0]
        assert column[TYPES : TYPES + 9].sum() == 1
        u = [STALKER, ZEALOT, 0].index(int(column[TYPES : TYPES + 9].argmax()))
        assert column[0] == (table["team"][u] == 0) and column[STATS + 3] == table["shield"][u] / 150
        return u

    assert shown([2.6, 3.1, 2.8]) == 1  # the nearest to 3
    assert shown([3.25, 2.75, 3.25]) == 0  # all as near: the first
    table["health"] = torch.tensor([0.0, 1.0, 1.0])
    assert shown([3.25, 2.75, 3.25]) == 1  # the dead do not count
    table["health"] = torch.tensor([1.0, -5.0, 0.0])
    assert shown([3.4, 3.0, 3.0]) == 0
    table["health"] = torch.zeros(3)
    assert not polar_image(**(table | {"x": torch.full((3,), 3.0)}), **see).any()


def test_leading_axes_chunks_and_batches_make_no_difference(monkeypatch):
    table, height = crowd(6, 5, units=9, seed=1)
    see = {"observers_x": table["x"][..., :4], "observers_y": table["y"][..., :4]}
    whole = polar_image(**table, height=height, **see)
    shared = polar_image(**table, height=height[0, 0], **see)
    actions = torch.arange(9) % 5
    known = {name: table[name] for name in ("team", "x", "y", "health")}
    doing = action_image(**known, actions=actions, num_actions=5, **see)
    assert whole.shape == (6, 5, 4, CHANNELS, 9, 18) and doing.shape == (6, 5, 4, 6, 9, 18)
    monkeypatch.setattr(polar, "_VIEWS_AT_ONCE", 12)
    assert torch.equal(polar_image(**table, height=height, **see), whole)
    for n in range(6):
        for t in range(5):
            one, near = ({name: value[n, t] for name, value in given.items()} for given in (table, see))
            assert torch.equal(polar_image(**one, height=height[n, t], **near), whole[n, t])
            assert torch.equal(polar_image(**one, height=height[0, 0], **near), shared[n, t])
            few = {name: value[n, t] for name, value in known.items()}
            assert torch.equal(action_image(**few, actions=actions, num_actions=5, **near), doing[n, t])


def test_labels_may_be_shared_and_numbers_of_any_kind():
    table, height = crowd(3)
    table |= {"team": torch.tensor([0, 0, 0, 1, 1, 1, 1]), "unit_type": torch.arange(7)}
    see = {"observers_x": torch.full((2,), 8), "observers_y": torch.full((2,), 7)}  # the same two places for all
    images = polar_image(**table, height=height, **see)
    assert images.shape == (3, 2, CHANNELS, 9, 18) and torch.equal(images[:, 0], images[:, 1])
    doubles = {name: value.double().expand(3, 7) for name, value in table.items()}
    see = {name: value.double().expand(3, 2) for name, value in see.items()}
    assert torch.equal(polar_image(**doubles, height=height.double(), **see), images)


def test_actions():
    table, _ = crowd(20, units=12, seed=2)
    known = {name: table[name] for name in ("team", "x", "y", "health")}
    actions = torch.randint(0, 7, (20, 12))
    ox, oy = table["x"][:, :6], table["y"][:, :6]
    images = action_image(**known, actions=actions, num_actions=7, observers_x=ox, observers_y=oy, observer_team=1)
    assert images.shape == (20, 6, 8, 9, 18) and images.dtype == torch.float32
    assert torch.equal(images.sum(2), torch.ones(20, 6, 9, 18)) and images.unique().tolist() == [0, 1]
    for n in range(20):
        one = {name: value[n] for name, value in table.items()}
        for a in range(6):
            expected = torch.zeros(9, 18, dtype=torch.int64)
            for pixel, u in shown_at(one, float(ox[n, a]), float(oy[n, a]), PolarGrid()).items():
                expected[pixel] = actions[n, u] if one["team"][u] == 1 else 7
            assert torch.equal(images[n, a].argmax(0), expected), (n, a)


def test_angles_are_right_in_all_directions():
    angle = torch.linspace(-math.pi, math.pi, 100_001, dtype=torch.float64)[1:]
    for distance in (1e-3, 1.0, 50.0):
        dx, dy = (distance * angle.cos()).float(), (distance * angle.sin()).float()
        off = polar._angle(dx, dy, (dx * dx + dy * dy).sqrt()).double() - torch.atan2(dy.double(), dx.double())
        assert ((off + math.pi) % (2 * math.pi) - math.pi).abs().max() < 1e-6
