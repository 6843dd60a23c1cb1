"""Bouncing balls: the motion against a plain loop and hand-worked values, the pictures against plain loops."""

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

import worldmodels.envs  # noqa: F401
from worldmodels.check import check_env as check
from worldmodels.envs import bouncing_balls
from worldmodels.envs.bouncing_balls import COLUMNS, PALETTE, PRESETS, BouncingBalls, make_bouncing_balls

ENV_ID = "worldmodels/BouncingBalls-v0"
OBSERVATIONS = ("frames", "state", "crops")


def ball(x, y, vx=0.0, vy=0.0, radius=2.0, colour=(1.0, 1.0, 1.0), fixed=0.0):
    """A row of the table."""
    return [x, y, vx, vy, radius, 1.0, *colour, fixed]


def world(*balls, **options):
    """One copy with balls set by hand, observed as its table."""
    env = BouncingBalls(1, num_balls=len(balls), observation="state", **options)
    env.reset(seed=0, options={"state": torch.tensor([balls])})
    return env


def step(env):
    return env.step(torch.zeros(env.num_envs, dtype=torch.int64))[0]


def energy(table):
    table = table.double()
    return (table[..., 4].square() * (table[..., 2].square() + table[..., 3].square())).sum(-1)


def gaps(table):
    """Distances between the surfaces of the balls of each copy, and between them and the walls of a frame of 48."""
    table = table.double()
    place, radius, present = table[..., :2], table[..., 4], table[..., 5] > 0
    apart = (place[..., :, None, :] - place[..., None, :, :]).norm(dim=-1) - radius[..., :, None] - radius[..., None, :]
    pair = present[..., :, None] & present[..., None, :] & ~torch.eye(present.shape[-1], dtype=torch.bool)
    return apart[pair], (24 - (place - 24).abs() - radius[..., None])[present]


# Motion.


def test_equal_balls_that_meet_head_on_swap_their_velocities():
    env = world(ball(10, 20, 4, 0), ball(20, 20, -4, 0))
    table = step(env)[0]  # they touch after 3/4 of the step at 13 and 17
    assert table[:, :4].tolist() == [[12, 20, -4, 0], [18, 20, 4, 0]]
    env = world(ball(10, 20, 0, 0), ball(10, 30, 0, -8))
    assert step(env)[0, :, :4].tolist() == [[10, 18, 0, -8], [10, 24, 0, 0]]


def test_a_light_ball_bounces_off_a_heavy_one():
    env = world(ball(10, 20, 3, 0, radius=2), ball(17, 20, 0, 0, radius=4))
    table = step(env)[0]  # masses 4 and 16; they touch after 1/3 of the step at 11 and 17
    expected = [[11 - 1.8 * 2 / 3, 20, -1.8, 0], [17 + 1.2 * 2 / 3, 20, 1.2, 0]]
    assert torch.allclose(table[:, :4], torch.tensor(expected), atol=1e-6)


def test_walls_and_corners_turn_a_ball_back():
    assert step(world(ball(45, 20, 3, 1)))[0, 0, :4].tolist() == [44, 21, -3, 1]
    assert step(world(ball(20, 3, 0, -4)))[0, 0, :4].tolist() == [20, 5, 0, 4]
    assert step(world(ball(3, 3, -3, -3)))[0, 0, :4].tolist() == [4, 4, 3, 3]
    assert step(world(ball(2, 20, 0, 1)))[0, 0, :4].tolist() == [2, 21, 0, 1]  # along the wall


def test_a_fixed_ball_is_not_moved():
    env = BouncingBalls(1, num_balls=1, fixed_ball=True, observation="state", radius=3.0)
    env.reset(seed=0, options={"state": torch.tensor([[ball(16, 24, 4, 0, 3), ball(24, 24, 0, 0, 3, fixed=1.0)]])})
    assert step(env)[0, :, :4].tolist() == [[16, 24, -4, 0], [24, 24, 0, 0]]


