import json

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from PIL import Image

import worldmodels
from worldmodels.cli import main
from worldmodels.cores.gru import GRU
from worldmodels.data.intphys import find
from worldmodels.envs.occluders import BLOCKS, Occluders, make_occluders
from worldmodels.errors import UserError
from worldmodels.models.video import VideoModel
from worldmodels.tasks.occluders import Occluders as Task
from worldmodels.tasks.occluders import errors, plausibility

NOTHING = torch.zeros(150, dtype=torch.int64)
ENV = {"id": "worldmodels/Occluders-v0", "kwargs": {"observation": "state", "image_size": 16}, "resize": None}


def played(**options):
    """States (41, 150, 8) and frames of an episode of 150 copies."""
    env = Occluders(150, observation="state", image_size=32, **options)
    states, _ = env.reset(seed=5)
    states = torch.stack([states] + [env.step(NOTHING)[0] for _ in range(40)])
    return states, env.frames(states)


def same(one, other):
    """At which steps of which copies two movies show the same, (T, B)."""
    return (one == other).flatten(2).all(2)


# The environment.


def test_it_is_an_environment():
    check_env(make_occluders(), skip_render_check=True)
    env = gym.make("worldmodels/Occluders-v0", block="O2", movie=3, render_mode="rgb_array")
    observation, info = env.reset(seed=0)
    assert observation.shape == (64, 64, 1) and env.render().shape == (256, 256, 3) and not info["possible"]


@pytest.mark.parametrize("block", BLOCKS[1:])
def test_impossible_movies_are_made_of_possible_ones(block):
    frames = [played(block=block, movie=movie)[1] for movie in range(4)]
    for impossible, first, second in ((2, 0, 1), (3, 1, 0)):
        before, after = same(frames[impossible], frames[first]), same(frames[impossible], frames[second])
        turn = before.long().cumprod(0).sum(0)  # how many frames are those of the movie it begins as
        steps = torch.arange(41)[:, None]
        assert bool((before | (steps >= turn)).all()) and bool((after | (steps < turn)).all())
        assert bool(after[turn - 1, torch.arange(150)].all())  # it changes while both would show the same: hidden
        assert bool((~before).any(0).all()) and bool((~after).any(0).all())  # and both parts are seen


def test_what_each_block_changes():
    for block, column in (("O1", 5), ("O2", 4), ("O3", 1)):
        first, second = (played(block=block, movie=movie)[0] for movie in (0, 1))
        differ = (first != second).any(0).any(0)
        assert differ.nonzero()[:, 0].tolist() == [column]
        assert bool((first == first[:1])[..., [1, 2, 3, 4, 5, 6, 7]].all())  # nothing but x moves
        assert torch.allclose(first[1:, :, 0] - first[:-1, :, 0], first[1:, :, 2], atol=1e-4)


def test_possible_scenes_come_in_out_and_may_show_nothing():
    states, frames = played()
    thing = (frames == 255).flatten(2).any(2)
    empty = states[0, :, 5] == 0
    assert 0.1 < float(empty.float().mean()) < 0.4 and not bool(thing[:, empty].any())
    assert not bool(thing[0].any()) and not bool(thing[40].any()) and bool(thing[:, ~empty].any(0).all())
    seen = thing[:, ~empty].long()
    assert bool(((seen.diff(dim=0) == 1).sum(0) == 2).all())  # seen twice: before and after the wall
    movies, _ = played(block="O1")
    assert set(movies[0, :, 5].tolist()) == {0.0, 1.0}


def test_masks_by_hand():
    env = Occluders(1, observation="state", image_size=16)
    radius, wall = 4.0, [10.0, 14.0]
    for shape, pixels in ((0, 52), (1, 36), (2, None)):
        thing, hidden = env.masks(torch.tensor([5.0, 8.0, 1.0, radius, shape, 1.0, *wall]))
        assert int(hidden.sum()) == 4 * 16 and bool(hidden[:, 10:14].all()) and not bool((thing & hidden).any())
        if pixels is not None:
            inside = [
                (x + 0.5, y + 0.5)
                for x in range(10)
                for y in range(16)
                if ((x - 4.5) ** 2 + (y - 7.5) ** 2 <= 16 if shape == 0 else max(abs(x - 4.5), abs(y - 7.5)) <= 3.4)
            ]
            assert int(thing.sum()) == len(inside)
    assert not bool(env.masks(torch.tensor([5.0, 8.0, 1.0, radius, 0.0, 0.0, *wall]))[0].any())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"block": "O4"}, "block is 'O4'; expected one of possible, O1, O2, O3"),
        ({"movie": 1}, "movie is 1 of block 'possible'"),
        ({"block": "O1", "movie": 4}, "movie is 4"),
        ({"image_size": 8}, "image_size is 8; give at least 16"),
    ],
)
def test_what_cannot_be_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        Occluders(1, **options)


