"""Towers: the convolutional interaction network, rules on maps, RPIN around them, its files, and the task."""

import pickle
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from torch.distributions import Normal, kl_divergence

from worldmodels.cli import main
from worldmodels.core import Tokens
from worldmodels.cores.cin import CIN
from worldmodels.cores.gru import GRU
from worldmodels.cores.mlp import MLP
from worldmodels.cores.nps import PNPS, SNPS
from worldmodels.data.shapestacks import ShapeStacks
from worldmodels.envs.towers import Towers
from worldmodels.errors import UserError
from worldmodels.grouped import GroupedConvolutions
from worldmodels.models.rpin import roi_align, rpin_model
from worldmodels.tasks.stacks import Stacks, corners, middles

TOWERS = {"id": "worldmodels/Towers-v0", "kwargs": {"observation": "state", "overhang": 1.5, "image_size": 32}}
SMALL = {"train_episodes": 12, "test_episodes": 6, "window": 3, "channels": 8, "roi_size": 3, "latent_size": 2}


def built(core, token_size, *, num_slots, slot_size, num_tokens, **options):
    return core(token_size, num_slots, slot_size, **options)


def rpin(core=CIN, latent_size=0, **options):
    torch.manual_seed(0)
    maker = partial(built, core, **({"map_size": 3} | options))
    return rpin_model(maker, num_slots=3, channels=8, roi_size=3, latent_size=latent_size)


def task(tmp_path, steps=10, **options):
    return Stacks(env=TOWERS, trainer={"steps": steps}, data_dir=tmp_path, **(SMALL | {"samples": 3} | options))


def scene(B=2, K=3):
    generator = torch.Generator().manual_seed(1)
    low = torch.rand(B, K, 2, generator=generator) * 0.5
    size = 0.1 + 0.3 * torch.rand(B, K, 2, generator=generator)
    return torch.rand(B, 3, 32, 32, generator=generator), torch.cat([low, low + size], dim=-1)


# Regions.


def test_a_map_of_a_ramp_shows_where_its_places_are():
    """Features that say their own column and row: each place of a map is at the middle of its part of the box."""
    row, column = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    features = torch.stack([column, row])[None] + 0.5  # of their middles
    box = torch.tensor([[[4.0, 2.0, 12.0, 8.0], [3.0, 3.0, 6.0, 15.0]]]) / 16
    x, y = roi_align(features, box, 4)[0, 0]
    assert torch.allclose(x[0], torch.tensor([5.0, 7.0, 9.0, 11.0])) and torch.allclose(x[0], x[3])
    assert torch.allclose(y[:, 0], torch.tensor([2.75, 4.25, 5.75, 7.25]))
    x, y = roi_align(features, box, 4)[0, 1]
    assert torch.allclose(x[0], 3.0 + 3.0 * (torch.arange(4) + 0.5) / 4)
    assert torch.allclose(y[:, 0], 3.0 + 12.0 * (torch.arange(4) + 0.5) / 4)


@torch.no_grad()
def test_maps_are_plain_bilinear_means():
    features = torch.randn(2, 5, 6, 6, dtype=torch.float64)
    boxes = torch.tensor([[[-0.1, 0.2, 0.6, 1.1]], [[0.3, 0.0, 0.9, 0.5]]], dtype=torch.float64)
    found = roi_align(features, boxes, 3)
    for b in range(2):
        left, top, right, bottom = boxes[b, 0].tolist()
        for i, j in np.ndindex(3, 3):
            total = torch.zeros(5, dtype=torch.float64)
            for u, v in np.ndindex(2, 2):
                x = 6 * (left + (right - left) * (2 * j + u + 0.5) / 6) - 0.5
                y = 6 * (top + (bottom - top) * (2 * i + v + 0.5) / 6) - 0.5
                x, y = min(max(x, 0.0), 5.0), min(max(y, 0.0), 5.0)
                x0, y0 = min(int(x), 4), min(int(y), 4)
                for dx, dy in np.ndindex(2, 2):
                    weight = (1 - abs(x - x0 - dx)) * (1 - abs(y - y0 - dy))
                    total += weight * features[b, :, y0 + dy, x0 + dx]
            assert torch.allclose(found[b, 0, :, i, j], total / 4)


# The core, and rules on maps.


