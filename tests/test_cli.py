import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hydra.utils import get_class

import worldmodels
from worldmodels import checkpoints
from worldmodels.cli import main
from worldmodels.cores import CORES
from worldmodels.data.episodes import Episodes
from worldmodels.run import read_config

SMOKE = ["experiment=block_physics", "size=smoke", "logger.figures=false", "trainer.threads=1"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with one smoke run in it."""
    folder = tmp_path_factory.mktemp("home")
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert main(["train", *SMOKE, "core=snps", "core.num_stages=2", "run=runs/a", "logger.figures=true"]) == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def at_home(home, monkeypatch):
    monkeypatch.chdir(home)
    return home


def refused(capsys, *words):
    """The one line a user's mistake gets."""
    code = main(list(words))
    captured = capsys.readouterr()
    assert code == 2, captured.out + captured.err
    assert (
        captured.err.startswith("worldmodels: ") and captured.err.count("\n") == 1 and "Traceback" not in captured.err
    )
    return captured.err


REMEMBERING = [name for name, entry in CORES.items() if get_class(entry["_target_"]).capabilities.memory]


@pytest.mark.parametrize("name", CORES)
def test_every_core_but_esbn_is_a_transition(name, at_home, capsys):
    """With its memory carried where it has one, else as it is."""
    words = ["train", *SMOKE, f"core={name}", f"run=runs/core-{name}"]
    if name == "esbn":
        assert "does not depend on what is in the slots" in refused(capsys, *words)
        return
    memory = "carry" if name in REMEMBERING else "none"
    if memory == "none":
        assert "needs a core with a state" in refused(capsys, *words, "memory=carry", "trainer.window=4")
    assert main([*words, f"memory={memory}", "trainer.window=4"]) == 0
    evaluation = json.loads((at_home / "runs" / f"core-{name}" / "evaluation.json").read_text())
    assert evaluation["memory"] == memory and 0 < evaluation["core_parameters"] < evaluation["parameters"]
    assert evaluation["burn_in"] == (5 if memory == "carry" else 0)
    assert main(["rollout", f"run=runs/core-{name}"]) == 0
    drawn = (at_home / "runs" / f"core-{name}" / "figures" / "choices.png").exists()
    assert drawn == (name not in ("gnn", "cin", "mlp", "lstm", "gru"))


def test_a_core_of_more_slots_than_the_encoder(at_home):
    assert main(["train", *SMOKE, "core=scoff", "core.num_slots=7", "run=runs/seven"]) == 0
    assert worldmodels.load("runs/seven").model.readout.aligned is False


def test_train_writes_a_run_folder(at_home):
    run = at_home / "runs" / "a"
    names = {path.name for path in run.iterdir()}
    assert names >= {"config.yaml", "checkpoints", "metrics.jsonl", "figures", "evaluation.json"}
    assert any(name.startswith("events.out.tfevents") for name in names)
    figures = {path.name for path in (run / "figures").iterdir()}
    assert figures == {"rollout.png", "horizons.png", "curves.png", "choices.png"}
    assert all(path.stat().st_size > 5000 for path in (run / "figures").iterdir())
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert set(evaluation["all"]) == set(evaluation["in_episode"]) == {"1", "5", "10"}
    assert set(evaluation["all"]["10"]) >= {"h@1", "mrr", "copy_h@1", "copy_mrr", "ci95"}
    assert evaluation["effective_rank"] > 0 and evaluation["memory"] == "none"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6] and "wm/loss_pos" in lines[0]


def test_tensorboard_events_hold_the_same_numbers(at_home):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(at_home / "runs" / "a"))
    events.Reload()
    written = [json.loads(line) for line in (at_home / "runs/a/metrics.jsonl").read_text().splitlines()]
    scalars = events.Scalars("wm/loss")
    assert [e.step for e in scalars] == [2, 4, 6]
    assert [e.value for e in scalars] == pytest.approx([line["wm/loss"] for line in written])


def test_evaluate_repeats_what_train_scored(at_home, capsys):
    before = json.loads((at_home / "runs/a/evaluation.json").read_text())
    (at_home / "runs/a/evaluation.json").unlink()
    assert main(["evaluate", "run=runs/a"]) == 0
    assert json.loads((at_home / "runs/a/evaluation.json").read_text()) == before
    out = capsys.readouterr().out
    assert "in-episode" in out and "latent copy" in out


