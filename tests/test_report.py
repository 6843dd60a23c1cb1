import json
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

from worldmodels.core import Tokens, unroll
from worldmodels.cores.entnet import EntNet
from worldmodels.cores.esbn import ESBN
from worldmodels.cores.mnm import MNM
from worldmodels.cores.nps import PNPS, SNPS
from worldmodels.cores.ntm import NTM
from worldmodels.cores.rims import RIMs
from worldmodels.cores.rmc import RMC
from worldmodels.cores.s2rm import S2GRU
from worldmodels.cores.scoff import SCOFF
from worldmodels.data.episodes import Episodes
from worldmodels.encoders import CSWMEncoder
from worldmodels.models.world_model import WorldModel
from worldmodels.report import choices, views
from worldmodels.report import figures as shared
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


def drawn_by(monkeypatch, module):
    """The figures that a module saves, which are not written."""
    kept = []
    monkeypatch.setattr(module, "save", lambda figure, path: kept.append(figure) or path)
    return kept


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
    "ntm": (NTM, ["where the memory is read", "where the memory is written"]),
    "mnm": (MNM, ["how strongly the memory is rewritten"]),
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
    axes = [axis for axis in drawn[0].axes if axis.get_title()]
    scales = [axis for axis in drawn[0].axes if not axis.get_title()]
    coloured = [axis for axis in axes if "colour and number" in axis.get_title()]
    assert len(scales) == len(axes) - len(coloured) and all(scale.get_ylabel() for scale in scales)  # of what is shaded
    assert len(axes) == len(titles) and all(t in a.get_title() for t, a in zip(titles, axes, strict=True))
    if "schema" in traced:
        panel = next(a for a in axes if "the schema of" in a.get_title())
        shown = {(round(t.get_position()[0]), round(t.get_position()[1])): int(t.get_text()) for t in panel.texts}
        active = traced.get("active", torch.ones(9, 1, 4))[:, 0]
        assert shown == {(t, k): int(traced["schema"][t, 0, k]) for t, k in active.nonzero().tolist()}


