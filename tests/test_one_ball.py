import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

from worldmodels.envs.one_ball import LAWS, OneBall, make_one_ball

NOTHING = torch.zeros(64, dtype=torch.int64)


def played(steps, **options):
    """States (T, B, 5) of an episode of 64 copies."""
    env = OneBall(64, observation="state", **options)
    states, _ = env.reset(seed=3)
    return env, torch.stack([states] + [env.step(NOTHING)[0] for _ in range(steps)])


def test_it_is_an_environment():
    check_env(make_one_ball(), skip_render_check=True)
    env = gym.make("worldmodels/OneBall-v0", dynamics="switching", render_mode="rgb_array")
    assert env.reset(seed=0)[0].shape == (64, 64, 1) and env.render().shape == (256, 256, 3)
    assert env.reset(seed=0)[1]["law"] in (0, 1)


def reflected(place, velocity, low, high):
    """One step in one direction, plainly."""
    place = place + velocity
    while not low <= place <= high:
        place = 2 * low - place if place < low else 2 * high - place
        velocity = -velocity
    return place, velocity


def test_laws_of_motion_step_by_step():
    env, states = played(40, dynamics="fixed", image_size=32, acceleration=0.2)
    laws = env.laws(states)
    assert bool((laws == laws[0]).all()) and set(laws[0].tolist()) == {0, 1, 2}
    low, high = env.radius, 32 - env.radius
    for b in range(64):
        for before, after in zip(states[:-1, b].double(), states[1:, b].double(), strict=True):
            pace, moved = before[2:4].norm(), (after[:2] - before[:2])
            if laws[0, b] == 2:  # walks: in any direction, as fast as ever
                assert float(after[2:4].norm()) == pytest.approx(env.speed, rel=1e-5)
                assert float(moved.norm()) <= env.speed + 1e-4
                continue
            grows = 0.2 if laws[0, b] == 0 else 0.0
            velocity = before[2:4] * (pace + grows) / pace
            for axis in range(2):
                place, fast = reflected(float(before[axis]), float(velocity[axis]), low, high)
                assert float(after[axis]) == pytest.approx(place, abs=1e-3)
                assert abs(float(after[2 + axis])) == pytest.approx(abs(fast), abs=1e-4)
    walks = states[:, laws[0] == 2, 2:4]
    turned = torch.cosine_similarity(walks[1:], walks[:-1], dim=-1)
    assert abs(float(turned.mean())) < 0.1  # where it went says nothing of where it goes


def test_switching_changes_the_axis_once_and_the_lamp_tells():
    env, states = played(30, dynamics="switching", image_size=32, switch_step=9)
    laws = env.laws(states)
    assert bool((laws[:9] == laws[0]).all()) and bool((laws[9:] == 1 - laws[0]).all())
    moved = states[1:, :, :2] - states[:-1, :, :2]
    still = moved.gather(2, 1 - laws[:-1, :, None])[..., 0]  # along the axis that is not the law's
    assert float(still.abs().max()) < 1e-5 and float(moved.abs().amax(-1).min()) > 0.0
    frames = env.frames(states)
    for law in range(2):
        shown = frames[laws == law]
        lamps = [shown[:, 29:31, 1 + 3 * n : 3 + 3 * n].float().mean((1, 2, 3)) for n in range(2)]
        assert bool((lamps[law] == 255).all()) and bool((lamps[1 - law] == 0).all())


def test_frames_show_the_ball():
    env, states = played(5, dynamics="fixed", image_size=32, radius=3)
    frames, masks = env.frames(states), env.masks(states)
    assert frames.shape == (6, 64, 32, 32, 1) and masks.shape == (6, 64, 1, 32, 32)
    assert torch.equal(frames[..., 0] == 255, masks[:, :, 0])
    y, x = torch.meshgrid(torch.arange(32) + 0.5, torch.arange(32) + 0.5, indexing="ij")
    table = states[2, 7]
    expected = (x - table[0]).square() + (y - table[1]).square() < 9.0
    assert torch.equal(masks[2, 7, 0], expected)


def test_a_copy_does_not_depend_on_the_others():
    _, states = played(20, dynamics="switching")
    single = make_one_ball(dynamics="switching", observation="state")
    seen = [single.reset(seed=3)[0]] + [single.step(0)[0] for _ in range(20)]
    assert np.array_equal(np.stack(seen), states[:, 0].numpy())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dynamics": "swinging"}, "dynamics is 'swinging'; expected one of fixed, switching"),
        ({"observation": "crops"}, "observation is 'crops'; expected one of frames, state"),
        ({"switch_step": 0}, "switch_step is 0; give at least 1"),
        ({"speed": 40}, "speed is 40"),
        ({"radius": 60}, "radius is 60"),
    ],
)
def test_what_cannot_be_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        OneBall(1, **options)


def test_laws_have_names():
    assert all(len({name[0] for name in names}) == len(names) for names in LAWS.values())  # initials stand for them