def test_a_ball_between_two_others_hands_the_push_on():
    env = world(ball(10, 20, 8, 0), ball(20, 20), ball(24, 20), ball(28, 20))
    table = step(env)[0]  # all that touch share one moment; the last one flies on
    assert torch.allclose(
        table[:, :4], torch.tensor([[16.0, 20, 0, 0], [20, 20, 0, 0], [24, 20, 0, 0], [30, 20, 8, 0]])
    )


def plain_step(table, size):
    """One step of one copy, bounce by bounce, in plain floats."""
    balls = [row[:5] for row in table if row[5]]
    left = 1.0
    while True:
        soonest, what = left, None
        for i, (x, y, vx, vy, r) in enumerate(balls):
            for axis, (p, v) in enumerate(((x, vx), (y, vy))):
                wait = (size - r - p) / v if v > 0 else (r - p) / v if v < 0 else math.inf
                if wait < soonest:
                    soonest, what = max(wait, 0.0), ("wall", i, axis)
            for j in range(i):
                dx, dy, dvx, dvy = (a - b for a, b in zip(balls[i][:4], balls[j][:4], strict=True))
                a, b, c = dvx**2 + dvy**2, 2 * (dx * dvx + dy * dvy), dx**2 + dy**2 - (r + balls[j][4]) ** 2
                if b < 0 and b * b > 4 * a * c:
                    wait = (-b - math.sqrt(b * b - 4 * a * c)) / (2 * a)
                    if wait < soonest:
                        soonest, what = max(wait, 0.0), ("pair", i, j)
        for row in balls:
            row[0] += soonest * row[2]
            row[1] += soonest * row[3]
        left -= soonest
        if what is None:
            return balls
        kind, i, j = what
        if kind == "wall":
            balls[i][2 + j] *= -1
            continue
        one, other = balls[i], balls[j]
        angle = math.atan2(other[1] - one[1], other[0] - one[0])
        c, s = math.cos(angle), math.sin(angle)
        m, n = one[4] ** 2, other[4] ** 2
        along, along_other = one[2] * c + one[3] * s, other[2] * c + other[3] * s
        centre = (m * along + n * along_other) / (m + n)
        for row, speed in ((one, along), (other, along_other)):  # in the frame of the centre of mass each turns back
            row[2] += 2 * (centre - speed) * c
            row[3] += 2 * (centre - speed) * s


def test_steps_equal_a_plain_loop():
    env = BouncingBalls(12, num_balls=(4, 8), radius=(2.0, 5.0), speed=6.0, observation="state")
    table, _ = env.reset(seed=3)
    turned = 0
    for _ in range(25):
        before, table = table, step(env)
        for b in range(12):
            expected = torch.tensor(plain_step(before[b].tolist(), 48.0))
            assert torch.allclose(table[b, : len(expected), :5], expected, atol=2e-4)
        turned += int((before[..., 2:4] != table[..., 2:4]).any(-1).sum())
    assert turned > 500


def test_a_thousand_steps_keep_energy_room_and_walls():
    env = BouncingBalls(16, num_balls=(3, 5, 7), radius=(2.0, 5.0), fixed_ball=True, observation="state")
    table, _ = env.reset(seed=0)
    tables = [table, *(step(env) for _ in range(1000))]
    assert all(float(gap.min()) > -1e-4 for gap in gaps(torch.stack(tables)))
    assert ((energy(tables[-1]) - energy(table)).abs() / energy(table)).max() < 1e-5
    assert torch.equal(tables[-1][..., 4:], table[..., 4:]) and torch.equal(tables[-1][:, -1], table[:, -1])


def test_a_collision_keeps_momentum_and_the_speed_along_the_touching_line():
    balls = ball(18, 20, 4, 1, radius=3), ball(27, 23, -3, 2, radius=5)
    env = world(*balls)
    before, after = torch.tensor(balls).double(), step(env)[0].double()
    assert not torch.equal(before[:, 2:4], after[:, 2:4])
    mass = before[:, 4:5].square()
    assert torch.allclose((mass * before[:, 2:4]).sum(0), (mass * after[:, 2:4]).sum(0), rtol=1e-6)
    assert torch.allclose(energy(before), energy(after), rtol=1e-6)
    pushes = after[:, 2:4] - before[:, 2:4]
    assert abs(pushes[0, 0] * pushes[1, 1] - pushes[0, 1] * pushes[1, 0]) < 1e-6  # along one line