def test_rollout_and_compare(at_home, capsys):
    assert main(["rollout", "run=runs/a", "episode=3"]) == 0
    assert "rollout.png" in capsys.readouterr().out
    assert main(["compare", "runs=[runs/a,runs/a]"]) == 0
    assert "episode 99" in refused(capsys, "rollout", "run=runs/a", "episode=99")


def test_runs_on_other_test_data_are_compared_with_a_word(at_home, capsys):
    for number, seed in (("0", 3), ("1", 4)):
        words = ["experiment=shapes", "core=gnn", "size=smoke", f"data.test.seed={seed}", "logger.figures=false"]
        assert main(["train", *words, f"run=runs/tested-{number}"]) == 0
    capsys.readouterr()
    assert main(["compare", "runs=[runs/tested-0,runs/tested-1]"]) == 0
    line = "worldmodels: other test data than those of runs/tested-0: runs/tested-1\n"
    assert capsys.readouterr().err == line


def test_python_interface(at_home):
    run = worldmodels.load("runs/a")
    result = run.evaluate()
    assert result["all"]["1"]["n"] == 64
    frames = Episodes.load(next(Path("data").glob("*test*"))).arrays["observations"]
    one = run.rollout(frames[0], torch.tensor([3, 4, 5]))
    many = run.rollout(frames[:2].numpy(), torch.tensor([[3, 0], [4, 0], [5, 0]]))
    assert one.shape == (3, 5, 4) and many.shape == (3, 2, 5, 4) and torch.allclose(many[:, 0], one, atol=1e-6)
    assert torch.equal(run.model.encode(frames[0]), run.model.encode(frames[:1])[0])
    for actions in ([], [25], [-1], [[[1]]]):
        with pytest.raises(worldmodels.UserError, match="actions"):
            run.rollout(frames[0], actions)
    with pytest.raises(worldmodels.UserError, match="2 observations"):
        run.rollout(frames[:2], torch.tensor([1, 2, 3]))


def test_a_sweep_trains_every_choice(at_home):
    words = [*SMOKE, "core=gnn", "core.hidden_size=16", "-m", "seed=0,1", "run=runs/sweep", "jobs=1"]
    assert main(["train", *words]) == 0
    for job, seed in (("0", 0), ("1", 1)):
        assert worldmodels.load(f"runs/sweep/{job}").config["seed"] == seed


def test_a_sweep_scores_what_succeeds_and_reports_what_fails(at_home, capsys):
    words = [*SMOKE, "core=gnn", "-m", "core.slot_size=null,8", "run=runs/half", "logger.progress=false"]
    assert "leave core.num_slots and core.slot_size out" in refused(capsys, "train", *words)
    assert (at_home / "runs/half/0/evaluation.json").is_file()


def test_two_runs_never_share_a_folder(at_home):
    from worldmodels.run import training_in

    path = at_home / "runs/claimed"
    with (
        training_in(path, {"a": 1}),
        pytest.raises(worldmodels.UserError, match="another process is training"),
        training_in(path, {"a": 2}),
    ):
        pass
    with pytest.raises(worldmodels.UserError, match="taken by another run"), training_in(path, {"a": 2}):
        pass
    assert (path / "config.yaml").read_text() == "a: 1\n"


@pytest.mark.parametrize("came", [None, "metrics.jsonl", "checkpoints/step_000000000001/meta.json"])
def test_what_fails_before_anything_came_of_it_gives_its_folder_back(tmp_path, came):
    from worldmodels.run import training_in

    (tmp_path / "mine.txt").write_text("was there before")
    with pytest.raises(ZeroDivisionError), training_in(tmp_path, {"a": 1}):
        (tmp_path / "metrics.jsonl").write_text("")
        if came:
            (tmp_path / came).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / came).write_text('{"step": 1}\n')
        1 / 0  # noqa: B018
    assert (tmp_path / "config.yaml").exists() == (came is not None) and (tmp_path / "mine.txt").is_file()
    with pytest.raises(KeyboardInterrupt), training_in(tmp_path / "stopped", {"a": 1}):
        raise KeyboardInterrupt
    assert (tmp_path / "stopped/config.yaml").is_file()


def test_seeds_reproduce_a_run(at_home):
    for name in ("b", "c"):
        assert main(["train", *SMOKE, "core=snps", "core.num_stages=2", f"run=runs/{name}"]) == 0
    a, b, c = (worldmodels.load(f"runs/{name}").model.state_dict() for name in "abc")
    assert all(torch.equal(a[key], b[key]) and torch.equal(b[key], c[key]) for key in a)


