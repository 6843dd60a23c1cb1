"""Run folders and data sets from anyone: nothing they name is executed, looked up or written to, and no damage is silent."""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import worldmodels
from worldmodels import checkpoints
from worldmodels.agents.run import load_agent
from worldmodels.cli import main
from worldmodels.data.collect import collect
from worldmodels.data.episodes import Episodes, _own_checksum
from worldmodels.trust import named_elsewhere

SMOKE = ["experiment=block_physics", "size=smoke", "logger.figures=false", "logger.progress=false", "trainer.threads=1"]
MODULE = """
from pathlib import Path
from subprocess import Popen
import gymnasium as gym
from worldmodels.cores.mlp import MLP
from worldmodels.envs import block_physics
Path("imported").touch()

class Core(MLP):
    '''A core of the user's own.'''
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of ours, and one with a core of the user's own module."""
    folder = tmp_path_factory.mktemp("trained")
    before = Path.cwd()
    os.chdir(folder)
    sys.modules.pop("stranger_cores", None)  # of this fixture before, when a worker comes back to this file
    (folder / "stranger_cores.py").write_text(MODULE)
    try:
        assert main(["train", *SMOKE, "core=gnn", "run=runs/plain"]) == 0
        assert main(["train", *SMOKE, "core=custom", "core._target_=stranger_cores.Core", "run=runs/own"]) == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def folder(trained, tmp_path, monkeypatch):
    """A copy of both, as if received from someone, in a fresh process as far as the module goes."""
    shutil.copytree(trained, tmp_path / "here")
    (tmp_path / "here" / "imported").unlink()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delitem(sys.modules, "stranger_cores")
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one != str(trained)])
    return tmp_path / "here"


def edited(path, **changes):
    """Change a run's config: dotted keys with __ for the dots."""
    file = path / "config.yaml"
    config = yaml.safe_load(file.read_text())
    for key, value in changes.items():
        *parents, last = key.split("__")
        inside = config
        for parent in parents:
            inside = inside[parent]
        inside[last] = value
    file.write_text(yaml.safe_dump(config))
    return path


def refused(capsys, *words):
    code = main(list(words))
    err = capsys.readouterr().err
    assert code == 2 and err.count("\n") == 1 and "Traceback" not in err, err
    return err


def test_what_is_ours_is_not_named_elsewhere(folder):
    assert not named_elsewhere(worldmodels.run.read_config(folder / "runs/plain"))
    assert named_elsewhere(
        {"core": {"_target_": "my.Core"}, "trainer": {"device": "cuda:0"}, "data": {"dir": "/a/b"}}
    ) == [("core._target_", "my.Core")]


@pytest.mark.parametrize(
    "changes",
    [
        {"core___target_": "stranger_cores.Core"},
        {"encoder___target_": "stranger_cores.Core"},
        {"task": {"_target_": "stranger_cores.Core"}},
        {"env__id": "stranger_cores:Any-v0"},
        {"env__id": "stranger_cores:1-v0"},
        {"env__kwargs": {"env_id": "stranger_cores:Any-v0"}},
        {"env__kwargs": {"deep": [{"_target_": "stranger_cores.Core"}]}},
        {"task": {"_target_": "worldmodels.tasks.views.PartialViews", "policy": "stranger_cores:Core"}},
        {"env__kwargs": {"anything": "stranger_cores:Core"}},
        {"task": {"_target_": "worldmodels.tasks.views.PartialViews", "policy": "stranger_cores"}},
    ],
)
@pytest.mark.parametrize("command", ["evaluate", "rollout", "train"])
def test_nothing_a_run_names_is_imported(folder, changes, command, capsys):
    edited(folder / "runs/plain", **changes)
    words = ["resume=runs/plain"] if command == "train" else ["run=runs/plain"]
    said = refused(capsys, command, *words)
    assert "add trust=stranger_cores" in said or "which is no module.Name" in said
    assert not (folder / "imported").exists() and "stranger_cores" not in sys.modules and str(folder) not in sys.path


