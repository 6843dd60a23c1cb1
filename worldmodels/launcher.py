"""Hydra's launcher of ours: the runs of a sweep side by side, a process for each, one display for all."""

import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import connection
from multiprocessing.process import parent_process
from pathlib import Path
from typing import Any

import numpy
import torch
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict
from rich.markup import escape

from .config import plain
from .data import episodes
from .errors import UserError
from .logging import note, progress_bar, read_metrics
from .run import CONFIG, collect_data

# New processes, since CUDA cannot be forked. On Linux each is forked off a new one that has only imported what runs need, so
# that a sweep imports torch once instead of once a run.
_PROCESSES: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
_NAME = "worldmodels run"
_TAIL = 1 << 13  # bytes of metrics.jsonl that are read to see how far a run is
_POLL = 0.5
_GRACE = 10.0  # seconds a process is given to end


class Failure(JobReturn):
    """What came of a job that failed; Hydra's own also prints a line when it is asked."""

    @property  # type: ignore[misc]
    def return_value(self) -> Any:
        """Raises the job's error."""
        raise self._return_value


class SideBySide(Launcher):
    """Trains ``jobs`` runs at once, each in a process of its own, or one after another in this one.

    Data are collected, or verified, before the first process starts. Processes open them memory-mapped, so that all share
    the pages that the system holds of a file, and do not verify them again. Where ``trainer.threads`` is 0, it becomes an
    equal share of the cores. How far a run is, is read off its metrics; what it prints is shown in one piece.
    """

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """See Hydra."""
        self.context, self.task, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Train what each list of overrides describes.

        Raises:
            UserError: jobs= is not at least 1.
        """
        setup_globals()
        configs = [self._composed(words, initial_job_idx + n) for n, words in enumerate(job_overrides)]
        at_once = side_by_side(self.config.jobs, [config.trainer.threads for config in configs])
        if at_once == 1:
            return [_told(_run(self.context, self.task, config)) for config in configs]
        jobs = [
            _Job(config, label) for config, label in zip(configs, labels(job_overrides, initial_job_idx), strict=True)
        ]
        for job in jobs:
            job.prepare(max(1, cores() // at_once))
        display = _Display(jobs)
        _PROCESSES.set_forkserver_preload([_imported(self.task), "lightning_fabric"])
        # These threads and the processes they start do not hear Ctrl-C, which a terminal sends to all of its processes.
        pool, futures = ThreadPoolExecutor(at_once, initializer=_block_interrupts), []
        try:
            with display.bars:
                futures = [pool.submit(job.run, self.context, self.task, display) for job in jobs]
                running = dict(zip(futures, jobs, strict=True))
                while running:
                    done, _ = wait(running, _POLL, FIRST_COMPLETED)
                    for job in running.values():
                        display.show(job)
                    for future in done:
                        display.ended(running.pop(future), future.result())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            while left := [future for future in futures if not future.done()]:
                for process in [job.process for job in jobs if job.process is not None]:
                    _end(process)
                wait(left, _POLL)
        return [future.result() for future in futures]

    def _composed(self, words: Sequence[str], number: int) -> DictConfig:
        config = self.context.config_loader.load_sweep_config(self.config, list(words))
        with open_dict(config):
            config.hydra.job.id, config.hydra.job.num = str(number), number
        return config


def labels(jobs: Sequence[Sequence[str]], first: int = 0) -> list[str]:
    """What tells each job's overrides from the others', like "core=snps,seed=0"; its number where nothing does."""
    common = set.intersection(*map(set, jobs))
    return [",".join(word for word in words if word not in common) or str(n) for n, words in enumerate(jobs, first)]


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def side_by_side(asked: int | None, threads: Sequence[int]) -> int:
    """How many runs are trained at once: those asked for, else as many as there are cores for the threads of each.

    Raises:
        UserError: fewer than one was asked for.
    """
    if asked is not None and asked < 1:
        raise UserError(f"jobs={asked}; expected how many runs of a sweep are trained at once, at least 1")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:  # torchrun's processes train each run together
        return 1
    return min(len(threads), asked or max(1, cores() // max(1, *threads)))


def is_starting() -> bool:
    """Whether this is the process of a run, which then is only reading the script that started the sweep."""
    return multiprocessing.current_process().name == _NAME


class _Job:
    """A run of the sweep and the process that trains it; ``state`` is waiting, starting, training and then done or failed."""

    def __init__(self, config: DictConfig, label: str):
        self.config = config
        self.label = label
        self.path = Path(config.hydra.sweep.dir, str(config.hydra.sweep.subdir)).absolute()
        self.process: Any = None
        self.state = "waiting"
        self.since = 0.0
        self.refused: Exception | None = None
        self.out = self.err = ""

    def prepare(self, threads: int) -> None:
        """Make sure that the data are there, and give it its share of the cores."""
        self.config.trainer.threads = self.config.trainer.threads or threads
        try:
            if "data" in self.config:  # an agent's are its own
                collect_data(plain(self.config))
        except Exception as error:
            self.refused = error

    def run(self, context: HydraContext, task: TaskFunction, display: "_Display") -> JobReturn:
        """Train in a process of its own, and wait for it."""
        if self.refused is not None:
            return self._failed(self.refused)
        ours, theirs = _PROCESSES.Pipe()
        # Not a daemon: those may not have processes of their own, and environments do.
        self.process = _PROCESSES.Process(target=_train, args=(theirs,), name=_NAME)
        self.state, self.since = "starting", time.monotonic()
        display.began(self)
        with theirs:
            self.process.start()
        with ours:
            while ours in connection.wait([ours, self.process.sentinel]):
                try:
                    said = ours.recv()
                    if said == "training":
                        self.state = said
                        # Not an argument: one of more than 64 KB waits for ever for a process that has ended already.
                        ours.send((episodes.VERIFIED, dict(os.environ), context, task, self.config))
                        continue
                except (EOFError, OSError):
                    break
                result, self.out, self.err = said
                self.process.join(_GRACE)
                _end(self.process)
                return self._failed(result) if isinstance(result, Exception) else _told(result)
        self.process.join()
        return self._failed(UserError(self._killed()))

    def _failed(self, error: Exception) -> Failure:
        words = list(self.config.hydra.overrides.task)
        return Failure(words, self.config, status=JobStatus.FAILED, _return_value=error)

    def _killed(self) -> str:
        code = self.process.exitcode
        if self.state == "starting" and code > 0:
            return (
                f"{self.label}: its process ended before it began (exit code {code}); a script that trains must do so under "
                "'if __name__ == \"__main__\":', because every process of a sweep reads the script"
            )
        how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
        hint = (
            ", as the system does when memory is full (a smaller jobs= needs less)" if code == -signal.SIGKILL else ""
        )
        remedy = f" with run={self.config.hydra.sweep.dir}" if (self.path / CONFIG).is_file() else ""
        return f"{self.label}: its process ended by {how}{hint}; the same command{remedy} goes on with it"


class _Display:
    """A row for each job where stderr is a terminal, else a line when it begins and one when it ends.

    Args:
        jobs: what is trained; neither is shown where all of them ask for no progress.
    """

    def __init__(self, jobs: Sequence[_Job]):
        self.quiet = not any(job.config.logger.progress for job in jobs)
        self.bars = progress_bar("{task.description}")
        self.lines = self.bars.disable and not self.quiet
        self.bars.disable |= self.quiet
        self.stdout = sys.stdout  # while bars are drawn, rich puts its own in this place
        self.rows = {
            job.path: self.bars.add_task(escape(job.label), start=False, total=job.config.trainer.steps, note="waiting")
            for job in jobs
        }

    def began(self, job: _Job) -> None:
        """A process is about to start."""
        self.bars.start_task(self.rows[job.path])
        if self.lines:
            self._say(f"{job.label}: training in {job.path}")

    def show(self, job: _Job) -> None:
        """How far a job is."""
        if self.bars.disable:
            return
        row = self.rows[job.path]
        lines = read_metrics(job.path, last=_TAIL)
        told = [words for line in lines if (words := note(line))]
        self.bars.update(row, note=told[-1] if told and job.state == "training" else job.state)
        if lines:
            self.bars.update(row, completed=lines[-1]["step"])
            if lines[-1]["step"] >= job.config.trainer.steps:
                self.bars.update(row, note="scoring")

    def ended(self, job: _Job, result: JobReturn) -> None:
        """A job has ended: what it printed, and how it went."""
        failed = result.status == JobStatus.FAILED
        self.bars.update(self.rows[job.path], note="failed" if failed else "done")
        self.bars.stop_task(self.rows[job.path])
        for text, stream in ((job.err, sys.stderr), (job.out, self.stdout)):
            if text:
                print(text, end="", file=sys.stdout if stream.isatty() else stream, flush=True)
        if failed and not self.quiet:
            error = result._return_value
            reason = str(error) if isinstance(error, UserError) else repr(error)
            self._say(f"{job.label}: failed: {' '.join(reason.split())}")
        elif self.lines:
            self._say(f"{job.label}: done in {time.monotonic() - job.since:.0f} s")

    def _say(self, line: str) -> None:
        self.bars.console.print(f"worldmodels: {line}", markup=False, highlight=False, soft_wrap=True)


def _run(context: HydraContext, task: TaskFunction, config: DictConfig) -> JobReturn:
    return run_job(
        hydra_context=context,
        task_function=task,
        config=config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )


def _told(result: JobReturn) -> JobReturn:
    return Failure(**vars(result)) if result.status == JobStatus.FAILED else result


def _imported(task: TaskFunction) -> str:
    """The module of ours that trains: what a user's module does when it is imported is only done in a run's own process."""
    return task.__module__ if task.__module__.startswith(f"{__package__}.") else f"{__package__}.launch"


def _end(process: Any) -> None:
    """End a process that still runs: it is asked to, then made to."""
    if process.is_alive():
        process.terminate()
        process.join(_GRACE)
    if process.is_alive():
        process.kill()
        process.join()


def _block_interrupts() -> None:
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _train(other: connection.Connection) -> None:
    """What the process of a run does."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    out, err = io.StringIO(), io.StringIO()
    try:
        signal.signal(signal.SIGTERM, _interrupt)  # files and environments are closed before the process ends
        other.send("training")
        verified, environment, context, task, config = other.recv()
        episodes.VERIFIED |= verified
        os.environ.clear()  # forked processes have what was set when the first sweep began,
        os.environ.update(environment)
        numpy.random.seed()  # and all begin with the same random numbers
        torch.seed()
        setup_globals()
        with redirect_stdout(out), redirect_stderr(err):  # neither is a terminal, so no bars are drawn
            result: JobReturn | Exception = _run(context, task, config)
    except KeyboardInterrupt:
        return
    except Exception as error:
        result = portable(error)
    other.send((result, out.getvalue(), err.getvalue()))


def portable(error: Exception) -> Exception:
    """An error that can be sent to another process, with its traceback as a note."""
    error.add_note(traceback.format_exc())
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:  # whatever a stranger's exception raises
        other = RuntimeError(f"{type(error).__name__}: {error}")
        other.add_note(traceback.format_exc())
        return other


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
