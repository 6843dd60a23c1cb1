"""A campaign of faults: killed runs, damaged files, hostile values, bad environments, and machines that have too little.

Every trial is a command in a process of its own, in a folder of its own, for so many seconds at most, and is drawn from
the seed, its row and its number alone, so that each can be repeated. docs/reliability.md says what the columns mean.

python benchmarks/reliability.py [--seed 0] [--short] [--only ROW or ROW/NUMBER] [--out results.json]
python benchmarks/reliability.py --markdown results.json
"""

import argparse
import contextlib
import gc
import hashlib
import json
import math
import multiprocessing
import os
import platform
import random
import re
import resource
import select
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import lightning_fabric  # noqa: F401  every process is forked off this one, which has imported what commands import
import matplotlib.pyplot  # noqa: F401
import numpy as np
import safetensors.torch
import torch
import torch.utils.tensorboard  # noqa: F401
import yaml
from gymnasium import spaces
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

import worldmodels
from hydra_plugins import _worldmodels
from worldmodels import checkpoints, cli, launch
from worldmodels.agents import run as agents
from worldmodels.check import check_env  # noqa: F401
from worldmodels.config import plain, register
from worldmodels.data import episodes
from worldmodels.logging import progress_bar
from worldmodels.report import scoreboard_pages  # noqa: F401
from worldmodels.run import CONFIG, EVALUATION, train_run

VERDICTS = ("survived", "refused", "traceback", "silent", "lost", "hang", "executed")
GOOD = VERDICTS[:2]
BOUND = 40.0  # seconds that a command may take; all of them take a second or two
FEWER = False  # kills along one run in the short form
ROOT = Path()  # the temporary folder, in which everything happens
DOCUMENT = Path(__file__).parents[1] / "docs" / "reliability.md"

SMOKE = ("size=smoke", "trainer.threads=1", "logger.figures=false", "logger.progress=false")
BLOCKS = ("experiment=block_physics", *SMOKE, "data.train.episodes=6", "data.test.episodes=8", "trainer.batch_size=16")
ADDING = (
    "experiment=adding",
    *SMOKE,
    "task.train_size=20",
    "task.test_size=6",
    "task.train_length=10",
    "task.test_length=20",
)
RECALL = ("experiment=memory", *SMOKE, "env.kwargs.delay=2", "evaluation.num_envs=4", "trainer.checkpoint_every=1")
STEPS = ("trainer.log_every=1", "trainer.checkpoint_every=2")
BASES: dict[str, tuple[str, ...]] = {  # runs that trials copy; the second of a kind is of another seed
    "world": ("train", *BLOCKS, *STEPS, "core=gnn", "seed=0"),
    "world2": ("train", *BLOCKS, *STEPS, "core=gnn", "seed=1", "data.train.seed=5", "data.test.seed=6"),
    "task": ("train", *ADDING, *STEPS, "core=gru", "seed=0"),
    "task2": ("train", *ADDING, *STEPS, "core=gru", "seed=1"),
    "agent": ("train-agent", *RECALL, "core=gru", "seed=0"),
    "agent2": ("train-agent", *RECALL, "core=gru", "seed=1"),
}
COMPOSED: dict[str, DictConfig] = {}  # configs whose options trials change
ONCE = ("trainer.steps=2", "trainer.batch_size=8", "trainer.log_every=1", "trainer.evaluate_every=1")
RULES = ("core=rules", "encoder=slot_attention", "env.resize=[16,16]", "trainer.window=2", "trainer.evaluate_every=0")
FEW = ("task.train_episodes=2", "task.test_episodes=2")
OPTIONS: dict[str, tuple[str, ...]] = {
    "world": ("train", *BLOCKS, *ONCE, "core=gnn"),
    "rules": ("train", *BLOCKS, *ONCE, *RULES),
    "task": ("train", *ADDING, *ONCE, "trainer.evaluate_every=0", "core=scoff"),
    "views": ("train", "experiment=balls_crops", *SMOKE, *ONCE, "core=s2gru", "trainer.evaluate_every=0", *FEW),
    "agent": ("train-agent", *RECALL, "core=scoff", "trainer.steps=32", "evaluation.episodes=4", "label=x"),
    "vector": (
        "train",
        "experiment=any",
        *SMOKE,
        *ONCE,
        "encoder=vector",
        "core=gru",
        "data.test.episodes=6",
        "evaluation.horizons=[1,2]",
    ),
    "bare": (
        "train-agent",
        "experiment=any",
        *SMOKE,
        "core=gru",
        "trainer.steps=32",
        "label=x",
        "net_arch=[]",
        "evaluation.max_steps=500",  # of environments that never end
    ),
}


# A command in a process of its own.


class Ended(NamedTuple):
    """How a process ended: its exit code (None: it had to be ended), what it printed, and how long it took."""

    code: int | None
    out: str
    err: str
    seconds: float


class Begun(NamedTuple):
    """A process that runs."""

    process: int
    pipes: dict[int, list[bytes]]  # of stdout and stderr, and what came
    since: float


def begin(work: Callable[[], Any], folder: Path, prepare: Callable[[], None] = lambda: None) -> Begun:
    """Start a function in a forked process in a folder; ``prepare`` is called there before it."""
    (out, out_there), (err, err_there) = os.pipe(), os.pipe()
    since, process = time.monotonic(), os.fork()
    if process == 0:
        code = 1
        try:
            os.setsid()
            os.chdir(folder)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(out_there, 1)
            os.dup2(err_there, 2)
            os.closerange(3, 1024)
            prepare()
            code = work() or 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(bool(error.code))
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stderr.flush()
            try:
                if sys.stdout is not None:
                    sys.stdout.flush()
            except Exception as error:  # what Python prints as it ends
                os.write(2, f"Exception ignored: Traceback: {error!r}\n".encode())
                code = 120
            os._exit(code)
    os.close(out_there)
    os.close(err_there)
    return Begun(process, {out: [], err: []}, since)


def wait(begun: Begun, *, kill: float | None = None, enough: Callable[[], bool] = lambda: False) -> Ended:
    """Wait for a process; it is killed after so many seconds, or when ``enough`` says so."""
    process, pipes, since = begun
    most, code = BOUND if kill is None else kill, None
    while True:
        found, status = os.waitpid(process, os.WNOHANG)
        seconds = time.monotonic() - since
        if found:
            code = os.waitstatus_to_exitcode(status)
            break
        if seconds > most or enough():
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            break
        for pipe in select.select(list(pipes), [], [], 0.003)[0]:
            pipes[pipe].append(os.read(pipe, 1 << 16))
            if not pipes[pipe][-1]:
                time.sleep(0.003)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)  # what it started
    for pipe, parts in pipes.items():
        while select.select([pipe], [], [], 0)[0] and (part := os.read(pipe, 1 << 16)):
            parts.append(part)
        os.close(pipe)
    out, err = (b"".join(parts).decode(errors="replace") for parts in pipes.values())
    return Ended(code, out, err, seconds)


def attempt(work: Callable[[], Any], folder: Path, prepare: Callable[[], None] = lambda: None, **more: Any) -> Ended:
    return wait(begin(work, folder, prepare), **more)


def command(*words: str) -> Callable[[], int]:
    return partial(cli.main, list(words))


