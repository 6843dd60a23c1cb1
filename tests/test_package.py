import ast
import configparser
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from worldmodels.cli import main

from .conftest import ROOT

FOLDERS = {"worldmodels": "worldmodels", "envs": "worldmodels.envs", "agents": "worldmodels.agents"}


def modules():
    """Every module of ours and what it imports, inside functions too."""
    trees = {}
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            trees[name] = (name.split(".") if is_package else name.split(".")[:-1], ast.parse(path.read_text()))
    found = {}
    for name, (base, tree) in trees.items():
        imports = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imports |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                start = base[: len(base) - node.level + 1] if node.level else []
                target = ".".join([*start, *([node.module] if node.module else [])])
                for alias in node.names:
                    inside = f"{target}.{alias.name}"
                    imports.add(inside if inside in trees else target)
        found[name] = imports
    return found


LAYERS = [
    {
        f"worldmodels.{name}"
        for name in (
            "errors",
            "core",
            "grouped",
            "attention",
            "metrics",
            "ranges",
            "repeated",
            "segmentation",
            "tracking",
        )
    },
    {"worldmodels.encoders", "worldmodels.losses", "worldmodels.cores", "worldmodels.data", "worldmodels.decoders"},
    {
        f"worldmodels.cores.{name}"
        for name in (
            "gnn",
            "nps",
            "rules",
            "gru",
            "lstm",
            "mlp",
            "rims",
            "scoff",
            "rmc",
            "s2rm",
            "entnet",
            "esbn",
            "ntm",
            "mnm",
            "cin",
            "op3",
            "transformer",
            "relation_network",
            "predinet",
        )
    },
    {
        f"worldmodels.data.{name}"
        for name in (
            "arrays",
            "episodes",
            "environments",
            "origin",
            "collect",
            "importers",
            "sequences",
            "views",
            "symbols",
            "relations",
            "babi",
            "babi_world",
            "cbt",
            "video",
            "intphys",
            "digits",
            "shapestacks",
        )
    },
    {"worldmodels.plugins", "worldmodels.models", "worldmodels.checkpoints", "worldmodels.check", "worldmodels.nn"},
    {
        f"worldmodels.models.{name}"
        for name in ("world_model", "views", "sequence", "memory_network", "video", "op3", "rpin", "picture")
    },
    {
        "worldmodels.ranking",
        "worldmodels.planning",
        "worldmodels.seeing",
        "worldmodels.logging",
        "worldmodels.training",
        "worldmodels.report",
    },
    {
        f"worldmodels.report.{name}"
        for name in ("figures", "tables", "transitions", "choices", "views", "video", "rules")
    },
    {"worldmodels.tasks"},
    {
        f"worldmodels.tasks.{name}"
        for name in (
            "transitions",
            "views",
            "adding",
            "arithmetic",
            "digits",
            "gridworld",
            "relations",
            "babi",
            "cbt",
            "recording",
            "segments",
            "video",
            "occluders",
            "stacks",
        )
    },
    {"worldmodels.config", "worldmodels.trust"},
    {"worldmodels.run"},
    {"worldmodels.launcher", "worldmodels.tune", "worldmodels.report.scoreboard", "worldmodels.report.overview"},
    {"worldmodels.launch"},
    {"worldmodels.report.scoreboard_pages"},
    {"worldmodels.cli"},
    {"worldmodels.__main__", "worldmodels"},
]


def test_imports_go_one_way():
    layer = {name: i for i, names in enumerate(LAYERS) for name in names}
    for name, imports in modules().items():
        if name.startswith(("worldmodels.envs", "worldmodels.agents")):
            continue
        assert name in layer, f"{name} has no place in the order of imports"
        for imported in imports & set(layer):
            same_level_is_fine = layer[imported] == layer[name] and imported not in ("worldmodels",)
            assert layer[imported] < layer[name] or same_level_is_fine, f"{name} imports {imported}"