@pytest.mark.parametrize(
    "changes",
    [
        {"env__id": "worldmodels:stranger_cores:Any-v0"},
        {"core___target_": "stranger cores.Core"},
        {"core___target_": "\x1b[2Kgood.Core"},
        {"core___target_": "strang\u0435r_cores.Core"},
        {"task": {"_target_": "Core"}},
    ],
)
def test_names_that_only_look_like_names_are_refused(folder, changes, capsys):
    (folder / "worldmodels:stranger_cores.py").write_text(MODULE)
    edited(folder / "runs/plain", **changes)
    for words in (["evaluate", "run=runs/plain", "trust=stranger_cores,good"], ["train", "resume=runs/plain"]):
        said = refused(capsys, *words)
        assert "which is no module.Name" in said and "\x1b" not in said
    assert not (folder / "imported").exists()


def test_a_class_of_python_is_not_called(folder, capsys):
    edited(
        folder / "runs/plain",
        encoder={"_target_": "subprocess.Popen", "num_slots": 5, "slot_size": 4, "args": "touch x"},
    )
    assert "encoder._target_=subprocess.Popen" in refused(capsys, "evaluate", "run=runs/plain")


def test_own_runs_open_and_copies_ask(trained, folder, capsys, monkeypatch):
    assert "add trust=stranger_cores" in refused(capsys, "evaluate", "run=runs/own")
    assert not (folder / "imported").exists()
    with worldmodels.trust.trusting(["other"]), pytest.raises(worldmodels.UserError, match="trust=stranger_cores"):
        worldmodels.load("runs/own")
    assert main(["evaluate", "run=runs/own", "trust=other,stranger_cores"]) == 0
    assert (folder / "imported").exists()
    assert type(worldmodels.load("runs/own", trust=["stranger_cores"]).model.core).__name__ == "Core"
    monkeypatch.chdir(trained)
    assert main(["evaluate", "run=runs/own"]) == 0  # trained here by this user
    assert main(["train", "resume=runs/own"]) == 0
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "another user's"))
    assert "add trust=stranger_cores" in refused(capsys, "train", "resume=runs/own")
    assert main(["train", "resume=runs/own", "trust=stranger_cores"]) == 0


def test_own_runs_are_known_by_what_they_name(trained, folder, monkeypatch, capsys):
    """A folder that changed what it names since it was trained is no longer the user's."""
    monkeypatch.chdir(trained)
    before = (trained / "runs/own/config.yaml").read_text()
    try:
        edited(trained / "runs/own", encoder___target_="subprocess.Popen")
        assert "trust=" in refused(capsys, "evaluate", "run=runs/own")
    finally:
        (trained / "runs/own/config.yaml").write_text(before)


def test_trust_in_a_module_is_none_in_what_it_imports(folder, capsys):
    edited(folder / "runs/own", core___target_="stranger_cores.Popen")
    assert "only imports is not trusted" in refused(capsys, "evaluate", "run=runs/own", "trust=stranger_cores")
    edited(folder / "runs/own", core___target_="stranger_cores.gym.Env")
    assert "add trust=stranger_cores.gym" in refused(capsys, "evaluate", "run=runs/own", "trust=stranger_cores")


def test_an_agent_is_vetted_too(folder, capsys, tmp_path):
    words = ["experiment=gotoobjmaze", "size=smoke", "core=gru", "logger.progress=false", "logger.figures=false"]
    assert main(["train-agent", *words, "run=runs/agent"]) == 0
    assert load_agent("runs/agent").model.num_timesteps > 0
    for changes in (
        {"core___target_": "stranger_cores.Core"},
        {"env__id": "stranger_cores:Any-v0"},
        {"encoder__name": "slots", "encoder__options": {"encoder": "stranger_cores.Core"}},
        {"evaluation__variants": {"a": {"env_id": "stranger_cores:Any-v0"}}},
    ):
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        path = edited(shutil.copytree(folder / "runs/agent", tmp_path / "copy"), **changes)
        for command in ("evaluate-agent", "rollout"):
            assert "add trust=stranger_cores" in refused(capsys, command, f"run={path}")
        assert "add trust=stranger_cores" in refused(capsys, "train-agent", f"resume={path}")
    assert not (folder / "imported").exists()


