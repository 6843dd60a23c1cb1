"""Hydra's sweeper of ours: a search by Optuna, whose study lies in the sweep's folder and goes on where it stopped.

What is searched is said in Hydra's grammar: ``core.num_rules=2,4,8``, ``core.slot_size=range(8,65,8)`` (without its end, as
everywhere in Hydra), ``trainer.learning_rate=tag(log,interval(1e-5,1e-2))``, ``core.hidden_size=int(interval(16,512))``.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from .errors import UserError, first_line, nearest

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution

SAMPLERS = ("TPESampler", "GPSampler", "CmaEsSampler", "QMCSampler", "RandomSampler")
JOURNAL, RESULTS = "study.journal", "optimization_results.yaml"


class Tune(Sweeper):
    """Trains ``n_trials`` jobs, ``n_jobs`` of which the launcher is given at once.

    A trial's folder is its number. A trial that was told its score is kept; those that were running when a search was stopped
    are launched again with the same values, so that their runs go on. The sampler begins every batch from ``seed`` and the
    batch's first number: a search that was stopped goes on as if it had not been.

    Args:
        direction: maximize or minimize what a job returns.
        n_trials: how many there are in all.
        n_jobs: how many are chosen before the next scores are known.
        seed: of the sampler; None: another one every time.
        sampler: one of ``SAMPLERS``, of ``optuna.samplers``.
    """

    hydra_context: HydraContext
    config: DictConfig
    launcher: Launcher

    def __init__(
        self,
        *,
        direction: str = "maximize",
        n_trials: int = 20,
        n_jobs: int = 2,
        seed: int | None = None,
        sampler: str = "TPESampler",
    ):
        self.direction, self.n_trials, self.n_jobs, self.seed, self.sampler = direction, n_trials, n_jobs, seed, sampler

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """See Hydra.

        Raises:
            UserError: no Optuna here, or an option out of range.
        """
        try:
            import optuna
        except ModuleNotFoundError as error:
            raise UserError("hydra/sweeper=tune needs Optuna; run pip install '.[tune]' in the checkout") from error
        if self.direction not in ("maximize", "minimize"):
            raise UserError(f"hydra.sweeper.direction={self.direction}; expected maximize or minimize")
        if min(self.n_trials, self.n_jobs) < 1:
            raise UserError(
                f"hydra.sweeper.n_trials={self.n_trials} and n_jobs={self.n_jobs}; expected at least 1 of each"
            )
        if self.sampler not in SAMPLERS:
            raise UserError(f"hydra.sweeper.sampler={self.sampler}; {nearest(self.sampler, SAMPLERS)}")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            config=config, hydra_context=hydra_context, task_function=task_function
        )

    def sweep(self, arguments: list[str]) -> None:
        """Search what the overrides leave open.

        Raises:
            UserError: nothing is left open, or the folder holds another search.
            Exception: the first error of a trial, after all others were trained.
        """
        from optuna.trial import TrialState

        parsed = OverridesParser.create(config_loader=self.hydra_context.config_loader).parse_overrides(arguments)
        space = {word.get_key_element(): _distribution(word) for word in parsed if word.is_sweep_override()}
        fixed = [str(word.input_line) for word in parsed if not word.is_sweep_override()]
        if not space:
            raise UserError(
                "hydra/sweeper=tune has nothing to search; leave something open, like core.hidden_size=16,64 or "
                "'trainer.learning_rate=tag(log,interval(1e-5,1e-2))'"
            )
        folder = Path(self.config.hydra.sweep.dir)
        study = self._study(folder, [word for word in arguments if word.partition("=")[0] not in ("run", "jobs")])
        failures: list[Exception] = []
        trials = study.get_trials(deepcopy=False, states=[TrialState.RUNNING])
        batch = [(trial.number, trial.params) for trial in trials]
        while batch := batch or self._asked(study, space):
            jobs = [[*fixed, *(f"{key}={value}" for key, value in params.items())] for _, params in batch]
            self.validate_batch_is_legal(jobs)
            for (number, _), result in zip(batch, self.launcher.launch(jobs, batch[0][0]), strict=True):
                if result.status == JobStatus.COMPLETED:
                    study.tell(number, result.return_value)
                else:
                    study.tell(number, state=TrialState.FAIL)
                    failures.append(_error(result))
            batch = []
        if study.get_trials(deepcopy=False, states=[TrialState.COMPLETE]):
            best = study.best_trial
            found = {"name": "optuna", "best_params": best.params, "best_value": best.value}
            (folder / RESULTS).write_text(yaml.safe_dump(found, sort_keys=False), encoding="utf-8")
            words = " ".join(f"{key}={value}" for key, value in best.params.items())
            print(f"best of {len(study.trials)}: {best.value:.4g} with {words} in {folder / str(best.number)}")
        if failures:
            raise failures[0]

    def _study(self, folder: Path, asked: list[str]) -> "Study":
        """The study in a folder, a new one where there is none."""
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        folder.mkdir(parents=True, exist_ok=True)
        storage = JournalStorage(JournalFileBackend(str(folder / JOURNAL)))
        direction = optuna.study.StudyDirection[self.direction.upper()]
        study = optuna.create_study(storage=storage, study_name="worldmodels", direction=direction, load_if_exists=True)
        saved = study.user_attrs.get("asked", asked)
        if saved != asked or study.direction != direction:
            raise UserError(
                f"{folder} holds another search ({study.direction.name.lower()} {' '.join(saved)}); go on with it by its own "
                "command, or choose another folder with run="
            )
        study.set_user_attr("asked", asked)
        return study

    def _asked(self, study: "Study", space: dict[str, "BaseDistribution"]) -> list[tuple[int, dict[str, Any]]]:
        """The next trials: numbers, and values by key; none when there are enough."""
        import optuna

        begun = len(study.get_trials(deepcopy=False))
        seed = {} if self.seed is None else {"seed": self.seed + begun}
        study.sampler = getattr(optuna.samplers, self.sampler)(**seed)
        trials = [study.ask(space) for _ in range(min(self.n_jobs, self.n_trials - begun))]
        return [(trial.number, trial.params) for trial in trials]


def _distribution(word: Override) -> "BaseDistribution":
    """What an override leaves open, as Optuna says it.

    Raises:
        UserError: a logarithmic range that begins at 0.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value: Any = word.value()

    def between(low: Any, high: Any, **more: Any) -> "BaseDistribution":
        kind = IntDistribution if isinstance(low, int) and isinstance(high, int) else FloatDistribution
        return kind(low, high, **more)

    try:
        if isinstance(value, IntervalSweep):
            return between(value.start, value.end, log="log" in value.tags)
        if isinstance(value, RangeSweep):
            points = sorted(value.range())
            return between(points[0], points[-1], step=abs(value.step))
        return CategoricalDistribution(list(word.sweep_string_iterator()))
    except (ValueError, IndexError) as error:
        raise UserError(f"{word.input_line}: {first_line(error)}") from error


def _error(result: Any) -> Exception:
    try:
        result.return_value  # noqa: B018  # Hydra hands out a job's error by raising it
    except Exception as error:
        return error
    raise AssertionError("a job that failed has no error")