@torch.no_grad()
@pytest.mark.parametrize("map_size", [1, 3])
def test_the_interaction_network_is_a_plain_sum_over_pairs(map_size):
    torch.manual_seed(0)
    C, A, D = 4, 2, 4 * map_size**2
    core = CIN(D + A, 3, D, map_size=map_size).double()
    features = torch.randn(2, 4, D + A, dtype=torch.float64)
    mask = torch.tensor([[True, True, True, True], [True, False, True, True]])
    change, _ = core(core.prepare(Tokens(features, mask=mask)), {})
    for b in range(2):
        there = mask[b].nonzero().flatten().tolist()
        maps = {}
        for k in there:
            own, attached = features[b, k].split([D, A])
            spread = attached[:, None, None].expand(A, map_size, map_size)
            maps[k] = torch.cat([own.view(C, map_size, map_size), spread])[None]
        weights = torch.cat([core.first.weight, core.second.weight], dim=1)
        for k in there:
            total = core.alone(maps[k]).relu()
            for j in there:
                if j != k:
                    pair = torch.cat([maps[k], maps[j]], dim=1)
                    edge = torch.nn.functional.conv2d(pair, weights, core.first.bias, padding=core.first.padding)
                    total = total + edge.relu()
            z = core.aggregate(torch.cat([core.affect(total).relu(), maps[k]], dim=1)).relu()
            assert torch.allclose(features[b, k, :D] + change[b, k], z.flatten())


@torch.no_grad()
def test_grouped_convolutions_are_networks_side_by_side():
    torch.manual_seed(0)
    networks = GroupedConvolutions(3, 2, 4 * 9, 2, 5, 3).double()
    pair = torch.randn(2, 7, 2 * (4 * 9 + 2), dtype=torch.float64)
    found = networks.of_one(pair)
    assert found.shape == (2, 7, 3, 36)
    for n in range(3):
        hidden = torch.nn.Conv2d(12, 5, 3, padding=1).double()
        hidden.weight.copy_(networks.hidden.weight[5 * n : 5 * n + 5])
        hidden.bias.copy_(networks.hidden.bias[5 * n : 5 * n + 5])
        output = torch.nn.Conv2d(5, 4, 3, padding=1).double()
        output.weight.copy_(networks.output.weight[4 * n : 4 * n + 4])
        output.bias.copy_(networks.output.bias[4 * n : 4 * n + 4])
        for b, p in np.ndindex(2, 7):
            parts = []
            for token in pair[b, p].view(2, 38):
                parts += [token[:36].view(4, 3, 3), token[36:, None, None].expand(2, 3, 3)]
            assert torch.allclose(found[b, p, n], output(hidden(torch.cat(parts)[None]).relu()).flatten())


@pytest.mark.parametrize("core", [PNPS, SNPS])
@pytest.mark.parametrize("gradient", ["inputs", "outputs"])
def test_rules_on_maps_change_the_chosen_slots_by_the_chosen_network(core, gradient):
    torch.manual_seed(0)
    rules = core(36, 3, 36, num_rules=2, hidden_size=4, map_size=3, gradient=gradient).double().eval()
    slots = torch.randn(5, 3, 36, dtype=torch.float64)
    change, chosen = rules.run(Tokens(slots))
    for b in range(5):
        for k in range(3):
            if core is PNPS:
                rule, context = int(chosen["rule"][b, 0, k]), int(chosen["context"][b, 0, k])
            else:
                acts = int(chosen["primary"][b, 0]) == k
                rule, context = (int(chosen["rule"][b, 0]) if acts else -1), int(chosen["context"][b, 0])
            expected = torch.zeros(36, dtype=torch.float64)
            if rule >= 0:
                expected = rules.rules.mlps.of_one(torch.cat([slots[b, k], slots[b, context]]))[rule]
            assert torch.allclose(change[b, k], expected)
    trained, _ = rules.train().run(Tokens(slots.requires_grad_()))
    trained.square().sum().backward()
    for name, parameter in rules.named_parameters():
        assert parameter.grad is not None and float(parameter.grad.abs().sum()) > 0, name


@pytest.mark.parametrize("core", [partial(CIN, map_size=5), partial(PNPS, map_size=5), partial(SNPS, map_size=5)])
def test_slots_that_are_no_maps_are_refused(core):
    with pytest.raises(ValueError, match=r"slot_size is 36 and map_size 5"):
        core(36, 3, 36)