def test_an_encoder_of_a_run_is_vetted(folder, capsys):
    edited(folder / "runs/plain", encoder___target_="stranger_cores.Core")
    words = ["experiment=block_physics", "size=smoke", "core=gru", "core.num_slots=1", "encoder.run=runs/plain"]
    assert "add trust=stranger_cores" in refused(capsys, "train-agent", *words, "run=runs/agent2")
    assert not (folder / "imported").exists() and not (folder / "runs/agent2/config.yaml").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seed: ${oc.env:HOME}\nmodel: {}\n", "looked up on this machine"),
        ('label: "\\x24{oc.env:HOME}"\nmodel: {}\n', "looked up on this machine"),
        ('env: {"\\x24{oc.env:HOME}": 1}\nmodel: {}\n', "looked up on this machine"),
        ("env: {kwargs: {a: !!binary aGk=}}\nmodel: {}\n", "not the config of a run"),
        ('env: {kwargs: {a: !!python/object/apply:pathlib.PosixPath ["a"]}}\nmodel: {}\n', "not the config of a run"),
        ("# " + "]" * 20_000 + "\na: " + "[" * 20_000, "nested too deep"),
        ("a: &a [1, 2]\nb: *a\nmodel: {}\n", "aliases"),
        ("[" * 100_000, "nested too deep"),
        ("- " * 50_000 + "1", "nested too deep"),
        ("? " * 50_000 + "1", "nested too deep"),
        ("- 1\n- 2\n", "holds a list"),
        ("a: !!python/object/apply:os.system [true]\n", "not the config of a run"),
        ("#" * (1 << 21), "bytes"),
        ("", "not the config of a run"),
    ],
)
def test_configs_that_are_more_than_plain_values_are_refused(folder, text, said, capsys):
    (folder / "runs/plain/config.yaml").write_text(text)
    for command in ("evaluate", "rollout"):
        assert said in refused(capsys, command, "run=runs/plain")
    assert main(["report", "runs/plain"]) == 2


def test_commands_that_read_write_inside_the_run(folder, tmp_path, capsys):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run = folder / "runs/plain"
    edited(run, data__dir=str(elsewhere))
    before = {path for path in folder.rglob("*") if run not in path.parents}
    assert main(["evaluate", "run=runs/plain"]) == 0 and main(["rollout", "run=runs/plain"]) == 0
    assert not list(elsewhere.iterdir()) and list((run / "data").iterdir())
    assert {path for path in folder.rglob("*") if run not in path.parents} == before


@pytest.mark.parametrize("name", ["figures", "figures/rollout.png", "data"])
def test_links_in_a_run_lead_nowhere(folder, tmp_path, name, capsys):
    run, target = folder / "runs/plain", tmp_path / "target"
    target.mkdir() if "." not in name else target.write_text("mine")
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(target)
    assert "is a link to" in refused(capsys, "rollout", "run=runs/plain")
    assert target.read_text() == "mine" if target.is_file() else not list(target.iterdir())


def test_pictures_of_a_report_replace_a_link(folder, tmp_path):
    target = tmp_path / "mine"
    target.write_text("mine")
    for name in ("scoreboard.png", "scoreboard.md", "scoreboard.csv"):
        (folder / "runs/plain" / name).symlink_to(target)
    assert main(["report", "runs/plain"]) == 0
    assert target.read_text() == "mine" and not (folder / "runs/plain/scoreboard.png").is_symlink()


def test_a_link_that_waits_for_a_process_number_is_not_followed(tmp_path):
    target = tmp_path / "mine"
    target.write_text("mine")
    (tmp_path / f".evaluation.json.{os.getpid()}.partial").symlink_to(target)
    checkpoints.write_aside(tmp_path / "evaluation.json", b"{}")
    assert target.read_text() == "mine" and (tmp_path / "evaluation.json").read_bytes() == b"{}"


def test_a_task_with_a_folder_of_its_own_records_inside_the_run(folder):
    config = worldmodels.run.read_config(folder / "runs/plain")
    config["task"] = {"_target_": "worldmodels.tasks.views.PartialViews"}
    assert worldmodels.run._kept_inside(Path("r"), config)["task"]["data_dir"] == [Path("r/data"), "data"]


