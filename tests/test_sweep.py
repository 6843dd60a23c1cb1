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
from hydra.core.plugins import Plugins

import worldmodels
from worldmodels import checkpoints, sweep
from worldmodels.cli import main
from worldmodels.data import collect as collecting
from worldmodels.data import episodes
from worldmodels.errors import UserError
from worldmodels.logging import note, read_metrics
from worldmodels.run import collect_data

SMOKE = ["experiment=block_physics", "size=smoke", "logger.figures=false", "core=gnn", "core.hidden_size=16"]

# What processes run must be importable there: a module in the user's folder.
MINE = """
import os, signal, sys, time
from worldmodels.errors import UserError

class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(one)

def run(config, path, resume):
    print("hello from", path.name)
    print("a warning", file=sys.stderr)
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("a: 1")
    (path / "metrics.jsonl").write_text('{"step": 4, "wm/loss": 0.25, "time/frames_per_second": 1500.0}\\n{"step": 5, "wm')
    what = config["what"]
    if what == "refuse":
        raise UserError("this cannot be")
    if what == "odd":
        raise Odd(1, 2)
    if what == "wait":
        time.sleep(1000)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return path

def after(path):
    print("scored", path.name)
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
    config = {"task": {"_target_": "worldmodels.tasks.views.PartialViews", **task}, "trainer": {"threads": 0}}
    for _ in range(2):
        collect_data(config)
    assert [path.name.split("-")[3] for path in collections] == ["train", "test"]


def test_agents_side_by_side(at_home, capfd):
    words = ["size=smoke", "experiment=memory", "core=gru", "logger.figures=false", "logger.progress=false"]
    assert main(["train-agent", *words, "-m", "seed=0,1", "run=runs/agents", "jobs=2"]) == 0
    out, err = capfd.readouterr()
    assert out.count("run: ") == 2 and err == ""
    threads = max(1, sweep.cores() // 2)  # an equal share, where none were asked for
    for seed in (0, 1):
        run = worldmodels.agents.load(f"runs/agents/{seed}")
        assert (run.config["seed"], run.config["trainer"]["threads"]) == (seed, threads)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_what_fails_does_not_stop_the_others(at_home, capfd, monkeypatch):
    """A refusal, an error that cannot be sent, a process killed, data that cannot be had: each is told, each is its own."""
    import mine

    kinds = ["good", "refuse", "odd", "kill", "no data"]
    config = {"trainer": {"threads": 0, "steps": 8}, "logger": {"progress": True}}
    jobs = [
        sweep.Job(
            {**config, "trainer": dict(config["trainer"]), "what": kind}, at_home / "fake" / kind, [f"what={kind}"]
        )
        for kind in kinds
    ]

    def collect(config):
        if config["what"] == "no data":
            raise UserError("no data at nothing")

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    errors = sweep.train_side_by_side(jobs, 2, program="train", collect=collect, run=mine.run, after=mine.after)
    monkeypatch.undo()
    good, refused, odd, killed, missing = errors
    assert good is None
    assert type(refused) is UserError and str(refused) == "this cannot be" and "mine.py" in refused.__notes__[0]
    assert type(odd) is RuntimeError and str(odd) == "Odd: 1" and "mine.py" in odd.__notes__[0]
    assert type(killed) is UserError and "what=kill: its process ended by signal 9 (SIGKILL)" in str(killed)
    assert f"go on with 'worldmodels train resume={at_home}/fake/kill'" in str(killed)
    assert str(missing) == "no data at nothing" and not (at_home / "fake" / "no data").exists()
    out, _ = capfd.readouterr()
    assert "hello from good\nscored good\n" in out and "hello from refuse\n" in out
    shown = screen.getvalue()
    assert "a warning" in shown and "worldmodels: what=refuse: failed: this cannot be" in shown
    rows = {line.split()[0]: line for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).splitlines() if "/8" in line}
    assert "4/8" in rows["what=good"] and "done" in rows["what=good"]
    assert all("failed" in rows[f"what={kind}"] for kind in ("refuse", "odd", "kill"))


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
    def job(number, *words):
        return sweep.Job({}, Path(f"runs/{number}"), list(words))

    jobs = [job(0, "size=smoke", "core=snps", "seed=0"), job(1, "size=smoke", "core=snps", "seed=1")]
    assert sweep.labels(jobs) == ["seed=0", "seed=1"]
    assert sweep.labels([*jobs, job(2, "size=smoke", "core=gnn", "seed=0")])[2] == "core=gnn,seed=0"
    assert sweep.labels([job(7, "seed=0")]) == ["7"]


def test_how_many_at_once(monkeypatch):
    def configs(number, threads):
        return [{"trainer": {"threads": threads}}] * number

    monkeypatch.setattr(sweep, "cores", lambda: 8)
    assert [sweep.side_by_side(None, configs(20, t)) for t in (0, 1, 3, 16)] == [8, 8, 2, 1]
    assert sweep.side_by_side(None, configs(3, 0)) == 3
    assert (sweep.side_by_side(5, configs(20, 4)), sweep.side_by_side(5, configs(2, 4))) == (5, 2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert sweep.side_by_side(4, configs(20, 1)) == 1


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
    ],
)
def test_mistakes_get_one_line_before_anything_is_trained(at_home, capsys, words, says):
    assert main(["train", *SMOKE, "run=runs/wrong", *words]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1
    assert not list((at_home / "runs/wrong").rglob("config.yaml"))


def test_a_launcher_that_trains_elsewhere_is_refused(at_home, capsys, monkeypatch):
    class Elsewhere:
        def launch(self, job_overrides, initial_job_idx):
            return []

    monkeypatch.setattr(Plugins, "instantiate_launcher", lambda *args, **options: Elsewhere())
    assert main(["train", *SMOKE, "run=runs/elsewhere", "-m", "seed=0,1"]) == 2
    err = capsys.readouterr().err
    assert "leave out hydra/launcher=, and say with jobs=" in err and err.count("\n") == 1


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


def children(pid):
    """Processes that a process started, but for multiprocessing's own."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"spawn_main" in (path / "cmdline").read_bytes():
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
    started = children(whole.pid)
    whole.send_signal(signal.SIGINT)
    _, err = whole.communicate(timeout=120)
    assert whole.returncode == 2 and "interrupted; what was saved is whole" in err and err.count("\n") == 1, err
    assert len(started) == 2 and all(ended(pid) for pid in started)
    assert all(worldmodels.load(run).config["seed"] == seed for seed, run in enumerate(runs))


def test_a_process_ends_with_the_one_that_started_it(home):
    """Killed, that one can say nothing to it."""
    (home / "killed.py").write_text(
        "from pathlib import Path\nimport mine\nfrom worldmodels import sweep\nif __name__ == '__main__':\n"
        "    config = {'what': 'wait', 'trainer': {'threads': 1, 'steps': 8}, 'logger': {'progress': False}}\n"
        "    jobs = [sweep.Job(config, Path('fake/wait'), [])]\n"
        "    sweep.train_side_by_side(jobs, 1, program='train', collect=dict, run=mine.run, after=None)\n"
    )
    whole = start(home / "killed.py", home, PYTHONPATH=str(home))
    deadline = time.time() + 300
    while not (home / "fake/wait/metrics.jsonl").exists() and time.time() < deadline and whole.poll() is None:
        time.sleep(0.05)
    (child,) = children(whole.pid)
    whole.kill()
    whole.communicate(timeout=120)
    assert ended(child)
