"""Sweeps: runs side by side in processes of their own, what they share, and what becomes of those that fail."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

import worldmodels
from worldmodels import checkpoints, launcher
from worldmodels.cli import main
from worldmodels.config import TrainConfig, plain
from worldmodels.data import collect as collecting
from worldmodels.data import episodes
from worldmodels.errors import UserError
from worldmodels.logging import note, read_metrics
from worldmodels.run import collect_data

SMOKE = ["experiment=block_physics", "size=smoke", "logger.figures=false", "core=gnn", "core.hidden_size=16"]

# What processes run must be importable there: a module in the user's folder.
MINE = """
import os, signal, sys, time
from pathlib import Path
from hydra.core.hydra_config import HydraConfig
from worldmodels import launch
from worldmodels.config import register
from worldmodels.errors import UserError

KINDS = ["good", "refuse", "odd", "kill", "no data", "wait"]

class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(one)

def run(config, path, resume):
    print("hello from", path.name)
    print("a warning", file=sys.stderr)
    path.mkdir(parents=True, exist_ok=True)
    (path / "metrics.jsonl").write_text('{"step": 4, "wm/loss": 0.25, "time/frames_per_second": 1500.0}\\n{"step": 5, "wm')
    kind = KINDS[config["seed"]]
    if kind == "refuse":
        raise UserError("this cannot be")
    if kind == "odd":
        raise Odd(1, 2)
    if kind == "wait":
        time.sleep(1000)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    (path / "evaluation.json").write_text("{}")
    return config

def score(config):
    print("scored", config["seed"])
    return -config["trainer"]["learning_rate"] * config["core"]["hidden_size"]

def job(config):
    return launch.train_job(config, run=run, read=dict, score=score)

def where(config):
    import ray
    folder = Path(HydraConfig.get().sweep.dir)
    (folder / f"node-{config.seed}").write_text(ray.get_runtime_context().get_node_id())
    return launch.train_one(config)

