"""Sprites, and the scores of tracking them."""

import gymnasium as gym
import motmetrics
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

from worldmodels.cli import main
from worldmodels.envs.sprites import NUMBER, PALETTE, PRESENT, RED, SHAPE, SHAPES, Sprites, make_sprites
from worldmodels.segmentation import contingency
from worldmodels.tracking import SCORES, tracking

COPIES = 64
NOTHING = torch.zeros(COPIES, dtype=torch.int64)


def played(steps, **options):
    """States (T, B, rows, 12) of an episode of 64 copies."""
    env = Sprites(COPIES, observation="state", **options)
    states, _ = env.reset(seed=3)
    return env, torch.stack([states] + [env.step(NOTHING)[0] for _ in range(steps)])


def test_it_is_an_environment():
    check_env(make_sprites(), skip_render_check=True)
    env = gym.make("worldmodels/Sprites-v0", render_mode="rgb_array")
    assert env.reset(seed=0)[0].shape == (64, 64, 3) and env.render().shape == (256, 256, 3)


def test_they_enter_at_a_side_cross_and_leave_at_the_opposite_one():
    env, states = played(80, image_size=32)
    margin, far = env.sprite_size / 2, 32 - env.sprite_size / 2
    who, crossed = env.identities(states), 0
    for b in range(COPIES):
        for row in range(3):
            for name in set(who[:, b, row].tolist()) - {0}:
                times = (who[:, b, row] == name).nonzero()[:, 0]
                life = states[times, b, row]
                assert torch.equal(times, torch.arange(times[0], times[0] + len(times)))
                assert bool((life[:, 2:NUMBER] == life[0, 2:NUMBER]).all())  # nothing but the place changes
                assert torch.allclose(life[1:, :2] - life[:-1, :2], life[:-1, 2:4], atol=1e-4)
                assert bool(((life[:, :2] >= margin - 1e-4) & (life[:, :2] <= far + 1e-4)).all())
                assert float(life[0, 2:4].norm()) == pytest.approx(env.speed, rel=1e-5)
                if times[0] > 0 and times[-1] < 80:  # seen whole: from a side to the opposite one
                    crossed += 1
                    ends = life[0, :2], life[-1, :2] + life[-1, 2:4]
                    across = [
                        min(abs(float(ends[0][axis]) - side) for side in (margin, far)) < 1e-4
                        and abs(float(ends[1][axis] - ends[0][axis])) > far - margin - 1e-3
                        for axis in range(2)
                    ]
                    assert any(across)
    assert crossed > 100


def test_a_row_stays_empty_for_the_gap_and_then_as_long_as_it_is_drawn():
    _, states = played(120, gap=5, birth=0.5)
    present = states[..., PRESENT] > 0
    lengths = []
    for line in present.flatten(1).t().tolist():
        text = "".join(".#"[here] for here in line).lstrip(".").rstrip(".")
        lengths += [len(part) for part in text.replace("#", " ").split()]
    assert min(lengths) == 6 and len(lengths) > 200  # the step at which one leaves, and the five of the gap
    assert np.mean(lengths) == pytest.approx(7.0, abs=0.25)  # a geometric wait of one more, on average
    share = present.float().mean((1, 2))
    assert float(share.min()) > 0.6 and float(share.max()) < 0.95  # no step at which all are there or gone


def test_everything_that_may_be_drawn_is_drawn():
    _, states = played(60)
    there = states[states[..., PRESENT] > 0]
    assert set(there[:, SHAPE].tolist()) == set(range(len(SHAPES)))
    assert {tuple(colour) for colour in there[:, RED : RED + 3].long().tolist()} == set(PALETTE)
    scale, ratio = (there[:, 4] * there[:, 5]).sqrt() / (64 * 21 / 128), there[:, 5] / there[:, 4]
    assert 0.9 <= float(scale.min()) < 0.92 and 1.08 < float(scale.max()) <= 1.1
    assert 0.8 <= float(ratio.min()) < 0.82 and 1.18 < float(ratio.max()) <= 1.2 + 1e-5


def outline(shape, u, v):
    """Whether a point is in a shape, plainly; u and v are -1 to 1 across and down it."""
    if shape == "disc":
        return u * u + v * v <= 1
    if shape == "diamond":
        return abs(u) + abs(v) <= 1
    return abs(u) <= (1 if shape == "rectangle" else (v + 1) / 2) and abs(v) <= 1


def test_frames_show_them_pixel_by_pixel():
    env, states = played(3, image_size=24)
    table = states[2, :12]
    masks, frames, who = env.masks(table), env.frames(table), env.identities(table)
    for b in range(12):
        for y in range(24):
            for x in range(24):
                top = None
                for row, sprite in enumerate(table[b].double().tolist()):
                    px, py, _, _, width, height, shape = sprite[:7]
                    if sprite[PRESENT]:
                        u, v = (x + 0.5 - px) / (width / 2), (y + 0.5 - py) / (height / 2)
                        top = row if outline(SHAPES[int(shape)], u, v) else top
                assert masks[b, :, y, x].nonzero().flatten().tolist() == ([] if top is None else [top])
                colour = [0, 0, 0] if top is None else (255 * table[b, top, RED : RED + 3]).long().tolist()
                assert frames[b, y, x].tolist() == colour
    assert bool(((who > 0) == (table[..., PRESENT] > 0)).all())


