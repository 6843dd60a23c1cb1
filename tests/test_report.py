import json
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

from worldmodels.core import Tokens, unroll
from worldmodels.cores.entnet import EntNet
from worldmodels.cores.esbn import ESBN
from worldmodels.cores.nps import PNPS, SNPS
from worldmodels.cores.rims import RIMs
from worldmodels.cores.rmc import RMC
from worldmodels.cores.s2rm import S2GRU
from worldmodels.cores.scoff import SCOFF
from worldmodels.data.episodes import Episodes
from worldmodels.encoders import CSWMEncoder
from worldmodels.models.world_model import WorldModel
from worldmodels.report import choices
from worldmodels.report import transitions as figures
from worldmodels.report.tables import scores, show
from worldmodels.tasks.transitions import evaluate, imagine


def blocks_model(episodes, core):
    torch.manual_seed(0)
    encoder = CSWMEncoder(episodes.observation_shape, 5, 2, hidden_size=16)
    return WorldModel(encoder, core, action=episodes.about["action"], action_to="slot").eval()


def imagined(model, episodes, steps):
    with torch.no_grad():
        return imagine(model, episodes, steps)


@pytest.mark.parametrize("core", [SNPS(7, 5, 2, num_rules=2, num_stages=3), PNPS(7, 5, 2, num_rules=2)])
def test_pictures_are_drawn(block_episodes, tmp_path, core):
    model = blocks_model(block_episodes, core)
    seen = imagined(model, block_episodes, 5)
    for path in (
        figures.rollout(seen, tmp_path / "rollout.png"),
        figures.horizons(seen, "snps", tmp_path / "horizons.png"),
        figures.choices(model, seen, tmp_path / "choices.png"),
    ):
        picture = imread(path)
        assert picture.shape[0] > 100 and picture.std() > 0.05


def test_the_choice_map_shows_what_explain_says(block_episodes, monkeypatch):
    """One text a rule application, in the row of the slot it changed."""
    model = blocks_model(block_episodes, SNPS(7, 5, 2, num_rules=3, num_stages=2))
    drawn = {}
    monkeypatch.setattr(choices, "save", lambda figure, path: drawn.update(figure=figure) or path)
    figures.choices(model, imagined(model, block_episodes, 4), Path("x"), episode=2)
    texts = {(int(t.get_position()[0]), int(t.get_position()[1])): t.get_text() for t in drawn["figure"].axes[0].texts}
    paths = block_episodes.paths(torch.tensor([2]), torch.tensor([0]), 4)
    with torch.no_grad():
        explained = figures.explain(model, model.encode(paths.observations[:4]), paths.actions)
    assert len(texts) == 8
    for t in range(4):
        for s in range(2):
            assert texts[(2 * t + s, int(explained["primary"][t, s]))] == str(int(explained["rule"][t, s]))


def test_a_trace_is_explain_at_every_step_with_resets():
    core = SCOFF(3, 2, 4).eval()
    tokens, starts = Tokens(torch.randn(5, 2, 3, 3)), torch.zeros(5, 2, dtype=torch.bool)
    starts[2, 1] = True
    traced = choices.trace(core, tokens, core.initial_state(2), starts)
    assert traced["schema"].shape == (5, 2, 2) and traced["input_attention"].shape == (5, 2, 2, 3)
    _, state = unroll(core, tokens.at(slice(0, 3)), core.initial_state(2))
    expected = core.explain(core.prepare(tokens).at(3), state)
    assert torch.allclose(traced["communication"][3, 0], expected["communication"][0], atol=1e-6)
    fresh = core.explain(core.prepare(tokens).at(2), core.initial_state(2))
    assert torch.allclose(traced["communication"][2, 1], fresh["communication"][1], atol=1e-6)


EXPLAINED = {
    "scoff, top 2": (lambda *s: SCOFF(*s, num_active=2), ["schema", "token each slot reads", "slot each slot hears"]),
    "scoff, snps": (lambda *s: SCOFF(*s, communication="snps", num_stages=2), ["rule applied", "schema", "token"]),
    "rims": (RIMs, ["active modules", "token each slot reads", "slot each slot hears"]),
    "entnet": (EntNet, ["gate of each memory"]),
    "rmc": (lambda *s: RMC(*s, num_heads=1), ["token each slot reads", "slot each slot hears"]),
    "s2gru": (S2GRU, ["token each slot reads", "slot each slot hears"]),
    "esbn": (ESBN, ["where the memory is read", "how well each place"]),
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_one_picture_for_every_core(name, tmp_path, monkeypatch):
    make, titles = EXPLAINED[name]
    core = make(3, 4, 6).eval()
    traced = choices.trace(core, Tokens(torch.randn(9, 1, 4, 3)), core.initial_state(1))
    drawn = []
    monkeypatch.setattr(choices, "save", lambda figure, path: drawn.append(figure) or figures.save(figure, path))
    path = choices.choice_map({key: part[:, 0] for key, part in traced.items()}, 4, tmp_path / "choices.png")
    picture = imread(path)
    assert picture.shape[0] > 100 and picture.std() > 0.02
    axes = drawn[0].axes
    assert len(axes) == len(titles) and all(t in a.get_title() for t, a in zip(titles, axes, strict=True))
    if "schema" in traced:
        panel = next(a for a in axes if "the schema of" in a.get_title())
        shown = {(round(t.get_position()[0]), round(t.get_position()[1])): int(t.get_text()) for t in panel.texts}
        active = traced.get("active", torch.ones(9, 1, 4))[:, 0]
        assert shown == {(t, k): int(traced["schema"][t, 0, k]) for t, k in active.nonzero().tolist()}


def test_a_core_that_chooses_nothing_has_no_picture(tmp_path):
    assert choices.choice_map({}, 4, tmp_path / "x.png") is None


def test_retrieved_frames_of_a_perfect_model_are_the_true_ones(tmp_path, monkeypatch):
    from .test_world_model import adder, counting_episodes

    drawn = {}
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.update(figure=figure) or path)
    episodes = counting_episodes()
    frames = episodes.arrays["observations"]
    figures.rollout(imagined(adder(), episodes, 4), tmp_path / "x.png")
    lines = drawn["figure"].axes[0].lines
    for true, shown in zip(lines[::2], lines[1::2], strict=True):
        assert true.get_ydata().tolist() == shown.get_ydata().tolist()
    assert lines[0].get_ydata().tolist() == frames[:5, 0, 0].tolist()


def test_learning_curves_of_a_run(tmp_path):
    metrics = [{"step": s, "wm/loss_pos": 1 / s, "wm/loss_neg": 2 / s, "wm/hits@1/h5": 0.1 * s} for s in range(1, 6)]
    assert imread(figures.curves(metrics, tmp_path / "a.png")).std() > 0.05


def test_tables_hold_the_numbers(block_episodes, capsys):
    result = evaluate(blocks_model(block_episodes, SNPS(7, 5, 2)), block_episodes, horizons=(1, 5))
    show(scores({"snps": result, "again": json.loads(json.dumps(result))}, "title"))
    out = capsys.readouterr().out
    for section in ("all", "in_episode"):
        for h in ("1", "5"):
            entry = result[section][h]
            assert f"{100 * entry['h@1']:.1f} / {100 * entry['mrr']:.1f}" in out
            assert f"{100 * entry['copy_h@1']:.1f} / {100 * entry['copy_mrr']:.1f}" in out
    assert isinstance(block_episodes, Episodes) and "chance" in out and "copy of the true state" in out
