"""``train`` through Hydra: one run, or a sweep that any of Hydra's launchers and sweepers carries out."""

import numbers
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf import DictConfig
from rich.console import Console

from hydra_plugins import _worldmodels

from . import launcher
from .config import plain, register, user_error
from .errors import UserError, first_line
from .logging import note, read_metrics
from .report.tables import show
from .run import EVALUATION, Run, load_run, longer, read_config, train_run
from .trust import import_from_here, listed, trusting, vet

EXTRAS = {
    f"hydra/launcher/{name}": extra
    for name, extra in (("joblib", "joblib"), ("submitit_local", "slurm"), ("submitit_slurm", "slurm"), ("ray", "ray"))
}

OPEN = ("env.kwargs", "encoder.options", "evaluation.variants")
"""Sections of the config to which keys can be added."""


def train(*overrides: str | Mapping[str, Any], **more: Any) -> Run | None:
    """Train from Python with the overrides of the command line; returns the run (of a sweep the last one).

    Under torchrun it returns None in all processes but the first.

    >>> worldmodels.train("experiment=block_physics", "core=snps", "size=cpu", "seed=0")  # doctest: +SKIP
    >>> worldmodels.train("size=cpu", {"trainer.steps": 10}, core="snps", env={"id": "CartPole-v1"})  # doctest: +SKIP

    Args:
        overrides: words as on the command line, or dicts of keys, with or without dots, and values.
        more: keys and values, like those of a dict.

    Raises:
        UserError: something the user can mend.
    """
    runs = train_command(as_words(overrides, more), summarise)
    return runs[-1] if runs else None


def as_words(overrides: Sequence[Any], more: Mapping[str, Any]) -> list[str]:
    """What a Python call says, as words of the command line.

    Args:
        overrides: words, or dicts.
        more: keywords.

    Raises:
        UserError: something that is neither, or a value that no word can say.
    """
    words = []
    for one in (*overrides, more):
        if isinstance(one, str):
            words.append(one)
        elif isinstance(one, Mapping):
            for key, value in one.items():
                if isinstance(value, Mapping) and "." not in str(key):
                    words += [_word(f"{key}.{name}", inside) for name, inside in value.items()]
                else:
                    words.append(_word(str(key), value))
        else:
            raise UserError(f"got {one!r}; expected words like 'core=rules', dicts, or keywords like core='rules'")
    return words


def _word(key: str, value: Any) -> str:
    """A key and its value as one word that Hydra reads as just this.

    Raises:
        UserError: a value that no word can say.
    """
    plus = "++" if any(f"{key}.".startswith(f"{section}.") for section in OPEN) else ""
    word = f"{plus}{key}={_spelled(value)}"
    try:
        read = OverridesParser.create().parse_override(word)
    except HydraException:
        read = None
    if read is None or read.key_or_group != key.lstrip("+") or _spelled(read.value()) != _spelled(value):
        raise UserError(f"{word} cannot be read back; keep keys to letters, digits, '_' and '.'")
    return word


def _spelled(value: Any) -> str:
    """A value in Hydra's grammar.

    Raises:
        UserError: a value of another kind.
    """
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_spelled(inside)}' for key, inside in value.items())}}}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{','.join(map(_spelled, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, numbers.Real):  # numpy's as well
        return repr(int(value) if isinstance(value, numbers.Integral) else float(value))
    if isinstance(value, (str, os.PathLike)):
        return quoted(str(value))
    raise UserError(f"got {value!r} as a value; expected numbers, text, None, or lists and dicts of them")


def quoted(text: str) -> str:
    """A text in Hydra's quotes."""
    return QuotedString(text, Quote.single).with_quotes()


def summarise(run: Any) -> None:
    """Say in one line what came of a run that was trained from Python, unless it asks for no progress."""
    if run.config["logger"]["progress"]:
        told = [words for line in read_metrics(run.path) if (words := note(line))]
        ended = f" ({told[-1]})" if told else ""
        line = f"worldmodels: trained{ended}; run.evaluate() scores it; run: {run.path}"
        Console(stderr=True).print(line, markup=False, highlight=False, soft_wrap=True)


def train_command(words: Sequence[str], after: Callable[[Run], Any] | None = None) -> list[Run]:
    """Train a world model, or a core on a task, see ``command``."""
    return command(
        words,
        after,
        program="train",
        prepare=register,
        run=train_run,
        job=train_one,
        read=read_config,
        load=load_run,
    )


def train_one(config: DictConfig) -> float:
    """A job of a sweep, wherever a launcher runs it; returns the objective of its task, which a sweeper maximises."""
    return train_job(config, run=train_run, read=read_config, score=lambda run: run.task.objective(show_run(run)))


