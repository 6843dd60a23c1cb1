"""ESBN's four tasks: which problems there are, that they are what they say, and what ESBN makes of symbols never seen."""

import numpy as np
import pytest
import torch

import worldmodels
from worldmodels.cli import main
from worldmodels.core import Tokens
from worldmodels.data import symbols
from worldmodels.data.relations import RULES, problems
from worldmodels.errors import UserError
from worldmodels.plugins import core_builder
from worldmodels.tasks.relations import _MODELS, PUBLISHED, Relations, published


def asked(rule, withheld, size=10_000, seed=1):
    return problems(rule, 100, withheld, 1 << 30 if rule == "same_different" else size, size, seed, 3)


def solved(rule, shown):
    """The right answer to a problem, found plainly."""
    if rule == "same_different":
        return int(shown[0] == shown[1])
    if rule == "rmts":
        pairs = [shown[i] == shown[i + 1] for i in (0, 2, 4)]
        assert pairs[1] != pairs[2]
        return 0 if pairs[0] == pairs[1] else 1
    first, second, choices = shown[:3], shown[3:5], shown[5:]
    if rule == "distribution_of_three":
        (last,) = set(first) - set(second)
        assert len(set(first)) == 3 and set(second) < set(first)
        (other,) = set(choices) - set(first)
        assert other not in first
    else:
        a, b, c = (first.index(symbol) for symbol in first)
        assert (a, b, c) in ((0, 1, 0), (0, 1, 1), (0, 0, 0)) and not set(first) & set(second)
        last = second[c] if (a, b, c) != (0, 1, 1) else second[1]
        assert (second[0] == second[1]) == (a == b)
    assert len(set(choices)) == 4
    return choices.index(last)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("withheld", [0, 85, 95])
def test_problems_are_what_they_say(rule, withheld):
    for shown, answers in asked(rule, withheld, 500):
        assert shown.shape[1] == RULES[rule].symbols and len(shown) >= 40
        assert [solved(rule, row) for row in shown.tolist()] == answers.tolist()
        counts = answers.bincount(minlength=RULES[rule].answers) / len(answers)
        assert (counts - 1 / RULES[rule].answers).abs().max() < 0.1  # four standard errors


@pytest.mark.parametrize(
    ("rule", "withheld", "train", "test"),
    [
        ("same_different", 0, 18_810, 990),
        ("same_different", 50, 4900, 4900),
        ("same_different", 85, 420, 10_000),
        ("same_different", 95, 40, 10_000),
        ("same_different", 98, 4, 10_000),
        ("rmts", 50, 10_000, 10_000),
        ("rmts", 95, 480, 10_000),
        ("distribution_of_three", 95, 360, 10_000),
        ("identity", 95, 8640, 10_000),
    ],
)
def test_there_are_as_many_problems_as_in_the_paper(rule, withheld, train, test):
    (shown, _), (asked_for, _) = asked(rule, withheld)
    assert (len(shown), len(asked_for)) == (train, test)


@pytest.mark.parametrize("rule", RULES)
def test_nothing_of_the_test_is_seen_in_training(rule):
    (train, _), (test, _) = asked(rule, 50, 300)
    assert not set(train.flatten().tolist()) & set(test.flatten().tolist())
    (train, _), (test, _) = asked(rule, 0, 2000)
    assert not {tuple(row) for row in train.tolist()} & {tuple(row) for row in test.tolist()}
    again, other = asked(rule, 50, 300), asked(rule, 50, 300, seed=2)
    assert torch.equal(again[0][0], asked(rule, 50, 300)[0][0]) and again[0][0].tolist() != other[0][0].tolist()


def test_glyphs_are_distinct():
    pictures = symbols.glyphs()
    assert pictures.shape == (100, 32, 32) and pictures.dtype == torch.uint8
    ink = 1.0 - pictures.flatten(1).double() / 255
    assert ((ink[:, None] - ink).abs().sum(2) + 1e9 * torch.eye(100)).min() > 50  # pixels of 1024
    with pytest.raises(UserError, match="100000 symbols were asked for; the font has"):
        symbols.glyphs(100_000)


