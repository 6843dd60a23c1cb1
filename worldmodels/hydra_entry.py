"""``train`` through Hydra: composing, sweeping, and one error line instead of several."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import env_override
from omegaconf import DictConfig

from .config import plain, register, user_error
from .errors import UserError
from .run import Run, collect_data, load, read_config, train_run
from .sweep import Job, is_starting, side_by_side, train_side_by_side

SHOWING = ("-h", "--help", "--hydra-help", "--version", "-c", "--cfg", "-i", "--info", "-sc", "--shell-completion")


def train_command(words: Sequence[str], after: Callable[[Run], None] | None = None) -> list[Run]:
    """Train a world model, or a core on a task, see ``command``."""
    return command(
        words,
        after,
        program="train",
        prepare=register,
        collect=collect_data,
        run=train_run,
        read=read_config,
        load=load,
    )


@contextmanager
def _current_folder_importable() -> Iterator[None]:
    """Modules in the present folder can be named, after everything installed."""
    before = list(sys.path)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = before


@_current_folder_importable()
def command(
    words: Sequence[str],
    after: Callable[[Any], None] | None,
    *,
    program: str,
    prepare: Callable[[Sequence[str]], None],
    collect: Callable[[Mapping[str, Any]], None],
    run: Callable[..., Any],
    read: Callable[[Path], dict[str, Any]],
    load: Callable[[Path], Any],
) -> list[Any]:
    """Train what the words describe: overrides, ``-m`` for a sweep, ``resume=<folder>`` to go on with a run.

    All runs of a sweep are composed before the first is trained; ``jobs`` of them are then trained at once, each in a
    process of its own, which is why ``run`` and ``after`` must be functions that can be imported by their names. The same
    command goes on with a sweep that was stopped.

    Args:
        words: as on the command line.
        after: called with each run as soon as it has ended well.
        program: the command's name.
        prepare: puts schema and groups where Hydra finds them.
        collect: makes sure that the data of a config are there.
        run: trains what a config describes, into a folder.
        read: the config of a run's folder.
        load: opens the folder of a run that another process has trained.

    Returns:
        The runs that ended well; none in processes that are not the first.

    Raises:
        UserError: something the user can mend; in a sweep after the other jobs have run.
    """
    if is_starting():
        raise SystemExit(1)  # the process that started this one says why
    words = [_quoted(word) for word in words]
    for word in words:
        may_add = ("env.kwargs", "core.", "encoder.", "evaluation.variants", "hydra")
        if word.startswith("+") and not word.lstrip("+").startswith(may_add):
            raise UserError(f"{word!r} would add a key that nothing reads; leave out the '+' to set an existing one")
    runs: list[Any] = []

    def finish(ended: Any) -> None:
        if ended is not None:
            runs.append(ended)
            if after is not None:
                after(ended)

    resume = [word for word in words if word.startswith("resume=")]
    if resume:
        others = [word for word in words if word not in resume]
        if others:
            raise UserError(f"resume= goes on with the run's own config; leave out {others[0]!r}")
        path = Path(resume[0].partition("=")[2].strip("'"))
        finish(run(read(path), path, resume=True))
        return runs

    prepare(words)
    jobs, asked = _composed(words, program)
    failures: list[Exception] = []
    if _sweeps(words):
        for job in jobs:
            _go_on(job, read)
    at_once = side_by_side(asked, [job.config for job in jobs])
    if at_once > 1:
        ended = train_side_by_side(jobs, at_once, program=program, collect=collect, run=run, after=after)
        failures += [error for error in ended if error is not None]
        runs += [load(job.path) for job, error in zip(jobs, ended, strict=True) if error is None]
    else:
        for job in jobs:
            try:
                with env_override(job.environment):
                    finish(run(job.config, job.path, resume=job.resume))
            except Exception as error:
                failures.append(error)
    if failures:
        raise failures[0]
    return runs


def _go_on(job: Job, read: Callable[[Path], dict[str, Any]]) -> None:
    """Let a job of a sweep that was begun before, with the same settings, go on with its run."""
    try:
        saved = read(job.path)
    except UserError:
        return  # there is none, or another's, which is refused when it is trained

    def settings(config: Mapping[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in config.items() if key != "model"}
        return {**kept, "trainer": {**kept["trainer"], "threads": None}}  # those are a share of the cores

    if settings(saved) == settings(job.config):
        job.config, job.resume = saved, True


def _composed(words: Sequence[str], program: str) -> tuple[list[Job], int | None]:
    """The runs that words describe, and how many of them are to be trained at once.

    Raises:
        UserError: words that cannot be composed, a launcher that composes in other processes.
    """
    jobs: list[Job] = []
    asked: list[int | None] = []
    failures: list[Exception] = []

    def record(config: DictConfig) -> None:
        try:
            about = HydraConfig.get()
            path, overrides = Path(about.runtime.output_dir), list(about.overrides.task)
            jobs.append(Job(plain(config), path, overrides, dict(about.job.env_set)))
            asked.append(config.jobs)
        except Exception as error:
            failures.append(error)

    _hydra(words, record, program)
    if failures:
        raise user_error(failures[0]) or failures[0]
    if _sweeps(words) and not jobs and not any(word.partition("=")[0] in SHOWING for word in words):
        raise UserError(
            "Hydra's launcher composed this sweep in other processes, whose results would be lost; leave out "
            "hydra/launcher=, and say with jobs= how many runs are trained at once"
        )
    return jobs, asked[0] if asked else None


def _sweeps(words: Sequence[str]) -> list[str]:
    """The words that ask for a sweep; none where one run is described."""
    return [word for word in words if word in ("-m", "--multirun")]


def _quoted(word: str) -> str:
    """Paths may hold characters that are grammar to Hydra: quote the values of run= and resume=."""
    key, separator, value = word.partition("=")
    if (
        separator
        and key in ("run", "resume", "data.dir", "data.train.path", "data.test.path", "encoder.run")
        and value[:1] not in "'\""
    ):
        return f"{key}='{value}'"
    return word


def _hydra(words: Sequence[str], job: Any, program: str) -> None:
    sweep = _sweeps(words)  # argparse wants it before the overrides
    words = [*sweep, *(word for word in words if word not in sweep)]
    before, path_before = sys.argv, list(sys.path)  # Hydra leaves a mark on both
    full_error = os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [f"worldmodels {program}", *words]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        hydra.main(version_base="1.3", config_path=None, config_name="train")(job)()
    except Exception as error:
        line = user_error(error)
        if line is None:
            raise
        raise line from error
    finally:
        sys.argv, sys.path[:] = before, path_before
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]


def train(*overrides: str) -> Run | None:
    """Train from Python with the overrides of the command line; returns the run (of a sweep the last one).

    Under torchrun it returns None in all processes but the first.

    >>> worldmodels.train("experiment=block_physics", "core=snps", "size=cpu", "seed=0")  # doctest: +SKIP
    """
    runs = train_command(overrides)
    return runs[-1] if runs else None
