"""The runs of a sweep side by side: a process for each, one display for all."""

import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import parent_process
from pathlib import Path
from typing import Any

from rich.markup import escape

from .data import episodes
from .errors import UserError
from .logging import note, progress_bar, read_metrics

_SPAWN = multiprocessing.get_context("spawn")  # CUDA cannot be forked
_NAME = "worldmodels run"
_TAIL = 1 << 13  # bytes of metrics.jsonl that are read to see how far a run is
_POLL = 0.5
_GRACE = 10.0  # seconds a process is given to end


@dataclass
class Job:
    """A run to be trained.

    Args:
        config: composed, in plain values.
        path: the run's folder.
        overrides: what was said on the command line, for this run.
        environment: variables that are set while it is trained.
        resume: whether to go on with the run in that folder.
    """

    config: dict[str, Any]
    path: Path
    overrides: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    resume: bool = False


def labels(jobs: Sequence[Job]) -> list[str]:
    """What tells each job from the others, like "core=snps,seed=0"."""
    common = set.intersection(*(set(job.overrides) for job in jobs))
    return [",".join(word for word in job.overrides if word not in common) or job.path.name for job in jobs]


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def side_by_side(asked: int | None, configs: Sequence[Mapping[str, Any]]) -> int:
    """How many runs are trained at once: those asked for, else as many as there are cores for their threads.

    Raises:
        UserError: fewer than one was asked for.
    """
    if asked is not None and asked < 1:
        raise UserError(f"jobs={asked}; expected how many runs of a sweep are trained at once, at least 1")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:  # torchrun's processes train each run together
        return 1
    threads = max([1, *(config["trainer"]["threads"] for config in configs)])
    return min(len(configs), asked or max(1, cores() // threads))


def is_starting() -> bool:
    """Whether this is the process of a run, which then is only reading the script that started the sweep."""
    return multiprocessing.current_process().name == _NAME


def train_side_by_side(
    jobs: Sequence[Job],
    at_once: int,
    *,
    program: str,
    collect: Callable[[Mapping[str, Any]], None],
    run: Callable[..., Any],
    after: Callable[[Any], None] | None,
) -> list[Exception | None]:
    """Train jobs in processes of their own, each started as another ends.

    Data are collected, or verified, before the first process starts. Processes open them memory-mapped, so that all share
    the pages that the system holds of a file, and do not verify them again. How far a run is, is read off its metrics.

    Args:
        jobs: what to train; where ``trainer.threads`` is 0, it becomes an equal share of the cores.
        at_once: how many processes there are at a time.
        program: the command that goes on with a run.
        collect: makes sure that the data of a config are there.
        run: trains what a config describes, into a folder; like ``after``, it can be imported by its name.
        after: called with each run that ended well, in its process; what it prints is shown in one piece.

    Returns:
        For each job its error, None if it ended well.
    """
    quiet = not any(job.config["logger"]["progress"] for job in jobs)
    workers = [_Worker(job, label) for job, label in zip(jobs, labels(jobs), strict=True)]
    for worker in workers:
        try:
            collect(worker.job.config)
        except Exception as error:
            worker.error = error
    for worker in workers:
        trainer = worker.job.config["trainer"]
        trainer["threads"] = trainer["threads"] or max(1, cores() // at_once)
    display = _Display(workers, quiet=quiet)
    for worker in workers:
        if worker.error is not None:
            display.ended(worker)
    waiting, running = [worker for worker in workers if worker.error is None], list[_Worker]()
    with display.bars:
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    running.append(waiting.pop(0))
                    running[-1].start(run, after)
                    display.began(running[-1])
                wait([end for worker in running for end in worker.ends()], _POLL)
                for worker in running:
                    worker.listen(program)
                    display.show(worker)
                    if worker.state == "ended":
                        display.ended(worker)
                running = [worker for worker in running if worker.state != "ended"]
        finally:
            _end([worker.process for worker in workers if worker.process is not None])
    return [worker.error for worker in workers]


class _Worker:
    """A job and the process that trains it; ``state`` is waiting, starting, training, scoring and then ended."""

    def __init__(self, job: Job, label: str):
        self.job = job
        self.label = label
        self.process: Any = None
        self.connection: Any = None
        self.state = "waiting"
        self.error: Exception | None = None
        self.out = self.err = ""

    def start(self, run: Callable[..., Any], after: Callable[[Any], None] | None) -> None:
        """Start the process."""
        self.connection, theirs = _SPAWN.Pipe(duplex=False)
        # Not a daemon: those may not have processes of their own, and environments do.
        arguments = (theirs, episodes.VERIFIED, self.job, run, after)
        self.process = _SPAWN.Process(target=_train, args=arguments, name=_NAME)
        with _interrupts_for_us(), theirs:
            self.process.start()
        self.state, self.since = "starting", time.monotonic()

    def ends(self) -> list[Any]:
        """What becomes ready when the process says something or ends."""
        return [self.process.sentinel] if self.connection.closed else [self.process.sentinel, self.connection]

    def listen(self, program: str) -> None:
        """Take what the process said; if it is gone without having said how it ended, that is the error."""
        gone = not self.process.is_alive()  # asked first, so that nothing it said is missed
        try:
            while not self.connection.closed and self.connection.poll():
                self.state, *more = self.connection.recv()
                if self.state == "ended":
                    self.error, self.out, self.err = more
                    self.process.join(_GRACE)
                    _end([self.process])
                    return
        except (EOFError, OSError):  # it was killed
            self.connection.close()
        if gone:
            self.error, self.state = UserError(self._killed(program)), "ended"

    def _killed(self, program: str) -> str:
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
        begun = (self.job.path / "config.yaml").is_file()
        remedy = f"go on with 'worldmodels {program} resume={self.job.path}'" if begun else "start it again"
        return f"{self.label}: its process ended by {how}{hint}; {remedy}"


class _Display:
    """A row for each job where stderr is a terminal, else a line when it begins and one when it ends.

    Args:
        workers: the jobs.
        quiet: neither.
    """

    def __init__(self, workers: Sequence[_Worker], *, quiet: bool):
        self.bars = progress_bar("{task.description}")
        self.lines = self.bars.disable and not quiet
        self.bars.disable |= quiet
        self.quiet = quiet
        self.stdout = sys.stdout  # while bars are drawn, rich puts its own in this place
        self.rows = {
            worker.job.path: self.bars.add_task(
                escape(worker.label), start=False, total=worker.job.config["trainer"]["steps"], note="waiting"
            )
            for worker in workers
        }

    def began(self, worker: _Worker) -> None:
        """A process was started."""
        self.bars.start_task(self.rows[worker.job.path])
        if self.lines:
            self._say(f"{worker.label}: training in {worker.job.path}")

    def show(self, worker: _Worker) -> None:
        """How far a job is."""
        if self.bars.disable:
            return
        row = self.rows[worker.job.path]
        lines = read_metrics(worker.job.path, last=_TAIL)
        if lines:
            self.bars.update(row, completed=lines[-1]["step"])
        told = [words for line in lines if (words := note(line))]
        self.bars.update(row, note=told[-1] if told and worker.state == "training" else worker.state)

    def ended(self, worker: _Worker) -> None:
        """A job has ended: what it printed, and how it went."""
        row = self.rows[worker.job.path]
        self.bars.update(row, note="done" if worker.error is None else "failed")
        self.bars.stop_task(row)
        for text, stream in ((worker.err, sys.stderr), (worker.out, self.stdout)):
            if text:
                print(text, end="", file=sys.stdout if stream.isatty() else stream, flush=True)
        if worker.error is not None and not self.quiet:
            reason = str(worker.error) if isinstance(worker.error, UserError) else repr(worker.error)
            self._say(f"{worker.label}: failed: {' '.join(reason.split())}")
        elif self.lines:
            self._say(f"{worker.label}: done in {time.monotonic() - worker.since:.0f} s")

    def _say(self, line: str) -> None:
        self.bars.console.print(f"worldmodels: {line}", markup=False, highlight=False, soft_wrap=True)


def _end(processes: Sequence[Any]) -> None:
    """End processes that still run: they are asked to, then made to."""
    for process in (alive := [process for process in processes if process.is_alive()]):
        process.terminate()
    for process in alive:
        process.join(_GRACE)
        if process.is_alive():
            process.kill()
            process.join()


@contextmanager
def _interrupts_for_us() -> Iterator[None]:
    """Ctrl-C goes to every process of a terminal: those started in here do not hear it, and this one hears it afterwards."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _train(
    connection: Any,
    verified: set[tuple[Any, ...]],
    job: Job,
    run: Callable[..., Any],
    after: Callable[[Any], None] | None,
) -> None:
    """What the process of a run does."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(job.environment)
    episodes.VERIFIED |= verified
    out, err = io.StringIO(), io.StringIO()
    error = None
    try:
        signal.signal(signal.SIGTERM, _interrupt)  # files and environments are closed before the process ends
        connection.send(("training",))
        with redirect_stdout(out), redirect_stderr(err):  # neither is a terminal, so no bars are drawn
            ended = run(job.config, job.path, resume=job.resume)
            connection.send(("scoring",))
            if after is not None:
                after(ended)
    except KeyboardInterrupt:
        return
    except Exception as caught:
        error = _portable(caught)
    connection.send(("ended", error, out.getvalue(), err.getvalue()))


def _portable(error: Exception) -> Exception:
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