def like_command(name: str, work: Callable[[], Any]) -> int:
    """Do something as if it were the command of that name, with its answers to errors."""
    cli.COMMANDS[name] = lambda words: work()
    return cli.main([name])


def limited(which: int, most: int) -> None:
    resource.setrlimit(which, (most, resource.getrlimit(which)[1]))


def memory(megabytes: int) -> None:
    """Let this process take so much more memory than it has, where the system can say how much that is."""
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limited(resource.RLIMIT_AS, pages * resource.getpagesize() + (megabytes << 20))


def bounded() -> None:
    """Files of 64 MB at most, and 2 GB more of memory."""
    limited(resource.RLIMIT_FSIZE, 1 << 26)
    memory(2048)


def quiet() -> None:
    """``bounded``, and without the warnings of Gymnasium's own checker."""
    bounded()
    warnings.simplefilter("ignore")


# What came of it.


class Trial(NamedTuple):
    """A verdict, what was done, and what was printed."""

    verdict: str
    what: str
    printed: str = ""


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def contents(folder: Path) -> dict[str, Any]:
    """What must not depend on how often a run was interrupted: weights, scores, metrics without times, and data."""
    found: dict[str, Any] = {}
    newest = {checkpoints.latest(path.parent) for path in folder.rglob("checkpoints")}
    for file in sorted(folder.rglob("*")):
        name = str(file.relative_to(folder))
        older = "checkpoints" in file.parts and file.parent not in newest  # a kill may leave one that is removed later
        if ".partial" in name or older or not file.is_file():
            continue
        if file.suffix in (".safetensors", ".pt", ".bin", ".png") or file.name == episodes.MANIFEST:
            found[name] = digest(file)
        elif file.name == "metrics.jsonl":
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            found[name] = [{key: v for key, v in line.items() if not key.startswith("time/")} for line in lines]
        elif file.name == EVALUATION:
            found[name] = json.loads(file.read_text())
    return json.loads(json.dumps(found))


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Names whose contents differ, of lists with the first line that does; NaN is equal to itself."""
    told = []
    for name in sorted({*expected, *found}):
        one, other = expected.get(name), found.get(name)
        if repr(one) != repr(other):
            told.append(name)
            if isinstance(one, list) and isinstance(other, list):
                lines = next(
                    ((a, b) for a, b in zip(one, other, strict=False) if repr(a) != repr(b)), (len(one), len(other))
                )
                told.append(f"expected {lines[0]}, found {lines[1]}")
    return told


def said(ended: Ended) -> str:
    return f"exit {ended.code} after {ended.seconds:.1f} s\n{ended.err[-3000:]}\n{ended.out[-300:]}"


def verdict(ended: Ended, same: bool | None = None, names: str = "") -> str:
    """The column a command belongs into; ``same``: whether its results are what they ought to be, if it has any."""
    lines = ended.err.splitlines()
    if Path(ROOT, "marker").exists():
        return "executed"
    if ended.code is None:
        return "hang"
    if "Traceback" in ended.err or ended.code not in (0, 2):
        return "traceback"
    if ended.code == 2:
        one = len(lines) == 1 and lines[0].startswith("worldmodels: ") and re.search(names, lines[0])
        return "refused" if one else "traceback"
    told = any(line.startswith("worldmodels: ") for line in lines)
    return "survived" if same or same is None or told else "silent"


def unfinite(folder: Path) -> list[str]:
    """Numbers that are not finite in scores, losses and recorded data."""
    found = []
    for file in folder.rglob(EVALUATION):
        if re.search(r"[:,\[]\s*-?(NaN|Infinity)\b", file.read_text()):
            found.append(file.name)
    for file in folder.rglob("metrics.jsonl"):
        if re.search(r'loss": -?(NaN|Infinity)', file.read_text()):
            found.append(file.name)
    for file in folder.rglob("manifest.json"):
        for name, entry in json.loads(file.read_text())["arrays"].items():
            values = np.fromfile(file.parent / entry["file"], entry["dtype"])
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                found.append(name)
    return found


def base(name: str) -> Path:
    return ROOT / "bases" / name


def make_base(name: str) -> None:
    """Train a run that trials copy, and let it have two steps more to go, for those that resume it."""
    base(name).mkdir(parents=True)
    ended = attempt(command(*BASES[name], "run=run"), base(name))
    if ended.code != 0:
        raise SystemExit(f"{name} cannot be trained:\n{said(ended)}")
    config = base(name) / "run" / CONFIG
    config.write_text(
        re.sub(r"^  steps: (6|128)$", lambda m: f"  steps: {int(m[1]) * 4 // 3}", config.read_text(), flags=re.M)
    )


def known(name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What an undisturbed command gives, measured once."""
    file = ROOT / "known" / f"{name}.json"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        found = json.dumps(measure())
        aside = file.with_suffix(f".{os.getpid()}")
        aside.write_text(found)
        aside.replace(file)
    return json.loads(file.read_text())


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=ROOT, prefix="trial-") as folder:
        yield Path(folder) / "here"


# Kills.

MORE = ("trainer.steps=12", "trainer.checkpoint_every=3")
KILLED: dict[str, tuple[str, ...]] = {
    "train": ("train", *BLOCKS, "core=gnn", *MORE, "run=run"),
    "task": ("train", *ADDING, "core=scoff", *MORE, "run=run"),
    "agent": ("train-agent", *RECALL, "core=gru", "trainer.steps=192", "run=run"),
    "collect": ("collect", "env=worldmodels/BlockPhysics-v0", "path=data", "episodes=40", "steps=20", "num_envs=4"),
    "sweep": ("train", "-m", *ADDING, "core=gru", "seed=0,1,2", "jobs=1", "run=runs"),
}


def undisturbed(which: str) -> dict[str, Any]:
    """Contents of the folder, and seconds, of a command of ``KILLED`` that is left alone."""

    def measure() -> dict[str, Any]:
        with scratch() as folder:
            folder.mkdir()
            ended = attempt(command(*KILLED[which]), folder)
            assert ended.code == 0, said(ended)
            return {"seconds": ended.seconds, "contents": contents(folder)}

    return known(f"undisturbed-{which}", measure)


def again(which: str, folder: Path) -> tuple[str, ...]:
    """The words that go on with a command that was stopped."""
    own = KILLED[which]
    return (own[0], "resume=run") if "run=run" in own and (folder / "run" / CONFIG).exists() else own


def newest_step(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("meta.json") if ".partial" not in str(path))[-1:]


def killed(which: str, draw: random.Random, number: int, folder: Path) -> list[Trial]:
    """Kill a command again and again as it goes on, then let it end and compare with one that was left alone."""
    folder.mkdir()
    reference = undisturbed(which)
    wanted, span, trials, moments = 2 if FEWER else 5, reference["seconds"], [], []
    while True:
        last = len(trials) == wanted
        before = newest_step(folder)
        words = again(which, folder)
        ended = attempt(command(*words), folder, kill=None if last else draw.uniform(0, span))
        what = f"worldmodels {' '.join(words)}, after kills at {moments} s"
        if ended.code is None and not last:
            moments.append(round(ended.seconds, 3))
            trials.append(Trial("survived", what))
            if newest_step(folder) < before:
                trials[-1] = Trial("lost", f"{what}: {before} is gone")
        elif ended.code != 0:
            return [*trials[:-1], Trial("lost" if ended.code == 2 else verdict(ended), what, said(ended))]
        else:
            span = ended.seconds  # what is left to do is quicker done
        whole = ended.code == 0 or (which == "collect" and (folder / "data").exists())
        if whole:
            if wrong := differences(reference["contents"], contents(folder)):
                return [*trials[:-1], Trial("silent", f"{what}: {wrong} differ", said(ended))]
        if last:
            return trials
        if which == "collect" and whole:
            shutil.rmtree(folder / "data")  # and once more
            span = reference["seconds"]


