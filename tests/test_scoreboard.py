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
from worldmodels.report import scoreboard as report
from worldmodels.report.scoreboard import core_name, csv_rows, markdown, over_seeds, scoreboard, tables, write
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
    seeds(tmp_path, "snps", [0.4, 0.6])
    seeds(tmp_path, "gru", [0.4])
    rows = rows_of(scoreboard([tmp_path]))
    assert list(rows) == ["gnn", "snps", "gru"]  # as in the table of cores
    gnn, snps, gru = (row.scores for row in rows.values())
    assert (gnn["1"]["h@1"].mean, gnn["1"]["h@1"].sd) == pytest.approx((0.4, 0.2))
    assert (gnn["10"]["mrr"].mean, gnn["10"]["mrr"].sd) == pytest.approx((0.55, 0.025))
    assert gnn["5"]["h@1"].values == [0.1, 0.2, 0.3] and gnn["5"]["h@1"].interval is None
    assert [gnn["5"][f"in_episode_{m}"].mean for m in ("h@1", "copy_h@1", "chance")] == pytest.approx([0.18, 0.05, 0.1])
    assert snps["1"]["h@1"].sd == pytest.approx(0.02**0.5) and gru["1"]["h@1"].sd is None
    # Of 2 x 3 pairs snps wins 1 + 2 and ties 2; gru wins 1, ties 1 and loses 1.
    for h in ("1", "5", "10"):
        assert rows["snps"].better[h]["gnn"].mean == pytest.approx((3 + 2 / 2) / 6)
        assert rows["gru"].better[h]["gnn"].mean == 0.5 and rows["gnn"].better[h].keys() == {"gru"}
        assert rows["snps"].better[h]["gru"].mean == pytest.approx((1 + 1 / 2) / 2)
    assert rows["gnn"].seconds == 90.0 and rows["snps"].seconds is None
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
    monkeypatch.setattr(report, "save", lambda figure, path: figures.append(figure) or path)
    report.figure(board, tmp_path / "x.png")
    return figures[0]


def test_the_picture_shows_the_numbers(tmp_path, monkeypatch):
    seeds(tmp_path, "gnn", [0.2, 0.6])
    seeds(tmp_path, "snps", [0.1, 0.2, 0.3, 0.4, 0.5])
    fake_run(tmp_path / "dead", "mlp", 0, alarms=["collapse: effective rank 1.00"])
    board = scoreboard([tmp_path])
    axes = drawn(board, monkeypatch, tmp_path).subfigs[0].axes
    assert [axis.get_title() for axis in axes] == ["1 step", "5 steps", "10 steps"]
    labels = [label.get_text() for label in axes[0].get_yticklabels()]
    assert labels == ["gnn\n2 seeds, ± sd", "snps\n5 seeds, 95 %", "mlp\n1 seed"]
    bar, mean, copy = axes[0].lines[:3]
    assert bar.get_xdata() == pytest.approx([40 - 800**0.5, 40 + 800**0.5])
    assert mean.get_xdata()[0] == pytest.approx(40.0) and copy.get_xdata()[0] == pytest.approx(10.0)
    assert axes[0].lines[3].get_xdata() == pytest.approx(
        [100 * edge for edge in rows_of(board)["snps"].scores["1"]["h@1"].interval]
    )
    dots = [collection.get_offsets()[:, 0].tolist() for collection in axes[1].collections]
    assert dots == [pytest.approx([10.0, 30.0]), pytest.approx([5.0, 10.0, 15.0, 20.0, 25.0]), pytest.approx([25.0])]
    assert {line.get_color() for line in axes[0].lines[6:]} == {"#aaaaaa"}
    assert [text.get_text() for text in axes[2].texts] == ["P(better\nthan gnn)", "", "0.35", "0.50"]


