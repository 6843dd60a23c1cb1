import math

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import adjusted_rand_score

import worldmodels
from worldmodels.cli import main
from worldmodels.cores.gru import GRU
from worldmodels.cores.lstm import LSTM
from worldmodels.cores.rims import RIMs
from worldmodels.cores.scoff import SCOFF
from worldmodels.decoders import DoublingConv2d, FrameDecoder, JointDecoder, SlotDecoder, SlotReadout
from worldmodels.encoders import FrameEncoder
from worldmodels.errors import UserError
from worldmodels.tasks.video import Video, agreement, blurred

BALLS = {"id": "worldmodels/BouncingBalls-v0"}
SMALL = {"preset": "4balls", "observation": "state", "image_size": 16, "radius": 2.0}
ABOUT = {"frame_shape": [1, 16, 16]}


def task(tmp_path, **options):
    env = BALLS | {"kwargs": SMALL | options.pop("kwargs", {}), "resize": None}
    sizes = {"train_episodes": 30, "test_episodes": 4, "steps": 12, "window": 4, "prompt": 3, "imagined": 6}
    sizes |= {"horizons": (1, 6), "channels": 8, "hidden_size": 16, "data_dir": str(tmp_path / "data")}
    return Video(env=options.pop("env", env), **sizes | options)


def scoff(token_size, **sizes):
    return SCOFF(token_size, 3, 8, num_schemata=2)


def model(task, core=scoff):
    torch.manual_seed(0)
    return task.model(core, ABOUT).eval()


# The parts.


def test_the_sizes_are_r_nems():
    encoder, decoder = FrameEncoder((1, 64, 64), tokens="vector"), FrameDecoder(250, (1, 64, 64))
    convolutions = [layer for layer in encoder.convolutions if isinstance(layer, torch.nn.Conv2d)]
    assert [layer.out_channels for layer in convolutions] == [16, 32, 64]
    assert encoder(torch.rand(2, 1, 64, 64)).shape == (2, 1, 512)
    convolutions = [layer for layer in decoder.convolutions if isinstance(layer, torch.nn.Conv2d)]
    assert [layer.out_channels for layer in convolutions] == [32, 16, 1]
    assert decoder(torch.rand(2, 250)).shape == (2, 1, 64, 64)


@pytest.mark.parametrize(("size", "times"), [(16, 1), (32, 2), (64, 3), (128, 4)])
def test_smaller_frames_take_fewer_layers(size, times):
    encoder = FrameEncoder((3, size, size), channels=8, place_size=5)
    assert encoder(torch.rand(2, 3, size, size)).shape == (2, 64, 13)
    assert FrameDecoder(4, (2, size, size), channels=8, hidden_size=6)(torch.rand(2, 4)).shape == (2, 2, size, size)
    assert sum(isinstance(layer, torch.nn.Conv2d) for layer in encoder.convolutions) == times


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 48, 48), (1, 32, 64)])
def test_other_frames_are_refused(shape):
    with pytest.raises(UserError, match=f"frames are {shape[1]} x {shape[2]}; expected 16, 32, 64 or 128 pixels"):
        FrameEncoder(shape)


def test_a_token_knows_its_place():
    encoder = FrameEncoder((1, 32, 32), channels=8).eval()
    frames = torch.zeros(1, 1, 32, 32)
    there = encoder(frames)
    frames[0, 0, 1, 30] = 1.0  # in the last place of the first row of 8
    changed = (encoder(frames) - there)[0]
    assert torch.equal(there[0, :, 8:], encoder.places)
    assert bool((changed[:, 8:] == 0).all())
    maps = encoder.convolutions(frames)[0]  # after all layers, rows and columns of 8 x 8
    assert torch.equal(encoder(frames)[0, 7, :8], maps[:, 0, 7]) and torch.equal(
        encoder(frames)[0, 8, :8], maps[:, 1, 0]
    )