def show_run(run: Run) -> dict[str, Any]:
    """Score the run that has just ended, and draw its pictures."""
    result = run.evaluate(quiet=not run.config["logger"]["progress"])
    show(run.task.table({result["core"].lower(): result}, run.task.name))
    show_folder(run)
    return result


def show_folder(run: Any) -> None:
    """Draw a run's pictures, if it asks for them, and say where they and the run are."""
    if run.config["logger"]["figures"]:
        for path in run.draw():
            print(path)
    print(f"run: {run.path}")


@contextmanager
def _current_folder_importable() -> Iterator[None]:
    """Modules in the present folder can be named, after everything installed."""
    before = list(sys.path)
    import_from_here()
    try:
        yield
    finally:
        sys.path[:] = before


@contextmanager
def _hydra_to_ourselves() -> Iterator[None]:
    """Hydra as if nobody used it; it may be at work around us, in a user's own program, which finds it as it was."""
    Plugins.instance()  # they add to the store when they are first looked for
    everywhere, config, store = GlobalHydra.instance(), HydraConfig.instance(), ConfigStore.instance()
    before = everywhere.hydra, config.cfg, store.repo
    everywhere.hydra, store.repo = None, _branches(store.repo)
    try:
        yield
    finally:
        everywhere.hydra, config.cfg, store.repo = before


def _branches(repo: dict[str, Any]) -> dict[str, Any]:
    """A copy of nested dicts, but not of what they hold."""
    return {name: _branches(part) if isinstance(part, dict) else part for name, part in repo.items()}


@_hydra_to_ourselves()
@_current_folder_importable()
def command(
    words: Sequence[str],
    after: Callable[[Any], Any] | None,
    *,
    program: str,
    prepare: Callable[[Sequence[str]], None],
    run: Callable[..., Any],
    job: Callable[[DictConfig], float],
    read: Callable[[Path], dict[str, Any]],
    load: Callable[[Path], Any],
) -> list[Any]:
    """Train what the words describe: overrides, ``-m`` for a sweep, ``resume=<folder>`` to go on with a run.

    Classes and modules that the words name are imported. Those that a folder names, of ``resume=`` or ``encoder.run=``, are
    only if it was trained by this user on this machine, or with ``trust=<modules>`` (see ``worldmodels.load``).

    With ``resume=`` a run goes on to its end; with ``trainer.steps=`` beside it to that number of steps, also after its
    end. The learning rate, and what else changes in the course of a training, then go by the new number.

    A sweep is Hydra's: ``hydra/sweeper=`` says which jobs there are and ``hydra/launcher=`` where they run. The same command
    goes on with a sweep that was stopped.

    Args:
        words: as on the command line.
        after: called with a single run when it has ended well; jobs of a sweep score and show theirs themselves.
        program: the command's name.
        prepare: puts schema and groups where Hydra finds them.
        run: trains what a config describes, into a folder.
        job: trains a job of a sweep; other processes import it by its name.
        read: the config of a run's folder.
        load: opens the folder of a run that another process has trained.

    Returns:
        The runs that ended well; none in processes that are not the first.

    Raises:
        UserError: something the user can mend; in a sweep after the other jobs have run.
    """
    if launcher.is_starting():
        raise SystemExit(1)  # the process that started this one says why
    words = [_quoted(word) for word in words]
    for word in words:
        may_add = ("env.kwargs", "core.", "encoder.", "evaluation.variants", "hydra")
        if word.startswith("+") and not word.lstrip("+").startswith(may_add):
            raise UserError(f"{word!r} would add a key that nothing reads; leave out the '+' to set an existing one")
    runs: list[Any] = []
    failures: list[Exception] = []

    def finish(ended: Any) -> None:
        if ended is not None:
            runs.append(ended)
            if after is not None:
                after(ended)

    def once(config: DictConfig) -> None:
        path = Path(HydraConfig.get().runtime.output_dir)
        try:
            launcher.side_by_side(config.jobs, [1])
            with trusting(listed(config.trust)):
                finish(run(plain(config), path))
        except Exception as error:  # raised below, without Hydra's own line about it
            failures.append(error)
            with suppress(OSError):  # it is not empty
                path.rmdir()

    resume = [word for word in words if word.startswith("resume=")]
    if resume:
        trust = [word for word in words if word.startswith("trust=")]
        steps = [word for word in words if word.startswith("trainer.steps=")]
        others = [word for word in words if word not in resume + trust + steps]
        if others:
            raise UserError(
                f"resume= goes on with the run's own config, of which only trainer.steps may differ; leave out {others[0]!r}"
            )
        path = Path(_value(resume[0]))
        config = read(path)
        for word in steps:
            config = longer(path, config, _value(word))
        with trusting(module for word in trust for module in listed(_value(word))):
            vet(path, config)
            finish(run(config, path, resume=True))
        return runs
    prepare(words)
    _worldmodels.register()
    sweep = [word for word in words if word in ("-m", "--multirun")]
    words = [*sweep, *(word for word in words if word not in sweep)]  # argparse wants it before the overrides
    if not sweep:
        _hydra(words, once, program)
        if failures:
            raise user_error(failures[0]) or failures[0]
        return runs
    said = {
        key: _value(word) for word in words if (key := word.partition("=")[0]) in ("hydra.sweep.dir", "run", "trust")
    }
    folder = said.get("hydra.sweep.dir", said.get("run", f"runs/{datetime.now():%Y%m%d-%H%M%S-%f}"))
    path = Path(folder).absolute()  # processes on other machines may start elsewhere
    words = [
        *(word for word in words if not word.startswith("hydra.sweep.dir=")),
        f"hydra.sweep.dir={quoted(str(path))}",
    ]
    before = _scored(path)
    _hydra(words, job, program)
    if os.environ.get("RANK", "0") != "0":  # torchrun's first process alone has runs
        return []
    ended = [one for one, when in _scored(path).items() if before.get(one) != when]
    with trusting(listed(said.get("trust", ""))):
        return [load(one) for one in sorted(ended, key=lambda one: (len(one.name), one.name))]