def sweep(*words, job=job, load=str):
    words = ["-m", "experiment=block_physics", "size=smoke", "core=gnn", "trainer.steps=8", *words]
    return launch.command(words, None, program="train", prepare=register, run=run, job=job, read=dict, load=load)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder, and a function that works in it and tells what was printed and what was collected."""
    folder = tmp_path_factory.mktemp("sweeps")
    (folder / "mine.py").write_text(MINE)
    return folder


@pytest.fixture
def at_home(home, monkeypatch):
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(str(home))
    return home


@pytest.fixture
def collections(monkeypatch):
    """The paths of data sets that this process collects."""
    collected, real = [], collecting.collect

    def counting(*args, **kwargs):
        collected.append(kwargs["path"])
        return real(*args, **kwargs)

    monkeypatch.setattr(collecting, "collect", counting)
    return collected


def test_side_by_side_is_one_after_another(at_home, capfd, collections):
    """Bit for bit, with data collected once; what each run prints is in one piece, and no process hashes what one has."""
    words = ["train", *SMOKE, "trainer.threads=1", "-m", "seed=0,1"]
    assert main([*words, "run=runs/two", "jobs=2"]) == 0
    out, err = capfd.readouterr()
    assert sorted(path.name.split("-")[3] for path in collections) == ["test", "train"]
    pieces = out.split("run: ")
    assert len(pieces) == 3 and all(piece.count("its latent copy") == 2 for piece in pieces[:2])
    assert out.splitlines()[-1].endswith(f"worldmodels report {at_home}/runs/two --compare core")
    told = [f"seed={s}: {what}" for s in (0, 1) for what in (f"training in {at_home}/runs/two/{s}", "done in ")]
    assert err.count("\n") == 4 and all(f"worldmodels: {line}" in err for line in told)
    assert main([*words, "run=runs/one", "jobs=1", "logger.progress=false"]) == 0
    assert len(collections) == 2
    for seed in ("0", "1"):
        two, one = (worldmodels.load(f"runs/{name}/{seed}") for name in ("two", "one"))
        assert two.config["seed"] == one.config["seed"] == int(seed)
        weights = zip(two.model.state_dict().values(), one.model.state_dict().values(), strict=True)
        assert all(torch.equal(a, b) for a, b in weights)
        scores = [json.loads((run.path / "evaluation.json").read_text()) for run in (one, two)]
        assert scores[0] == scores[1]
        assert "jobs" not in (two.path / "config.yaml").read_text()


def test_a_stopped_sweep_goes_on_by_its_own_command(at_home, capsys):
    words = ["train", *SMOKE, "-m", "seed=0,1", "run=runs/again", "jobs=1", "logger.progress=false"]
    assert main([*words, "trainer.threads=1"]) == 0
    paths = [at_home / "runs/again" / seed for seed in "01"]
    before = [worldmodels.load(path).model.state_dict() for path in paths]
    shutil.rmtree(checkpoints.latest(paths[1]))  # as if it had been killed at the checkpoint before
    assert checkpoints.step_of(checkpoints.latest(paths[1])) == 3
    assert main(words) == 0  # with another share of the cores
    for path, weights in zip(paths, before, strict=True):
        run = worldmodels.load(path)
        assert all(torch.equal(a, b) for a, b in zip(run.model.state_dict().values(), weights.values(), strict=True))
        assert run.config["trainer"]["threads"] == 1
        assert json.loads((path / "evaluation.json").read_text())["step"] == 6
    capsys.readouterr()
    assert main([*words, "trainer.steps=8"]) == 2  # that is another sweep
    assert "holds a run already" in capsys.readouterr().err


def test_the_data_of_a_task_are_recorded_once(at_home, collections):
    size = {"train_episodes": 2, "test_episodes": 2, "steps": 4, "window": 2, "prompt": 1, "imagined": 1}
    task = {"env_id": "worldmodels/BouncingBalls-v0", "env_kwargs": {"observation": "state"}, **size}
    task["_target_"] = "worldmodels.tasks.views.PartialViews"
    config = plain(OmegaConf.structured(TrainConfig)) | {"task": task}
    for _ in range(2):
        collect_data(config)
    assert [path.name.split("-")[3] for path in collections] == ["train", "test"]


def test_agents_side_by_side(at_home, capfd):
    words = ["size=smoke", "experiment=memory", "core=gru", "logger.figures=false", "logger.progress=false"]
    assert main(["train-agent", *words, "-m", "seed=0,1", "run=runs/agents", "jobs=2"]) == 0
    out, err = capfd.readouterr()
    assert out.count("run: ") == 2 and err == ""
    threads = max(1, launcher.cores() // 2)  # an equal share, where none were asked for
    for seed in (0, 1):
        run = worldmodels.agents.load(f"runs/agents/{seed}")
        assert (run.config["seed"], run.config["trainer"]["threads"]) == (seed, threads)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_what_fails_does_not_stop_the_others(at_home, capfd, monkeypatch):
    """A refusal, an error that cannot be sent, a process killed, data that cannot be had: each is told, each is its own."""
    import mine

    def collect(config):
        if mine.KINDS[config["seed"]] == "no data":
            raise UserError("no data at nothing")

    screen = Terminal()
    monkeypatch.setattr(launcher, "collect_data", collect)
    monkeypatch.setattr(sys, "stderr", screen)
    with pytest.raises(UserError, match="this cannot be") as refused:
        mine.sweep("seed=range(5)", "jobs=2", "run=fake")
    assert "mine.py" in refused.value.__notes__[0]
    with pytest.raises(RuntimeError, match="Odd: 1") as odd:
        mine.sweep("seed=2,0", "jobs=2", "run=odd")
    assert "mine.py" in odd.value.__notes__[0]
    monkeypatch.undo()
    assert not (at_home / "fake/4").exists()
    out, _ = capfd.readouterr()
    assert "hello from 0\nscored 0\n" in out and "hello from 1\n" in out
    shown = screen.getvalue()
    assert "a warning" in shown and "Error executing" not in shown
    for told in (
        "seed=1: failed: this cannot be",
        "seed=2: failed: RuntimeError('Odd: 1')",
        "seed=3: failed: seed=3: its process ended by signal 9 (SIGKILL)",
        "the same command goes on with it",
        "seed=4: failed: no data at nothing",
    ):
        assert told in shown
    rows = {line.split()[0]: line for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).splitlines() if "/8" in line}
    assert "4/8" in rows["seed=0"] and "done" in rows["seed=0"]
    assert all("failed" in rows[f"seed={seed}"] for seed in (1, 3))


def test_how_far_a_run_is_is_read_off_its_last_lines(tmp_path):
    line = {"wm/loss": 0.25, "time/transitions_per_second": 1500.0}
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1000):
            file.write(json.dumps({"step": step, **line}) + "\n")
        file.write('{"step": 1000, "wm/lo')
    assert len(read_metrics(tmp_path)) == 1000
    tail = read_metrics(tmp_path, last=500)
    assert 2 < len(tail) < 10 and tail[-1] == {"step": 999, **line}
    assert read_metrics(tmp_path, last=10) == [] and read_metrics(tmp_path / "nothing", last=500) == []
    assert note(tail[-1]) == "loss 0.25, 1,500 transitions/s" and note({"wm/hits@1/h1": 0.5}) is None


def test_labels_say_what_differs():
    jobs = [["size=smoke", "core=snps", "seed=0"], ["size=smoke", "core=snps", "seed=1"]]
    assert launcher.labels(jobs) == ["seed=0", "seed=1"]
    assert launcher.labels([*jobs, ["size=smoke", "core=gnn", "seed=0"]])[2] == "core=gnn,seed=0"
    assert launcher.labels([["seed=0"]]) == ["0"]


def test_how_many_at_once(monkeypatch):
    monkeypatch.setattr(launcher, "cores", lambda: 8)
    assert [launcher.side_by_side(None, [t] * 20) for t in (0, 1, 3, 16)] == [8, 8, 2, 1]
    assert launcher.side_by_side(None, [0] * 3) == 3
    assert (launcher.side_by_side(5, [4] * 20), launcher.side_by_side(5, [4] * 2)) == (5, 2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launcher.side_by_side(4, [1] * 20) == 1


def test_a_checksum_is_compared_once_while_a_file_stays_as_it_is(block_episodes, tmp_path, monkeypatch):
    block_episodes.save(tmp_path / "data")
    hashed, real = [], episodes.hashlib.file_digest

    def counting(stream, name):
        hashed.append(stream.name)
        return real(stream, name)

    monkeypatch.setattr(episodes.hashlib, "file_digest", counting)
    for _ in range(2):
        episodes.Episodes.load(tmp_path / "data")
    files = list((tmp_path / "data").glob("*.bin"))
    assert len(hashed) == len(files)
    data = bytearray(files[0].read_bytes())
    data[0] ^= 1
    time.sleep(0.02)
    files[0].write_bytes(data)
    with pytest.raises(UserError, match="does not match its checksum"):
        episodes.Episodes.load(tmp_path / "data")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["jobs=0"], "jobs=0; expected"),
        (["jobs=0", "-m", "seed=0,1"], "jobs=0; expected"),
        (["jobs=many", "-m", "seed=0,1"], "many"),
        (["-m", "seed=0,x"], "override seed=x"),
        (["-m", "core.hiden_size=1,2"], "did you mean 'hidden_size'"),
        (["-m", "seed=0,1", "hydra/launcher=side_by_sid"], "did you mean 'side_by_side'"),
        (["-m", "seed=0,1", "hydra/sweeper=tune", "hydra.sweeper.n_trials=0"], "n_trials=0 and n_jobs=2; expected"),
        (["-m", "seed=0,1", "hydra/sweeper=tune", "hydra.sweeper.sampler=TPESampl"], "did you mean 'TPESampler'"),
        (["-m", "hydra/sweeper=tune"], "has nothing to search"),
        (
            ["-m", "seed=tag(log,range(0,9))", "hydra/sweeper=tune", "hydra.sweeper.direction=up"],
            "direction=up; expected",
        ),
        (["-m", "trainer.learning_rate=tag(log,interval(0,1))", "hydra/sweeper=tune"], "tag(log,interval(0,1)):"),
    ],
)
def test_mistakes_get_one_line_before_anything_is_trained(at_home, capsys, words, says):
    if "hydra/sweeper=tune" in words:
        pytest.importorskip("optuna", reason="needs the extra 'tune'")
    assert main(["train", *SMOKE, "run=runs/wrong", *words]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1
    assert not list((at_home / "runs/wrong").rglob("config.yaml"))


def start(script, folder, **more):
    # A shell starts background jobs with interrupts ignored, and children inherit that: the tests may be such a job.
    listen = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    return subprocess.Popen(
        [sys.executable, "-P", str(script)],
        cwd=folder,
        text=True,
        stderr=subprocess.PIPE,
        preexec_fn=listen,
        env=os.environ | more,
    )


def children(pid, program=b"forkserver"):
    """Processes of a program that a process started."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and program in (path / "cmdline").read_bytes():
                found.append(int(path.name))
        except (OSError, ValueError):
            continue
    return found