def test_the_readout_and_the_decoders_do_not_know_the_order_of_slots():
    torch.manual_seed(0)
    slots, order = torch.randn(5, 4, 12), [2, 0, 3, 1]
    sizes = {"channels": 8, "hidden_size": 16}
    readout, joint = SlotReadout(12, 16), JointDecoder(4, 12, (1, 16, 16), exchangeable=True, **sizes)
    each, beside = SlotDecoder(12, (1, 16, 16), **sizes), JointDecoder(4, 12, (1, 16, 16), exchangeable=False, **sizes)
    for module in (readout, joint, each):
        assert torch.allclose(module(slots), module(slots[:, order]), atol=1e-5)
        assert module(slots[:, :2]).shape == module(slots).shape  # other numbers of slots
    assert not torch.allclose(beside(slots), beside(slots[:, order]), atol=1e-3)


def test_a_frame_is_the_mixture_of_what_slots_draw():
    torch.manual_seed(1)
    decoder = SlotDecoder(6, (3, 16, 16), channels=8, hidden_size=16)
    slots = 3.0 * torch.randn(2, 4, 6)
    masks, colours = decoder.parts(slots)
    assert torch.allclose(masks.sum(1), torch.ones(2, 16, 16), atol=1e-5)
    assert torch.allclose(decoder(slots).sigmoid(), (masks[:, :, None] * colours).sum(1), atol=1e-5)


# The model.


def test_stacked_frames_are_the_latest(tmp_path):
    video = model(task(tmp_path, stack=3), lambda size, **_: GRU(size, 1, 8, num_tokens=64))
    frames = torch.rand(5, 2, 1, 16, 16)
    tokens = video.tokens(frames).features
    black = torch.zeros(2, 1, 16, 16)
    for t in range(5):
        seen = torch.cat([frames[i] if i >= 0 else black for i in (t - 2, t - 1, t)], dim=1)
        assert torch.allclose(tokens[t], video.encoder(seen), atol=1e-6)
    later = video.tokens(frames[3:], frames[1:3]).features
    assert torch.allclose(later, tokens[3:], atol=1e-6)


@pytest.mark.parametrize("stack", [1, 3])
def test_a_rollout_sees_what_it_said(tmp_path, stack):
    video = model(task(tmp_path, stack=stack))
    prompt = (torch.rand(4, 2, 1, 16, 16) > 0.7).float()
    said, slots = video.rollout(prompt, 3)
    seen = prompt
    for frame, held in zip(said, slots, strict=True):  # plainly: read everything again from the start
        assert torch.allclose(frame, video(seen)[-1].sigmoid(), atol=1e-5)
        assert torch.allclose(held, video.observe(seen)[0][-1], atol=1e-5)
        seen = torch.cat([seen, frame[None]])


def test_more_object_files_than_in_training(tmp_path):
    video = model(task(tmp_path))
    own, more = video.initial_state(2)["hidden"], video.initial_state(2, 7)["hidden"]
    assert more.shape == (2, 7, 8) and torch.equal(more[:, :3], own)
    assert torch.equal(more, video.initial_state(2, 7)["hidden"])
    assert len({tuple(row.tolist()) for row in more[0]}) == 7
    prompt = torch.rand(3, 2, 1, 16, 16)
    said, slots = video.rollout(prompt, 2, num_slots=7)
    assert said.shape == (2, 2, 1, 16, 16) and slots.shape == (2, 2, 7, 8)
    assert torch.equal(video.rollout(prompt, 2, num_slots=3)[0], video.rollout(prompt, 2)[0])


@pytest.mark.parametrize("decoder", ["joint", "slots"])
def test_every_parameter_learns(tmp_path, decoder):
    video = model(task(tmp_path, decoder=decoder)).train()
    draw = task(tmp_path, decoder=decoder).batches(64, torch.device("cpu"))
    watched = task(tmp_path, decoder=decoder)
    watched.losses(video, draw(torch.Generator().manual_seed(0)), torch.Generator())["loss"].backward()
    still = [name for name, parameter in video.named_parameters() if not bool((parameter.grad != 0).any())]
    assert not still


# The task.


def test_frames_are_those_of_the_states(tmp_path):
    watched = task(tmp_path)
    draw = watched.batches(6, torch.device("cpu"))
    frames = draw(torch.Generator().manual_seed(0))
    assert frames.shape == (5, 6, 1, 16, 16) and set(frames.unique().tolist()) == {0.0, 1.0}
    source = watched.source("", torch.device("cpu"))
    states = source.episodes.arrays["observations"]
    everything = source.drawn(states[:])
    for b in range(6):
        at = (everything == frames[0, b]).flatten(1).all(1).nonzero()[:, 0]
        assert any(torch.equal(everything[start : start + 5], frames[:, b]) for start in at.tolist())


