import math

import numpy as np
import pytest
import torch
from scipy.ndimage import affine_transform

from worldmodels.cli import main
from worldmodels.cores.lstm import LSTM
from worldmodels.cores.nps import PNPS, SNPS, RoutingNPS
from worldmodels.data import digits as data
from worldmodels.errors import UserError
from worldmodels.models.picture import OPERATION, PICTURE, PictureChange
from worldmodels.report import rules
from worldmodels.tasks.digits import DigitTransformations


def snps(token_size, **sizes):
    return SNPS(token_size, 2, 100, num_rules=4, rules_see="slot")


# Data.


def test_scikit_learns_digits_are_framed():
    train, test = data.digits(None)
    assert train.shape == (1500, 28, 28) and test.shape == (297, 28, 28) and int(train.max()) == 255
    frames = data.framed(test[:3], 64)
    assert frames.shape == (3, 1, 64, 64) and torch.equal(frames[:, 0, 18:46, 18:46], test[:3] / 255.0)
    assert float(frames.sum()) == pytest.approx(float((test[:3] / 255.0).sum()))


def test_moves_are_of_whole_pixels():
    frames = torch.rand(2, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    down, up = data.transformed(frames, torch.tensor([0, 1]))
    assert data.OPERATIONS[:2] == ("translate down", "translate up")
    torch.testing.assert_close(down[:, 13:], frames[0, :, :-13])
    torch.testing.assert_close(up[:, :-13], frames[1, :, 13:])
    assert float(down[:, :13].abs().max()) < 1e-5 and float(up[:, -13:].abs().max()) < 1e-5


@pytest.mark.parametrize(("operation", "sign"), [(2, 1.0), (3, -1.0)])
def test_turns_are_scipys(operation, sign):
    frame = np.zeros((64, 64), dtype=np.float32)
    frame[20:40, 30:36] = 1.0
    frame[20:24, 30:46] = 0.5
    turned = data.transformed(torch.from_numpy(frame)[None, None], torch.tensor([operation]))[0, 0].numpy()
    angle = sign * math.radians(60.0)  # to the right: what is above the middle comes to its right
    back = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])  # of rows and columns
    centre = np.full(2, 31.5)
    np.testing.assert_allclose(turned, affine_transform(frame, back, centre - back @ centre, order=1), atol=2e-3)
    column = float((turned * np.arange(64)).sum() / turned.sum())
    assert (column > 33.0) if sign > 0 else (column < 31.0)


def test_examples_are_links_of_chains():
    pictures = data.digits(None)[1]
    operations = torch.tensor([[0, 2, 1]] * 3)
    before, operation, after = data.examples(pictures, 32, torch.tensor([4, 4, 4]), operations, torch.tensor([0, 1, 2]))
    assert operation.tolist() == [0, 2, 1]
    assert torch.equal(before[0], data.framed(pictures[4:5], 32)[0])
    torch.testing.assert_close(before[1:], after[:2])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda path: None, "mnist.npz is no file; give MNIST as mnist.npz"),
        (lambda path: path.write_text("digits"), "is no file of arrays"),
        (lambda path: path.write_bytes(b""), "is no file of arrays"),
        (lambda path: np.savez(path, x_train=np.zeros((2, 28, 28), np.uint8)), "has no array x_test; mnist.npz has"),
        (
            lambda path: np.savez(path, x_train=np.zeros((2, 28, 28)), x_test=np.zeros((2, 28, 28), np.uint8)),
            r"x_train is float64 of shape \(2, 28, 28\); expected uint8",
        ),
        (
            lambda path: np.savez(path, x_train=np.zeros((2, 28, 28), np.uint8), x_test=np.zeros((2, 784), np.uint8)),
            r"x_test is uint8 of shape \(2, 784\); expected uint8 of \(N, 28, 28\)",
        ),
        (
            lambda path: np.savez(path, x_train=np.array([{}], dtype=object), x_test=np.zeros((2, 28, 28), np.uint8)),
            "is no file of arrays: Object arrays cannot be loaded",
        ),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path, wrong, says):
    path = tmp_path / "mnist.npz"
    wrong(path)
    with pytest.raises(UserError, match=says) as raised:
        DigitTransformations(digits=path).collect()
    assert "\n" not in str(raised.value)


def test_a_file_of_digits_is_read(tmp_path):
    generator = np.random.default_rng(0)
    parts = {
        name: generator.integers(0, 256, (n, 28, 28), dtype=np.uint8) for name, n in (("x_train", 7), ("x_test", 5))
    }
    np.savez_compressed(tmp_path / "mnist.npz", **parts, y_train=np.zeros(7))
    task = DigitTransformations(digits=tmp_path / "mnist.npz")
    train, test = task.digits()
    assert np.array_equal(train.numpy(), parts["x_train"]) and np.array_equal(test.numpy(), parts["x_test"])
    assert task.about() != DigitTransformations().about()