def test_a_script_must_be_guarded(home):
    (home / "bare.py").write_text(
        "import worldmodels\n"
        f"worldmodels.train(*{SMOKE}, 'run=runs/bare', 'logger.progress=false', 'jobs=2', '-m', 'seed=0,1')\n"
    )
    bare = start(home / "bare.py", home)
    _, err = bare.communicate(timeout=300)
    last = err.splitlines()[-1]
    assert bare.returncode == 1 and "its process ended before it began" in last and "if __name__" in last, err
    assert err.count("Traceback") == 1


def ended(pid, within=60.0):
    """Whether a process ends in time; one that waits for its parent to look counts as ended."""
    deadline = time.time() + within
    while time.time() < deadline:
        try:
            if (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_control_c_ends_every_process_and_loses_nothing(home):
    (home / "guarded.py").write_text(
        "import sys\nfrom worldmodels.cli import main\nif __name__ == '__main__':\n    sys.exit(main(['train', "
        f"*{SMOKE}, 'run=runs/stopped', 'logger.progress=false', 'trainer.threads=1', 'trainer.steps=100000', "
        "'trainer.checkpoint_every=2', '-m', 'seed=0,1', 'jobs=2']))\n"
    )
    whole = start(home / "guarded.py", home)
    runs = [home / "runs/stopped" / seed for seed in "01"]
    deadline = time.time() + 300
    while any(checkpoints.latest(run) is None for run in runs) and time.time() < deadline and whole.poll() is None:
        time.sleep(0.05)
    started = [pid for server in children(whole.pid) for pid in children(server)]
    whole.send_signal(signal.SIGINT)
    _, err = whole.communicate(timeout=120)
    assert whole.returncode == 2 and "interrupted; what was saved is whole" in err and err.count("\n") == 1, err
    assert len(started) == 2 and all(ended(pid) for pid in started)
    assert all(worldmodels.load(run).config["seed"] == seed for seed, run in enumerate(runs))


def test_a_process_ends_with_the_one_that_started_it(home):
    """Killed, that one can say nothing to it."""
    (home / "killed.py").write_text(
        "import mine\nfrom worldmodels import launcher\nif __name__ == '__main__':\n"
        "    launcher.collect_data = dict\n"
        "    mine.sweep('seed=5,0', 'jobs=2', 'run=waiting', 'logger.progress=false')\n"
    )
    whole = start(home / "killed.py", home, PYTHONPATH=str(home))
    deadline = time.time() + 300
    while not (home / "waiting/0/metrics.jsonl").exists() and time.time() < deadline and whole.poll() is None:
        time.sleep(0.05)
    started = [pid for server in children(whole.pid) for pid in children(server)]
    whole.kill()
    whole.communicate(timeout=120)
    assert started and all(ended(pid) for pid in started)


# Other launchers, and the search.


@pytest.fixture(scope="module")
def reference(home):
    """Two runs trained one after another in this process, whose weights all others must have, and their data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert main(["train", *SMOKE, "trainer.threads=1", "-m", "seed=0,1", "run=runs/reference", "jobs=1"]) == 0
    return home / "runs/reference"


def same_weights(one, other, seeds="01"):
    pairs = [(worldmodels.load(one / seed), worldmodels.load(other / seed)) for seed in seeds]
    for a, b in pairs:
        weights = zip(a.model.state_dict().values(), b.model.state_dict().values(), strict=True)
        assert all(torch.equal(x, y) for x, y in weights)
        assert (a.path / "evaluation.json").read_bytes() == (b.path / "evaluation.json").read_bytes()


LAUNCHERS = {
    "joblib": ("hydra_plugins.hydra_joblib_launcher", "joblib", ["hydra.launcher.n_jobs=2"]),
    "submitit_local": ("hydra_plugins.hydra_submitit_launcher", "slurm", ["hydra.launcher.timeout_min=10"]),
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_other_launchers_train_the_same_runs(at_home, reference, capfd, name):
    module, extra, options = LAUNCHERS[name]
    pytest.importorskip(module, reason=f"needs the extra '{extra}'")
    words = ["train", *SMOKE, "trainer.threads=1", "-m", f"run=runs/{name}", f"hydra/launcher={name}", *options]
    assert main([*words, "seed=0,1"]) == 0
    assert capfd.readouterr().out.splitlines()[-1].endswith(f"runs/{name} --compare core")
    same_weights(reference, at_home / "runs" / name)
    assert main([*words, "seed=0,1", "core.slot_size=null,8"]) == 2  # another sweep in the same folder
    assert "holds a run already" in capfd.readouterr().err.splitlines()[-1]


def test_a_job_that_is_pre_empted_goes_on(at_home, reference):
    """Told to leave, as SLURM does, a job is queued again and ends with the weights of one that was not."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs the extra 'slurm'")
    steps = ["trainer.threads=1", "trainer.steps=300", "trainer.evaluate_every=0", "logger.progress=false", "seed=0"]
    words = ["train", *SMOKE, *steps, "-m", "trainer.checkpoint_every=10"]
    (at_home / "preempted.py").write_text(
        "import sys\nfrom worldmodels.cli import main\nif __name__ == '__main__':\n"
        f"    sys.exit(main([*{words}, 'run=runs/preempted', 'hydra/launcher=submitit_local']))\n"
    )
    whole = start(at_home / "preempted.py", at_home)
    run, deadline, told = at_home / "runs/preempted/0", time.time() + 300, []
    while not told and time.time() < deadline and whole.poll() is None:
        if checkpoints.latest(run) is not None:
            jobs = [int(p.name) for p in (at_home / "runs/preempted/.submitit").iterdir() if p.name.isdigit()]
            told = [pid for job in jobs for pid in children(job, b"submitit.core._submit")]
            for pid in told:
                os.kill(pid, signal.SIGUSR2)
        time.sleep(0.02)
    _, err = whole.communicate(timeout=300)
    assert whole.returncode == 0 and told, err
    logs = "".join(path.read_text() for path in run.parent.glob(".submitit/*/*_log.*"))
    assert "Requeued job" in logs, logs
    assert main([*words, "run=runs/left", "jobs=1"]) == 0
    same_weights(at_home / "runs/left", run.parent, seeds="0")