# Files.

TARGETS = {
    "run/config.yaml": ("evaluate", "resume", "rollout", "report", "compare", "load"),
    "run/evaluation.json": ("compare", "rollout", "report"),
    "run/metrics.jsonl": ("resume", "rollout", "report"),
    "run/checkpoints/newest": ("evaluate", "resume", "load"),
    "run/checkpoints/step_*/model.safetensors": ("evaluate", "resume", "load"),
    "run/checkpoints/step_*/trainer_0.pt": ("resume",),
    "run/checkpoints/step_*/meta.json": ("evaluate", "resume", "load"),
    "data/*/manifest.json": ("evaluate", "resume", "load"),
    "data/*/*.bin": ("evaluate", "resume", "load"),
}
MADE = {  # what a command writes that others would read
    "evaluate": ("run/evaluation.json",),
    "resume": ("run/evaluation.json", "run/checkpoints/*/model.safetensors"),
    "rollout": ("run/figures/rollout.png", "run/figures/horizons.png", "run/figures/choices.png"),
    "report": (),
    "compare": (),
    "load": (),
}


def to_do(of: str, name: str) -> Callable[[], int]:
    """A command that reads a run of ours in the present folder."""
    suffix = "-agent" if of.startswith("agent") else ""
    words = {
        "evaluate": (f"evaluate{suffix}", "run=run"),
        "resume": (f"train{suffix}", "resume=run"),
        "rollout": ("rollout", "run=run"),
        "compare": ("compare", "runs=[run]"),
        "report": ("report", "run"),
    }
    return command(*words[name]) if name in words else partial(like_command, "load", partial(opened, of))


def opened(of: str) -> None:
    """Open a run and its data from Python, and print what they hold."""
    if of.startswith("agent"):
        model = agents.load_agent("run").model.policy
    else:
        model = worldmodels.load("run").model
    held = [safetensors.torch.save(dict(model.state_dict()))]
    for path in sorted((base(of) / "data").glob("*")):
        data = episodes.Episodes.load(Path("data") / path.name)
        held += [array[:].numpy().tobytes() for _, array in sorted(data.arrays.items())]
    print([hashlib.sha256(part).hexdigest() for part in held])


def results(folder: Path, name: str, ended: Ended) -> dict[str, Any]:
    """What a command told, on the screen and in files."""
    files = {file for pattern in MADE[name] for file in folder.glob(pattern)}
    if name == "resume":
        files = {file for file in files if file.name == EVALUATION} | {
            max(files - {folder / "run" / EVALUATION}, default=folder)
        }
    out = "" if name in ("report", "rollout") else ended.out  # which name times and curves, of the log
    return {"out": out, **{file.name: digest(file) for file in files if file.is_file()}}


def undamaged(of: str, name: str) -> dict[str, Any]:
    def measure() -> dict[str, Any]:
        with scratch() as folder:
            shutil.copytree(base(of), folder)
            ended = attempt(to_do(of, name), folder)
            assert ended.code == 0, said(ended)
            return results(folder, name, ended)

    return known(f"undamaged-{of}-{name}", measure)


def fit(file: Path) -> None:
    """Make the checksums of a changed file fit, as someone would who knows how."""
    if (meta := file.parent / "meta.json").exists():
        said = json.loads(meta.read_text())
        if file != meta:
            said["files"][file.name] = checkpoints._checksum(file.read_bytes())
        if isinstance(said, dict):
            meta.write_text(json.dumps(said | {"checksum": checkpoints.checksum_of(said)}))
    if (manifest := file.parent / episodes.MANIFEST).exists():
        said = json.loads(manifest.read_text())
        for entry in said["arrays"].values() if file != manifest else ():
            if entry["file"] == file.name:
                entry["sha256"] = digest(file)
        if isinstance(said, dict):
            manifest.write_text(json.dumps(said | {"checksum": episodes._own_checksum(said)}))


def truncated(draw: random.Random, file: Path, twin: Path) -> str:
    size = draw.randrange(file.stat().st_size)
    os.truncate(file, size)
    return f"cut to {size} bytes"


def flipped(draw: random.Random, file: Path, twin: Path) -> str:
    data = bytearray(file.read_bytes())
    at, bit = draw.randrange(len(data)), draw.randrange(8)
    before = bytes(data[max(0, at - 20) : at + 20])
    data[at] ^= 1 << bit
    file.write_bytes(data)
    return f"bit {bit} of byte {at} flipped, in {before!r}"


def swapped(draw: random.Random, file: Path, twin: Path) -> str:
    if "checkpoints" in file.parts and draw.random() < 0.3:
        shutil.rmtree(file.parent)
        shutil.copytree(twin.parent, file.parent)
        return f"its folder is that of {twin.parent}"
    shutil.copy(twin, file)
    return f"it is that of {twin.parent}"


def emptied(draw: random.Random, file: Path, twin: Path) -> str:
    file.write_bytes(b"" if draw.random() < 0.5 else b"\0" * file.stat().st_size)
    return f"{file.stat().st_size} zero bytes"


def missing(draw: random.Random, file: Path, twin: Path) -> str:
    if file.parent.name != "run" and draw.random() < 0.3:
        shutil.rmtree(file.parent)
        return "its folder was removed"
    file.unlink()
    return "it was removed"


OTHERS: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1.5,
    1e308,
    2**70,
    "",
    "abc",
    [],
    {},
    [[1]],
    {"a": 1},
    "\x1b[2J",
    [None],
    "ü☃",
)


def changed(draw: random.Random, file: Path, put: Callable[[Any], Any]) -> str:
    """Replace a value anywhere in a JSON or YAML file; the text is written as it stands where ``put`` gives ``Raw``."""
    text = file.read_text()
    lines = text.splitlines() if file.suffix == ".jsonl" else [text]
    at = draw.randrange(len(lines))
    value = yaml.safe_load(text) if file.suffix == ".yaml" else json.loads(lines[at])
    places = list(_places(value))
    holder, key, path = draw.choice(places)
    before, holder[key] = holder[key], put(holder[key])
    told = f"{path}: {str(before)[:60]!r} became {str(holder[key])[:60]!r}"
    raw = holder[key] if isinstance(holder[key], Raw) else None
    if raw is not None:
        holder[key] = "RAW"
    lines[at] = yaml.safe_dump(value) if file.suffix == ".yaml" else json.dumps(value)
    if raw is not None:
        lines[at] = lines[at].replace('"RAW"', raw).replace("RAW", raw)
    file.write_text("\n".join(lines) + "\n")
    if draw.random() < 0.5 and raw is None:
        with contextlib.suppress(TypeError, KeyError, AttributeError):
            fit(file)
    return told


class Raw(str):
    """Text that is no value of JSON."""


