"""Views as data, the models that read them, and the tasks on them."""

import json
import math
import shutil
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import balanced_accuracy_score, f1_score
from sklearn.metrics import confusion_matrix as sk_confusion

import worldmodels
from worldmodels import checkpoints
from worldmodels.core import Tokens, unroll
from worldmodels.cores.gnn import GNN
from worldmodels.cores.gru import GRU
from worldmodels.cores.lstm import LSTM
from worldmodels.cores.mlp import MLP
from worldmodels.cores.s2rm import S2GRU, S2RMC
from worldmodels.data.collect import collect, collected
from worldmodels.data.views import Views, ViewSource, side_by_side
from worldmodels.decoders import ViewDecoder
from worldmodels.encoders import PolarConv2d, ViewEncoder
from worldmodels.errors import UserError
from worldmodels.losses import polar_loss, polar_parts, polar_truth
from worldmodels.metrics import balanced_accuracy, confusion_matrix, f1_scores, macro_f1
from worldmodels.models.views import ViewWorldModel, view_model
from worldmodels.plugins import build_core
from worldmodels.run import read_evaluation
from worldmodels.seeing import PixelTally, PolarTally, _stitched, said_and_seen
from worldmodels.tasks.views import PartialViews, ViewBatch

from .helpers import given


def make_core(name, token_size=12):
    return {
        "s2gru": lambda: S2GRU(
            token_size, 4, 12, position_size=2, extent=20.0, place_size=8, truncation=0.2, key_size=4
        ),
        "s2rmc": lambda: S2RMC(
            token_size, 3, 12, position_size=2, extent=20.0, place_size=8, key_size=4, memory_rows=2, memory_size=16
        ),
        "lstm": lambda: LSTM(token_size, 1, 16, num_tokens=1),
        "gru": lambda: GRU(token_size, 2, 8, num_tokens=1),
    }[name]()


def make_model(name="s2gru", seen=(1, 7, 7), said=1, polar=False):
    torch.manual_seed(0)
    return view_model(make_core(name), seen, said, channels=4, polar=polar, place_size=8, scale=0.5)


def make_views(T=3, B=2, N=5, shape=(1, 7, 7), seed=0, actions=0):
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(T, B, N, generator=g) < 0.7
    done = torch.rand(T, B, N, actions, *shape[1:], generator=g) if actions else None
    return Views(torch.rand(T, B, N, *shape, generator=g), 20 * torch.rand(T, B, N, 2, generator=g), mask, done)


# Encoders and decoders.


def test_polar_convolution_against_a_plain_loop():
    torch.manual_seed(0)
    layer = PolarConv2d(2, 1, 3)
    maps = torch.randn(1, 2, 4, 6)
    result = layer(maps)
    for i in range(4):
        for j in range(6):
            total = layer.bias[0].clone()
            for c in range(2):
                for di in (-1, 0, 1):
                    for dj in (-1, 0, 1):
                        if 0 <= i + di < 4:  # zeros beyond the rings; the angle goes round
                            total += layer.weight[0, c, di + 1, dj + 1] * maps[0, c, i + di, (j + dj) % 6]
            assert torch.allclose(result[0, 0, i, j], total, atol=1e-5)


def test_polar_networks_turn_with_the_picture():
    torch.manual_seed(0)
    encoder, decoder = PolarConv2d(3, 2, 3), ViewDecoder(5, (2, 9, 18), channels=4, polar=True)
    maps = torch.randn(2, 3, 9, 18)
    assert torch.allclose(encoder(maps.roll(5, -1)), encoder(maps).roll(5, -1), atol=1e-5)
    assert decoder(torch.randn(4, 5)).shape == (4, 2, 9, 18)


@pytest.mark.parametrize("shape", [(1, 11, 11), (23, 9, 18), (3, 5, 5), (2, 1, 1)])
@pytest.mark.parametrize("polar", [False, True])
def test_shapes_in_and_out(shape, polar):
    if polar and shape[1] == 1:
        pytest.skip("a polar view of one pixel has nothing to go round")
    views, places = torch.rand(6, *shape), F.normalize(torch.randn(6, 8), dim=-1)
    assert ViewEncoder(shape, 12, channels=4, polar=polar)(views).shape == (6, 12)
    assert ViewEncoder(shape, 12, channels=4, place_size=8, polar=polar)(views, places).shape == (6, 12)
    index = torch.tensor([0, 0, 1, 1, 1, 0])
    decoder = ViewDecoder(12, shape, channels=4, place_size=8, polar=polar)
    vectors = torch.randn(2, 12)
    said = decoder(vectors, places, index)
    assert said.shape == (6, *shape)
    assert torch.allclose(said, decoder(vectors[index], places), atol=1e-5)