# The model.


@torch.no_grad()
@pytest.mark.parametrize("core", [CIN, PNPS])
def test_boxes_are_said_of_each_tower_alone_in_any_order(core):
    model = rpin(core).eval()
    pictures, boxes = scene(B=3)
    said, distance = model(pictures, boxes, 4)
    assert said.shape == (4, 3, 3, 4) and float(distance) == 0
    alone, _ = model(pictures[1:2], boxes[1:2], 4)
    turned, _ = model(pictures, boxes.flip(1), 4)
    assert torch.allclose(said[:, 1:2], alone, atol=1e-5) and torch.allclose(said.flip(2), turned, atol=1e-5)
    more, _ = model(pictures, torch.cat([boxes, boxes[:, :1]], dim=1), 4)
    assert more.shape == (4, 3, 4, 4)


@torch.no_grad()
def test_a_step_is_the_core_then_the_predictor():
    model = rpin().eval()
    pictures, boxes = scene()
    maps = model.embed(roi_align(model.backbone(pictures), boxes, 3).flatten(0, 1))
    said, _ = model(pictures, boxes, 3)
    read = model.tokens(pictures, boxes, 3).features
    for t in range(3):
        slots = maps.flatten(1).view(2, 3, -1)
        assert torch.allclose(read[t], slots, atol=1e-6)
        maps = model.predict((slots + model.core(Tokens(slots), {})[0]).view(6, 8, 3, 3))
        assert torch.allclose(said[t], model.box(maps.flatten(1)).view(2, 3, 4), atol=1e-6)