@pytest.fixture
def ray(tmp_path_factory, monkeypatch):
    """Ray with a folder and a token of its own."""
    ray = pytest.importorskip("ray", reason="needs the extra 'ray'")
    pytest.importorskip("hydra_plugins.hydra_ray_launcher", reason="needs the extra 'ray'")
    home = tmp_path_factory.getbasetemp() / "ray"
    home.mkdir(exist_ok=True)
    monkeypatch.setenv("HOME", str(home))
    yield ray
    ray.shutdown()


def test_ray_trains_the_same_runs(at_home, reference, ray, capfd):
    options = ["hydra/launcher=ray", "+hydra.launcher.ray.init.num_cpus=2", "+hydra.launcher.ray.remote.num_cpus=1"]
    words = ["train", *SMOKE, "trainer.threads=1", "-m", "seed=0,1", "run=runs/ray", *options]
    assert main([*words, "+hydra.launcher.ray.init.include_dashboard=false"]) == 0
    assert capfd.readouterr().out.splitlines()[-1].endswith("runs/ray --compare core")
    same_weights(reference, at_home / "runs/ray")


def test_ray_on_two_nodes(at_home, reference, ray, monkeypatch):
    """A cluster made in one machine: each node has room for one run, so that each trains one."""
    import mine
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", str(at_home))
    monkeypatch.chdir("/")  # where the nodes start
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    try:
        monkeypatch.chdir(at_home)
        options = ["hydra/launcher=ray", "+hydra.launcher.ray.remote.num_cpus=1"]
        init = "+hydra.launcher.ray.init"  # the launcher's own size of the store is refused by a cluster that is there
        options += [f"{init}.address='{cluster.address}'", f"{init}.object_store_memory=null"]
        words = [*SMOKE, "trainer.steps=6", "trainer.threads=1", "seed=0,1", "run=runs/nodes", *options]
        assert len(mine.sweep(*words, job=mine.where)) == 2
        assert len({(at_home / f"runs/nodes/node-{seed}").read_text() for seed in (0, 1)}) == 2
        same_weights(reference, at_home / "runs/nodes")
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_a_search_space_in_hydras_grammar():
    pytest.importorskip("optuna", reason="needs the extra 'tune'")
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    from worldmodels.tune import _distribution

    space = {
        "a=1,2": CategoricalDistribution(["1", "2"]),
        "a=null,'x y'": CategoricalDistribution(["null", "'x y'"]),
        "a=range(1,10,2)": IntDistribution(1, 9, step=2),
        "a=range(10,1,-3)": IntDistribution(4, 10, step=3),
        "a=range(0,1,0.25)": FloatDistribution(0.0, 0.75, step=0.25),
        "a=interval(0,1)": FloatDistribution(0.0, 1.0),
        "a=int(interval(1,9))": IntDistribution(1, 9),
        "a=tag(log,interval(1e-5,1e-2))": FloatDistribution(1e-5, 1e-2, log=True),
        "a=tag(log,int(interval(1,64)))": IntDistribution(1, 64, log=True),
    }
    for word, expected in space.items():
        assert _distribution(OverridesParser.create().parse_override(word)) == expected, word