# Views as data.


def test_views_that_report():
    views = make_views(T=50, B=8, N=10)._replace(mask=torch.ones(50, 8, 10, dtype=torch.bool))
    assert views.reported(1.0, torch.Generator()) is views
    kept = views.reported(0.3, torch.Generator().manual_seed(1)).mask
    assert abs(float(kept.float().mean()) - 0.3) < 0.03
    assert kept.float().var(0).min() > 0, "who reports changes from step to step"
    assert views.first(4).mask[..., :4].all() and not views.first(4).mask[..., 4:].any()
    absent = views._replace(mask=torch.zeros_like(views.mask))
    assert not absent.reported(0.5, torch.Generator().manual_seed(1)).mask.any()


def test_batches_of_different_numbers_of_agents_stand_side_by_side():
    few, many = make_views(N=2), make_views(N=5, seed=1)
    both = side_by_side([few, many])
    assert both.mask.shape == (3, 4, 5) and not both.mask[:, :2, 2:].any()
    assert torch.equal(both.observations[:, :2, :2], few.observations) and torch.equal(both.mask[:, 2:], many.mask)
    assert both.actions is None


class Watchers(gym.Env):
    """Two to four eyes on a line see whether the cell before them holds the walker; a last one is never there."""

    observation_space = gym.spaces.Dict(
        {
            "views": gym.spaces.Box(0, 255, (4, 1, 1, 1), np.uint8),
            "positions": gym.spaces.Box(0, 10, (4, 2), np.float32),
            "mask": gym.spaces.MultiBinary(4),
        }
    )
    action_space = gym.spaces.MultiDiscrete([2] * 4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.time = 0, 0
        return self.see(), {}

    def see(self):
        mask = np.array([1, 1, self.time % 2, 0], dtype=np.int8)
        views = np.full((4, 1, 1, 1), 0, dtype=np.uint8)
        views[self.at % 3] = 255
        return {"views": views, "positions": np.arange(8, dtype=np.float32).reshape(4, 2), "mask": mask}

    def step(self, action):
        self.at, self.time = self.at + 1, self.time + 1
        return self.see(), 0.0, False, self.time >= 6, {}


gym.register("test/Watchers-v0", entry_point=Watchers)


def test_views_are_collected_with_positions_and_mask(tmp_path):
    episodes = collect("test/Watchers-v0", tmp_path / "data", episodes=3, steps=6, num_envs=2)
    assert set(episodes.arrays) >= {"observations", "positions", "mask", "actions"}
    assert episodes.arrays["observations"].shape == (21, 4, 1, 1, 1)
    assert episodes.arrays["mask"].dtype == torch.bool
    assert episodes.arrays["mask"][:7].int().tolist() == [[1, 1, t % 2, 0] for t in range(7)]
    assert torch.equal(episodes.arrays["positions"][3], torch.arange(8.0).reshape(4, 2))


def always_left(observation, info):
    return np.zeros((len(observation["mask"]), 4), dtype=np.int64)


def test_what_was_recorded_is_found_again(tmp_path):
    settings = {"env_id": "test/Watchers-v0", "episodes": 2, "steps": 4, "seed": 1, "policy": None}
    first = collected(tmp_path, "train", settings)
    assert len(list(tmp_path.iterdir())) == 1
    again = collected(tmp_path, "train", settings)
    assert torch.equal(first.arrays["actions"], again.arrays["actions"])
    other = collected(tmp_path, "train", settings | {"policy": always_left})
    assert len(list(tmp_path.iterdir())) == 2 and not other.arrays["actions"].any()


# Models.


@pytest.mark.parametrize("name", ["s2gru", "s2rmc", "lstm", "gru"])
def test_a_model_of_views_keeps_its_promises(name):
    model = make_model(name).eval()
    views = make_views()
    asked = 20 * torch.rand(3, 2, 6, 2)
    mask = torch.rand(3, 2, 6) < 0.6
    said = model(views, asked, mask)
    assert said.shape == (int(mask.sum()), 1, 7, 7)
    # Absent views may hold anything.
    noise = views._replace(
        observations=torch.where(views.mask[..., None, None, None], views.observations, torch.inf),
        positions=torch.where(views.mask[..., None], views.positions, 1e6),
    )
    assert torch.allclose(model(noise, asked, mask), said, atol=1e-5)
    # The order of views does not matter.
    order = torch.randperm(5)
    mixed = Views(*(part[:, :, order] for part in views[:3]))
    assert torch.allclose(model(mixed, asked, mask), said, atol=1e-5)
    # What is asked is answered one by one.
    everything = model(views, asked, torch.ones_like(mask))
    assert torch.allclose(everything[mask.flatten()], said, atol=1e-5)
    # The past is not changed by the future.
    later = views._replace(observations=torch.cat([views.observations[:2], views.observations[2:] + 1]))
    whole = torch.ones_like(mask)
    assert torch.allclose(model(later, asked, whole)[: 2 * 2 * 6], everything[: 2 * 2 * 6], atol=1e-5)
    # Whole equals step by step.
    slots, state = model.observe(views)
    carried, parts = None, []
    for t in range(3):
        part, carried = model.observe(views.at(slice(t, t + 1)), carried)
        parts.append(part)
    assert torch.allclose(torch.cat(parts), slots, atol=1e-5)
    # Nothing was seen at all.
    nothing = model(views._replace(mask=torch.zeros_like(views.mask)), asked, mask)
    assert torch.isfinite(nothing).all()
    nobody = model(views, asked, torch.zeros_like(mask))
    assert nobody.shape == (0, 1, 7, 7)


@pytest.mark.parametrize("name", ["s2gru", "lstm"])
def test_every_parameter_of_a_model_of_views_learns(name):
    model = make_model(name)
    views = make_views(T=4, B=16)
    asked = 20 * torch.rand(4, 16, 6, 2)
    model(views, asked, torch.ones(4, 16, 6, dtype=torch.bool)).square().mean().backward()
    still = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not still


def test_the_spatial_model_in_plain_words():
    model = make_model("s2gru").eval()
    views = make_views(T=1, B=1)
    asked = 20 * torch.rand(1, 1, 2, 2)
    there = views.mask[0, 0].nonzero()[:, 0]
    tokens = torch.stack([model.encoder(views.observations[0, 0, a][None])[0] for a in there])
    positions = 0.5 * views.positions[0, 0, there]
    core = model.core
    slots, _ = unroll(core, Tokens(tokens[None, None], positions[None, None]), core.initial_state(1))
    for q in range(2):
        place = 0.5 * asked[0, 0, q]
        answer = core.answer(slots[0, 0], place[None])[0]
        expected = model.decoder(answer[None])
        assert torch.allclose(model(views, asked, torch.tensor([[[q == 0, q == 1]]])), expected, atol=1e-5)


def test_the_scaffold_in_plain_words():
    model = make_model("lstm").eval()
    views = make_views(T=1, B=1)
    from worldmodels.attention import embed_position

    total = torch.zeros(12)
    for a in range(5):
        if views.mask[0, 0, a]:
            place = embed_position(0.5 * views.positions[0, 0, a], 8)
            total = total + model.encoder(views.observations[0, 0, a][None], place[None])[0]
    assert torch.allclose(model.tokens(views).features[0, 0, 0], total, atol=1e-5)
    slots, _ = unroll(model.core, Tokens(total[None, None, None]), model.core.initial_state(1))
    asked = torch.tensor([[[[3.0, 4.0]]]])
    expected = model.decoder(slots[0].flatten(1), embed_position(0.5 * asked[0, 0], 8))
    assert torch.allclose(model(views, asked, torch.ones(1, 1, 1, dtype=torch.bool)), expected, atol=1e-5)


def test_a_core_that_knows_where_needs_positions():
    with pytest.raises(UserError, match="position_size"):
        view_model(S2GRU(12, 4, 12), (1, 7, 7), 1, channels=4, polar=False, place_size=8, scale=1.0)
    config = {"_target_": "worldmodels.cores.s2rm.S2GRU", "position_size": None, "num_tokens": None}
    assert build_core(config, 12, 4, 12, 1, 2).position_size == 2
    with pytest.raises(UserError, match="leave it out"):
        build_core(config | {"position_size": 3}, 12, 4, 12, 1, 2)


def test_a_core_with_a_slot_for_every_token_is_refused():
    with pytest.raises(UserError, match="core=s2gru"):
        view_model(GNN(12, 4, 12), (1, 7, 7), 1, channels=4, polar=False, place_size=8, scale=1.0)


def test_an_imagined_rollout_reads_what_it_said():
    model = make_model("gru").eval()
    prompt = make_views(T=2, B=1, N=3)
    looks, asks = 20 * torch.rand(2, 1, 3, 2), 20 * torch.rand(2, 1, 4, 2)
    said = model.rollout(prompt, looks, asks)
    assert said.shape == (2, 1, 4, 1, 7, 7) and said.min() >= 0 and said.max() <= 1
    whole = torch.ones(1, 3, dtype=torch.bool)
    slots, state = model.observe(prompt)
    first = model.query(slots[-1], asks[0], torch.ones(1, 4, dtype=torch.bool)).sigmoid()
    assert torch.allclose(said[0, 0], first, atol=1e-6)
    guess = (model.query(slots[-1], looks[0], whole).sigmoid() > 0.5).float()
    slots, _ = model.observe(Views(guess[None, None], looks[:1], whole[None]), state)
    second = model.query(slots[-1], asks[1], torch.ones(1, 4, dtype=torch.bool)).sigmoid()
    assert torch.allclose(said[1, 0], second, atol=1e-6)


@pytest.mark.parametrize("name", ["s2gru", "s2rmc", "lstm"])
@pytest.mark.parametrize("actions", [0, 3])
def test_a_world_model_of_modules_in_plain_words(name, actions):
    torch.manual_seed(0)
    core = make_core(name)
    model = ViewWorldModel(
        view_model(core, (1 + actions, 7, 7), None, channels=4, polar=False, place_size=8, scale=0.5)
    )
    views = make_views(T=4, B=2, actions=actions)
    slots, pred_slots = model(views)
    assert slots.shape[:2] == (4, 2) and pred_slots.shape == slots[1:].shape
    states = model.observe(views)[1]
    for t in range(3):
        pred, _ = model.imagine(states[t], views.at(t))
        assert torch.allclose(pred, pred_slots[t], atol=1e-5)
    # What is done does not reach what was seen, but what is imagined.
    if actions:
        other = views._replace(actions=1 - views.actions)
        assert torch.allclose(model(other)[0], slots) and not torch.allclose(model(other)[1], pred_slots)
    # What is seen later does not reach what is imagined.
    later = views._replace(observations=torch.cat([views.observations[:3], 1 - views.observations[3:]]))
    assert torch.allclose(model(later)[1], pred_slots, atol=1e-5)
    rolled = model.rollout(states[0], [views.at(0), views.at(0)])
    assert torch.allclose(rolled[0], pred_slots[0], atol=1e-5) and rolled.shape == (2, *slots.shape[1:])


# Losses and measures.


def test_the_polar_loss_by_hand():
    image = torch.zeros(1, 15, 1, 2)
    image[0, 0, 0, 0] = 1.0  # a friend, a stalker, with half its health, at the first pixel; nobody at the second
    image[0, 1 + 3, 0, 0] = 1.0
    image[0, 10, 0, 0] = 0.5
    friendly, types, hecs = polar_truth(image)
    assert types.tolist() == [[[3, 9]]] and friendly.tolist() == [[[1.0, 0.0]]] and float(hecs.sum()) == 0.5
    loss = polar_loss(torch.zeros(1, 15, 1, 2), image)
    assert math.isclose(loss.friendly, math.log(2), rel_tol=1e-6)
    assert math.isclose(loss.unit_type, math.log(10), rel_tol=1e-6)
    assert math.isclose(loss.hecs, 0.25 / 8, rel_tol=1e-6)
    assert math.isclose(loss.total, math.log(2) + math.log(10) + 0.25 / 8, rel_tol=1e-6)


def test_measures_equal_scikit_learn():
    g = torch.Generator().manual_seed(0)
    pred, true = (torch.randint(4, (500,), generator=g) for _ in range(2))
    matrix = confusion_matrix(pred, true, 5)
    assert matrix[:4, :4].tolist() == sk_confusion(true, pred).tolist() and not matrix[4].any()
    assert math.isclose(balanced_accuracy(matrix), balanced_accuracy_score(true, pred), rel_tol=1e-9)
    assert np.allclose(f1_scores(matrix)[:4], f1_score(true, pred, average=None))
    assert math.isclose(macro_f1(matrix), f1_score(true, pred, average="macro"), rel_tol=1e-9)
    assert math.isclose(macro_f1(matrix, torch.tensor([1, 2])), f1_score(true, pred, average=None)[1:3].mean())
    parts = confusion_matrix(pred[:200], true[:200], 5) + confusion_matrix(pred[200:], true[200:], 5)
    assert torch.equal(parts, matrix)
    binary = confusion_matrix(pred > 1, true > 1, 2)
    assert math.isclose(balanced_accuracy(binary), balanced_accuracy_score(true > 1, pred > 1), rel_tol=1e-9)


def test_tallies_add_up():
    tally = PixelTally()
    truth = torch.tensor([[1.0, 1.0, 0.0, 0.0]])
    tally.add(torch.tensor([[3.0, -1.0, -2.0, -2.0]]), truth)
    assert tally.scores() == {"balanced_accuracy": 0.75, "f1": 2 / 3}
    g = torch.Generator().manual_seed(0)
    images = torch.zeros(20, 15, 3, 4)
    kinds = torch.randint(4, (20, 3, 4), generator=g)  # three types that occur, and nobody
    images[:, 1:4] = F.one_hot(kinds, 4)[..., :3].movedim(-1, 1).float()
    images[:, 0] = ((kinds < 3) & (torch.rand(20, 3, 4, generator=g) < 0.5)).float()
    images[:, 10:14] = torch.rand(20, 4, 3, 4, generator=g)
    said = torch.randn(20, 15, 3, 4, generator=g)
    whole, parts = PolarTally(), PolarTally()
    whole.add(said, images)
    for at in (slice(0, 7), slice(7, 7), slice(7, 20)):
        parts.add(said[at], images[at])
    assert parts.scores() == pytest.approx(whole.scores())
    scores = whole.scores()
    friendly, types, hecs = polar_parts(said)
    assert scores["friendly_f1"] == pytest.approx(f1_score(images[:, 0].flatten() > 0.5, friendly.flatten() > 0))
    labels = torch.where(kinds < 3, kinds, 9).flatten()
    expected = f1_score(labels, types.argmax(1).flatten(), labels=[0, 1, 2], average="macro")
    assert scores["unit_type_f1"] == pytest.approx(expected)
    assert scores["negative_mse"] == pytest.approx(-float((hecs - images[:, 10:14]).square().mean()))
    assert scores["log_likelihood"] == pytest.approx(-float(polar_loss(said, images).total), rel=1e-5)


# Tasks.


SMALL = {"train_episodes": 6, "test_episodes": 4, "steps": 8, "window": 3, "channels": 4, "token_size": 12}
BALLS = {
    "env_id": "worldmodels/BouncingBalls-v0",
    "env_kwargs": {"observation": "state", "fixed_ball": True},
    "train": {"2 balls": {"num_balls": 2}},
    "test": {"1 ball": {"num_balls": 1}, "2 balls": {"num_balls": 2}},
}


def make_task(tmp_path, **options):
    return PartialViews(**(SMALL | BALLS | {"data_dir": str(tmp_path), "prompt": 3, "imagined": 4} | options))


def test_crops_of_a_batch_are_what_the_frames_hold(tmp_path):
    task = make_task(tmp_path)
    batch = task.batches(5, torch.device("cpu"))(torch.Generator().manual_seed(0))
    views = batch.views
    assert views.observations.shape == (4, 5, 10, 11, 11, 1) and views.positions.shape == (4, 5, 10, 2)
    data = task.source("train", "2 balls", torch.device("cpu"))
    for t, b, n in ((0, 0, 0), (3, 4, 9), (1, 2, 5)):
        row = data.episodes.starts[batch.episode[b]] + batch.step[b] + t
        frame = data.env.frames(data.episodes.arrays["observations"][row])
        padded = F.pad(frame[..., 0], (5, 5, 5, 5))
        r, c = views.positions[t, b, n].long().tolist()
        assert torch.equal(views.observations[t, b, n, ..., 0], padded[r : r + 11, c : c + 11])
    again = task.batches(5, torch.device("cpu"))(torch.Generator().manual_seed(0))
    assert torch.equal(again.views.observations, views.observations)


def test_stitched_patches_are_the_frame(tmp_path):
    task = make_task(tmp_path)
    data = task.source("test", "2 balls", torch.device("cpu"))
    states = data.episodes.arrays["observations"][:3]
    line = torch.tensor([7, 18, 29, 40])
    grid = torch.cartesian_prod(line, line).expand(3, 1, -1, 2)
    patches = data.env.crops(states[:, None], grid).movedim(-1, -3).float()
    assert torch.equal(_stitched(patches, 4)[:, 0], data.env.frames(states)[:, 2:46, 2:46, 0].float())


def test_agents_are_asked_where_they_then_are(tmp_path):
    task = make_task(
        tmp_path,
        env_id="worldmodels/Skirmish-v0",
        env_kwargs={"observation": "units", "ends": False},
        policy="worldmodels.envs.skirmish:focus_nearest",
        train={"1s2z": {"scenario": "1s2z"}, "2m": {"scenario": "2m"}},
        test={"1s2z": {"scenario": "1s2z"}},
        polar=True,
        place_size=8,
    )
    batch = task.batches(6, torch.device("cpu"))(torch.Generator().manual_seed(0))
    views = batch.views
    assert views.observations.shape == (4, 6, 3, 15, 9, 18) and views.actions.shape == (4, 6, 3, 8, 9, 18)
    assert not views.mask[:, 3:, 2].any(), "two marines are no three agents"
    assert views.mask[:, :3].any() and (views.observations[0, 0, 0, 0] > 0).any()
    assert set(batch.episode[:3].remainder(2).tolist()) == {0} and set(batch.episode[3:].remainder(2).tolist()) == {1}
    core = S2GRU(12, 4, 12, position_size=2, place_size=8, truncation=0.2, key_size=4)
    model = task.model(given(core), {})
    assert model.encoder.view_shape == (23, 9, 18)
    losses = task.losses(model, batch, torch.Generator())
    assert set(losses) == {"loss", "friendly", "unit_type", "hecs"}
    result = task.evaluate(model)
    assert set(result["views"]["1s2z"]) == {"1", "0.7", "0.4", "0.2"}
    assert set(result["views"]["1s2z"]["1"]) == {"friendly_f1", "unit_type_f1", "negative_mse", "log_likelihood"}


def test_recorded_views_of_any_environment(tmp_path):
    task = PartialViews(
        env_id="test/Watchers-v0",
        data_dir=str(tmp_path),
        **(SMALL | {"steps": 6, "token_size": 12, "fractions": [1.0]}),
    )
    views = task.batches(4, torch.device("cpu"))(torch.Generator().manual_seed(0)).views
    assert views.observations.shape == (4, 4, 4, 1, 1, 1) and views.actions.shape == (4, 4, 4, 2, 1, 1)
    assert not views.mask[..., 3].any()
    data = task.source("train", "train", torch.device("cpu"))
    assert torch.equal(views.actions.argmax(2 + 1)[..., 0, 0].flatten().unique(), torch.tensor([0, 1]))
    assert data.episodes.arrays["mask"].any()
    model = task.model(given(make_core("lstm")), {})
    assert set(task.evaluate(model)["views"]["test"]["1"]) == {"balanced_accuracy", "f1"}


def test_nothing_of_the_future_is_said(tmp_path):
    """What is said of step t + 1 depends on nothing that is seen after step t; what is asked are the views of t + 1."""
    task = make_task(tmp_path)
    model = task.model(given(make_core("s2gru")), {}).eval()
    views = task.batches(2, torch.device("cpu"))(torch.Generator().manual_seed(0)).views
    views = views._replace(
        mask=views.mask & (torch.rand(views.mask.shape, generator=torch.Generator().manual_seed(1)) < 0.7)
    )
    said, truth = said_and_seen(model, views, oracle=task.oracle)
    per_step = views.mask[1:].sum((1, 2)).tolist()
    assert len(said) == len(truth) == sum(per_step)
    for step in range(1, 4):
        later = views._replace(
            observations=torch.cat([views.observations[:step], 255 - views.observations[step:]]),
        )
        known = sum(per_step[:step])
        assert torch.equal(said_and_seen(model, later, oracle=task.oracle)[0][:known], said[:known])
    there = views.mask[1:].nonzero()
    for n in (0, len(there) // 2, len(there) - 1):
        t, b, a = there[n].tolist()
        assert torch.equal(truth[n, 0], views.observations[1 + t, b, a, ..., 0] / 255)


def test_who_reports_in_the_test(tmp_path):
    task = make_task(tmp_path)
    data = task.source("test", "2 balls", torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    ((_, views),) = list(data.whole(generator, 20_000))
    for share in (1.0, 0.4, 0.01):
        reported = data.reporting(views, share, generator).mask
        assert (reported.sum(-1) == max(1, round(10 * share))).all()
    agents = ViewSource(data.episodes, object(), 10).reporting(views, 0.5, generator).mask.float()
    assert 0.3 < float(agents.mean()) < 0.7 and float(agents.sum(-1).var()) > 0


def test_some_crops_linger_in_training_and_none_in_the_test(tmp_path):
    task = make_task(tmp_path, lingering=0.5)
    positions = task.batches(4, torch.device("cpu"))(torch.Generator().manual_seed(0)).views.positions
    assert torch.equal(positions[1:, :, :5], positions[:-1, :, 5:])
    assert not torch.equal(positions[1:, :, 5:], positions[:-1, :, :5])
    source = task.source("test", "2 balls", torch.device("cpu"))
    ((_, views),) = list(source.whole(torch.Generator().manual_seed(3), 20_000))
    assert not torch.equal(views.positions[1:, :, :5], views.positions[:-1, :, 5:])


def test_every_variant_gets_its_share(tmp_path):
    task = make_task(
        tmp_path, train={"1 ball": {"num_balls": 1}, "2 balls": {"num_balls": 2}, "3 balls": {"num_balls": 3}}
    )
    draw, generator = task.batches(2, torch.device("cpu")), torch.Generator().manual_seed(0)
    drawn = torch.stack([draw(generator).episode % 3 for _ in range(60)])
    assert drawn.shape == (60, 2) and (drawn[:, 0] != drawn[:, 1]).all()
    assert torch.bincount(drawn.flatten(), minlength=3).min() > 25


class Short(Watchers):
    """Watchers whose episodes end after 4 to 9 steps."""

    def step(self, action):
        observation, reward, _, _, info = super().step(action)
        return observation, reward, self.time >= self.ends, False, info

    def reset(self, *, seed=None, options=None):
        found = super().reset(seed=seed)
        self.ends = 4 + int(self.np_random.integers(6))
        return found


gym.register("test/Short-v0", entry_point=Short)


@pytest.mark.parametrize("objective", ["views", "contrastive"])
def test_episodes_of_all_lengths_are_scored_whole(tmp_path, objective):
    task = PartialViews(
        env_id="test/Short-v0",
        data_dir=str(tmp_path),
        objective=objective,
        **(SMALL | {"steps": 9, "test_episodes": 12, "fractions": [1.0], "horizons": [1, 2]}),
    )
    model = task.model(given(make_core("gru")), {}).eval()
    data = task.source("test", "test", torch.device("cpu"))
    lengths = data.episodes.lengths
    assert lengths.min() < lengths.max()
    ((rows, views),) = list(data.whole(torch.Generator().manual_seed(3), 20_000))
    assert rows.shape == (int(lengths.max()) + 1, 12)
    expected = sum(
        int(data.episodes.arrays["mask"][s : s + n + 1].sum())
        for s, n in zip(data.episodes.starts, lengths, strict=True)
    )
    assert int(views.mask.sum()) == expected
    result = task.evaluate(model)
    if objective == "contrastive":
        assert result["ranked"]["test"]["all"]["1"]["n"] == int((lengths >= 7).sum()) < 12


def test_absent_views_may_hold_anything_in_training_too():
    for name in ("s2gru", "lstm"):
        model = make_model(name)
        views = make_views()
        strange = views._replace(positions=torch.where(views.mask[..., None], views.positions, torch.nan))
        asked = views.at(slice(1, None))
        model(strange.at(slice(0, 2)), strange.positions[1:], asked.mask).square().mean().backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("seen_before", [False, True])
@pytest.mark.parametrize("name", ["s2gru", "s2rmc", "lstm"])
@pytest.mark.parametrize("polar", [False, True])
def test_a_batch_in_which_nobody_sees_anything_has_no_loss(tmp_path, polar, name, seen_before):
    """Every gradient is there, as two processes need them, and zero; what was seen before makes no difference."""
    task = make_task(tmp_path, polar=polar)
    shape, said = ((15, 3, 6), 15) if polar else ((1, 7, 7), 1)
    model = make_model(name, shape, said, polar)
    views = make_views(shape=shape)
    batch = ViewBatch(views, torch.zeros(2).long(), torch.zeros(2).long())
    task.losses(model, batch, torch.Generator())["loss"].backward()
    expected = {key for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    mask = torch.zeros_like(views.mask)
    mask[0] = seen_before
    values = task.losses(model, batch._replace(views=views._replace(mask=mask)), torch.Generator())
    assert all(float(value.detach()) == 0.0 for value in values.values())
    values["loss"].backward()
    grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    assert set(grads) == expected and not any(bool(grad.any()) for grad in grads.values())


def test_the_oracle_sees_what_it_is_asked(tmp_path):
    task = make_task(tmp_path, oracle=True)
    model = task.model(given(MLP(12, 1, 16, num_tokens=1)), {})
    views = task.batches(3, torch.device("cpu"))(torch.Generator().manual_seed(0)).views
    said, truth = said_and_seen(model, views, oracle=task.oracle)
    blind = views._replace(observations=torch.cat([0 * views.observations[:1], views.observations[1:]]))
    assert torch.equal(said_and_seen(model, blind, oracle=task.oracle)[0], said), (
        "the first views are never shown to it"
    )
    changed = views._replace(observations=torch.cat([views.observations[:-1], 255 - views.observations[-1:]]))
    assert not torch.equal(said_and_seen(model, changed, oracle=task.oracle)[0][-30:], said[-30:])
    with pytest.raises(UserError, match="oracle"):
        task.model(given(make_core("lstm")), {})


def test_modules_can_be_taken_away(tmp_path):
    task = make_task(tmp_path, removed=[0, 2, 9], fractions=[1.0])
    model = task.model(given(make_core("s2gru")), {}).eval()
    result = task.evaluate(model)
    assert set(result["removed"]["2 balls"]) == {"0", "2"}, "nine of four modules cannot go"
    assert result["removed"]["2 balls"]["0"] == result["views"]["2 balls"]["1"]


def test_a_perfect_copy_of_a_world_at_rest(tmp_path):
    task = make_task(tmp_path, env_kwargs=BALLS["env_kwargs"] | {"speed": 0.0}, fractions=[1.0])
    result = task.evaluate(task.model(given(make_core("gru")), {}).eval())
    assert result["copy"]["1 ball"] == {"balanced_accuracy": 1.0, "f1": 1.0}
    assert result["rollout"]["1 ball"]["copy"] == [1.0] * 4


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"env_id": None}, "no environment"),
        ({"objective": "guess"}, "task.objective"),
        ({"train_seed": 3}, "test data must be others"),
        ({"window": 9}, "does not fit"),
        ({"place_size": 10}, "task.place_size=10"),
        ({"prompt": 0}, "task.prompt=0"),
        ({"prompt": 20}, "rollout"),
        ({"fractions": []}, "task.fractions"),
        ({"env_kwargs": {"observation": "crops"}}, "observation=state"),
        ({"fractions": [0.0]}, "task.fractions"),
        ({"channels": 0}, "task.channels=0"),
        ({"objective": "contrastive", "horizons": [9]}, "task.horizons"),
        ({"policy": "nowhere:nothing"}, "cannot be imported"),
        ({"env_id": "CartPole-v1", "env_kwargs": {}, "train": {"a": {}}, "test": {"a": {}}}, "expected a Dict"),
    ],
)
def test_wrong_options_get_one_line(tmp_path, options, line):
    with pytest.raises(UserError, match=line) as caught:
        task = make_task(tmp_path, **options)
        task.batches(2, torch.device("cpu")) if "policy" in options else task.model(given(make_core("gru")), {})
    assert "\n" not in str(caught.value)