def test_noise_inverts_a_share_of_what_is_read(tmp_path):
    seen = []

    class Watching(torch.nn.Module):
        def forward(self, frames):
            seen.append(frames)
            return torch.zeros_like(frames)

    batch = (torch.rand(5, 40, 1, 16, 16) > 0.5).float()
    found = task(tmp_path, noise=0.2).losses(Watching(), batch, torch.Generator().manual_seed(0))
    assert float((seen[0] != batch[:-1]).float().mean()) == pytest.approx(0.2, abs=0.01)
    assert float(found["loss"]) == pytest.approx(math.log(2.0))
    task(tmp_path).losses(Watching(), batch, torch.Generator())
    assert torch.equal(seen[1], batch[:-1])


def test_errors_equal_a_plain_count(tmp_path):
    watched = task(tmp_path)
    video = model(watched)
    result = watched.evaluate(video)
    source = watched.source("test", torch.device("cpu"))
    frames = source.drawn(torch.cat(list(source.whole(9, 2)), dim=1))
    said = video.rollout(frames[:3], 6)[0]
    errors = result["errors"]["test"]
    for h in range(6):
        true = frames[3 + h]
        assert errors["model"][h] == pytest.approx(float((said[h] - true).square().mean()), rel=1e-5)
        assert errors["copy"][h] == pytest.approx(float((frames[2] - true).square().mean()), rel=1e-5)
        assert errors["blurred"][h] == pytest.approx(float((blurred(true) - true).square().mean()), rel=1e-5)
    assert result["scores"] == {"mse/test/1": errors["model"][0], "mse/test/6": errors["model"][5]}
    assert result["schemata"]["test"]["used"] in (1, 2) and sum(result["schemata"]["test"]["shares"]) == pytest.approx(
        1
    )
    assert watched.objective(result) > watched.objective(
        {"errors": {"test": {"model": [10.0 * error for error in errors["model"]]}}}
    )


def test_blurring_by_hand():
    frame = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0] * 4, [0.0, 0.0, 1.0, 1.0]])[None]
    rows = [[0.75, 0.75, 0.0, 0.0]] * 2 + [[0.0, 0.0, 0.5, 0.5]] * 2
    assert torch.equal(blurred(frame), torch.tensor(rows)[None])


def test_agreement_by_hand():
    laws = torch.tensor([[0, 1], [0, 1], [1, 0], [1, 0]])
    schema = torch.tensor([[2, 0], [2, 0], [2, 2], [0, 2]])[..., None]
    found = agreement(schema, laws, 2, 0)  # schema 2 is law 0's, schema 0 law 1's; one frame of eight is wrong
    assert found["table"] == [[0, 3], [0, 0], [4, 1]] and found["agreement"] == 7 / 8
    assert found["chance"] == 0.5 and found["after_switch"] == 0.5
    uncertain = -(0.8 * math.log2(0.8) + 0.2 * math.log2(0.2))
    assert found["entropy"] == pytest.approx(5 / 8 * uncertain)
    fixed = agreement(schema, torch.tensor([0, 0]).expand(4, 2), 1, 1)
    assert fixed["agreement"] == 4 / 6 and fixed["frames_to_settle"] == (4 + 2) / 2
    everything = agreement(torch.zeros(4, 2, 3, dtype=torch.int64), laws, 2, 0)
    assert everything["agreement"] == 0.5 == everything["chance"] and everything["entropy"] == 1.0


def test_two_files_with_schemata_of_their_own_do_not_agree():
    laws = torch.tensor([[0], [1]]).repeat(10, 1)
    files = torch.cat([laws, 1 - laws], dim=1)[:, None]
    assert agreement(files, laws, 2, 0)["agreement"] == 0.5


