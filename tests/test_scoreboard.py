"""The scoreboard: hand-worked numbers of fake runs, and two real ones."""

import csv
import json
import re
from functools import partial

import pytest
from matplotlib.image import imread
from omegaconf import OmegaConf
from scipy import stats

from worldmodels.cli import main
from worldmodels.config import TrainConfig, plain
from worldmodels.cores import CORES
from worldmodels.errors import UserError
from worldmodels.metrics import probability_of_improvement, seeds_interval
from worldmodels.report.scoreboard import Row, Scoreboard, Section, Statistic, core_name, over_seeds, scoreboard
from worldmodels.report.scoreboard_pages import DAGGER, csv_rows, figure, markdown, tables, write
from worldmodels.report.tables import show


def fake_run(path, core="gnn", seed=0, hit=0.5, *, words=(), horizons=(1, 5, 10), seconds=None, **evaluation):
    """A run's folder as ``train`` leaves it, without the model: H@1 is ``hit``, half and a quarter of it."""
    config = OmegaConf.structured(TrainConfig)
    config.core = {"num_slots": None, "slot_size": None, "num_rules": 1, **CORES.get(core, {"_target_": core})}
    defaults = ["env.id=worldmodels/BlockPhysics-v0", "data.test.episodes=100", f"seed={seed}", "run=x", "resume=x"]
    config = plain(OmegaConf.merge(config, OmegaConf.from_dotlist([*defaults, *words])))
    path.mkdir(parents=True)
    OmegaConf.save(OmegaConf.create({**config, "model": {"action": {}}}), path / "config.yaml")
    result = {"all": {}, "in_episode": {}, "moved": {}, "alarms": [], "episodes": 100, "burn_in": 0}
    result |= {"parameters": 2000, "core_parameters": 1000, "core": "X", "memory": config["memory"]}
    for share, h in zip((1.0, 0.5, 0.25), horizons, strict=False):
        copies = {"copy_h@1": 0.1 * share, "copy_mrr": 0.2 * share}
        result["all"][str(h)] = {"h@1": hit * share, "mrr": 0.5 * (1 + hit * share), **copies, "ci95": [0.0, 1.0]}
        result["in_episode"][str(h)] = {"h@1": 0.9 * hit * share, "mrr": 0.5, **copies, "chance": 0.1}
    (path / "evaluation.json").write_text(json.dumps(result | evaluation))
    lines = [{"step": 1, "wm/loss": 1.0}]
    lines += [{"step": s, "time/training_seconds": seconds * s / 3} for s in (2, 3)] if seconds else []
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def seeds(folder, core, hits, **more):
    for seed, hit in enumerate(hits):
        fake_run(folder / f"{core}-{seed}", core, seed, hit, **more)


def rows_of(board):
    (section,) = board.sections
    return {row.name: row for row in section.rows}


def line_with(board, *words):
    """The one note that holds all words."""
    (found,) = [note for section in board.sections for note in section.notes if all(word in note for word in words)]
    return found


def refused(*arguments, **options):
    with pytest.raises(UserError) as refusal:
        scoreboard(*arguments, **options)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_numbers_over_seeds_by_hand(tmp_path):
    seeds(tmp_path, "gnn", [0.2, 0.4, 0.6], seconds=90.0)
    seeds(tmp_path, "snps", [0.4, 0.6, 0.6])
    seeds(tmp_path, "gru", [0.4])
    seeds(tmp_path, "lstm", [0.4, 0.4])
    rows = rows_of(scoreboard([tmp_path]))
    assert list(rows) == ["gnn", "snps", "lstm", "gru"]  # as in the table of cores
    gnn, snps, _, gru = (row.scores for row in rows.values())
    assert (gnn["1"]["h@1"].mean, gnn["1"]["h@1"].sd) == pytest.approx((0.4, 0.2))
    assert (gnn["10"]["mrr"].mean, gnn["10"]["mrr"].sd) == pytest.approx((0.55, 0.025))
    assert gnn["5"]["h@1"].values == [0.1, 0.2, 0.3] and gnn["5"]["h@1"].interval is None
    assert [gnn["5"][f"in_episode_{m}"].mean for m in ("h@1", "copy_h@1", "chance")] == pytest.approx([0.18, 0.05, 0.1])
    assert snps["1"]["h@1"].sd == pytest.approx((0.04 / 3) ** 0.5) and gru["1"]["h@1"].sd is None
    # Of 3 x 3 pairs snps wins 1 + 2 + 2 and ties 3; the others have too few seeds.
    for h in ("1", "5", "10"):
        assert rows["snps"].better[h]["gnn"].mean == pytest.approx((5 + 3 / 2) / 9)
        assert [list(row.better[h]) for row in rows.values()] == [[], ["gnn"], [], []]
    assert rows["gnn"].seconds.mean == 90.0 and rows["snps"].seconds is None
    assert (rows["gnn"].core_parameters, rows["gnn"].parameters) == ([1000], [2000])


