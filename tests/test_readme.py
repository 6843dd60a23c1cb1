"""Every command and snippet of the README runs, with size=smoke put in."""

import re
import shlex

import pytest

from worldmodels.cli import main

from .conftest import ROOT

README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("readme")


def test_python_snippets_and_commands_run_in_order(home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    smoke = '"size=smoke", "logger.figures=false"'
    for code in blocks("python"):
        exec(compile(code.replace('"size=cpu"', smoke), "README.md", "exec"), {"__name__": "readme"})
    assert "beside its latent copy" in capsys.readouterr().out
    commands = [line.split("#")[0] for block in blocks("bash") for line in block.splitlines()]
    ran = 0
    for command in commands:
        words = shlex.split(command)
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), command
            continue
        assert words[0] == "worldmodels", command
        words = ["size=smoke" if word == "size=cpu" else word for word in words[1:]]
        if "size=smoke" in words:
            words.append("logger.figures=false")
        if "env.id=CartPole-v1" in words:
            words.append("evaluation.horizons=[1,5]")  # a smoke run's few random episodes fall within ten steps
        assert main(words) == 0, command
        ran += 1
    assert ran >= 12


def test_the_core_in_the_readme_keeps_the_contract():
    from worldmodels.check import check_core

    code = next(block for block in blocks("python") if "class RunningMean" in block)
    space = {"__name__": "readme"}
    exec(compile(code, "README.md", "exec"), space)
    assert check_core(space["RunningMean"]) == []


def test_files_and_links_of_the_readme_exist():
    for path in re.findall(r"\]\(([^)#]+)\)", README) + re.findall(r"^\| [^|]+\| `([^`]+)`", README, re.M):
        if not path.startswith("http"):
            assert (ROOT / path).exists(), path


def test_documents_speak_of_the_project_alone():
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        assert not re.search(r"/work/|/tmp/|/root/", path.read_text()), path