def test_motion_turned_back_goes_back():
    env = BouncingBalls(16, num_balls=4, observation="state")
    first, _ = env.reset(seed=5)
    for _ in range(15):
        table = step(env)
    table[..., 2:4] *= -1
    env.reset(options={"state": table})
    for _ in range(15):
        table = step(env)
    assert (table[..., :2] - first[..., :2]).abs().max() < 1e-2


def test_a_copy_with_too_many_bounces_stands_still_for_the_rest_of_the_step(monkeypatch):
    monkeypatch.setattr(bouncing_balls, "_MAX_EVENTS", 1)
    env = world(ball(44, 20, 4, 0), ball(10, 20, 4, 0))
    assert step(env)[0, :, :4].tolist() == [[46, 20, -4, 0], [12, 20, 4, 0]]
    assert step(env)[0, :, :4].tolist() == [[42, 20, -4, 0], [16, 20, 4, 0]]


# Start states.


def test_start_states_are_random_and_leave_room():
    env = BouncingBalls(500, num_balls=(6, 7, 8), observation="state")
    table, info = env.reset(seed=0)
    present = table[..., 5] > 0
    assert torch.equal(present.sum(1).unique(), torch.tensor([6, 7, 8])) and not table[~present].any()
    assert (gaps(table)[0] >= -1e-5).all() and (gaps(table)[1] >= -1e-5).all()
    velocity = table[present][:, 2:4]
    assert torch.allclose(velocity.norm(dim=-1), torch.tensor(2.4)) and velocity.mean(0).abs().max() < 0.1
    assert torch.equal(info["positions"], table[..., :2])
    alone, _ = BouncingBalls(4000, num_balls=1, observation="state").reset(seed=1)
    counts = torch.histc((alone[..., 0] - 5) / 38, 10, 0, 1), torch.histc((alone[..., 1] - 5) / 38, 10, 0, 1)
    assert max(float((count / 400 - 1).abs().max()) for count in counts) < 0.2


@pytest.mark.parametrize("fixed", [False, True])
def test_where_draws_do_not_suffice_balls_start_on_a_grid(monkeypatch, fixed):
    monkeypatch.setattr(bouncing_balls, "_MAX_ROUNDS", 1)
    env = BouncingBalls(
        60, num_balls=(7, 8), radius=(3.0, 5.9 if fixed else 7.9), fixed_ball=fixed, observation="state"
    )
    table, _ = env.reset(seed=0)
    for _ in range(50):
        assert min(float(gap.min()) for gap in gaps(table)) > -1e-4
        table = step(env)


# Pictures.


def plain_frame(table, size, curtain=False, colours=False):
    """Pixel by pixel, (size, size, C)."""
    frame = np.zeros((size, size, 3 if colours else 1), dtype=np.uint8)
    for row in range(size):
        for column in range(size):
            for x, y, _, _, r, present, *colour, _ in table:
                if present and (column + 0.5 - x) ** 2 + (row + 0.5 - y) ** 2 <= r * r:
                    frame[row, column] = [round(c * 255) for c in colour] if colours else 255
            if curtain and size // 4 <= row < size - size // 4 and size // 4 <= column < size - size // 4:
                frame[row, column] = 0
    return frame