def _places(value: Any, path: str = "") -> Iterator[tuple[Any, Any, str]]:
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key, f"{path}.{key}"
        yield from _places(value[key], f"{path}.{key}")


def types(draw: random.Random, file: Path, twin: Path) -> str:
    return changed(draw, file, lambda old: draw.choice([one for one in OTHERS if type(one) is not type(old)]))


def nested(draw: random.Random, file: Path, twin: Path) -> str:
    depth = draw.choice([20, 90, 400, 2000, 100_000])
    opening, closing = draw.choice([("[", "]"), ('{"a": ', "}"), ("[", "")])
    return changed(draw, file, lambda old: Raw(opening * depth + ("1" + closing * depth if closing else "")))


def nan(draw: random.Random, file: Path, twin: Path) -> str:
    bad = draw.choice([math.nan, math.inf, -math.inf])
    if file.suffix == ".safetensors":
        weights = safetensors.torch.load(file.read_bytes())
        name = draw.choice(sorted(weights))
        weights[name].view(-1)[draw.randrange(weights[name].numel())] = bad
        file.write_bytes(safetensors.torch.save(weights))
    elif file.suffix == ".pt":
        state = torch.load(file, weights_only=True)
        number, name = draw.choice(sorted(state["optimizer"]["state"])), draw.choice(["exp_avg", "exp_avg_sq"])
        state["optimizer"]["state"][number][name].view(-1)[0] = bad
        torch.save(state, file)
    else:
        return changed(draw, file, lambda old: bad)
    fit(file)
    return f"{name} holds {bad}, with checksums that fit"


def links(draw: random.Random, file: Path, twin: Path) -> str:
    outside = (
        file.parents[len(file.parts) - len(base("x").parent.parent.parts) - 2] / "outside"
    )  # beside the trial's folder
    kind = draw.choice(["same", "twin", "endless", "itself", "folder", "nowhere", "pipe", "parent"])
    if kind == "parent":
        shutil.copytree(file.parent, outside)
        shutil.rmtree(file.parent)
        file.parent.symlink_to(outside)
        return f"its folder is a link to a copy in {outside}"
    shutil.copy(file if kind == "same" else twin, outside)
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    else:
        there = {"endless": "/dev/zero", "itself": file, "folder": file.parent, "nowhere": "no/such"}
        file.symlink_to(there.get(kind, outside))
    return f"it is a link or a pipe: {kind}"


def sizes(draw: random.Random, file: Path, twin: Path) -> str:
    most = draw.choice([1 << 18, 1 << 27, 1 << 32, 1 << 40])
    if file.suffix in (".json", ".yaml") and draw.random() < 0.7:
        huge: list[Any] = [2**62, 10**30, -(2**63), [2**40] * 3, [1] * 100_000, "a" * (1 << 20), Raw("9" * 5000), 1e300]
        return changed(draw, file, lambda old: draw.choice(huge))
    if file.suffix == ".safetensors" and draw.random() < 0.5:
        file.write_bytes((2 ** draw.choice([31, 40, 62])).to_bytes(8, "little") + file.read_bytes()[8:])
        fit(file)
        return "its header says that it is huge, with checksums that fit"
    os.truncate(file, most)
    return f"{most:,} bytes, most of them not there"


CODE = """
from pathlib import Path
Path(MARKER).touch()
import gymnasium as gym
class Anything(gym.Env):
    def __init__(self, *args, **kwargs):
        Path(MARKER).touch()
def anything(*args, **kwargs):
    Path(MARKER).touch()
gym.register("Any-v0", Anything)
"""


class Payload:
    """What unpickling would execute."""

    def __reduce__(self) -> Any:
        return os.system, (f"touch {ROOT / 'marker'}",)


def code(draw: random.Random, file: Path, twin: Path) -> str:
    marker = ROOT / "marker"
    top = ROOT / file.relative_to(ROOT).parts[0] / "here"
    (top / "stranger.py").write_text(CODE.replace("MARKER", repr(str(marker))))
    if file.suffix in (".pt", ".safetensors", ".bin"):
        torch.save({"optimizer": Payload(), "batches": Payload()}, file)
        fit(file)
        return "it executes something when it is unpickled, with checksums that fit"
    config = yaml.safe_load(file.read_text())
    if draw.random() < 0.15:
        tag = draw.choice([f"object/apply:os.system ['touch {marker}']", "name:stranger.Anything"])
        file.write_text(f"a: !!python/{tag}\n{file.read_text()}")
        return f"it has a YAML tag that names {tag}"
    named: dict[str, dict[str, Any]] = {
        "subprocess.Popen": {"args": f"touch {marker}", "shell": True},
        "os.system": {"command": f"touch {marker}"},
        "builtins.exec": {"source": f"open({str(marker)!r}, 'w')"},
        "stranger.Anything": {},
        "stranger.anything": {},
    }
    sections = [key for key, value in config.items() if isinstance(value, dict)]
    hostile = [(key, {"_target_": name, **more}) for key in [*sections, "hydra"] for name, more in named.items()]
    for one in ("stranger:Any-v0", "worldmodels:stranger:Any-v0", "stranger:1"):
        hostile += [("env", {"id": one}), ("env", {"kwargs": {"env_id": one}}), ("encoder", {"run": one})]
    hostile += [("task", {"policy": "stranger:anything"}), ("env", {"id": "${oc.env:HOME}"})]
    key, value = draw.choice(hostile)
    file.write_text(yaml.safe_dump(config | {key: {**(config.get(key) or {}), **value}}))
    return f"{key}={value}"


FAULTS: dict[str, tuple[Callable[[random.Random, Path, Path], str], str]] = {  # and the files they can be in
    "truncated": (truncated, ""),
    "flipped": (flipped, ""),
    "swapped": (swapped, ""),
    "emptied": (emptied, ""),
    "missing": (missing, ""),
    "types": (types, r"json|yaml"),
    "nested": (nested, r"json|yaml"),
    "nan": (nan, r"json|safetensors|pt$"),
    "links": (links, ""),
    "sizes": (sizes, ""),
    "code": (code, r"yaml|safetensors|pt$|bin$"),
}


def damaged(fault: str, draw: random.Random, number: int, folder: Path) -> list[Trial]:
    """Damage a file of a run or of its data, and use it."""
    of = draw.choice(["world", "world", "task", "agent"])
    shutil.copytree(base(of), folder)
    spoil, where = FAULTS[fault]
    targets = [pattern for pattern in TARGETS if re.search(where, pattern) and list(folder.glob(pattern))]
    while True:
        target = draw.choice(targets)
        files, twins = sorted(folder.glob(target)), sorted(base(f"{of}2").glob(target))
        file = draw.choice([files[-1], draw.choice(files)])  # the newest checkpoint is the one that is read
        names = [one for one in TARGETS[target] if one != "report" or of == "world"]
        name = draw.choices(names, [0.2 if one == "rollout" else 1 for one in names])[0]  # which takes far longer
        if done := spoil(draw, file, twins[files.index(file)]):
            break
    reference = undamaged(of, name)
    outside = folder.parent / "outside"
    before = digest(outside) if outside.is_file() else None
    ended = attempt(to_do(of, name), folder, bounded)
    result = verdict(ended, results(folder, name, ended) == reference)
    if before is not None and digest(outside) != before:
        result = "lost"
    what = f"{name} of {of}, {file.relative_to(folder)}: {done}"
    return [Trial(result, what, "" if result in GOOD else said(ended))]


