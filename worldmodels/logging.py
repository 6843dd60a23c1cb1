"""What a run writes while it works: metrics.jsonl, TensorBoard events and a progress bar."""

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from multiprocessing.process import parent_process
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .checkpoints import write_aside
from .errors import UserError

METRICS = "metrics.jsonl"
_LARGEST = 1 << 30  # bytes of it
SECONDS = "time/training_seconds"  # spent so far, before and after a resume, without evaluations
_PAUSE = 10.0  # seconds at least between two lines where there is no bar


def progress_bar(description: str) -> Progress:
    """A progress bar with count, speed and time left; it draws nothing where output is no terminal.

    Args:
        description: before the bar; it may name fields of a row, like "{task.description}".
    """
    return Progress(
        TextColumn(description),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=False,
    )


def read_metrics(run: Path, *, last: int | None = None) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; a line cut short, by a kill or being written, is left out.

    Args:
        run: the run's folder.
        last: read only so many bytes at the end.

    Raises:
        UserError: the file is far larger than any of ours.
    """
    lines = []
    if (run / METRICS).is_file():
        with (run / METRICS).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if last is None and size > _LARGEST:
                raise UserError(f"{run / METRICS} has {size:,} bytes, more than a training writes; it is damaged")
            file.seek(max(0, size - last) if last is not None else 0)
            written = file.read()
        for line in written.splitlines():
            try:
                values = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(values, dict) and isinstance(values.get("step"), int):
                lines.append(values)
    return lines


def note(values: Mapping[str, Any]) -> str | None:
    """A line of metrics in few words, like "loss 0.12, 3,000 transitions/s"; None of a line that is not of training."""
    headlines = (("rollout/success_rate", "success"), ("rollout/ep_rew_mean", "return"), ("/loss", "loss"))
    told = [(what, v) for end, what in headlines for name, v in values.items() if name.endswith(end)]
    speed = [(name, value) for name, value in values.items() if name.endswith("_per_second")]
    if not told or not speed:
        return None
    unit = speed[0][0].removeprefix("time/").removesuffix("_per_second")
    return f"{told[0][0]} {told[0][1]:.4g}, {speed[0][1]:,.0f} {unit}/s"


class RunLog:
    """Writes metrics of a run; what lies after ``step``, from before a kill, is cut off.

    Where no bar can be drawn, in a notebook or a log, lines of training are said instead, one in ten seconds and the last. A
    process of a sweep says nothing: the one that started it does.

    Args:
        run: the run's folder.
        step: the step the run starts or resumes from.
        steps: the step it ends at.
        quiet: no progress bar, and no lines.
    """

    def __init__(self, run: Path, step: int, steps: int, *, quiet: bool = False):
        from torch.utils.tensorboard import SummaryWriter  # half a second that only training needs

        kept = [line for line in read_metrics(run) if line["step"] <= step]
        spent = (line.get(SECONDS) for line in reversed(kept))
        self.seconds = float(next((s for s in spent if isinstance(s, (int, float))), 0.0))
        run.mkdir(parents=True, exist_ok=True)
        write_aside(run / METRICS, "".join(json.dumps(line) + "\n" for line in kept).encode())
        self._file = (run / METRICS).open("a", encoding="utf-8")
        self._board = SummaryWriter(str(run), purge_step=step + 1)
        self._progress = progress_bar("training")
        self._lines = self._progress.disable and not quiet and parent_process() is None
        self._steps, self._said = steps, -math.inf
        self._progress.disable |= quiet
        self._progress.start()
        self._task = self._progress.add_task("", total=steps, completed=step, note="")

    def write(self, step: int, values: dict[str, float]) -> None:
        """One line of metrics at a step."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
        if told := note(values):
            self._progress.update(self._task, note=told)
            if self._lines and (step >= self._steps or time.monotonic() - self._said >= _PAUSE):
                self.say(f"step {step:,} of {self._steps:,}: {told}")
                self._said = time.monotonic()

    def advance(self, step: int) -> None:
        """Move the progress bar."""
        self._progress.update(self._task, completed=step)

    def say(self, line: str) -> None:
        """A line for the user, above the bar."""
        self._progress.console.print(f"worldmodels: {line}", highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Close files and the bar."""
        self._progress.stop()
        self._board.close()
        self._file.close()