def test_settings_that_differ_are_told(tmp_path):
    seeds(tmp_path / "a", "gnn", [0.3], words=["trainer.steps=2000", "logger.figures=false", "data.dir=here"])
    seeds(tmp_path / "b", "gnn", [0.3], words=["trainer.steps=4000", "trainer.log_every=1"], episodes=90)
    seeds(tmp_path / "c", "snps", [0.3], words=["trainer.steps=4000", "core.num_rules=2"])
    board = scoreboard([tmp_path])
    within = line_with(board, "gnn: runs differ")
    assert within == "gnn: runs differ in episodes scored (100, 90), trainer.steps (2000, 4000)"
    told = [note for note in board.sections[0].notes if note.startswith("rows differ")]
    assert told == [
        "rows differ in episodes scored too: 100, 90 of gnn; 100 of snps",
        "rows differ in trainer.steps too: 2000, 4000 of gnn; 4000 of snps",
    ]
    board = scoreboard([tmp_path], "trainer.steps")
    assert list(rows_of(board)) == ["2000", "4000"]
    assert "4000: runs differ in core (gnn, snps), episodes" in line_with(board, "4000: runs")  # not core.num_rules


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
    assert list(rows_of(scoreboard([tmp_path / "0", tmp_path / "1"], "core"))) == ["snps"]
    depths = [row.name for section in scoreboard([tmp_path], "core.depth").sections for row in section.rows]
    assert sorted(depths) == ["1", "not set"]
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
        )
    ):
        path = fake_run(tmp_path / f"other-{i}", "snps", words=[*words, *more], **evaluation)
        assert list(rows_of(scoreboard([path]))) == ["snps"]


def test_horizons_may_differ(tmp_path):
    fake_run(tmp_path / "a", "gnn", 0, 0.4)
    fake_run(tmp_path / "b", "gnn", 1, 0.6, horizons=(1, 5), words=["evaluation.horizons=[1,5]"])
    fake_run(tmp_path / "c", "snps", 1, 0.6, horizons=(1, 2), words=["evaluation.horizons=[1,2]"])
    board = scoreboard([tmp_path])
    assert board.sections[0].horizons == ["1", "2", "5", "10"]
    rows = rows_of(board)
    assert rows["gnn"].scores["10"]["h@1"].values == [0.1] and rows["gnn"].scores["5"]["h@1"].values == [0.2, 0.3]
    assert rows["snps"].better == {"1": {"gnn": rows["snps"].better["1"]["gnn"]}, "2": {}}
    assert "| snps | 1 | 60.0 | 30.0 | - | - | 80.0 | 65.0 | - | - |" in markdown(board, "")
    assert "evaluation.horizons ([1, 5, 10], [1, 5])" in line_with(board, "gnn: runs differ")
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
        result["probe"] = {"objects": {"ball_x": {"r2": r2, "slot": 1, "slot_r2": 0.5, "imagined_r2": imagined}}}
        (path / "evaluation.json").write_text(json.dumps(result))
    board = scoreboard([tmp_path])
    assert line_with(board, "occur") == (
        "after 1/5/10 steps 3.0/1.0/0.0 % of the test states occur more than once, so that H@1 can be 98.5/99.5/100.0 at "
        "most; with rivals in the same state left out it is gnn 50.0/50.0/50.0"
    )
    assert "| ball_x | gnn | 0.62 | 0.50 | 0.31 | - | 0.25 |" in markdown(board, "")
    first, second, _ = csv_rows(board)
    assert first["duplicates"] == pytest.approx(0.03) and first["distinct_mrr"] == pytest.approx(0.6)
    assert (first["probe_ball_x_r2"], first["probe_ball_x_imagined_r2"]) == (0.625, 0.3125)
    assert "probe_ball_x_imagined_r2" not in second


def test_the_table_of_values_holds_the_numbers(tmp_path):
    seeds(tmp_path, "gnn", [0.1, 0.2, 0.3, 0.4, 0.5], seconds=60.0)
    seeds(tmp_path, "pnps", [0.7])
    board = scoreboard([tmp_path])
    write(board, tmp_path / "out", "")
    lines = list(csv.DictReader((tmp_path / "out/scoreboard.csv").read_text().splitlines()))
    assert [(line["core"], line["horizon"], line["seeds"]) for line in lines] == [
        (core, h, n) for core, n in (("gnn", "5"), ("pnps", "1")) for h in ("1", "5", "10")
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
    config = OmegaConf.to_container(OmegaConf.load(run / "config.yaml"))
    OmegaConf.save(OmegaConf.create(config | {"task": {"_target_": "x"}}), run / "config.yaml")
    assert "worldmodels compare" in refused([tmp_path])
    OmegaConf.save(OmegaConf.create(config | {"ppo": {}}), run / "config.yaml")
    assert "evaluate-agent" in refused([tmp_path]) and "compare" in refused([tmp_path])


def test_the_command_on_real_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    smoke = ["experiment=block_physics", "size=smoke", "logger.figures=false", "trainer.threads=1"]
    for core in ("gnn", "snps"):
        assert main(["train", *smoke, f"core={core}", f"run=runs/core={core}"]) == 0
    capsys.readouterr()
    assert main(["report", "runs", "--compare", "core"]) == 0
    out = capsys.readouterr().out
    assert "worldmodels/BlockPhysics-v0" in out and "its latent copy" in out and "P(better" in out
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