EXPERIMENTS = ["balls_crops", "skirmish"]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
@pytest.mark.parametrize("objective", ["views", "contrastive"])
def test_experiments_train_evaluate_and_resume_exactly(tmp_path, monkeypatch, experiment, objective):
    monkeypatch.chdir(tmp_path)
    words = [
        f"experiment={experiment}",
        "size=smoke",
        "core=s2gru",
        "logger.progress=false",
        f"task.objective={objective}",
    ]
    if objective == "contrastive":
        words += ["task.horizons=[1,2]"]
    whole = worldmodels.train(*words, "run=runs/whole")
    result = whole.evaluate()
    assert read_evaluation(whole.path) == json.loads(json.dumps(result))
    assert all(math.isfinite(value) for value in result["scores"].values())
    assert all(path.is_file() for path in whole.draw())
    again = worldmodels.load("runs/whole")
    assert again.evaluate()["scores"] == result["scores"]
    worldmodels.train(*words, "run=runs/part")
    shutil.rmtree(checkpoints.latest(Path("runs/part")))  # as if it had been killed at the checkpoint before
    assert checkpoints.step_of(checkpoints.latest(Path("runs/part"))) == 2
    resumed = worldmodels.train("resume=runs/part")
    for (name, a), (_, b) in zip(whole.model.state_dict().items(), resumed.model.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("core", ["lstm", "rims", "rmc", "s2rmc", "gru", "scoff"])
def test_every_memory_fits_the_scaffold(tmp_path, monkeypatch, core):
    monkeypatch.chdir(tmp_path)
    run = worldmodels.train(
        "experiment=balls_crops",
        "size=smoke",
        f"core={core}",
        "logger.progress=false",
        "logger.figures=false",
        "run=runs/one",
    )
    assert run.evaluate()["parameters"] > 0


@pytest.mark.learning
def test_learning_to_track_a_ball(tmp_path, learned):
    """A small frame with one ball in it: S2GRU soon knows where it goes.

    Baseline: a model that says the same everywhere has a balanced accuracy of 0.5, and so has one that knows how often
    each place holds the ball (nowhere half of the time). Measured: 20 seeds of 20 come above 0.65 (0.67 to 0.76) after
    200 to 400 steps of the 900.
    """
    task = make_task(
        tmp_path,
        env_kwargs={"observation": "state", "image_size": 16, "radius": 3.0, "num_balls": 1, "crop_size": 7},
        train={"1 ball": {}},
        test={"1 ball": {}},
        train_episodes=200,
        test_episodes=20,
        steps=20,
        window=8,
        num_views=6,
        lingering=0.5,
        channels=8,
        token_size=32,
        place_size=32,
        placed=True,
        fractions=[1.0],
        prompt=6,
        imagined=3,
    )
    draw = task.batches(16, torch.device("cpu"))

    def accuracy(seed):
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        core = S2GRU(32, 4, 32, position_size=2, extent=16.0, place_size=32, truncation=0.2)
        model = task.model(given(core), {})
        optimizer = torch.optim.Adam(model.parameters(), 2e-3)
        for step in range(1, 901):
            optimizer.zero_grad()
            task.losses(model.train(), draw(generator), generator)["loss"].backward()
            optimizer.step()
            if step >= 200 and step % 25 == 0:
                share = task.evaluate(model.eval())["views"]["1 ball"]["1"]["balanced_accuracy"]
                if share > 0.65:
                    break
        return share

    learned(accuracy, lambda share: share > 0.65)