@pytest.mark.parametrize("content", ["{", "[" * 100_000, "5", "[]", "{}", '"agent"', '{"agent": 1}', '{"all": 5}'])
def test_evaluations_of_another_shape_get_one_line(folder, content, capsys):
    (folder / "runs/plain/evaluation.json").write_text(content)
    for words in (["compare", "runs=runs/plain"], ["report", "runs/plain"]):
        refused(capsys, *words)


def test_what_a_terminal_would_obey_is_not_printed(folder, capsys):
    file = folder / "runs/plain/evaluation.json"
    content = {key: value for key, value in json.loads(file.read_text()).items() if key != "checksum"}
    file.write_text(json.dumps(content | {"core": "\x1b]0;x\x07[red]gnn[/x]", "alarms": ["\x1b[2J[/y]"]}))
    (folder / "runs/plain/checkpoints/newest").write_text("step_\x1b[2J")
    assert main(["compare", "runs=runs/plain"]) == 0 and main(["evaluate", "run=runs/plain"]) == 0
    captured = capsys.readouterr()
    assert "\x1b]" not in captured.out + captured.err and "\x1b[2J" not in captured.out + captured.err


def test_only_plain_files_are_read_from_a_checkpoint(folder, capsys):
    file = checkpoints.latest(folder / "runs/plain") / "model.safetensors"
    file.unlink()
    os.mkfifo(file)
    assert "no plain file" in refused(capsys, "evaluate", "run=runs/plain")
    file.unlink()
    file.symlink_to("/dev/zero")
    assert "no plain file" in refused(capsys, "evaluate", "run=runs/plain")


def test_a_resume_leaves_checkpoints_elsewhere_alone(folder, capsys):
    edited(folder / "runs/plain", trainer__steps=9)
    (folder / "runs/plain/checkpoints").rename(folder / "others")
    (folder / "runs/plain/checkpoints").symlink_to(folder / "others")
    before = sorted((folder / "others").iterdir())
    assert "is a link to" in refused(capsys, "train", "resume=runs/plain")
    assert sorted((folder / "others").iterdir()) == before


def test_weights_the_model_does_not_have_are_refused(tmp_path):
    checkpoints.save(tmp_path, 1, torch.nn.Linear(2, 2), {})
    with pytest.raises(worldmodels.UserError, match="another model than its config.yaml says: it has bias"):
        checkpoints.load_weights(checkpoints.latest(tmp_path), torch.nn.Linear(2, 2, bias=False))


def test_evaluations_replace_a_link(folder, tmp_path):
    target = tmp_path / "mine"
    target.write_text("mine")
    file = folder / "runs/plain/evaluation.json"
    file.unlink()
    file.symlink_to(target)
    assert main(["evaluate", "run=runs/plain"]) == 0
    assert target.read_text() == "mine" and not file.is_symlink()


# Data sets.


@pytest.fixture
def data(tmp_path):
    collect("CartPole-v1", tmp_path / "data", episodes=3, steps=5)
    return tmp_path / "data"


def manifest(path, change):
    """Change a manifest as someone would who knows how: with a checksum that fits."""
    file = path / "manifest.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content | {"checksum": _own_checksum(content)}))


@pytest.mark.parametrize("name", ["../secret.bin", "/etc/hostname", "..", "", "sub/x.bin", "manifest.json", 5, "a\0b"])
def test_manifests_name_files_beside_them(data, name):
    (data.parent / "secret.bin").write_bytes((data / "actions.bin").read_bytes())
    manifest(data, lambda content: content["arrays"]["actions"].update(file=name))
    with pytest.raises(worldmodels.UserError, match="no name of a file in this folder"):
        Episodes.load(data)


def test_arrays_are_no_links_out_of_their_folder(data):
    secret = data.parent / "secret.bin"
    (data / "actions.bin").rename(secret)
    (data / "actions.bin").symlink_to(secret)
    with pytest.raises(worldmodels.UserError, match="is a link to"):
        Episodes.load(data)


@pytest.mark.parametrize("dtype", ["|O", ">f4", "<c8", "<M8[s]", "S4", "<f16", "no type", [["a", "<f4"]], None])
def test_arrays_are_plain_numbers(data, dtype):
    manifest(data, lambda content: content["arrays"]["actions"].update(dtype=dtype))
    with pytest.raises(worldmodels.UserError, match=r"manifest\.json: .*collect the data again"):
        Episodes.load(data, verify=False)