def test_intervals_begin_at_five_seeds(tmp_path):
    """The mean of five draws from one 1 and four 0 is Binomial(5, 0.2) / 5: its quantiles are 0 and 0.6."""
    assert over_seeds([0.0, 0.0, 0.0, 1.0]).interval is None
    assert over_seeds([0.0, 0.0, 0.0, 0.0, 1.0]).interval == pytest.approx((0.0, 0.6))
    assert over_seeds([0.25] * 5).interval == (0.25, 0.25)
    seeds(tmp_path, "gnn", [0.1, 0.2, 0.3, 0.4, 0.5])
    seeds(tmp_path, "lstm", [0.6, 0.7, 0.8, 0.9, 1.0])
    seeds(tmp_path, "snps", [0.1, 0.2, 0.3, 0.4])
    rows = rows_of(scoreboard([tmp_path]))
    better = rows["lstm"].better["10"]["gnn"]
    assert better.mean == 1.0 and better.interval == (1.0, 1.0)
    assert rows["snps"].better["10"]["gnn"].interval is None
    table = markdown(scoreboard([tmp_path]), "")
    assert re.search(r"\| gnn \| 5 \| 30.0 ± 15.8 \[\d+\.\d, \d+\.\d\]", table)
    assert "| snps | 4 | 25.0 ± 12.9 (10.0, 20.0, 30.0, 40.0) |" in table


def test_statistics_of_seeds_by_hand():
    assert probability_of_improvement([1.0, 3.0], [2.0, 3.0]) == (0 + 0 + 1 + 0.5) / 4
    middle = partial(stats.trim_mean, proportiontocut=0.25)  # of five: the middle three
    low, high = seeds_interval([0.1, 0.2, 0.3, 0.4, 0.5], statistic=middle)
    assert 0.1 <= low < 0.3 < high <= 0.5
    assert seeds_interval([0.0, 0.0, 0.0, 0.0, 1.0], statistic=middle)[1] == pytest.approx(2 / 3)  # two of three are 1
    low, high = seeds_interval([1.0, 2.0, 3.0] * 2, [1.0, 2.0, 3.0] * 2, statistic=probability_of_improvement)
    assert low < 0.5 < high and low + high == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("name", CORES)
def test_cores_have_their_names(name):
    core = {"num_slots": None, "slot_size": None, "hidden_size": 7, **CORES[name]}
    assert core_name(core) == core_name(core | {"slot_size": 32}) == name


def test_other_cores_have_their_class():
    assert core_name({"_target_": "my.module.Mine"}) == "Mine"
    assert core_name({"_target_": "worldmodels.cores.scoff.SCOFF", "num_schemata": 1}) == "scoff"


def test_collapsed_rows_are_greyed(tmp_path, capsys):
    seeds(tmp_path, "gnn", [0.3, 0.4])
    fake_run(tmp_path / "dead", "mlp", 0, alarms=["collapse: effective rank 1.00"])
    fake_run(tmp_path / "alive", "mlp", 1, alarms=["shortcut: at 10 steps"])
    board = scoreboard([tmp_path])
    row = rows_of(board)["mlp"]
    assert (row.collapsed, row.shortcut) == (1, 1) and rows_of(board)["gnn"].collapsed == 0
    assert line_with(board, "mlp: collapsed") == "mlp: collapsed in 1 of 2 runs"
    assert "1 of 2" in line_with(board, "† mlp", "shortcut")
    text = markdown(board, "")
    assert "| *mlp †* | *2* | *50.0 ± 0.0 (50.0, 50.0)* |" in text and "| gnn | 2 | 35.0 ± 7.1 (30.0, 40.0) |" in text
    first = tables(board)[0]
    assert [row.style for row in first.rows] == [None, "dim", "dim", "dim"]  # each with its copy
    for table in tables(board):
        show(table)
    assert "collapsed in 1 of 2 runs" in capsys.readouterr().out


