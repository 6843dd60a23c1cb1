"""Episodes from other people's files."""

from pathlib import Path

import numpy as np

from ..errors import UserError, first_line
from .episodes import Episodes, EpisodesWriter


def import_cswm(
    file: str | Path, path: str | Path, *, action_size: int, actions_per_object: int | None = None
) -> Episodes:
    """Convert a data set of C-SWM's format: one HDF5 group per episode with "obs", "action" and "next_obs".

    Pictures there are floats in [0, 1] with channels first; ours are bytes with channels last, which is exact for
    everything drawn with 8-bit colours. Groups are read in the order of their numbers (the authors' own loader reads
    them in the order of their names: 0, 1, 10, 100 ...).

    Args:
        file: the HDF5 file.
        path: folder to write.
        action_size: number of actions, which the format does not tell; 20 for Shapes and Cubes with five objects.
        actions_per_object: 4 for Shapes and Cubes; None where actions do not belong to objects (Atari, balls).

    Raises:
        UserError: h5py is missing, the file cannot be read, or it is of another format.
    """
    try:
        import h5py
    except ModuleNotFoundError as error:
        raise UserError("reading HDF5 needs the extra 'data'; run pip install '.[data]' in the checkout") from error
    if action_size < 1:
        raise UserError("action_size= is missing: the format does not say how many actions there are (20 for Shapes)")
    file = Path(file)
    action: dict[str, object] = {"kind": "discrete", "sizes": [action_size]}
    if actions_per_object is not None:
        action["per_object"] = actions_per_object
    about = {"env_id": None, "source": file.name, "format": "c-swm", "action": action}
    try:
        with h5py.File(file, "r") as episodes, EpisodesWriter(path, about) as writer:
            if not episodes or not all(name.isdigit() for name in episodes):
                raise UserError(f"{file} is HDF5, but its groups are not numbered episodes as C-SWM writes them")
            for name in sorted(episodes, key=int):
                writer.append(_episode(f"{file}, episode {name}", episodes[name], action_size))
    except OSError as error:
        if isinstance(error, FileNotFoundError) or not error.errno:
            raise UserError(f"{file} cannot be read as HDF5 ({first_line(error)})") from error
        raise
    return Episodes.load(path, verify=False)


def _episode(where: str, group: object, action_size: int) -> dict[str, np.ndarray]:
    try:
        obs, action, next_obs = (np.asarray(group[key]) for key in ("obs", "action", "next_obs"))  # type: ignore[index]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{where} lacks 'obs', 'action' or 'next_obs'") from error
    action = action.reshape(len(obs), -1)[:, 0].astype(np.int64) if len(obs) else action
    if len(obs) == 0 or obs.shape != next_obs.shape or obs.ndim != 4 or len(action) != len(obs):
        raise UserError(
            f"{where}: obs {obs.shape}, action {action.shape}, next_obs {next_obs.shape} do not fit together"
        )
    if action.min() < 0 or action.max() >= action_size:
        raise UserError(
            f"{where}: actions reach {int(action.max())}; action_size={action_size} allows up to {action_size - 1}"
        )
    if not np.array_equal(obs[1:], next_obs[:-1]):
        raise UserError(f"{where}: next_obs of a step is not obs of the next one; it is no single episode")
    frames = np.concatenate([obs, next_obs[-1:]])
    if frames.min() < 0.0 or frames.max() > 1.0:
        raise UserError(f"{where}: pixels reach from {frames.min()} to {frames.max()}; expected 0 to 1")
    rows = len(frames)
    return {
        "observations": np.rint(frames * 255.0).astype(np.uint8).transpose(0, 2, 3, 1),
        "actions": np.concatenate([action, np.zeros(1, np.int64)]),
        "rewards": np.zeros(rows, np.float32),
        "terminated": np.zeros(rows, bool),
        "truncated": np.arange(rows) == rows - 2,
    }