def test_symbols_of_a_folder(tmp_path):
    from PIL import Image

    drawn = np.random.default_rng(0).integers(0, 256, (12, 32, 32), np.uint8)
    for n, picture in enumerate(drawn):
        Image.fromarray(picture).save(tmp_path / f"{n}.png")
    assert np.array_equal(symbols.from_folder(tmp_path).numpy(), drawn)  # 10 comes after 9
    Image.fromarray(drawn[3]).save(tmp_path / "12.png")
    with pytest.raises(UserError, match=r"12\.png and .*3\.png are the same picture"):
        symbols.from_folder(tmp_path)
    Image.fromarray(drawn[3, :5]).save(tmp_path / "12.png")
    with pytest.raises(UserError, match=r"12\.png is 32 x 5; expected 32 x 32"):
        symbols.from_folder(tmp_path)
    (tmp_path / "12.png").write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"12\.png is no picture that can be read"):
        symbols.from_folder(tmp_path)
    with pytest.raises(UserError, match="holds no PNGs"):
        symbols.from_folder(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["task.rule=rtms"], "did you mean 'rmts'"),
        (["task.withheld=99"], "same_different needs 2 for training and for the test, so expected 0, or 2 to 98"),
        (["task.rule=rmts", "task.withheld=98"], "expected 0, or 5 to 95"),
        (["task.withheld=-1"], "task.withheld=-1"),
        (["task.encoder=conv"], "expected one of convolutions, perceptron, random"),
        (["core=gnn"], "needs a core with a state"),
        (["task.symbols=nowhere"], "holds no PNGs"),
    ],
)
def test_mistakes_get_one_line(tmp_path, monkeypatch, capsys, words, says):
    monkeypatch.chdir(tmp_path)
    core = [] if any(word.startswith("core=") for word in words) else ["core=esbn"]
    assert main(["train", "experiment=relations", "size=smoke", "logger.progress=false", "run=run", *core, *words]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1 and not (tmp_path / "run").exists()


def model(rule="rmts", core="esbn", **options):
    torch.manual_seed(0)
    task = Relations(rule=rule, **options)
    made = {"_target_": f"worldmodels.cores.{core}.{core.upper()}", "num_slots": 1, "slot_size": 32}
    return task, task.model(core_builder(made), task.about())


@pytest.mark.parametrize("encoder", ["convolutions", "perceptron", "random"])
@pytest.mark.parametrize("normalise", [True, False])
def test_only_symbols_that_are_used_need_to_be_encoded(encoder, normalise):
    task, solver = model(encoder=encoder, normalise=normalise, train_size=50)
    (shown, answers), _ = task._problems(100)
    batch = task.batches(16, torch.device("cpu"))(torch.Generator().manual_seed(0))
    rows, said, used = batch
    assert len(used) == 5 and torch.allclose(solver(rows, used)[0], solver(used[rows])[0], atol=1e-6)
    losses = task.losses(solver, batch, torch.Generator())
    losses["loss"].backward()
    trained = {name for name, parameter in solver.named_parameters() if parameter.grad is not None}
    assert any(name.startswith("encoder") for name in trained) == (encoder != "random")
    assert ("norm.gain" in trained) == normalise and len(shown) == len(answers) == 50 and len(said) == 16


def test_pairs_are_normalised_apart():
    """In RMTS a symbol's vector depends on the other of its pair, and on nothing else."""
    _, solver = model("rmts")
    one, other = torch.tensor([[1, 2, 3, 3, 4, 5], [1, 2, 7, 8, 9, 9]])
    a, b = (solver.tokens(problem[None]).features[:, 0, 0] for problem in (one, other))
    assert torch.allclose(a[:2], b[:2], atol=1e-6) and not torch.allclose(a[2:], b[2:], atol=1e-2)
    assert a[2:4].abs().max() < 1e-2  # twice the same symbol: nothing is left of it
    assert isinstance(solver.tokens(one[None]), Tokens)


def test_the_papers_figures_are_complete():
    for rule, (with_norm, without) in PUBLISHED.items():
        for text in (with_norm, without):
            assert [len(line.split()) for line in text.split(",")] == [5 if rule == "same_different" else 4] * len(
                _MODELS
            )
    assert published("rmts", 95, True)["ESBN"] == 95.0 and published("identity", 0, False)["RN"] == 41.1
    assert published("rmts", 60, True) == {}


def test_a_run_opens_without_its_symbols(tmp_path, monkeypatch):
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    drawn = np.random.default_rng(0).integers(0, 256, (12, 32, 32), np.uint8)
    for n, picture in enumerate(drawn):
        Image.fromarray(picture).save(tmp_path / "own" / f"{n}.png")
    words = (
        "experiment=relations core=esbn size=smoke task.rule=identity task.withheld=6 task.symbols=own run=run".split()
    )
    assert main(["train", *words, "logger.progress=false"]) == 0
    before = worldmodels.load("run").evaluate()["scores"]
    for file in (tmp_path / "own").iterdir():
        file.unlink()
    run = worldmodels.load("run")
    assert np.array_equal(run.model.symbols.numpy(), drawn) and run.evaluate()["scores"] == before
    assert {path.name for path in run.draw()} >= {"problem.png", "choices.png", "memory.png"}


def test_esbn_compares_symbols_it_has_never_seen():
    """Trained on five symbols, it tells of 95 others whether they are the same; an LSTM, not normalised, does not."""
    scores = {}
    for core in ("esbn", "lstm"):
        task, solver = model("same_different", core, withheld=95, normalise=core == "esbn", test_size=500)
        draw, generator = task.batches(32, torch.device("cpu")), torch.Generator().manual_seed(0)
        optimiser = torch.optim.Adam(solver.parameters(), lr=1e-3)
        for _ in range(150):
            optimiser.zero_grad()
            task.losses(solver, draw(generator), generator)["loss"].backward()
            optimiser.step()
        scores[core] = task.evaluate(solver.eval())["scores"]["accuracy"]
    assert scores["esbn"] > 0.95 and scores["lstm"] < 0.85, scores