# The model and its scores.


@torch.no_grad()
def test_rules_do_not_see_the_operation():
    """Another vector of an operation that leads to the same choices changes nothing; another picture does."""
    torch.manual_seed(0)
    model = PictureChange(snps(200), 32, 4).eval()
    frames, operation = torch.rand(4, 1, 32, 32), torch.arange(4)
    tokens = model.tokens(frames, operation)
    assert torch.equal(tokens.features[:, PICTURE, 100:], torch.zeros(4, 100))
    assert torch.equal(tokens.features[:, OPERATION, :100], torch.zeros(4, 100))
    chosen, said = model.core.explain(tokens, {}), model(frames, operation)
    model.operation.weight.mul_(1.001)
    again = model.core.explain(model.tokens(frames, operation), {})
    assert all(torch.equal(again[name], chosen[name]) for name in ("rule", "primary", "context"))
    assert torch.equal(model(frames, operation), said)
    changed = (chosen["primary"][:, 0] == OPERATION) & (chosen["context"][:, 0] == PICTURE)
    assert bool((model(1.0 - frames, operation) != said).flatten(1).any(1)[changed].all())


def test_uses_by_hand():
    found = rules.uses(torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([1, 1, 0, 1, -1, 0]), 2, 2)
    assert found["uses"] == [[1, 2], [1, 1]] and found["null"] == [0, 1]
    assert found["purity"] == 3 / 6 and found["matched"] == 3 / 6


@pytest.mark.parametrize("core", [snps, lambda size, **_: PNPS(size, 2, 100, num_rules=4, rules_see="slot"),
                                  lambda size, **_: RoutingNPS(size, 2, 100, num_rules=4, rules_see="slot")])  # fmt: skip
def test_scores_equal_a_plain_count(core):
    torch.manual_seed(0)
    task = DigitTransformations(image_size=32, test_size=12)
    model = task.model(core, {}).eval()
    result = task.evaluate(model)
    again = task.evaluate(model)
    assert result == again
    chain = data.drawn(297, 12, torch.Generator().manual_seed(3))
    before, operation, after = data.examples(task.digits()[1], 32, *chain)
    with torch.no_grad():
        said = model(before, operation).sigmoid()
    assert result["scores"]["mse"] == pytest.approx(float((said - after).square().mean()), rel=1e-5)
    assert result["copy_mse"] == pytest.approx(float((before - after).square().mean()), rel=1e-5)
    assert sum(map(sum, result["uses"])) + sum(result["null"]) == 12
    assert [sum(row) + null for row, null in zip(result["uses"], result["null"], strict=True)] == torch.bincount(
        operation, minlength=4
    ).tolist()


def test_digits_are_moved_better_than_by_leaving_them():
    """150 steps bring the error well below that of the digit as it was."""
    task = DigitTransformations(image_size=32, test_size=300)
    torch.manual_seed(0)
    model = task.model(snps, {}).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    draw, generator = task.batches(50, torch.device("cpu")), torch.Generator().manual_seed(0)
    for _ in range(150):
        optimizer.zero_grad()
        task.losses(model, draw(generator), generator)["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    result = task.evaluate(model.eval())
    assert result["scores"]["mse"] < 0.6 * min(result["copy_mse"], result["black_mse"])


def test_what_cannot_be_is_refused():
    with pytest.raises(UserError, match="task.image_size=30; expected a multiple of 8 from 32 on"):
        DigitTransformations(image_size=30)
    task = DigitTransformations(image_size=32)
    with pytest.raises(UserError, match="a core that applies rules to slots.*got LSTM"):
        task.model(lambda size, **_: LSTM(size, 1, 100, num_tokens=2), {})
    with pytest.raises(UserError, match="set core.rules_see=slot"):
        task.model(lambda size, **_: SNPS(size, 2, 100, num_rules=4), {})
    with pytest.raises(UserError, match="core.slot_size=50; tokens of this task are for slots of 100"):
        task.model(lambda size, **_: SNPS(size, 2, 50, num_rules=4, rules_see="slot"), {})


def test_a_run_draws_its_rules_and_digits(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["train", "experiment=mnist", "core=snps", "size=smoke", "run=run", "logger.progress=false"]
    assert main(words) == 0
    assert "paper: NPS, four rules" in " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert {"rules.png", "digits.png", "curves.png"} <= {path.name for path in (tmp_path / "run" / "figures").iterdir()}
