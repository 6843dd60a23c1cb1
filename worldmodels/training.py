"""The training loop: it knows nn.Module, not which."""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from . import checkpoints
from .errors import UserError
from .logging import SECONDS, RunLog
from .ranges import AT_LEAST_ONE, NOT_NEGATIVE, Range, check_ranges

Model = TypeVar("Model", bound=nn.Module)
Losses = Callable[[nn.Module, torch.Generator], dict[str, Tensor]]
"""A batch drawn and put through a model: scalars by name, "loss" the one to minimise."""


@runtime_checkable
class Annealed(Protocol):
    """A module in which something changes in the course of training."""

    def anneal(self, done: float) -> None:
        """Called before every step with the share of the training's steps that are done, 0 to 1."""
        ...


@dataclass
class TrainerSettings:
    """How long and how fast; the defaults are C-SWM's.

    Args:
        steps: gradient steps.
        batch_size: transitions a step, over all processes; of a task sequences.
        window: transitions in a row that are drawn together; above 1 the model is trained on sequences.
        imagine: within a window, predict each step from the prediction before it.
        starts_per_episode: windows of one episode drawn together; a negative from the same episode needs at least 2.
        learning_rate: of Adam.
        warmup_steps: steps over which the learning rate rises from 0.
        schedule: "constant", "cosine" down to 0 at the last step, or "halving" every ``halve_every`` steps.
        halve_every: steps after which the schedule "halving" halves the learning rate.
        clip_norm: largest norm of the gradient; 0 for no limit.
        log_every: steps between two lines of metrics.
        evaluate_every: steps between two short evaluations; 0 for none.
        evaluate_episodes: test episodes a short evaluation uses; of a task test sequences.
        checkpoint_every: steps between two checkpoints; the last step always has one.
        accelerator: "cpu", "cuda", or "auto": a GPU if there is one.
        precision: "32-true" or "bf16-mixed".
        tf32: let matrix products on a GPU use TF32.
        threads: CPU threads. One is kind to other work, and small tensors are hardly faster on several; 0 leaves torch's
            choice, as many as there are cores, which on a busy machine can be many times slower.
    """

    steps: Annotated[int, AT_LEAST_ONE] = 10_000
    batch_size: Annotated[int, AT_LEAST_ONE] = 1024
    window: Annotated[int, AT_LEAST_ONE] = 1
    imagine: bool = False
    starts_per_episode: Annotated[int, AT_LEAST_ONE] = 1
    learning_rate: Annotated[float, Range(above=0, most=10)] = 5e-4
    warmup_steps: Annotated[int, NOT_NEGATIVE] = 0
    schedule: str = "constant"
    halve_every: Annotated[int, AT_LEAST_ONE] = 10_000
    clip_norm: Annotated[float, NOT_NEGATIVE] = 0.0
    log_every: Annotated[int, AT_LEAST_ONE] = 50
    evaluate_every: Annotated[int, NOT_NEGATIVE] = 0
    evaluate_episodes: Annotated[int, AT_LEAST_ONE] = 500
    checkpoint_every: Annotated[int, AT_LEAST_ONE] = 1000
    accelerator: str = "auto"
    precision: str = "32-true"
    tf32: bool = False
    threads: Annotated[int, Range(0, 1024)] = 1


