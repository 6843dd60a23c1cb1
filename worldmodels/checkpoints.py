"""Checkpoints: written aside and renamed, weights as safetensors, the rest as JSON and plain tensors.

``run/checkpoints/step_000001000/`` holds model.safetensors, trainer_<rank>.pt and meta.json. No pickle is ever executed:
trainer state is read with ``weights_only=True``.
"""

import io
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn

from .errors import UserError

FORMAT = "worldmodels checkpoint"
VERSION = 1
KEEP = 2


def write_aside(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: aside first, flushed to disk, then renamed."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with aside.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def folder(run: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run / "checkpoints" / f"step_{step:012d}"


def latest(run: Path) -> Path | None:
    """The newest whole checkpoint of a run, or None."""
    whole = [path for path in (run / "checkpoints").glob("step_*") if (path / "meta.json").is_file()]
    return max(whole, default=None)


def step_of(checkpoint: Path) -> int:
    """The gradient steps after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix("step_"))


def random_states(device: torch.device) -> dict[str, Any]:
    """Where torch's own generators stand, on the host and on the device."""
    noise = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {"noise": torch.get_rng_state(), "device_noise": noise}


def set_random_states(state: dict[str, Any]) -> None:
    """Bring torch's own generators to where ``random_states`` found them."""
    torch.set_rng_state(state["noise"])
    if state["device_noise"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["device_noise"])


def _first_names(model: nn.Module) -> dict[str, str]:
    """Of every weight the first name it has in the model; modules that share a weight know it by several."""
    first: dict[Any, str] = {}
    names = {}
    for name, value in model.state_dict().items():
        same = (value.data_ptr(), value.shape, value.stride()) if value.numel() else name
        names[name] = first.setdefault(same, name)
    return names


def save(run: Path, step: int, model: nn.Module, state: dict[str, Any], fabric: Any = None) -> None:
    """Write the checkpoint of a step; every process calls it, the first one renames it into place.

    An interruption at any point leaves the checkpoints written before as they were.

    Args:
        run: the run's folder.
        step: the step.
        model: whose weights are written.
        state: of this process, everything else needed to go on: tensors and plain values only.
        fabric: Lightning Fabric's, of several processes; None for one.
    """
    rank, processes = (fabric.global_rank, fabric.world_size) if fabric else (0, 1)
    wait = fabric.barrier if fabric else lambda: None
    target = folder(run, step)
    aside = target.with_name(f".{target.name}.partial")
    if rank == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    wait()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_aside(aside / f"trainer_{rank}.pt", buffer.getvalue())
    wait()
    if rank == 0:
        values = model.state_dict()
        weights = {name: values[name].detach().contiguous() for name in set(_first_names(model).values())}
        write_aside(aside / "model.safetensors", safetensors.torch.save(dict(sorted(weights.items()))))
        meta = {"format": FORMAT, "version": VERSION, "step": step, "processes": processes}
        write_aside(aside / "meta.json", json.dumps(meta).encode())
        shutil.rmtree(target, ignore_errors=True)
        aside.rename(target)
        for old in sorted((run / "checkpoints").glob("step_*"))[:-KEEP]:
            shutil.rmtree(old, ignore_errors=True)
    wait()


def read_meta(path: Path) -> dict[str, Any]:
    """The meta data of a checkpoint folder.

    Raises:
        UserError: not a checkpoint of ours.
    """
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a checkpoint of worldmodels ({error}); give a run folder of ours") from error
    known = isinstance(meta, dict) and meta.get("format") == FORMAT and meta.get("version") == VERSION
    if not known or not {"step", "processes"} <= set(meta):
        raise UserError(f"{path} is a checkpoint of another program or release; expected {FORMAT} version {VERSION}")
    return meta


def load_weights(path: Path, model: nn.Module) -> None:
    """Put a checkpoint's weights into a model of the same shape.

    Raises:
        UserError: damaged, or made by another model.
    """
    read_meta(path)
    try:
        weights = safetensors.torch.load_file(path / "model.safetensors")
        model.load_state_dict({name: weights[first] for name, first in _first_names(model).items() if first in weights})
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path / 'model.safetensors'} cannot be read ({error}); use an older checkpoint") from error
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip() if "\n" in str(error) else str(error)
        raise UserError(f"{path} was made by another model than its config.yaml says: {first}") from error


def restore(run: Path, model: nn.Module, rank: int = 0, processes: int = 1) -> tuple[int, dict[str, Any]] | None:
    """Bring a model back to the newest checkpoint; returns its step and this process's state, None if there is none.

    Args:
        run: the run's folder.
        model: takes the weights.
        rank: of this process.
        processes: how many there are.

    Raises:
        UserError: damaged or foreign, or written by another number of processes.
    """
    path = latest(run)
    if path is None:
        return None
    meta = read_meta(path)
    if meta["processes"] != processes:
        raise UserError(
            f"{path} was written by {meta['processes']} processes, here are {processes}; resume with as many"
        )
    load_weights(path, model)
    file = path / f"trainer_{rank}.pt"
    if not file.is_file():
        raise UserError(f"{file} is missing; the checkpoint is damaged")
    with reading(file), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about foreign files; the error says it in one line
        return int(meta["step"]), torch.load(file, map_location="cpu", weights_only=True)


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turn what a damaged or foreign trainer state raises, when it is read and when it is used, into one line.

    Raises:
        UserError: naming the file.
    """
    try:
        yield
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError, TypeError) as error:
        raise UserError(
            f"{file} cannot be read ({type(error).__name__}); it is damaged or not ours, or from another kind of device"
        ) from error