# Values.

VALUES = (
    *"-1 0 1 2 0.5 -0.5 1e308 -1e308 nan inf -inf 1e-320 2147483648 1180591620717411303424 1_000 0x10".split(),
    *"abc [] {} null true false [1,abc] [[1,2],[3]] {a:1} [-1,0] [null] [16,16] [0,0] '0' 1:2 [ ' ??? .. a/b % {}{}".split(),
    *("''", "'ü☃'", "' '", "'\x1b[2J'", "'a\nb'", "${nothing}", "${seed}", "${oc.env:HOME}", "${", "x" * 3000),
    *("[" * 40 + "]" * 40, "[" * 2000 + "]" * 2000, "{a:" * 40 + "1" + "}" * 40),
)
BY_WORDS = ("run", "experiment", "size", "jobs", "trust", "core", "encoder", "task", "objective", "env")  # Hydra's own


def leaves(config: Any, prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def compose(name: str) -> None:
    """Keep a config as Hydra composes it, so that trials need not."""
    command, *words = OPTIONS[name]
    prepare = register if command == "train" else agents.register_agents
    prepare(words)
    _worldmodels.register()
    found: list[DictConfig] = []
    launch._hydra([*words, "run=out"], lambda config: found.append(config) or 0.0, command)  # type: ignore[func-returns-value]
    COMPOSED[name] = found[0]


def trained(name: str, *words: str) -> int:
    """What the command does with these words after it has composed its config."""

    def work() -> None:
        config, path = COMPOSED[name], Path("out")
        run, show = (
            (train_run, launch.show_run)
            if OPTIONS[name][0] == "train"
            else (agents.train_agent_run, agents.show_agent_run)
        )
        try:
            ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(list(words)), config)
            path.mkdir()
            show(run(plain(config), path))
        except Exception as error:
            with contextlib.suppress(OSError):
                path.rmdir()
            raise launch.in_one_line(error, OPTIONS[name][0]) or error from None

    return like_command(OPTIONS[name][0], work)


def enough(folder: Path) -> bool:
    """Whether a run trains on and on, as it was told."""
    file = folder / "out" / "metrics.jsonl"
    return file.is_file() and file.read_bytes().count(b"\n") > 12


def judged(ended: Ended, folder: Path, what: str, run: str = "out", names: str = "") -> Trial:
    """A refused command leaves no folder behind, one that ended well has finite numbers, one that trains on is as asked."""
    result = verdict(ended, not unfinite(folder) if ended.code == 0 else None, names)
    if result == "refused" and (folder / run).exists() and "not finite" not in ended.err:
        result = "lost"
    return Trial(result, what, "" if result in GOOD else said(ended) + f"\nfolder: {(folder / run).exists()}")


def option(of: str, draw: random.Random, number: int, folder: Path) -> list[Trial]:
    """Give an option of train or train-agent a value."""
    folder.mkdir()
    if of in ("world", "rules"):
        shutil.copytree(base("world") / "data", folder / "data")
    keys = list(leaves(OmegaConf.to_container(COMPOSED[of])))
    keys += [key for key in BY_WORDS if key not in keys]
    key, value = keys[number % len(keys)], draw.choice(VALUES)
    word = f"{key}={value}" if number else "seed=0"  # the first must survive
    work = command(*OPTIONS[of], "run=out", word) if number and key in BY_WORDS else partial(trained, of, word)
    ended = attempt(work, folder, bounded, enough=partial(enough, folder))
    if ended.code is None and (folder / "out" / CONFIG).exists():
        ended = ended._replace(code=0)  # it has begun to train, and goes on as it was told
    one = judged(ended, folder, f"worldmodels {' '.join(OPTIONS[of])} {word}")
    return [one if number or one.verdict == "survived" else one._replace(verdict="lost", printed=said(ended))]


WORDS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (  # commands with key=value words, and their keys
    (
        ("collect", "env=CartPole-v1", "path=out", "episodes=2", "steps=4"),
        tuple(vars(cli.CollectArguments())),
    ),
    (("evaluate", "run=run"), tuple(vars(cli.EvaluateArguments()))),
    (("evaluate-agent", "run=run", "episodes=2"), (*vars(cli.EvaluateAgentArguments()), "env.delay", "env.num_cues")),
    (("rollout", "run=run"), tuple(vars(cli.RolloutArguments()))),
    (("compare", "runs=[run]"), tuple(vars(cli.CompareArguments()))),
    (("report", "run"), ("--compare", "--out", "runs", "compare", "out")),
    (("check", "CartPole-v1"), ("env", "core")),
)


def word(of: str, draw: random.Random, number: int, folder: Path) -> list[Trial]:
    """Give an option of the other commands a value."""
    pairs = [(words, key) for words, keys in WORDS for key in keys]
    words, key = pairs[number % len(pairs)]
    kind = "agent" if "agent" in words[0] else "world"
    shutil.copytree(base(kind), folder)
    value = draw.choice(VALUES)
    given = [one for one in words if not one.startswith(f"{key}=")] if words[0] != "check" else ["check"]
    ended = attempt(command(*given, f"{key}={value}"), folder, bounded)
    return [judged(ended, folder, f"worldmodels {' '.join(given)} {key}={value}"[:300])]


# Environments.

ERRORS = (
    KeyError,
    RuntimeError,
    ZeroDivisionError,
    OSError,
    MemoryError,
    AssertionError,
    StopIteration,
    NotImplementedError,
)
PLACES = ("constructor", "reset", "second reset", "step", "close")
BOX, THREE = spaces.Box(0, 1, (4,), np.float32), spaces.Discrete(3)


class Bad(gym.Env):
    """An environment that does one thing badly: at one place it gives what ``does(usual)`` gives."""

    def __init__(self, place: str, does: Callable[[Any], Any], render_mode: str | None = None):
        self.place, self.does, self.steps, self.resets = place, does, 0, 0
        self.observation_space, self.action_space = self._at("observation_space", BOX), self._at("action_space", THREE)
        self._at("constructor", None)

    def _at(self, place: str, usual: Any) -> Any:
        return self.does(usual) if place == self.place else usual

    def _observation(self) -> Any:
        usual = (
            self.np_random.random(4, np.float32) if self.observation_space is BOX else self.observation_space.sample()
        )
        return self._at("observation", usual)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """See Gymnasium."""
        super().reset(seed=seed)
        self.steps, self.resets = 0, self.resets + 1
        if self.resets == 2:
            self._at("second reset", None)
        return self._at("reset", (self._observation(), self._at("info", {})))

    def step(self, action: Any) -> Any:
        """See Gymnasium."""
        self.steps += 1
        ended = self._at("terminated", self.steps >= 5)
        step = (self._observation(), self._at("reward", 1.0), ended, self._at("truncated", False), self._at("info", {}))
        return self._at("step", step)

    def close(self) -> None:
        """See Gymnasium."""
        self._at("close", None)


def raising(error: type[Exception]) -> Callable[[Any], Any]:
    def do(usual: Any) -> Any:
        raise error("a fault of the campaign")

    return do


def slowly(usual: Any) -> Any:
    time.sleep(0.5)
    return usual