@pytest.mark.parametrize(
    "change",
    [
        {"lengths": [1 << 60] * 3},
        {"lengths": [-1, 6, 10]},
        {"lengths": [5.0, 5, 5]},
        {"lengths": "555"},
        {"lengths": []},
        {"about": [1]},
        {"arrays": [1]},
        {"arrays": {"observations": 1}},
        {"arrays": {}},
    ],
)
def test_sizes_are_checked_before_memory_is_taken(data, change):
    manifest(data, lambda content: content.update(change))
    with pytest.raises(worldmodels.UserError, match=r"manifest\.json: .*collect the data again"):
        Episodes.load(data)


@pytest.mark.parametrize("shape", [[18, 0], [1 << 40, 4], [18, 1 << 40], [-18, -4], [18.0, 4], [True], [], "18"])
def test_shapes_are_checked_before_memory_is_taken(data, shape):
    manifest(data, lambda content: content["arrays"]["observations"].update(shape=shape))
    with pytest.raises(worldmodels.UserError, match=r"manifest\.json: |the data are truncated"):
        Episodes.load(data, verify=False)


def test_a_manifest_nested_without_end_is_refused(data):
    (data / "manifest.json").write_text("[" * 200_000)
    with pytest.raises(worldmodels.UserError, match="not JSON"):
        Episodes.load(data)


def test_plain_data_still_open(data):
    episodes = Episodes.load(data)
    assert len(episodes) == 3 and episodes.arrays["observations"].dtype == torch.float32
    assert np.isfinite(episodes.arrays["observations"][:].numpy()).all()


def flipped(file, random):
    """Flip one bit of a file."""
    data = bytearray(file.read_bytes())
    data[int(torch.randint(len(data), (), generator=random))] ^= 1 << int(torch.randint(8, (), generator=random))
    file.write_bytes(data)


def test_no_flipped_bit_of_a_data_set_is_silent(data, tmp_path):
    random = torch.Generator().manual_seed(0)
    for name in sorted(path.name for path in data.iterdir()):
        for trial in range(10):
            copy = shutil.copytree(data, tmp_path / f"{name}-{trial}")
            flipped(copy / name, random)
            with pytest.raises(worldmodels.UserError, match=r"checksum|manifest\.json"):
                Episodes.load(copy)


# Runs.


@pytest.mark.parametrize("name", ["model.safetensors", "meta.json", "trainer_0.pt"])
def test_no_flipped_bit_of_a_checkpoint_is_silent(folder, name, capsys):
    file = checkpoints.latest(folder / "runs/plain") / name
    random, whole = torch.Generator().manual_seed(0), file.read_bytes()
    for _ in range(10):
        file.write_bytes(whole)
        flipped(file, random)
        said = refused(capsys, "train", "resume=runs/plain")
        assert "checksum" in said or "not a checkpoint" in said or "another program" in said
        if name != "trainer_0.pt":
            refused(capsys, "evaluate", "run=runs/plain")


@pytest.mark.parametrize("name", ["model.safetensors", "meta.json", "trainer_0.pt"])
def test_files_of_another_checkpoint_are_refused(folder, name, capsys):
    older, last = sorted((folder / "runs/plain/checkpoints").glob("step_*"))
    shutil.copy(older / name, last / name)
    assert "does not match its checksum" in refused(capsys, "train", "resume=runs/plain")


def test_a_missing_newest_checkpoint_is_told(folder, capsys):
    older, last = sorted((folder / "runs/plain/checkpoints").glob("step_*"))
    shutil.rmtree(last)
    assert main(["evaluate", "run=runs/plain"]) == 0
    assert f"{last.name} is missing; this is {older.name}" in capsys.readouterr().err
    assert main(["train", "resume=runs/plain"]) == 0 and last.is_dir()
    capsys.readouterr()
    assert main(["evaluate", "run=runs/plain"]) == 0 and "missing" not in capsys.readouterr().err
    for checkpoint in (older, last):
        shutil.rmtree(checkpoint, ignore_errors=True)
    assert "is missing, and so are all before it" in refused(capsys, "train", "resume=runs/plain")