@pytest.mark.parametrize("core", ["gnn", "snps", "pnps", "gru", "mlp"])
def test_every_core_trains(at_home, core):
    assert main(["train", *SMOKE, f"core={core}", f"run=runs/core_{core}", "trainer.steps=2"]) == 0


def test_memory_can_be_carried(at_home):
    words = [*SMOKE, "core=gru", "memory=carry", "trainer.window=4", "run=runs/carry", "logger.figures=true"]
    assert main(["train", *words]) == 0
    evaluation = json.loads((at_home / "runs/carry/evaluation.json").read_text())
    assert (evaluation["memory"], evaluation["burn_in"]) == ("carry", 5)


@pytest.mark.parametrize(
    ("env_id", "more"),
    [
        ("CartPole-v1", ["encoder=vector"]),
        ("MiniGrid-Empty-5x5-v0", ["env.resize=[50,50]"]),
        ("Pendulum-v1", ["encoder=vector", "core=gru"]),
        ("FrozenLake-v1", ["encoder=vector"]),
    ],
)
def test_any_gymnasium_environment_trains(at_home, env_id, more):
    words = [f"env.id={env_id}", "size=smoke", f"run=runs/{env_id}", *more, "evaluation.horizons=[1,5]"]
    assert main(["train", *words]) == 0
    assert (at_home / f"runs/{env_id}/figures/rollout.png").is_file()


# What a user gets wrong.


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["trian"], "did you mean 'train'"),
        (["train", *SMOKE, "core=snsp"], "did you mean 'snps'"),
        (["train", *SMOKE, "core=gnn", "core.hiden_size=3"], "did you mean 'hidden_size'"),
        (["train", *SMOKE, "trainer.stepz=3"], "did you mean 'steps'"),
        (["train", *SMOKE, "sead=3"], "did you mean 'seed'"),
        (["train", *SMOKE, "+foo=3"], "leave out the '+'"),
        (["train", *SMOKE, "trainer.steps=many"], "many"),
        (["train", "experiment=blocks_physics"], "did you mean 'block_physics'"),
        (["train", "size=smoke"], "env.id="),
        (["train", "size=smoke", "env.id=CartPol-v1"], "did you mean 'CartPole-v1'"),
        (["train", "size=smoke", "env.id=CartPole-v1", "run=runs/x1"], "takes pictures"),
        (["train", *SMOKE, "encoder=vector", "run=runs/x2"], "use encoder=cswm"),
        (["train", *SMOKE, "encoder.num_slots=4", "run=runs/x3"], "set encoder.num_slots=5"),
        (["train", *SMOKE, "core=custom", "core._target_=no.such.Core", "run=runs/x4"], "cannot be imported"),
        (
            ["train", *SMOKE, "core._target_=worldmodels.cores.mlp.MLP", "run=runs/x5"],
            "does not take core.edge_actions",
        ),
        (["train", *SMOKE, "core=mlp", "memory=carry", "trainer.window=4", "run=runs/x6"], "needs a core with a state"),
        (
            ["train", *SMOKE, "core=gnn", "core.slot_size=8", "run=runs/y1"],
            "leave core.num_slots and core.slot_size out",
        ),
        (
            ["train", *SMOKE, "core=scoff", "core.num_slots=0", "run=runs/y9"],
            "core.num_slots=0; expected a whole number",
        ),
        (["train", *SMOKE, "core=gru", "memory=carry", "run=runs/y2"], "trainer.window=4"),
        (["train", *SMOKE, "evaluation.horizons=[1,50]", "run=runs/y3"], "0 of 64 test episodes reach the 50 steps"),
        (["train", *SMOKE, "evaluation.horizons=[]", "run=runs/y4"], "give some numbers of steps"),
        (["train", *SMOKE, "trainer.accelerator=tpu", "run=runs/y5"], "use auto or cpu"),
        (["train", *SMOKE, "trainer.precision=foo", "run=runs/y6"], "bf16-mixed"),
        (["train", *SMOKE, "trainer.checkpoint_every=0", "run=runs/y7"], "at least 1"),
        (["train", *SMOKE, "objective.sigma=0", "run=runs/y8"], "above 0"),
        (["train", *SMOKE, "env.kwargs.color=1"], "+env.kwargs.color="),
        (["train", "seed=1", "resume=runs/a"], "leave out 'seed=1'"),
        (["train", *SMOKE, "run=runs/a/config.yaml"], "choose a path"),
        (["rollout", "run=runs/a", "episode=-1"], "numbered from 0"),
        (["evaluate", "run=[a"], "run"),
        (["train", *SMOKE, "objective.negatives=hard", "run=runs/x7"], "expected one of"),
        (["train", *SMOKE, "env.kwargs.mode=seen", "run=runs/x8"], "mode is 'seen'"),
        (["train", *SMOKE, "data.train.path=nothing", "run=runs/x9"], "no data at nothing"),
        (["train", *SMOKE, "core=gnn", "run=runs/a"], "holds a run already"),
        (["train", "resume=nothing"], "no run at nothing"),
        (["train", "resume=runs/a", "seed=1"], "leave out 'seed=1'"),
        (["evaluate", "run=nothing"], "no run at nothing"),
        (["evaluate"], "run= is missing"),
        (["evaluate", "rum=x"], "did you mean 'run'"),
        (["evaluate", "runs/a"], "expected key=value"),
        (["evaluate", "run=runs/a", "data=nothing"], "no data at nothing"),
        (["collect", "env=CartPole-v1", "path=runs"], "exists already"),
        (["collect", "env=CartPole-v1", "path=x", "policy=nothing:here"], "write module:name"),
        (["collect", "env=CartPole-v1", "path=x", "episodes=few"], "few"),
        (["compare", "runs=[nothing]"], "evaluate run=nothing"),
        (["check"], "give one thing"),
        (["check", "core=nothing:Here"], "cannot be imported"),
        (["check", "core=gn"], "unknown core 'gn'; did you mean 'gnn'?"),
    ],
)
def test_mistakes_get_one_line(at_home, capsys, words, says):
    assert says in refused(capsys, *words)