def test_a_copy_does_not_depend_on_the_others():
    _, states = played(20)
    single = make_sprites(observation="state")
    seen = [single.reset(seed=3)[0]] + [single.step(0)[0] for _ in range(20)]
    assert np.array_equal(np.stack(seen), states[:, 0].numpy())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"observation": "crops"}, "observation is 'crops'; expected one of frames, state"),
        ({"num_sprites": 0}, "num_sprites is 0"),
        ({"sprite_size": 40}, "sprite_size is 40"),
        ({"birth": 0}, "birth 0; give"),
    ],
)
def test_what_cannot_be_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        Sprites(1, **options)
    env = Sprites(1)
    with pytest.raises(ValueError, match=r"expected \(\.\.\., 3, 12\)"):
        env.frames(torch.zeros(2, 12))


# Scores of tracking.


def tables(true, said):
    """Contingencies of the frames of one video, ``(T, H * W)``."""
    return contingency(true, said, torch.ones_like(true, dtype=torch.bool))


def test_tracking_by_hand():
    # Ten frames of 100 pixels: object 1 in 0 to 19, object 2 in 20 to 39 up to frame 5.
    true = torch.zeros(10, 100, dtype=torch.long)
    true[:, :20] = 1
    true[:5, 20:40] = 2
    said = true.clone()  # slot 0 draws the background
    said[2, :20] = 0  # object 1 missed once
    said[7:, :20] = 3  # and another slot's from frame 8 on: one switch
    said[1, 20:26] = 0  # overlap of 14 / 20
    said[9, 60:70] = 2  # what is not there
    said[8, 60:65] = 2  # too small to count
    names = torch.tensor([[1, 2]] * 10)
    found = tracking([tables(true, said)], [names])
    total = 15
    expected = {"match": 13 / total, "miss": 1 / total, "id_switches": 1 / total, "false_positives": 1 / total}
    expected |= {"mota": 1 - 3 / total, "motp": (13 + 14 / 20) / 14}
    expected |= {"mostly_detected": 1.0, "mostly_tracked": 1.0}  # 9 and 8 of 10 frames, and 5 of 5
    assert found == pytest.approx(expected) and set(found) == set(SCORES)


def test_mostly_tracked_counts_no_frame_of_a_switch():
    true = torch.zeros(5, 100, dtype=torch.long)
    true[:, :20] = 1
    said = true.clone()
    said[2:4, :20] = 2  # two switches in five frames
    found = tracking([tables(true, said)], [torch.ones(5, 1, dtype=torch.long)])
    assert found["mostly_detected"] == 1.0 and found["mostly_tracked"] == 0.0
    assert found["id_switches"] == pytest.approx(2 / 5) and found["mota"] == pytest.approx(3 / 5)


def test_another_sprite_in_the_same_row_is_another_object():
    true = torch.zeros(6, 100, dtype=torch.long)
    true[:, :20] = 1
    said = true.clone()
    said[3:, :20] = 2
    names = torch.tensor([[1]] * 3 + [[2]] * 3)
    assert tracking([tables(true, said)], [names])["id_switches"] == 0.0
    assert tracking([tables(true, said)], [torch.ones_like(names)])["id_switches"] == pytest.approx(1 / 6)


def test_nothing_drawn_and_nothing_there():
    true = torch.zeros(4, 100, dtype=torch.long)
    true[:, :20] = 1
    names = torch.ones(4, 1, dtype=torch.long)
    found = tracking([tables(true, torch.zeros_like(true))], [names])
    assert found["miss"] == 1.0 and found["mota"] == 0.0 and found["motp"] == 0.0
    empty = torch.zeros(4, 100, dtype=torch.long)
    assert tracking([contingency(empty, empty, empty == 0)], [torch.zeros(4, 0, dtype=torch.long)]) == {}


def test_random_videos_have_the_librarys_own_scores():
    """Through masks and the library's way of reading its own ids, video by video."""
    generator = torch.Generator().manual_seed(0)
    true = torch.randint(4, (3, 12, 60), generator=generator)
    said = torch.where(
        torch.rand(3, 12, 60, generator=generator) < 0.25, torch.randint(5, (3, 12, 60), generator=generator), true
    )
    names = torch.arange(1, 4).expand(12, 3)
    events = motmetrics.MOTAccumulator(auto_id=True)
    for video in range(3):
        for t in range(12):
            a, b = true[video, t], said[video, t]

            def overlap(k, j, a=a, b=b):
                either = ((a == k) | (b == j)).sum()
                return float(((a == k) & (b == j)).sum() / either) if either else 0.0

            objects = [k for k in range(1, 4) if (a == k).sum() > 5]
            slots = [j for j in range(5) if (b == j).sum() > 5 and overlap(0, j) <= 0.2]
            apart = np.array([[1 - overlap(k, j) for j in slots] for k in objects]).reshape(len(objects), len(slots))
            apart[apart > 0.5] = np.nan
            events.update([10 * video + k for k in objects], [10 * video + j for j in slots], apart)
    counted = ["mota", "motp", "num_switches", "num_objects", "num_false_positives"]
    expected = motmetrics.metrics.create().compute(events, metrics=counted, return_dataframe=False)
    found = tracking([tables(a, b) for a, b in zip(true, said, strict=True)], [names] * 3)
    assert found["mota"] == pytest.approx(expected["mota"]) and found["motp"] == pytest.approx(1 - expected["motp"])
    for name, of in (("id_switches", "num_switches"), ("false_positives", "num_false_positives")):
        assert found[name] == pytest.approx(expected[of] / expected["num_objects"])
    assert 0 < found["match"] < 1


def test_a_run_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["experiment=sprites", "core=scoff_pp", "core.communication=snps", "size=smoke", "run=runs/sprites"]
    assert main(["train", *words]) == 0
    said = capsys.readouterr().out
    assert "MOTA" in said and "paper: OP3" in said and "89.1" in said
    assert (tmp_path / "runs/sprites/figures/segments.png").is_file()
