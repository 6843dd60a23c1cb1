"""``train`` through Hydra: composing, sweeping, and one error line instead of several."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from .config import plain, register, user_error
from .errors import UserError
from .run import Run, read_config, train_run

CONFIGS = "pkg://worldmodels.configs"

def train_command(words: Sequence[str]) -> list[Run | None]:
    """Train what the words describe: overrides, ``-m`` for a sweep, ``resume=<folder>`` to go on with a run.

    Returns:
        The runs that ended well.

    Raises:
        UserError: something the user can mend; in a sweep after the other jobs have run.
    """
    words = [_quoted(word) for word in words]
    for word in words:
        if word.startswith("+") and not word.lstrip("+").startswith(("env.kwargs", "core.", "encoder.", "hydra")):
            raise UserError(f"{word!r} would add a key that nothing reads; leave out the '+' to set an existing one")
    resume = [word.partition("=")[2].strip("'") for word in words if word.startswith("resume=")]
    if resume:
        if len(words) > 1:
            raise UserError(
                f"resume= goes on with the run's own config; leave out {words[1 - words.index(words[0])]!r}"
            )
        path = Path(resume[0])
        return [train_run(read_config(path), path, resume=True)]
    runs: list[Run | None] = []
    failures: list[BaseException] = []

    def job(config: DictConfig) -> None:
        try:
            runs.append(train_run(plain(config), Path(HydraConfig.get().runtime.output_dir)))
        except (Exception, KeyboardInterrupt) as error:
            failures.append(error)

    _hydra(words, job)
    if failures:
        raise failures[0]
    return runs


def _quoted(word: str) -> str:
    """Paths may hold characters that are grammar to Hydra: quote the values of run= and resume=."""
    key, separator, value = word.partition("=")
    if (
        separator
        and key in ("run", "resume", "data.dir", "data.train.path", "data.test.path")
        and value[:1] not in "'\""
    ):
        return f"{key}='{value}'"
    return word


def _hydra(words: Sequence[str], job: Any) -> None:
    register()
    sweep = [word for word in words if word in ("-m", "--multirun")]  # argparse wants it before the overrides
    words = [*sweep, *(word for word in words if word not in sweep)]
    before, path_before = sys.argv, list(sys.path)
    full_error = os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["worldmodels train", *words]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        hydra.main(version_base="1.3", config_path=CONFIGS, config_name="train")(job)()
    except Exception as error:
        line = user_error(error)
        if line is None:
            raise
        raise line from error
    finally:
        sys.argv, sys.path[:] = before, path_before
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]


def train(*overrides: str) -> Run:
    """Train from Python with the overrides of the command line; returns the run.

    >>> worldmodels.train("experiment=block_physics", "core=snps", "size=cpu", "seed=0")  # doctest: +SKIP
    """
    return [run for run in train_command(overrides) if run is not None][-1]