def test_weights_that_are_not_finite_are_refused(tmp_path):
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.bias[1] = float("nan")
    checkpoints.save(tmp_path, 1, model, {})
    with pytest.raises(worldmodels.UserError, match=r"not finite \(bias\)"):
        checkpoints.load_weights(checkpoints.latest(tmp_path), torch.nn.Linear(2, 2))


def test_an_optimizers_state_that_is_not_finite_is_refused(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    checkpoints.save(tmp_path, 1, model, {"optimizer": optimizer.state_dict()})
    assert checkpoints.restore(tmp_path, torch.nn.Linear(2, 2))[0] == 1
    optimizer.state[model.bias]["exp_avg_sq"][1] = float("inf")
    checkpoints.save(tmp_path, 2, model, {"optimizer": optimizer.state_dict()})
    with pytest.raises(
        worldmodels.UserError, match=r"step_000000000002.trainer_0\.pt has an optimizer's state that is not"
    ):
        checkpoints.restore(tmp_path, torch.nn.Linear(2, 2))


def test_weights_larger_than_the_model_are_not_read(tmp_path):
    checkpoints.save(tmp_path, 1, torch.nn.Linear(2, 2), {})
    file = checkpoints.latest(tmp_path) / "model.safetensors"
    with file.open("r+b") as grown:
        grown.truncate(1 << 35)  # without taking room on the disk
    with pytest.raises(worldmodels.UserError, match="has 34,359,738,368 bytes"):
        checkpoints.load_weights(file.parent, torch.nn.Linear(2, 2))


def test_checkpoints_without_checksums_are_still_read(tmp_path):
    model = torch.nn.Linear(2, 2)
    checkpoints.save(tmp_path, 1, model, {"x": 1})
    meta = {"format": checkpoints.FORMAT, "version": 1, "step": 1, "processes": 1}
    (checkpoints.latest(tmp_path) / "meta.json").write_text(json.dumps(meta))
    other = torch.nn.Linear(2, 2)
    assert checkpoints.restore(tmp_path, other) == (1, {"x": 1}) and torch.equal(other.weight, model.weight)


def test_a_run_goes_on_with_its_own_data_only(folder, tmp_path, capsys):
    edited(folder / "runs/plain", trainer__steps=8)
    (test,) = (folder / "data").glob("*-test-*")
    arrays = Episodes.load(test)
    arrays.about["seed"] = 99
    arrays.save(tmp_path / "other")
    shutil.rmtree(test)
    shutil.move(tmp_path / "other", test)
    assert "the test data of runs/plain are not those it began with" in refused(capsys, "train", "resume=runs/plain")
    shutil.rmtree(test)  # recorded again they are the same
    assert main(["train", "resume=runs/plain"]) == 0


def test_parts_of_another_seeds_run_are_refused(folder, capsys):
    words = ["experiment=adding", "core=gru", "size=smoke", "logger.progress=false", "logger.figures=false"]
    for seed in (0, 1):
        assert main(["train", *words, f"seed={seed}", f"run=runs/{seed}"]) == 0
    ours, theirs = folder / "runs/0", folder / "runs/1"
    kept = (ours / "evaluation.json").read_text()
    shutil.copy(theirs / "evaluation.json", ours)
    capsys.readouterr()
    assert "is of other weights" in refused(capsys, "compare", "runs=runs/0")
    (ours / "evaluation.json").write_text(kept.replace('"step": 6', '"step": 7'))
    assert "does not match its checksum" in refused(capsys, "compare", "runs=runs/0")
    (ours / "evaluation.json").write_text(kept)
    assert main(["compare", "runs=runs/0"]) == 0
    shutil.rmtree(ours / "checkpoints")
    shutil.copytree(theirs / "checkpoints", ours / "checkpoints")
    capsys.readouterr()
    for command in (["evaluate", "run=runs/0"], ["train", "resume=runs/0"]):
        assert "is of another run than" in refused(capsys, *command)


def test_metrics_that_hold_no_number_of_seconds_are_passed_over(folder):
    with (folder / "runs/plain/metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "time/training_seconds": null}\n')
    assert main(["train", "resume=runs/plain"]) == 0