def learning_rate(step: int, settings: TrainerSettings) -> float:
    """The learning rate of a step: linear warm-up, then constant, halved again and again, or a half cosine down to 0."""
    warm = min(1.0, (step + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
    if settings.schedule == "constant":
        return settings.learning_rate * warm
    if settings.schedule == "halving":
        return settings.learning_rate * warm * 0.5 ** (step // settings.halve_every)
    return settings.learning_rate * warm * 0.5 * (1.0 + math.cos(math.pi * step / settings.steps))


def use_threads(number: int) -> None:
    """Compute on so many CPU threads, not more than there are cores; with 0 on as many as before."""
    if number:
        torch.set_num_threads(min(number, os.cpu_count() or 1))


@contextmanager
def flushing_denormals() -> Iterator[None]:
    """Within it numbers closer to zero than 1e-38 are zero on the CPU, where they cost a hundred times what others do.

    They come up wherever a softmax is sure of itself; no sum in which there is anything larger changes.
    """
    before = float(torch.tensor(1e-38) * 0.1) == 0.0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def make_fabric(accelerator: str = "auto", precision: str = "32-true") -> Any:
    """Lightning Fabric on one device, or on the processes that torchrun started; see ``TrainerSettings``.

    It is imported here, because that takes seconds that commands which do not train need not wait.

    Raises:
        UserError: an accelerator or a precision that is not available.
    """
    from lightning_fabric import Fabric

    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    nodes = int(os.environ.get("WORLD_SIZE", 1)) // local
    if accelerator == "auto":  # a Mac's own accelerator has no float64, which drawing batches and ranks need
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    if accelerator not in ("cpu", "cuda") or (accelerator == "cuda" and not torch.cuda.is_available()):
        raise UserError(f"trainer.accelerator={accelerator} is not available here; use auto or cpu")
    if precision not in ("32-true", "bf16-mixed"):
        raise UserError(f"trainer.precision={precision}; expected 32-true or bf16-mixed")
    fabric = Fabric(
        accelerator=accelerator,
        devices=local,
        num_nodes=nodes,
        strategy="ddp" if local * nodes > 1 else "auto",
        precision=precision,  # type: ignore[arg-type]
    )
    fabric.launch()
    return fabric


@flushing_denormals()
def fit(
    model: Model,
    losses: Losses,
    settings: TrainerSettings,
    run: Path,
    *,
    fabric: Any,
    seed: int,
    tag: str,
    unit: str,
    evaluate: Callable[[Model], dict[str, float]] | None = None,
    resume: bool = False,
    quiet: bool = False,
) -> Model:
    """The loop of every training: minimise a loss, writing metrics and checkpoints into a run folder.

    Args:
        model: the model; it moves to the device of ``fabric``.
        losses: called at every step with the model as Fabric wraps it and the generator all draws come from; returns
            scalars by name, of which "loss" is minimised.
        settings: how long and how fast.
        run: the run's folder.
        fabric: from ``make_fabric``.
        seed: of the generator and the model's own noise.
        tag: what the names of the losses begin with in the logs, like "wm".
        unit: what ``settings.batch_size`` counts, for the name of the speed.
        evaluate: called every ``evaluate_every`` steps; what it returns is logged.
        resume: go on from the folder's last checkpoint, exactly as if the run had never stopped.
        quiet: no progress bar.

    Returns:
        The trained model.

    Raises:
        UserError: settings that cannot work, a loss that is not finite.
    """
    check_settings(settings, fabric.world_size)
    use_threads(settings.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = settings.tf32
    device = fabric.device
    torch.manual_seed(seed * 1_000_003 + fabric.global_rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    wrapped, optimizer = fabric.setup(model, optimizer)
    generator = torch.Generator(device).manual_seed(seed * 1_000_003 + 500_009 + fabric.global_rank)
    step = since = 0  # since: the step of the last line of averages
    totals = torch.zeros((), device=device)  # of every loss and the gradient's norm since then
    if resume:
        restored = checkpoints.restore(run, model, fabric.global_rank, fabric.world_size)
        if restored is not None:
            step, state = restored
            with checkpoints.reading(checkpoints.folder(run, step)):
                optimizer.load_state_dict(state["optimizer"])
                generator.set_state(state["batches"])
                checkpoints.set_random_states(state)
                totals, since = state.get("totals", totals).to(device), int(state.get("since", step))
    annealed = [module for module in model.modules() if isinstance(module, Annealed)]
    log = RunLog(run, step, settings.steps, quiet=quiet) if fabric.is_global_zero else None
    first_bad = torch.full((), -1, dtype=torch.int64, device=device)
    model.train()
    clock, clocked = time.perf_counter(), step
    begun = clock - (log.seconds if log is not None else 0.0)  # moved on by evaluations, which are not training time
    try:
        while step < settings.steps:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, settings)
            for module in annealed:
                module.anneal(step / settings.steps)
            optimizer.zero_grad(set_to_none=True)
            values = losses(wrapped, generator)
            fabric.backward(values["loss"])
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm or math.inf)
            optimizer.step()
            step += 1
            measured = torch.stack([*values.values(), norm]).detach().float()
            bad = ~torch.isfinite(measured).all() & (first_bad < 0)
            first_bad = torch.where(bad, step, first_bad)
            totals = totals + measured
            at_end = step == settings.steps
            if step % settings.log_every == 0 or step % settings.checkpoint_every == 0 or at_end:
                _refuse_non_finite(int(first_bad), run)
            if log is not None and (step % settings.log_every == 0 or at_end):
                means = (totals / (step - since)).tolist()
                rate = (step - clocked) * settings.batch_size / (time.perf_counter() - clock)
                names = (f"{tag}/{name}" for name in (*values, "gradient_norm"))
                line = dict(zip(names, means, strict=True))
                line["train/learning_rate"] = learning_rate(step - 1, settings)
                spent = time.perf_counter() - begun
                log.write(step, line | {f"time/{unit}_per_second": rate, SECONDS: spent})
            if step % settings.log_every == 0:
                totals = torch.zeros((), device=device)
                clock, clocked = time.perf_counter(), step
                since = step
            if evaluate is not None and settings.evaluate_every and (step % settings.evaluate_every == 0 or at_end):
                paused = time.perf_counter()
                if log is not None:
                    log.write(step, evaluate(model))
                model.train()
                fabric.barrier()
                paused = time.perf_counter() - paused
                clock, begun = clock + paused, begun + paused
            if step % settings.checkpoint_every == 0 or at_end:  # after the evaluation, which a kill then repeats
                state = {"optimizer": optimizer.state_dict(), "batches": generator.get_state()}
                state |= {"totals": totals, "since": since} | checkpoints.random_states(device)
                checkpoints.save(run, step, model, state, fabric)
            if log is not None:
                log.advance(step)
    finally:
        if log is not None:
            log.close()
    return model


def check_settings(settings: TrainerSettings, processes: int = 1) -> None:
    """Refuse settings that no training can work with."""
    if settings.schedule not in ("constant", "cosine", "halving"):
        raise UserError(f"trainer.schedule is {settings.schedule!r}; expected 'constant', 'cosine' or 'halving'")
    check_ranges("trainer", TrainerSettings, vars(settings))
    if settings.batch_size % processes:
        raise UserError(f"trainer.batch_size={settings.batch_size} is no multiple of the {processes} processes")


def _refuse_non_finite(first_bad: int, run: Path) -> None:
    if first_bad >= 0:
        last = checkpoints.latest(run)
        kept = f"the last good checkpoint is {last}" if last else "no checkpoint was written before it"
        raise UserError(
            f"the loss or its gradient was not finite at step {first_bad}; {kept}. Lower trainer.learning_rate or set "
            "trainer.clip_norm=1"
        )