_counter = iter(range(1 << 40))
GIVES: dict[str, dict[str, Callable[[Any], Any]]] = {
    "reset": {
        "None": lambda usual: None,
        "no-info": lambda usual: usual[0],
        "three": lambda usual: (*usual, 1),
        "info-None": lambda usual: (usual[0], None),
        "slow": slowly,
    },
    "step": {
        "None": lambda usual: None,
        "four": lambda usual: usual[:4],
        "six": lambda usual: (*usual, 1),
        "empty": lambda usual: (),
    },
    "observation": {
        "None": lambda usual: None,
        "wrong-shape": lambda usual: np.zeros(7, np.float32),
        "changing-shape": lambda usual: np.zeros(1 + next(_counter) % 5, np.float32),
        "float64": lambda usual: usual.astype(float),
        "text": lambda usual: "abc",
        "list": lambda usual: usual.tolist(),
        "objects": lambda usual: np.array([None] * 4),
        "NaN": lambda usual: np.full(4, np.nan, np.float32),
        "infinite": lambda usual: np.full(4, np.inf, np.float32),
        "outside": lambda usual: np.full(4, 99, np.float32),
        "number": lambda usual: 0.5,
        "dict": lambda usual: {"a": usual},
        "read-only": lambda usual: np.broadcast_to(usual, (4,)),
    },
    "reward": {
        "NaN": lambda usual: math.nan,
        "infinite": lambda usual: math.inf,
        "None": lambda usual: None,
        "text": lambda usual: "abc",
        "two": lambda usual: np.ones(2),
        "array": lambda usual: np.ones(1),
        "huge": lambda usual: 1e308,
        "complex": lambda usual: 1j,
        "tensor": lambda usual: torch.ones(()),
    },
    "terminated": {
        "None": lambda usual: None,
        "text": lambda usual: "yes",
        "array": lambda usual: np.array([usual]),
        "integer": lambda usual: int(usual),
        "NaN": lambda usual: math.nan,
        "never": lambda usual: False,
        "at-once": lambda usual: True,
    },
    "truncated": {"None": lambda usual: None, "text": lambda usual: "no", "at-once": lambda usual: True},
    "info": {
        "None": lambda usual: None,
        "list": lambda usual: [1],
        "changing-shape": lambda usual: {"a": np.zeros(1 + next(_counter) % 5)},
        "changing-type": lambda usual: {"a": [1, "abc", None, 2.5][next(_counter) % 4]},
        "function": lambda usual: {"a": print},
        "slash": lambda usual: {"a/b": np.ones(2), "..": np.ones(2)},
        "names": lambda usual: {"final_obs": 1, "success": "abc", "invalid": None, "episode": 3},
        "integers": lambda usual: {1: 2, None: 3},
    },
    "observation_space": {
        "None": lambda usual: None,
        "MultiBinary": lambda usual: spaces.MultiBinary(3),
        "Tuple": lambda usual: spaces.Tuple((BOX, THREE)),
        "Text": lambda usual: spaces.Text(5),
        "Sequence": lambda usual: spaces.Sequence(BOX),
        "Graph": lambda usual: spaces.Graph(BOX, None),
        "OneOf": lambda usual: spaces.OneOf((BOX, THREE)),
        "Dict-of-odd": lambda usual: spaces.Dict({"a": spaces.Text(3), "b": spaces.Dict({"c": THREE})}),
        "Dict-empty": lambda usual: spaces.Dict({}),
        "Dict-image": lambda usual: spaces.Dict({"image": THREE, "mission": BOX}),
        "Dict-views": lambda usual: spaces.Dict({"views": BOX, "positions": BOX, "mask": BOX}),
        "Discrete-from-5": lambda usual: spaces.Discrete(3, start=5),
        "scalar": lambda usual: spaces.Box(0, 1, ()),
        "no-numbers": lambda usual: spaces.Box(0, 1, (0,)),
        "four-axes": lambda usual: spaces.Box(0, 1, (2, 3, 4, 5)),
        "int64": lambda usual: spaces.Box(-(2**60), 2**60, (3,), np.int64),
        "float16": lambda usual: spaces.Box(0, 1, (3,), np.float16),
        "unbounded": lambda usual: spaces.Box(-np.inf, np.inf, (3,)),
        "small-picture": lambda usual: spaces.Box(0, 255, (3, 3, 3), np.uint8),
        "MultiDiscrete-2": lambda usual: spaces.MultiDiscrete([[2, 3], [4, 5]]),
        "no-space": lambda usual: 5,
    },
    "action_space": {
        "None": lambda usual: None,
        "MultiBinary": lambda usual: spaces.MultiBinary(3),
        "Tuple": lambda usual: spaces.Tuple((BOX, THREE)),
        "Text": lambda usual: spaces.Text(5),
        "Dict": lambda usual: spaces.Dict({"a": THREE}),
        "Discrete-from-1": lambda usual: spaces.Discrete(3, start=1),
        "Discrete-of-1": lambda usual: spaces.Discrete(1),
        "unbounded": lambda usual: spaces.Box(-np.inf, np.inf, (2,)),
        "two-axes": lambda usual: spaces.Box(-1, 1, (2, 2)),
        "integers": lambda usual: spaces.Box(0, 5, (2,), np.int32),
        "no-numbers": lambda usual: spaces.Box(0, 1, (0,)),
    },
}
ENVIRONMENTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    **{
        f"{error.__name__}-in-{place.replace(' ', '-')}": (place, raising(error))
        for place in PLACES
        for error in ERRORS
    },
    **{f"{place}-{name}": (place, does) for place, gives in GIVES.items() for name, does in gives.items()},
    "no-limit": ("nowhere", lambda usual: usual),
    "no-limit-never": ("terminated", lambda usual: False),
    "nothing-bad": ("nowhere", lambda usual: usual),
}


def env_id(name: str) -> str:
    return f"Bad/{name}-v0"


def register_environments() -> None:
    for name, (place, does) in ENVIRONMENTS.items():
        limit = None if name.startswith("no-limit") else 8
        gym.register(env_id(name), partial(Bad, place, does), max_episode_steps=limit)


def environment(of: str, draw: random.Random, number: int, folder: Path) -> list[Trial]:
    """Use a badly behaved environment."""
    folder.mkdir()
    name = env_id(draw.choice([*ENVIRONMENTS]) if FEWER else [*ENVIRONMENTS][number % len(ENVIRONMENTS)])
    collecting = ("collect", f"env={name}", "path=out", "episodes=3", f"processes={draw.choice(['true', 'false'])}")
    what, work = {
        "collect": (" ".join(collecting), command(*collecting)),
        "train": (f"{' '.join(OPTIONS['vector'])} env.id={name}", partial(trained, "vector", f"env.id={name}")),
        "agent": (f"{' '.join(OPTIONS['bare'])} env.id={name}", partial(trained, "bare", f"env.id={name}")),
        "check": (f"check {name}", command("check", name)),
    }[of]
    ended = attempt(work, folder, quiet)
    return [
        judged(ended, folder, f"worldmodels {what}", names=f"{name}|environment|observation|action|reward|episodes")
    ]


# Machines that have too little, and others at work.