@pytest.mark.parametrize(("steps", "slots", "rows"), [(9, 3, 1), (60, 1, 2), (130, 2, 3)])
def test_a_long_choice_map_goes_on_below(steps, slots, rows, tmp_path, monkeypatch):
    kept = drawn_by(monkeypatch, choices)
    chosen = {
        "schema": torch.randint(3, (steps, slots)),
        "communication": torch.rand(steps, slots, slots),
        "gate": torch.rand(steps, slots),
    }
    choices.choice_map(chosen, slots, tmp_path / "x.png")
    assert 120 * kept[0].get_size_inches()[0] <= 1600
    titles = [axis.get_title() for axis in kept[0].axes if axis.get_title()]
    assert len(titles) == rows * (2 + (slots > 1))  # a single slot hears nobody else
    files = [axis for axis in kept[0].axes if "schema" in axis.get_title()]
    shown = [int(text.get_text()) for axis in files for text in axis.texts]
    assert shown == chosen["schema"].flatten().tolist()
    assert all(axis.title.get_fontsize() >= 10 for axis in files)
    assert files[-1].get_xticklabels()[0].get_text() == str(-(-steps // rows) * (rows - 1))


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


def named(axis):
    return {line.get_label(): line for line in axis.lines}


def test_a_score_and_its_copy_are_a_pair_beside_chance(block_episodes, tmp_path, monkeypatch):
    kept = drawn_by(monkeypatch, figures)
    seen = imagined(blocks_model(block_episodes, SNPS(7, 5, 2)), block_episodes, 4)
    figures.horizons(seen, "snps", tmp_path / "x.png")
    metrics = [
        {"step": s, "wm/loss_pos": 1.0, "wm/loss_neg": 2.0, "wm/hits@1/h5": 0.3, "wm/copy_hits@1/h5": 0.2}
        | {"wm/in_episode_hits@1/h5": 0.4}
        for s in (1, 2)
    ]
    figures.curves(metrics, tmp_path / "y.png", chance=0.1)
    hits, learned = kept[0].axes[0], kept[1].axes
    chance = f"chance, {1 / len(seen.index):.3g}"
    assert named(hits)[chance].get_ydata()[0] == 1 / len(seen.index)
    assert named(hits)["snps"].get_color() == named(hits)["its latent copy"].get_color()
    model, copy = learned[1].lines[:2]
    assert model.get_color() == copy.get_color() and (model.get_linestyle(), copy.get_linestyle()) == ("-", "--")
    assert "chance, 0.1" in named(learned[2])
    for axis in (hits, *learned[1:]):
        assert axis.get_ylim() == (-0.02, 1.02) and axis.get_ylabel() and axis.get_xlabel() and axis.get_title()
        assert axis.get_legend().get_bbox_to_anchor().transformed(axis.transAxes.inverted()).x0 > 1  # hides no curve


def test_scores_of_a_task_have_a_panel_each(tmp_path, monkeypatch):
    kept = drawn_by(monkeypatch, shared)
    score = {
        f"task/score/{name}": 0.5 for name in ("balanced_accuracy/3 balls/1", "balanced_accuracy/4 balls/1", "mse")
    }
    shared.curves([{"step": 1, "task/loss": 1.0}, {"step": 2, "task/loss": 0.5} | score], tmp_path / "x.png")
    loss, accuracy, mse = kept[0].axes
    assert list(named(accuracy)) == ["3 balls", "4 balls", "chance, 0.5"] and accuracy.get_ylim() == (-0.02, 1.02)
    assert mse.get_title() == "mse on test data" and mse.lines[0].get_marker() == "o"  # one point is seen
    assert loss.get_yscale() == "linear"
    shared.against([2, 4], {"model": [1e-3, 1.0], "beside": [0.1, 0.1]}, "n", "error", tmp_path / "x.png")
    shared.against([2, 4], {"model": [0.1, 0.2]}, "n", "share", tmp_path / "x.png", share=True)
    assert kept[1].axes[0].get_yscale() == "log" and kept[2].axes[0].get_ylim() == (-0.02, 1.02)


def test_steps_of_a_rollout_tell_action_and_return(block_episodes, tmp_path, monkeypatch):
    kept = drawn_by(monkeypatch, figures)
    seen = imagined(blocks_model(block_episodes, SNPS(7, 5, 2)), block_episodes, 4)
    actions = seen.episodes.arrays["actions"][seen.rows[0]].tolist()
    figures.rollout(seen, tmp_path / "x.png")
    monkeypatch.setitem(seen.episodes.arrays, "rewards", torch.ones(len(seen.episodes.arrays["actions"])))
    figures.rollout(seen, tmp_path / "x.png")
    for figure, told in zip(kept, ("", "\nreturn {}"), strict=True):
        titles = [axis.get_title() for axis in figure.axes if axis.get_title()]
        expected = [f"step {t}\naction {actions[t - 1]}{told.format(t)}" for t in range(1, 5)]
        assert titles == ["step 0", *expected]


def test_pictures_of_views_have_scales_chance_and_pairs(tmp_path, monkeypatch):
    kept = drawn_by(monkeypatch, views)
    measured = {"balanced_accuracy": 0.7, "negative_mse": -2.0}
    views.against_share({"a": {"0.5": measured, "1": measured}}, tmp_path / "x", copied={"a": measured})
    views.against_removed({"a": {"0": measured, "3": measured}}, tmp_path / "x")
    views.along_rollout({"a": {"model": [0.6, 0.5], "copy": [0.9, 0.8]}}, tmp_path / "x")
    views.enclaves(S2GRU(3, 4, 6), (10.0, 20.0), 1.0, tmp_path / "x")
    views.polar_pair(torch.zeros(2, 15, 9, 18), torch.zeros(2, 15, 9, 18), tmp_path / "x")
    share, removed, rollout, enclaves, polar = kept
    for axis in (share.axes[0], removed.axes[0], rollout.axes[0]):
        assert axis.get_ylim() == (-0.02, 1.02) and "chance, 0.5" in named(axis)
    model, copy = rollout.axes[0].lines[:2]
    assert model.get_color() == copy.get_color() and copy.get_linestyle() == "--"
    assert share.axes[0].lines[0].get_color() == share.axes[0].lines[1].get_color()
    assert {"how much of it the module sees", "how much they hear of each other"} <= {
        a.get_ylabel() for a in enclaves.axes
    }
    assert any("height of the ground" in axis.get_ylabel() for axis in polar.axes)


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