def train_job(
    config: DictConfig,
    *,
    run: Callable[..., Any],
    read: Callable[[Path], dict[str, Any]],
    score: Callable[[Any], float],
) -> float:
    """Train a job of a sweep, or go on with it where its folder holds a run of the same settings; see ``command``."""
    about = HydraConfig.get()
    path, asked, resume = Path(about.runtime.output_dir), plain(config), False
    with suppress(OSError):  # a cluster's processes start elsewhere, and may not have this folder
        os.chdir(about.runtime.cwd)
    try:
        if asked.get("data", {}).get("fresh") or asked.get("task", {}).get("fresh"):
            raise UserError(
                "every job of a sweep would record the data anew; leave that out, and do it with one run before"
            )
        with _current_folder_importable(), trusting(listed(config.trust)):
            if (path / "config.yaml").is_file() and _settings(saved := read(path)) == _settings(asked):
                asked, resume = saved, True
            ended = run(asked, path, resume=resume)
            return float("nan") if ended is None else score(ended)
    except Exception as error:
        raise launcher.portable(user_error(error) or error) from None


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a run: without what is found out of its data, and the threads, which are a share of the cores."""
    kept = {key: value for key, value in config.items() if key != "model"}
    return {**kept, "trainer": {**kept["trainer"], "threads": None}}


def _scored(folder: Path) -> dict[Path, int]:
    """The runs in a folder that have an evaluation, and when it was written."""
    return {path.parent: path.stat().st_mtime_ns for path in folder.rglob(EVALUATION)}


def _value(word: str) -> str:
    """What a word says.

    Raises:
        UserError: Hydra cannot read it.
    """
    try:
        return str(OverridesParser.create().parse_override(word).value())
    except HydraException as error:
        raise user_error(error) or error from error


def _quoted(word: str) -> str:
    """Paths and lists of modules may hold characters that are grammar to Hydra: quote them."""
    key, separator, value = word.partition("=")
    if (
        separator
        and key in ("run", "resume", "trust", "data.dir", "data.train.path", "data.test.path", "encoder.run")
        and value[:1] not in "'\""
    ):
        return f"{key}={quoted(value)}"
    return word


def in_one_line(error: Exception, program: str) -> UserError | None:
    """What to say of an error while a command's words were made into a config; None of one that has another cause."""
    asked = str(getattr(error, "missing_cfg_file", ""))
    if asked in EXTRAS:
        return UserError(f"{asked} is not installed; run pip install '.[{EXTRAS[asked]}]' in the checkout")
    if line := user_error(error):
        return line
    told = isinstance(error, UserError) or hasattr(error, "__notes__")  # of a job: see launcher.portable
    if told or not isinstance(error, (TypeError, ValueError, AttributeError, RecursionError)):
        return None
    said = f"{type(error).__name__}: {first_line(error)}"
    return UserError(f"these words make no config ({said}); see worldmodels {program} --help")


def _hydra(words: Sequence[str], task: Callable[[DictConfig], Any], program: str) -> None:
    before, path_before = sys.argv, list(sys.path)  # Hydra leaves a mark on both
    full_error = os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [f"worldmodels {program}", *words]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        hydra.main(version_base="1.3", config_path="pkg://worldmodels", config_name="train")(
            task
        )()  # all is registered
    except Exception as error:
        line = in_one_line(error, program)
        if line is None:
            raise
        raise line from error
    finally:
        sys.argv, sys.path[:] = before, path_before
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
