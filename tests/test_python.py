"""What a program or a notebook meets: overrides in Python's own words, lines where no bar is drawn, Hydra around it."""

import subprocess
import sys
from pathlib import Path

import hydra
import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser

import worldmodels
import worldmodels.agents.run
from worldmodels import logging
from worldmodels.errors import UserError
from worldmodels.launch import as_words
from worldmodels.logging import RunLog

TEXTS = ("", "a b", "it's", '"', "a\\", "\\'", "a: b, c=[d]{e}", "null", "1", "a\nb", "core=x,y", "${seed}")
VALUES = (
    *TEXTS,
    None,
    True,
    3,
    -1e-5,
    10.0**20,
    float("inf"),
    [],
    {},
    [1, [None, "a, b"]],
    {"a": {"b c": ["d:e", False]}},
)


@pytest.mark.parametrize("value", VALUES)
def test_hydra_reads_every_value_as_it_was(value):
    (word,) = as_words([{"a.b": value}], {})
    read = OverridesParser.create().parse_override(word)
    assert read.key_or_group == "a.b" and read.value() == value and type(read.value()) is type(value)


def test_words_dicts_and_keywords():
    given = ("-m", "core=a,b", {"trainer.steps": 10, "trainer": {"threads": 1}}, {"env.kwargs.size": 4})
    assert as_words(
        given, {"seed": 3, "run": Path("a") / "b", "env": {"id": "X-v0", "kwargs": {"n": 1}}, "core": {}}
    ) == [
        "-m",
        "core=a,b",
        "trainer.steps=10",
        "trainer.threads=1",
        "++env.kwargs.size=4",
        "seed=3",
        "run='a/b'",
        "env.id='X-v0'",
        "++env.kwargs={n:1}",
    ]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["seed=1"], "got .'seed=1'.; expected words like 'core=rules', dicts, or keywords"),
        ({"seed": object()}, "as a value; expected numbers, text, None, or lists and dicts of them"),
        ({"a b:": 1}, "cannot be read back; keep keys to letters"),
        ({"env.kwargs": {"a:b": 1}}, "cannot be read back; keep keys to letters"),
    ],
)
def test_what_is_no_word_gets_one_line(given, says):
    with pytest.raises(UserError, match=says) as error:
        as_words([given], {})
    assert "\n" not in str(error.value)


def test_train_in_a_program_of_hydra_leaves_it_as_it_was(tmp_path, monkeypatch, capsys):
    """The user's program has groups of our names, and goes on with its own Hydra afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["theirs"])
    store = ConfigStore.instance()
    monkeypatch.setattr(store, "repo", {**store.repo})
    (tmp_path / "theirs.yaml").write_text("defaults: [{core: gru}, _self_]\nsteps: 2\n")
    for group, name in (("core", "gru"), ("experiment", "ours")):
        store.store(group=group, name=name, node={"their": "own"})
    done = []

    @hydra.main(version_base="1.3", config_path=str(tmp_path), config_name="theirs")
    def program(config):
        around, there = GlobalHydra.instance().hydra, HydraConfig.get().runtime.output_dir
        with pytest.raises(UserError, match="did you mean 'rules'"):
            worldmodels.train("experiment=adding", core="rulez")
        run = worldmodels.train(
            "experiment=adding", {"trainer.steps": config.steps}, size="smoke", core="gru", seed=3, run="it's, a: run"
        )
        assert GlobalHydra.instance().hydra is around and HydraConfig.get().runtime.output_dir == there
        assert store.repo["core"].keys() == {"gru.yaml"} and store.repo["core"]["gru.yaml"].node == config_of_theirs
        assert store.repo["experiment"].keys() == {"ours.yaml"}
        done.append(run)

    config_of_theirs = store.repo["core"]["gru.yaml"].node
    program()
    (run,) = done
    assert run.path == tmp_path / "it's, a: run" and type(run.model.core).__name__ == "GRU"
    assert run.config["trainer"]["steps"] == 2 and run.config["seed"] == 3
    assert type(worldmodels.load(run.path)) is type(run)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[0].startswith("worldmodels: step 2 of 2: loss ")
    assert lines[1].startswith("worldmodels: trained (loss ") and lines[1].endswith(str(run.path))


def test_agents_are_trained_with_the_same_words(monkeypatch):
    said = []
    monkeypatch.setattr(worldmodels.agents.run, "train_agent_command", lambda words, after: said.append(words) or [])
    worldmodels.agents.train("experiment=memory", {"ppo.n_steps": 8}, core="gru", env={"kwargs": {"delay": 1}})
    assert said == [["experiment=memory", "ppo.n_steps=8", "core='gru'", "++env.kwargs={delay:1}"]]


def test_lines_where_no_bar_is_drawn(tmp_path, monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr(logging.time, "monotonic", lambda: now)

    def said(**options):
        nonlocal now
        log = RunLog(tmp_path, 0, 40, **options)
        for step in range(1, 41):
            now += 1.0
            log.write(step, {"wm/loss": 0.5, "time/transitions_per_second": 2000.0})
            log.write(step, {"eval/h@1": 0.5})
        log.close()
        return [line.partition(":")[2] for line in capsys.readouterr().err.splitlines()]

    note = "loss 0.5, 2,000 transitions/s"
    assert said() == [f" step {step} of 40: {note}" for step in (1, 11, 21, 31, 40)]
    assert said(quiet=True) == []
    monkeypatch.setattr(logging, "parent_process", lambda: "the sweep's")
    assert said() == []


def test_importing_the_package_is_light():
    code = "import sys, worldmodels; print({'torch', 'hydra', 'stable_baselines3'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