def test_the_latent_is_drawn_from_what_comes_and_else_from_the_prior():
    model = rpin(latent_size=2)
    pictures, boxes = scene()
    later = torch.rand(2, 3, 32, 32)
    said, distance = model(pictures, boxes, 3, later, torch.Generator().manual_seed(0))
    assert int(model.batches) == 1
    model.eval()
    _, told = model(pictures, boxes, 3, later, torch.Generator().manual_seed(0))
    both = model.backbone(torch.cat([pictures, later]))
    mean, log_variance = model.posterior(model.compare(torch.cat(both.split(2), dim=1))).chunk(2, dim=-1)
    prior = kl_divergence(Normal(mean, (0.5 * log_variance).exp()), Normal(torch.zeros(2, 2), torch.ones(2, 2)))
    assert torch.allclose(told, prior.mean(), atol=1e-6) and int(model.batches) == 1
    drawn = [model(pictures, boxes, 3, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert all(float(part[1]) == 0 for part in drawn)
    assert torch.equal(drawn[0][0], drawn[1][0]) and not torch.allclose(drawn[0][0], drawn[2][0])
    (said.square().sum() + distance).backward()
    idle = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert idle == ["unfold.weight_ih_l0"]  # of what the LSTM reads, which is nothing


# The task.


def test_middles_and_corners_by_hand():
    box = torch.tensor([0.1, 0.2, 0.5, 0.4])
    assert torch.allclose(middles(box), torch.tensor([0.3, 0.3, 0.4, 0.2]))
    assert torch.allclose(corners(middles(box)), box)


def test_batches_are_frames_and_boxes_of_the_same_tower_mirrored_or_not(tmp_path):
    towers = task(tmp_path, every=4)
    first, later, boxes = towers.batches(40, torch.device("cpu"))(torch.Generator().manual_seed(0))
    assert first.shape == later.shape == (40, 3, 32, 32) and boxes.shape == (4, 40, 3, 4)
    env = Towers(12, observation="state", overhang=1.5, image_size=32)
    states = [env.reset(seed=1)[0]]
    states += [env.step(torch.zeros(12, dtype=torch.int64))[0] for _ in range(12)]
    straight = torch.stack([env.boxes(part) for part in states[::4]]) / 32  # (4, 12, 3, 4)
    left, top, right, bottom = straight.unbind(-1)
    mirrored = torch.stack([1 - right, top, 1 - left, bottom], dim=-1)
    frames = env.frames(torch.stack([states[0], states[12]])).permute(0, 1, 4, 2, 3) / 255
    seen = {"straight": 0, "mirrored": 0}
    for i in range(40):
        for n in range(12):
            if torch.allclose(boxes[:, i], straight[:, n], atol=1e-5):
                assert torch.allclose(first[i], frames[0, n]) and torch.allclose(later[i], frames[1, n])
                seen["straight"] += 1
            if torch.allclose(boxes[:, i], mirrored[:, n], atol=1e-5):
                assert torch.allclose(first[i], frames[0, n].flip(-1))
                assert torch.allclose(later[i], frames[1, n].flip(-1))
                seen["mirrored"] += 1
    assert sum(seen.values()) == 40 and min(seen.values()) > 8


class _Said(torch.nn.Module):
    """Says the same boxes at every step, and a distance of 2."""

    def __init__(self, batches=1):
        super().__init__()
        self.batches = torch.tensor(batches)

    def forward(self, pictures, boxes, steps, later, generator):
        return torch.zeros(steps, *boxes.shape), torch.tensor(2.0)


def test_the_loss_counts_later_frames_more_as_training_goes_on(tmp_path):
    towers = task(tmp_path, steps=10, window=2, latent_weight=0.5)
    boxes = torch.zeros(3, 1, 1, 4)
    boxes[1, ..., 2:] = 2.0  # middle (1, 1), size (2, 2): squared error 10
    boxes[2, ..., 2:] = 4.0  # 40
    batch = (torch.zeros(1), torch.zeros(1), boxes)
    start = towers.losses(_Said(1), batch, torch.Generator())
    assert float(start["boxes"]) == pytest.approx((10 + 0.1 * 40) / 1.1) and float(start["latent"]) == 2.0
    assert float(start["loss"]) == pytest.approx(float(start["boxes"]) + 1.0)
    half = towers.losses(_Said(6), batch, torch.Generator())
    assert float(half["boxes"]) == pytest.approx((10 + 0.55 * 40) / 1.55)
    assert float(towers.losses(_Said(99), batch, torch.Generator())["boxes"]) == pytest.approx(25.0)


def test_scores_are_those_of_the_best_sample(tmp_path):
    towers = task(tmp_path)
    model = rpin(latent_size=2).eval()
    result = towers.evaluate(model)
    assert result == towers.evaluate(model) and result["n"] == {"test": 6, "transfer": 6}
    source = towers._source("test", torch.device("cpu"))
    first, _, boxes = source.starts(torch.arange(6))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        runs = [model(first.permute(0, 3, 1, 2) / 255, boxes[0], 6, generator=generator)[0] for _ in range(3)]
    errors = torch.stack([(said - middles(boxes[1:]))[..., :2].square().sum(-1).mean(-1) for said in runs])
    best = errors.mean(1).argmin(0)
    chosen = torch.stack([errors[best[i], :, i] for i in range(6)], dim=1)
    assert result["scores"]["error/test/3"] == pytest.approx(1e3 * float(chosen[:3].mean()), rel=1e-5)
    assert result["scores"]["error/test/6"] == pytest.approx(1e3 * float(chosen[3:].mean()), rel=1e-5)
    stays = (middles(boxes[1:]) - middles(boxes[:1]))[..., :2].square().sum(-1).mean((1, 2))
    assert result["errors"]["test"]["copy"] == pytest.approx(stays.tolist(), rel=1e-4, abs=1e-9)
    assert towers.evaluate(model, limit=2)["n"] == {"test": 2, "transfer": 2}


@pytest.mark.parametrize(
    ("core", "options", "told"),
    [
        (GRU, {}, "towers need a core without a state, such as core=cin, pnps or gnn; GRU has one"),
        (MLP, {}, "MLP cannot be given towers of another height"),
        (partial(CIN, map_size=2), {"slot_size": 8}, "core.slot_size=8; slots of this task are maps of 72 features"),
        (partial(CIN, map_size=6), {}, "core.map_size=6, and task.roi_size=3"),
    ],
)
def test_cores_that_do_not_fit_are_refused(tmp_path, core, options, told):
    towers = task(tmp_path)

    def maker(size, *, num_tokens, num_slots, slot_size):
        if core is GRU:
            return GRU(size, 1, size, num_tokens=num_tokens)
        return core(size, num_slots, options.get("slot_size", slot_size))

    with pytest.raises(UserError, match=told):
        towers.model(maker, {"num_blocks": 3})


@pytest.mark.parametrize(
    ("env", "options", "told"),
    [
        ({"id": None, "kwargs": {}}, {}, "no environment was named; give experiment=stacks"),
        ({**TOWERS, "resize": [32, 32]}, {}, "set env.kwargs.image_size"),
        (TOWERS, {"channels": 12}, "task.channels=12; expected a multiple of 8"),
        (TOWERS, {"every": 0}, "task.every=0"),
        (TOWERS, {"latent_size": -1}, "task.latent_size=-1"),
        (TOWERS, {"train_seed": 3}, "test data must be others"),
        (TOWERS, {"data": "ss", "image_size": 100}, "frames are 100 x 100"),
    ],
)
def test_settings_that_cannot_be_are_refused(env, options, told):
    with pytest.raises(UserError, match=told):
        Stacks(env=env, trainer={"steps": 1}, **options)


@pytest.mark.parametrize(
    ("env_id", "kwargs", "told"),
    [
        ("worldmodels/Sprites-v0", {"observation": "state"}, "Sprites-v0 does not tell where things are"),
        ("worldmodels/Towers-v0", {"observation": "state", "image_size": 48}, "frames are 48 x 48"),
    ],
)
def test_environments_without_boxes_are_refused_before_they_are_recorded(tmp_path, env_id, kwargs, told):
    towers = Stacks(env={"id": env_id, "kwargs": kwargs}, trainer={"steps": 1}, data_dir=tmp_path, **SMALL)
    with pytest.raises(UserError, match=told):
        towers.collect()
    assert list(tmp_path.iterdir()) == []


def test_towers_are_trained_on_drawn_and_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for core in ("cin", "pnps"):
        assert main(["train", "experiment=stacks", f"core={core}", "size=smoke", f"run=runs/{core}"]) == 0
        found = {path.name for path in (tmp_path / "runs" / core / "figures").iterdir()}
        assert {"errors.png", "boxes_test.png", "boxes_test.gif", "boxes_transfer.png"} <= found
        assert ("choices.png" in found) == (core == "pnps")
    capsys.readouterr()
    assert main(["report", "runs/cin", "runs/pnps"]) == 0
    told = capsys.readouterr().out
    assert "boxes that stay" in told and "6.377" in told and "cin" in told
    assert main(["train", "experiment=stacks", "core=scoff", "size=smoke", "run=runs/scoff"]) != 0
    assert "towers need a core without a state" in capsys.readouterr().err


@pytest.mark.parametrize(("core", "options"), [(CIN, {}), (PNPS, {"num_rules": 2, "hidden_size": 16})])
def test_boxes_are_said_better_than_by_their_mean(tmp_path, core, options):
    """150 steps bring the error of the first frames to about half of that of saying where boxes are on average."""
    towers = task(tmp_path, 150, every=4, window=4, train_episodes=300, test_episodes=50, channels=16, latent_size=0)
    torch.manual_seed(0)
    model = towers.model(partial(built, core, map_size=3, **options), {"num_blocks": 3}).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    draw, generator = towers.batches(16, torch.device("cpu")), torch.Generator().manual_seed(0)
    for _ in range(150):
        optimizer.zero_grad()
        towers.losses(model, draw(generator), generator)["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    result = towers.evaluate(model.eval())
    trained, tested = (towers._source(which, torch.device("cpu")) for which in ("", "test"))
    mean = middles(trained.starts(torch.arange(300)).boxes[1:5])[..., :2].mean((1, 2), keepdim=True)
    true = middles(tested.starts(torch.arange(50)).boxes[1:5])[..., :2]
    assert result["scores"]["error/test/4"] < 0.75e3 * float((true - mean).square().sum(-1).mean())


# RPIN's files.


def write(folder, video, boxes, size=64, protocol=2):
    (folder / video).mkdir(parents=True)
    for t in range(len(boxes)):
        picture = np.full((size, size, 3), 40 + t, dtype=np.uint8)
        Image.fromarray(picture).save(folder / video / f"{t:03d}.jpg", quality=95)
    (folder / f"{video}_boxes.pkl").write_bytes(pickle.dumps(boxes, protocol=protocol))


def towers_in_files(T=7, K=3):
    rows = np.zeros((T, K, 5))
    for t, k in np.ndindex(T, K):
        rows[t, k] = (k, 8 + t, 16 * k, 24 + t, 16 * k + 16)
    return rows


def test_files_of_shapestacks_are_read(tmp_path):
    for protocol, video in enumerate(("0001", "0002", "0003", "0004", "0005")):
        write(tmp_path / "train", video, towers_in_files(), protocol=protocol)
    write(tmp_path / "train", "0006", towers_in_files(T=3))
    found = ShapeStacks(tmp_path / "train", steps=6, later=3, image_size=32)
    assert len(found) == 5 and found.left_out == 1
    first, later, boxes = found.starts(torch.tensor([4, 0]))
    assert first.shape == (2, 32, 32, 3) and boxes.shape == (7, 2, 3, 4)
    assert abs(int(first[0, 0, 0, 0]) - 40) <= 2 and abs(int(later[0, 0, 0, 0]) - 43) <= 2
    assert torch.allclose(boxes[2, 1, 1], torch.tensor([10.0, 16.0, 26.0, 32.0]) / 64)
    assert found.film(0).shape == (7, 32, 32, 3)


def test_shapestacks_is_trained_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, K in (("train", 3), ("test", 3), ("ss4", 4)):
        for video in range(4):
            write(tmp_path / "ss" / name, f"{video:04d}", towers_in_files(K=K))
    words = ["experiment=stacks", "core=pnps", "size=smoke", "task.data=ss", "run=runs/ss"]
    assert main(["train", *words]) == 0
    assert "transfer" in capsys.readouterr().out
    assert (tmp_path / "runs/ss/figures/boxes_transfer.gif").is_file()


class _Opens:
    def __reduce__(self):
        return open, ("opened", "w")


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda f: (f / "0001_boxes.pkl").unlink(), "0001_boxes.pkl cannot be read"),
        (lambda f: (f / "0001_boxes.pkl").write_bytes(b"no"), "0001_boxes.pkl is no pickled array of boxes"),
        (lambda f: (f / "0001_boxes.pkl").write_bytes(pickle.dumps(_Opens())), "it names .*open"),
        (lambda f: (f / "0001_boxes.pkl").write_bytes(pickle.dumps(np.array([_Opens()]))), "it names .*open"),
        (lambda f: (f / "0001_boxes.pkl").write_bytes(pickle.dumps([1, 2])), "0001_boxes.pkl holds list"),
        (
            lambda f: (f / "0001_boxes.pkl").write_bytes(pickle.dumps(np.zeros((7, 3, 4)))),
            r"holds shape \(7, 3, 4\) and float64; expected numbers of shape \(frames, blocks, 5\)",
        ),
        (lambda f: (f / "0001_boxes.pkl").write_bytes(pickle.dumps(np.zeros((7, 3, 5)))), "boxes that are none"),
        (
            lambda f: (f / "0001_boxes.pkl").write_bytes(pickle.dumps(towers_in_files(T=5))),
            "has boxes of 5 frames, and .*0001 has 7",
        ),
        (lambda f: (f / "0001" / "000.jpg").write_bytes(b"no"), "000.jpg is no picture that can be read"),
        (lambda f: [path.unlink() for path in (f / "0001").iterdir()], "0001 has no JPG frames"),
        (lambda f: write(f, "0002", towers_in_files(K=4)), "0002_boxes.pkl has 4 blocks, the videos before it 3"),
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path, monkeypatch, spoil, told):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "train"
    write(folder, "0001", towers_in_files())
    spoil(folder)
    with pytest.raises(UserError, match=told):
        ShapeStacks(folder, steps=6, later=3, image_size=32)
    assert not (tmp_path / "opened").exists()


def test_folders_without_towers_are_refused(tmp_path):
    with pytest.raises(UserError, match="is no folder; RPIN's ShapeStacks has train/"):
        ShapeStacks(tmp_path / "none", steps=6, later=3, image_size=32)
    with pytest.raises(UserError, match="has no videos"):
        ShapeStacks(tmp_path, steps=6, later=3, image_size=32)
    write(tmp_path, "0001", towers_in_files(T=3))
    with pytest.raises(UserError, match="has no video of more than 6 frames"):
        ShapeStacks(tmp_path, steps=6, later=3, image_size=32)
