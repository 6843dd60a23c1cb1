"""Checkpoints: written aside and renamed, weights as safetensors, the rest as JSON and plain tensors.

``run/checkpoints/step_000001000/`` holds model.safetensors, trainer_<rank>.pt and meta.json, which holds the checksums of the
others and its own. ``checkpoints/newest`` says which was written last, so that a missing one is noticed. No pickle is ever
executed: trainer state is read with ``weights_only=True``.
"""

import io
import json
import os
import pickle
import re
import shutil
import stat
import sys
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import yaml
from safetensors import SafetensorError
from torch import nn

from .errors import UserError

FORMAT = "worldmodels checkpoint"
VERSION = 2
WITHOUT_CHECKSUMS = 1  # the version before, which is still read
KEEP = 2
NEWEST = "newest"
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, where PyYAML was built with it: seven times as fast
_INSTEAD = "remove this checkpoint to use the one before it"


def write_aside(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: aside first, flushed to disk, then renamed. Links are replaced, not followed."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    aside.unlink(missing_ok=True)  # of a killed process that had this number, or a link that leads elsewhere
    try:
        with aside.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def read_plain(file: Path, most: int = 1 << 36) -> bytes:
    """What a file of a folder holds that may be from anyone: no link, device or pipe, and not more than so many bytes.

    Raises:
        OSError: it cannot be read, or is none of that.
    """
    about = file.lstat()
    if not stat.S_ISREG(about.st_mode):
        raise OSError(f"{file.name} is no plain file")
    if about.st_size > most:
        raise OSError(f"{file.name} has {about.st_size:,} bytes")
    return file.read_bytes()


def folder(run: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run / "checkpoints" / f"step_{step:012d}"


def latest(run: Path) -> Path | None:
    """The newest whole checkpoint of a run, or None."""
    whole = [path for path in (run / "checkpoints").glob("step_" + 12 * "[0-9]") if (path / "meta.json").is_file()]
    return max(whole, default=None)


def newest(run: Path) -> Path | None:
    """``latest``, said aloud if it is not the one that was written last.

    Raises:
        UserError: checkpoints were written, and none is left.
    """
    found, pointer = latest(run), run / "checkpoints" / NEWEST
    written = read_plain(pointer, 100).decode(errors="replace") if pointer.is_file() else ""
    if not re.fullmatch(r"step_\d{12}", written):
        return found
    if found is None:
        raise UserError(f"{run / 'checkpoints' / written} is missing, and so are all before it; start a new run")
    if written > found.name:
        print(f"worldmodels: {run / 'checkpoints' / written} is missing; this is {found.name}", file=sys.stderr)
    return found


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
        files = {file.name: _checksum(file.read_bytes()) for file in sorted(aside.iterdir())}
        meta = {"format": FORMAT, "version": VERSION, "step": step, "processes": processes, "files": files}
        meta["run"] = _owner(run)
        write_aside(aside / "meta.json", json.dumps(meta | {"checksum": checksum_of(meta)}).encode())
        shutil.rmtree(target, ignore_errors=True)
        aside.rename(target)
        write_aside(target.with_name(NEWEST), target.name.encode())
        for old in sorted((run / "checkpoints").glob("step_*"))[:-KEEP]:
            shutil.rmtree(old, ignore_errors=True)
    wait()


def _checksum(data: bytes) -> str:
    """CRC-32, which finds damage nine times as fast as SHA-256; neither keeps out who can write the folder."""
    return f"{zlib.crc32(data):08x}"


def checksum_of(said: dict[str, Any]) -> str:
    """Of all that a JSON file says but its "checksum"."""
    return _checksum(json.dumps({key: said[key] for key in said if key != "checksum"}, sort_keys=True).encode())


def _owner(run: Path) -> str | None:
    """The checksum of what makes a run: its config, but where data lie, how long it trains, how it is scored and shown."""
    try:
        config = yaml.load(read_plain(run / "config.yaml", 1 << 17), _Loader)
        made = {key: value for key, value in config.items() if key not in ("data", "trainer", "evaluation", "logger")}
        return _checksum(json.dumps(made, sort_keys=True).encode())
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError):
        return None


def weights_checksum(checkpoint: Path) -> str | None:
    """The checksum of a checkpoint's weights as it says; None of one from before there were checksums."""
    weights = read_meta(checkpoint).get("files", {}).get("model.safetensors")
    return None if weights is None else str(weights)


def read_meta(path: Path) -> dict[str, Any]:
    """The meta data of a checkpoint folder.

    Raises:
        UserError: not a checkpoint of ours, or a damaged one.
    """
    try:
        meta = json.loads(read_plain(path / "meta.json", 1 << 20))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a checkpoint of worldmodels ({error}); give a run folder of ours") from error
    known = (
        isinstance(meta, dict) and meta.get("format") == FORMAT and meta.get("version") in (VERSION, WITHOUT_CHECKSUMS)
    )
    if not known or not {"step", "processes"} <= set(meta):
        raise UserError(f"{path} is a checkpoint of another program or release; expected {FORMAT} version {VERSION}")
    whole = meta["version"] == WITHOUT_CHECKSUMS or (
        meta.get("checksum") == checksum_of(meta) and isinstance(meta.get("files"), dict)
    )
    if not whole or meta["step"] != step_of(path):
        raise UserError(f"{path / 'meta.json'} does not match its checksum or its folder: it is damaged; {_INSTEAD}")
    return meta


def _read(path: Path, name: str, meta: dict[str, Any], most: int = 1 << 36) -> bytes:
    """A file of a checkpoint, as it was written, of so many bytes at most.

    Raises:
        UserError: it is not.
    """
    try:
        data = read_plain(path / name, most)
    except OSError as error:
        raise UserError(f"{path / name} cannot be read ({error}); {_INSTEAD}") from error
    if meta["version"] != WITHOUT_CHECKSUMS and meta["files"].get(name) != _checksum(data):
        raise UserError(f"{path / name} does not match its checksum: it is damaged, or of another run; {_INSTEAD}")
    return data


def load_weights(path: Path, model: nn.Module) -> None:
    """Put a checkpoint's weights into a model of the same shape.

    Raises:
        UserError: damaged, not finite, or made by another model.
    """
    meta = read_meta(path)
    if meta.get("run") not in (None, _owner(path.parents[1])):
        raise UserError(f"{path} is of another run than {path.parents[1] / 'config.yaml'}, or this was edited since")
    most = sum(weight.nbytes for weight in model.state_dict().values()) + (1 << 24)  # and the names
    data = _read(path, "model.safetensors", meta, most)
    try:
        weights = safetensors.torch.load(data)
        spoilt = [name for name, w in weights.items() if w.is_floating_point() and not bool(torch.isfinite(w).all())]
        if spoilt:
            raise UserError(f"{path / 'model.safetensors'} has weights that are not finite ({spoilt[0]}); {_INSTEAD}")
        first_names = _first_names(model)
        if foreign := sorted(set(weights) - set(first_names.values())):
            raise UserError(f"{path} was made by another model than its config.yaml says: it has {foreign[0]}")
        model.load_state_dict({name: weights[first] for name, first in first_names.items() if first in weights})
    except SafetensorError as error:
        raise UserError(f"{path / 'model.safetensors'} cannot be read ({error}); {_INSTEAD}") from error
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
    path = newest(run)
    if path is None:
        return None
    meta = read_meta(path)
    if meta["processes"] != processes:
        raise UserError(
            f"{path} was written by {meta['processes']} processes, here are {processes}; resume with as many"
        )
    load_weights(path, model)
    name = f"trainer_{rank}.pt"
    data = _read(path, name, meta)
    with reading(path / name), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about foreign files; the error says it in one line
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        moments = state.get("optimizer", {}).get("state", {})
        finite = all(
            torch.isfinite(one).all() for of in moments.values() for one in of.values() if torch.is_tensor(one)
        )
    if not finite:
        raise UserError(f"{path / name} has an optimizer's state that is not finite; {_INSTEAD}")
    return int(meta["step"]), state


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turn what a damaged or foreign trainer state raises, when it is read and when it is used, into one line.

    Raises:
        UserError: naming the file.
    """
    try:
        yield
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{file} cannot be read ({type(error).__name__}); it is damaged or not ours, or from another kind of device"
        ) from error