def drawn(board, monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr("worldmodels.report.scoreboard_pages.save", lambda figure, path: figures.append(figure) or path)
    figure(board, tmp_path / "x.png")
    return figures[0]


def test_the_picture_shows_the_numbers(tmp_path, monkeypatch):
    seeds(tmp_path, "gnn", [0.2, 0.6, 0.4])
    seeds(tmp_path, "snps", [0.1, 0.2, 0.3, 0.4, 0.5])
    fake_run(tmp_path / "dead", "mlp", 0, alarms=["collapse: effective rank 1.00"])
    fake_run(tmp_path / "alive", "mlp", 1)
    board = scoreboard([tmp_path])
    axes = drawn(board, monkeypatch, tmp_path).subfigs[0].axes
    assert [axis.get_title() for axis in axes] == ["1 step ahead", "5 steps ahead", "10 steps ahead"]
    labels = [label.get_text() for label in axes[0].get_yticklabels()]
    assert labels == ["gnn\n3 seeds, ± sd", "snps\n5 seeds, 95 %", "mlp\n2 seeds, ± sd, collapsed in 1 of 2"]
    chance, bar, mean, copy = axes[0].lines[:4]
    assert chance.get_xdata()[0] == 1.0  # of 100 test episodes
    assert bar.get_xdata() == pytest.approx([20.0, 60.0])
    assert mean.get_xdata()[0] == pytest.approx(40.0) and copy.get_xdata()[0] == pytest.approx(10.0)
    assert axes[0].lines[4].get_xdata() == pytest.approx(
        [100 * edge for edge in rows_of(board)["snps"].scores["1"]["h@1"].interval]
    )
    dots = [collection.get_offsets()[:, 0].tolist() for collection in axes[1].collections]
    assert dots == [
        pytest.approx([10.0, 30.0, 20.0]),
        pytest.approx([5.0, 10.0, 15.0, 20.0, 25.0]),
        pytest.approx([25.0, 25.0]),
    ]
    assert {line.get_color() for line in axes[0].lines[7:]} == {"#aaaaaa"}
    assert [text.get_text() for text in axes[2].texts] == ["P(better\nthan gnn,\n10 steps)", "", "0.33", ""]


def test_the_picture_of_single_seeds(tmp_path, monkeypatch):
    fake_run(tmp_path / "one", "gnn", hit=0.5, alarms=["shortcut: at 10 steps"])
    fake_run(tmp_path / "two", "snps", hit=0.3)
    made = drawn(scoreboard([tmp_path]), monkeypatch, tmp_path)
    (axis, *others), (note,) = made.subfigs[0].axes, [text.get_text() for text in made.texts]
    assert [label.get_text() for label in axis.get_yticklabels()] == [
        "gnn\n1 seed\nshortcut alarm in 1 of 1",
        "snps\n1 seed",
    ]
    assert [line.get_marker() for line in axis.lines] == ["None", "s", "s"]  # chance and two copies: no bar, no mean
    assert [found.get_offsets().tolist() for found in axis.collections] == [[[50.0, 0.0]], [[30.0, 1.0]]]
    assert {panel.get_xlim() for panel in (axis, *others)} == {(-2.0, 102.0)}
    assert "shortcut alarm: the latent copy" in note and "chance" in note and "P(better" not in note


def test_a_wide_picture_fits(tmp_path):
    better = {core: Statistic(0.5, interval=(0.1, 0.9)) for core in ("gnn", "gru", "lstm")}
    scores = {h: {"h@1": over_seeds([0.1, 0.5, 0.9])} for h in ("1", "5", "10", "20")}
    rows = [Row("scoff", 3, scores=scores, better={"20": better}, collapsed=1)]
    board = Scoreboard("core", [Section({}, rows, [])], [], [])
    assert imread(figure(board, tmp_path / "x.png")).shape[1] <= 1600


def test_every_table_explains_its_dagger(tmp_path):
    fake_run(tmp_path / "one", "gnn", alarms=["shortcut: at 10 steps"])
    board = scoreboard([tmp_path])
    for table in tables(board):
        marked = any("†" in str(cell) for column in table.columns for cell in column.cells)
        assert not marked or "†" in str(table.caption)
    assert markdown(board, "").count(DAGGER) == len(tables(board)) - 1


def test_rows_hold_runs_that_differ_in_their_seed_alone(tmp_path):
    seeds(tmp_path / "a", "gnn", [0.3], words=["trainer.steps=2000", "logger.figures=false", "data.dir=here"])
    seeds(tmp_path / "b", "gnn", [0.4], words=["trainer.steps=4000", "trainer.log_every=1"])
    seeds(tmp_path / "c", "snps", [0.5, 0.6], words=["trainer.steps=4000", "core.num_stages=3"])
    seeds(tmp_path / "d", "snps", [0.7], words=["trainer.steps=4000", "core.num_stages=1"])
    board = scoreboard([tmp_path])
    names = ["gnn, trainer.steps=2000", "gnn, trainer.steps=4000", "snps, core.num_stages=3", "snps, core.num_stages=1"]
    assert {name: row.seeds for name, row in rows_of(board).items()} == dict(zip(names, (1, 1, 2, 1), strict=True))
    assert rows_of(board)[names[3]].scores["1"]["h@1"].values == [0.7]
    assert board.sections[0].notes == [
        f"rows differ in trainer.steps too: 2000 of {names[0]}; 4000 of {' and '.join(names[1:])}"
    ]
    assert "| snps, core.num_stages=1 | 1 | 70.0 |" in markdown(board, "")

    rows = rows_of(scoreboard([tmp_path], "trainer.steps"))
    assert list(rows) == [
        "2000",
        "4000, core=gnn",
        "4000, core=snps, core.num_stages=3",
        "4000, core=snps, core.num_stages=1",
    ]
    assert list(rows_of(scoreboard([tmp_path / "a", tmp_path / "d"], "seed"))) == [
        "0, core=gnn, trainer.steps=2000",
        "0, core=snps, trainer.steps=4000",
    ]
    assert not scoreboard([tmp_path / "a", tmp_path / "d"], "seed").sections[0].notes  # the names say it all


def test_names_of_rows_stay_short_and_tell_them_apart(tmp_path):
    changed = ["trainer.batch_size=7", "trainer.steps=7", "trainer.window=7", "encoder.note=7", "objective.note=7"]
    fake_run(tmp_path / "a")
    fake_run(tmp_path / "b", words=changed)
    fake_run(tmp_path / "c", "snps", episodes=90)
    assert list(rows_of(scoreboard([tmp_path]))) == [
        "gnn, encoder.note=not set, objective.note=not set, trainer.batch_size=1024, ...",
        "gnn, encoder.note=7, objective.note=7, trainer.batch_size=7, ...",
        "snps",
    ]
    for i, word in enumerate(changed):
        fake_run(tmp_path / f"one-{i}", words=[word])
    assert len(rows_of(scoreboard([tmp_path]))) == 8
    assert line_with(scoreboard([tmp_path]), "episodes").endswith("; 90 of snps")


def test_the_baseline_has_the_settings_of_the_row(tmp_path):
    few, many = ["trainer.steps=2000"], ["trainer.steps=4000"]
    seeds(tmp_path / "few", "gnn", [0.1, 0.1, 0.1], words=few)
    seeds(tmp_path / "many", "gnn", [0.9, 0.9, 0.9], words=many)
    seeds(tmp_path / "few", "snps", [0.5, 0.5, 0.5], words=few)
    seeds(tmp_path / "many", "snps", [0.5, 0.5, 0.5], words=many)
    seeds(tmp_path / "other", "mlp", [0.5, 0.5, 0.5], words=["trainer.steps=3000"])
    seeds(tmp_path / "few", "gru", [0.5, 0.5, 0.5], words=few)
    better = {name: row.better["1"] for name, row in rows_of(scoreboard([tmp_path])).items()}
    assert {name: found["gnn"].mean for name, found in better.items() if "gnn" in found} == {
        "snps, trainer.steps=2000": 1.0,
        "snps, trainer.steps=4000": 0.0,
        "gru": 1.0,
    }
    assert "gru" in better["mlp"]  # the only one
    seeds(tmp_path / "wide", "gru", [0.5, 0.5, 0.5], words=[*few, "core.hidden_size=7"])
    better = {name: row.better["1"] for name, row in rows_of(scoreboard([tmp_path])).items()}
    assert not any("gru" in found for found in better.values())  # which of the two?


def test_half_trained_runs_are_marked(tmp_path):
    words = ["trainer.steps=2000"]
    seeds(tmp_path / "whole", "gnn", [0.5, 0.6], words=words, step=2000)
    fake_run(tmp_path / "old", "gnn", 2, 0.7, words=words)
    fake_run(tmp_path / "half", "gnn", 3, 0.1, words=words, step=100)
    fake_run(tmp_path / "snps", "snps", 0, 0.1, words=words, step=0)
    rows = rows_of(scoreboard([tmp_path]))
    assert {name: row.seeds for name, row in rows.items()} == {
        "gnn": 3,
        "gnn, steps trained=100 of 2000": 1,
        "snps, steps trained=0 of 2000": 1,
    }
    assert not scoreboard([tmp_path]).sections[0].notes


def test_cells_of_fewer_seeds_are_marked(tmp_path):
    moved = {h: {"h@1": 0.5, "copy_h@1": 0.25} for h in ("1", "5", "10")}
    fake_run(tmp_path / "0", seed=0, seconds=60.0)
    for seed in (1, 2):
        objects = {"x": {"r2": 0.5, "slot_r2": 0.5, "imagined_r2": {"1": 0.5 if seed == 1 else None}}}
        fake_run(tmp_path / str(seed), seed=seed, moved=moved, probe={"objects": objects})
    board = scoreboard([tmp_path])
    text = markdown(board, "")
    assert "| gnn | 50.0 ± 0.0 (50.0, 50.0) (n=2) | 50.0 ± 0.0" in text
    assert "| its latent copy | 25.0 ± 0.0 (n=2) |" in text
    assert "| x | gnn | 0.50 (n=2) | 0.50 (n=2) | 0.50 (n=1) | - | - |" in text
    assert "| 0:01:00 (n=1) |" in text and "wall time of training (beside whatever else ran), h:mm:ss" in text
    assert "| gnn | 3 | 50.0 ± 0.0 (50.0, 50.0, 50.0) | 25.0" in text and "the step alone |" not in text
    first = csv_rows(board)[0]
    assert (first["moved_h@1_n"], first["probe_x_imagined_r2_n"]) == (2, 1) and "h@1_n" not in first


def test_seeds_that_repeat_are_told(tmp_path):
    for name in ("a", "b"):
        fake_run(tmp_path / name, "gnn", 0, words=[f"data.dir={name}"])
    fake_run(tmp_path / "c", "gnn", 1)
    told = line_with(scoreboard([tmp_path]), "same seed")
    assert "a and" in told and told.endswith("b have the same seed and config and count as 2 seeds")
    assert rows_of(scoreboard([tmp_path, tmp_path / "a", tmp_path / "c"]))["gnn"].seeds == 3  # each folder once


def test_any_key_can_be_compared(tmp_path):
    for i, rules in enumerate((10, 2, None)):
        fake_run(tmp_path / str(i), "snps", words=[f"core.num_rules={'null' if rules is None else rules}"])
    fake_run(tmp_path / "carry", "gru", words=["memory=carry", "core.depth=1"], burn_in=5)
    assert list(rows_of(scoreboard([tmp_path / "0", tmp_path / "1", tmp_path / "2"], "core.num_rules"))) == [
        "2",
        "10",
        "null",
    ]
    board = scoreboard([tmp_path / "0", tmp_path / "carry"], "memory")
    assert list(rows_of(board)) == ["carry", "none"] and not rows_of(board)["none"].better
    assert line_with(board, "burn-in") == "rows differ in burn-in too: 5 of carry; 0 of none"
    rules = [f"snps, core.num_rules={n}" for n in (10, 2)]
    assert list(rows_of(scoreboard([tmp_path / "0", tmp_path / "1"], "core"))) == rules
    depths = [row.name for section in scoreboard([tmp_path], "core.depth").sections for row in section.rows]
    assert sorted(depths) == ["1", *(f"not set, core.num_rules={n}" for n in ("10", "2", "null"))]
    assert "did you mean 'core.num_rules'" in refused([tmp_path], compare="core.num_rule")


def test_every_test_setting_has_its_section(tmp_path):
    for i, words in enumerate(
        (
            [],
            ["env.kwargs.n=1"],
            ["env.kwargs.n=2"],
            ["data.test.seed=9"],
            ["data.test.path=here"],
            ["evaluation.limit=50"],
        )
    ):
        fake_run(tmp_path / str(i), words=words)
    board = scoreboard([tmp_path])
    name = "worldmodels/BlockPhysics-v0"
    assert [section.title for section in board.sections] == [name, f"{name}, n=1", f"{name}, n=2", *[name] * 3]
    assert "data.test.path=here" in markdown(board, "") and "evaluation.limit=50" in markdown(board, "")
    (section,) = scoreboard([tmp_path / "1", tmp_path / "2"], "env.kwargs.n").sections
    assert [row.name for row in section.rows] == ["1", "2"]


@pytest.mark.parametrize(("game", "table"), [("pong", "Table 11"), ("space_invaders", "Table 12")])
def test_published_figures_stand_beside_ours(tmp_path, game, table):
    words = ["env.id=worldmodels/Atari-v0", f"env.kwargs.game={game}"]
    fake_run(tmp_path / "a", "snps", words=words)
    rows = rows_of(scoreboard([tmp_path]))
    assert list(rows) == ["snps", f"NPS: published (NPS, {table})", f"GNN: published (NPS, {table})"]
    assert not [note for note in scoreboard([tmp_path]).sections[0].notes if "ties" in note]
    for i, games in enumerate(("pong", "space_invaders")):
        fake_run(tmp_path / f"game-{i}", "snps", i, words=[*words[:1], f"env.kwargs.game={games}"])
    both = rows_of(scoreboard([tmp_path / "game-0", tmp_path / "game-1"], "env.kwargs.game"))
    assert list(both) == ["pong", "space_invaders"]
    ties = {"all": {h: {"h@1": 0.4, "mrr": 0.5, "h@1_reference": 0.5} for h in ("1", "5", "10")}}
    own = ["env.id=worldmodels/Atari-v0", f"env.kwargs.game={game}", "data.test.steps=10"]
    counted = scoreboard([fake_run(tmp_path / "more", "gnn", words=own, **ties)])
    assert line_with(counted, "ties in favour").endswith("then ours is gnn 50.0/50.0/50.0")
    theirs = rows[f"GNN: published (NPS, {table})"]
    expected = (0.116, 0.061, 0.255) if game == "pong" else (0.217, 0.068, 0.396)
    five = theirs.scores["5"]
    assert (five["h@1"].mean, five["h@1"].sd, five["mrr"].mean) == pytest.approx(expected, abs=6e-4)
    assert theirs.seeds == 50 and not theirs.better
    for i, (more, evaluation) in enumerate(
        (
            (["env.kwargs.game=freeway"], {}),
            (["env.kwargs.sticky=true"], {}),
            (["data.test.steps=20"], {}),
            (["memory=carry"], {"burn_in": 5}),
            ([], {"episodes": 1000}),
            (["env.resize=[64,64]"], {}),
            (["data.drop_invalid=true"], {}),
        )
    ):
        path = fake_run(tmp_path / f"other-{i}", "snps", words=[*words, *more], **evaluation)
        assert list(rows_of(scoreboard([path]))) == ["snps"]
    assert list(rows_of(scoreboard([tmp_path / "other-5"], "env.resize"))) == ["[64, 64]"]


def test_horizons_may_differ(tmp_path):
    fake_run(tmp_path / "a", "gnn", 0, 0.4)
    fake_run(tmp_path / "b", "gnn", 1, 0.6, horizons=(1, 5), words=["evaluation.horizons=[1,5]"])
    seeds(tmp_path, "snps", [0.6, 0.6, 0.6], horizons=(1, 2), words=["evaluation.horizons=[1,2]"])
    seeds(tmp_path, "gru", [0.6, 0.6, 0.6])
    board = scoreboard([tmp_path])
    assert board.sections[0].horizons == ["1", "2", "5", "10"]
    rows = rows_of(board)
    all_three, two = (rows[f"gnn, evaluation.horizons={at}"].scores for at in ("[1, 5, 10]", "[1, 5]"))
    assert all_three["10"]["h@1"].values == [0.1] and two["5"]["h@1"].values == [0.3] and "10" not in two
    assert {h: list(found) for h, found in rows["snps"].better.items()} == {"1": ["gru"], "2": []}
    assert re.search(
        r"\| snps \| 3 \| 60.0 [^|]*\| 30.0 [^|]*\| - \| - \| 80.0 [^|]*\| 65.0 [^|]*\| - \| - \|", markdown(board, "")
    )
    assert write(board, tmp_path / "out", "")[2].stat().st_size > 5000


def test_duplicates_and_readouts(tmp_path):
    for seed, r2 in enumerate((0.5, 0.75)):
        path = fake_run(tmp_path / str(seed), "gnn", seed, 0.4)
        result = json.loads((path / "evaluation.json").read_text())
        for h, share in (("1", 0.03), ("5", 0.01), ("10", 0.0)):
            result["all"][h] |= {
                "duplicates": share,
                "distinct_h@1": 0.5,
                "distinct_mrr": 0.6,
                "ceiling": 1 - share / 2,
            }
        imagined = {"1": r2 / 2, "5": None, "10": 0.25}
        ball = {"r2": r2, "slot": 1, "slot_r2": 0.5, "imagined_r2": imagined}
        alone = {"time_r2": 0.375, "imagined_time_r2": {"1": 0.125, "5": None, "10": -1.5}}
        result["probe"] = {"objects": {"ball_x": ball | alone, "paddle": ball}}
        (path / "evaluation.json").write_text(json.dumps(result))
    board = scoreboard([tmp_path])
    assert line_with(board, "occur") == (
        "after 1/5/10 steps 3.0/1.0/0.0 % of the test states occur more than once (same observation or same state_id); H@1 "
        "of no model can exceed 98.5/99.5/100.0, the share of different observations; with rivals in the same state left out "
        "it is gnn 50.0/50.0/50.0"
    )
    text = markdown(board, "")
    both = (
        "| ball_x | gnn | 0.62 | 0.50 | 0.31 | - | 0.25 |\n| ball_x | the step alone | 0.38 | - | 0.12 | - | -1.50 |\n"
    )
    assert both + "| paddle | gnn |" in text and text.count("| the step alone |") == 1
    assert "worth something only above the step alone" in text
    assert [row.style for row in tables(board)[-1].rows] == [None, "dim", None]
    first, second, _ = csv_rows(board)
    assert first["duplicates"] == pytest.approx(0.03) and first["distinct_mrr"] == pytest.approx(0.6)
    assert (first["probe_ball_x_r2"], first["probe_ball_x_imagined_r2"]) == (0.625, 0.3125)
    assert (first["probe_ball_x_time_r2"], first["probe_ball_x_imagined_time_r2"]) == (0.375, 0.125)
    assert not {"probe_ball_x_imagined_r2", "probe_ball_x_imagined_time_r2", "probe_paddle_time_r2"} & second.keys()


def test_the_table_of_values_holds_the_numbers(tmp_path):
    seeds(tmp_path, "gnn", [0.1, 0.2, 0.3, 0.4, 0.5], seconds=60.0)
    seeds(tmp_path, "pnps", [0.7, 0.8, 0.9])
    board = scoreboard([tmp_path])
    write(board, tmp_path / "out", "")
    lines = list(csv.DictReader((tmp_path / "out/scoreboard.csv").read_text().splitlines()))
    assert [(line["core"], line["horizon"], line["seeds"]) for line in lines] == [
        (core, h, n) for core, n in (("gnn", "5"), ("pnps", "3")) for h in ("1", "5", "10")
    ]
    for line in lines:
        entry = rows_of(board)[line["core"]].scores[line["horizon"]]
        for measure, found in entry.items():
            low, high = found.interval or ("", "")
            edges = [line[f"{measure}{end}"] for end in ("", "_sd", "_low", "_high")]
            assert edges == [str(v) for v in (found.mean, "" if found.sd is None else found.sd, low, high)]
        assert [float(value) for value in line["h@1_seeds"].split()] == entry["h@1"].values
        assert (line["core_parameters"], line["parameters"]) == ("1000", "2000")
        assert line["better_than_gnn"] == ("1.0" if line["core"] == "pnps" else "")
    assert [line["training_seconds"] for line in lines] == ["60.0"] * 3 + [""] * 3


def test_markdown_tables_are_well_formed(tmp_path):
    seeds(tmp_path, "gnn", [0.1, 0.2])
    fake_run(tmp_path / "odd", "my.module.Odd", words=["encoder.note=a|b"])
    for compare in ("core", "encoder.note"):
        text = markdown(scoreboard([tmp_path], compare), "worldmodels report x")
        blocks = re.findall(r"(?:^\|.*\n)+", text, re.M)
        assert len(blocks) == 3
        for block in blocks:
            lines = block.splitlines()
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
            assert set(lines[1]) == set("| -:")
    assert "| a\\|b | 1 |" in text and "Made by `worldmodels report x`" in text
    assert f"{tmp_path}/odd" in text


def test_what_is_no_scored_world_model(tmp_path):
    assert "no folder at" in refused([tmp_path / "nothing"])
    assert "no evaluated runs" in refused([tmp_path])
    assert "no evaluated runs" in refused([])
    run = fake_run(tmp_path / "a" / "run")
    scores = (run / "evaluation.json").read_text()
    (run / "evaluation.json").unlink()
    assert f"evaluate run={run}" in refused([tmp_path])
    fake_run(tmp_path / "b")
    board = scoreboard([tmp_path])
    assert board.not_evaluated == [run.as_posix()] and "Not evaluated: " in markdown(board, "")
    for broken in ("{", "[]", json.dumps(json.loads(scores) | {"all": {}})):
        (run / "evaluation.json").write_text(broken)
        assert f"worldmodels evaluate run={run}" in refused([tmp_path])
    (run / "evaluation.json").write_text(scores)


def test_a_search_leaves_out_what_is_no_world_models_run(tmp_path, capsys):
    run = fake_run(tmp_path / "a")
    config = OmegaConf.to_container(OmegaConf.load(run / "config.yaml"))
    kinds = {
        "task": (config | {"task": {"_target_": "x"}}, "worldmodels compare"),
        "agent": (config | {"ppo": {}}, "worldmodels evaluate-agent"),
        "other": ({"learning_rate": 1}, "is not the config of a run of ours"),
    }
    for kind, (changed, says) in kinds.items():
        OmegaConf.save(OmegaConf.create(changed), fake_run(tmp_path / "mixed" / kind) / "config.yaml")
        refusal = refused([tmp_path, tmp_path / "mixed" / kind])  # named, and found as well
        assert kind in refusal and says.split(" ")[-1] in refusal
    (tmp_path / "mixed/task/evaluation.json").unlink()
    board = scoreboard([tmp_path])
    mixed = [(tmp_path / "mixed" / kind).as_posix() for kind in sorted(kinds)]
    assert list(rows_of(board)) == ["gnn"] and board.foreign == mixed and not board.not_evaluated
    assert f"Not a world model's run: {', '.join(mixed)}\n" in markdown(board, "")
    assert main(["report", str(tmp_path)]) == 0
    assert f"not a world model's run: {', '.join(mixed)}\n" in capsys.readouterr().out
    assert "3 not a world model's" in refused([tmp_path / "mixed"])


def test_the_command_on_real_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    smoke = ["experiment=block_physics", "size=smoke", "logger.figures=false", "trainer.threads=1"]
    for core in ("gnn", "snps"):
        assert main(["train", *smoke, f"core={core}", f"run=runs/core={core}"]) == 0
    capsys.readouterr()
    assert main(["report", "runs", "--compare", "core"]) == 0
    out = capsys.readouterr().out
    assert "worldmodels/BlockPhysics-v0" in out and "its latent copy" in out and "wall time" in out
    assert out.splitlines()[-3:] == [f"runs/scoreboard.{end}" for end in ("md", "csv", "png")]
    text = (tmp_path / "runs/scoreboard.md").read_text()
    assert "Made by `worldmodels report runs --compare core`." in text and "- gnn: runs/core=gnn\n" in text
    evaluation = json.loads((tmp_path / "runs/core=snps/evaluation.json").read_text())
    lines = list(csv.DictReader((tmp_path / "runs/scoreboard.csv").read_text().splitlines()))
    snps = next(line for line in lines if (line["core"], line["horizon"]) == ("snps", "10"))
    assert float(snps["h@1"]) == evaluation["all"]["10"]["h@1"]
    assert float(snps["in_episode_chance"]) == evaluation["in_episode"]["10"]["chance"]
    assert float(snps["training_seconds"]) > 0.0
    picture = imread(tmp_path / "runs/scoreboard.png")
    assert min(picture.shape[:2]) > 200 and picture.std() > 0.05

    words = ["runs/core=gnn", "runs/core=snps"]  # folders, for all their "="
    for options in (
        ["--out", "r/a"],
        ["--out=r/a"],
        ["out=r/a", "compare=core"],
        ["--compare=encoder.slot_size", "out=r/a"],
    ):
        assert main(["report", *words, *options]) == 0
        assert "r/a/scoreboard.md" in capsys.readouterr().out
    assert "| encoder.slot_size | seeds |" in (tmp_path / "r/a/scoreboard.md").read_text()
    assert not (tmp_path / "runs/core=gnn/scoreboard.md").exists()
    with pytest.raises(SystemExit):
        main(["report", "--help"])
    assert "compare=" in capsys.readouterr().out
    for mistake, says in (
        ([], "no folder was named"),
        (["runs", "--compare"], "--compare needs a value"),
        (["runs", "comparee=core"], "did you mean 'compare'"),
        (["runs", "--compar", "core"], "expected key=value"),
        (["runs", "--compare", "core.hidden"], "did you mean 'core.hidden_size'"),
        (["nothing"], "no folder at nothing"),
    ):
        assert main(["report", *mistake]) == 2
        line = capsys.readouterr().err
        assert says in line and line.count("\n") == 1