def test_envs_know_nothing_of_models():
    theirs = {
        "minigrid",
        "ale_py",
        "PIL",
        "flatland",
        "pysc2",
        "s2clientprotocol",
        "absl",
        "google",
    }  # what they are made of
    allowed = {"torch", "numpy", "gymnasium", *theirs} | (sys.stdlib_module_names - {"pickle", "multiprocessing"})
    for name, imports in modules().items():
        if name.startswith("worldmodels.envs"):
            for imported in imports:
                ours = imported.startswith("worldmodels.envs")
                assert ours or imported.split(".")[0] in allowed, f"{name} imports {imported}"


def test_pure_modules_need_no_configuration_library():
    for name, imports in modules().items():
        users = (
            "worldmodels.config",
            "worldmodels.plugins",
            "worldmodels.run",
            "worldmodels.launch",
            "worldmodels.launcher",
            "worldmodels.tune",
            "worldmodels.cli",
            "worldmodels.agents.run",
        )
        if not name.startswith(users):
            assert not {i for i in imports if i.split(".")[0] in ("hydra", "omegaconf")}, name


def test_setup_lists_every_package():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = set(setup["options"]["packages"].split())
    there = {"worldmodels", *FOLDERS.values(), "worldmodels.configs", "worldmodels.configs.agents", "hydra_plugins"}
    for folder in FOLDERS:
        for init in (ROOT / folder).rglob("__init__.py"):
            there.add(".".join([FOLDERS[folder], *init.parent.relative_to(ROOT / folder).parts]))
    assert listed == there


def test_what_is_installed_is_ours_and_no_hint_names_another_project(capsys):
    """The public index has a project of the package's name, so nothing may ask for it there."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert setup["metadata"]["name"] == "structured-worldmodels"
    assert main(["--version"]) == 0 and capsys.readouterr().out.strip() == setup["metadata"]["version"]
    folders = [ROOT / name for name in (*FOLDERS, "configs", "docs", "tests", "benchmarks")]
    files = [
        *ROOT.glob("*.md"),
        *(path for folder in folders for end in ("py", "md", "yaml") for path in folder.rglob(f"*.{end}")),
    ]
    asks = re.compile(r"worldmodels\[[a-z]+\]|pip install (-U |--upgrade )?'?worldmodels")
    assert not [path for path in files if asks.search(path.read_text())]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Our wheel and the plug-in's, built from copies of what git knows."""
    out = tmp_path_factory.mktemp("wheels")
    copy = out / "source"
    copy.mkdir()
    for name in (
        "worldmodels",
        "envs",
        "agents",
        "configs",
        "hydra_plugins",
        "setup.cfg",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "MANIFEST.in",
    ):
        subprocess.run(["cp", "-r", str(ROOT / name), str(copy)], check=True)
    subprocess.run(["cp", "-r", str(ROOT / "tests" / "plugin"), str(out / "plugin")], check=True)
    built = []
    for source in (copy, out / "plugin"):
        command = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            str(out),
            str(source),
        ]
        subprocess.run(command, check=True, cwd=out, capture_output=True)
        built.append(max(out.glob("*.whl"), key=lambda path: path.stat().st_mtime))
    return built


def test_the_wheel_holds_every_configuration(wheels):
    inside = {name for name in zipfile.ZipFile(wheels[0]).namelist() if name.endswith(".yaml")}
    assert inside == {f"worldmodels/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yaml")}
    assert "worldmodels/py.typed" in zipfile.ZipFile(wheels[0]).namelist()