SEARCH = [
    "trainer.learning_rate=tag(log,interval(1e-4,1e-2))",
    "core.hidden_size=16,32,64",
    "hydra/sweeper=tune",
    "hydra.sweeper.n_trials=14",
    "hydra.sweeper.seed=1",
    "jobs=1",
]


def study(folder):
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    storage = JournalStorage(JournalFileBackend(str(folder / "study.journal")))
    return optuna.load_study(study_name="worldmodels", storage=storage)


def test_a_search_that_was_stopped_goes_on(at_home, capsys, monkeypatch):
    """The same command trains what is left with the values it would have had, in the same folders."""
    pytest.importorskip("optuna", reason="needs the extra 'tune'")
    import mine
    import yaml

    mine.sweep(*SEARCH, "run=whole")
    whole = study(at_home / "whole").trials
    assert [trial.number for trial in whole] == list(range(14)) and len({str(t.params) for t in whole}) > 10
    real, launched = launcher.SideBySide.launch, []

    def stopped(self, jobs, first):
        if first == 12 and not launched:  # the first of a batch has ended, the second not
            launched.append(real(self, jobs[:1], first))
            raise KeyboardInterrupt
        return real(self, jobs, first)

    monkeypatch.setattr(launcher.SideBySide, "launch", stopped)
    with pytest.raises(KeyboardInterrupt):
        mine.sweep(*SEARCH, "run=stopped")
    assert [trial.state.name for trial in study(at_home / "stopped").trials[11:]] == ["COMPLETE", "RUNNING", "RUNNING"]
    assert len(mine.sweep(*SEARCH, "run=stopped")) == 2
    again = study(at_home / "stopped").trials
    assert [(t.params, t.value, t.state) for t in again] == [(t.params, t.value, t.state) for t in whole]
    best = yaml.safe_load((at_home / "stopped/optimization_results.yaml").read_text())
    assert best["best_value"] == max(trial.value for trial in whole) == study(at_home / "whole").best_value
    assert mine.sweep(*SEARCH, "run=stopped") == []  # there is nothing left
    assert f"best of 14: {best['best_value']:.4g} with" in capsys.readouterr().out.splitlines()[-1]
    with pytest.raises(UserError, match="holds another search"):
        mine.sweep(*SEARCH, "run=stopped", "data.num_envs=2")


