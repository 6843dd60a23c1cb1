import json
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

from worldmodels.cores.nps import PNPS, SNPS
from worldmodels.data.episodes import Episodes
from worldmodels.encoders import CSWMEncoder
from worldmodels.evaluation import Encoded, evaluate
from worldmodels.report import figures
from worldmodels.report.tables import scores, show
from worldmodels.world_model import WorldModel


def blocks_model(episodes, core):
    torch.manual_seed(0)
    encoder = CSWMEncoder(episodes.observation_shape, 5, 2, hidden_size=16)
    return WorldModel(encoder, core, action=episodes.about["action"], action_to="slot").eval()


def imagined(model, episodes, steps):
    with torch.no_grad():
        return Encoded(model, episodes, steps)


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
    monkeypatch.setattr(figures, "_save", lambda figure, path: drawn.update(figure=figure) or path)
    figures.choices(model, imagined(model, block_episodes, 4), Path("x"), episode=2)
    texts = {(int(t.get_position()[0]), int(t.get_position()[1])): t.get_text() for t in drawn["figure"].axes[0].texts}
    paths = block_episodes.paths(torch.tensor([2]), torch.tensor([0]), 4)
    with torch.no_grad():
        explained = figures._explain(model, model.encode(paths.observations[:4]), paths.actions)
    assert len(texts) == 8
    for t in range(4):
        for s in range(2):
            assert texts[(2 * t + s, int(explained["primary"][t, s]))] == str(int(explained["rule"][t, s]))


def test_retrieved_frames_of_a_perfect_model_are_the_true_ones(tmp_path, monkeypatch):
    from .test_world_model import adder, counting_episodes

    drawn = {}
    monkeypatch.setattr(figures, "_save", lambda figure, path: drawn.update(figure=figure) or path)
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