@pytest.fixture(scope="module")
def installed(wheels, tmp_path_factory):
    """An empty environment with the wheels alone, over the libraries of the one the tests run in."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "env", with_pip=False)
    site = next((folder / "env").glob("lib/python*/site-packages"))
    for wheel in wheels:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)]
        subprocess.run(command, check=True, capture_output=True)
    libraries = next(Path(sys.prefix).glob("lib/python*/site-packages"))
    # Appended after the wheels, and without this environment's own editable install of worldmodels.
    (site / "libraries.pth").write_text(f"import sys; sys.path.append({str(libraries)!r})\n")
    return folder / "env" / "bin" / "python"


@pytest.fixture
def users_folder(tmp_path):
    """A folder of a user with envs/ and agents/ and configs/ of their own, which must not get in the way."""
    for name in ("envs", "agents", "configs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('this is the user\\'s own package')\n")
    return tmp_path


def run(python, folder, *words):
    done = subprocess.run([str(python), *words], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_works_beside_a_users_own_envs_and_agents(installed, users_folder):
    code = "import worldmodels, worldmodels.envs, worldmodels.agents, worldmodels.configs as c; print(c.__file__)"
    assert str(installed.parents[1]) in run(installed, users_folder, "-W", "error", "-c", code)
    words = ["experiment=shapes", "core=gnn", "size=smoke", "run=runs/a"]
    out = run(installed, users_folder, "-m", "worldmodels", "train", *words)
    assert "latent copy" in out and (users_folder / "runs/a/figures/rollout.png").is_file()


def test_a_third_party_package_adds_an_environment_a_core_an_encoder_and_a_task(installed, users_folder):
    assert "Tiny/Lamp-v0" in run(installed, users_folder, "-m", "worldmodels", "envs")
    assert "running_mean" in run(installed, users_folder, "-m", "worldmodels", "cores")
    assert "all checks passed" in run(installed, users_folder, "-m", "worldmodels", "check", "Tiny/Lamp-v0")
    assert "all checks passed" in run(
        installed, users_folder, "-m", "worldmodels", "check", "core=tinyplugin:RunningMean"
    )
    assert "all checks passed" in run(installed, users_folder, "-m", "worldmodels", "check", "encoder=strips")
    words = [
        "env.id=Tiny/Lamp-v0",
        "core=running_mean",
        "core.rate=0.9",
        "core.slot_size=16",
        "encoder=strips",
        "encoder.strips=3",
        "size=cpu",  # which sets options that this encoder does not have
        "trainer.steps=3",
        "data.train.episodes=8",
        "data.test.episodes=8",
        "run=runs/tiny",
    ]
    assert "latent copy" in run(installed, users_folder, "-m", "worldmodels", "train", *words)
    words = ["task=recency", "task.length=3", "core=gru", "core.slot_size=8", "size=smoke", "run=runs/recency"]
    assert "recency: gru" in run(installed, users_folder, "-m", "worldmodels", "train", *words)
    assert "runs/recency: gru" in run(installed, users_folder, "-m", "worldmodels", "evaluate", "run=runs/recency")
    command = [str(installed), "-m", "worldmodels", "check", "Tiny/RandomLamp-v0"]
    forgetful = subprocess.run(command, cwd=users_folder, capture_output=True, text=True, timeout=100)
    assert forgetful.returncode == 2 and "MEND" in forgetful.stdout and "non-deterministic" in forgetful.stdout


def test_the_loop_and_the_checkpoints_know_no_model():
    """Training, checkpoints and logging know nn.Module, not which; tasks and agents reach environments by id."""
    for name, imports in modules().items():
        if name in ("worldmodels.training", "worldmodels.checkpoints", "worldmodels.logging"):
            assert not {
                i for i in imports if i.startswith(("worldmodels.models", "worldmodels.cores", "worldmodels.tasks"))
            }


def test_no_core_is_asked_what_it_is():
    """What a core can do is said by its capabilities; only files of cores know classes of cores."""
    classes = {name for path in (ROOT / "worldmodels/cores").glob("*.py") for name in _classes(path)}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            if "cores" in path.parts:
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                    named = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
                    assert not named & classes, f"{path.name}:{node.lineno}"


def _classes(path):
    return [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