def test_a_search_goes_on_past_trials_that_fail(at_home):
    pytest.importorskip("optuna", reason="needs the extra 'tune'")
    import mine

    options = ["hydra/sweeper=tune", "hydra.sweeper.sampler=RandomSampler", "hydra.sweeper.n_trials=6", "jobs=1"]
    with pytest.raises(UserError, match="this cannot be"):
        mine.sweep("seed=0,1", *options, "hydra.sweeper.seed=0", "run=failing")
    states = {trial.params["seed"]: trial.state.name for trial in study(at_home / "failing").trials}
    assert states == {"0": "COMPLETE", "1": "FAIL"}


def test_a_search_maximises_what_a_run_scored(at_home, reference, capfd):
    pytest.importorskip("optuna", reason="needs the extra 'tune'")
    words = ["trainer.threads=1", "hydra/sweeper=tune", "hydra.sweeper.n_trials=2", "jobs=2", "run=runs/tune"]
    assert main(["train", *SMOKE, *words, "-m", "trainer.learning_rate=interval(1e-4,1e-2)"]) == 0
    scored = [json.loads((at_home / f"runs/tune/{n}/evaluation.json").read_text()) for n in (0, 1)]
    values = [trial.value for trial in study(at_home / "runs/tune").trials]
    assert values == [one["in_episode"]["10"]["h@1"] for one in scored]
    assert f"best of 2: {max(values):.4g} with trainer.learning_rate=" in capfd.readouterr().out


def test_what_is_not_installed_is_named(at_home, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["train", *SMOKE, "-m", "seed=0,1", "hydra/sweeper=tune", "run=runs/no"]) == 2
    assert "run pip install '.[tune]' in the checkout" in capsys.readouterr().err
    try:
        import hydra_plugins.hydra_ray_launcher  # noqa: F401
    except ModuleNotFoundError:
        assert main(["train", *SMOKE, "-m", "seed=0,1", "hydra/launcher=ray", "run=runs/no"]) == 2
        assert (
            "hydra/launcher/ray is not installed; run pip install '.[ray]' in the checkout" in capsys.readouterr().err
        )
