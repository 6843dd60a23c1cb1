"""Towers of blocks, against hand values, an analytic criterion and pymunk."""

import math

import gymnasium as gym
import numpy as np
import pymunk
import pytest
import torch
from gymnasium.utils.env_checker import check_env

from worldmodels.cli import main
from worldmodels.envs.towers import FLOOR, FRICTION, GRAVITY, SIZES, Towers, make_towers


def played(copies, steps, seed=1, **options):
    """The environment and the states (T, B, blocks, 11) of an episode."""
    env = Towers(copies, observation="state", **options)
    states, _ = env.reset(seed=seed)
    nothing = torch.zeros(copies, dtype=torch.int64)
    return env, torch.stack([states] + [env.step(nothing)[0] for _ in range(steps)])


def set_up(*blocks):
    """One copy with blocks at (x, y, angle, vx, vy, spin, width, height)."""
    env = Towers(1, num_blocks=len(blocks), observation="state")
    table, _ = env.reset(seed=0)
    table[0, :, :8] = torch.tensor(blocks)
    env._state = {"table": table, "impulses": env._at_rest(table.double())}
    return env


def after(env, steps):
    """The states (steps, blocks, 11) that follow."""
    return torch.stack([env.step(torch.zeros(1, dtype=torch.int64))[0][0] for _ in range(steps)]).double()


def test_it_is_an_environment():
    check_env(make_towers(), skip_render_check=True)
    env = gym.make("worldmodels/Towers-v0", num_blocks=4, render_mode="rgb_array")
    assert env.reset(seed=0)[0].shape == (64, 64, 3) and env.render().shape == (256, 256, 3)


def test_a_block_falls_and_does_not_bounce():
    seen = after(set_up((30.0, 40.0, 0.0, 0.5, 0.0, 0.0, 8.0, 6.0)), 40)
    t = torch.arange(1, 14, dtype=torch.float64)
    assert torch.allclose(seen[:13, 0, 1], 40.0 - GRAVITY * t * (t + 1 / 20) / 2, atol=1e-4)  # in twentieths of a step
    assert torch.allclose(seen[:13, 0, 0], 30.0 + 0.5 * t, atol=1e-4)
    assert float(seen[-1, 0, 1]) == pytest.approx(3.0, abs=0.03) and float(seen[17:, 0, 1].max()) < 3.1
    assert float(seen[-1, 0, 3:6].abs().max()) < 1e-3


def test_friction_stops_what_slides():
    seen = after(set_up((20.0, 2.0, 0.0, 1.5, 0.0, 0.0, 20.0, 4.0)), 12)
    t = torch.arange(1, 13, dtype=torch.float64)
    speed = (1.5 - FRICTION * GRAVITY * t).clamp(min=0.0)  # it stops after 8.3 steps
    assert torch.allclose(seen[:, 0, 3], speed, atol=0.02)
    assert float(seen[-1, 0, 0]) == pytest.approx(20.0 + 1.5**2 / (2 * FRICTION * GRAVITY), abs=0.1)


def test_a_block_tips_over_an_edge_as_a_pendulum_does():
    """Its middle is .8 beyond the edge of a wide block; until it slips it turns about that edge."""
    seen = after(set_up((0.0, 5.0, 0.0, 0.0, 0.0, 0.0, 40.0, 10.0), (20.8, 15.0, 0.0, 0.0, 0.0, 0.0, 10.0, 10.0)), 12)
    arm, lean = math.hypot(0.8, 5.0), math.atan2(5.0, 0.8)
    inertia = (10.0**2 + 10.0**2) / 12 + arm**2
    angle = spin = 0.0
    for step in range(12):
        for _ in range(1000):
            spin -= GRAVITY * arm * math.cos(lean + angle) / inertia / 1000
            angle += spin / 1000
        assert float(seen[step, 1, 2]) == pytest.approx(angle, rel=0.03, abs=5e-4)
        assert float(seen[step, 0, :3].sub(torch.tensor([0.0, 5.0, 0.0])).abs().max()) < 0.05


def margin(states):
    """How far the middle of what lies on each block is from where it would tip, the least of all."""
    x, size = states[..., 0].double(), states[..., SIZES].double()
    mass, least = size.prod(-1), []
    for k in range(1, x.shape[-1]):
        middle = (mass * x)[..., k:].sum(-1) / mass[..., k:].sum(-1)
        left = torch.maximum(x[..., k - 1] - size[..., k - 1, 0] / 2, x[..., k] - size[..., k, 0] / 2)
        right = torch.minimum(x[..., k - 1] + size[..., k - 1, 0] / 2, x[..., k] + size[..., k, 0] / 2)
        least.append(torch.minimum(middle - left, right - middle))
    return torch.stack(least).amin(0)


@pytest.mark.parametrize("blocks", [2, 3, 4])
def test_exactly_those_fall_that_have_to(blocks):
    env, states = played(150, 40, num_blocks=blocks)
    room = margin(states[0])
    stands = env.stands(states[0])
    assert torch.equal(stands, room >= 0) and 0.2 < float(stands.float().mean()) < 0.9
    moved = (states[-1, ..., :2] - states[0, ..., :2]).norm(dim=-1).amax(-1)
    assert float(moved[room > 0.1].max()) < 0.3
    assert float(moved[room < -0.1].min()) > 3.0
    assert bool(states.isfinite().all())