# The scores.


def test_plausibility_is_a_log_likelihood():
    frames = (torch.rand(3, 2, 1, 4, 4) > 0.5).float()
    said = torch.rand(3, 2, 1, 4, 4) * 0.8 + 0.1
    expected = torch.where(frames == 1, said, 1 - said).double().log().sum((2, 3, 4))
    assert torch.allclose(plausibility(torch.logit(said), frames), expected, atol=1e-4)


def test_errors_by_hand():
    plausible = torch.tensor([[5.0, 1.0, 2.0], [4.0, 1.0, 2.0], [3.0, 4.0, 2.0], [2.0, 0.0, 2.0]])
    found = errors(plausible)  # first quadruple right, second wrong, third equal
    assert found["relative"] == (0 + 1 + 0.5) / 3
    pairs = [(p, i) for p in plausible[:2].flatten().tolist() for i in plausible[2:].flatten().tolist()]
    assert found["absolute"] == pytest.approx(sum((p < i) + 0.5 * (p == i) for p, i in pairs) / len(pairs))
    assert errors(torch.zeros(4, 6)) == {"relative": 0.5, "absolute": 0.5}


def task(tmp_path, **options):
    sizes = {"train_episodes": 20, "quadruples": 3, "window": 8, "channels": 8, "hidden_size": 16, "image_size": 16}
    return Task(**{"env": ENV} | sizes | {"data_dir": str(tmp_path / "data")} | options)


def test_who_knows_where_things_come_out_is_right(tmp_path, monkeypatch):
    """A model that keeps to the first possible movies tells the impossible ones; a copy cannot."""
    watched = task(tmp_path)
    movies = [next(watched._quadruples("O3", torch.device("cpu"), None))[1:, movie] for movie in (0, 1)]

    def knowing(self, seen):  # (T, 4 b, ...): goes on as it began
        sure = [torch.logit(movie.clamp(0.1, 0.9)) for movie in movies]
        return torch.cat([sure[0], sure[1], sure[0], sure[1]], dim=1)

    monkeypatch.setattr(VideoModel, "forward", knowing)
    model = watched.model(lambda size, **_: GRU(size, 1, 8, num_tokens=64), watched.about())
    found = watched.evaluate(model)
    assert found["blocks"]["O3"]["model"]["relative"] == 0.0
    assert all(found["blocks"][block]["copy"]["relative"] == 0.5 for block in ("O1", "O2", "O3"))
    assert found["scores"]["relative_error/O3"] == 0.0


def test_tables(tmp_path):
    def result(core, relative):
        model = {"relative": relative, "absolute": 0.4}
        blocks = {block: {"model": model, "copy": {"relative": 0.5, "absolute": 0.5}} for block in ("O1", "O2", "O3")}
        return {"core": core, "blocks": blocks, "official": False}

    watched = task(tmp_path)
    table = watched.overview({"a": result("scoff", 0.1), "b": result("scoff", 0.3), "c": result("gru", 0.2)}, "runs")
    cells = [list(column.cells) for column in table.columns]
    assert cells[0][:4] == ["gru (1)", "scoff (2)", "copy of the frame before", "chance"]
    assert cells[1][:3] == ["0.200 (0.400)", "0.200 ± 0.141 (0.400)", "0.500 (0.500)"]
    assert cells[3][-1] == "0.42 ± 0.02"


def test_a_run_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "experiment=occluders", "core=scoff", "size=smoke", "run=runs/walls"]) == 0
    assert "vanishes or appears" in capsys.readouterr().out
    figures = {path.name for path in (tmp_path / "runs" / "walls" / "figures").iterdir()}
    assert {"curves.png", "O1.png", "O2.png", "O3.png", "choices.png"} <= figures
    assert set(worldmodels.load("runs/walls").evaluate()["blocks"]) == {"O1", "O2", "O3"}


# IntPhys's own files.


def scene(folder, values, possible=None, size=20):
    (folder / "scene").mkdir(parents=True)
    for i, value in enumerate(values, 1):
        Image.new("RGB", (size, size), (value, value, value)).save(folder / "scene" / f"scene_{i:03d}.png")
    if possible is not None:
        (folder / "status.json").write_text(json.dumps({"header": {"is_possible": possible}}))


@pytest.fixture
def intphys(tmp_path):
    """Two training scenes and a quadruple of block O2, whose second and third movies are the impossible ones."""
    root = tmp_path / "intphys"
    for i in range(2):
        scene(root / "train" / f"{i + 1:05d}", [10 * i + t for t in range(9)])
    for movie, possible in enumerate((True, False, False, True)):
        scene(root / "dev" / "O2" / "01" / str(movie + 1), [100 + 10 * movie + t for t in range(9)], possible)
    return root