def two_at_once(of: str, draw: random.Random, number: int, folder: Path) -> list[Trial]:
    """The same command twice in one folder, the second a moment later; one of them does it, the other may be refused."""
    folder.mkdir()
    which = list(KILLED)[number % len(KILLED)]
    reference = undisturbed(which)
    first = begin(command(*KILLED[which]), folder)
    moment = draw.uniform(0, 0.9 * reference["seconds"])
    time.sleep(moment)
    second = begin(command(*again(which, folder)), folder)
    ended = [wait(first), wait(second)]
    what = f"worldmodels {' '.join(KILLED[which])}, and again after {moment:.2f} s"
    verdicts = [verdict(one) for one in ended]
    if not set(verdicts) <= {"survived", "refused"}:
        result = next(one for one in verdicts if one not in GOOD)
    elif not differences(reference["contents"], contents(folder)):
        result = "survived"  # of two sweeps each may have been refused a run, which the other then made
    else:
        result = "silent" if "survived" in verdicts else "lost"
    return [Trial(result, what, "" if result in GOOD else "\n".join(map(said, ended)))]


def starved(of: str, draw: random.Random, number: int, folder: Path) -> list[Trial]:
    """Let a command write files of so many bytes only, or take so much memory only; then have it again without."""
    folder.mkdir()
    which = list(KILLED)[number % len(KILLED)]
    reference = undisturbed(which)
    if of == "disk":
        most = round(10 ** draw.uniform(0, 6.5))
        prepare, told = partial(limited, resource.RLIMIT_FSIZE, most), f"with files of at most {most:,} bytes"
    else:
        most = round(10 ** draw.uniform(0, 2.5))
        prepare, told = partial(memory, most), f"with at most {most:,} MB more"
    ended = attempt(command(*KILLED[which]), folder, prepare)
    what = f"worldmodels {' '.join(KILLED[which])}, {told}"
    result = verdict(ended)
    if result == "refused":
        second = attempt(command(*again(which, folder)), folder)
        if second.code != 0:
            return [Trial("lost", f"{what}, then again without", said(ended) + said(second))]
    # With little memory PyTorch may choose other kernels, whose last digits differ.
    if of == "disk" and result in GOOD and (wrong := differences(reference["contents"], contents(folder))):
        return [Trial("silent", f"{what}: {wrong} differ", said(ended))]
    return [Trial(result, what, "" if result in GOOD else said(ended))]


NOWHERE = ("file/x", "/proc/x", "/dev/null/x", "closed/x")
UNWRITABLE = (
    *(f"{' '.join(BASES['world'])} {one}" for one in ("run={}", "run=out data.dir={}")),
    *(f"{' '.join(BASES[name])} run={{}}" for name in ("task", "agent")),
    f"train -m {' '.join(ADDING)} core=gru seed=0,1 jobs=1 run={{}}",
    *(
        "collect env=CartPole-v1 path={} episodes=2",
        "report run --out {}",
        "evaluate run={}",
        "evaluate run=run data={}",
    ),
    *("train resume={}", "compare runs=[{}]", "rollout run={}"),
)