def test_tables_are_relative_to_the_gru(tmp_path):
    def result(core, error, schemata=None):
        lines = {"model": [error] * 6, "copy": [0.2] * 6, "blurred": [0.01] * 6}
        return {"core": core, "errors": {"test": lines}, "schemata": schemata or {}, "prompt": 3}

    told = {"test": {"agreement": 0.975, "after_switch": 0.5}}
    runs = {"a": result("scoff", 0.05, told), "b": result("scoff", 0.07, told), "c": result("gru", 0.1)}
    watched = task(tmp_path)
    table = watched.table(runs, "test")
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == ["a", "b", "c", "copy of the last true frame", "true frames, blurred"]
    assert cells[1] == ["50.00 (0.50)", "70.00 (0.70)", "100.00 (1.00)", "200.00 (2.00)", "10.00 (0.10)"]
    assert cells[3][:3] == ["97.5", "97.5", ""]
    cells = [list(column.cells) for column in watched.overview(runs, "test").columns]
    assert cells[0][:2] == ["gru (1)", "scoff (2)"] and cells[1][1] == "60.00 (0.60)" and cells[3][1] == "97.5"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"env": {"id": None, "kwargs": {}}}, "no environment was named; give env.id="),
        (
            {"env": BALLS | {"kwargs": SMALL, "resize": [8, 8]}},
            "frames are drawn from states; set env.kwargs.image_size",
        ),
        ({"tokens": "places"}, "task.tokens is 'places'"),
        ({"decoder": "slot"}, "task.decoder is 'slot'"),
        ({"window": 13}, "task.steps=12 has 13 frames, too few for task.window=13"),
        ({"horizons": (7,)}, r"task.horizons=\[7\]; expected frames of 1 to task.imagined=6"),
        ({"hidden_size": 20}, "task.hidden_size=20; expected a multiple of 8"),
        ({"noise": 0.5}, "task.noise=0.5; expected a share of the pixels"),
        ({"test_slots": {"tset": 8}}, "task.test_slots names 'tset'.*test"),
        ({"train_seed": 3}, "test data must be others"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, options, says):
    with pytest.raises(UserError, match=says):
        task(tmp_path, **options)


def test_cores_that_cannot_are_refused(tmp_path):
    watched = task(tmp_path, test_slots={"test": 8})
    with pytest.raises(
        UserError, match="runs test with 8 slots, which RIMs and its readout cannot be given after training"
    ):
        watched.model(lambda size, **_: RIMs(size, 4, 8, num_active=2), ABOUT)
    watched = task(tmp_path, test_slots={"test": 8}, readout="concatenated")
    with pytest.raises(UserError, match="which SCOFF and its readout cannot be given"):
        watched.model(scoff, ABOUT)


def test_an_environment_without_frames_is_refused_before_it_is_recorded(tmp_path):
    for env_id, kwargs in (("worldmodels/Recall-v0", {}), ("worldmodels/BouncingBalls-v0", {"observation": "frames"})):
        with pytest.raises(UserError, match="videos are drawn from states by an environment with a method frames"):
            task(tmp_path, env={"id": env_id, "kwargs": kwargs}).collect(quiet=True)
    with pytest.raises(UserError, match="frames are 20 x 20; expected 16, 32, 64 or 128 pixels"):
        task(tmp_path, kwargs={"image_size": 20}).collect(quiet=True)
    assert not (tmp_path / "data").exists()


def test_a_small_ball_is_followed(tmp_path):
    """One ball that drifts and bounces: after 150 steps well below a copy, one frame ahead and six."""
    watched = task(
        tmp_path,
        kwargs={"num_balls": 1, "radius": 3.0, "speed": 1.5},
        train_episodes=200,
        test_episodes=40,
        window=8,
        tokens="vector",
    )
    torch.manual_seed(0)
    video = watched.model(lambda size, **_: LSTM(size, 1, 64, num_tokens=1), ABOUT)
    draw, generator = watched.batches(16, torch.device("cpu")), torch.Generator().manual_seed(0)
    optimiser = torch.optim.Adam(video.parameters(), lr=3e-3)
    for _ in range(150):
        optimiser.zero_grad()
        watched.losses(video, draw(generator), generator)["loss"].backward()
        optimiser.step()
    errors = watched.evaluate(video.eval())["errors"]["test"]
    assert errors["model"][0] < 0.7 * errors["copy"][0] and errors["model"][5] < 0.7 * errors["copy"][5]