def test_files_are_read(intphys):
    train, blocks = find(intphys, image_size=16, every=2)
    assert train.frames.shape == (5, 2, 16, 16) and train.frames[:, 1, 0, 0].tolist() == [10, 12, 14, 16, 18]
    assert list(blocks) == ["O2"] and blocks["O2"].frames[0, :, 0, 0].tolist() == [100, 130, 110, 120]
    four = next(blocks["O2"].quadruples(10))
    assert four.shape == (5, 4, 1, 1, 16, 16) and four[1, 1, 0, 0, 0, 0] == pytest.approx(132 / 255)
    windows = train.windows(50, 3, torch.Generator().manual_seed(0))
    steps = (255 * windows[1:, :, 0, 0, 0]).round() - (255 * windows[:-1, :, 0, 0, 0]).round()
    assert windows.shape == (3, 50, 1, 16, 16) and bool((steps == 2).all())
    with pytest.raises(UserError, match="scenes have 5 frames; set task.window=4 or less"):
        train.windows(1, 6, torch.Generator())


def test_a_model_is_trained_on_files(intphys, tmp_path):
    watched = task(tmp_path, data=str(intphys), window=3, env={"id": None, "kwargs": {}})
    about = watched.about()
    assert set(about["data"]) == {"train", "O2"} and about["frame_shape"] == [1, 16, 16]
    model = watched.model(lambda size, **_: GRU(size, 1, 8, num_tokens=64), about)
    batch = watched.batches(2, torch.device("cpu"))(torch.Generator().manual_seed(0))
    watched.losses(model, batch, torch.Generator())["loss"].backward()
    found = watched.evaluate(model.eval())
    assert found["official"] and set(found["blocks"]) == {"O2"} and found["blocks"]["O2"]["n"] == 1
    assert "paper: SCOFF" in list(watched.table({"gru": found}, "x").columns[0].cells)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (
            lambda root: (root / "train" / "00002" / "scene" / "scene_004.png").unlink(),
            "00002/scene has no scene_004.png",
        ),
        (
            lambda root: (root / "train" / "00001" / "scene" / "scene_001.png").write_text("x"),
            "scene_001.png is no picture",
        ),
        (
            lambda root: Image.new("L", (9, 8)).save(root / "train" / "00001" / "scene" / "scene_001.png"),
            "scene_001.png is 9 x 8",
        ),
        (lambda root: (root / "dev" / "O2" / "01" / "3" / "status.json").unlink(), "3/status.json does not say"),
        (
            lambda root: (root / "dev" / "O2" / "01" / "3" / "status.json").write_text(
                '{"header": {"is_possible": 1}}'
            ),
            "is_possible is 1; expected true or false",
        ),
        (
            lambda root: (root / "dev" / "O2" / "01" / "3" / "status.json").write_text(
                '{"header": {"is_possible": true}}'
            ),
            "01 has 4 movies, 3 possible; expected 4, 2 possible",
        ),
        (lambda root: (root / "dev" / "O2").rename(root / "dev" / "O9"), "has none of the blocks"),
        (lambda root: (root / "dev").rename(root / "test"), "dev is no folder; IntPhys has"),
    ],
)
def test_bad_files_are_named(intphys, damage, says):
    damage(intphys)
    with pytest.raises(UserError, match=says):
        find(intphys, image_size=16, every=1)


def test_scenes_of_other_lengths_are_refused(intphys):
    (intphys / "train" / "00002" / "scene" / "scene_009.png").unlink()
    with pytest.raises(UserError, match="00002 has 8 frames, .*00001 has 9"):
        find(intphys, image_size=16, every=1)


def test_seen_frames_do_not_tell_movies_apart():
    """Over a quadruple, possible and impossible movies show the same frames as often."""
    for block in BLOCKS[1:]:
        movies = [played(block=block, movie=movie)[1].numpy() for movie in range(4)]
        for t in range(0, 41, 5):
            seen = [sorted(m[t, b].tobytes() for m in part) for part in (movies[:2], movies[2:]) for b in range(20)]
            assert seen[:20] == seen[20:] and np.array(seen).shape == (40, 2)


def test_an_environment_of_other_movies_is_refused_before_it_is_recorded(tmp_path):
    env = {"id": "worldmodels/BouncingBalls-v0", "kwargs": {"observation": "state"}, "resize": None}
    with pytest.raises(UserError, match="BouncingBalls-v0.*block"):
        Task(env=env, train_episodes=4, quadruples=2, data_dir=tmp_path / "data").collect(quiet=True)
    assert not (tmp_path / "data").exists()