def unwritable(of: str, draw: random.Random, number: int, folder: Path) -> list[Trial]:
    """Name places where nothing can be written."""
    shutil.copytree(base("world"), folder)
    (folder / "file").touch()
    (folder / "closed").mkdir()
    (folder / "closed").chmod(stat.S_IRUSR | stat.S_IXUSR)
    there = [one for one in NOWHERE if os.geteuid() or one != "closed/x"]  # root can write there
    place = there[number // len(UNWRITABLE) % len(there)]
    words = UNWRITABLE[number % len(UNWRITABLE)].replace("{}", place).split()
    ended = attempt(command(*words), folder)
    result = verdict(ended)
    result = "silent" if result == "survived" else result
    if result == "refused" and (folder / "out").exists():
        result = "lost"
    return [Trial(result, f"worldmodels {' '.join(words)}", "" if result in GOOD else said(ended))]


def _no_input() -> None:
    os.close(0)


def _no_output() -> None:
    os.close(1)
    sys.stdout = None  # type: ignore[assignment]


def _no_errors() -> None:
    os.close(2)
    sys.stderr = None  # type: ignore[assignment]


def _closed_pipe() -> None:
    there, here = os.pipe()
    os.dup2(here, 1)
    os.close(there)


def _ascii() -> None:
    sys.stdout = open(1, "w", encoding="ascii", closefd=False)
    sys.stderr = open(2, "w", encoding="ascii", errors="backslashreplace", closefd=False)


def _narrow() -> None:
    os.environ |= {"COLUMNS": "1", "TERM": "dumb", "NO_COLOR": "1"}


ASKED = (
    *("train resume=run", "evaluate run=run", "compare runs=[run]", "report run", "cores", "envs", "check core=gru"),
    *("collect env=CartPole-v1 path=out episodes=2", "", "--version", "collect --help", "train --cfg job", "nothing"),
)
TERMINALS: dict[str, tuple[Callable[[], None], ...]] = {
    "terminal": (_no_output, _no_errors, _no_input, _ascii, _narrow),
    "pipe": (_closed_pipe,),
}


def without_terminal(of: str, draw: random.Random, number: int, folder: Path) -> list[Trial]:
    """Take a command's output, errors or input away."""
    shutil.copytree(base("world"), folder)
    words = ASKED[number % len(ASKED)].split()
    prepare = TERMINALS[of][number // len(ASKED) % len(TERMINALS[of])]
    ended = attempt(command(*words), folder, prepare)
    if prepare is _closed_pipe and (ended.code, ended.err) == (1, ""):  # as other programs end
        ended = ended._replace(code=0)
    if prepare is _no_errors and ended.code == 2:
        ended = ended._replace(err="worldmodels: unheard\n")
    what = f"worldmodels {' '.join(words)}, {prepare.__name__.strip('_').replace('_', ' ')}"
    return [Trial(result := verdict(ended), what, "" if result in GOOD else said(ended))]


# The campaign.


class Row(NamedTuple):
    """A kind of fault: what the table calls it, who makes a trial of what, and how many there are in full and in short."""

    told: str
    make: Callable[[str, random.Random, int, Path], list[Trial]]
    of: str
    full: int
    short: int


ROWS = {
    "kill-train": Row("killed: train, a world model", killed, "train", 20, 1),
    "kill-task": Row("killed: train, a task", killed, "task", 12, 0),
    "kill-agent": Row("killed: train-agent", killed, "agent", 16, 1),
    "kill-collect": Row("killed: collect", killed, "collect", 10, 1),
    "kill-sweep": Row("killed: a sweep", killed, "sweep", 8, 0),
    "truncated": Row("a file is cut short", damaged, "truncated", 95, 2),
    "flipped": Row("one bit is flipped", damaged, "flipped", 150, 3),
    "swapped": Row("a file of another seed", damaged, "swapped", 95, 2),
    "emptied": Row("a file is empty or zeros", damaged, "emptied", 80, 2),
    "missing": Row("a file is missing", damaged, "missing", 80, 2),
    "types": Row("values of other types", damaged, "types", 150, 3),
    "nested": Row("nested without end", damaged, "nested", 80, 2),
    "nan": Row("weights, data or scores that are not finite", damaged, "nan", 80, 2),
    "links": Row("links and pipes in place of files", damaged, "links", 80, 2),
    "sizes": Row("sizes beyond all measure", damaged, "sizes", 80, 2),
    "code": Row("code is named or pickled", damaged, "code", 120, 3),
    "options-world": Row("values: train, a world model", option, "world", 500, 6),
    "options-rules": Row("values: train, rules and slot attention", option, "rules", 400, 4),
    "options-task": Row("values: train, a task", option, "task", 400, 4),
    "options-views": Row("values: train, a world seen in parts", option, "views", 300, 2),
    "options-agent": Row("values: train-agent", option, "agent", 400, 4),
    "options-words": Row("values: all other commands", word, "", 300, 5),
    "env-collect": Row("environments: collect", environment, "collect", len(ENVIRONMENTS), 3),
    "env-train": Row("environments: train", environment, "train", len(ENVIRONMENTS), 3),
    "env-agent": Row("environments: train-agent", environment, "agent", len(ENVIRONMENTS), 3),
    "env-check": Row("environments: check", environment, "check", len(ENVIRONMENTS), 3),
    "twice": Row("two commands on one folder", two_at_once, "", 20, 1),
    "disk": Row("files may not grow (a full disk)", starved, "disk", 30, 1),
    "memory": Row("memory is short", starved, "memory", 20, 1),
    "unwritable": Row("nothing can be written there", unwritable, "", 36, 2),
    "terminal": Row("no terminal, no output, no input", without_terminal, "terminal", 65, 2),
    "pipe": Row("a pipe that was closed", without_terminal, "pipe", 13, 2),
}


def trial(seed: int, row: str, number: int) -> tuple[list[Trial], float]:
    """Make one trial, in a folder that is removed after it; also says how long it took."""
    draw, since = random.Random(f"{seed} {row} {number}"), time.monotonic()
    try:
        with scratch() as folder:
            trials = ROWS[row].make(ROWS[row].of, draw, number, folder)
    except Exception:
        trials = [Trial("traceback", "the campaign itself failed", traceback.format_exc())]
    (ROOT / "marker").unlink(missing_ok=True)
    return [Trial(*(part.replace(str(ROOT), "") for part in one)) for one in trials], time.monotonic() - since


def warm(needed: set[str]) -> None:
    """Do once, before the first trial, what every process would do for itself: fonts, and composing configs."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in needed:
        compose(name)
    register_environments()
    figure = matplotlib.pyplot.figure()
    figure.text(0, 0, "a")
    figure.savefig(ROOT / "warm.png")
    matplotlib.pyplot.close(figure)
    gc.collect()
    gc.freeze()  # or every process copies the memory that its first collection visits


def campaign(seed: int, short: bool, only: str | None) -> dict[str, Any]:
    """Make all trials and count."""
    began = time.monotonic()
    rows = {name: row for name, row in ROWS.items() if only is None or only.partition("/")[0] == name}
    if not rows:
        raise SystemExit(f"--only {only}: there is no such row; there are {', '.join(ROWS)}")
    asked = [(name, number) for name, row in rows.items() for number in range(row.short if short else row.full)]
    if only and "/" in only:
        asked = [(only.partition("/")[0], int(only.partition("/")[2]))]
    makers = {row.make for row in rows.values()}
    warm({*OPTIONS} if {option, environment} & makers else set())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    counts = {name: dict.fromkeys(("tried", *VERDICTS, "seconds"), 0) for name in rows}
    failures: list[dict[str, Any]] = []
    pools = partial(ProcessPoolExecutor, cores, multiprocessing.get_context("fork"))
    if {damaged, option, word, unwritable, without_terminal} & makers:
        with pools() as pool:
            list(pool.map(make_base, BASES))
    bar = progress_bar("trials")
    task = bar.add_task("", total=len(asked), note="")
    while asked:
        with pools() as pool, bar:
            futures = [pool.submit(trial, seed, *one) for one in asked]
            for future in futures:
                name, number = asked[0]
                try:
                    trials, seconds = future.result()
                except BrokenProcessPool:  # the others go on in new processes
                    trials, seconds = [Trial("traceback", "a process of the campaign itself was ended")], 0
                del asked[0]
                bar.update(task, advance=1, note=name)
                counts[name]["seconds"] = round(counts[name]["seconds"] + seconds, 1)
                for one in trials:
                    counts[name]["tried"] += 1
                    counts[name][one.verdict] += 1
                    if one.verdict not in GOOD:
                        repeat = f"reliability.py --seed {seed}{' --short' * short} --only {name}/{number}"
                        failures.append({"row": name, "number": number, "repeat": repeat, **one._asdict()})
                    if one.verdict not in GOOD or (only and "/" in only):
                        print(f"{name}/{number} {one.verdict}: {one.what[:300]!r}", file=sys.stderr, flush=True)
                if trials[0].what.startswith("a process of the campaign"):
                    break
    about = {
        "seed": seed,
        "short": short,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": cores,
    }
    return {
        **about,
        "system": platform.system(),
        "seconds": round(time.monotonic() - began),
        "rows": counts,
        "failures": failures,
    }


def markdown(found: dict[str, Any]) -> str:
    """The table of a campaign."""
    lines = [f"| fault | tried | {' | '.join(VERDICTS)} |", f"| --- |{' ---: |' * (1 + len(VERDICTS))}"]
    total = {key: sum(row[key] for row in found["rows"].values()) for key in ("tried", *VERDICTS)}
    for name, row in [*found["rows"].items(), ("all", total)]:
        told = ROWS[name].told if name in ROWS else name
        lines.append(f"| {told} | {' | '.join(f'{row[key]:,}' for key in ('tried', *VERDICTS))} |")
    about = f"Seed {found['seed']}, {found['cores']} cores, {found['seconds'] / 60:.0f} minutes, {found['system']}, "
    return "\n".join([*lines, "", f"{about}Python {found['python']}, PyTorch {found['torch']}."])


def main() -> int:
    """Make the campaign, print its table, and write what failed; 1 if anything did."""
    global ROOT, FEWER
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", action="store_true", help="a few trials of each kind")
    parser.add_argument("--only", help="one row, or one trial of it, as kill-train or flipped/17")
    parser.add_argument("--out", type=Path, help="where counts and failures are written, as JSON")
    parser.add_argument(
        "--markdown", type=Path, metavar="RESULTS", help="put the table of a JSON into docs/reliability.md"
    )
    given = parser.parse_args()
    if given.markdown:
        table = markdown(json.loads(given.markdown.read_text()))
        before, _, rest = DOCUMENT.read_text().partition("<!-- table -->")
        after = rest.partition("<!-- end of table -->")[2]
        DOCUMENT.write_text(f"{before}<!-- table -->\n\n{table}\n\n<!-- end of table -->{after}")
        return 0
    FEWER = given.short
    out = given.out.absolute() if given.out else None
    with tempfile.TemporaryDirectory(prefix="worldmodels-reliability-") as folder:
        ROOT = Path(folder).resolve()
        os.environ |= {
            "HOME": folder,
            "XDG_STATE_HOME": f"{folder}/state",
            "MPLCONFIGDIR": f"{folder}/fonts",
            "TMPDIR": folder,
        }
        tempfile.tempdir = folder
        os.chdir(folder)
        found = campaign(given.seed, given.short, given.only)
        os.chdir("/")
    print(markdown(found))
    if out:
        out.write_text(json.dumps(found, indent=1))
    return int(bool(found["failures"]))


if __name__ == "__main__":
    raise SystemExit(main())