def scattered(env, count, seed=0):
    """Tables of balls of any size anywhere, overlapping and half outside."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.rand(count, env.rows, len(COLUMNS), generator=generator)
    table[..., :2] = table[..., :2] * 1.4 * env.image_size - 0.2 * env.image_size
    table[..., 4] *= 0.2 * env.image_size
    table[..., 5] = (table[..., 5] < 0.8).float()
    table[: count // 2, :, [0, 1, 4]] = (2 * table[: count // 2, :, [0, 1, 4]]).round() / 2  # pixels just on the edge
    return table


PICTURES = [
    {"num_balls": 3},
    {"num_balls": 5, "image_size": 17, "crop_size": 7},
    {"num_balls": 4, "image_size": 64, "colours": True},
    {"num_balls": 8, "curtain": True, "colours": 4},
    {"num_balls": 3, "image_size": 70, "curtain": True, "crop_size": 63},
    {"num_balls": 2, "image_size": 100, "colours": 2, "fixed_ball": True},
]


@pytest.mark.parametrize("options", PICTURES)
def test_frames_equal_a_plain_loop(options):
    env = BouncingBalls(1, **options)
    states = scattered(env, 8)
    frames = env.frames(states)
    for table, frame in zip(states.double().tolist(), frames.numpy(), strict=True):
        expected = plain_frame(table, env.image_size, env.curtain, bool(env.num_colours))
        assert np.array_equal(frame, expected)
    assert frames.any()


@pytest.mark.parametrize("options", PICTURES)
def test_crops_are_cut_from_the_padded_frame(options):
    env = BouncingBalls(1, **options)
    states, size, crop = scattered(env, 300, seed=1), env.image_size, env.crop_size
    corners = torch.tensor([[0, 0], [0, size - 1], [size - 1, 0], [size - 1, size - 1], [-3, size + 2], [-99, 500]])
    positions = torch.cat([torch.randint(0, size, (300, 6, 2)), corners.expand(300, 6, 2)], dim=1)
    crops = env.crops(states, positions)
    assert crops.shape == (300, 12, crop, crop, env.channels) and crops.dtype == torch.uint8
    pad = crop + 600
    frames = np.pad(env.frames(states[:60]).numpy(), ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    for b in range(60):
        for n, (row, column) in enumerate((positions[b] + pad - crop // 2).tolist()):
            assert np.array_equal(crops[b, n], frames[b, row : row + crop, column : column + crop])
    assert torch.equal(env.crops(states, positions.float()), crops)


@pytest.mark.parametrize("options", PICTURES)
def test_pictures_do_not_depend_on_how_many_are_drawn_at_once(monkeypatch, options):
    env = BouncingBalls(1, **options)
    states = scattered(env, 60)
    positions = torch.randint(0, env.image_size, (60, 4, 2))
    frames, crops = env.frames(states), env.crops(states, positions)
    assert torch.equal(env.frames(states[7]), frames[7]) and torch.equal(env.crops(states[7], positions[7]), crops[7])
    assert torch.equal(env.frames(states.view(3, 4, 5, env.rows, -1)), frames.view(3, 4, 5, *frames.shape[1:]))
    assert torch.equal(
        env.crops(states.view(6, 10, env.rows, -1), positions.view(6, 10, 4, 2)), crops.view(6, 10, *crops.shape[1:])
    )
    assert env.frames(states[:0]).shape == (0, *frames.shape[1:])
    monkeypatch.setattr(bouncing_balls, "_CACHED", 1)
    assert torch.equal(env.frames(states), frames) and torch.equal(env.crops(states, positions), crops)
    monkeypatch.setattr(BouncingBalls, "_reach", lambda self, tables: float(self.image_size))  # as off the CPU
    assert torch.equal(env.frames(states), frames) and torch.equal(env.crops(states, positions), crops)


def test_frames_worked_out_by_hand():
    env = BouncingBalls(1, num_balls=1, image_size=8, radius=1.0)
    frame = env.frames(torch.tensor([ball(3.5, 2.5, radius=1.0)]))[..., 0]
    cross = {(1, 3), (2, 2), (2, 3), (2, 4), (3, 3)}  # rows are y, columns x; a centre on the edge is lit
    assert {tuple(pixel) for pixel in frame.nonzero().tolist()} == cross and frame.max() == 255
    frame = env.frames(torch.tensor([ball(3.5, 2.5, radius=0.99)]))
    assert frame.nonzero().tolist() == [[2, 3, 0]]
    hidden = BouncingBalls(1, num_balls=1, curtain=True).frames(torch.tensor([ball(24.0, 24.0, radius=9.0)]))
    assert not hidden.any()


def test_the_later_ball_is_in_front():
    env = BouncingBalls(1, num_balls=2, colours=True)
    red, green = ball(20, 20, radius=4, colour=(1, 0, 0)), ball(22, 20, radius=4, colour=(0, 1, 0))
    assert env.frames(torch.tensor([red, green]))[20, 20].tolist() == [0, 255, 0]
    assert env.frames(torch.tensor([green, red]))[20, 20].tolist() == [255, 0, 0]


@pytest.mark.parametrize("size", [20, 48, 64, 72])
def test_white_balls_in_colour_are_the_white_ones_thrice(size):
    white, colour = (BouncingBalls(1, num_balls=4, image_size=size, colours=name) for name in (False, True))
    states = scattered(white, 200)
    states[:100, :, 4] = states[:100, :1, 4]  # one radius, none that gives the others room
    states[..., 6:9] = 1.0
    for part in states.split(1):
        assert torch.equal(colour.frames(part), white.frames(part).expand(-1, -1, -1, 3))


def test_colours_differ_or_are_shared():
    env = BouncingBalls(50, num_balls=8, colours=True, observation="state")
    table, _ = env.reset(seed=0)
    palette = {tuple(colour) for colour in PALETTE}
    for rows in (table[..., 6:9] * 255).round().int().tolist():
        assert {tuple(row) for row in rows} == palette
    assert len({tuple(map(tuple, rows)) for rows in table[..., 6:9].tolist()}) > 40
    shared, _ = BouncingBalls(50, preset="coloured", observation="state").reset(seed=0)
    for rows in (shared[:, :6, 6:9] * 255).round().int().tolist():
        assert {tuple(row) for row in rows} == set(PALETTE[:4])
    plain, _ = BouncingBalls(2, observation="state").reset(seed=0)
    assert (plain[..., 6:9] == 1).all()


# As an environment.


@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_it_is_what_gymnasium_expects(observation):
    options = {"observation": observation, "num_balls": 4, "fixed_ball": True, "colours": True}
    check_env(gym.make(ENV_ID, render_mode="rgb_array", **options).unwrapped)
    env = gym.make(ENV_ID, **options)
    seen, info = env.reset(seed=0)
    assert seen in env.observation_space and set(info) == {"positions"}
    truncated = [env.step(0)[3] for _ in range(100)]
    assert truncated == [False] * 99 + [True]


def test_it_passes_our_own_check():
    assert check(ENV_ID) == ([], [])


@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_a_seed_gives_one_trajectory_at_any_batch_size(observation):
    options = {"observation": observation, "num_balls": (3, 5), "radius": (2.0, 5.0), "colours": True}
    walks = []
    for B in (1, 7, 64):
        envs = BouncingBalls(B, **options, max_episode_steps=20)
        seen, info = envs.reset(seed=11)
        walk = [(seen, info)]
        for _ in range(45):
            seen, *_, info = envs.step(torch.zeros(B, dtype=torch.int64))
            walk.append((seen, info))
        walks.append(walk)
    for other in walks[1:]:
        for (seen, info), (more, more_info) in zip(walks[0], other, strict=True):
            rows = zip(*((x.values() if isinstance(x, dict) else [x]) for x in (seen, more)), strict=True)
            assert all(torch.equal(a[0], b[0]) for a, b in rows)
            assert torch.equal(info["positions"][0], more_info["positions"][0])
    assert not torch.equal(walks[2][0][1]["positions"][0], walks[2][0][1]["positions"][1])
    single = make_bouncing_balls(**options)
    _, info = single.reset(seed=11)
    assert np.array_equal(info["positions"], walks[0][0][1]["positions"][0].numpy())


def test_what_is_seen_is_drawn_from_the_table():
    options = {"num_balls": (2, 4), "preset": "coloured", "curtain": True}
    tables, frames, crops = (BouncingBalls(9, **options, observation=name) for name in ("state", "frames", "crops"))
    table, frame, crop = (env.reset(seed=2)[0] for env in (tables, frames, crops))
    centres = []
    for _ in range(12):
        assert torch.equal(tables.frames(table), frame)
        assert torch.equal(tables.crops(table, crop["positions"]), crop["views"]) and crop["mask"].all()
        centres.append(crop["positions"])
        table, frame, crop = step(tables), step(frames), step(crops)
    drawn = torch.stack(centres)
    assert len(drawn.flatten(0, 2).unique(dim=0)) > 700 and drawn.min() == 0 and drawn.max() == 63
    assert crop["views"].shape == (9, 10, 11, 11, 3) and crop["positions"].dtype == torch.float32


@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_a_snapshot_goes_on_where_it_was_taken(observation):
    env = BouncingBalls(5, num_balls=(2, 3), observation=observation, max_episode_steps=8)
    env.reset(seed=4)
    for _ in range(5):
        step(env)
    saved = env.snapshot()
    later = [step(env) for _ in range(10)]
    other = BouncingBalls(5, num_balls=(2, 3), observation=observation, max_episode_steps=8)
    other.restore(saved)
    for expected in later:
        found = step(other)
        pairs = [(expected[name], found[name]) for name in found] if isinstance(found, dict) else [(expected, found)]
        assert all(torch.equal(a, b) for a, b in pairs)


def test_presets_are_the_papers_settings_and_options_win():
    shapes = {
        "4balls": (64, 64, 1),
        "678balls": (64, 64, 1),
        "curtain": (64, 64, 1),
        "coloured": (64, 64, 3),
    }
    for name, shape in shapes.items():
        assert BouncingBalls(1, preset=name).single_observation_space.shape == shape
    assert set(shapes) | {"s2rm"} == set(PRESETS)
    s2rm = BouncingBalls(3, preset="s2rm")
    seen, info = s2rm.reset(seed=0)
    assert seen["views"].shape == (3, 10, 11, 11, 1) and info["positions"].shape == (3, 4, 2)
    assert (info["positions"][:, -1] == 24).all()
    table, _ = BouncingBalls(200, preset="4balls", observation="state").reset(seed=0)
    assert table.shape == (200, 4, 10) and 4 <= table[..., 4].min() < 4.1 and 7.9 < table[..., 4].max() <= 8
    ours = BouncingBalls(1, preset="s2rm", num_balls=6, observation="state", fixed_ball=False, image_size=32)
    assert ours.single_observation_space.shape == (6, 10) and ours.speed == 1.6 and ours.radius == (10 / 3, 10 / 3)


def test_render_shows_an_enlarged_frame_and_the_curtain():
    env = gym.make(ENV_ID, preset="curtain", render_mode="rgb_array")
    env.reset(seed=0)
    image = env.render()
    assert image.shape == (256, 256, 3) and (image[64:192, 64:192] == 60).all() and image.max() == 255
    env = make_bouncing_balls(render_mode="rgb_array", observation="crops")
    env.reset(seed=0)
    assert env.render().shape == (288, 288, 3)


def test_a_state_set_by_hand_is_the_users_still():
    given = torch.tensor([[ball(10, 20, 4, 0), ball(20, 20), [9.0] * 5 + [0.0] + [9.0] * 3 + [0.0]]])
    env = BouncingBalls(1, num_balls=3, observation="state")
    seen, _ = env.reset(options={"state": given})
    assert torch.equal(seen[0, :2], given[0, :2]) and not seen[0, 2].any() and given[0, 2, 0] == 9
    seen.zero_()
    assert step(env).any()
    single = make_bouncing_balls(num_balls=1, observation="state")
    assert single.reset(options={"state": np.array([ball(10, 20)])})[0][0, 0] == 10


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([ball(10, 20)], r"expected \(1, 2, 10\)"),
        ([ball(10, 20), ball(13, 20)], "overlap"),
        ([ball(10, 20), ball(1, 20)], "beyond the walls"),
        ([ball(10, 20), ball(math.nan, 20)], "not finite"),
        ([ball(10, 20), ball(30, 20, radius=0.0)], "radius above 0"),
        ([ball(10, 20), ball(30, 20, fixed=0.5)], "0 or 1"),
    ],
)
def test_impossible_states_are_refused(rows, says):
    with pytest.raises(ValueError, match=says):
        BouncingBalls(1, num_balls=2).reset(options={"state": [rows]})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_balls": 0}, "give 1 to 8"),
        ({"num_balls": (6, 9)}, "give 1 to 8"),
        ({"num_balls": ()}, "give 1 to 8"),
        ({"radius": 24.0, "num_balls": 1}, "1 balls fit a square grid in a frame of 48"),
        ({"radius": 8.0, "num_balls": 8}, "8 balls fit"),
        ({"radius": 8.0, "num_balls": 8, "fixed_ball": True}, "8 balls and a fixed one fit"),
        ({"radius": 0.0}, "radius is 0.0"),
        ({"radius": (5.0, 4.0)}, r"radius is \(5.0, 4.0\)"),
        ({"radius": (1.0, 2.0, 3.0)}, "radius is"),
        ({"colours": 9}, "a number of 1 to 8"),
        ({"speed": -1.0}, "speed is -1.0"),
        ({"image_size": 4}, "at least 8 pixels"),
        ({"observation": "pixels"}, "expected one of"),
        ({"crop_size": 10}, "odd size"),
        ({"num_crops": 0}, "at least one crop"),
        ({"preset": "5balls"}, "expected one of"),
        ({"render_mode": "human"}, "rgb_array"),
    ],
)
def test_impossible_options_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        BouncingBalls(1, **options)


def test_impossible_tables_are_refused():
    env = BouncingBalls(1, num_balls=2)
    with pytest.raises(ValueError, match=r"expected \(..., 2, 10\)"):
        env.frames(torch.zeros(3, 10))
    with pytest.raises(ValueError, match=r"expected \(4, 'N', 2\)"):
        env.crops(torch.zeros(4, 2, 10), torch.zeros(3, 5, 2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("options", PICTURES)
def test_cpu_and_gpu_walk_and_draw_the_same_way(options):
    here, there = (BouncingBalls(64, **options, observation="crops", device=name) for name in ("cpu", "cuda"))
    a, b = here.reset(seed=3)[0], there.reset(seed=3)[0]
    for _ in range(60):
        assert all(torch.equal(a[name], b[name].cpu()) for name in a)
        a, b = step(here), there.step(torch.zeros(64, dtype=torch.int64, device="cuda"))[0]
    states = scattered(here, 50)
    assert torch.equal(here.frames(states), there.frames(states.cuda()).cpu())


@pytest.mark.parametrize(
    "options", [{"preset": "678balls"}, {"preset": "coloured"}, {"preset": "curtain"}, {"fixed_ball": True}]
)
def test_masks_say_which_ball_is_where(options):
    env = BouncingBalls(8, observation="state", **options)
    tables, _ = env.reset(seed=2)
    masks, frames = env.masks(tables), env.frames(tables)
    size = env.image_size
    assert masks.shape == (8, env.rows, size, size) and masks.dtype == torch.bool
    y, x = torch.meshgrid(torch.arange(size) + 0.5, torch.arange(size) + 0.5, indexing="ij")
    hidden = torch.zeros(size, size, dtype=torch.bool)
    if env.curtain:
        hidden[size // 4 : size - size // 4, size // 4 : size - size // 4] = True
    for table, mask, frame in zip(tables.double(), masks, frames, strict=True):
        taken = hidden.clone()
        for ball, shown in reversed(list(zip(table, mask, strict=True))):
            disc = ((x - ball[0]).square() + (y - ball[1]).square() <= ball[4].square()) & (ball[5] > 0)
            assert torch.equal(shown, disc & ~taken)
            if bool(shown.any()):
                seen = frame[shown].float()
                assert torch.allclose(seen, (ball[6 : 6 + frame.shape[-1]] * 255).round().float().expand_as(seen))
            taken |= disc
        assert torch.equal(mask.any(0), frame.amax(-1) > 0)
    stacked = torch.stack([tables, tables.flip(0)])
    assert torch.equal(env.masks(stacked)[1], masks.flip(0))