def test_a_run_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["experiment=switching", "core=scoff", "size=smoke", "run=runs/ball", "task.decoder=slots"]
    assert main(["train", *words]) == 0
    said = capsys.readouterr().out
    assert "schema is the law's" in said and "copy of the last true frame" in said
    figures = {path.name for path in (tmp_path / "runs" / "ball" / "figures").iterdir()}
    assert {"curves.png", "errors.png", "rollout.png", "rollout.gif", "schemata.png"} <= figures
    run = worldmodels.load("runs/ball")
    found = run.evaluate()
    assert 0.0 <= found["scores"]["agreement/test"] <= 1.0


def test_doubling_and_convolving_as_one():
    torch.manual_seed(0)
    layer = DoublingConv2d(5, 3).double()
    maps = torch.randn(2, 5, 6, 7, dtype=torch.float64)
    plainly = F.conv2d(F.pad(F.interpolate(maps, scale_factor=2), (1, 2, 1, 2)), layer.weight, layer.bias)
    assert torch.allclose(layer(maps), plainly, atol=1e-12) and layer(maps).shape == (2, 3, 12, 14)
    assert set(layer.state_dict()) == {"weight", "bias"}


def test_masks_are_scored_as_segmentations(tmp_path):
    """Against scikit-learn, frame by frame, with the masks said from the true frames before."""
    variants = {"test": {}, "transfer": {"num_balls": 6}}
    watched = task(tmp_path, kwargs={"colours": 4}, decoder="slots", test=variants, test_slots={"transfer": 5})
    video = watched.model(scoff, {"frame_shape": [3, 16, 16]}).eval()
    result = watched.evaluate(video)
    for variant, number in (("test", 3), ("transfer", 5)):
        source = watched.source(variant, torch.device("cpu"))
        states = torch.cat(list(source.whole(9, 4)), dim=1)
        frames = source.drawn(states)
        slots, _ = video.observe(frames[:-1], video.initial_state(4, number))
        masks = source.env.masks(states)
        found, objects = [], []
        for t in range(3, 9):
            said = video.decoder.parts(slots[t - 1])[0].argmax(1)
            assert said.max() < number
            for b in range(4):
                true = torch.zeros(16, 16, dtype=torch.long)
                for ball, mask in enumerate(masks[t, b]):
                    true[mask] = ball + 1
                found.append(adjusted_rand_score(true.flatten().numpy(), said[b].flatten().numpy()))
                seen = true > 0
                objects.append(adjusted_rand_score(true[seen].numpy(), said[b][seen].numpy()))
        assert result["scores"][f"ari/{variant}"] == pytest.approx(sum(found) / len(found), abs=1e-9)
        assert result["scores"][f"ari_foreground/{variant}"] == pytest.approx(sum(objects) / len(objects), abs=1e-9)
        assert 0.0 <= result["scores"][f"iou/{variant}"] < 1.0
    table = watched.table({"run": result | {"core": "scoff"}}, "test")
    cells = [list(column.cells) for column in table.columns]
    assert [str(column.header) for column in table.columns[-2:]] == ["test\nARI (objects)", "transfer\nARI (objects)"]
    scores = result["scores"]
    assert cells[-1][0] == f"{scores['ari/transfer']:.3f} ({scores['ari_foreground/transfer']:.3f})"
    assert cells[-1][-1] == "0.355"
    watched.draw(video, result, [], tmp_path, 0)
    assert (tmp_path / "segments_transfer.png").is_file()


def test_perfect_masks_have_an_index_of_one(tmp_path, monkeypatch):
    watched = task(tmp_path, decoder="slots")
    video = model(watched)
    source = watched.source("test", torch.device("cpu"))
    true = source.env.masks(torch.cat(list(source.whole(9, 4)), dim=1))[3:]
    both = torch.cat([~true.any(2, keepdim=True), true], dim=2).float()
    steps = iter(both)
    monkeypatch.setattr(video.decoder, "parts", lambda slots: (next(steps), None))
    segments = watched.evaluate(video)["segments"]["test"]
    assert segments == {"ari": 1.0, "ari_foreground": 1.0, "iou": 1.0}
