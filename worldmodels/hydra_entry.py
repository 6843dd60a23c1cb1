"""``train`` through Hydra: composing, sweeping, and one error line instead of several."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from .config import plain, register, user_error
from .errors import UserError
from .run import Run, TaskRun, read_config, train_run

CONFIGS = "pkg://worldmodels.configs"


def train_command(
    words: Sequence[str], after: Callable[[Run | TaskRun], None] = lambda run: None
) -> list[Run | TaskRun]:
    """Train a world model, or a core on a task, see ``command``."""
    return command(words, after, program="train", configs=CONFIGS, prepare=register, run=train_run, read=read_config)


def command(
    words: Sequence[str],
    after: Callable[[Any], None],
    *,
    program: str,
    configs: str,
    prepare: Callable[[], None],
    run: Callable[..., Any],
    read: Callable[[Path], dict[str, Any]],
) -> list[Any]:
    """Train what the words describe: overrides, ``-m`` for a sweep, ``resume=<folder>`` to go on with a run.

    Args:
        words: as on the command line.
        after: called with each run as soon as it has ended well.
        program: the command's name.
        configs: where its configurations lie.
        prepare: puts schema and groups where Hydra finds them.
        run: trains what a config describes, into a folder.
        read: the config of a run's folder.

    Returns:
        The runs that ended well; none in processes that are not the first.

    Raises:
        UserError: something the user can mend; in a sweep after the other jobs have run.
    """
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
            after(ended)

    resume = [word for word in words if word.startswith("resume=")]
    if resume:
        others = [word for word in words if word not in resume]
        if others:
            raise UserError(f"resume= goes on with the run's own config; leave out {others[0]!r}")
        path = Path(resume[0].partition("=")[2].strip("'"))
        finish(run(read(path), path, resume=True))
        return runs

    def job(config: DictConfig) -> None:
        try:
            finish(run(plain(config), Path(HydraConfig.get().runtime.output_dir)))
        except Exception as error:
            failures.append(error)

    prepare()
    _hydra(words, job, program, configs)
    if failures:
        raise failures[0]
    return runs


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


def _hydra(words: Sequence[str], job: Any, program: str, configs: str) -> None:
    sweep = [word for word in words if word in ("-m", "--multirun")]  # argparse wants it before the overrides
    words = [*sweep, *(word for word in words if word not in sweep)]
    before, path_before = sys.argv, list(sys.path)
    full_error = os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [f"worldmodels {program}", *words]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        hydra.main(version_base="1.3", config_path=configs, config_name="train")(job)()
    except Exception as error:
        line = user_error(error)
        if line is None:
            raise
        raise line from error
    finally:
        sys.argv, sys.path[:] = before, path_before
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]


def train(*overrides: str) -> Run | TaskRun | None:
    """Train from Python with the overrides of the command line; returns the run (of a sweep the last one).

    Under torchrun it returns None in all processes but the first.

    >>> worldmodels.train("experiment=block_physics", "core=snps", "size=cpu", "seed=0")  # doctest: +SKIP
    """
    runs = train_command(overrides)
    return runs[-1] if runs else None