def judged(table, steps):
    """Poses (steps + 1, blocks, 3) of the same tower by pymunk."""
    space = pymunk.Space()
    space.gravity, space.iterations, space.collision_slop = (0, -GRAVITY), 30, 0.02
    floor = pymunk.Segment(space.static_body, (-500, -50), (500, -50), 50)
    floor.friction = FRICTION**0.5  # pymunk multiplies those of both
    space.add(floor)
    bodies = []
    for x, y, *_, width, height in table[:, :8].double().tolist():
        mass = width * height
        body = pymunk.Body(mass, pymunk.moment_for_box(mass, (width, height)))
        body.position = x, y
        shape = pymunk.Poly.create_box(body, (width, height))
        shape.friction, shape.elasticity = FRICTION**0.5, 0.0
        space.add(body, shape)
        bodies.append(body)
    poses = []
    for step in range(steps + 1):
        poses.append([(*body.position, body.angle) for body in bodies])
        for _ in range(20 if step < steps else 0):
            space.step(1 / 20)
    return np.array(poses)


def test_pymunk_sees_the_same():
    """Until blocks strike each other anew, after about 15 steps, from where on small differences grow."""
    env, states = played(60, 30)
    stands, apart, fell = env.stands(states[0]).numpy(), [], []
    for b in range(60):
        poses = judged(states[0, b], 30)
        apart.append(np.linalg.norm(poses[..., :2] - states[:, b, :, :2].numpy(), axis=-1).max(-1))
        fell.append(np.linalg.norm(poses[-1, :, :2] - poses[0, :, :2], axis=-1).max() > 1.0)
    apart, fell = np.array(apart), np.array(fell)
    assert (fell == ~stands).mean() > 0.97 and 10 < fell.sum() < 50
    assert np.quantile(apart[stands, 30], 0.9) < 0.1
    for step, half, most in ((5, 0.1, 0.3), (10, 0.2, 0.6), (15, 0.4, 1.2)):  # they move by 0.3, 1.3 and 5 pixels there
        assert np.median(apart[~stands, step]) < half and np.quantile(apart[~stands, step], 0.9) < most


def test_nothing_gains_energy_or_sinks_into_another():
    env, states = played(80, 45, num_blocks=4)
    table = states.double()
    mass = table[..., SIZES].prod(-1)
    inertia = mass * table[..., SIZES].square().sum(-1) / 12
    energy = (
        mass * (GRAVITY * table[..., 1] + table[..., 3:5].square().sum(-1) / 2) + inertia * table[..., 5].square() / 2
    )
    total = energy.sum(-1)
    gains = (total[1:] - total[:-1]) / total[0].mean()
    assert float(gains.max()) < 0.1 and float((gains > 0.01).double().mean()) < 0.002  # where corners strike
    depth = env._contacts(table[..., :3].flatten(0, 1), table[..., SIZES].flatten(0, 1))[0]
    assert float(depth.max()) < 0.6 and float((depth.amax(-1) > 0.2).double().mean()) < 0.02


def test_frames_masks_and_boxes_pixel_by_pixel():
    env, states = played(6, 12, image_size=32)
    table = states[9]
    masks, frames, boxes = env.masks(table), env.frames(table), env.boxes(table)
    for b in range(6):
        for row in range(32):
            for column in range(32):
                x, y = 2 * (column + 0.5), 64 - FLOOR - 2 * (row + 0.5)
                inside = []
                for px, py, angle, *_, width, height in table[b, :, :8].double().tolist():
                    u = math.cos(angle) * (x - px) + math.sin(angle) * (y - py)
                    v = math.cos(angle) * (y - py) - math.sin(angle) * (x - px)
                    inside.append(abs(u) <= width / 2 and abs(v) <= height / 2)
                first = inside.index(True) if any(inside) else None
                assert masks[b, :, row, column].nonzero().flatten().tolist() == ([] if first is None else [first])
                if first is not None and row < 30:
                    assert frames[b, row, column].tolist() == (255 * table[b, first, 8:]).round().long().tolist()
        for mask, (left, top, right, bottom) in zip(masks[b], boxes[b].tolist(), strict=True):
            rows, columns = mask.nonzero(as_tuple=True)
            if len(rows):
                assert columns.min() >= left - 0.5 and columns.max() + 1 <= right + 0.5
                assert rows.min() >= top - 0.5 and rows.max() + 1 <= bottom + 0.5
    upright = env.boxes(states[0])[0, 0]
    size = states[0, 0, 0, SIZES] / 2
    assert torch.allclose(upright[2:] - upright[:2], size, atol=1e-5)
    assert bool((frames[:, 30:] == 90).all())


def test_a_copy_does_not_depend_on_the_others():
    _, states = played(8, 15, seed=3)
    single = make_towers(observation="state")
    seen = [single.reset(seed=3)[0]] + [single.step(0)[0] for _ in range(15)]
    assert np.allclose(np.stack(seen), states[:, 0].numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"observation": "crops"}, "observation is 'crops'; expected one of frames, state"),
        ({"num_blocks": 7}, "num_blocks is 7"),
        ({"overhang": 2}, "overhang 2; give"),
    ],
)
def test_what_cannot_be_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        Towers(1, **options)
    with pytest.raises(ValueError, match=r"expected \(\.\.\., 3, 11\)"):
        Towers(1).frames(torch.zeros(2, 11))


def test_videos_of_them_from_the_command_line(tmp_path, monkeypatch, capsys):
    """As of any environment that draws frames of its states."""
    monkeypatch.chdir(tmp_path)
    words = ["experiment=video", "env.id=worldmodels/Towers-v0", "+env.kwargs.observation=state", "size=smoke"]
    assert main(["train", *words, "+env.kwargs.image_size=16", "core=scoff", "run=runs/towers"]) == 0
    assert "videos of Towers-v0" in capsys.readouterr().out
    assert (tmp_path / "runs/towers/figures/rollout.gif").is_file()