def test_debug_shows_the_traceback(at_home):
    with pytest.raises(worldmodels.UserError):
        main(["evaluate", "run=nothing", "--debug"])


def test_damaged_run_folders(at_home, capsys, tmp_path):
    import shutil

    shutil.copytree("runs/a", tmp_path / "a")
    run = tmp_path / "a"
    weights = checkpoints.latest(run) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:50])
    assert "does not match its checksum" in refused(capsys, "evaluate", f"run={run}")
    (run / "config.yaml").write_text("a: [")
    assert "not the config of a run" in refused(capsys, "evaluate", f"run={run}")
    text = (at_home / "runs/a/config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("batch_size: 32", "batch_size: many"))
    assert "many" in refused(capsys, "train", f"resume={run}")
    (run / "config.yaml").write_text(text.replace("batch_size: 32", "batchsize: 32"))
    assert "batchsize" in refused(capsys, "train", f"resume={run}")
    (run / "config.yaml").write_text("")
    assert "not the config of a run" in refused(capsys, "train", f"resume={run}")
    (run / "config.yaml").write_text("a: 1")
    assert "not the config of a run" in refused(capsys, "evaluate", f"run={run}")


def test_checks_know_the_names_of_cores(at_home, capsys):
    for name in ("gnn", "scoff_pp"):
        assert main(["check", f"core={name}"]) == 0
    assert "core=scoff_pp: all checks passed" in capsys.readouterr().out
    assert main(["check", "--help"]) == 0 and "core=NAME" in capsys.readouterr().out


def test_one_run_can_be_compared_without_brackets(at_home, capsys):
    assert main(["evaluate", "run=runs/a"]) == 0 and main(["compare", "runs=runs/a"]) == 0
    assert "runs/a" in capsys.readouterr().out


def test_a_core_without_a_docstring_is_listed(capsys, monkeypatch):
    class Bare:
        pass

    monkeypatch.setitem(CORES, "bare", {"_target_": "bare.Bare"})
    monkeypatch.setitem(sys.modules, "bare", type(sys)("bare"))
    sys.modules["bare"].Bare = Bare
    assert main(["cores"]) == 0 and "bare" in capsys.readouterr().out


def test_a_missing_extra_names_its_pip_command(at_home, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    line = refused(capsys, "import-cswm", "file=x.h5", "path=x", "action_size=20")
    assert "run pip install '.[data]' in the checkout" in line


def run_in_shell(words, folder, **options):
    command = [sys.executable, "-P", "-m", "worldmodels", *words]
    return subprocess.Popen(
        command,
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        **options,
    )


def test_a_full_disk_and_a_control_c_lose_nothing(home, tmp_path):
    """Two real processes: one may write no file above 120 kB, one is interrupted; both resume to the same weights."""
    long = [
        "train",
        *SMOKE,
        "logger.progress=false",
        "core=gnn",
        "core.hidden_size=64",
        f"data.dir={home}/data",
        "trainer.steps=60",
        "trainer.checkpoint_every=5",
    ]
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (120_000, resource.RLIM_INFINITY))  # noqa: E731
    full = run_in_shell([*long, f"run={tmp_path}/full"], tmp_path, preexec_fn=limit)
    _, err = full.communicate(timeout=120)
    assert full.returncode == 2 and err.count("\n") == 1 and "make room" in err, err
    slow = [word.replace("trainer.steps=60", "trainer.steps=100000") for word in long]
    # A shell starts background jobs with interrupts ignored, and children inherit that: the tests may be such a job.
    listen = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    stopped = run_in_shell([*slow, f"run={tmp_path}/stopped"], tmp_path, preexec_fn=listen)
    deadline = time.time() + 100
    while checkpoints.latest(tmp_path / "stopped") is None and time.time() < deadline:
        time.sleep(0.05)
    stopped.send_signal(signal.SIGINT)
    _, err = stopped.communicate(timeout=60)
    assert stopped.returncode == 2 and "interrupted; what was saved is whole" in err and err.count("\n") == 1, err
    config = tmp_path / "stopped" / "config.yaml"
    config.write_text(config.read_text().replace("steps: 100000", "steps: 60"))
    if int(checkpoints.latest(tmp_path / "stopped").name.split("_")[1]) > 60:
        pytest.skip("the machine was faster than the interruption")
    for words in ([f"resume={tmp_path}/full"], [f"resume={tmp_path}/stopped"], [*long[1:], f"run={tmp_path}/whole"]):
        assert main(["train", *words]) == 0
    states = [worldmodels.load(tmp_path / name).model.state_dict() for name in ("full", "stopped", "whole")]
    assert all(torch.equal(a, b) and torch.equal(b, c) for a, b, c in zip(*(s.values() for s in states), strict=True))


def test_help_and_lists(capsys):
    for words in ([], ["--help"], ["collect", "--help"], ["envs"], ["cores"], ["--version"]):
        try:
            assert main(words) == 0
        except SystemExit as stop:
            assert stop.code == 0
        assert capsys.readouterr().out.strip()
    main(["cores"])
    out = capsys.readouterr().out
    assert all(name in out for name in ("gnn", "snps", "pnps", "gru", "mlp"))


def test_check_passes_ours(capsys):
    for what in ("worldmodels/BlockPhysics-v0", "CartPole-v1", "core=worldmodels.cores.gnn:GNN"):
        assert main(["check", what]) == 0
        assert "all checks passed" in capsys.readouterr().out


def test_a_run_goes_on_after_its_end(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["experiment=adding", "core=gru", "size=smoke", "run=a", "logger.progress=false", "logger.figures=false"]
    assert main(["train", *words, "trainer.steps=4"]) == 0
    for steps in ("4", "3", "many"):
        capsys.readouterr()
        assert "has done 4 steps" in refused(capsys, "train", "resume=a", f"trainer.steps={steps}")
    assert main(["train", "resume=a", "trainer.steps=7"]) == 0
    assert json.loads((tmp_path / "a" / "evaluation.json").read_text())["step"] == 7
    assert read_config(tmp_path / "a")["trainer"]["steps"] == 7
    assert main(["train", "resume=a"]) == 0


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("size=null", "these words make no config"),
        ("experiment=[null]", "these words make no config"),
        ("trainer.steps=" + "[" * 500 + "]" * 500, "these words make no config"),
        ("objective.negatives=[1,abc]", "negatives is [1, 'abc']"),
        ("objective.hinge_on=abc", "hinge_on is 'abc'"),
        ("core._target_=0.5", "core._target_ is 0.5"),
        ("encoder._target_=[0,0]", "encoder._target_ is [0, 0]"),
        ("encoder=slot_attention encoder.stride=0", "encoder.stride=0; expected a whole number of at least 1"),
        ("env.resize=[4,4]", "pictures are 4x4; the small encoder needs at least 10x10"),
        ("encoder.num_slots=0", "encoder.num_slots=0; expected a whole number of at least 1"),
        ("core._target_=nothere.Core", "cannot be imported"),
    ],
)
def test_words_that_make_no_config(tmp_path, monkeypatch, capfd, word, says):
    monkeypatch.chdir(tmp_path)
    assert says in refused(capfd, "train", *SMOKE, "run=a", *word.split(" "))
    assert not (tmp_path / "a").exists()
